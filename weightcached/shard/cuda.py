"""CUDA slabs: allocations of CUDA's virtual memory management, passed as POSIX file descriptors.

The descriptor alone keeps the memory: it outlives the process that made it, and the memory is freed when the last
descriptor and the last mapping are gone. Whoever holds a descriptor may map it; read-only is a property of a mapping.
The allocation is the unit of mapping (`cuMemMap` takes neither an offset nor a part), so both sides round the slab's
size up by the same rule.

The driver is reached through `cuda.bindings.driver`, imported on first use.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any

from ..errors import DeviceError, DeviceFull, ManifestError, MissingDependency, NoSuchDevice, WrongDevice
from ..fds import OwnedFd


@functools.cache
def driver() -> Any:
    """The module `cuda.bindings.driver`, with the driver initialised (`cuInit`: no context, no device memory).

    `MissingDependency` without the package, `DeviceError` without a working driver.
    """
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError:
        raise MissingDependency(package="cuda-bindings", extra="cuda", what="GPU memory") from None
    try:
        result = module.cuInit(0)
    except RuntimeError as error:  # cuda-bindings raises it when it finds no libcuda.so.1
        raise DeviceError(device="CUDA", problem=f"no driver: {error}") from error
    check(result, "cuInit", module=module)
    return module


def check(result: tuple[Any, ...], call: str, module: Any = None) -> Any:
    """What a driver call returned beside its status: nothing, a value, or a tuple of values.

    `DeviceError` with the driver's own name and meaning of the status unless it is CUDA_SUCCESS; its field `status` is
    the name, for callers that tell errors apart.
    """
    status, *values = result
    cuda = module or driver()
    if status != cuda.CUresult.CUDA_SUCCESS:
        name, meaning = (_text(function(status)) for function in (cuda.cuGetErrorName, cuda.cuGetErrorString))
        raise DeviceError(device="CUDA", problem=f"{call}: {name} ({meaning})", status=name)
    return values[0] if len(values) == 1 else tuple(values) or None


def _text(result: tuple[Any, bytes | None]) -> str:
    # No text comes back for a status that the driver does not know.
    return result[1].decode() if result[1] else "unknown"


def device_count() -> int:
    """GPUs (or MIG instances) that CUDA sees in this process, after CUDA_VISIBLE_DEVICES."""
    return int(check(driver().cuDeviceGetCount(), "cuDeviceGetCount"))


def device_uuid(ordinal: int) -> str:
    """The bare UUID of the GPU, or of the MIG instance, with this ordinal. `DeviceError` without such an ordinal."""
    cuda = driver()
    device = check(cuda.cuDeviceGet(ordinal), "cuDeviceGet")
    # Before CUDA 13 the plain name is the first version, which gives the UUID of the GPU that a MIG instance is on.
    get = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)
    digits = bytes(check(get(device), "cuDeviceGetUuid").bytes).hex()
    # By hand: the module uuid costs 4 ms of import, for an attach of less.
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def device_name(ordinal: int) -> str:
    """The name under which weightcached knows the device: NVML's "GPU-<uuid>" or "MIG-<uuid>"."""
    cuda = driver()
    device = check(cuda.cuDeviceGet(ordinal), "cuDeviceGet")
    model = bytes(check(cuda.cuDeviceGetName(128, device), "cuDeviceGetName"))
    # "NVIDIA H100 80GB HBM3 MIG 1g.10gb": the driver has no attribute for it, and no GPU has MIG in its own name.
    return f"{'MIG' if b' MIG ' in model else 'GPU'}-{device_uuid(ordinal)}"


def ordinal_of(name: str) -> int:
    """This process's CUDA ordinal of a device ("GPU-<uuid>", "MIG-<uuid>"). `NoSuchDevice` if CUDA does not show it."""
    wanted = name.partition("-")[2]
    ordinals = range(device_count())
    for ordinal in ordinals:
        if device_uuid(ordinal) == wanted:
            return ordinal
    raise NoSuchDevice(device=name, known=[device_name(ordinal) for ordinal in ordinals])


