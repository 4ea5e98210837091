"""An engine's tensors into slabs, and onto them: one slab after the other, so that only one is there twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ManifestError
from ..fds import OwnedFd
from ..shard.checksum import checksum_host
from ..shard.host import HostSlab
from ..shard.manifest import Checksums, ManifestHead, TensorEntry
from ..trace import point
from .leases import Lease
from .mapping import MappedSlabs, Memory, map_slabs
from .storages import Block, Plan, storage_key
from .target import Target

if TYPE_CHECKING:
    import torch


class SeveralSlabs:
    """The memory of slabs that were mapped one by one (`mapping.Memory`)."""

    def __init__(self, filled: Sequence[Memory]) -> None:
        """`filled`: one for each slab that is not empty."""
        self._filled = filled

    def unmap(self) -> None:
        with ExitStack() as each:  # of them, also when one has failed
            for memory in self._filled:
                each.callback(memory.unmap)

    def remap(self, slabs: Sequence[tuple[int, int]]) -> None:
        if len(slabs) != len(self._filled):
            raise ManifestError(problem=f"{len(self._filled)} slabs were mapped, {len(slabs)} came")
        with ExitStack() as on_error:
            for memory, slab in zip(self._filled, slabs, strict=True):
                memory.remap([slab])
                on_error.callback(memory.unmap)
            on_error.pop_all()


def move(
    plan: Plan, head: ManifestHead, lease: Lease, target: Target, fds: list[OwnedFd]
) -> tuple[MappedSlabs, Checksums]:
    """Fills every slab, maps it, and puts the engine's tensors onto it; what they lay in before is freed.

    The slabs' descriptors come into `fds`, which is the caller's. An error leaves each tensor valid, where it was or
    on its slab: `DeviceFull`, `DeviceError`.
    """
    sums: dict[str, str] = {}
    algorithm = ""
    parts = []
    for number, entry in enumerate(head.slabs):
        entries = [item for item in plan.entries if item.slab == number]
        blocks = plan.blocks_of(number)
        fd, checksums = _fill(target, entry.nbytes, blocks, entries)
        fds.append(fd)
        algorithm = checksums.algorithm
        sums.update(zip((item.name for item in entries), checksums.values, strict=True))
        parts.append(map_slabs(replace(head, slabs=(entry,)), [fd], lease, target))
        for block in blocks:
            if block.moves:
                rebind(block, parts[-1][0].untyped_storage())
            elif block.alone:
                set_apart(block)
        point("client.slab-moved")
        free_cached(target)
    tensors = [tensor for part in parts for tensor in part]
    values = tuple(sums[item.name] for item in plan.entries)
    memory = SeveralSlabs([part.memory for part in parts if part.memory is not None and len(part[0])])
    return MappedSlabs(tensors, memory), Checksums(algorithm, values)


def _fill(
    target: Target, nbytes: int, blocks: Sequence[Block], entries: Sequence[TensorEntry]
) -> tuple[OwnedFd, Checksums]:
    """A sealed slab with the blocks' bytes, zeros between them, and the checksums of its entries."""
    if target.ordinal is None:
        return _fill_host(nbytes, blocks, entries)
    return _fill_cuda(target, nbytes, blocks, entries)


def _fill_host(nbytes: int, blocks: Sequence[Block], entries: Sequence[TensorEntry]) -> tuple[OwnedFd, Checksums]:
    import torch

    slab = HostSlab(nbytes)
    try:
        if nbytes:
            _copy(torch.frombuffer(slab.view, dtype=torch.uint8), blocks)
        checksums = checksum_host(slab.view, entries)
        return slab.seal(), checksums
    finally:
        slab.close()


def _fill_cuda(
    target: Target, nbytes: int, blocks: Sequence[Block], entries: Sequence[TensorEntry]
) -> tuple[OwnedFd, Checksums]:
    import torch

    from ..shard.cuda import CudaSlab
    from ..shard.cuda_checksum import checksum_slab
    from .mapping import device_tensor

    assert target.ordinal is not None
    slab = CudaSlab.create(target.ordinal, nbytes)
    try:
        with torch.cuda.device(target.ordinal):
            if nbytes:
                raw = device_tensor(slab, slab.address, nbytes, target.torch_device)
                raw.zero_()
                _copy(raw, blocks)
                del raw
            slab.context.synchronize()
        checksums = checksum_slab(slab.context, slab.address, entries)
        return slab.seal(), checksums
    finally:
        slab.close()


def _copy(raw: torch.Tensor, blocks: Sequence[Block]) -> None:
    """Each block's bytes into the slab, `raw` its memory as uint8."""
    for block in blocks:
        for place, piece in pieces(block):
            raw[place : place + piece.numel()].copy_(piece)


def pieces(block: Block) -> Iterator[tuple[int, torch.Tensor]]:
    """The block's bytes as uint8, and the byte of the slab where they belong; by storage, where several make it up."""
    ranges: dict[tuple[str, int], tuple[int, int, torch.Tensor]] = {}
    for tensor, extent in zip(block.tensors, block.extents, strict=True):
        key = storage_key(tensor)
        begin, end, widest = ranges.get(key, (*extent, tensor))
        # Of one address there may be several storages, as of torch.from_numpy: the longest one has all of it.
        widest = max(widest, tensor, key=lambda item: item.untyped_storage().nbytes())
        ranges[key] = (min(begin, extent.begin), max(end, extent.end), widest)
    for begin, end, tensor in ranges.values():
        yield block.offset + begin - block.begin, _bytes_of(tensor, block, begin, end)


def _bytes_of(tensor: torch.Tensor, block: Block, begin: int, end: int) -> torch.Tensor:
    """The bytes [begin, end), addresses as when the block was planned, in the tensor's storage, wherever it is now."""
    import torch

    planned = block.extents[next(number for number, item in enumerate(block.tensors) if item is tensor)].begin
    storage = tensor.untyped_storage()
    offset = tensor.data_ptr() - storage.data_ptr() + begin - planned
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (end - begin,), (1,))


def rebind(block: Block, storage: torch.UntypedStorage, shift: int = 0) -> None:
    """The block's tensors onto other memory, the same objects, shapes and strides; `shift` as of their places there."""
    for tensor, place in block.places:
        put_onto(tensor, storage, place - shift)


def set_apart(block: Block) -> None:
    """A copy of the block's memory for its tensors, as what else their storage holds is moved away."""
    import torch

    device = block.tensors[0].device
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.zeros(block.nbytes + block.begin % 256, dtype=torch.uint8, device=device)
        base = block.offset - block.begin % 256
        shifted = Block(block.begin, block.end, block.tensors, block.extents, offset=block.begin % 256)
        _copy(copy, [shifted])
    rebind(block, copy.untyped_storage(), base)


def put_onto(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> None:
    """Gives a tensor other memory, from byte `offset` of the storage on: the same object, shape and stride."""
    import torch

    size, stride = tensor.shape, tensor.stride()
    # A tensor made in inference mode takes only another such one, and the other way round.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        view.set_(storage, offset // tensor.element_size(), size, stride)
        tensor.data = view


def free_cached(target: Target) -> None:
    """What the moved tensors lay in goes back to the device, not only to torch's allocator."""
    if target.ordinal is not None:
        import torch

        with torch.cuda.device(target.ordinal):
            torch.cuda.empty_cache()


def settle(target: Target) -> None:
    """Returns when all work on the device is done, and torch's allocator keeps nothing back of it."""
    if target.ordinal is not None:
        import torch

        torch.cuda.synchronize(target.ordinal)
        free_cached(target)
