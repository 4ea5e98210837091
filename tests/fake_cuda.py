"""A stand-in for `cuda.bindings.driver` on machines without a GPU: device memory is memfds, everything else is counted.

Names, parameters and results are those of cuda-bindings 13 (a test compares them where the package is installed). It is
strict where the driver is undefined or forgiving, and as late as the driver may be: an asynchronous copy reads its
source only when somebody waits for it, so that a buffer which is used again too early shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.fake_cuda_types import (
    ENUMS,
    TYPES,
    CUcontext,
    CUdevice,
    CUdeviceptr,
    CUevent,
    CUmemAccessDesc,
    CUmemAllocationProp,
    CUmemGenericAllocationHandle,
    CUmemLocation,
    CUstream,
    Status,
)

__all__ = ["ENUMS", "GRANULARITY", "FakeDriver", "Gpu", "Status"]

GRANULARITY = 2 << 20


@dataclass(eq=False)
class Gpu:
    """A device of the fake: its UUID, its model, and how many bytes it has."""

    uuid: bytes = bytes(range(16))
    model: bytes = b"NVIDIA Fake"
    total: int = 1 << 30


@dataclass
class Memory:
    """An allocation as one handle or one mapping sees it; `fd` is its own descriptor of the memfd."""

    fd: int
    size: int
    gpu: Gpu
    access: int = 0


class Refused(Exception):
    """Inside the fake: the status that the call returns."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


