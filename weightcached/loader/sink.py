"""Where the bytes go that the readers read: host slabs directly, or CUDA slabs through pinned memory (`cuda_sink`).

A slab is zeros at first, so only bytes of the checkpoint are written: gaps, tails and tensors that a rank holds as
zeros cost nothing. A sink is used by one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..checkpoint.digest import BLOCK_BYTES
from .cast import cast_rows
from .plan import Copy
from .reader_process import MAX_PIECES
from .readers import Place, Region
from .ring import Ring

if TYPE_CHECKING:
    from ..shard.host import HostSlab

STAGING_BYTES = 256 << 20
MIN_STAGING_BYTES = 2 * BLOCK_BYTES
BUFFERS = 2  # per reader: one that it fills, one that the device copies from; more take longer to pin than they save


class Placed(NamedTuple):
    """Memory for one block: a buffer of the ring, taken until the copies are made even where it is not needed,
    `places` in the block's order, and the copies that are left to be made when the places are filled."""

    buffer: int
    places: tuple[Place, ...]
    left: tuple[Copy, ...]


class Sink(Protocol):
    """Fills slabs. The slabs stay the caller's, to be sealed or closed after `close`."""

    def regions(self) -> list[Region]:
        """The memory that readers map; `Place.region` counts in it. In use until the readers have ended."""
        ...

    def start(self, readers: int) -> None:
        """Gets ready for so many readers; called once, before the first `place`."""
        ...

    def place(self, nbytes: int, copies: Sequence[Copy], *, wait: bool) -> Placed | None:
        """Memory for a block of `nbytes` bytes (`BLOCK_BYTES` at most). None: there is none now.

        With `wait` it waits for a buffer that the device is copying from, if there is one. A buffer is best filled by
        the same reader each time: in another process its pages are new.
        """
        ...

    def write(self, placed: Placed) -> None:
        """The places are filled now; makes the copies that are left, at once or by `finish`."""
        ...

    def finish(self) -> None:
        """Returns when every byte is in the slabs."""
        ...

    def close(self) -> None:
        """Frees what the sink took, after the device has stopped using it. Idempotent."""
        ...


class HostSink:
    """Fills host slabs. What goes whole to one place is read into the slab itself; the rest is copied from the ring."""

    def __init__(self, slabs: Sequence[HostSlab], staging: int = STAGING_BYTES) -> None:
        self._slabs = list(slabs)
        self._ring = Ring(max(staging, MIN_STAGING_BYTES) // BLOCK_BYTES)
        self._ready: deque[int] = deque()

    def regions(self) -> list[Region]:
        slabs = [Region(slab.fileno(), slab.nbytes) for slab in self._slabs]
        return [Region(self._ring.fd.fileno(), self._ring.nbytes), *slabs]

    def start(self, readers: int) -> None:
        self._ready.extend(range(min(BUFFERS * readers, self._ring.count)))

    def place(self, nbytes: int, copies: Sequence[Copy], *, wait: bool) -> Placed | None:
        if not self._ready:
            return None
        buffer = self._ready.popleft()
        base = buffer * BLOCK_BYTES
        alone = _alone(copies)
        if 2 * len(alone) + 1 > MAX_PIECES:  # with the gaps around them
            alone = []
        places = []
        position = 0
        for copy in alone:
            if copy.start > position:
                places.append(Place(0, base + position, copy.start - position))
            places.append(Place(1 + copy.slab, copy.offset, copy.width))
            position = copy.start + copy.width
        if position < nbytes:
            places.append(Place(0, base + position, nbytes - position))
        direct = set(map(id, alone))
        return Placed(buffer, tuple(places), tuple(copy for copy in copies if id(copy) not in direct))

    def write(self, placed: Placed) -> None:
        with self._ring.view(placed.buffer) as block:
            for copy in placed.left:
                self._copy(copy, block)
        self._ready.append(placed.buffer)

    def finish(self) -> None:
        """The bytes already lie in the slabs."""

    def close(self) -> None:
        self._ring.close()

    def _copy(self, copy: Copy, block: memoryview) -> None:
        slab = self._slabs[copy.slab].view
        if copy.cast is not None:
            with slab[copy.offset :] as out:
                cast_rows(copy, block, out, copy.slab_pitch or copy.in_slab(copy.width))
            return
        for row in range(copy.rows):
            offset, start = copy.offset + row * copy.slab_pitch, copy.start + row * copy.pitch
            slab[offset : offset + copy.width] = block[start : start + copy.width]


def _alone(copies: Sequence[Copy]) -> list[Copy]:
    """The copies of one row whose bytes no other copy wants, in the order of the block."""
    ordered = sorted(copies, key=lambda copy: copy.start)
    found = []
    reached = 0  # end of the bytes that copies before this one want
    for index, copy in enumerate(ordered):
        end = copy.start + (copy.rows - 1) * copy.pitch + copy.width
        apart = index + 1 == len(ordered) or ordered[index + 1].start >= end
        if copy.rows == 1 and copy.cast is None and copy.start >= reached and apart:
            found.append(copy)
        reached = max(reached, end)
    return found
