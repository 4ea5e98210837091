"""Who owns a file descriptor is a type: `OwnedFd` owns one, `FdSet` owns several."""

from __future__ import annotations

import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator


class OwnedFd:
    """Owns one descriptor from construction until `close` or `steal`.

    Closing is idempotent. Using it afterwards is a `ValueError`. An object that is dropped while it still owns its
    descriptor closes it and warns (`ResourceWarning`), so that a leak shows in tests and does not grow in production.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        if fd < 0:
            raise ValueError(f"not a descriptor: {fd}")
        self._fd = fd

    def fileno(self) -> int:
        """The number, still owned by this object."""
        if self._fd < 0:
            raise ValueError("the descriptor is closed or was handed on")
        return self._fd

    def dup(self) -> OwnedFd:
        """A second owner of the same open file, close-on-exec."""
        return OwnedFd(os.dup(self.fileno()))

    def steal(self) -> int:
        """The number; the caller owns it now."""
        fd, self._fd = self.fileno(), -1
        return fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> OwnedFd:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OwnedFd({self._fd})" if self._fd >= 0 else "OwnedFd(closed)"

    # A default argument, since the globals of modules may be gone when the interpreter ends.
    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0 and not ending():  # the end of the process closes it
            self.close()  # first: a warning may be an exception
            warnings.warn(f"descriptor {fd} was never closed", ResourceWarning, stacklevel=2)


class FdSet:
    """Owns several descriptors in order, as they came with one message."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self._owned = [OwnedFd(fd) for fd in fds]

    def __len__(self) -> int:
        return len(self._owned)

    def __iter__(self) -> Iterator[OwnedFd]:
        """The descriptors, still owned by the set."""
        return iter(self._owned)

    def steal_all(self) -> list[OwnedFd]:
        """All descriptors; the caller owns them now and the set is empty."""
        owned, self._owned = self._owned, []
        return owned

    def close(self) -> None:
        for owned in self.steal_all():
            owned.close()

    def __enter__(self) -> FdSet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def raise_descriptor_limit() -> int:
    """Raises this process's soft limit of open files to the hard one and returns it (systemd's soft one is 1024)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
