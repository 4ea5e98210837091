"""client/mapping.py on a real GPU: torch shares the mapped memory, and it ends when the last tensor is gone."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import gpu
from tests.client.handmade import Raw, make_shard
from tests.leaks import NoDescriptorLeaks
from weightcached.client.leases import Lease
from weightcached.client.mapping import copy_slabs, map_slabs
from weightcached.client.target import Target, resolve
from weightcached.errors import ManifestError
from weightcached.fds import OwnedFd
from weightcached.shard.cuda import CudaSlab, device_name
from weightcached.shard.manifest import ManifestHead

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def target() -> Target:
    """The first GPU, with torch's CUDA started."""
    torch.zeros(1, device="cuda:0")
    return Target(device_name(0), 0)


@pytest.fixture
def peers() -> Iterator[tuple[list[Lease], socket.socket]]:
    """A list that holds a lease, and the worker's end of its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    yield [Lease(ours)], theirs
    theirs.close()


def shard_of(parts: list[bytes]) -> tuple[ManifestHead, list[OwnedFd]]:
    """A head and GPU slabs with these contents; an empty part is a slab of the least size."""
    raws = [Raw(str(number), "U8", (len(part),), part) for number, part in enumerate(parts)]
    host = make_shard(raws, slabs=len(parts), device=device_name(0))
    host.close()
    slabs = []
    for part in parts:
        slab = CudaSlab.create(0, len(part))
        if part:
            gpu.fill(slab, part)
        slabs.append(slab.seal())
    return host.head, slabs


def map_parts(parts: list[bytes], lease: Lease, target: Target) -> list[torch.Tensor]:
    """The mapped slabs; descriptors are closed."""
    head, slabs = shard_of(parts)
    tensors = map_slabs(head, slabs, lease, target)
    for slab in slabs:
        slab.close()
    return tensors


def ended(theirs: socket.socket) -> bool:
    """Whether the other side has closed."""
    theirs.setblocking(False)
    try:
        return theirs.recv(1) == b""
    except BlockingIOError:
        return False


def test_torch_shares_the_slabs(target: Target, peers: tuple[list[Lease], socket.socket]) -> None:
    """Each slab is a uint8 tensor with its bytes and a storage of its own; empty ones are empty; nothing leaks."""
    parts = [os.urandom(3 * MIB + 5), b"", os.urandom(77)]
    with NoDescriptorLeaks():
        tensors = map_parts(parts, peers[0][0], target)

    assert [bytes(tensor.cpu().numpy()) for tensor in tensors] == parts
    assert all(tensor.device == torch.device("cuda:0") for tensor in tensors)
    assert tensors[0].untyped_storage().nbytes() == len(parts[0])
    assert tensors[2].data_ptr() % (2 * MIB) == 0
    tensors.clear()


def test_the_last_tensor_frees_memory_and_ends_the_lease(
    target: Target, peers: tuple[list[Lease], socket.socket]
) -> None:
    """Neither goes while a view lives; both go with the last, though the descriptors were closed long before."""
    leases, theirs = peers
    before = gpu.used_bytes(0)
    tensors = map_parts([bytes(256 * MIB)], leases.pop(), target)
    view: list[Any] = [tensors.pop()[MIB : 2 * MIB].view(torch.float16)]
    gc.collect()
    assert not ended(theirs)
    assert gpu.used_bytes(0) - before >= 256 * MIB

    view.clear()
    gc.collect()

    assert ended(theirs)
    assert gpu.becomes_true(lambda: gpu.used_bytes(0) - before < 64 * MIB)


def test_a_running_kernel_is_waited_for(target: Target, peers: tuple[list[Lease], socket.socket]) -> None:
    """Tensors dropped while work on them is queued: the result is right, nothing faults."""
    data = torch.ones(64 * MIB, dtype=torch.uint8)
    tensors = map_parts([bytes(data.numpy())], peers[0].pop(), target)
    total = torch.zeros((), dtype=torch.int64, device="cuda:0")
    for _ in range(50):
        total += tensors[0].sum(dtype=torch.int64)

    tensors.clear()
    gc.collect()

    assert total.item() == 50 * 64 * MIB


def test_the_last_tensor_may_die_in_another_thread(target: Target, peers: tuple[list[Lease], socket.socket]) -> None:
    """The memory is unmapped from whichever thread drops the last tensor."""
    leases, theirs = peers
    tensors = map_parts([os.urandom(MIB)], leases.pop(), target)
    gc.collect()

    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()

    assert ended(theirs)


def test_copies_outlive_the_mapping(target: Target, peers: tuple[list[Lease], socket.socket]) -> None:
    """Copies are complete when `copy_slabs` returns, writable, and independent of the mapping."""
    data = os.urandom(32 * MIB)
    tensors = map_parts([data], peers[0].pop(), target)
    copies = copy_slabs(tensors)
    tensors.clear()
    gc.collect()

    assert bytes(copies[0].cpu().numpy()) == data
    copies[0].zero_()
    assert copies[0].count_nonzero().item() == 0


def test_a_slab_of_another_size_is_refused(target: Target, peers: tuple[list[Lease], socket.socket]) -> None:
    """A slab that is larger than the manifest says is refused, and nothing stays mapped."""
    before = gpu.used_bytes(0)
    head, slabs = shard_of([bytes(8)])
    _, larger = shard_of([bytes(256 * MIB)])
    with pytest.raises(ManifestError):
        map_slabs(head, larger, peers[0][0], target)
    for slab in slabs + larger:
        slab.close()
    gc.collect()
    assert gpu.becomes_true(lambda: gpu.used_bytes(0) - before < 64 * MIB)


def test_names_and_ordinals(target: Target) -> None:
    """Nothing given, "cuda", the ordinal and the name are one device, named as NVML names it."""
    for device in (None, "cuda", "cuda:0", torch.device("cuda", 0), target.name):
        assert resolve(device) == target