class PrimaryContext:
    """Holds the device's primary context, the one torch and the CUDA runtime use, from construction until `close`.

    Made if the process has none yet (which takes some 0.2 s and 500 MiB of device memory); shared if it has.
    """

    def __init__(self, ordinal: int) -> None:
        cuda = driver()
        self.device = check(cuda.cuDeviceGet(ordinal), "cuDeviceGet")
        self._held = [check(cuda.cuDevicePrimaryCtxRetain(self.device), "cuDevicePrimaryCtxRetain")]

    @property
    def handle(self) -> int:
        """The context's address: equal for all holders in this process of one device's context."""
        return int(self._held[0])

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context is current in this thread inside the `with` block; afterwards, what was current before."""
        cuda = driver()
        check(cuda.cuCtxPushCurrent(self._held[0]), "cuCtxPushCurrent")
        try:
            yield
        finally:
            check(cuda.cuCtxPopCurrent(), "cuCtxPopCurrent")

    def set_current(self) -> None:
        """Makes the context current in this thread in place of the one that is, inside of some `current` block."""
        check(driver().cuCtxSetCurrent(self._held[0]), "cuCtxSetCurrent")

    def synchronize(self) -> None:
        """Waits until the device has done all work of this process. `DeviceError` if any of it failed."""
        with self.current():
            check(driver().cuCtxSynchronize(), "cuCtxSynchronize")

    def close(self) -> None:
        """Idempotent. The last holder of a process destroys the context."""
        if self._held:
            self._held.clear()
            check(driver().cuDevicePrimaryCtxRelease(self.device), "cuDevicePrimaryCtxRelease")


class CudaSlab:
    """Device memory under construction, writable at `address` (see `slab.SlabWriter`). Holds the primary context.

    Work on the memory must be finished (`context.synchronize`) before `seal` or `close`.
    """

    def __init__(self, nbytes: int, address: int, context: PrimaryContext, handle: Any, undo: ExitStack) -> None:
        self.nbytes = nbytes
        self.address = address
        self.context = context
        self._handle = handle
        self._undo = undo

    @classmethod
    def create(cls, ordinal: int, nbytes: int) -> CudaSlab:
        """Takes `nbytes` bytes of the device, rounded up to its granularity. The content is undefined.

        `DeviceFull` with bytes needed and free when the device has no room.
        """
        cuda = driver()
        size = _rounded(nbytes, granularity(ordinal))
        with ExitStack() as undo:
            context = PrimaryContext(ordinal)
            undo.callback(context.close)
            try:
                handle = check(cuda.cuMemCreate(size, _properties(ordinal), 0), "cuMemCreate")
            except DeviceError as error:
                if error.fields.get("status") == "CUDA_ERROR_OUT_OF_MEMORY":
                    raise _full(ordinal, size, context) from error
                raise
            undo.callback(_release, handle)
            address = _reserve(undo, size)
            _map(undo, address, size, handle)
            _set_access(ordinal, address, size, writable=True)
            return cls(nbytes, address, context, handle, undo.pop_all())

    def seal(self) -> OwnedFd:
        """Unmaps and gives the descriptor, close-on-exec, to the caller, who has synchronised. An error frees all."""
        if self._handle is None:
            raise ValueError("the slab is sealed or closed")
        handle, self._handle = self._handle, None
        with ExitStack() as on_error:
            with self._undo:  # releases the handle as well: the descriptor keeps the memory
                exported = driver().cuMemExportToShareableHandle(handle, _posix_fd(), 0)
                fd = OwnedFd(check(exported, "cuMemExportToShareableHandle"))
                on_error.callback(fd.close)
                os.set_inheritable(fd.fileno(), False)
            on_error.pop_all()
        return fd

    def close(self) -> None:
        self._handle = None
        self._undo.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:  # as OwnedFd's
        if getattr(self, "_handle", None) is not None and not ending():
            warnings.warn("a CUDA slab was neither sealed nor closed", ResourceWarning, stacklevel=2)
            self.close()


class CudaMapping:
    """Slabs mapped side by side at `address`; slab i begins at `address + offsets[i]`. Holds the primary context.

    `nbytes` is the length of the whole range, slabs rounded up. Close it when no kernel and no tensor can use it any
    more; `close` may be called from any thread and from a finalizer. `unmap` and `remap` are for one thread at a time.
    """

    def __init__(self, ordinal: int, offsets: tuple[int, ...], nbytes: int, read_only: bool) -> None:
        """Takes the addresses; `remap` puts slabs there. `open` does both."""
        self.offsets = offsets
        self.nbytes = nbytes
        self._ordinal = ordinal
        self._read_only = read_only
        self._pid = os.getpid()
        # What undoes the slabs' part, and what undoes the rest. Taken out by whoever closes first: list.pop is atomic,
        # and a finalizer must not wait for a lock.
        self._slabs: list[ExitStack] = []
        with ExitStack() as undo:
            self._context = PrimaryContext(ordinal)
            undo.callback(self._context.close)
            self.address = _reserve(undo, nbytes) if nbytes else 0
            self._undo = [undo.pop_all()]

    @classmethod
    def open(cls, ordinal: int, slabs: Sequence[tuple[int, int]], read_only: bool = True) -> CudaMapping:
        """Maps slabs, given as (descriptor, bytes) in order; the descriptors stay the caller's.

        A slab of another device imports and reads without an error, slowly, so its location is checked: `WrongDevice`.
        `ManifestError` when a slab has another size than listed, `DeviceError` for any other refusal of the driver.
        """
        granule = granularity(ordinal)
        *offsets, total = accumulate((_rounded(nbytes, granule) for _, nbytes in slabs), initial=0)
        mapping = cls(ordinal, tuple(offsets), total, read_only)
        try:
            mapping.remap(slabs)
        except BaseException:
            mapping.close()
            raise
        return mapping

    def unmap(self) -> None:
        """Waits for the device, then lets the memory go; the addresses stay taken. Idempotent.

        Until `remap`, a kernel that touches the memory fails. `DeviceError` if work failed; unmapped all the same.
        """
        if self._slabs:
            self._slabs.pop().close()

    def remap(self, slabs: Sequence[tuple[int, int]]) -> None:
        """Maps slabs of the same sizes at the same addresses, after `unmap`. Errors as of `open`; none is mapped then.

        A `ManifestError` too if there are more slabs, or fewer.
        """
        if self._slabs or not self._undo:
            raise ValueError("the slabs are mapped, or the mapping is closed")
        if len(slabs) != len(self.offsets):
            raise ManifestError(problem=f"{len(self.offsets)} slabs were mapped, {len(slabs)} came")
        cuda = driver()
        with ExitStack() as undo:
            with ExitStack() as handles:  # a mapping keeps the memory without its handle
                imported = []
                for fd, _ in slabs:
                    result = cuda.cuMemImportFromShareableHandle(fd, _posix_fd())
                    handle = check(result, "cuMemImportFromShareableHandle")
                    handles.callback(_release, handle)
                    _require_location(self._ordinal, handle)
                    imported.append(handle)
                for index, (start, end) in enumerate(pairwise((*self.offsets, self.nbytes))):
                    try:
                        _map(undo, self.address + start, end - start, imported[index])
                    except DeviceError as error:
                        raise _wrong_size(error, index, slabs[index][1]) from error
                if slabs:
                    _set_access(self._ordinal, self.address, self.nbytes, writable=not self._read_only)
            if slabs:
                undo.callback(self._context.synchronize)
            self._slabs.append(undo.pop_all())

    def close(self) -> None:
        """Waits for the device, then unmaps. Idempotent. `DeviceError` if work failed; unmapped all the same."""
        try:
            undo = self._undo.pop()
        except IndexError:
            return
        if os.getpid() != self._pid:  # a forked child inherits the object, but neither the driver nor the mapping
            for stack in (undo, *self._slabs):
                stack.pop_all()
            return
        with undo:
            self.unmap()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:  # as OwnedFd's
        if getattr(self, "_undo", None) and not ending():
            warnings.warn("a CUDA mapping was never closed", ResourceWarning, stacklevel=2)
            self.close()


def check_slabs(ordinal: int, slabs: Sequence[tuple[int, int]]) -> None:
    """Checks that descriptors, given as (descriptor, bytes), are slabs of the device, of these sizes. Takes no context.

    Errors as of `CudaMapping.open`. Nothing is mapped for access, so that no memory is touched.
    """
    cuda = driver()
    granule = granularity(ordinal)
    for index, (fd, nbytes) in enumerate(slabs):
        with ExitStack() as undo:
            handle = check(cuda.cuMemImportFromShareableHandle(fd, _posix_fd()), "cuMemImportFromShareableHandle")
            undo.callback(_release, handle)
            _require_location(ordinal, handle)
            size = _rounded(nbytes, granule)
            try:
                _map(undo, _reserve(undo, size), size, handle)
            except DeviceError as error:
                raise _wrong_size(error, index, nbytes) from error


def granularity(ordinal: int) -> int:
    """Bytes of which every slab on the device takes a multiple (2 MiB on all that were seen)."""
    cuda = driver()
    option = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    result = cuda.cuMemGetAllocationGranularity(_properties(ordinal), option)
    return int(check(result, "cuMemGetAllocationGranularity"))


def _rounded(nbytes: int, granule: int) -> int:
    # At least one granule: the driver makes no empty allocation, and an empty slab needs a descriptor as well.
    return max(1, -(-nbytes // granule)) * granule


def _properties(ordinal: int) -> Any:
    cuda = driver()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _posix_fd()
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _posix_fd() -> Any:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _release(handle: Any) -> None:
    check(driver().cuMemRelease(handle), "cuMemRelease")


def _reserve(undo: ExitStack, size: int) -> int:
    cuda = driver()
    address = int(check(cuda.cuMemAddressReserve(size, 0, 0, 0), "cuMemAddressReserve"))
    undo.callback(lambda: check(cuda.cuMemAddressFree(address, size), "cuMemAddressFree"))
    return address


def _map(undo: ExitStack, address: int, size: int, handle: Any) -> None:
    cuda = driver()
    check(cuda.cuMemMap(address, size, 0, handle, 0), "cuMemMap")
    undo.callback(lambda: check(cuda.cuMemUnmap(address, size), "cuMemUnmap"))


def _set_access(ordinal: int, address: int, size: int, *, writable: bool) -> None:
    cuda = driver()
    flags = cuda.CUmemAccess_flags
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    check(cuda.cuMemSetAccess(address, size, [access], 1), "cuMemSetAccess")


def _require_location(ordinal: int, handle: Any) -> None:
    cuda = driver()
    properties = check(cuda.cuMemGetAllocationPropertiesFromHandle(handle), "cuMemGetAllocationPropertiesFromHandle")
    # The id first: of a GPU that this process does not see it is -2, with a type that older bindings do not know.
    found = int(properties.location.id)
    if found == ordinal and properties.location.type == cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE:
        return
    other = device_name(found) if found != ordinal and 0 <= found < device_count() else "memory of another device"
    raise WrongDevice(wanted=device_name(ordinal), found=other)


def _wrong_size(error: DeviceError, index: int, nbytes: int) -> DeviceError | ManifestError:
    if error.fields.get("status") in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"):  # a part of it; too much
        return ManifestError(problem=f"slab {index} is not of the {nbytes} bytes listed ({error.problem})")
    return error


def _full(ordinal: int, needed: int, context: PrimaryContext) -> DeviceFull:
    with context.current():
        free, total = check(driver().cuMemGetInfo(), "cuMemGetInfo")
    return DeviceFull(
        device=device_name(ordinal),
        needed=needed,
        free=int(free),
        evictable=0,
        limit=int(total),
        others=0,
        holders=[f"all processes on it {total - free}"],
        advice="end one of them, or evict a model",
    )
