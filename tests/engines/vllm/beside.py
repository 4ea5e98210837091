"""vLLM from disk, through weightcached and through vLLM's own daemon, in one run on one GPU: a table.

    WEIGHTCACHED_VLLM_PYTHON=python python -m tests.engines.vllm.beside FOLDER [--json FILE] [--small]

Each engine is a process of its own (see `starting`), with vLLM's defaults but for `real.ENGINE`. Checkpoints of random
weights are made in FOLDER: Qwen3-shaped of 0.95 and 6.6 GB, the smaller one twice with equal headers, and a GLM4-MoE.
The time of a load is that of the loader's `load_model`, in the engine, plus what vLLM asks of it before. Memory is that
of the whole GPU by NVML, so nothing else may use it. --small: tiny checkpoints, to see whether it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.engines.vllm import real
from tests.engines.vllm.real import START_SECONDS
from tests.engines.vllm.starting import PYTHON, Started, Vllm
from tests.manager import Manager
from tests.running import ROOT
from weightcached.cli.output import print_table

TIMES = 3  # that the smaller model is attached, each way; the others once
READY = "daemon READY"
PART = ("--gpu-memory-utilization", "0.3")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wcb-", dir="/tmp") as runtime:
        os.environ["WEIGHTCACHED_RUNTIME_DIR"] = runtime
        run = Run(args.folder, Path(runtime), small=args.small)
        try:
            run.all()
        finally:
            run.close()
            print_table(["WHAT", "RESULT", "OK"], run.rows)
            if args.json:
                args.json.write_text(json.dumps(run.rows, indent=1) + "\n")
    return int(any(row[2] == "NO" for row in run.rows))


class Daemon:
    """`vllm preload` of one model, listening in a folder of its own, until `kill`."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True)
        command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "preload", "--model", str(model)]
        command += ["--weight-cache-socket-dir", str(folder), *real.ENGINE, *PART]
        self.log = folder / "log"
        self._ready = threading.Event()
        self._started = time.monotonic()
        self.seconds = 0.0
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **real.ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self) -> Daemon:
        assert self._ready.wait(START_SECONDS), f"vLLM's daemon is not ready:\n{self.log.read_text()[-4000:]}"
        assert self.seconds, f"vLLM's daemon has ended:\n{self.log.read_text()[-4000:]}"
        return self

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if READY in line:
                    self.seconds = time.monotonic() - self._started
                    self._ready.set()
        self._ready.set()


