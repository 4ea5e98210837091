"""loader.cuda_sink: the same loads through a fake driver and, where there is one, through a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import gpu
from tests.fake_cuda import FakeDriver, Gpu, Status
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint.digest import BLOCK_BYTES
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointChanged, DeviceError
from weightcached.fds import OwnedFd
from weightcached.loader.cuda_sink import BUFFERS, CudaSink
from weightcached.loader.pipeline import LoadResult, run
from weightcached.loader.plan import READ_BYTES, LoadPlan, plan_load
from weightcached.loader.sink import HostSink
from weightcached.shard import cuda
from weightcached.shard.cuda import CudaMapping, CudaSlab, PrimaryContext
from weightcached.shard.dtypes import DTYPES, tensor_bytes
from weightcached.shard.host import HostSlab

MakeCheckpoint = Callable[..., Path]
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]
ReadSlab = Callable[[OwnedFd, int], bytes]


def use_fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(Gpu(total=8 << 30))
    fake.initialised = True
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    return fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks) -> FakeDriver:
    return use_fake(monkeypatch)


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def read_slab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadSlab]:
    """A device to load to, and a function that reads a sealed slab back from it."""
    if request.param == "fake":
        fake = use_fake(monkeypatch)
        with NoDescriptorLeaks():
            yield lambda fd, nbytes: os.pread(fd.fileno(), nbytes, 0)
        assert fake.live() == {}
        return
    context = PrimaryContext(0)

    def read(fd: OwnedFd, nbytes: int) -> bytes:
        mapping = CudaMapping.open(0, [(fd.fileno(), nbytes)])
        data = gpu.read(0, mapping.address, nbytes)
        mapping.close()
        return data

    yield read
    context.close()


def load(path: Path, read_slab: ReadSlab, **options: Any) -> tuple[LoadPlan, LoadResult, bytes]:
    """The plan, the result, and the bytes of the sealed slab."""
    with open_checkpoint(path) as checkpoint:
        plan = plan_load(checkpoint)
        slab = CudaSlab.create(0, plan.nbytes)
        try:
            result = run(plan, checkpoint, CudaSink(slab), **options)
            with slab.seal() as fd:
                return plan, result, read_slab(fd, plan.nbytes)
        finally:
            slab.close()


def host_load(path: Path) -> tuple[LoadResult, bytes]:
    """The same through the host sink, which has tests of its own."""
    with open_checkpoint(path) as checkpoint:
        plan = plan_load(checkpoint)
        slab = HostSlab(plan.nbytes)
        result = run(plan, checkpoint, HostSink(slab), threads=1)
        with slab.seal() as fd:
            return result, os.pread(fd.fileno(), plan.nbytes, 0)


def same_as_on_the_host(path: Path, read_slab: ReadSlab, **options: Any) -> None:
    """Bytes, gaps and digests are equal whichever way the checkpoint is loaded."""
    plan, result, slab = load(path, read_slab, **options)
    expected, on_host = host_load(path)
    for entry in plan.entries:
        place = slice(entry.offset, entry.offset + entry.nbytes)
        assert slab[place] == on_host[place], entry.name
    assert slab == on_host, "the gaps are zeros"
    assert (result.files, result.content, result.bytes_read) == (expected.files, expected.content, expected.bytes_read)


@pytest.fixture
def big(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A file of fourteen blocks: more than one thread's ring holds."""
    sizes = [3, 9 * BLOCK_BYTES + 13, 1, BLOCK_BYTES // 2, 4 * BLOCK_BYTES - 77]
    chance = random.Random(1)
    path = tmp_path / "model.safetensors"
    make_checkpoint(path, {f"w{i}": ("U8", (size,), chance.randbytes(size)) for i, size in enumerate(sizes)})
    os.utime(path, (0, 0))
    return path


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_a_file_larger_than_the_ring(big: Path, read_slab: ReadSlab, threads: int) -> None:
    """A buffer is filled again only when its copy is done: the slab holds every block, each in its place."""
    same_as_on_the_host(big, read_slab, threads=threads)


def test_every_dtype_at_odd_offsets(tmp_path: Path, make_checkpoint: MakeCheckpoint, read_slab: ReadSlab) -> None:
    """Tensors of all types and shapes arrive whole, with zeros between them although the ring held other bytes."""
    tensors: Raw = {"odd": ("U8", (1,), b"\x07")}
    for number, dtype in enumerate(DTYPES):
        for shape in ((), (0,), (3, 8), (5, 4, 2)):
            nbytes = tensor_bytes(dtype, shape)
            if nbytes is not None:
                tensors[f"{dtype}{shape}"] = (dtype, shape, random.Random(number).randbytes(nbytes))
        tensors[f"odd{number}"] = ("U8", (3,), b"abc")
    same_as_on_the_host(make_checkpoint(tmp_path / "model.safetensors", tensors), read_slab)


@pytest.mark.parametrize("largest", [4, 600])
def test_twenty_thousand_tiny_tensors(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, read_slab: ReadSlab, largest: int
) -> None:
    """A block of many tiny tensors takes several buffers, more than the ring has, and is one digest all the same."""
    chance = random.Random(3)
    sizes = chance.choices(range(largest + 1), k=20_000)
    tensors: Raw = {f"t{i}": ("U8", (size,), chance.randbytes(size)) for i, size in enumerate(sizes)}
    same_as_on_the_host(make_checkpoint(tmp_path / "model.safetensors", tensors), read_slab, threads=2)


def test_a_checkpoint_without_bytes(tmp_path: Path, make_checkpoint: MakeCheckpoint, read_slab: ReadSlab) -> None:
    """Nothing is copied for a checkpoint of empty tensors; it is a slab all the same."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"a": ("F32", (0, 4), b"")})
    same_as_on_the_host(path, read_slab)


def test_the_real_model(minilm: Path, read_slab: ReadSlab) -> None:
    """all-MiniLM-L6-v2 lies in device memory exactly as on the host."""
    same_as_on_the_host(minilm, read_slab)


def test_a_file_that_shrinks_leaves_nothing(big: Path, read_slab: ReadSlab) -> None:
    """An error in the middle of a load, with copies under way, frees ring, streams and slab."""

    def truncate(done: int) -> None:
        os.truncate(big, big.stat().st_size - BLOCK_BYTES)

    with pytest.raises(CheckpointChanged, match="shrank"):
        load(big, read_slab, threads=2, progress=truncate)


@pytest.mark.gpu
def test_a_failed_load_gives_the_memory_back(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """After an error the device has as much memory free as before the load."""
    context = PrimaryContext(0)
    path = make_checkpoint(tmp_path / "model.safetensors", {"w": ("U8", (100 << 20,), bytes(100 << 20))})

    def stop(done: int) -> None:
        raise KeyError(done)

    before = gpu.used_bytes(0)
    with pytest.raises(KeyError):
        load(path, lambda fd, nbytes: b"", progress=stop)
    assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= before + (8 << 20))
    context.close()


def test_a_forbidden_copy_is_an_error_of_the_load(big: Path, fake: FakeDriver) -> None:
    """What the device refuses long after the copy was started still fails the load; everything is freed."""
    with open_checkpoint(big) as checkpoint:
        plan = plan_load(checkpoint)
        slab = CudaSlab.create(0, plan.nbytes)
        fake.mappings[slab.address].access = 1  # as if it were mapped read-only
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            run(plan, checkpoint, CudaSink(slab), threads=2)
        slab.close()
    assert fake.live() == {}


def test_every_call_that_fails_ends_the_load_and_leaves_nothing(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver
) -> None:
    """Whichever driver call of a load fails, from the ring to the last wait: an error, and nothing is left."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"w": ("U8", (6 << 20,), bytes(6 << 20))})
    undoing = {"cuMemFreeHost", "cuStreamDestroy", "cuEventDestroy", "cuCtxPopCurrent"}
    with open_checkpoint(path) as checkpoint:
        plan = plan_load(checkpoint)

        def attempt(failures: dict[int, Any]) -> list[str]:
            slab = CudaSlab.create(0, plan.nbytes)
            fake.calls.clear()
            fake.failures = failures
            try:
                run(plan, checkpoint, CudaSink(slab), threads=1)
                return list(fake.calls)
            finally:
                slab.close()

        calls = attempt({})
        assert {"cuMemHostAlloc", "cuStreamCreate", "cuEventCreate", "cuEventSynchronize"} < set(calls)
        last_push = max(number for number, name in enumerate(calls) if name == "cuCtxPushCurrent")
        for number, name in enumerate(calls):
            with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
                attempt({number: Status.CUDA_ERROR_UNKNOWN})
            if name in undoing or number == last_push:  # what it did not undo is still there, and nothing else
                for left in (fake.pinned, fake.streams, fake.events, fake._stack()):
                    left.clear()
            assert fake.live() == {}, f"left behind after {name} failed"


@pytest.mark.parametrize(("threads", "buffers"), [(1, BUFFERS), (2, BUFFERS), (5, 3), (14, 1)])
def test_the_ring_is_no_larger_than_the_load(big: Path, fake: FakeDriver, threads: int, buffers: int) -> None:
    """Four buffers a thread at most, and fewer where the file has fewer blocks: pinning takes time."""
    pinned: list[int] = []

    def look(done: int) -> None:
        pinned.append(sum(len(memory) for memory, _ in fake.pinned.values()))

    load(big, lambda fd, nbytes: b"", threads=threads, progress=look)
    assert set(pinned) == {threads * buffers * READ_BYTES}
    assert fake.live() == {}
