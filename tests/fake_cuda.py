"""A stand-in for `cuda.bindings.driver` on machines without a GPU: device memory is memfds, everything else is counted.

Names, parameters and results are those of cuda-bindings 13 (a test compares them where the package is installed). It is
strict where the driver is undefined or forgiving, and as late as the driver may be: a stream does nothing before
somebody waits for it, so that a buffer which is used again too early, or a wait for another stream, shows as wrong
bytes. A kernel is run from its PTX (`tests.ptx`).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests import ptx
from tests.fake_cuda_types import (
    CUDA_MEMCPY2D,
    ENUMS,
    TYPES,
    CUcontext,
    CUdevice,
    CUdeviceptr,
    CUevent,
    CUfunction,
    CUmemAccessDesc,
    CUmemAllocationProp,
    CUmemGenericAllocationHandle,
    CUmemLocation,
    CUmodule,
    CUstream,
    Status,
)

__all__ = ["ENUMS", "GRANULARITY", "FakeDriver", "Gpu", "Status"]

GRANULARITY = 2 << 20
CONTEXTS = 0x5600_0000_0000  # where the devices' primary contexts are; none is at 0, which means no context


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
    device: int | None = None  # the ordinal that has the access
    peers: dict[int, int] = field(default_factory=dict)  # other ordinals that were given some, and which


@dataclass(eq=False)
class Stream:
    """What was submitted to it, in order, and how much of that is done."""

    context: CUcontext
    work: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0


@dataclass(eq=False)
class Event:
    """Where it was recorded last: the stream, and how much had been submitted to that."""

    context: CUcontext
    stream: Stream | None = None
    count: int = 0


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


def punch_hole_in(fd: int, offset: int, nbytes: int) -> None:
    """Makes part of a memfd zeros, without writing them."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    if libc.fallocate(fd, keep_size | punch_hole, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        raise OSError(ctypes.get_errno(), "fallocate")


