"""loader.slabs: from a plan to sealed slabs with checksums, all or none, on host devices and on (fake) GPUs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import FakeDriver, Gpu, Status
from tests.leaks import NoDescriptorLeaks
from tests.loader.in_threads import thread_readers
from tests.loader.loads import MakeCheckpoint, Raw, noise, slab_of
from tests.loader.whole import columns
from tests.running import children_of
from tests.shard.mix64 import mix64_sum
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointChanged, DeviceError, DeviceFull, NoSuchDevice
from weightcached.loader import slabs as slabs_module
from weightcached.loader.pipeline import LoadResult
from weightcached.loader.plan import LoadPlan, plan_load
from weightcached.loader.readers import Readers
from weightcached.loader.slabs import Devices, Filled, fill_slabs, replicas_of
from weightcached.memfd import SEALS
from weightcached.shard.checksum import checksum_host
from weightcached.shard.host import HostSlab
from weightcached.shard.manifest import MIX64_SUM, XXH3_64

GPUS = ("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f")
STAGING = 16 << 20
RAW: Raw = {f"w{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate((700, 0, 30_000, 1, 5000))}
WHOLE = [columns(name, 1, len(data), 0, len(data)) for name, (_, _, data) in RAW.items()]
SHARDS = [WHOLE, [columns("w2", 30, 1000, 100, 250, tail=6), WHOLE[3]]]

pytestmark = pytest.mark.usefixtures("descriptors")


@pytest.fixture
def path(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(tmp_path / "model.safetensors", RAW)


def fill(
    path: Path, devices: Sequence[str], progress: Callable[[int], None] = lambda done: None
) -> tuple[LoadPlan, list[Filled], LoadResult]:
    """By a reader in a thread; the caller closes what is filled."""
    with Devices(devices) as made, open_checkpoint(path) as checkpoint, thread_readers(1) as readers:
        plan = plan_load(checkpoint, SHARDS)
        filled, result = fill_slabs(plan, checkpoint, made, STAGING, readers, progress)
    return plan, filled, result


@pytest.mark.parametrize("devices", [("host-0", "host-1"), GPUS], ids=["host", "gpu"])
def test_sealed_slabs_and_their_checksums(path: Path, fake: FakeDriver, devices: tuple[str, str]) -> None:
    """Each rank's slab is filled, cannot change any more, and has one checksum for each tensor, of the kind of its
    device; nothing but the descriptors is left."""
    plan, filled, result = fill(path, devices)
    assert len(filled) == 2
    for number, (part, slab) in enumerate(zip(filled, plan.slabs, strict=True)):
        with part.fd as fd:
            data = os.pread(fd.fileno(), slab.nbytes, 0)
            if devices[0].startswith("host"):
                assert fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS) & SEALS == SEALS
                assert os.fstat(fd.fileno()).st_size == slab.nbytes
        assert data == slab_of(RAW, plan, SHARDS, number)
        pieces = [data[entry.offset : entry.offset + entry.nbytes] for entry in slab.entries]
        if devices[0].startswith("host"):
            assert part.checksums == checksum_host(memoryview(data), slab.entries)
            assert part.checksums.algorithm == XXH3_64
        else:
            assert part.checksums.algorithm == MIX64_SUM
            assert part.checksums.values == tuple(map(mix64_sum, pieces))
    assert result.bytes_read == path.stat().st_size
    assert fake.live() == {}


def test_each_slab_is_on_its_own_device(path: Path, fake: FakeDriver) -> None:
    """Devices are found by name, whatever order the process sees them in."""
    made: dict[int, Gpu] = {}
    create = fake.cuMemCreate

    def noted(size: int, prop: Any, flags: int) -> Any:
        result = create(size, prop, flags)
        made[len(made)] = fake.gpus[prop.location.id]
        return result

    fake.cuMemCreate = noted  # type: ignore[method-assign]
    _, filled, _ = fill(path, (GPUS[1], GPUS[0]))
    for part in filled:
        part.fd.close()
    assert [made[0], made[1]] == [fake.gpus[1], fake.gpus[0]]


def test_contexts_are_made_ahead(fake: FakeDriver) -> None:
    """Each GPU, named once or twice, gets one context, in another thread; all are given back, and host devices have
    none."""
    with Devices([GPUS[1], GPUS[0], GPUS[1]]) as devices:
        devices.ready()
        assert not devices.host
        assert fake.live() == {"contexts": 2}
    devices.close()
    assert fake.live() == {}
    with Devices(["host-0", "host-7"]) as devices:
        devices.ready()
        assert devices.host
        assert fake.live() == {}


def test_a_gpu_without_a_context(fake: FakeDriver) -> None:
    """What goes wrong while contexts are made is said when they are needed; those that were made are given back."""

    class Failing(dict[int, Any]):
        def pop(self, number: int, default: Any = None) -> Any:  # type: ignore[override]
            retained = fake.calls.count("cuDevicePrimaryCtxRetain")
            return Status.CUDA_ERROR_UNKNOWN if retained == 2 else default

    fake.failures = Failing()
    with Devices(GPUS) as devices:
        with pytest.raises(DeviceError, match="cuDevicePrimaryCtxRetain: CUDA_ERROR_UNKNOWN"):
            devices.ready()
        fake.failures = {}
    assert fake.live() == {}


def test_no_reader_is_left_when_slabs_are_sealed(path: Path) -> None:
    """The readers have ended when host slabs are sealed, since nobody else may have a sealed slab's memory writable."""
    before = children_of(os.getpid())
    with open_checkpoint(path) as checkpoint, Devices(("host-0", "host-1")) as devices, Readers(1) as readers:
        assert len(children_of(os.getpid())) == len(before) + 1
        filled, _ = fill_slabs(plan_load(checkpoint, SHARDS), checkpoint, devices, STAGING, readers)
        assert children_of(os.getpid()) == before
    for part in filled:
        part.fd.close()


