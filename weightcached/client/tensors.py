"""Tensor views over slabs: one storage a slab, every tensor a strided view of it, nothing copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..shard.dtypes import DTYPES
from ..shard.manifest import TensorEntry

if TYPE_CHECKING:
    import torch


class SlabViews:
    """Makes the tensors of a shard from its slabs, given as 1-D uint8 tensors.

    Entries must have passed `check_table`. Keeps one typed base per slab and dtype, so that a view is one call of
    torch: about 3 us a tensor. Tensors that share bytes share the storage.
    """

    def __init__(self, slabs: Sequence[torch.Tensor]) -> None:
        import torch

        self._torch = torch
        self._slabs = slabs
        self._typed: dict[tuple[int, str], torch.Tensor | None] = {}

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor of `entry`; a copy if the entry is private.

        A dtype that this torch lacks, or a packed shape that torch cannot express, comes as its bytes: 1-D uint8.
        """
        made = self._shared(entry)
        return made.clone() if entry.private else made

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
            return self._slabs[entry.slab][entry.offset : entry.offset + entry.nbytes]
        if stride is None:
            stride = contiguous_stride(shape)
        return base.as_strided(shape, stride, entry.offset // base.element_size())

    def _base(self, slab: int, dtype: str) -> torch.Tensor | None:
        """The whole slab as elements of `dtype`, its odd last bytes left out; None if torch lacks the dtype."""
        key = (slab, dtype)
        if key not in self._typed:
            name = DTYPES[dtype].torch_name
            element = None if name is None else getattr(self._torch, name, None)
            raw = self._slabs[slab]
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
