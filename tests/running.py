"""A real service for tests: the command itself in its own process, with a small stand-in for the service manager."""

from __future__ import annotations

import collections
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from weightcached.errors import WeightCacheError
from weightcached.paths import control_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Status

START_SECONDS = 30.0
READER = "weightcached.loader.reader_process"  # an argument of each
ROOT = Path(__file__).parents[1]


def import_path() -> str:
    """For PYTHONPATH: the repository first, then where this process finds packages beside the interpreter's own."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Asked:
    """A service as ``weightcachectl`` sees it."""

    runtime_dir: Path
    instance: str

    @property
    def log(self) -> str:
        """Everything the service and its children have written to stderr."""
        raise NotImplementedError

    def ctl(self, *arguments: str, code: int = 0) -> str:
        """Output of ``weightcachectl``, which must exit with `code`; for a failure, what it said on stderr."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "weightcached.cli.ctl", *arguments],
            env={**os.environ, "PYTHONPATH": import_path(), "WEIGHTCACHED_RUNTIME_DIR": str(self.runtime_dir)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.log}"
        return done.stdout if code == 0 else done.stderr

    def status(self) -> dict[str, Any]:
        """This service's part of ``weightcachectl status --json``, asked for from here: a process for each took longer
        than all else of many tests. What the command itself makes of it is for tests/cli."""
        control = self.runtime_dir / f"{self.instance}.control.sock"
        try:
            with Connection.open(control, client="test") as service:
                answer, fds = service.request(Status(), timeout=START_SECONDS)
                fds.close()
        except WeightCacheError as error:
            raise AssertionError(f"status: {type(error).__name__}: {error}\n{self.log}") from error
        return answer

    def model(self, name: str) -> dict[str, Any]:
        """A configured model's part of the status."""
        return next(model for model in self.status()["models"] if model["model"] == name)


class RunningService(Asked):
    """``weightcached serve`` with a config file of its own; what it tells systemd is collected in `messages`.

    Messages are taken as they come. What they carry is closed, and what is about the descriptor store is not collected:
    a barrier is answered so, and nothing is stored (see `tests.manager` for that).

    `stop` must be called; it checks that the exit status is what was expected and that nothing is left behind.
    """

    def __init__(
        self,
        runtime_dir: Path,
        config: str,
        *,
        instance: str = "test",
        options: tuple[str, ...] = (),
        limits: dict[int, int] | None = None,
        within: tuple[str, ...] = (),
    ) -> None:
        """`limits`: hard limits to run it under, by number (``resource.RLIMIT_NOFILE``). `within`: a command that runs
        it elsewhere and becomes it, as ``ip netns exec NAME`` does."""
        self.runtime_dir = runtime_dir
        self.instance = instance
        self.messages: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="wcs-", dir="/tmp")
        self.config = Path(self._folder.name) / f"{instance}.toml"
        self.config.write_text(config)
        self._log = open(Path(self._folder.name) / "log", "w+b")  # noqa: SIM115 - closed by `stop`
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = f"{self._folder.name}/notify"
        self._notify.bind(address)
        self._arrived: collections.deque[str] = collections.deque()
        self._news, self._tell = os.pipe()  # a byte for each message that has arrived
        self._reader = threading.Thread(target=self._read, name="notify", daemon=True)
        self._reader.start()
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "weightcached", "serve", "--config", str(self.config), *options],
            env={**os.environ, "NOTIFY_SOCKET": address, "WEIGHTCACHED_RUNTIME_DIR": str(runtime_dir)},
            stdin=subprocess.DEVNULL,
            stderr=self._log,
            cwd=ROOT,
            preexec_fn=partial(_limit, limits) if limits else None,
        )

    @property
    def log(self) -> str:
        """Everything the service and its children have written to stderr."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> str:
        """The first message to systemd, past or coming, that contains `text`."""
        end = time.monotonic() + seconds
        seen = 0
        with open_pidfd(self.process.pid) as pidfd:
            while True:
                for message in self.messages[seen:]:
                    if text in message:
                        return message
                seen = len(self.messages)
                readable, _, _ = select.select([self._news, pidfd], [], [], max(end - time.monotonic(), 0))
                if self._news in readable:
                    os.read(self._news, 1)
                    self.messages.append(self._arrived.popleft())
                elif pidfd in readable:
                    raise AssertionError(f"the service ended with {self.process.wait()} before {text!r}:\n{self.log}")
                else:
                    raise AssertionError(f"no {text!r} within {seconds} s; got {self.messages}\n{self.log}")

    def ready(self) -> RunningService:
        """Waits until the service reports ready."""
        self.wait_for("READY=1")
        return self

    def wait(self) -> int:
        """The exit status, once the service has ended by itself."""
        return self.process.wait(START_SECONDS)

    def stop(self, code: int | None = 0, *, shared: bool = False) -> None:
        """Ends the service and frees what the test used. Checks the exit status, and that nothing is left behind.

        `code` None: the test has killed the service, so nothing is expected of its end. `shared`: another service uses
        the same runtime directory, whose files may stay.
        """
        try:
            children = children_of(self.process.pid)
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            found = self.process.wait(START_SECONDS)
            for pid in children:
                wait_for_end(pid)
            if code is not None:
                assert found == code, f"exit status {found}, expected {code}:\n{self.log}"
                files = [path for path in self.runtime_dir.iterdir() if path.suffix in (".sock", ".lock")]
                left = sorted(path.name for path in files if not shared or path.name.startswith(self.instance))
                assert not left, f"left in the runtime directory: {left}"
                assert "Traceback" not in self.log, self.log
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Kills what still runs and frees what the test used, without any check. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._notify.fileno() >= 0:
            self._notify.shutdown(socket.SHUT_RDWR)
            self._reader.join()
            self._notify.close()
            os.close(self._news)
            os.close(self._tell)
        self._log.close()
        self._folder.cleanup()

    @property
    def control(self) -> Path:
        return control_path(self.instance)

    def _read(self) -> None:
        while message := self._notify.recv(8192):
            if not message.startswith((b"FDSTORE", b"BARRIER")):
                self._arrived.append(message.decode())
                os.write(self._tell, b"x")


def _limit(limits: dict[int, int]) -> None:
    for number, value in limits.items():
        resource.setrlimit(number, (value, value))


class open_pidfd:
    """A pidfd for a ``with`` block: readable when the process has ended (pidfd_open(2))."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)


def wait_for_end(pid: int, seconds: float = START_SECONDS) -> None:
    """Returns when the process is gone; fails if it is not within `seconds`."""
    try:
        with open_pidfd(pid) as pidfd:
            assert select.select([pidfd], [], [], seconds)[0], f"process {pid} is still there after {seconds} s"
    except ProcessLookupError:
        return


def children_of(pid: int) -> list[int]:
    """Process ids of a process's direct children now."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def own_children(argument: str) -> list[int]:
    """Direct children of this process with that argument (`READER`): there may be others, which another test has left,
    such as Python's own resource tracker."""
    found = []
    for pid in children_of(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def process_of_role(service: RunningService, role: str, seconds: float = START_SECONDS) -> int:
    """The pid of the service's child with that role ("worker", "loader"), as soon as there is one.

    Looks again and again, since the kernel reports no event for a new child of another process; bounded by `seconds`.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for pid in children_of(service.process.pid):
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if role.encode() in arguments:
                return pid
    raise AssertionError(f"no {role} process within {seconds} s:\n{service.log}")
