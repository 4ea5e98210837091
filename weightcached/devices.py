"""Which devices exist, how much memory they have, and how a CUDA ordinal becomes a name.

A device is named ``GPU-<uuid>`` or ``MIG-<uuid>`` as NVML prints it, or ``host-<n>``, one per NUMA node. Numbers after
the last node's are further host devices, for several ranks on one host; they exist by being named. An ordinal is never
identity: under CUDA_VISIBLE_DEVICES NVML's index and CUDA's differ.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import DeviceError, NoSuchDevice

_NODES = Path("/sys/devices/system/node")
_NAME = re.compile(r"(GPU|MIG)-[0-9A-Za-z-]+|host-[0-9]+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device: all it has, and what nobody uses now."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `persistence` is NVML's persistence mode, None where there is none to read."""

    name: str
    model: str
    memory: Memory
    persistence: bool | None = None


def is_device_name(name: str) -> bool:
    """Whether `name` has the form of a device's name; such a name is always fit to be a file name."""
    return _NAME.fullmatch(name) is not None


def is_host(name: str) -> bool:
    return name.startswith("host-")


def host_devices() -> list[Device]:
    """One device per NUMA node, with the memory that /proc/meminfo or the node's own meminfo reports."""
    return [Device(f"host-{node}", "host memory", host_memory(node)) for node in _numa_nodes()]


def gpu_devices() -> list[Device]:
    """Every GPU and MIG instance that NVML lists and reaches; none without a driver.

    `DeviceError` if NVML is there but fails.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        raise DeviceError(device="NVML", problem=f"cannot be started: {error}") from error
    try:
        found = []
        lost = None
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
                found += [_describe(handle) for handle in (_mig_instances(gpu) or [gpu])]
            except pynvml.NVMLError_GpuIsLost as error:  # listed all the same, until the host starts again
                _log.warning("GPU number %d has fallen off the bus and is left out", index)
                lost = error
        if lost is not None and not found:
            raise lost  # this is no host without a GPU
        return found
    except pynvml.NVMLError as error:
        raise DeviceError(device="NVML", problem=f"cannot list devices: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def all_devices() -> list[Device]:
    return gpu_devices() + host_devices()


def default_devices() -> list[Device]:
    """What ``devices = "all"`` means: every GPU; on a host without one, its first NUMA node."""
    return gpu_devices() or host_devices()[:1]


def find_devices(names: list[str]) -> list[Device]:
    """The named devices in order. `NoSuchDevice` names the first that is not here and what is."""
    known = {device.name: device for device in (host_devices() if all(map(is_host, names)) else all_devices())}
    whole: Memory | None = None  # of the host, read once: devices that share it have the same
    for name in names:
        if _is_further_host(name):
            whole = whole or (known["host-0"].memory if len(_numa_nodes()) == 1 else device_memory(name))
            known[name] = Device(name, "host memory", whole)
        elif name not in known:
            raise NoSuchDevice(device=name, known=[device.name for device in all_devices()])
    return [known[name] for name in names]


def device_memory(name: str) -> Memory:
    """Total and free bytes now. Costs an NVML call for a GPU; makes no CUDA context."""
    if is_host(name):
        return host_memory(int(name.removeprefix("host-")))
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(name))
            return Memory(total=int(info.total), free=int(info.free))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise DeviceError(device=name, problem=f"NVML cannot read its memory: {error}") from error


def host_memory(node: int) -> Memory:
    """Bytes of one NUMA node. With a single node, and for a device after the last, they are those of the whole host.

    There MemAvailable counts as free, since page cache gives way.
    """
    nodes = _numa_nodes()
    if len(nodes) == 1 or node > nodes[-1]:
        info = _meminfo(Path("/proc/meminfo"))
        return Memory(total=info["MemTotal"], free=info["MemAvailable"])
    if node not in nodes:
        raise NoSuchDevice(device=f"host-{node}", known=[f"host-{known}" for known in nodes])
    info = _meminfo(_NODES / f"node{node}" / "meminfo")
    return Memory(total=info["MemTotal"], free=info["MemFree"] + info.get("FilePages", 0) - info.get("Shmem", 0))


def memory_pool(name: str) -> str:
    """What memory a device's bytes are of: its own, but for host devices that have no NUMA node to themselves."""
    return "host" if is_host(name) and (len(_numa_nodes()) == 1 or _is_further_host(name)) else name


def _is_further_host(name: str) -> bool:
    if not is_host(name) or not is_device_name(name):
        return False
    node = int(name.removeprefix("host-"))
    return name == f"host-{node}" and node > _numa_nodes()[-1]


def _numa_nodes() -> list[int]:
    return sorted(int(path.name.removeprefix("node")) for path in _NODES.glob("node[0-9]*")) or [0]


def _meminfo(path: Path) -> dict[str, int]:
    """Field -> bytes; the node files put "Node N" before each field (proc(5), sysfs-devices-node)."""
    pairs = re.findall(r"^(?:Node \d+ )?(\w+):\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return {field: int(kilobytes) * 1024 for field, kilobytes in pairs}


def _mig_instances(gpu: object) -> list[object]:
    import pynvml

    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(gpu)
    except pynvml.NVMLError_NotSupported:
        return []
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    instances = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except pynvml.NVMLError_NotFound:  # slots without an instance
            continue
    return instances


def _describe(handle: object) -> Device:
    import pynvml

    info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        persistence = pynvml.nvmlDeviceGetPersistenceMode(handle) == pynvml.NVML_FEATURE_ENABLED
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):  # MIG instances have none of their own
        persistence = None
    return Device(
        name=str(pynvml.nvmlDeviceGetUUID(handle)),
        model=str(pynvml.nvmlDeviceGetName(handle)),
        memory=Memory(total=int(info.total), free=int(info.free)),
        persistence=persistence,
    )
