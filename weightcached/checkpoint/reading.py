"""Reading that does not stop half-way: `preadv` until every buffer is full.

Never through a mapping: a mapped file that shrinks kills its reader with SIGBUS, a `preadv` of one ends early.
"""

from __future__ import annotations

import os

from ..errors import CheckpointChanged
from .resources import read_failure


def read_fully(fd: int, path: str, views: list[memoryview], offset: int) -> None:
    """Fills the views, in order, from the file at byte `offset`; the common case is one system call.

    At most 1024 views (IOV_MAX of Linux), writable and of bytes; descriptor and views stay the caller's, and no other
    view of their memory is left behind, not even by an error. `path` is the name for errors: `CheckpointChanged` when
    the file ends before the views are full, `CheckpointError` when a read fails, `ResourceError` for lack of memory.
    """
    index = got = 0  # the first view that is not full yet, and how many of its bytes are there
    while True:
        while index < len(views) and got >= len(views[index]):
            got -= len(views[index])
            index += 1
        if index == len(views):
            return
        try:
            # Released at once: a view that an error's traceback keeps alive would forbid to unmap its memory.
            with views[index][got:] as rest:
                count = os.preadv(fd, [rest, *views[index + 1 :]], offset)
        except OSError as error:
            raise read_failure(path, f"cannot read at byte {offset}", error) from error
        if not count:  # a read may return early at a signal too, but then it has read something
            expected = offset + sum(map(len, views[index:])) - got
            found = os.fstat(fd).st_size
            raise CheckpointChanged(
                file=path, problem=f"shrank while it was read: {expected} bytes expected, {found} found"
            )
        offset += count
        got += count
