"""From a shard's descriptors to mapped memory: one uint8 tensor a slab, which keeps the mapping and the lease alive.

    host   tensor -> HostMapping -> Lease                     a private mapping of a sealed memfd
    GPU    tensor -> _Arena -> _CudaShard -> CudaMapping      read-only, one address range for all slabs
                                          -> Lease

There is nothing to close: the memory is unmapped, and the worker told, when the last tensor made from it is gone.
`MappedSlabs.unmap` gives the memory up before, and leaves the tensors without any until `MappedSlabs.remap`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import DeviceError, ManifestError
from ..fds import OwnedFd
from ..shard.host import HostMapping, check_host_slab, map_host_slab
from ..shard.manifest import ManifestHead
from .leases import Lease
from .target import Target

if TYPE_CHECKING:
    import torch

    from ..shard.cuda import CudaMapping

    Tensors = list[torch.Tensor]
else:
    Tensors = list


class Memory(Protocol):
    """What is mapped; `remap` takes (descriptor, bytes) of each slab that is not empty, in order."""

    def unmap(self) -> None: ...

    def remap(self, slabs: Sequence[tuple[int, int]]) -> None: ...


class MappedSlabs(Tensors):
    """One tensor a slab, and the memory behind them. `unmap` and `remap` are for one thread at a time."""

    def __init__(self, tensors: Sequence[torch.Tensor], memory: Memory | None) -> None:
        super().__init__(tensors)
        self._memory = memory

    @property
    def memory(self) -> Memory | None:
        return self._memory

    def unmap(self) -> None:
        """Lets the memory go; the addresses stay. `DeviceError` if work on the device had failed; gone all the same."""
        if self._memory is not None:
            self._memory.unmap()

    def remap(self, head: ManifestHead, slabs: Sequence[OwnedFd]) -> None:
        """Maps the same slabs at the same addresses. Errors as of `map_slabs`; nothing is mapped then."""
        filled = _filled(head, slabs)
        if self._memory is not None:
            self._memory.remap(filled)


def map_slabs(head: ManifestHead, slabs: Sequence[OwnedFd], lease: Lease, target: Target) -> MappedSlabs:
    """One 1-D uint8 tensor for each slab, in order; an empty slab is an empty tensor.

    The descriptors stay the caller's and may be closed afterwards: mappings hold the memory. Host memory is
    copy-on-write, so a write stays in this process; GPU memory is read-only, a write there is a CUDA error.
    Raises `ManifestError`, `WrongDevice` or `DeviceError` with nothing left mapped.
    """
    import torch

    filled = _filled(head, slabs)
    with torch.inference_mode(False):  # inference tensors cannot be used everywhere outside that mode
        if target.ordinal is None:
            return _map_host(head, slabs, lease)
        return _map_cuda(head, filled, lease, target.ordinal)


def _filled(head: ManifestHead, slabs: Sequence[OwnedFd]) -> list[tuple[int, int]]:
    """Descriptor and bytes of every slab that is not empty."""
    if len(slabs) != len(head.slabs):
        raise ManifestError(problem=f"{len(head.slabs)} slabs listed, {len(slabs)} descriptors came")
    return [(fd.fileno(), entry.nbytes) for fd, entry in zip(slabs, head.slabs, strict=True) if entry.nbytes]


def copy_slabs(slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Private writable copies with the same layout, one allocation a slab; complete when it returns."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        copies = [torch.empty_like(slab).copy_(slab) for slab in slabs]
    for copy in copies:
        if copy.is_cuda:  # the source may be unmapped as soon as the caller drops it
            torch.cuda.current_stream(copy.device).synchronize()
    return copies


def _map_host(head: ManifestHead, slabs: Sequence[OwnedFd], lease: Lease) -> MappedSlabs:
    import torch

    tensors, mappings = [], []
    for fd, entry in zip(slabs, head.slabs, strict=True):
        mapping = map_host_slab(fd.fileno(), entry.nbytes)
        if mapping is None:
            tensors.append(torch.empty(0, dtype=torch.uint8))
        else:
            mapping.lease = lease
            mappings.append(mapping)
            tensors.append(torch.frombuffer(mapping, dtype=torch.uint8))
    return MappedSlabs(tensors, _HostMemory(mappings))


class _HostMemory:
    """The host slabs of a shard, as long as a tensor of each is there: held weakly, so that the last one unmaps it."""

    def __init__(self, mappings: list[HostMapping]) -> None:
        self._mappings = [weakref.ref(mapping) for mapping in mappings]

    def unmap(self) -> None:
        for mapping in self._live():
            mapping.unmap()

    def remap(self, slabs: Sequence[tuple[int, int]]) -> None:
        mappings = self._live()
        if len(slabs) != len(mappings):
            raise ManifestError(problem=f"{len(mappings)} slabs were mapped, {len(slabs)} came")
        for mapping, (fd, nbytes) in zip(mappings, slabs, strict=True):
            check_host_slab(fd, nbytes)
            if nbytes != len(mapping):
                raise ManifestError(problem=f"slab of {nbytes} bytes, {len(mapping)} were mapped")
        try:
            for mapping, (fd, _) in zip(mappings, slabs, strict=True):
                mapping.map(fd)
        except DeviceError:
            self.unmap()
            raise

    def _live(self) -> list[HostMapping]:
        return [mapping for reference in self._mappings if (mapping := reference()) is not None]


def _map_cuda(head: ManifestHead, filled: list[tuple[int, int]], lease: Lease, ordinal: int) -> MappedSlabs:
    import torch

    from ..shard.cuda import CudaMapping

    device = f"cuda:{ordinal}"
    shard = _CudaShard(CudaMapping.open(ordinal, filled), lease) if filled else None
    tensors = []
    number = 0
    for entry in head.slabs:
        if shard is None or not entry.nbytes:
            tensors.append(torch.empty(0, dtype=torch.uint8, device=device))
            continue
        arena = _Arena(shard, shard.mapping.address + shard.mapping.offsets[number], entry.nbytes)
        tensors.append(_as_tensor(arena, device))
        number += 1
    return MappedSlabs(tensors, None if shard is None else shard.mapping)


class _CudaShard:
    """Owns a shard's mapping and lease; both end, in this order, when no arena is left."""

    def __init__(self, mapping: CudaMapping, lease: Lease) -> None:
        self.mapping = mapping
        # Not at exit: the driver may be gone by then, and the kernel unmaps anyway.
        weakref.finalize(self, _end, mapping, lease).atexit = False


class _Arena:
    """A slab's device memory as torch takes it over: `torch.as_tensor` keeps this object while the storage lives."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        # numpy's array interface, version 3. Not marked as read-only, which torch would refuse; the mapping is.
        self.__cuda_array_interface__: dict[str, Any] = {
            "typestr": "|u1",
            "data": (address, False),
            "shape": (nbytes,),
            "version": 3,
        }


def device_tensor(owner: object, address: int, nbytes: int, device: str) -> torch.Tensor:
    """Device memory as a 1-D uint8 tensor, whose storage keeps `owner`; as writable as the memory is mapped."""
    return _as_tensor(_Arena(owner, address, nbytes), device)


def _as_tensor(arena: _Arena, device: str) -> torch.Tensor:
    import torch

    tensor = torch.as_tensor(arena, device=device)
    address = arena.__cuda_array_interface__["data"][0]
    if tensor.data_ptr() != address:
        raise DeviceError(device=device, problem=f"torch copied the slab at {address:#x} instead of sharing it")
    return tensor


def _end(mapping: CudaMapping, lease: Lease) -> None:
    """Unmaps while the lease still lives: this call holds its last reference."""
    mapping.close()
