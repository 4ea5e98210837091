"""The constants, handles and structures of `cuda.bindings.driver` that `fake_cuda` speaks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

ENUMS = {
    "CUresult": {
        "CUDA_SUCCESS": 0,
        "CUDA_ERROR_INVALID_VALUE": 1,
        "CUDA_ERROR_OUT_OF_MEMORY": 2,
        "CUDA_ERROR_NOT_INITIALIZED": 3,
        "CUDA_ERROR_INVALID_DEVICE": 101,
        "CUDA_ERROR_INVALID_CONTEXT": 201,
        "CUDA_ERROR_INVALID_HANDLE": 400,
        "CUDA_ERROR_NOT_FOUND": 500,
        "CUDA_ERROR_NOT_READY": 600,
        "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
        "CUDA_ERROR_NOT_SUPPORTED": 801,
        "CUDA_ERROR_UNKNOWN": 999,
    },
    "CUmemAllocationType": {"CU_MEM_ALLOCATION_TYPE_PINNED": 1},
    "CUmemAllocationHandleType": {"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": 1},
    "CUmemLocationType": {"CU_MEM_LOCATION_TYPE_DEVICE": 1, "CU_MEM_LOCATION_TYPE_HOST": 2},
    "CUmemAllocationGranularity_flags": {"CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0},
    "CUmemAccess_flags": {"CU_MEM_ACCESS_FLAGS_PROT_READ": 1, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3},
    "CUmemorytype": {"CU_MEMORYTYPE_HOST": 1, "CU_MEMORYTYPE_DEVICE": 2},
    "CUstream_flags": {"CU_STREAM_NON_BLOCKING": 1},
    "CUevent_flags": {"CU_EVENT_BLOCKING_SYNC": 1, "CU_EVENT_DISABLE_TIMING": 2},
}
TYPES: Any = SimpleNamespace(**{name: enum.IntEnum(name, values) for name, values in ENUMS.items()})  # type: ignore[misc]
Status = TYPES.CUresult


class Handle(int):
    """An opaque value of the package: a number with a type of its own."""


class CUdevice(Handle): ...


class CUcontext(Handle): ...


class CUstream(Handle): ...


class CUevent(Handle): ...


class CUdeviceptr(Handle): ...


class CUmemGenericAllocationHandle(Handle): ...


class CUmodule(Handle): ...


class CUfunction(Handle): ...


@dataclass
class CUmemLocation:
    type: Any = None
    id: int = 0


@dataclass
class CUmemAllocationProp:
    type: Any = None
    requestedHandleTypes: Any = None
    location: CUmemLocation = field(default_factory=CUmemLocation)


@dataclass
class CUmemAccessDesc:
    location: CUmemLocation = field(default_factory=CUmemLocation)
    flags: Any = None


@dataclass
class CUDA_MEMCPY2D:
    """Of its fields those that are used; the package has no others than these of that meaning."""

    srcMemoryType: Any = None
    srcHost: int = 0
    srcPitch: int = 0
    dstMemoryType: Any = None
    dstDevice: int = 0
    dstPitch: int = 0
    WidthInBytes: int = 0
    Height: int = 0
