"""Tensor views over slabs: one storage a slab, every tensor a strided view of it, nothing copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..shard.dtypes import DTYPES
from ..shard.manifest import ALIGNMENT, TensorEntry

if TYPE_CHECKING:
    import torch


class SlabViews:
    """Makes the tensors of a shard from its slabs, given as 1-D uint8 tensors.

    Entries must have passed `check_table`. Keeps one typed base per slab and dtype, so that a view is one call of
    torch: about 3 us a tensor. Tensors that share bytes share the storage.
    """

    def __init__(self, slabs: list[torch.Tensor]) -> None:
        import torch

        self._torch = torch
        self.slabs = slabs
        self._typed: dict[tuple[int, str], torch.Tensor | None] = {}
        self._ranges: dict[str, tuple[int, int, int]] = {}
        self._copies: dict[tuple[int, int, int, bool], SlabViews] = {}

    def copy_together(self, entries: Iterable[TensorEntry]) -> None:
        """Has entries that are copied, and share bytes, share those of the copy. To be told before the first `view`."""
        for on_host in (False, True):
            group: list[TensorEntry] = []
            end = 0
            own = [entry for entry in entries if entry.on_host is on_host and (entry.private or on_host)]
            for entry in sorted(own, key=lambda entry: (entry.slab, entry.offset)):
                if group and (entry.slab != group[0].slab or entry.offset >= end):
                    self._note(group, end)
                    group, end = [], 0
                group.append(entry)
                end = max(end, entry.offset + entry.nbytes)
            self._note(group, end)

    def _note(self, group: list[TensorEntry], end: int) -> None:
        if len(group) > 1:
            self._ranges.update(dict.fromkeys((entry.name for entry in group), (group[0].slab, group[0].offset, end)))

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor of `entry`; a copy if the entry is private, in host memory if it is `on_host`.

        A dtype that this torch lacks, or a packed shape that torch cannot express, comes as its bytes: 1-D uint8.
        """
        if not (entry.private or entry.on_host):
            return self._shared(entry)
        shared = self._ranges.get(entry.name)
        slab, start, end = shared or (entry.slab, entry.offset, entry.offset + entry.nbytes)
        start -= start % ALIGNMENT  # so that every element is as aligned as it was
        key = (slab, start, end, entry.on_host)
        copy = self._copies.get(key)
        if copy is None:
            raw = self.slabs[slab][start:end]
            # Not an inference tensor, which only inference mode may write. A copy also where the slab is host memory:
            # one behaviour on every device.
            with self._torch.inference_mode(False):
                copy = SlabViews([raw.to("cpu", copy=True) if entry.on_host else raw.clone()])
            if shared is not None:
                self._copies[key] = copy
        return copy._shared(entry._replace(slab=0, offset=entry.offset - start))

    def _shared(self, entry: TensorEntry) -> torch.Tensor:
        dtype = DTYPES[entry.dtype]
        base = self._base(entry.slab, entry.dtype)
        shape, stride = entry.shape, entry.stride
        if dtype.packed > 1 and base is not None:
            unpacked = _pack(shape, stride, dtype.packed)
            if unpacked is None:
                base = None
            else:
                shape, stride = unpacked
        if base is None:
            return self.slabs[entry.slab][entry.offset : entry.offset + entry.nbytes]
        if stride is None:
            stride = contiguous_stride(shape)
        # Detached, or autograd would have each tensor hold the whole slab as its base, whatever its `data` is later.
        return base.as_strided(shape, stride, entry.offset // base.element_size()).detach()

    def _base(self, slab: int, dtype: str) -> torch.Tensor | None:
        """The whole slab as elements of `dtype`, its odd last bytes left out; None if torch lacks the dtype."""
        key = (slab, dtype)
        if key not in self._typed:
            name = DTYPES[dtype].torch_name
            element = None if name is None else getattr(self._torch, name, None)
            raw = self.slabs[slab]
            if element is not None:
                raw = raw[: raw.numel() - raw.numel() % element.itemsize]
            self._typed[key] = None if element is None else raw.view(element)
        return self._typed[key]


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch computes them: a dimension of size 0 counts as 1."""
    stride = [1] * len(shape)
    for index in range(len(shape) - 1, 0, -1):
        stride[index - 1] = stride[index] * (shape[index] or 1)
    return tuple(stride)


def _pack(
    shape: tuple[int, ...], stride: tuple[int, ...] | None, packed: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Shape and stride in torch elements of `packed` format elements each; None where they do not divide."""
    if not shape or shape[-1] % packed:
        return None
    if stride is not None:
        if stride[-1] != 1 or any(step % packed for step in stride[:-1]):
            return None
        stride = (*(step // packed for step in stride[:-1]), 1)
    return (*shape[:-1], shape[-1] // packed), stride
