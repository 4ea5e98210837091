"""Where an engine's tensors lie in memory now, and where they go in slabs: a plan, before anything is moved.

    block    tensors that share bytes, directly or through others, and the range of memory that they span; parts and
             views keep their places in it, so that after the move they are parts and views again
    slab     blocks side by side, in the order of their addresses, so that whole regions of an allocator come free

Blocks whose tensors are shared from now on come first. What the engine keeps for itself is only copied, into the last
slab: private tensors, CPU tensors of an engine on a GPU, and views that no aligned offset in a slab can express.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..errors import EngineError
from ..shard.dtypes import DTYPES
from ..shard.manifest import ALIGNMENT, MAX_SLABS, VIEW_ALIGNMENT, TensorEntry
from .modules import NamedTensor
from .target import Target
from .tensors import contiguous_stride

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 1 << 30  # of a slab that is filled piece by piece: what publishing takes beyond the weights
_FEW_SLABS = MAX_SLABS // 2  # more bytes than so many slabs hold make each of them larger

Private = Callable[[NamedTensor], bool]


class Extent(NamedTuple):
    """A tensor's bytes: from the address of its first element to past its last one, gaps of a stride included."""

    begin: int
    end: int


@dataclass(eq=False)
class Block:
    """Tensors over one range of memory, [begin, end) by address, and where they go: `offset` in slab number `slab`.

    `moves`: the tensors are put onto the slab; otherwise they are copied and left where they are. `alone`: they must
    leave their storage all the same, since the rest of it goes; they get a copy of the range to themselves.
    """

    begin: int
    end: int
    tensors: list[torch.Tensor]
    extents: list[Extent]
    moves: bool = False
    alone: bool = False
    slab: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def places(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Each tensor, and the byte of the slab at which it begins."""
        for tensor, extent in zip(self.tensors, self.extents, strict=True):
            yield tensor, self.offset + extent.begin - self.begin


@dataclass
class Plan:
    """`sizes` are the slabs' in bytes, `blocks` lie in them; `entries` and `aliases` as a manifest's table has them."""

    sizes: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def blocks_of(self, slab: int) -> list[Block]:
        return [block for block in self.blocks if block.slab == slab]


def plan_storages(named: Sequence[NamedTensor], held: Iterable[torch.Tensor], target: Target, private: Private) -> Plan:
    """How the named tensors go into slabs on `target`. Touches nothing.

    `held`: further tensors of the engine, without names; those in a storage of a named one that moves move along.
    `EngineError` for no tensors at all, and for one that has no plain memory or has it on another device.
    """
    if not named:
        raise EngineError(problem="there are no tensors to publish")
    plan = Plan()
    items = _distinct(named, plan.aliases)
    for item in items:
        _require_plain(item, target)
    keep = {id(item.tensor) for item in items if private(item) or not _is_here(item.tensor, target)}
    blocks = _bridged([item.tensor for item in items], held, keep)
    for block in blocks:
        block.moves = not _keeps(block, keep)
    spread = {storage_key(tensor) for block in blocks if block.moves for tensor in block.tensors}
    for block in blocks:
        block.alone = not block.moves and any(storage_key(tensor) in spread for tensor in block.tensors)
    _lay_out(plan, blocks)
    _list_entries(plan, items, blocks, target)
    if not plan.sizes:  # every tensor is empty
        plan.sizes.append(0)
    return plan


def extent_of(tensor: torch.Tensor) -> Extent:
    """Where a plain tensor's bytes are."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return Extent(begin, begin)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Extent(begin, begin + (last + 1) * tensor.element_size())


def storage_key(tensor: torch.Tensor) -> tuple[str, int]:
    """The same for tensors of one storage."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def overlapping(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Each of these plain tensors that shares bytes with one of the others, and the name of each such one."""
    if not tensors:
        return
    placed: dict[str, list[tuple[Extent, str]]] = {}
    for name, tensor in others.items():
        if tensor.numel():
            placed.setdefault(str(tensor.device), []).append((extent_of(tensor), name))
    reach: dict[str, list[int]] = {}  # the end of the furthest one so far
    for device, items in placed.items():
        items.sort()
        reach[device] = list(itertools.accumulate((extent.end for extent, _ in items), max))
    for name, tensor in tensors.items():
        items = placed.get(str(tensor.device), [])
        extent = extent_of(tensor)
        at = bisect.bisect_left(items, ((extent.end,),)) if tensor.numel() else 0
        while at and reach[str(tensor.device)][at - 1] > extent.begin:
            at -= 1
            if items[at][0].end > extent.begin:
                yield name, items[at][1]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is elements in one storage, and nothing else: no wrapper of others, no meta tensor."""
    import torch

    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not torch.nn.parameter.is_lazy(tensor)
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
    )


def _distinct(named: Sequence[NamedTensor], aliases: dict[str, str]) -> list[NamedTensor]:
    """Each tensor under its first name. Its others become aliases, unless they play another part in the module."""
    first: dict[tuple[int, str, bool], str] = {}
    items = []
    for item in named:
        known = first.setdefault((id(item.tensor), item.role, item.persistent), item.name)
        if known == item.name:
            items.append(item)
        else:
            aliases[item.name] = known
    return items


def _require_plain(item: NamedTensor, target: Target) -> None:
    tensor, name = item.tensor, item.name
    if not is_text(name):
        raise EngineError(problem=f"{name!r} cannot be published: it is no text that JSON has")
    if not is_plain(tensor):
        kind = "a meta tensor" if tensor.is_meta else f"{type(tensor).__name__}, {tensor.dtype}, {tensor.layout}"
        raise EngineError(problem=f"{name} cannot be published: {kind}, not elements in one storage of its own")
    if dtype_name(tensor) is None:
        raise EngineError(problem=f"{name} cannot be published: the safetensors format has no {tensor.dtype}")
    device = str(tensor.device)
    if device not in ("cpu", target.torch_device):
        raise EngineError(problem=f"{name} is on {device}, and is to be published on {target.torch_device}")
    storage = tensor.untyped_storage()
    extent = extent_of(tensor)
    if extent.end > extent.begin and extent.end > storage.data_ptr() + storage.nbytes():
        raise EngineError(problem=f"{name} has no memory: its storage is of {storage.nbytes()} bytes")
    if extent.begin % tensor.element_size():
        raise EngineError(problem=f"{name} lies at {extent.begin:#x}, no multiple of its element size")


def is_text(value: str) -> bool:
    """Whether a string has only characters that UTF-8 has: no half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def dtype_name(tensor: torch.Tensor) -> str | None:
    """The format's name of a tensor's dtype, None where it has none."""
    torch_name = str(tensor.dtype).removeprefix("torch.")
    return next((dtype.name for dtype in DTYPES.values() if dtype.torch_name == torch_name), None)


def _is_here(tensor: torch.Tensor, target: Target) -> bool:
    return str(tensor.device) == target.torch_device


def _bridged(named: list[torch.Tensor], held: Iterable[torch.Tensor], keep: set[int]) -> list[Block]:
    """The blocks of named tensors, and of the others over their storages: a storage is freed when none is left on it.

    Others are held ones, and what autograd remembers a view to be a view of. The latter must not make tensors private
    that share no byte with a private one: then it stays behind, and its storage as long as it lives.
    """
    storages = {storage_key(tensor) for tensor in named}
    found = {id(tensor): tensor for tensor in named}
    for tensor in held:
        if is_plain(tensor) and storage_key(tensor) in storages:
            found.setdefault(id(tensor), tensor)
    apart = _blocks(found.values())
    for base in [tensor._base for tensor in found.values()]:
        if base is not None and is_plain(base):
            found.setdefault(id(base), base)
    together = _blocks(found.values())
    return together if _moving_bytes(together, keep) >= _moving_bytes(apart, keep) else apart


def _moving_bytes(blocks: Iterable[Block], keep: set[int]) -> int:
    return sum(block.nbytes for block in blocks if not _keeps(block, keep))


def _blocks(tensors: Iterable[torch.Tensor]) -> list[Block]:
    """The tensors that have bytes, in blocks, in the order of devices and addresses."""
    blocks: list[Block] = []
    device = ""
    placed = [(str(tensor.device), extent_of(tensor), tensor) for tensor in tensors if tensor.numel()]
    for where, extent, tensor in sorted(placed, key=lambda item: item[:2]):
        if blocks and where == device and extent.begin < blocks[-1].end:
            blocks[-1].end = max(blocks[-1].end, extent.end)
            blocks[-1].tensors.append(tensor)
            blocks[-1].extents.append(extent)
        else:
            blocks.append(Block(extent.begin, extent.end, [tensor], [extent]))
        device = where
    return blocks


def _keeps(block: Block, keep: set[int]) -> bool:
    """Whether the engine keeps a block's memory: it writes to some of it, or it is not the device's."""
    return any(id(tensor) in keep for tensor in block.tensors)


def _lay_out(plan: Plan, blocks: list[Block]) -> None:
    moving = [block for block in blocks if block.moves]
    kept = [block for block in blocks if not block.moves]
    limit = max(SLAB_BYTES, sum(block.nbytes for block in moving) // _FEW_SLABS)
    for block in moving:
        if not plan.sizes or _offset(plan.sizes[-1], block) + block.nbytes > limit:
            plan.sizes.append(0)
        _place(plan, len(plan.sizes) - 1, block)
    if kept:
        plan.sizes.append(0)
    for block in kept:
        _place(plan, len(plan.sizes) - 1, block)


def _place(plan: Plan, slab: int, block: Block) -> None:
    block.slab, block.offset = slab, _offset(plan.sizes[slab], block)
    plan.sizes[slab] = block.offset + block.nbytes
    plan.blocks.append(block)


def _offset(used: int, block: Block) -> int:
    """The first offset from `used` on at which a block may lie.

    Tensors that share bytes keep the alignment that they have, up to `ALIGNMENT`: kernels may count on it. One by
    itself gets the best one.
    """
    begin = -(-used // ALIGNMENT) * ALIGNMENT
    return begin + block.begin % ALIGNMENT if len(block.tensors) > 1 else begin


def _list_entries(plan: Plan, items: Sequence[NamedTensor], blocks: Sequence[Block], target: Target) -> None:
    """Each tensor as the manifest's table has it, where its block was laid out; some in a second copy, see `_apart`."""
    owners = {id(tensor): block for block in blocks for tensor in block.tensors}
    named_in = Counter(id(owners[number]) for number in {id(item.tensor) for item in items} & owners.keys())
    last = len(plan.sizes) - 1 if any(not block.moves for block in blocks) else len(plan.sizes)
    for item in items:
        extent, owner = extent_of(item.tensor), owners.get(id(item.tensor))
        entry = _entry(item, extent)
        here = _is_here(item.tensor, target)
        if owner is not None:  # else it is empty
            block, written = owner, not owner.moves and here
            if (block.offset + extent.begin - block.begin) % VIEW_ALIGNMENT:
                if written and named_in[id(owner)] > 1:
                    raise EngineError(
                        problem=f"{item.name} cannot be published: the engine writes to it, and it shares bytes with "
                        f"another tensor, {extent.begin - block.begin} bytes into it: no multiple of {VIEW_ALIGNMENT}"
                    )
                block = _apart(plan, last, item.tensor, extent)
            # A view is told by its stride: such entries may lie between, or across, the elements of others.
            whole = (extent.begin, extent.end) == (block.begin, block.end)
            stride = entry.stride if entry.stride is not None or whole else contiguous_stride(entry.shape)
            offset = block.offset + extent.begin - block.begin
            entry = entry._replace(slab=block.slab, offset=offset, stride=stride, private=written)
        plan.entries.append(entry._replace(on_host=not here))


def _apart(plan: Plan, slab: int, tensor: torch.Tensor, extent: Extent) -> Block:
    """A second copy of a tensor that lies inside a block where no entry may begin."""
    if slab == len(plan.sizes):
        plan.sizes.append(0)
    block = Block(extent.begin, extent.end, [tensor], [extent])
    _place(plan, slab, block)
    return block


def _entry(item: NamedTensor, extent: Extent) -> TensorEntry:
    """The tensor as a table has it, at the beginning of a slab."""
    tensor = item.tensor
    name = dtype_name(tensor)
    assert name is not None
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    contiguous = stride == contiguous_stride(shape)
    packed = DTYPES[name].packed
    if packed > 1:
        if not shape or stride[-1] != 1:
            raise EngineError(problem=f"{item.name} cannot be published: {tensor.dtype} {list(shape)}, stride {stride}")
        shape = (*shape[:-1], shape[-1] * packed)
        stride = (*(step * packed for step in stride[:-1]), 1)
    return TensorEntry(
        item.name,
        slab=0,
        offset=0,
        nbytes=extent.end - extent.begin,
        dtype=name,
        shape=shape,
        stride=None if contiguous else stride,
        role=item.role,
        persistent=item.persistent,
    )
