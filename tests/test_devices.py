"""Devices of this host as they are, and GPU hosts as NVML would describe them."""

from __future__ import annotations

import ctypes.util
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from weightcached import devices
from weightcached.devices import (
    Device,
    Memory,
    all_devices,
    default_devices,
    device_memory,
    find_devices,
    gpu_devices,
    host_devices,
    host_memory,
    is_device_name,
    is_host,
)
from weightcached.errors import DeviceError, NoSuchDevice

GIB = 1 << 30
NODE_MEMINFO = """\
Node {node} MemTotal:       {total} kB
Node {node} MemFree:        {free} kB
Node {node} MemUsed:        1 kB
Node {node} Active(file):   77 kB
Node {node} FilePages:      {pages} kB
Node {node} Shmem:          {shmem} kB
"""


@dataclass
class Gpu:
    """What NVML tells of one GPU or MIG instance. `mig` None: the GPU cannot be split; a slot may be empty (None)."""

    uuid: str
    total: int = 80 * GIB
    free: int = 79 * GIB
    persistence: int | pynvml.NVMLError = 1
    mig: list[Gpu | None] | None = None
    mig_enabled: bool = field(default=True)
    lost: bool = False


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """``nvml(gpu, ...)`` puts these GPUs in place of the driver; returns counters of initialisations.

    Only the calls are replaced: error classes and constants are those of the real package.
    """

    def install(*gpus: Gpu) -> SimpleNamespace:
        counts = SimpleNamespace(init=0, shutdown=0)

        def count(name: str) -> None:
            setattr(counts, name, getattr(counts, name) + 1)

        def mig_mode(gpu: Gpu) -> tuple[int, int]:
            if gpu.mig is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return (int(gpu.mig_enabled), int(gpu.mig_enabled))

        def mig_handle(gpu: Gpu, index: int) -> Gpu:
            instance = (gpu.mig or [])[index]
            if instance is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return instance

        def by_uuid(uuid: str) -> Gpu:
            for handle in [*gpus, *(part for gpu in gpus for part in gpu.mig or [] if part)]:
                if handle.uuid == uuid:
                    return handle
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

        def memory(gpu: Gpu) -> SimpleNamespace:
            if gpu.lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return SimpleNamespace(total=gpu.total, free=gpu.free)

        def persistence(gpu: Gpu) -> int:
            if isinstance(gpu.persistence, pynvml.NVMLError):
                raise gpu.persistence
            return gpu.persistence

        calls = {
            "nvmlInit": lambda: count("init"),
            "nvmlShutdown": lambda: count("shutdown"),
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
            "nvmlDeviceGetHandleByUUID": by_uuid,
            "nvmlDeviceGetMigMode": mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: len(gpu.mig or []),
            "nvmlDeviceGetMigDeviceHandleByIndex": mig_handle,
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetPersistenceMode": persistence,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: "NVIDIA Test",
        }
        for name, call in calls.items():
            monkeypatch.setattr(pynvml, name, call)
        return counts

    return install


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with NUMA nodes 0 and 2, described as the kernel does below /sys/devices/system/node."""
    for node, free in ((0, 500), (2, 700)):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "meminfo").write_text(NODE_MEMINFO.format(node=node, total=1000, free=free, pages=200, shmem=50))
    (tmp_path / "online").write_text("0,2\n")
    monkeypatch.setattr(devices, "_NODES", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "GPU-1f0d9c2e-51d4-8f0e-95cb-2b2d2b6e0a17",
        "MIG-7a6a6e19-6d4c-5f4c-8b0c-6a3b5f0f7f11",
        "host-0",
        "host-12",
    ],
)
def test_names_of_devices(name: str) -> None:
    """UUIDs with NVML's prefix and host devices are names."""
    assert is_device_name(name)
    assert is_host(name) == name.startswith("host")


@pytest.mark.parametrize(
    "name",
    ["", "0", "cuda:0", "1f0d9c2e-51d4", "GPU-", "host-", "host-a", "host-\u0661", "GPU-../x", "GPU-a/b", "host-0\n"],
)
def test_what_is_no_name_of_a_device(name: str) -> None:
    """Ordinals, bare UUIDs and anything unfit for a file name are refused."""
    assert not is_device_name(name)


def test_a_gpu_that_fell_off_the_bus(nvml: Callable[..., SimpleNamespace], caplog: pytest.LogCaptureFixture) -> None:
    """It is left out, with a warning, and costs none of the others."""
    counts = nvml(Gpu("GPU-a"), Gpu("GPU-b", lost=True), Gpu("GPU-c"))
    assert [device.name for device in gpu_devices()] == ["GPU-a", "GPU-c"]
    assert "GPU number 1 has fallen off the bus and is left out" in caplog.text
    assert (counts.init, counts.shutdown) == (1, 1)


def test_the_hosts_own_memory() -> None:
    """Each NUMA node of this host is a device; together they have what /proc/meminfo says."""
    found = host_devices()

    total = int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]
    assert found[0].name == "host-0"
    assert sum(device.memory.total for device in found) == pytest.approx(total, rel=0.05)
    assert all(0 < device.memory.free <= device.memory.total for device in found)
    assert device_memory("host-0").total == found[0].memory.total


def test_page_cache_counts_as_free_on_a_numa_node(two_nodes: None) -> None:
    """On several nodes free is MemFree and the page cache, less shared memory, which does not give way."""
    assert host_memory(2) == Memory(total=1000 * 1024, free=(700 + 200 - 50) * 1024)
    assert [device.name for device in host_devices()] == ["host-0", "host-2"]


