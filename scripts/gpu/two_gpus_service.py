"""A service of its own for `two_gpus.py`, and processes that attach to it. No systemd: a socket stands in for it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 600.0
ANSWER_SECONDS = 400.0


class StepFailed(Exception):
    """Something is not as it must be; the text is the whole reason."""


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise StepFailed(otherwise)


class Service:
    """``weightcached serve`` with this config, from `start` to `stop`; `kill` ends its main process at once."""

    def __init__(self, folder: Path, name: str, config: str) -> None:
        """`folder`: where its sockets and its log are; a short path, since a socket's has 107 bytes."""
        self.name = name
        self.runtime = folder / name
        self.runtime.mkdir(mode=0o700)
        self._config = folder / f"{name}.toml"
        self._config.write_text(config)
        self.log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def environ(self) -> dict[str, str]:
        """Of its processes and clients: nothing of another service that runs, nor of a launcher's ranks."""
        others = ("WEIGHTCACHED_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return {**kept, "WEIGHTCACHED_RUNTIME_DIR": str(self.runtime)}

    def start(self) -> None:
        """Starts it; see `ready`."""
        address = self.runtime.with_suffix(".notify")
        address.unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(address))
        self._is_ready = threading.Event()
        threading.Thread(target=self._listen, args=(self._notify, self._is_ready), daemon=True).start()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightcached", "serve", "--config", str(self._config)],
                env={**self.environ, "NOTIFY_SOCKET": str(address)},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def ready(self) -> None:
        """Returns when it has said that it is. `StepFailed` if it ends before, or takes more than START_SECONDS."""
        assert self._process is not None
        end = time.monotonic() + START_SECONDS
        while not self._is_ready.wait(0.2):
            require(self._process.poll() is None, f"service {self.name} ended:\n{self.last_words()}")
            require(time.monotonic() < end, f"service {self.name} is not ready after {START_SECONDS:.0f} s")

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def ctl(self, *arguments: str, code: int | None = 0) -> str:
        """What weightcachectl prints; it must exit with `code`, None: with any."""
        done = subprocess.run(
            [sys.executable, "-m", "weightcached.cli.ctl", *arguments], env=self.environ, capture_output=True, text=True
        )
        require(code in (None, done.returncode), f"weightcachectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.ctl("status", "--json", "--instance", self.name))["services"][0])

    def model(self, name: str) -> dict[str, Any]:
        return next(item for item in self.status()["models"] if item["model"] == name)

    def load(self, name: str) -> dict[str, Any]:
        """Loads a model, and its part of the status then."""
        self.ctl("load", name, "--instance", self.name)
        self.ctl("wait", name, "--timeout", str(START_SECONDS), "--instance", self.name)
        return self.model(name)

    def worker(self, device: str) -> int:
        """The pid of a device's worker; 0 while there is none."""
        return next(int(item["pid"] or 0) for item in self.status()["devices"] if item["device"] == device)

    def role(self, role: str) -> int:
        """The pid of its child with that role, as soon as there is one."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            for child in children:
                try:
                    words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if role.encode() in words:
                    return int(child)
        raise StepFailed(f"service {self.name} has no {role}")

    def kill(self) -> None:
        """SIGKILL to the main process; its workers end with it."""
        assert self._process is not None
        self._process.kill()
        self._close()

    def stop(self) -> None:
        """Ends it in order, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._close()

    def _close(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            raise StepFailed(f"service {self.name} did not end within 60 s and was killed") from error
        self._notify.shutdown(socket.SHUT_RDWR)
        self._notify.close()

    @staticmethod
    def _listen(notify: socket.socket, ready: threading.Event) -> None:
        try:
            while message := notify.recv(8192):  # descriptors that come along are closed
                if b"READY=1" in message:
                    ready.set()
        except OSError:  # closed
            return


class Ranks:
    """Processes of `two_gpus_rank.py`, one or two, those under torchrun. `close` ends them."""

    def __init__(self, folder: Path, job: dict[str, Any], service: Service, size: int, **environ: str) -> None:
        self._path = folder / "ranks.socket"
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(size)
        self._files: list[Any] = []
        self._sockets: list[socket.socket] = []
        self._log = folder / "ranks.log"
        module = [str(Path(__file__).with_name("two_gpus_rank.py")), json.dumps({**job, "socket": str(self._path)})]
        torchrun = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={size}", "--master-addr=127.0.0.1"]
        torchrun += [f"--master-port={free_port()}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *(torchrun if size > 1 else []), *module],
                env={
                    **service.environ,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder),  # torchrun leaves files there
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._accept(size)
            self.hello = self._answers()
        except BaseException:
            self.close()
            raise

    def forward(self) -> tuple[float, float]:
        """Of a rank's logits and the whole model's: the largest difference, and the least share of equal choices."""
        answers = self._ask("forward")
        return max(float(item["difference"]) for item in answers), min(float(item["agreeing"]) for item in answers)

    def end(self) -> None:
        """Ends them in order."""
        self._ask("end")
        require(self._process.wait(60) == 0, f"the ranks ended with {self._process.returncode}: {self._words()}")
        self.close()

    def close(self) -> None:
        """Kills what still runs. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        for item in (*self._files, *self._sockets, self._listener):
            item.close()

    def _accept(self, size: int) -> None:
        end = time.monotonic() + ANSWER_SECONDS
        while len(self._sockets) < size:
            if select.select([self._listener], [], [], 1.0)[0]:
                self._sockets.append(self._listener.accept()[0])
                self._sockets[-1].settimeout(ANSWER_SECONDS)
                self._files.append(self._sockets[-1].makefile("r"))
            else:
                require(self._process.poll() is None, f"a rank ended: {self._words()}")
                require(time.monotonic() < end, f"the ranks have not come: {self._words()}")

    def _ask(self, what: str) -> list[dict[str, Any]]:
        try:
            for item in self._sockets:
                item.sendall(f"{what}\n".encode())
        except OSError as error:
            raise StepFailed(f"a rank ended: {self._words()}") from error
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        try:
            lines = [item.readline() for item in self._files]
        except OSError as error:
            raise StepFailed(f"a rank ended: {self._words()}") from error
        require(all(lines), f"a rank ended: {self._words()}")
        return sorted(map(json.loads, lines), key=lambda answer: int(answer["rank"]))

    def _words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def lines(*parts: object) -> str:
    return "\n".join(map(str, parts)) + "\n"


def model(name: str, checkpoint: Path, devices: Sequence[str], *more: str) -> str:
    """The [[model]] part of a config."""
    path, where = (json.dumps(value, ensure_ascii=False) for value in (str(checkpoint), list(devices)))
    return lines("[[model]]", f'name = "{name}"', f"checkpoint = {path}", f"devices = {where}", *more)
