"""One open file of a checkpoint, read by whichever way suits: through the page cache, or past it.

A block that is in the page cache is copied from there. One that is not is read with O_DIRECT: no copy through the
cache, and nothing that others use is driven out of it. Where that cannot be told, or the file system refuses O_DIRECT,
the page cache serves.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from ..checkpoint.reading import read_fully
from ..checkpoint.resources import read_failure
from ..fds import OwnedFd

PAGE = 4096  # offsets, lengths and addresses of O_DIRECT are multiples of the device's logical block, 4096 at most
RESIDENT_SHARE = 0.9  # of a block's pages; few missing ones come faster by read-ahead than all of them by O_DIRECT
_SAMPLES = 8
_CACHESTAT = 451  # the number of cachestat(2) on every architecture, since Linux 6.5
_log = logging.getLogger(__name__)


class Reader:
    """Reads a file whose buffered descriptor stays the caller's; owns the one for O_DIRECT."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._direct = _reopen_direct(fd, path)
        self._refused = False

    def read(self, views: list[memoryview], offset: int, *, page_aligned: bool) -> None:
        """Fills the views from the file at byte `offset`.

        `page_aligned` promises one view that begins at a page, and an `offset` that is one: only then O_DIRECT may be
        used. Raises as `read_fully`.
        """
        direct = self._direct
        if not page_aligned or direct is None or self._refused or is_resident(self._fd, offset, len(views[0])):
            read_fully(self._fd, self._path, views, offset)
            return
        (view,) = views
        got = 0
        if whole := len(view) // PAGE * PAGE:
            try:
                with view[:whole] as pages:
                    got = os.preadv(direct.fileno(), [pages], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise read_failure(self._path, f"cannot read at byte {offset}", error) from error
                _log.debug("%s: O_DIRECT is refused, so it is read through the page cache", self._path)
                self._refused = True
        with view[got:] as rest:  # the last bytes, which are no whole page, and what a read that stopped early left
            read_fully(self._fd, self._path, [rest], offset + got)

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()


def is_resident(fd: int, offset: int, nbytes: int) -> bool:
    """Whether bytes [offset, offset + nbytes) of a file are in the page cache, as nearly as the kernel tells.

    By cachestat(2); where it is not there, by a few reads that may not wait (RWF_NOWAIT, preadv2(2)).
    """
    cached = _cached_pages(fd, offset, nbytes)
    if cached is not None:
        return cached >= RESIDENT_SHARE * -(-nbytes // PAGE)
    byte = bytearray(1)
    try:
        return all(os.preadv(fd, [byte], offset + nbytes * n // _SAMPLES, os.RWF_NOWAIT) for n in range(_SAMPLES))
    except BlockingIOError:
        return False
    except OSError:  # EOPNOTSUPP: a file system that cannot tell
        return True


class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("nr_cache", "nr_dirty", "nr_writeback", "nr_evicted", "nr_recently_evicted")
    )


@functools.cache
def _syscall() -> Callable[..., Any]:
    function: Callable[..., Any] = ctypes.CDLL(None, use_errno=True).syscall
    return function


def _cached_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """Pages of the range in the page cache, of the host's page size; None where the kernel does not say."""
    found = _Cachestat()
    asked = _Range(offset, nbytes)
    if _syscall()(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0):
        return None
    return int(found.nr_cache) * os.sysconf("SC_PAGESIZE") // PAGE


def _reopen_direct(fd: int, path: str) -> OwnedFd | None:
    """The same open file for O_DIRECT, None where its file system has none. By descriptor: the path may have moved."""
    try:
        return OwnedFd(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        _log.debug("%s: no O_DIRECT: %s", path, error.strerror)
        return None