def test_a_node_that_is_not_there(two_nodes: None) -> None:
    """Asking for its memory names the nodes that are."""
    with pytest.raises(NoSuchDevice, match="no device host-1; devices here: host-0, host-2"):
        device_memory("host-1")


def test_further_host_devices_exist_by_being_named(two_nodes: None) -> None:
    """After the last node's number any may be named, none is found by itself; each has the memory of the whole host."""
    named = find_devices(["host-3", "host-0", "host-7"])
    assert [device.name for device in named] == ["host-3", "host-0", "host-7"]
    assert named[0].memory.total == named[2].memory.total == host_memory(3).total > named[1].memory.total
    assert [device.name for device in host_devices()] == ["host-0", "host-2"]
    for name in ("host-1", "host-x", "host-", "host-03"):
        with pytest.raises(NoSuchDevice, match=f"no device {name}; devices here: host-0, host-2"):
            find_devices([name])


def test_a_host_without_a_driver_has_no_gpu() -> None:
    """NVML's library is missing: no GPU, and by default the first host device is used."""
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this host has NVML")

    assert gpu_devices() == []
    assert default_devices() == host_devices()[:1]
    with pytest.raises(DeviceError, match=r"GPU-x: NVML cannot read its memory: .*[Nn]ot [Ff]ound"):
        device_memory("GPU-x")


def test_gpus_as_nvml_lists_them(nvml: Callable[..., SimpleNamespace]) -> None:
    """Each GPU has its UUID, memory and persistence mode; NVML is shut down again."""
    counts = nvml(Gpu("GPU-a", free=5 * GIB), Gpu("GPU-b", persistence=0))

    found = gpu_devices()

    assert found == [
        Device("GPU-a", "NVIDIA Test", Memory(80 * GIB, 5 * GIB), persistence=True),
        Device("GPU-b", "NVIDIA Test", Memory(80 * GIB, 79 * GIB), persistence=False),
    ]
    assert default_devices() == found
    assert counts.init == counts.shutdown > 0


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT])
def test_a_split_gpu_gives_its_instances(nvml: Callable[..., SimpleNamespace], code: int) -> None:
    """MIG instances stand in for their GPU; empty slots are passed over; an instance has no persistence mode."""
    instance = Gpu("MIG-b", total=10 * GIB, free=9 * GIB, persistence=pynvml.NVMLError(code))
    nvml(Gpu("GPU-a", mig=[None, instance, None]), Gpu("GPU-c", mig=[], mig_enabled=False))

    assert [(device.name, device.persistence) for device in gpu_devices()] == [("MIG-b", None), ("GPU-c", True)]
    assert device_memory("MIG-b") == Memory(total=10 * GIB, free=9 * GIB)


def test_a_gpu_split_into_nothing_is_listed_itself(nvml: Callable[..., SimpleNamespace]) -> None:
    """MIG enabled with no instance made yet: the GPU is still there to be named in an error."""
    nvml(Gpu("GPU-a", mig=[None]))

    assert [device.name for device in gpu_devices()] == ["GPU-a"]


def test_a_driver_that_fails_is_an_error(nvml: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is there but broken is not taken for a host without GPUs; NVML is shut down all the same."""
    counts = nvml(Gpu("GPU-a"))

    def lost(handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)

    with pytest.raises(DeviceError, match="NVML: cannot list devices: GPU is lost"):
        gpu_devices()
    with pytest.raises(DeviceError, match="GPU-a: NVML cannot read its memory: GPU is lost"):
        device_memory("GPU-a")
    assert counts.init == counts.shutdown == 2


def test_a_driver_that_does_not_match_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a driver upgrade without a reboot NVML refuses to start; the reason is in the message."""

    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)

    with pytest.raises(DeviceError, match=r"NVML: cannot be started: .*[Vv]ersion"):
        gpu_devices()


def test_a_driver_that_is_not_loaded_is_a_host_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library alone, as in an image for GPU hosts that runs elsewhere, means no GPU."""

    def not_loaded() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", not_loaded)

    assert gpu_devices() == []


def test_devices_are_found_in_the_order_asked(nvml: Callable[..., SimpleNamespace]) -> None:
    """The order of names is the order of ranks."""
    nvml(Gpu("GPU-a"), Gpu("GPU-b"))

    assert [device.name for device in find_devices(["GPU-b", "host-0", "GPU-a"])] == ["GPU-b", "host-0", "GPU-a"]


def test_an_unknown_device_is_named_with_those_that_exist(nvml: Callable[..., SimpleNamespace]) -> None:
    """The error carries the wanted name and every device of the host."""
    nvml(Gpu("GPU-a"))

    with pytest.raises(NoSuchDevice) as caught:
        find_devices(["GPU-a", "GPU-z"])

    assert caught.value.fields == {"device": "GPU-z", "known": [device.name for device in all_devices()]}
    assert caught.value.known[0] == "GPU-a"


def test_host_devices_are_found_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of host devices starts even where the GPU driver is broken."""

    def broken() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlInit", broken)

    assert [device.name for device in find_devices(["host-0"])] == ["host-0"]


@pytest.mark.gpu
def test_real_gpus() -> None:
    """On a GPU host every name has the form of one and its memory can be read by that name."""
    for device in gpu_devices():
        assert is_device_name(device.name)
        assert 0 < device.memory.free <= device.memory.total
        assert device_memory(device.name).total == device.memory.total
