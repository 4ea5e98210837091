"""From a shard's descriptors to mapped memory: one uint8 tensor a slab, which keeps the mapping and the lease alive.

    host   tensor -> HostMapping -> Lease                     a private mapping of a sealed memfd
    GPU    tensor -> _Arena -> _CudaShard -> CudaMapping      read-only, one address range for all slabs
                                          -> Lease

There is nothing to close: the memory is unmapped, and the worker told, when the last tensor made from it is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, ManifestError
from ..fds import OwnedFd
from ..shard.host import map_host_slab
from ..shard.manifest import ManifestHead
from .leases import Lease
from .target import Target

if TYPE_CHECKING:
    import torch

    from ..shard.cuda import CudaMapping


def map_slabs(head: ManifestHead, slabs: Sequence[OwnedFd], lease: Lease, target: Target) -> list[torch.Tensor]:
    """One 1-D uint8 tensor for each slab, in order; an empty slab is an empty tensor.

    The descriptors stay the caller's and may be closed afterwards: mappings hold the memory. Host memory is
    copy-on-write, so a write stays in this process; GPU memory is read-only, a write there is a CUDA error.
    Raises `ManifestError`, `WrongDevice` or `DeviceError` with nothing left mapped.
    """
    if len(slabs) != len(head.slabs):
        raise ManifestError(problem=f"{len(head.slabs)} slabs listed, {len(slabs)} descriptors came")
    if target.ordinal is None:
        return _map_host(head, slabs, lease)
    return _map_cuda(head, slabs, lease, target.ordinal)


def copy_slabs(slabs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Private writable copies with the same layout, one allocation a slab; complete when it returns."""
    import torch

    copies = [torch.empty_like(slab).copy_(slab) for slab in slabs]
    for copy in copies:
        if copy.is_cuda:  # the source may be unmapped as soon as the caller drops it
            torch.cuda.current_stream(copy.device).synchronize()
    return copies


def _map_host(head: ManifestHead, slabs: Sequence[OwnedFd], lease: Lease) -> list[torch.Tensor]:
    import torch

    tensors = []
    for fd, entry in zip(slabs, head.slabs, strict=True):
        mapping = map_host_slab(fd.fileno(), entry.nbytes)
        if mapping is None:
            tensors.append(torch.empty(0, dtype=torch.uint8))
        else:
            mapping.lease = lease
            tensors.append(torch.frombuffer(mapping, dtype=torch.uint8))
    return tensors


def _map_cuda(head: ManifestHead, slabs: Sequence[OwnedFd], lease: Lease, ordinal: int) -> list[torch.Tensor]:
    import torch

    from ..shard.cuda import CudaMapping

    device = f"cuda:{ordinal}"
    filled = [(fd.fileno(), entry.nbytes) for fd, entry in zip(slabs, head.slabs, strict=True) if entry.nbytes]
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
    return tensors


class _CudaShard:
    """Owns a shard's mapping and lease; both end, in this order, when no arena is left."""

    def __init__(self, mapping: CudaMapping, lease: Lease) -> None:
        self.mapping = mapping
        # Not at exit: the driver may be gone by then, and the kernel unmaps anyway.
        weakref.finalize(self, _end, mapping, lease).atexit = False


class _Arena:
    """A slab's device memory as torch takes it over: `torch.as_tensor` keeps this object while the storage lives."""

    def __init__(self, shard: _CudaShard, address: int, nbytes: int) -> None:
        self._shard = shard
        # numpy's array interface, version 3. Not marked as read-only, which torch would refuse; the mapping is.
        self.__cuda_array_interface__: dict[str, Any] = {
            "typestr": "|u1",
            "data": (address, False),
            "shape": (nbytes,),
            "version": 3,
        }


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
