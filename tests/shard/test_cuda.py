"""shard.cuda over a fake driver: names, round trips, refusals, and that every step undoes itself when it fails.

What only a GPU can show is in test_cuda_gpu.py.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from tests.fake_cuda import GRANULARITY, FakeDriver, Gpu, Status
from tests.leaks import NoDescriptorLeaks
from weightcached.errors import (
    DeviceError,
    DeviceFull,
    ManifestError,
    MissingDependency,
    NoSuchDevice,
    WeightCacheError,
    WrongDevice,
)
from weightcached.fds import OwnedFd
from weightcached.shard import cuda
from weightcached.shard.cuda import CudaMapping, CudaSlab, PrimaryContext

NAME = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
OTHER = Gpu(uuid=bytes(range(16, 32)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks) -> FakeDriver:
    """A process with one GPU of 1 GiB, whose driver is initialised. No test leaves a descriptor behind."""
    return become(monkeypatch, FakeDriver())


def become(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> FakeDriver:
    """From here on this process uses that driver."""
    driver.initialised = True
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    return driver


def sealed(fake: FakeDriver, data: bytes) -> OwnedFd:
    """A slab with that content."""
    slab = CudaSlab.create(0, len(data))
    fake.poke(slab.address, data)
    return slab.seal()


# The driver.


@pytest.fixture
def fresh() -> Iterator[None]:
    """The driver is looked for again, before and after the test."""
    cuda.driver.cache_clear()
    yield
    cuda.driver.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingDependency, match=re.escape("pip install 'weightcached[cuda]'")):
        cuda.driver()


@pytest.mark.usefixtures("fresh")
def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there and libcuda.so.1 is not: an error of the device, not of the installation."""

    def refuse(flags: int) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimpleNamespace(cuInit=refuse))
    with pytest.raises(DeviceError, match=r"no driver: libcuda.so.1 not found"):
        cuda.driver()


@pytest.mark.usefixtures("fresh")
def test_the_driver_is_initialised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuInit runs at the first use only; where it fails, the next use tries again."""
    fake = FakeDriver()
    fake.failures[0] = Status.CUDA_ERROR_UNKNOWN
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    with pytest.raises(DeviceError, match=r"cuInit: CUDA_ERROR_UNKNOWN \(unknown\)"):
        cuda.driver()
    assert cuda.driver() is cuda.driver() is fake
    assert fake.calls == ["cuInit", "cuInit"]


def test_an_error_has_the_drivers_name_and_meaning(fake: FakeDriver) -> None:
    """A status that is no success becomes an error with call, name and meaning."""
    with pytest.raises(DeviceError) as caught:
        cuda.check((Status.CUDA_ERROR_ILLEGAL_ADDRESS,), "cuStreamSynchronize")
    assert str(caught.value) == "CUDA: cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (illegal address)"
    assert caught.value.status == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert cuda.check((Status.CUDA_SUCCESS,), "x") is None
    assert cuda.check((Status.CUDA_SUCCESS, 5), "x") == 5
    assert cuda.check((Status.CUDA_SUCCESS, 5, 6), "x") == (5, 6)


def test_devices_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A UUID leads to this process's ordinal; a MIG instance is named by its own; what is not shown is an error."""
    become(monkeypatch, FakeDriver(OTHER, Gpu(model=b"NVIDIA H100 80GB HBM3 MIG 1g.10gb")))
    mig = NAME.replace("GPU", "MIG")
    other = "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"
    assert [cuda.device_name(0), cuda.device_name(1)] == [other, mig]
    assert (cuda.ordinal_of(other), cuda.ordinal_of(mig)) == (0, 1)
    assert cuda.device_uuid(1) == mig.removeprefix("MIG-")
    with pytest.raises(NoSuchDevice, match=f"no device GPU-none; devices here: {other}, {mig}"):
        cuda.ordinal_of("GPU-none")
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_DEVICE"):
        cuda.device_name(2)


# Slabs.