class Run:
    """All of it; `rows` grows as it goes."""

    def __init__(self, folder: Path, runtime: Path, *, small: bool) -> None:
        self.rows: list[list[str]] = []
        self._folder = folder
        self._names = ["qwen3", "llama"] if small else ["qwen3-1g", "qwen3-8g"]
        self._started = 0
        self._bytes: dict[str, int] = {}
        self._daemons: dict[str, Daemon] = {}
        self._vllm: Vllm | None = None
        self._service = Manager(runtime, 'ready = "listening"\ndevices = "all"\n')

    def all(self) -> None:
        names = [*self._names, f"{self._names[0]}:1", "glm4-moe"]
        command = [str(PYTHON), "-m", "tests.engines.vllm.checkpoints", str(self._folder), *names]
        subprocess.run(command, cwd=ROOT, check=True, timeout=START_SECONDS)
        empty = used()
        self._service.start().wait_for("READY=1", 60.0)
        self._row("service, nothing cached", f"{used() - empty:.1f} MiB of the GPU")
        for name in (*self._names, "glm4-moe"):
            self._daemons[name] = Daemon(self._path(name), self._folder / f"daemon-{name}")
        self._vllm = Vllm()
        for name, daemon in self._daemons.items():
            self._row(f"{name}: vLLM's daemon ready after", f"{daemon.ready().seconds:.1f} s")
        disk = self._compare(self._names[0], TIMES)
        self._compare("glm4-moe", 1)
        self._equal_headers(disk)
        self._compare(self._names[1], 1)
        self._at_rest(empty)
        self._two_at_once()
        self._killed(disk)

    def close(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
        if self._vllm is not None:
            self._vllm.stop()
        self._service.abandon()

    def _compare(self, name: str, times: int) -> Started:
        disk = self._start(name, "--load-format", "auto")
        self._row(f"{name}: disk", _load(disk))
        miss = self._start(name)
        self._row(f"{name}: first, publishes", _load(miss), self._tokens(miss, disk))
        hits = [self._start(name, on_miss="fail") for _ in range(times)]
        self._row(f"{name}: weightcached", "; ".join(map(_load, hits)), self._tokens(hits[-1], disk))
        self._bytes[name] = hits[-1].loads[0]["bytes"]
        theirs = [self._theirs(name, name) for _ in range(times)]
        tokens = self._tokens(theirs[-1], disk)
        self._row(f"{name}: vLLM's daemon", "; ".join(map(_load, theirs)), "tokens differ" if tokens == "NO" else "yes")
        self._row(
            f"{name}: KV cache, disk/ours/theirs", f"{disk.kv_tokens} {hits[-1].kv_tokens} {theirs[-1].kv_tokens}"
        )
        return disk

    def _equal_headers(self, first: Started) -> None:
        """vllm#59647."""
        other = f"{self._names[0]}:1"
        disk = self._start(other, "--load-format", "auto")
        assert disk.tokens != first.tokens
        ours = self._start(other)
        self._row("equal headers: weightcached", _load(ours), self._tokens(ours, disk))
        theirs = self._theirs(other, self._names[0])
        wrong = "the other checkpoint's tokens" if theirs.tokens == first.tokens else "other tokens"
        self._row("equal headers: vLLM's daemon", "right" if theirs.tokens == disk.tokens else wrong)

    def _at_rest(self, empty: float) -> None:
        """What stays beyond the weights, with no engine there."""
        with_both = used()
        for name, daemon in self._daemons.items():
            before = used()
            daemon.kill()
            taken = before - settled(before)
            beyond = taken - self._bytes[name] / 2**20
            self._row(f"{name}: vLLM's daemon", f"{taken:.0f} MiB of the GPU, {beyond:.0f} beyond the weights")
        devices = self._service.status()["devices"]
        sizes = [int(shard["nbytes"]) for device in devices for shard in device["shards"]]
        cached = sum(sizes)
        left = used() - empty - cached / 2**20
        # Memory comes in pieces of 2 MiB: each slab of a model has some to spare.
        self._row(
            "weightcached, beyond the weights",
            f"{left:.1f} MiB of the GPU for {len(sizes)} models",
            "yes" if left <= 8 * len(sizes) else "NO",
        )
        self._row("whole GPU with both", f"{with_both:.0f} MiB, {cached / 2**20:.0f} of them cached by weightcached")

    def _two_at_once(self) -> None:
        """What engines take of the GPU beside each other; each has a KV cache of one size."""
        name, before = self._names[0], used()
        assert self._vllm is not None
        with self._held(self._vllm, name, on_miss="fail"):
            one = used()
            second = Vllm()
            try:
                with self._held(second, name, on_miss="fail"):
                    two = used()
            finally:
                second.stop()
        before_disk = settled(two)
        with self._held(self._vllm, name, "--load-format", "auto"):
            disk = used() - before_disk
        weights = self._bytes[name] / 2**20
        shared = f"{one - before:.0f} and {two - one:.0f} MiB of the GPU, {disk:.0f} from disk"
        self._row(
            f"two engines, {weights:.0f} MiB of weights", shared, "yes" if two - one < disk - weights / 2 else "NO"
        )

    @contextlib.contextmanager
    def _held(self, vllm: Vllm, name: str, *arguments: str, **options: Any) -> Iterator[None]:
        """An engine that has generated, and still has all its memory inside."""
        self._started += 1
        path = self._folder / f"start-{self._started}"
        fifo = path.with_suffix(".fifo")
        os.mkfifo(fifo)
        extra = ["--extra", json.dumps(options)] if options else []
        given = (str(self._path(name)), "--generate", "--until", str(fifo), *extra, *arguments)
        with ThreadPoolExecutor(1) as pool:
            end = pool.submit(vllm.run, path, *given)
            end.add_done_callback(lambda _: os.close(os.open(fifo, os.O_RDWR)))  # if it has failed, nobody opens it
            with fifo.open("wb"):
                yield
            end.result()

    def _killed(self, disk: Started) -> None:
        self._service.kill()
        started = time.monotonic()
        self._service.start().wait_for("READY=1", 60.0)
        took = time.monotonic() - started
        again = self._start(self._names[0], on_miss="fail")
        self._row("service killed; back", f"after {took:.2f} s; {_load(again)}", self._tokens(again, disk))

    def _start(self, name: str, *arguments: str, **options: Any) -> Started:
        self._started += 1
        assert self._vllm is not None
        path = self._folder / f"start-{self._started}"
        return Started(self._vllm, self._path(name), path, *PART, *arguments, described=False, **options)

    def _theirs(self, name: str, daemon: str) -> Started:
        options = {"fallback": False, "socket_dir": str(self._daemons[daemon].folder)}
        return self._start(name, "--load-format", "ipc_cache", **options)

    def _path(self, name: str) -> Path:
        return self._folder / name.replace(":", "-")

    def _tokens(self, one: Started, other: Started) -> str:
        return "yes" if one.tokens == other.tokens else "NO"

    def _row(self, what: str, result: str, ok: str = "-") -> None:
        self.rows.append([what, result, ok])
        print(f"{what}: {result} {ok}", file=sys.stderr, flush=True)


def _load(started: Started) -> str:
    (load,) = started.loads
    return f"{load['seconds']:.3f} s + {started.external_seconds:.3f}"


def used() -> float:
    """MiB of the GPU that are taken: of the first one in CUDA_VISIBLE_DEVICES, a number or a UUID, else of number 0."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpu}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def settled(before: float) -> float:
    """As `used`, when it has changed and stays: the driver takes a moment to free what a dead process had."""
    end = time.monotonic() + 10
    last = before
    while time.monotonic() < end:
        now = used()
        if now == last and now != before:
            break
        last = now
    return last


if __name__ == "__main__":
    sys.exit(main())
