"""A locked name in the runtime directory and the socket that only the lock's holder may bind.

    <device>.lock            flocked by the service that serves the device, shared with the worker it starts
    <device>.sock            bound under that lock
    <instance>.control.lock  the same for a service's own name
    <instance>.control.sock

The lock belongs to the open file (flock(2)): the service passes it to the worker, so it stays held while either lives,
and a worker that dies leaves no moment in which another service could slip in. The file holds the service's pid, its
start time and its instance, for messages and for `--take-over`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import LockHeld, RuntimeDirectoryError
from ..fds import OwnedFd

BACKLOG = 4096  # connections that wait while a worker restarts; the kernel caps it at net.core.somaxconn
TAKE_OVER_SECONDS = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock. `started` is the process's start in clock ticks after boot (proc_pid_stat(5), field 22)."""

    instance: str
    pid: int
    started: int

    @classmethod
    def this_process(cls, instance: str) -> Owner:
        return cls(instance, os.getpid(), start_time(os.getpid()) or 0)


class Claim:
    """Holds the lock and the listening socket until `close`, which removes both files."""

    def __init__(self, lock: OwnedFd, lock_path: Path, listener: socket.socket, socket_path: Path) -> None:
        """Takes over both; `take` is the way in."""
        self.lock = lock
        self.listener = listener
        self._lock_path = lock_path
        self._socket_path = socket_path

    @classmethod
    def take(
        cls,
        lock_path: Path,
        socket_path: Path,
        owner: Owner,
        *,
        what: str,
        take_over: bool = False,
        shared: bool = False,
    ) -> Claim:
        """Locks, then binds and listens. `what` is the device or instance for messages.

        The socket has mode 0600, or 0666 with `shared`: the server asks who connects.

        `LockHeld` when another process has the lock; with `take_over` that process is asked to end (SIGTERM through
        its pidfd) and its end is awaited first.
        """
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(_lock(lock_path, what, take_over))
            undo.callback(_unlink, lock_path)
            try:
                os.ftruncate(lock.fileno(), 0)
                os.pwrite(lock.fileno(), json.dumps(asdict(owner)).encode(), 0)
            except OSError as error:  # the file system is full
                raise RuntimeDirectoryError(
                    path=str(lock_path), problem=f"cannot be written: {error.strerror}"
                ) from error
            listener = undo.enter_context(_listen(socket_path, shared))
            undo.pop_all()
        return cls(lock, lock_path, listener, socket_path)

    def close(self) -> None:
        """Removes the socket, then the lock's file, then lets the lock go. Idempotent.

        A process that opened the file before its removal locks a file without a name; `take` notices and starts again.
        """
        if self.lock.closed:
            return
        if _is_current(self.lock, self._lock_path):
            _unlink(self._socket_path)
            _unlink(self._lock_path)
        else:
            # Somebody removed the lock's file under us; the files with these names may be another service's by now.
            _log.error("%s was removed or replaced while it was held; files of that name are left", self._lock_path)
        self.listener.close()
        self.lock.close()


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot, None if there is no such process."""
    try:
        # The command in parentheses may hold spaces and parentheses itself; what follows the last one does not.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


@contextlib.contextmanager
def _closing(lock: OwnedFd) -> Iterator[None]:
    try:
        yield
    except BaseException:
        lock.close()
        raise


def _lock(path: Path, what: str, take_over: bool) -> OwnedFd:
    while True:
        try:
            fd = OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise RuntimeDirectoryError(path=str(path), problem=f"cannot be opened: {error.strerror}") from error
        with _closing(fd):
            try:
                fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _read_owner(fd)
                if not take_over or owner is None:
                    raise LockHeld(
                        device=what, instance=owner.instance if owner else "?", pid=owner.pid if owner else "?"
                    ) from None
                _end(owner, what)
                _await_lock(fd, what, owner)
            if _is_current(fd, path):
                return fd
        fd.close()


def _is_current(fd: OwnedFd, path: Path) -> bool:
    """False when the file was removed or replaced between its opening and its locking."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    locked = os.fstat(fd.fileno())
    return (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino)


def _read_owner(fd: OwnedFd) -> Owner | None:
    try:
        return Owner(**json.loads(os.pread(fd.fileno(), 4096, 0)))
    except (ValueError, TypeError):  # just created, or not written by us
        return None


def _end(owner: Owner, what: str) -> None:
    """Asks the holder to end and waits until it has. Never signals a pid that was merely read from the file."""
    try:
        pidfd = OwnedFd(os.pidfd_open(owner.pid))
    except ProcessLookupError:
        return
    with pidfd:
        # The pidfd names one process for good; only now can its start time be trusted to be the same process's.
        if start_time(owner.pid) != owner.started:
            return
        _log.warning("taking over %s: ending weightcached@%s, pid %d", what, owner.instance, owner.pid)
        signal.pidfd_send_signal(pidfd.fileno(), signal.SIGTERM)
        poller = select.poll()
        poller.register(pidfd.fileno(), select.POLLIN)
        if not poller.poll(TAKE_OVER_SECONDS * 1000):
            raise LockHeld(device=what, instance=owner.instance, pid=f"{owner.pid} (still there after SIGTERM)")


def _await_lock(fd: OwnedFd, what: str, owner: Owner) -> None:
    """Waits for the holder's workers, which share the lock and end when they see their service gone."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, TAKE_OVER_SECONDS)
    try:
        fcntl.flock(fd.fileno(), fcntl.LOCK_EX)
    except TimeoutError:
        raise LockHeld(
            device=what, instance=owner.instance, pid=f"{owner.pid} (ended, a worker still holds it)"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _listen(path: Path, shared: bool) -> socket.socket:
    _refuse_living(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        _unlink(path)  # stale: nobody else may bind it while the lock is held here
        mask = os.umask(0o111 if shared else 0o177)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RuntimeDirectoryError(path=str(path), problem=f"cannot be bound: {error.strerror}") from error
    return listener


def _refuse_living(path: Path) -> None:
    """`RuntimeDirectoryError` if somebody listens there: a service whose lock file was removed under it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # its queue is full
            pass
        except OSError:
            return
    problem = "is served by a service whose lock file was removed; end that service first"
    raise RuntimeDirectoryError(path=str(path), problem=problem)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