def test_a_slab_is_filled_sealed_and_mapped(fake: FakeDriver) -> None:
    """What was written through the slab's address is read through a mapping of its descriptor."""
    data = os.urandom(GRANULARITY + 5)
    with sealed(fake, data) as fd:
        assert fake.live() == {}, "a sealed slab is its descriptor and nothing else"
        assert fcntl.fcntl(fd.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        mapping = CudaMapping.open(0, [(fd.fileno(), len(data))])
        assert fake.peek(mapping.address, len(data)) == data
        assert (mapping.offsets, mapping.nbytes) == ((0,), 2 * GRANULARITY)
        mapping.close()
        assert fake.live() == {}
        os.fstat(fd.fileno())


def test_an_unsealed_slab_is_freed(fake: FakeDriver) -> None:
    """`close` gives everything back, any number of times; a closed slab cannot be sealed."""
    slab = CudaSlab.create(0, 10)
    assert fake.live() == {"handles": 1, "reservations": 1, "mappings": 1, "contexts": 1}
    slab.close()
    slab.close()
    assert fake.live() == {}
    with pytest.raises(ValueError, match="sealed or closed"):
        slab.seal()


def test_a_sealed_slab_cannot_be_sealed_again(fake: FakeDriver) -> None:
    """`seal` gives the descriptor once."""
    slab = CudaSlab.create(0, 10)
    with slab.seal():
        with pytest.raises(ValueError, match="sealed or closed"):
            slab.seal()
        slab.close()


def test_a_dropped_slab_is_freed_with_a_warning(fake: FakeDriver) -> None:
    """Losing the object is a bug that shows, not a leak that grows."""
    slab = CudaSlab.create(0, 10)
    with pytest.warns(ResourceWarning, match="neither sealed nor closed"):
        del slab
        gc.collect()
    assert fake.live() == {}


def test_a_full_device_says_the_numbers(fake: FakeDriver) -> None:
    """No room: the error has the bytes needed (rounded up), free and in all, and nothing is left."""
    kept = CudaSlab.create(0, 600 << 20)
    with pytest.raises(DeviceFull) as caught:
        CudaSlab.create(0, (500 << 20) + 1)
    error = caught.value
    assert (error.device, error.needed, error.free, error.limit) == (NAME, 502 << 20, 424 << 20, 1 << 30)
    assert "600" in str(error) or str(600 << 20) in str(error)
    kept.close()
    assert fake.live() == {}


def test_an_empty_slab_has_a_descriptor(fake: FakeDriver) -> None:
    """A checkpoint of empty tensors has a slab of no bytes; it is made, sealed and mapped like any other."""
    with CudaSlab.create(0, 0).seal() as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), 0)])
        assert mapping.nbytes == GRANULARITY
        mapping.close()


# Mappings.


def test_slabs_lie_side_by_side(fake: FakeDriver) -> None:
    """Each slab begins at its offset in one range of addresses, whose access is set with one call."""
    contents = [bytes([i]) * (i * 3_000_000 + 1) for i in range(5)]
    fds = [sealed(fake, content) for content in contents]
    fake.calls.clear()
    mapping = CudaMapping.open(0, [(fd.fileno(), len(c)) for fd, c in zip(fds, contents, strict=True)])
    assert fake.calls.count("cuMemSetAccess") == fake.calls.count("cuMemAddressReserve") == 1
    assert [
        fake.peek(mapping.address + at, len(c)) for at, c in zip(mapping.offsets, contents, strict=True)
    ] == contents
    assert mapping.nbytes == mapping.offsets[-1] + 6 * GRANULARITY
    mapping.close()
    for fd in fds:
        fd.close()


def test_no_slabs_are_an_empty_mapping(fake: FakeDriver) -> None:
    """A manifest without slabs maps nothing."""
    mapping = CudaMapping.open(0, [])
    assert (mapping.address, mapping.offsets, mapping.nbytes) == (0, (), 0)
    mapping.close()
    assert fake.live() == {}


def test_a_mapping_is_read_only_unless_asked(fake: FakeDriver) -> None:
    """A write through a read-only mapping fails in the writer and changes nothing."""
    with sealed(fake, b"abc") as fd:
        writable = CudaMapping.open(0, [(fd.fileno(), 3)], read_only=False)
        fake.poke(writable.address, b"xyz")
        assert fake.broken is None
        writable.close()
        mapping = CudaMapping.open(0, [(fd.fileno(), 3)])
        fake.poke(mapping.address, b"---")
        assert fake.peek(mapping.address, 3) == b"xyz"
        with pytest.raises(DeviceError, match="cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
            mapping.close()
        assert fake.live() == {}, "unmapped all the same"


@pytest.mark.parametrize("visible", [True, False])
def test_a_slab_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch, visible: bool) -> None:
    """The driver would map it, over the link between the devices; only its location tells, seen or not."""
    publisher = become(monkeypatch, FakeDriver(OTHER))
    with sealed(publisher, b"abc") as fd:
        mine = Gpu()
        client = become(monkeypatch, FakeDriver(mine, OTHER) if visible else FakeDriver(mine))
        client.memfds = publisher.memfds
        found = "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f" if visible else "memory of another device"
        with pytest.raises(WrongDevice, match=f"wanted {NAME}, found {found}"):
            CudaMapping.open(0, [(fd.fileno(), 3)])
        with pytest.raises(WrongDevice, match=f"wanted {NAME}, found {found}"):
            cuda.check_slabs(0, [(fd.fileno(), 3)])
        assert client.live() == {}


