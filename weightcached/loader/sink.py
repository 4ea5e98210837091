"""Where the pipeline puts what it reads: a host slab directly, or a CUDA slab through pinned memory (`cuda_sink`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from .plan import Read

if TYPE_CHECKING:
    from ..shard.host import HostSlab


class Writer(Protocol):
    """One thread's way into the slab. `place` and `write` are called in turn, for one read after the other."""

    def place(self, read: Read, unlisted: memoryview) -> list[memoryview]:
        """Memory for each piece of the read, in order; what is only hashed goes to `unlisted`, piece after piece.

        May wait for memory. What it returns stays unchanged until the next `place`.
        """
        ...

    def write(self, read: Read) -> None:
        """The memory that `place` gave is filled now; brings it to the slab, at once or by `Sink.finish`."""
        ...


class Sink(Protocol):
    """Fills a slab from several threads. The slab stays the caller's, to be sealed or closed after `close`."""

    def start(self, threads: int, reads: int) -> None:
        """Gets ready for `threads` writers, which will do `reads` reads together."""
        ...

    def writer(self) -> AbstractContextManager[Writer]:
        """A writer for the thread that enters it. At most as many as `start` announced."""
        ...

    def finish(self) -> None:
        """Returns when every byte is in the slab. All writers have been left."""
        ...

    def close(self) -> None:
        """Frees what the sink took, after the device has stopped using it. Idempotent."""
        ...


class HostSink:
    """Reads go straight into the slab's memory: no copy, and the gaps stay the zeros that a new memfd holds."""

    def __init__(self, slab: HostSlab) -> None:
        self._view = slab.view

    def start(self, threads: int, reads: int) -> None:
        """Nothing to prepare: any number of threads may write to disjoint parts of the slab."""

    def writer(self) -> AbstractContextManager[HostSink]:
        return nullcontext(self)

    def place(self, read: Read, unlisted: memoryview) -> list[memoryview]:
        views = []
        used = 0
        for offset, nbytes in read.pieces:
            if offset is None:
                views.append(unlisted[used : used + nbytes])
                used += nbytes
            else:
                views.append(self._view[offset : offset + nbytes])
        return views

    def write(self, read: Read) -> None:
        """The bytes already lie in the slab."""

    def finish(self) -> None:
        """The bytes already lie in the slab."""

    def close(self) -> None:
        """Lets go of the slab's memory, so that the slab can be sealed."""
        self._view = memoryview(b"")
