"""Verifying a GPU's memory through a real service, by a child with a CUDA context of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from tests import gpu
from tests.client.handmade import HandMade, publish
from tests.running import RunningService
from tests.service.conftest import StartService
from tests.shard.test_checksum import layout
from weightcached.fds import FdSet
from weightcached.paths import socket_path
from weightcached.shard import cuda
from weightcached.shard.cuda import CudaMapping, CudaSlab, PrimaryContext
from weightcached.shard.cuda_checksum import checksum_slab
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ManifestHead, SlabEntry, TensorTable, write_manifest
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
MIB = 1 << 20
SIZES = [0, 1, 1000, 40 * MIB + 3, 5 * MIB]


@pytest.fixture
def device() -> Iterator[str]:
    """The first GPU, with this process's context kept for the test."""
    context = PrimaryContext(0)
    yield cuda.device_name(0)
    context.close()


def published(device: str, *, checksums: bool = True) -> int:
    """Publishes random tensors as "m", with their checksums; returns the bytes of the slab."""
    entries = layout(SIZES)
    size = entries[-1].offset + entries[-1].nbytes
    slab = CudaSlab.create(0, size)
    gpu.fill(slab, os.urandom(size))
    computed = checksum_slab(slab.context, slab.address, entries)
    head = ManifestHead(
        model="m",
        generation=1,
        device=device,
        key=ShardKey("c0"),
        slabs=(SlabEntry(size),),
        tensor_count=len(entries),
        created=datetime.now(UTC).isoformat(),
    )
    table = TensorTable(tuple(entries), {"tied": "w3"})
    manifest = write_manifest(head, table, computed if checksums else None)
    publish(HandMade(head, table, manifest, [slab.seal()]))
    return size


def attached(device: str) -> tuple[Connection, FdSet]:
    """A lease and its descriptors, manifest first."""
    worker = Connection.open(socket_path(device), device=device)
    _, fds = worker.request(Attach(model="m"))
    return worker, fds


def flip(device: str, size: int, offset: int) -> None:
    """Changes one bit of the cached slab, as any process of the user can that maps its descriptor writable."""
    worker, fds = attached(device)
    with worker, fds:
        mapping = CudaMapping.open(0, [(list(fds)[1].fileno(), size)], read_only=False)
        old = gpu.read(0, mapping.address + offset, 1)[0]
        context = PrimaryContext(0)
        with context.current():
            result = cuda.driver().cuMemcpyHtoD(mapping.address + offset, bytes([old ^ 4]), 1)
            cuda.check(result, "cuMemcpyHtoD")
        context.synchronize()
        context.close()
        mapping.close()


def results(service: RunningService, code: int = 0) -> list[dict[str, object]]:
    """What --json says, for a verify that must find nothing."""
    return json.loads(service.ctl("verify", "m", "--json", code=code))["results"]


def test_a_planted_flip_is_found_and_taken_back(start_service: StartService, device: str) -> None:
    """Untouched: nothing differs. One bit changed in place: that tensor, exit code 1. Changed back: nothing again."""
    service = start_service(f'devices = ["{device}"]\n').ready()
    size = published(device)
    (result,) = results(service)
    assert (result["device"], result["tensors"], result["bytes"], result["differ"]) == (device, 5, sum(SIZES), [])
    at = layout(SIZES)[3].offset + 33 * MIB + 7
    flip(device, size, at)
    service.ctl("verify", "m", code=1)
    assert "m on " + device in service.log
    assert "1 of 5 tensors are not what was published: w3" in service.log
    flip(device, size, at)
    assert results(service)[0]["differ"] == []
    service.stop()


def test_the_verifiers_context_is_gone_with_it(start_service: StartService, device: str) -> None:
    """Afterwards the device has as much memory in use as before, and the cached bytes are what they were."""
    service = start_service(f'devices = ["{device}"]\n').ready()
    size = published(device)
    worker, fds = attached(device)
    with worker, fds:
        mapping = CudaMapping.open(0, [(list(fds)[1].fileno(), size)])
        content = gpu.read(0, mapping.address, size)
        before = gpu.used_bytes(0)
        results(service)
        assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= before + 8 * MIB)
        assert gpu.read(0, mapping.address, size) == content
        mapping.close()
    service.stop()


def test_a_shard_without_checksums_is_refused(start_service: StartService, device: str) -> None:
    """Nothing was compared: exit code 1."""
    service = start_service(f'devices = ["{device}"]\n').ready()
    published(device, checksums=False)
    assert "no checksums recorded" in service.ctl("verify", "m", code=1)
    service.stop()
