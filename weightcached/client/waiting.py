"""Waiting for a path to appear without polling: inotify(7) on the nearest directory above it that exists."""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

from ..errors import ConnectionFailed
from ..fds import OwnedFd

# <sys/inotify.h>
_IN_ATTRIB = 0x0004
_IN_MOVED_TO = 0x0080
_IN_CREATE = 0x0100
_IN_DELETE_SELF = 0x0400
_IN_MOVE_SELF = 0x0800
_IN_ONLYDIR = 0x0100_0000
_EVENTS = _IN_ATTRIB | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE_SELF | _IN_MOVE_SELF

_libc = ctypes.CDLL(None, use_errno=True)


class PathWatch:
    """Watches for changes on the way to `path`. Owns its inotify descriptor until `close`.

    Make it first, then look whether the path is there, then `wait`: a change between looking and waiting is not lost.
    `ConnectionFailed` when the kernel gives no watch (fs.inotify.max_user_instances).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = OwnedFd(_checked(_libc.inotify_init1(os.O_CLOEXEC), path))  # IN_CLOEXEC is O_CLOEXEC
        try:
            self._watch_nearest()
        except BaseException:
            self._fd.close()
            raise

    def fileno(self) -> int:
        """For a poll of the caller's own: readable when something has changed, and from then on."""
        return self._fd.fileno()

    def wait(self, seconds: float) -> bool:
        """Whether something changed within `seconds`. True may be a false alarm: look again."""
        poll = select.poll()
        poll.register(self._fd.fileno(), select.POLLIN)
        return bool(poll.poll(max(seconds, 0.0) * 1000))

    def close(self) -> None:
        self._fd.close()

    def __enter__(self) -> PathWatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _watch_nearest(self) -> None:
        for directory in self.path.parents:
            # A directory that is removed between two steps only moves the watch further up.
            found = _libc.inotify_add_watch(self._fd.fileno(), os.fsencode(directory), _EVENTS | _IN_ONLYDIR)
            if found >= 0:
                return
            if ctypes.get_errno() not in (2, 20):  # ENOENT, ENOTDIR
                _checked(found, self.path)
        raise ConnectionFailed(path=str(self.path), problem="no directory above it can be watched")


def _checked(result: int, path: Path) -> int:
    if result < 0:
        error = os.strerror(ctypes.get_errno())
        raise ConnectionFailed(path=str(path), problem=f"cannot be waited for: inotify says {error}")
    return result
