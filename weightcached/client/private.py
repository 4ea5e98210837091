"""`Weights.private_copy`: tensors that an engine wants to write get memory of their own, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..errors import EngineError
from ..shard.manifest import ALIGNMENT
from .moving import put_onto

if TYPE_CHECKING:
    import torch

    from .weights import Weights


class _Piece(NamedTuple):
    """A tensor that was handed out and lies in a slab: its bytes there, from `start` up to `end`."""

    slab: int
    start: int
    end: int
    name: str
    tensor: torch.Tensor


def private_copy(weights: Weights, names: Iterable[str] | None = None) -> None:
    """Gives tensors memory of their own on the same device, writable: those named, or all that were handed out.

    Each tensor stays the same object (``tensor.data`` is replaced), so that installed modules see it; addresses change,
    and a CUDA graph that was captured must be captured again. Tensors that share bytes go on sharing them: one that is
    not named is copied with a named one that it overlaps. `names` None copies all: mapping and lease then end as soon
    as nothing that the engine itself derived (a view, a detached tensor) uses them, and tensors that were never asked
    for cannot be had any more. With names the mapping stays, for the others. Device memory is needed for the copies
    beside the cached ones until the latter are let go, one group of sharing tensors at a time.

    `EngineError` for a name that the manifest lacks, or while the weights are unmapped; `ValueError` after `close`.
    """
    import torch

    with weights._changing:
        if weights._views is None and not weights.closed:
            return  # copies already
        views = weights.require_mapped("they are copied")
        chosen = None if names is None else _canonical(weights, names)
        for name in chosen or ():
            weights[name]  # made now, if it was not: from now on it is private
        slabs = views.slabs
        with torch.inference_mode(False), torch.no_grad():
            for group in _groups(_pieces(weights, slabs)):
                if chosen is None or any(piece.name in chosen for piece in group):
                    _copy(slabs[group[0].slab], group)
        for slab in slabs:
            if slab.is_cuda:  # the source may be unmapped as soon as it is dropped
                torch.cuda.current_stream(slab.device).synchronize()
        if chosen is None and weights._mapped is not None:
            weights._views = weights._mapped = weights._lease = None


def _canonical(weights: Weights, names: Iterable[str]) -> set[str]:
    """The manifest's own names of these tensors."""
    names = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in names if name not in weights]:
        raise EngineError(problem=f"{weights.manifest.model} has no tensor {', '.join(unknown)}")
    return {weights.table.aliases.get(name, name) for name in names}


def _pieces(weights: Weights, slabs: list[torch.Tensor]) -> Iterator[_Piece]:
    """What was handed out and is still in a slab: an engine may have put other memory behind a tensor of ours."""
    starts = {slab.untyped_storage().data_ptr(): number for number, slab in enumerate(slabs) if slab.numel()}
    for name, tensor in [*weights._made.items(), *weights._handed]:
        slab = starts.get(tensor.untyped_storage().data_ptr())
        if slab is None or not tensor.numel():
            continue
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        yield _Piece(slab, start, start + span * tensor.element_size(), weights.table.aliases.get(name, name), tensor)


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that share bytes, directly or through others, together."""
    group: list[_Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece[:3]):
        if group and (piece.slab != group[0].slab or piece.start >= end):
            yield group
            group, end = [], 0
        group.append(piece)
        end = max(end, piece.end)
    if group:
        yield group


def _copy(slab: torch.Tensor, group: list[_Piece]) -> None:
    start = group[0].start // ALIGNMENT * ALIGNMENT  # so that every element is as aligned as it was
    end = max(piece.end for piece in group)
    copy = slab[start:end].clone()
    for piece in group:
        put_onto(piece.tensor, copy.untyped_storage(), piece.start - start)
