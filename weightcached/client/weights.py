"""`Weights`: the tensors of a mapped shard by name, and what can be done with them as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import EngineError
from ..shard.key import ShardKey
from ..shard.manifest import ManifestHead, TensorEntry, TensorTable, check_table, parse_table
from .leases import Lease
from .mapping import MappedSlabs
from .tensors import SlabViews

if TYPE_CHECKING:
    import torch

    from .install import Installed

Document = bytes | memoryview


class Weights(Mapping[str, "torch.Tensor"]):
    """Cached weights by name, in the manifest's order, tied names after it. Each tensor is made when first asked for.

    Mapping and lease end when this object and every tensor made from it are gone. `close` gives up this object's part
    early: tensors already made stay valid. Also a context manager.

        mapped      --unmap-->         unmapped     the tensors have addresses and no memory; the lease has ended
        unmapped    --remap-->         mapped       the same bytes at the same addresses, a lease again
        mapped      --private_copy-->  copied       of all tensors: they are ordinary memory, the lease has ended

    `unmap`, `remap` and `private_copy` wait for one another, but not for who uses the tensors.
    """

    def __init__(self, head: ManifestHead, table: Document, slabs: list[torch.Tensor], lease: Lease | None) -> None:
        """`slabs` as `map_slabs` gives them; `table` is the manifest's second document. `attach` is the way in."""
        self._head = head
        self._document: Document | None = table
        self._table: TensorTable | None = None
        self._entries: dict[str, TensorEntry] = {}
        self._views: SlabViews | None = SlabViews(slabs)
        self._mapped = slabs if isinstance(slabs, MappedSlabs) else None
        self._lease = lease
        self._made: dict[str, torch.Tensor] = {}
        self._handed: list[tuple[str, torch.Tensor]] = []
        self._closed = False
        self._unmapped = False
        self._changing = threading.RLock()

    @property
    def manifest(self) -> ManifestHead:
        return self._head

    @property
    def table(self) -> TensorTable:
        """Every tensor's place and shape; parsed and checked at the first use. `ManifestError` if it is wrong."""
        if self._table is None:
            document = self._document
            if document is None and self._table is None:  # else another thread has parsed it meanwhile
                raise self._is_closed()
            if document is not None:
                table = parse_table(document)
                check_table(self._head, table)
                self._entries = {entry.name: entry for entry in table.tensors}
                if (views := self._views) is not None:
                    views.copy_together(table.tensors)
                self._table = table
                self._document = None
        assert self._table is not None
        return self._table

    @property
    def key(self) -> ShardKey:
        return self._head.key

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, padding included."""
        return self._head.nbytes

    @property
    def device(self) -> str:
        """The device's name, as in "GPU-<uuid>" or "host-0"."""
        return self._head.device

    @property
    def generation(self) -> int:
        return self._head.generation

    @property
    def lost(self) -> str | None:
        """Why the device has lost the memory, as the service reports it; None while it is good, for copies, and after
        `close`. What is read from the tensors then is undefined: end the engine and attach again."""
        return None if self._lease is None else self._lease.lost

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def unmapped(self) -> bool:
        """Whether the tensors are without memory until `remap`."""
        return self._unmapped

    def close(self) -> None:
        """Gives up memory and lease as far as no tensor still uses them. Idempotent."""
        self._closed = True
        self._views = None
        self._mapped = None
        self._document = None
        self._lease = None
        self._made.clear()
        self._handed.clear()

    def install(self, module: torch.nn.Module, *, consumed: Iterable[str] = (), plain: bool = False) -> Installed:
        """Puts the tensors into `module` by dotted name, in place: see `install.install`."""
        from .install import install

        return install(self, module, consumed=consumed, plain=plain)

    def unmap(self) -> None:
        """Gives up memory and lease, and keeps the addresses: see `sleeping.unmap`."""
        from .sleeping import unmap

        unmap(self)

    def remap(self, timeout: float = 30.0) -> None:
        """Maps the same bytes at the same addresses again: see `sleeping.remap`."""
        from .sleeping import remap

        remap(self, timeout)

    def private_copy(self, names: Iterable[str] | None = None) -> None:
        """Turns tensors that were handed out into writable private ones, in place: see `private.private_copy`."""
        from .private import private_copy

        private_copy(self, names)

    def hand_out(self, name: str, tensor: torch.Tensor) -> None:
        """Tells that `tensor`, which somebody made over this shard's memory, is the one of this name.

        It is held as long as this object lives; `private_copy` copies it with the others.
        """
        self._handed.append((name, tensor))

    def require_mapped(self, what: str) -> SlabViews:
        """What makes the tensors. `EngineError` if they are unmapped, `ValueError` after `close` or `private_copy`."""
        if self._unmapped:
            raise EngineError(problem=f"the weights of {self._head.model} are unmapped; remap() them before {what}")
        if self._views is None:
            raise self._is_closed()
        return self._views

    def __getitem__(self, name: str) -> torch.Tensor:
        made = self._made.get(name)
        if made is not None:
            return made
        table = self.table
        if name in table.aliases:
            return self[table.aliases[name]]
        entry = self._entries[name]
        return self._made.setdefault(name, self.require_mapped(f"{name} can be made").view(entry))

    def _is_closed(self) -> ValueError:
        what = "closed" if self._closed else "private copies, and only of those tensors that were made before"
        return ValueError(f"the weights of {self._head.model} are {what}")

    def __contains__(self, name: object) -> bool:
        return name in self.table.aliases or name in self._entries

    def __iter__(self) -> Iterator[str]:
        yield from (entry.name for entry in self.table.tensors)
        yield from self.table.aliases

    def __len__(self) -> int:
        return len(self.table.tensors) + len(self.table.aliases)

    def __reduce__(self) -> str:
        model = self._head.model
        raise TypeError(
            f"the weights of {model} are a mapping of this process, and cannot be copied or pickled: attach again"
        )

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        head = self._head
        state = ", closed" if self.closed else ", unmapped" if self._unmapped else ""
        return (
            f"<Weights of {head.model}, generation {head.generation}, on {head.device}: "
            f"{head.tensor_count} tensors, {head.nbytes} bytes{state}>"
        )
