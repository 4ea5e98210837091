"""A slab: one block of device memory that is filled once, sealed, and from then on passed as a descriptor.

Two kinds implement these interfaces: `shard.host` (a sealed memfd) and `shard.cuda` (a VMM allocation). A loader or a
publishing engine makes a `SlabWriter`, fills it and calls `seal`; everyone else only sees the descriptor.
"""

from __future__ import annotations

from typing import Protocol

from ..fds import OwnedFd


class SlabWriter(Protocol):
    """Writable memory of `nbytes` bytes. Nothing is visible to others before `seal`; dropped unsealed, it is freed."""

    nbytes: int

    def seal(self) -> OwnedFd:
        """Ends writing and gives the slab's descriptor to the caller. The writer is closed."""
        ...

    def close(self) -> None:
        """Unmaps and, if not sealed, frees. Idempotent."""
        ...
