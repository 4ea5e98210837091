"""Installing, unmapping and private copies on a real GPU: read-only memory at addresses that stay."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import gpu
from tests.client.test_mapping_gpu import MIB, shard_of
from weightcached.client.leases import Lease
from weightcached.client.mapping import map_slabs
from weightcached.client.target import Target
from weightcached.client.weights import Weights
from weightcached.fds import OwnedFd
from weightcached.shard.cuda import device_name
from weightcached.shard.manifest import ManifestHead, TensorEntry, TensorTable, read_documents, write_manifest

pytestmark = pytest.mark.gpu
Shard = tuple[Weights, Lease, ManifestHead, list[OwnedFd]]


@pytest.fixture
def shard() -> Iterator[list[Shard]]:
    """Weights over 64 MiB of a GPU: "w" of 16 Mi floats; and the head and slabs that they were mapped from."""
    torch.zeros(1, device="cuda:0")
    data = torch.arange(16 * MIB, dtype=torch.float32)
    head, slabs = shard_of([data.numpy().tobytes()])
    table = TensorTable((TensorEntry("w", 0, 0, 64 * MIB, "F32", (16 * MIB,)),))
    with write_manifest(head, table) as fd:
        _, document = read_documents(fd.fileno())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lease = Lease(ours)
    weights = Weights(head, document, map_slabs(head, slabs, lease, Target(device_name(0), 0)), lease)
    yield [(weights, lease, head, slabs)]
    for slab in slabs:
        slab.close()
    theirs.close()


def test_a_captured_graph_is_valid_after_a_remap(shard: list[Shard]) -> None:
    """A CUDA graph that reads the memory gives the same result after `unmap` and a mapping at the same address."""
    weights, _, head, slabs = shard[0]
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.empty(16 * MIB, device="meta")))
    weights.install(model)
    total = torch.zeros((), device="cuda:0", dtype=torch.float64)
    torch.sum(model.w.data[:1024].double(), 0, out=total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(model.w.data[:1024].sum(dtype=torch.float64))
    address, before = model.w.data_ptr(), gpu.used_bytes(0)
    mapped: Any = weights._mapped

    mapped.unmap()
    for slab in slabs:
        assert not slab.closed
    mapped.remap(head, slabs)
    total.zero_()
    graph.replay()

    assert total.item() == 1023 * 1024 / 2
    assert model.w.data_ptr() == address
    assert abs(gpu.used_bytes(0) - before) < 32 * MIB


def test_unmapping_frees_the_memory(shard: list[Shard]) -> None:
    """With no descriptor left, the device has the bytes back while the tensor keeps its address."""
    weights, _, _, slabs = shard[0]
    tensor = weights["w"]
    address, before = tensor.data_ptr(), gpu.used_bytes(0)
    weights.unmap()
    for slab in slabs:
        slab.close()
    assert gpu.becomes_true(lambda: before - gpu.used_bytes(0) >= 60 * MIB)
    assert tensor.data_ptr() == address


def test_a_private_copy_may_be_written(shard: list[Shard]) -> None:
    """The installed parameter is writable memory of torch's own afterwards, with the same values."""
    weights, _, _, _ = shard[0]
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.empty(16 * MIB, device="meta")))
    weights.install(model)
    address = model.w.data_ptr()
    weights.private_copy()
    gc.collect()
    assert model.w.data_ptr() != address
    assert model.w[77].item() == 77
    model.w.data.add_(1)
    torch.cuda.synchronize()
    assert model.w[77].item() == 78


def test_a_tensor_for_the_host_is_there() -> None:
    """An `on_host` entry of a GPU's slab is a CPU tensor with its bytes."""
    torch.zeros(1, device="cuda:0")
    data = os.urandom(256)
    head, slabs = shard_of([data])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, write_manifest(head, TensorTable((TensorEntry("m", 0, 0, 256, "U8", (256,), on_host=True),))) as fd:
        _, document = read_documents(fd.fileno())
        lease = Lease(ours)
        weights = Weights(head, document, map_slabs(head, slabs, lease, Target(device_name(0), 0)), lease)
        assert weights["m"].device.type == "cpu" and bytes(weights["m"].numpy()) == data
        weights.close()
    for slab in slabs:
        slab.close()