def call(values: int = 0) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """Counts the call, lets a planned failure happen instead, and puts the status before the call's `values` values."""

    def decorate(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(function)
        def wrapped(self: FakeDriver, *args: Any) -> tuple[Any, ...]:
            with self.lock:
                self.calls.append(function.__name__)
                planned = self.failures.pop(len(self.calls) - 1, None)
                try:
                    if planned is not None:
                        raise Refused(planned)
                    expect(self.initialised or function.__name__ == "cuInit", Status.CUDA_ERROR_NOT_INITIALIZED)
                    result = function(self, *args)
                except Refused as refused:
                    return (refused.status, *[None] * values)
                return (Status.CUDA_SUCCESS, *([result] if values == 1 else result or []))

        return wrapped

    return decorate


def expect(condition: bool, otherwise: Any = Status.CUDA_ERROR_INVALID_VALUE) -> None:
    if not condition:
        raise Refused(otherwise)


def require(value: Any, kind: Any) -> Any:
    """The package refuses a value of another type with a TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


class FakeDriver:
    """One process's driver, with `gpus` visible. Others exist for a process under CUDA_VISIBLE_DEVICES."""

    CUmemAllocationProp = CUmemAllocationProp
    CUmemAccessDesc = CUmemAccessDesc

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus or (Gpu(),)
        self.lock = threading.RLock()
        self.calls: list[str] = []
        self.failures: dict[int, Any] = {}  # number of a call -> the status it returns
        self.initialised = False
        self.broken: Any = None  # the status of every call in the context after a forbidden access
        self.handles: dict[int, Memory] = {}
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, Memory] = {}
        self.retained = 0
        self.pinned: dict[int, tuple[mmap.mmap, Any]] = {}
        self.streams: set[int] = set()
        self.events: dict[int, int] = {}  # how many copies were submitted when it was recorded
        self.copies: list[tuple[int, int, int]] = []  # destination, source, bytes
        self.copied = 0
        self.memfds: dict[int, tuple[int, Gpu]] = {}  # inode -> bytes, GPU; shared by fakes that stand for processes
        self._thread = threading.local()
        self._number = 0x7F00_0000_0000
        for name in ENUMS:
            setattr(self, name, getattr(TYPES, name))

    def live(self) -> dict[str, int]:
        """What exists now; empty when everything was undone."""
        counts = {
            "handles": len(self.handles),
            "reservations": len(self.reservations),
            "mappings": len(self.mappings),
            "contexts": self.retained,
            "current contexts": len(self._stack()),
            "pinned": len(self.pinned),
            "streams": len(self.streams),
            "events": len(self.events),
        }
        return {what: count for what, count in counts.items() if count}

    def poke(self, address: int, data: bytes) -> None:
        """A kernel that writes. A forbidden write breaks the context, as on the device."""
        try:
            fd, offset = self._range(address, len(data), writable=True)
            os.pwrite(fd, data, offset)
        except Refused as refused:
            self.broken = refused.status

    def peek(self, address: int, nbytes: int) -> bytes:
        fd, offset = self._range(address, nbytes, writable=False)
        return os.pread(fd, nbytes, offset)

    def cuGetErrorName(self, error: Any) -> tuple[Any, bytes]:
        return Status.CUDA_SUCCESS, error.name.encode()

    def cuGetErrorString(self, error: Any) -> tuple[Any, bytes]:
        return Status.CUDA_SUCCESS, error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()

    @call()
    def cuInit(self, Flags: int) -> None:
        expect(Flags == 0)
        self.initialised = True

    @call(1)
    def cuDeviceGetCount(self) -> int:
        return len(self.gpus)

    @call(1)
    def cuDeviceGet(self, ordinal: int) -> CUdevice:
        expect(0 <= ordinal < len(self.gpus), Status.CUDA_ERROR_INVALID_DEVICE)
        return CUdevice(ordinal)

    @call(1)
    def cuDeviceGetName(self, length: int, dev: CUdevice) -> bytes:
        return self.gpus[require(dev, CUdevice)].model.ljust(length, b"\0")

    @call(1)
    def cuDeviceGetUuid(self, dev: CUdevice) -> SimpleNamespace:
        return SimpleNamespace(bytes=self.gpus[require(dev, CUdevice)].uuid)

    @call(1)
    def cuMemGetAllocationGranularity(self, prop: CUmemAllocationProp, option: Any) -> int:
        self._gpu_of(prop)
        require(option, TYPES.CUmemAllocationGranularity_flags)
        return GRANULARITY

    @call(1)
    def cuMemCreate(self, size: int, prop: CUmemAllocationProp, flags: int) -> CUmemGenericAllocationHandle:
        gpu = self._gpu_of(prop)
        expect(size > 0 and size % GRANULARITY == 0 and flags == 0)
        expect(size <= gpu.total - self._used(gpu), Status.CUDA_ERROR_OUT_OF_MEMORY)
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self.memfds[os.fstat(fd).st_ino] = (size, gpu)
        return self._new_handle(Memory(fd, size, gpu))

    @call()
    def cuMemRelease(self, handle: CUmemGenericAllocationHandle) -> None:
        self._memory(handle)
        os.close(self.handles.pop(handle).fd)

    @call(1)
    def cuMemExportToShareableHandle(self, handle: CUmemGenericAllocationHandle, handleType: Any, flags: int) -> int:
        require(handleType, TYPES.CUmemAllocationHandleType)
        expect(flags == 0)
        return fcntl.fcntl(self._memory(handle).fd, fcntl.F_DUPFD, 3)  # without close-on-exec

    @call(1)
    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: Any) -> CUmemGenericAllocationHandle:
        require(shHandleType, TYPES.CUmemAllocationHandleType)
        inode = os.fstat(require(osHandle, int)).st_ino
        expect(inode in self.memfds)
        return self._new_handle(Memory(os.dup(osHandle), *self.memfds[inode]))

    @call(1)
    def cuMemGetAllocationPropertiesFromHandle(self, handle: CUmemGenericAllocationHandle) -> CUmemAllocationProp:
        gpu = self._memory(handle).gpu
        visible = gpu in self.gpus
        location = CUmemLocation(TYPES.CUmemLocationType(1), self.gpus.index(gpu) if visible else -2)
        return CUmemAllocationProp(TYPES.CUmemAllocationType(1), TYPES.CUmemAllocationHandleType(1), location)

    @call(1)
    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> CUdeviceptr:
        expect(size > 0 and size % GRANULARITY == 0 and alignment == addr == flags == 0)
        address = -(-self._number // GRANULARITY) * GRANULARITY
        self._number = address + size
        self.reservations[address] = size
        return CUdeviceptr(address)

    @call()
    def cuMemAddressFree(self, ptr: int, size: int) -> None:
        expect(self.reservations.get(ptr) == size and not any(ptr <= at < ptr + size for at in self.mappings))
        del self.reservations[ptr]

    @call()
    def cuMemMap(self, ptr: int, size: int, offset: int, handle: CUmemGenericAllocationHandle, flags: int) -> None:
        memory = self._memory(handle)
        expect(any(at <= ptr and ptr + size <= at + room for at, room in self.reservations.items()))
        expect(not any(at < ptr + size and ptr < at + other.size for at, other in self.mappings.items()))
        expect(flags == 0 and size <= memory.size)
        expect(offset == 0 and size == memory.size, Status.CUDA_ERROR_NOT_SUPPORTED)
        self.mappings[ptr] = Memory(os.dup(memory.fd), size, memory.gpu)

    @call()
    def cuMemUnmap(self, ptr: int, size: int) -> None:
        expect(ptr in self.mappings and self.mappings[ptr].size == size)
        os.close(self.mappings.pop(ptr).fd)

    @call()
    def cuMemSetAccess(self, ptr: int, size: int, desc: list[CUmemAccessDesc], count: int) -> None:
        expect(len(require(desc, list)) == count == 1 and 0 <= desc[0].location.id < len(self.gpus))
        mappings = [m for at, m in self.mappings.items() if ptr <= at and at + m.size <= ptr + size]
        expect(sum(mapping.size for mapping in mappings) == size)
        for mapping in mappings:
            mapping.access = require(desc[0].flags, TYPES.CUmemAccess_flags)

    @call(1)
    def cuDevicePrimaryCtxRetain(self, dev: CUdevice) -> CUcontext:
        self.retained += 1
        return CUcontext(require(dev, CUdevice))

    @call()
    def cuDevicePrimaryCtxRelease(self, dev: CUdevice) -> None:
        require(dev, CUdevice)
        expect(self.retained > 0, Status.CUDA_ERROR_INVALID_CONTEXT)
        self.retained -= 1

    @call()
    def cuCtxPushCurrent(self, ctx: CUcontext) -> None:
        expect(self.retained > 0, Status.CUDA_ERROR_INVALID_CONTEXT)
        self._stack().append(require(ctx, CUcontext))

    @call(1)
    def cuCtxPopCurrent(self) -> CUcontext:
        expect(bool(self._stack()), Status.CUDA_ERROR_INVALID_CONTEXT)
        return self._stack().pop()

    @call()
    def cuCtxSynchronize(self) -> None:
        self._in_context()
        self._copy_until(len(self.copies))

    @call(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        gpu = self.gpus[self._in_context()]
        return gpu.total - self._used(gpu), gpu.total

    @call(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        self._in_context()
        expect(bytesize > 0 and Flags == 0)
        memory = mmap.mmap(-1, bytesize)
        memory[:] = b"\xa5" * bytesize  # a ring may hold anything at first
        keeper = (ctypes.c_char * bytesize).from_buffer(memory)
        self.pinned[ctypes.addressof(keeper)] = (memory, keeper)
        return ctypes.addressof(keeper)

    @call()
    def cuMemFreeHost(self, p: int) -> None:
        self._in_context(broken_too=True)
        expect(p in self.pinned)
        del self.pinned[p]

    @call(1)
    def cuStreamCreate(self, Flags: int) -> CUstream:
        self._in_context()
        self.streams.add(self._next())
        return CUstream(self._number)

    @call()
    def cuStreamDestroy(self, hStream: CUstream) -> None:
        self._in_context(broken_too=True)
        self.streams.remove(require(hStream, CUstream))

    @call(1)
    def cuEventCreate(self, Flags: int) -> CUevent:
        self._in_context()
        expect(Flags == 3)  # waiting sleeps, no timing
        self.events[self._next()] = 0
        return CUevent(self._number)

    @call()
    def cuEventRecord(self, hEvent: CUevent, hStream: CUstream) -> None:
        self._in_context()
        expect(require(hEvent, CUevent) in self.events and require(hStream, CUstream) in self.streams)
        self.events[hEvent] = len(self.copies)

    @call()
    def cuEventSynchronize(self, hEvent: CUevent) -> None:
        self._in_context()
        self._copy_until(self.events[require(hEvent, CUevent)])

    @call()
    def cuEventDestroy(self, hEvent: CUevent) -> None:
        self._in_context(broken_too=True)
        del self.events[require(hEvent, CUevent)]

    @call()
    def cuMemcpyHtoDAsync(self, dstDevice: int, srcHost: int, ByteCount: int, hStream: CUstream) -> None:
        self._in_context()
        expect(require(hStream, CUstream) in self.streams and ByteCount > 0)
        self.copies.append((require(dstDevice, int), require(srcHost, int), ByteCount))

    def _copy_until(self, count: int) -> None:
        for destination, source, nbytes in self.copies[self.copied : count]:
            if not any(at <= source and source + nbytes <= at + len(m) for at, (m, _) in self.pinned.items()):
                raise AssertionError("a copy reads pinned memory that is not there any more")
            self.poke(destination, ctypes.string_at(source, nbytes))
        self.copied = max(self.copied, count)
        self._in_context()

    def _range(self, address: int, nbytes: int, *, writable: bool) -> tuple[int, int]:
        needed = 3 if writable else 1
        for start, mapping in self.mappings.items():
            if start <= address and address + nbytes <= start + mapping.size and mapping.access & needed == needed:
                return mapping.fd, address - start
        raise Refused(Status.CUDA_ERROR_ILLEGAL_ADDRESS)

    def _in_context(self, *, broken_too: bool = False) -> CUcontext:
        expect(bool(self._stack()), Status.CUDA_ERROR_INVALID_CONTEXT)
        expect(self.broken is None or broken_too, self.broken)
        return self._stack()[-1]

    def _stack(self) -> list[CUcontext]:
        stack: list[CUcontext] = self._thread.__dict__.setdefault("stack", [])
        return stack

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _new_handle(self, memory: Memory) -> CUmemGenericAllocationHandle:
        self.handles[self._next()] = memory
        return CUmemGenericAllocationHandle(self._number)

    def _memory(self, handle: CUmemGenericAllocationHandle) -> Memory:
        expect(require(handle, CUmemGenericAllocationHandle) in self.handles)
        return self.handles[handle]

    def _used(self, gpu: Gpu) -> int:
        return sum(memory.size for memory in self.handles.values() if memory.gpu is gpu)

    def _gpu_of(self, prop: CUmemAllocationProp) -> Gpu:
        require(prop, CUmemAllocationProp)
        expect(prop.type == 1 and prop.requestedHandleTypes == 1 and prop.location.type == 1)
        expect(0 <= prop.location.id < len(self.gpus), Status.CUDA_ERROR_INVALID_DEVICE)
        return self.gpus[prop.location.id]
