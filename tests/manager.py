"""A service manager for tests: what a weightcached service needs of systemd, in a thread of this process.

It listens on a ``NOTIFY_SOCKET`` and keeps a file descriptor store as systemd 252 does: the main process alone is heard
(``NotifyAccess=main``); descriptors beyond the store's size, or sent without ``FDSTORE=1``, are closed; the start that
follows gets the store back, newest first, with ``LISTEN_FDS``; a ``BARRIER=1`` is answered when all before it is done;
a stop empties the store. Messages are handled as they come, whatever the test is doing meanwhile.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.running import START_SECONDS, Asked, import_path, open_pidfd

MARK = "WEIGHTCACHED_TEST_UNIT"  # in the environment of every process of the unit, in place of its cgroup

# Puts the store's descriptors where a service looks for them, and becomes the service: LISTEN_PID must be its pid.
HAND_OVER = """
import fcntl, os, sys
count = int(sys.argv[1])
sources = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, 3 + count) for fd in sys.argv[2 : 2 + count]]
for number, fd in enumerate(sources):
    os.dup2(fd, 3 + number)
for fd in map(int, sys.argv[2 : 2 + count]):
    if fd >= 3 + count:
        os.close(fd)
if count:
    os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[2 + count :]])
"""
_ANCILLARY = socket.CMSG_SPACE(253 * 4) + socket.CMSG_SPACE(12)


@dataclass(slots=True, eq=False)
class StoredFd:
    """One entry of the store."""

    name: str
    fd: int
    polled: bool


class Manager(Asked):
    """One unit, ``weightcached serve`` with a config file of its own. Nothing runs before `start`; `abandon` frees all.

    `messages` are those of the main process since its last start; `refused` counts what others sent.
    """

    def __init__(
        self,
        runtime_dir: Path,
        config_text: str,
        *,
        instance: str = "test",
        store_max: int = 512,
        environ: Mapping[str, str] | None = None,
        options: tuple[str, ...] = (),
        module: str = "weightcached",
    ) -> None:
        """`environ`: added to the service's environment; another PYTHONPATH there is another installed package.

        `module`: what is run in the place of ``weightcached``.
        """
        self.runtime_dir = runtime_dir
        self.instance = instance
        self.store_max = store_max
        self.environ = dict(environ or {})
        self.options = options
        self.module = module
        self.messages: list[str] = []
        self.refused = 0
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.hears_tests = False  # whether this very process counts as the main one, for tests of what a service sends
        self._mark = secrets.token_hex(8)
        self._store: list[StoredFd] = []  # newest first
        self._changed = threading.Condition()
        self._frozen = threading.Lock()
        self._drained: set[bytes] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="wcm-", dir="/tmp")
        self.config = Path(self._folder.name) / f"{instance}.toml"
        self.configure(config_text)
        self._log = open(Path(self._folder.name) / "log", "w+b")  # noqa: SIM115 - closed by `abandon`
        self.address = f"{self._folder.name}/notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.address)
        self._wake_read, self._wake_write = os.pipe()
        self._broken: BaseException | None = None  # what ended the thread: a message that no service may send
        self._thread = threading.Thread(target=self._serve, name="service manager", daemon=True)
        self._thread.start()

    # The unit.

    def configure(self, text: str) -> None:
        """Replaces the config file, which the next start or reload reads."""
        self.config.write_text(text)

    def start(self) -> Manager:
        """Starts the main process, with what the store holds. Returns at once; see `ready`."""
        assert self.process is None or self.process.poll() is not None, "it runs already"
        with self._changed:
            self.messages = []
            store = list(self._store)
            environ = {
                **os.environ,
                "PYTHONPATH": import_path(),
                "NOTIFY_SOCKET": self.address,
                "WEIGHTCACHED_RUNTIME_DIR": str(self.runtime_dir),
                MARK: self._mark,
                **self.environ,
            }
            if store:
                environ["LISTEN_FDS"] = str(len(store))
                environ["LISTEN_FDNAMES"] = ":".join(item.name for item in store)
            fds = [item.fd for item in store]
            serve = ["-P", "-m", self.module, "serve", "--config", str(self.config), *self.options]
            self.process = subprocess.Popen(
                [sys.executable, "-IS", "-c", HAND_OVER, str(len(fds)), *map(str, fds), *serve],
                env=environ,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stderr=self._log,
                cwd=self._folder.name,
            )
            self.starts += 1
        os.write(self._wake_write, b"x")
        return self

    def stop(self, code: int | None = 0) -> None:
        """As ``systemctl stop``: SIGTERM, then the store is emptied. `code`: the exit status that is expected."""
        self._end(signal.SIGTERM, code)
        self.empty_store()
        if code is not None:
            left = sorted(path.name for path in self.runtime_dir.iterdir() if path.suffix in (".sock", ".lock"))
            assert not left, f"left in the runtime directory: {left}"

    def restart(self) -> Manager:
        """As ``systemctl restart``: SIGTERM and a start; the store is kept."""
        self._end(signal.SIGTERM, 0)
        return self.start()

    def kill(self) -> None:
        """SIGKILL of the main process, then of all that is left of the unit. The store is kept for the next `start`."""
        self._end(signal.SIGKILL, -signal.SIGKILL)

    def ended(self, code: int | None = None) -> int:
        """Waits until the main process has ended by itself, and ends what is left, as ``Restart=`` does before a start.

        Returns the exit status, which must be `code` unless that is None.
        """
        return self._end(None, code)

    def processes(self) -> dict[int, list[str]]:
        """Every process of the unit now: pid -> its arguments."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self._mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or another user's
            if arguments:  # a zombie has none
                found[int(entry.name)] = arguments
        return found

    def process_of_role(self, role: str, seconds: float = START_SECONDS) -> int:
        """The pid of a process with that argument ("worker", "loader", "host-1"), as soon as there is one.

        Looks again and again, since the kernel reports no event for a new process; bounded by `seconds`.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for pid, arguments in self.processes().items():
                if role in arguments:
                    return pid
        raise AssertionError(f"no {role} process within {seconds} s:\n{self.log}")

    def abandon(self) -> None:
        """Kills what still runs and frees everything, without any check. Idempotent."""
        if self._socket.fileno() < 0:
            return
        if self.process is not None:
            self._kill_unit()
        os.close(self._wake_write)
        self._thread.join()
        os.close(self._wake_read)
        self._socket.close()
        self.empty_store()
        self._log.close()
        self._folder.cleanup()

    # What it says, and is asked.

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything that the unit has written to stderr, in all its starts."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> str:
        """The first message since the last start, past or coming, that contains `text`."""
        end = time.monotonic() + seconds
        with self._changed:
            while True:
                self._check()
                found = next((message for message in self.messages if text in message), None)
                if found is not None:
                    return found
                if self.process is None or self.process.poll() is not None:
                    raise AssertionError(f"the service ended before {text!r}:\n{self.log}")
                if not self._changed.wait(max(end - time.monotonic(), 0)) and time.monotonic() >= end:
                    raise AssertionError(f"no {text!r} within {seconds} s; got {self.messages}\n{self.log}")

    def ready(self) -> Manager:
        """Waits until the service reports ready."""
        self.wait_for("READY=1")
        return self

    # The store.

    @property
    def stored(self) -> dict[str, int]:
        """Name -> descriptor, which stays the store's."""
        with self._changed:
            return {item.name: item.fd for item in reversed(self._store)}

    def wait_stored(self, count: int, seconds: float = START_SECONDS) -> dict[str, int]:
        """`stored`, once it holds so many descriptors."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self._store) == count or self._broken, seconds)
            self._check()
            assert done, f"{[item.name for item in self._store]} stored, {count} expected:\n{self.log}"
        return self.stored

    def content(self, name_ends: str) -> bytes:
        """What is in the one stored file whose name ends so."""
        (fd,) = (fd for name, fd in self.stored.items() if name.endswith(name_ends))
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def put(self, name: str, fd: int) -> None:
        """Stores a duplicate of a descriptor, as if the service had sent it."""
        with self._changed:
            self._store.insert(0, StoredFd(name, os.dup(fd), False))
            self._changed.notify_all()

    def remove(self, name: str) -> None:
        """Closes what is stored by that name, as ``FDSTOREREMOVE=1`` does."""
        with self._changed:
            for item in [item for item in self._store if item.name == name]:
                self._store.remove(item)
                os.close(item.fd)
            self._changed.notify_all()

    def empty_store(self) -> None:
        with self._changed:
            while self._store:
                os.close(self._store.pop().fd)
            self._changed.notify_all()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """A block in which it reads no message, as a manager that is busy."""
        with self._frozen:
            yield

    # Internals.

    def _end(self, number: signal.Signals | None, code: int | None) -> int:
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        found = self.process.wait(START_SECONDS)
        self._kill_unit()
        self._drain()
        assert code is None or found == code, f"exit status {found}, expected {code}:\n{self.log}"
        assert "Traceback" not in self.log, self.log
        return found

    def _kill_unit(self) -> None:
        """What ``KillMode=mixed`` does when the main process is gone, and a start waits for."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        while pids := list(self.processes()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError), open_pidfd(pid) as pidfd:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    assert select.select([pidfd], [], [], START_SECONDS)[0], f"process {pid} cannot be killed"

    def _drain(self) -> None:
        """Returns when everything that was sent so far is handled: systemd reads messages before it reaps senders."""
        token = secrets.token_hex(8).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"DRAIN=" + token, self.address)
        with self._changed:
            done = self._changed.wait_for(lambda: token in self._drained or self._broken, START_SECONDS)
            self._check()
            assert done, "the manager is frozen"

    def _serve(self) -> None:
        try:
            self._run()
        except (AssertionError, OSError, ValueError) as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _check(self) -> None:
        if self._broken is not None:
            raise AssertionError("the service manager cannot go on") from self._broken

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._socket, select.POLLIN)
        watched: dict[int, StoredFd] = {}
        pidfd = -1
        while True:
            for fd, event in poll.poll():
                if fd == self._wake_read:
                    if not os.read(fd, 1):
                        if pidfd >= 0:
                            os.close(pidfd)
                        return
                    if pidfd >= 0:
                        poll.unregister(pidfd)
                        os.close(pidfd)
                    try:
                        pidfd = os.pidfd_open(self.pid)
                    except ProcessLookupError:  # ended and waited for, before this thread came to it
                        pidfd = -1
                        with self._changed:
                            self._changed.notify_all()
                    else:
                        poll.register(pidfd, select.POLLIN)
                elif fd == pidfd:
                    poll.unregister(pidfd)
                    os.close(pidfd)
                    pidfd = -1
                    with self._changed:
                        self._changed.notify_all()
                elif fd == self._socket.fileno():
                    with self._frozen:
                        self._receive()
                elif fd in watched and event & (select.POLLHUP | select.POLLERR):
                    with self._changed:
                        item = watched[fd]
                        if item in self._store:
                            self._store.remove(item)
                            os.close(item.fd)
                        self._changed.notify_all()
            with self._changed:
                for fd, item in list(watched.items()):
                    if item not in self._store:
                        poll.unregister(fd)
                        del watched[fd]
                for item in self._store:
                    if item.polled and item.fd not in watched:
                        poll.register(item.fd, 0)
                        watched[item.fd] = item

    def _receive(self) -> None:
        data, ancillary, flags, _ = self._socket.recvmsg(8192, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        sender = 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content)
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                sender = struct.unpack("iii", content)[0]
        left = list(fds)
        with self._changed:
            try:
                assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "a message that systemd would not take whole"
                if sender == os.getpid() and data.startswith(b"DRAIN="):
                    self._drained.add(data.removeprefix(b"DRAIN="))
                elif (self.process is not None and sender == self.process.pid) or (
                    self.hears_tests and sender == os.getpid()
                ):
                    self._handle(data.decode(), left)
                else:
                    self.refused += 1
            finally:
                for fd in left:  # what nobody has taken; a barrier's end among them
                    os.close(fd)
                self._changed.notify_all()

    def _handle(self, message: str, fds: list[int]) -> None:
        """One message; takes what it stores out of `fds`."""
        lines = message.splitlines()
        self.messages.append(message)
        if "BARRIER=1" in lines:
            assert len(lines) == 1 and len(fds) == 1, f"not alone: {message!r}, {len(fds)} fds"
            return
        name = next((line.removeprefix("FDNAME=") for line in lines if line.startswith("FDNAME=")), None)
        if name is not None and (not name or len(name) > 255 or not name.isascii() or ":" in name):
            name = None
        if "FDSTOREREMOVE=1" in lines:
            if name is not None:
                for item in [item for item in self._store if item.name == name]:
                    self._store.remove(item)
                    os.close(item.fd)
        elif "FDSTORE=1" in lines:
            while fds and len(self._store) < self.store_max:
                self._store.insert(0, StoredFd(name or "stored", fds.pop(0), "FDPOLL=0" not in lines))