def test_a_full_device_leaves_the_others_as_they_were(
    path: Path, fake: FakeDriver, descriptors: NoDescriptorLeaks
) -> None:
    """The second device has no room: what was taken on the first is given back, and nothing has been read."""
    fake.gpus[1].total = 1 << 20
    seen: list[int] = []
    with pytest.raises(DeviceFull, match=GPUS[1]):
        fill(path, GPUS, seen.append)
    assert seen == []
    assert fake.live() == {}
    descriptors.check()


def test_a_device_that_is_not_there(path: Path, fake: FakeDriver) -> None:
    """The name that nobody has is in the error, and the first device is as it was."""
    with pytest.raises(NoSuchDevice, match="GPU-none"):
        fill(path, (GPUS[0], "GPU-none"))
    assert fake.live() == {}


@pytest.mark.parametrize("devices", [("host-0", "host-1"), GPUS], ids=["host", "gpu"])
def test_a_checkpoint_that_changes(path: Path, fake: FakeDriver, devices: tuple[str, str]) -> None:
    """An error of the load leaves no slab on any device."""
    os.utime(path, (0, 0))
    with pytest.raises(CheckpointChanged):
        fill(path, devices, lambda done: os.utime(path))
    assert fake.live() == {}


def test_a_host_without_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second host slab cannot be had: the first is given back."""
    made: list[HostSlab] = []

    def make(nbytes: int) -> HostSlab:
        if made:
            raise DeviceError(device="host", problem="planted")
        made.append(HostSlab(nbytes))
        return made[0]

    monkeypatch.setattr(slabs_module, "HostSlab", make)
    with pytest.raises(DeviceError, match="planted"):
        fill(path, ("host-0", "host-1"))
    with pytest.raises(ValueError, match="closed"):
        made[0].fileno()


def test_a_checksum_that_fails(path: Path, fake: FakeDriver) -> None:
    """An error after the load, while the slabs are looked at, leaves nothing either."""

    class Failing(dict[int, Any]):
        def pop(self, number: int, default: Any = None) -> Any:  # type: ignore[override]
            return Status.CUDA_ERROR_UNKNOWN if fake.calls[-1] == "cuLaunchKernel" else default

    fake.failures = Failing()
    with pytest.raises(DeviceError, match="cuLaunchKernel: CUDA_ERROR_UNKNOWN"):
        fill(path, GPUS)
    assert fake.live() == {}


def test_a_slab_that_cannot_be_sealed(path: Path, fake: FakeDriver, descriptors: NoDescriptorLeaks) -> None:
    """When the second slab fails to become a descriptor, the first one's is closed again."""

    class Failing(dict[int, Any]):
        def pop(self, number: int, default: Any = None) -> Any:  # type: ignore[override]
            name = "cuMemExportToShareableHandle"
            failing = fake.calls[-1] == name and fake.calls.count(name) == 2
            return Status.CUDA_ERROR_UNKNOWN if failing else default

    fake.failures = Failing()
    with pytest.raises(DeviceError, match="cuMemExportToShareableHandle: CUDA_ERROR_UNKNOWN"):
        fill(path, GPUS)
    assert fake.live() == {}
    descriptors.check()


def test_which_ranks_are_replicas() -> None:
    """Those whose slices are all the same as an earlier one's: the first such is named."""
    other = [columns("w2", 30, 1000, 100, 250)]
    assert replicas_of([WHOLE, other, list(WHOLE), other, WHOLE[:3]]) == {2: 0, 3: 1}
    assert replicas_of([WHOLE]) == {}


def test_a_replica_that_is_none_is_found(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """By the checksums, before anything is sealed: whatever a copy between devices does, no wrong bytes get out."""
    path = make_checkpoint(tmp_path / "model.safetensors", RAW)
    with open_checkpoint(path) as checkpoint, Devices(["host-0", "host-1"]) as devices:
        plan = plan_load(checkpoint, SHARDS)
        with pytest.raises(DeviceError, match="host-1: holds other bytes than host-0, of which it was to have a copy"):
            fill_slabs(plan, checkpoint, devices, STAGING, thread_readers(1), replicas={1: 0})