def require(value: Any, kind: Any) -> Any:
    """The package refuses a value of another type with a TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


class FakeDriver:
    """One process's driver, with `gpus` visible. Others exist for a process under CUDA_VISIBLE_DEVICES."""

    CUDA_MEMCPY2D = CUDA_MEMCPY2D
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
        self.allocations: dict[int, bytearray] = {}
        self.modules: dict[int, dict[str, ptx.Kernel]] = {}
        self.kernels: dict[int, ptx.Kernel] = {}
        self.launches: list[tuple[int, int]] = []  # blocks, threads
        self.peer_access = True  # whether devices can reach each other's memory
        self.retained = 0
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.streams: dict[int, Stream] = {}
        self.null_streams: dict[int, Stream] = {}  # each context's own, which nobody makes
        self.events: dict[int, Event] = {}
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
            "allocations": len(self.allocations),
            "modules": len(self.modules),
        }
        return {what: count for what, count in counts.items() if count}

    def poke(self, address: int, data: bytes, device: int | None = None) -> None:
        """A kernel that writes, on that device if it matters. A forbidden write breaks the context, as there."""
        try:
            fd, offset = self._range(address, len(data), writable=True, device=device)
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
    def cuDeviceCanAccessPeer(self, dev: CUdevice, peerDev: CUdevice) -> int:
        return int(self.peer_access and require(dev, CUdevice) != require(peerDev, CUdevice))

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
        if size <= 64 << 20:  # the content of new memory is undefined
            os.pwrite(fd, b"\xa5" * size, 0)
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
            access, device = require(desc[0].flags, TYPES.CUmemAccess_flags), desc[0].location.id
            if mapping.device in (None, device):
                mapping.access, mapping.device = access, device
            else:
                expect(self.peer_access, Status.CUDA_ERROR_INVALID_DEVICE)
                mapping.peers[device] = access

    @call(1)
    def cuDevicePrimaryCtxRetain(self, dev: CUdevice) -> CUcontext:
        self.retained += 1
        return CUcontext(CONTEXTS + require(dev, CUdevice))

    @call()
    def cuDevicePrimaryCtxRelease(self, dev: CUdevice) -> None:
        require(dev, CUdevice)
        expect(self.retained > 0, Status.CUDA_ERROR_INVALID_CONTEXT)
        self.retained -= 1

    @call()
    def cuCtxPushCurrent(self, ctx: CUcontext) -> None:
        expect(self.retained > 0, Status.CUDA_ERROR_INVALID_CONTEXT)
        self._stack().append(require(ctx, CUcontext))

    @call()
    def cuCtxSetCurrent(self, ctx: CUcontext) -> None:
        self._in_context()  # it would also make the first one current, which nobody here wants of it
        expect(self.retained > 0 and require(ctx, CUcontext) > 0, Status.CUDA_ERROR_INVALID_CONTEXT)
        self._stack()[-1] = ctx

    @call(1)
    def cuCtxPopCurrent(self) -> CUcontext:
        expect(bool(self._stack()), Status.CUDA_ERROR_INVALID_CONTEXT)
        return self._stack().pop()

    @call()
    def cuCtxSynchronize(self) -> None:
        context = self._in_context()
        for stream in [self._null_stream(context), *self.streams.values()]:
            if stream.context == context:
                self._work_off(stream)

    @call(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        gpu = self.gpus[self._in_context() - CONTEXTS]
        return gpu.total - self._used(gpu), gpu.total

    @call()
    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> None:
        self._in_context()
        expect(require(p, int) % 4096 == 0 and bytesize > 0 and Flags == 1)  # for the contexts of all devices
        expect(not any(p < at + size and at < p + bytesize for at, size in self.pinned.items()))
        self.pinned[p] = bytesize

    @call()
    def cuMemHostUnregister(self, p: int) -> None:
        self._in_context(broken_too=True)
        expect(p in self.pinned)
        del self.pinned[p]

    @call()
    def cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: CUstream) -> None:
        stream = self._stream(hStream)
        expect(uc == 0 and N > 0)
        fd, offset = self._range(dstDevice, N, writable=True, device=stream.context - CONTEXTS)
        stream.work.append(functools.partial(punch_hole_in, fd, offset, N))

    @call(1)
    def cuStreamCreate(self, Flags: int) -> CUstream:
        expect(Flags == 1)  # not in order with the null stream
        self.streams[self._next()] = Stream(self._in_context())
        return CUstream(self._number)

    @call()
    def cuStreamDestroy(self, hStream: CUstream) -> None:
        self._in_context(broken_too=True)
        del self.streams[require(hStream, CUstream)]

    @call(1)
    def cuEventCreate(self, Flags: int) -> CUevent:
        expect(Flags == 3)  # waiting sleeps, no timing
        self.events[self._next()] = Event(self._in_context())
        return CUevent(self._number)

    @call()
    def cuEventRecord(self, hEvent: CUevent, hStream: CUstream) -> None:
        stream, event = self._stream(hStream), self.events[require(hEvent, CUevent)]
        expect(event.context == stream.context, Status.CUDA_ERROR_INVALID_HANDLE)
        event.stream, event.count = stream, len(stream.work)

    @call()
    def cuEventQuery(self, hEvent: CUevent) -> None:
        self._in_context()
        event = self.events[require(hEvent, CUevent)]
        expect(event.stream is None or event.stream.done >= event.count, Status.CUDA_ERROR_NOT_READY)

    @call()
    def cuEventSynchronize(self, hEvent: CUevent) -> None:
        self._in_context()
        event = self.events[require(hEvent, CUevent)]
        if event.stream is not None:
            self._work_off(event.stream, event.count)

    @call()
    def cuEventDestroy(self, hEvent: CUevent) -> None:
        self._in_context(broken_too=True)
        del self.events[require(hEvent, CUevent)]

    @call()
    def cuMemcpyHtoDAsync(self, dstDevice: int, srcHost: int, ByteCount: int, hStream: CUstream) -> None:
        expect(ByteCount > 0)
        self._submit_copy(hStream, require(dstDevice, int), require(srcHost, int), ByteCount)

    @call()
    def cuMemcpy2DAsync(self, pCopy: CUDA_MEMCPY2D, hStream: CUstream) -> None:
        copy = require(pCopy, CUDA_MEMCPY2D)
        expect(copy.srcMemoryType == 1 and copy.dstMemoryType == 2)
        expect(0 < copy.WidthInBytes <= min(copy.srcPitch, copy.dstPitch) and copy.Height > 0)
        for row in range(copy.Height):
            destination, source = copy.dstDevice + row * copy.dstPitch, copy.srcHost + row * copy.srcPitch
            self._submit_copy(hStream, destination, source, copy.WidthInBytes)

    @call()
    def cuMemcpyDtoDAsync(self, dstDevice: int, srcDevice: int, ByteCount: int, hStream: CUstream) -> None:
        expect(ByteCount > 0)
        stream = self._stream(hStream)
        device = stream.context - CONTEXTS

        def copy() -> None:
            try:
                fd, offset = self._range(srcDevice, ByteCount, writable=False, device=device)
            except Refused as refused:
                self.broken = refused.status
            else:
                self.poke(dstDevice, os.pread(fd, ByteCount, offset), device)

        stream.work.append(copy)

    @call()
    def cuStreamSynchronize(self, hStream: CUstream) -> None:
        self._work_off(self._stream(hStream))

    @call(1)
    def cuMemAlloc(self, bytesize: int) -> CUdeviceptr:
        self._in_context()
        expect(bytesize > 0)
        self._number = -(-self._number // 256) * 256
        address, self._number = self._number, self._number + bytesize
        self.allocations[address] = bytearray(b"\xa5" * bytesize)
        return CUdeviceptr(address)

    @call()
    def cuMemFree(self, dptr: int) -> None:
        self._in_context(broken_too=True)
        expect(dptr in self.allocations)
        del self.allocations[dptr]

    @call()
    def cuMemcpyHtoD(self, dstDevice: int, srcHost: bytes, ByteCount: int) -> None:
        self._in_context()
        memory, at = self._allocated(dstDevice, ByteCount)
        expect(ByteCount == len(require(srcHost, bytes)))
        memory[at : at + ByteCount] = srcHost

    @call()
    def cuMemcpyDtoH(self, dstHost: bytearray, srcDevice: int, ByteCount: int) -> None:
        self._in_context()
        memory, at = self._allocated(srcDevice, ByteCount)
        expect(ByteCount == len(require(dstHost, bytearray)))
        dstHost[:] = memory[at : at + ByteCount]

    @call(1)
    def cuModuleLoadData(self, image: bytes) -> CUmodule:
        self._in_context()
        expect(require(image, bytes).endswith(b"\0"))
        self.modules[self._next()] = ptx.parse(image[:-1].decode())
        return CUmodule(self._number)

    @call()
    def cuModuleUnload(self, hmod: CUmodule) -> None:
        self._in_context(broken_too=True)
        del self.modules[require(hmod, CUmodule)]

    @call(1)
    def cuModuleGetFunction(self, hmod: CUmodule, name: bytes) -> CUfunction:
        self._in_context()
        kernels = self.modules[require(hmod, CUmodule)]
        expect(name.decode() in kernels, Status.CUDA_ERROR_NOT_FOUND)
        self.kernels[self._next()] = kernels[name.decode()]
        return CUfunction(self._number)

    @call()
    def cuLaunchKernel(
        self,
        f: CUfunction,
        gridDimX: int,
        gridDimY: int,
        gridDimZ: int,
        blockDimX: int,
        blockDimY: int,
        blockDimZ: int,
        sharedMemBytes: int,
        hStream: int,
        kernelParams: int,
        extra: int,
    ) -> None:
        self._in_context()
        kernel = self.kernels[require(f, CUfunction)]
        expect(0 < gridDimX < 1 << 31 and gridDimY == gridDimZ == blockDimY == blockDimZ == 1)
        expect(0 < blockDimX <= kernel.threads and sharedMemBytes == hStream == extra == 0)
        count = len(kernel.parameters)
        pointers = (ctypes.c_void_p * count).from_address(kernelParams)
        parameters = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers if pointer]
        self._work_off(self._null_stream(self._in_context()))
        self.launches.append((gridDimX, blockDimX))
        try:
            ptx.run(kernel, gridDimX, blockDimX, parameters, self)
        except Refused as refused:  # whoever waits for it is told
            self.broken = refused.status

    def load(self, address: int, nbytes: int) -> bytes:
        """A kernel that reads (`ptx.Memory`)."""
        for start, memory in self.allocations.items():
            if start <= address and address + nbytes <= start + len(memory):
                return bytes(memory[address - start : address - start + nbytes])
        return self.peek(address, nbytes)

    def add(self, address: int, value: int) -> None:
        """A kernel that adds (`ptx.Memory`)."""
        memory, at = self._allocated(address, 8)
        total = int.from_bytes(memory[at : at + 8], "little") + value
        memory[at : at + 8] = (total & (1 << 64) - 1).to_bytes(8, "little")

    def _allocated(self, address: int, nbytes: int) -> tuple[bytearray, int]:
        for start, memory in self.allocations.items():
            if start <= address and address + nbytes <= start + len(memory):
                return memory, address - start
        raise Refused(Status.CUDA_ERROR_ILLEGAL_ADDRESS)

    def _submit_copy(self, hStream: CUstream, destination: int, source: int, nbytes: int) -> None:
        stream = self._stream(hStream)

        def copy() -> None:
            if not any(at <= source and source + nbytes <= at + size for at, size in self.pinned.items()):
                raise AssertionError("a copy reads pinned memory that is not there any more")
            self.poke(destination, ctypes.string_at(source, nbytes), stream.context - CONTEXTS)

        stream.work.append(copy)

    def _work_off(self, stream: Stream, count: int | None = None) -> None:
        """Does the first `count` pieces of a stream's work, as far as they are not done yet; None: all."""
        count = len(stream.work) if count is None else count
        for work in stream.work[stream.done : count]:
            work()
        stream.done = max(stream.done, count)
        self._in_context()  # says what went wrong

    def _stream(self, hStream: CUstream) -> Stream:
        """A stream, which must be of the current context."""
        context = self._in_context()
        stream = self.streams.get(require(hStream, CUstream))
        if stream is None or stream.context != context:
            raise Refused(Status.CUDA_ERROR_INVALID_HANDLE)
        return stream

    def _null_stream(self, context: CUcontext) -> Stream:
        return self.null_streams.setdefault(context, Stream(context))

    def _range(self, address: int, nbytes: int, *, writable: bool, device: int | None = None) -> tuple[int, int]:
        needed = 3 if writable else 1
        for start, mapping in self.mappings.items():
            inside = start <= address and address + nbytes <= start + mapping.size
            access = mapping.peers.get(device, 0) if device not in (None, mapping.device) else mapping.access
            if inside and access & needed == needed:
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
