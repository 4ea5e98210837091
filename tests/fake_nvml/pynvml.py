"""NVML for tests, in the place of the real module by PYTHONPATH: GPUs that are files, events that a test writes.

`$FAKE_NVML` is a folder, made by `tests.scripted_gpus.ScriptedGpus`:

    gpus.json    UUID -> {"pci": "00000000:3B:00.0", "state": "ok", "parent": UUID of a MIG's GPU};
                 or "lost", "reset" (the driver asks for one), "old driver" (it never does), "no events"
    events       a FIFO of lines: {"device": UUID, "xid": 31}, the same with "ecc": true, {"error": 15}, {"hang": true}
    devices/     a file for each GPU, which is held open from the first handle to nvmlShutdown, as the driver's are
"""

from __future__ import annotations

import json
import os
import select
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
nvmlEventTypeDoubleBitEccError = 0x2
nvmlEventTypeXidCriticalError = 0x8
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_GPU_RECOVERY_ACTION_NONE = 0
NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
NVML_GPU_RECOVERY_ACTION_DRAIN_P2P = 3


class NVMLError(Exception):
    """`value` is NVML's number; each number that matters here has a class of its own, as in the real module."""

    value = 999

    def __str__(self) -> str:
        return f"NVML error {self.value}"


class NVMLError_Timeout(NVMLError):
    value = NVML_ERROR_TIMEOUT


class NVMLError_GpuIsLost(NVMLError):
    value = NVML_ERROR_GPU_IS_LOST


class NVMLError_NotFound(NVMLError):
    value = NVML_ERROR_NOT_FOUND


class NVMLError_NoPermission(NVMLError):
    value = NVML_ERROR_NO_PERMISSION


_CLASSES = {kind.value: kind for kind in (NVMLError_Timeout, NVMLError_GpuIsLost, NVMLError_NotFound)}
_opened: dict[str, int] = {}  # UUID of a physical GPU -> descriptor of its file
_registered: dict[str, int] = {}
_events: int | None = None  # the FIFO
_buffer = b""


def nvmlInit() -> None:
    global _events
    if _events is None:
        _events = os.open(_folder() / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def nvmlShutdown() -> None:
    global _events
    for fd in _opened.values():
        os.close(fd)
    _opened.clear()
    _registered.clear()
    if _events is not None:
        os.close(_events)
        _events = None


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    gpu = _gpus().get(uuid)
    if gpu is None:
        raise NVMLError_NotFound
    _require(uuid)
    physical = gpu.get("parent", uuid)
    if physical not in _opened:
        _opened[physical] = os.open(_folder() / "devices" / physical, os.O_RDONLY | os.O_CLOEXEC)
    return uuid


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: str) -> str:
    return str(_gpus()[handle]["parent"])


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlDeviceGetPciInfo(handle: str) -> Any:
    return SimpleNamespace(busId=_gpus()[handle]["pci"].encode())


def nvmlDeviceGetMemoryInfo(handle: str) -> Any:
    _require(handle)
    if any(gpu.get("parent") == handle for gpu in _gpus().values()):  # in MIG mode, to users without privileges
        raise NVMLError_NoPermission
    return SimpleNamespace(total=1 << 30, free=1 << 30)


def nvmlDeviceGetFieldValues(handle: str, fields: list[int]) -> list[Any]:
    assert fields == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    state = _gpus()[handle]["state"]
    if state == "old driver":
        raise NVMLError
    wanted = state == "reset"
    action = NVML_GPU_RECOVERY_ACTION_GPU_RESET if wanted else NVML_GPU_RECOVERY_ACTION_NONE
    return [SimpleNamespace(nvmlReturn=NVML_SUCCESS, value=SimpleNamespace(uiVal=action))]


def nvmlEventSetCreate() -> str:
    return "events"


def nvmlDeviceGetSupportedEventTypes(handle: str) -> int:
    if _gpus()[handle]["state"] == "no events":
        raise NVMLError
    return 0xFF


def nvmlDeviceRegisterEvents(handle: str, types: int, events: str) -> None:
    _registered[handle] = types


def nvmlEventSetWait_v2(events: str, timeout_ms: int) -> Any:
    """The next line of the FIFO that is about a registered GPU, as NVML would report it."""
    global _buffer
    assert _events is not None
    while b"\n" not in _buffer:
        if not select.select([_events], [], [], timeout_ms / 1000)[0]:
            raise NVMLError_Timeout
        _buffer += os.read(_events, 65536)
    line, _, _buffer = _buffer.partition(b"\n")
    said = json.loads(line)
    if "hang" in said:
        threading.Event().wait()
    if "error" in said:
        raise _CLASSES.get(said["error"], NVMLError)()
    kind = nvmlEventTypeDoubleBitEccError if said.get("ecc") else nvmlEventTypeXidCriticalError
    if not _registered.get(said["device"], 0) & kind:
        raise NVMLError_Timeout
    return SimpleNamespace(device=said["device"], eventType=kind, eventData=said.get("xid", 0))


def _folder() -> Path:
    return Path(os.environ["FAKE_NVML"])


def _gpus() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((_folder() / "gpus.json").read_text())
    return found


def _require(uuid: str) -> None:
    gpus = _gpus()
    if gpus[gpus[uuid].get("parent", uuid)]["state"] == "lost":
        raise NVMLError_GpuIsLost