@pytest.mark.parametrize("listed", [1, GRANULARITY, 2 * GRANULARITY + 1, 1 << 40])
def test_a_slab_of_another_size_is_refused(fake: FakeDriver, listed: int) -> None:
    """A manifest that lists fewer or more bytes than the slab has is refused; the slab's number is named."""
    with sealed(fake, b"abc") as first, sealed(fake, bytes(GRANULARITY + 1)) as second:
        with pytest.raises(ManifestError, match=f"slab 1 is not of the {listed} bytes listed"):
            CudaMapping.open(0, [(first.fileno(), 3), (second.fileno(), listed)])
        with pytest.raises(ManifestError, match=f"slab 1 is not of the {listed} bytes listed"):
            cuda.check_slabs(0, [(first.fileno(), 3), (second.fileno(), listed)])
        cuda.check_slabs(0, [(first.fileno(), 3), (second.fileno(), GRANULARITY + 1)])
        assert fake.live() == {}


def test_what_is_no_device_memory_is_refused(fake: FakeDriver) -> None:
    """Any other descriptor in place of a slab is an error of the driver."""
    with OwnedFd(os.memfd_create("no slab")) as fd, pytest.raises(DeviceError, match="cuMemImportFromShareableHandle"):
        CudaMapping.open(0, [(fd.fileno(), 3)])
    assert fake.live() == {}


def test_closing_waits_for_the_device_first(fake: FakeDriver) -> None:
    """Work that reads the memory is finished before it is unmapped; a second close does nothing."""
    with sealed(fake, b"abc") as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), 3)])
        fake.calls.clear()
        mapping.close()
        order = [name for name in fake.calls if "Ctx" not in name or "Synchronize" in name or "Release" in name]
        assert order == ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree", "cuDevicePrimaryCtxRelease"]
        fake.calls.clear()
        mapping.close()
        assert fake.calls == []


def test_unmapped_slabs_come_back_at_the_same_addresses(fake: FakeDriver) -> None:
    """`unmap` keeps the addresses and the context, and no memory; `remap` puts the slabs there, read-only as before."""
    with sealed(fake, b"abc") as first, sealed(fake, b"defg") as second:
        slabs = [(first.fileno(), 3), (second.fileno(), 4)]
        mapping = CudaMapping.open(0, slabs)
        places = [mapping.address + offset for offset in mapping.offsets]
        fake.calls.clear()
        mapping.unmap()
        mapping.unmap()
        assert [name for name in fake.calls if "Ctx" not in name or "Synchronize" in name] == [
            "cuCtxSynchronize", "cuMemUnmap", "cuMemUnmap",
        ]  # fmt: skip
        assert fake.live() == {"reservations": 1, "contexts": 1}
        with pytest.raises(ManifestError, match="2 slabs were mapped, 1 came"):
            mapping.remap(slabs[:1])
        mapping.remap(slabs)
        assert [fake.peek(place, size) for place, size in zip(places, (3, 4), strict=True)] == [b"abc", b"defg"]
        with pytest.raises(ValueError, match="mapped"):
            mapping.remap(slabs)
        fake.poke(places[0], b"x")
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
            mapping.unmap()
        assert fake.live() == {"reservations": 1, "contexts": 1}, "unmapped all the same"
        mapping.close()
        assert fake.live() == {}


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_remap_that_fails_may_be_tried_again(fake: FakeDriver, call: str) -> None:
    """Whichever call of the driver fails, nothing is mapped and nothing leaks; the next try succeeds."""
    with sealed(fake, b"abc") as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), 3)])
        mapping.unmap()
        before = len(fake.calls)
        mapping.remap([(fd.fileno(), 3)])
        number = fake.calls[before:].index(call)
        mapping.unmap()
        fake.failures[len(fake.calls) + number] = Status.CUDA_ERROR_UNKNOWN
        with pytest.raises(DeviceError, match=call):
            mapping.remap([(fd.fileno(), 3)])
        assert fake.live() == {"reservations": 1, "contexts": 1}
        mapping.remap([(fd.fileno(), 3)])
        assert fake.peek(mapping.address, 3) == b"abc"
        mapping.close()
        assert fake.live() == {}


def test_closing_works_in_any_thread(fake: FakeDriver) -> None:
    """A finalizer may run in a thread that never used CUDA; that thread has no current context afterwards either."""
    with sealed(fake, b"abc") as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), 3)])
        left: list[dict[str, int]] = []

        def finalize() -> None:
            mapping.close()
            left.append(fake.live())

        thread = threading.Thread(target=finalize)
        thread.start()
        thread.join()
        assert left == [{}]


def test_a_forked_child_leaves_the_mapping_alone(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not survive a fork: the child's copy of the object forgets what is the parent's."""
    with sealed(fake, b"abc") as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), 3)])
        before = fake.live()
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        mapping.close()
        assert fake.live() == before
        for at in list(fake.mappings):
            fake.cuMemUnmap(at, fake.mappings[at].size)


def test_a_dropped_mapping_is_unmapped_with_a_warning(fake: FakeDriver) -> None:
    """Losing the object is a bug that shows, not a leak that grows."""
    with sealed(fake, b"abc") as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), 3)])
        with pytest.warns(ResourceWarning, match="never closed"):
            del mapping
            gc.collect()
        assert fake.live() == {}


def test_the_callers_context_stays_current(fake: FakeDriver) -> None:
    """Inside `current` the context is the thread's; afterwards the one before is, also after an error."""
    context = PrimaryContext(0)
    with context.current():
        with pytest.raises(KeyError), context.current():
            raise KeyError
        assert fake.live()["current contexts"] == 1
    context.synchronize()
    context.close()
    context.close()
    assert fake.live() == {}


# Every step fails once.

UNDOING = {"cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent"}


def fails_everywhere(fake: FakeDriver, prepare: Callable[[], object], act: Callable[[object], None]) -> set[str]:
    """Runs `act` again and again, each time with another call failing; returns the calls that were made to fail.

    After each failure nothing may be left, except what a failing undo itself leaves.
    """
    made = prepare()
    fake.calls.clear()
    act(made)
    calls = list(fake.calls)
    for number, name in enumerate(calls):
        if name in UNDOING:
            continue
        with NoDescriptorLeaks():
            made = prepare()
            fake.calls.clear()
            fake.failures = {number: Status.CUDA_ERROR_UNKNOWN}
            with pytest.raises(WeightCacheError, match="CUDA_ERROR_UNKNOWN"):
                act(made)
            assert not fake.failures, f"{name} was reached"
            assert fake.live() == {}, f"left behind after {name} failed"
    fake.failures = {}
    return set(calls) - UNDOING


def test_create_undoes_itself_at_every_step(fake: FakeDriver) -> None:
    """Whichever call of `CudaSlab.create` fails: no handle, no mapping, no reserved address, no context is left."""
    failed = fails_everywhere(fake, lambda: None, lambda _: CudaSlab.create(0, 100).close())
    assert {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"} <= failed


def test_seal_undoes_itself_at_every_step(fake: FakeDriver) -> None:
    """A slab whose export fails is freed."""

    def seal(slab: object) -> None:
        assert isinstance(slab, CudaSlab)
        slab.seal().close()

    assert fails_everywhere(fake, lambda: CudaSlab.create(0, 100), seal) == {"cuMemExportToShareableHandle"}


def test_open_undoes_itself_at_every_step(fake: FakeDriver) -> None:
    """Whichever call of `CudaMapping.open` fails, at the first slab or at the last: nothing is left."""
    with sealed(fake, b"a") as a, sealed(fake, b"b") as b, sealed(fake, b"c") as c:
        slabs = [(fd.fileno(), 1) for fd in (a, b, c)]
        failed = fails_everywhere(fake, lambda: None, lambda _: CudaMapping.open(0, slabs).close())
    assert {
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemMap",
        "cuMemSetAccess",
        "cuCtxSynchronize",
    } <= failed


def test_check_undoes_itself_at_every_step(fake: FakeDriver) -> None:
    """Whichever call of `check_slabs` fails: no handle and no reserved address is left. None of them is for access."""
    with sealed(fake, b"a") as a, sealed(fake, b"b") as b:
        slabs = [(fd.fileno(), 1) for fd in (a, b)]
        failed = fails_everywhere(fake, lambda: None, lambda _: cuda.check_slabs(0, slabs))
    assert {"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap"} <= failed
    assert not {"cuMemSetAccess", "cuDevicePrimaryCtxRetain"} & failed


@pytest.mark.parametrize("name", ["cuMemUnmap", "cuMemAddressFree"])
def test_a_failing_undo_does_not_stop_the_others(fake: FakeDriver, name: str) -> None:
    """When unmapping fails, what comes after it is given back all the same, and the error is raised."""
    slab = CudaSlab.create(0, 100)
    fake.calls.clear()
    fake.failures = {["cuMemUnmap", "cuMemAddressFree"].index(name): Status.CUDA_ERROR_UNKNOWN}
    with pytest.raises(DeviceError):
        slab.close()
    assert not {"handles", "contexts"} & set(fake.live())
    for at in list(fake.mappings):
        fake.cuMemUnmap(at, fake.mappings[at].size)
