"""loader.cuda_sink: the same loads through a fake driver and, where there is one, through a GPU."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import gpu
from tests.fake_cuda import FakeDriver, Status
from tests.leaks import NoDescriptorLeaks
from tests.loader.conftest import use_fake
from tests.loader.in_threads import thread_readers
from tests.loader.loads import (
    MakeCheckpoint,
    Raw,
    ReadSlab,
    Shards,
    cached_bytes,
    drop,
    load_cuda,
    load_host,
    noise,
    read_fake,
    slab_of,
    small_blocks,
    tensors_of,
)
from tests.loader.whole import any_cut, columns, whole
from tests.running import READER, own_children
from weightcached.checkpoint.digest import BLOCK_BYTES
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointChanged, ConnectionLost, DeviceError
from weightcached.fds import OwnedFd
from weightcached.loader.cuda_sink import CudaSink
from weightcached.loader.pipeline import run
from weightcached.loader.plan import plan_load
from weightcached.loader.sink import BUFFERS
from weightcached.parallel.slices import Part, Slice
from weightcached.shard.cuda import CudaMapping, CudaSlab, PrimaryContext, device_count
from weightcached.shard.dtypes import DTYPES, tensor_bytes


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def read_slab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadSlab]:
    """A device to load to, and a function that reads a sealed slab back from it."""
    if request.param == "fake":
        fake = use_fake(monkeypatch)
        with NoDescriptorLeaks():
            yield read_fake
        assert fake.live() == {}
        return
    context = PrimaryContext(0)

    def read(fd: OwnedFd, nbytes: int, ordinal: int) -> bytes:
        with fd:
            mapping = CudaMapping.open(ordinal, [(fd.fileno(), nbytes)])
        data = gpu.read(ordinal, mapping.address, nbytes) if nbytes else b""
        mapping.close()
        return data

    yield read
    context.close()


def same_as_on_the_host(path: Path, read_slab: ReadSlab, shards: Shards | None = None, **options: Any) -> None:
    """Bytes, gaps and digests are equal whichever way the checkpoint is loaded."""
    loaded = load_cuda(path, shards, read=read_slab, **options)
    expected = load_host(path, shards, threads=1)
    for slab, found, on_host in zip(loaded.plan.slabs, loaded.slabs, expected.slabs, strict=True):
        for entry in slab.entries:
            place = slice(entry.offset, entry.offset + entry.nbytes)
            assert found[place] == on_host[place], entry.name
        assert found == on_host, "the gaps are zeros"
    one, other = loaded.result, expected.result
    assert (one.files, one.content, one.bytes_read) == (other.files, other.content, other.bytes_read)


@pytest.fixture
def big(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A file of fourteen blocks: more than the ring of one reader holds."""
    sizes = [3, 9 * BLOCK_BYTES + 13, 1, BLOCK_BYTES // 2, 4 * BLOCK_BYTES - 77]
    chance = random.Random(1)
    path = tmp_path / "model.safetensors"
    make_checkpoint(path, {f"w{i}": ("U8", (size,), chance.randbytes(size)) for i, size in enumerate(sizes)})
    os.utime(path, (0, 0))
    return path


@pytest.mark.parametrize(("readers", "staging"), [(1, 0), (1, 256 << 20), (2, 3 * BLOCK_BYTES), (4, 256 << 20)])
def test_a_file_larger_than_the_ring(big: Path, read_slab: ReadSlab, readers: int, staging: int) -> None:
    """A buffer is filled again only when its copy is done: the slab holds every block, each in its place."""
    same_as_on_the_host(big, read_slab, readers=readers, staging=staging)


def test_every_dtype_at_odd_offsets(tmp_path: Path, make_checkpoint: MakeCheckpoint, read_slab: ReadSlab) -> None:
    """Tensors of all types and shapes arrive whole, with zeros between them although the ring held other bytes."""
    tensors: Raw = {"odd": ("U8", (1,), b"\x07")}
    for number, dtype in enumerate(DTYPES):
        for shape in ((), (0,), (3, 8), (5, 4, 2)):
            nbytes = tensor_bytes(dtype, shape)
            if nbytes is not None:
                tensors[f"{dtype}{shape}"] = (dtype, shape, random.Random(number).randbytes(nbytes))
        tensors[f"odd{number}"] = ("U8", (3,), b"abc")
    same_as_on_the_host(make_checkpoint(tmp_path / "model.safetensors", tensors), read_slab, threads=1)


def test_a_checkpoint_without_bytes(tmp_path: Path, make_checkpoint: MakeCheckpoint, read_slab: ReadSlab) -> None:
    """Nothing is copied for a checkpoint of empty tensors; it is a slab all the same."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"a": ("F32", (0, 4), b"")})
    same_as_on_the_host(path, read_slab, threads=1)


def test_the_real_model(minilm: Path, read_slab: ReadSlab) -> None:
    """all-MiniLM-L6-v2 lies in device memory exactly as on the host."""
    same_as_on_the_host(minilm, read_slab)


# Rows, replicas, several slabs.


@pytest.mark.parametrize("width", [2, 6, 64, 510, 4096, 7000])
def test_the_columns_of_eight_ranks(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, read_slab: ReadSlab, width: int
) -> None:
    """A matrix cut by columns for eight ranks, over several blocks: rows of 2 bytes to 7 KiB, behind each a few zeros.

    The tensors around it go whole to all ranks, to some, to none.
    """
    rows = 5 * BLOCK_BYTES // 4 // (8 * width) if width > 8 else 400
    matrix = noise(8 * width * rows)
    raw: Raw = {"a": ("U8", (999,), noise(999)), "m": ("U8", (rows, 8 * width), matrix), "z": ("U8", (77,), noise(77))}
    shards: list[list[Slice]] = []
    for rank in range(8):
        shard = [columns("a", 1, 999, 0, 999)] if rank < 7 else []
        shard.append(columns("m", rows, 8 * width, rank * width, width, tail=rank % 3 * 2))
        shards.append(shard + ([columns("z", 1, 77, 0, 77)] if rank % 2 else []))
    path = make_checkpoint(tmp_path / "model.safetensors", raw)
    same_as_on_the_host(path, read_slab, shards, threads=2)
    loaded = load_host(path, shards, threads=1)
    for rank, slab in enumerate(loaded.slabs):
        assert slab == slab_of(raw, loaded.plan, shards, rank)


# The fixtures are used up by no example: each leaves the driver as it was.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_slices(scratch: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver, data: st.DataObject) -> None:
    """Any cut for any ranks on two devices, in blocks of a page: the same on host and device as by Python's slicing."""
    sizes = data.draw(st.lists(st.integers(0, 9000), min_size=1, max_size=5))
    tiny = data.draw(st.integers(0, 30))
    raw: Raw = {f"w{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate([*sizes, *[40] * tiny])}
    ranks = data.draw(st.integers(1, 3))
    shards = any_cut(data, {name: len(raw[name][2]) for name in list(raw)[: len(sizes)]}, ranks)
    for shard in shards:
        if data.draw(st.booleans()):
            names = list(raw)[len(sizes) :]
            shard += [columns(name, 1, 40, 3, 30, tail=5 * (i % 7 == 0)) for i, name in enumerate(names)]
    path = make_checkpoint(scratch / "model.safetensors", raw)
    buffers = data.draw(st.integers(2, 8))
    with small_blocks(4096):
        on_host = load_host(path, shards, staging=buffers * 4096, threads=1)
        ordinals = [number % 2 for number in range(ranks)]
        on_device = load_cuda(path, shards, ordinals=ordinals, staging=buffers * 4096, threads=2)
    expected = tuple(slab_of(raw, on_host.plan, shards, number) for number in range(ranks))
    assert on_host.slabs == expected
    assert on_device.slabs == expected
    assert on_host.result.files == on_device.result.files
    assert fake.live() == {}


def test_several_devices_from_one_pass(big: Path, fake: FakeDriver) -> None:
    """Slabs of two devices are filled while the file is read once; each device's copies are on a stream of its own."""
    raw = tensors_of(big)
    everything = [columns(name, 1, len(data), 0, len(data)) for name, (_, _, data) in raw.items()]
    large = {name: len(data) for name, (_, _, data) in raw.items() if len(data) > 20_000}
    halves = [columns(name, nbytes // 20_000, 20_000, 500, 10_000) for name, nbytes in large.items()]
    shards = [everything, halves, halves, everything[1:]]
    streams: set[int] = set()

    def look(done: int) -> None:
        streams.update(stream.context for stream in fake.streams.values())
        assert len(fake.streams) <= 2

    loaded = load_cuda(big, shards, ordinals=[1, 0, 1, 0], staging=20 * BLOCK_BYTES, threads=2, progress=look)
    for number, slab in enumerate(loaded.slabs):
        assert slab == slab_of(raw, loaded.plan, shards, number)
    assert loaded.result.bytes_read == big.stat().st_size
    assert len(streams) == 2


# Tiny tensors.


def tiny(tmp_path: Path, make_checkpoint: MakeCheckpoint, largest: int, count: int = 20_000) -> Path:
    chance = random.Random(3)
    sizes = chance.choices(range(largest + 1), k=count)
    tensors: Raw = {f"t{i}": ("U8", (size,), chance.randbytes(size)) for i, size in enumerate(sizes)}
    return make_checkpoint(tmp_path / "model.safetensors", tensors)


def copies_made(fake: FakeDriver) -> int:
    return sum(fake.calls.count(name) for name in ("cuMemcpyHtoDAsync", "cuMemcpy2DAsync"))


@pytest.mark.parametrize("largest", [4, 600])
def test_twenty_thousand_tiny_tensors(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, read_slab: ReadSlab, largest: int
) -> None:
    """A block of many tiny tensors takes several buffers, more than the ring has, and is one digest all the same."""
    path = tiny(tmp_path, make_checkpoint, largest)
    same_as_on_the_host(path, read_slab, threads=2, staging=0)


def test_tiny_tensors_are_packed(tmp_path: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver) -> None:
    """20,000 tensors take a copy for each four MiB of the slab, not one each."""
    path = tiny(tmp_path, make_checkpoint, 600)
    loaded = load_cuda(path, threads=1)
    assert loaded.slabs == load_host(path, threads=1).slabs
    assert copies_made(fake) <= loaded.plan.slabs[0].nbytes // BLOCK_BYTES + 4


def test_tiny_tensors_of_alternate_ranks_are_packed(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver
) -> None:
    """Tensors that go in turn to one rank and another, or to both, are packed for each."""
    path = tiny(tmp_path, make_checkpoint, 600, 6000)
    pieces = [columns(name, 1, len(data), 0, len(data)) for name, (_, _, data) in tensors_of(path).items()]
    shards = [pieces[::2], pieces[1::2], pieces]
    loaded = load_cuda(path, shards, ordinals=[0, 1, 0], threads=1)
    assert loaded.slabs == load_host(path, shards, threads=1).slabs
    assert copies_made(fake) < 40


def test_a_pack_reaches_over_nothing_but_gaps(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver
) -> None:
    """Tiny pieces of one tensor with other pieces between them, which another block brings, are never packed with what
    lies between; between tensors, and there alone, a pack writes zeros."""
    pieces = 40
    raw: Raw = {
        "m": ("U8", (pieces, 60), noise(pieces * 60)),
        "pad": ("U8", (BLOCK_BYTES,), noise(BLOCK_BYTES)),
        **{f"t{i}": ("U8", (10,), noise(10, i)) for i in range(20)},
        "n": ("U8", (pieces, 60), noise(pieces * 60, 2)),
    }
    # Piece i of the file goes to place i / 2 or, from the second half on, between two of those.
    order = [*range(0, pieces, 2), *range(1, pieces, 2)]
    woven = tuple(Part(60 * i, 60, 1, 60, 60 * place, 60) for i, place in enumerate(order))
    shards = [[Slice("m", "U8", (pieces, 60), woven), *(columns(f"t{i}", 1, 10, 0, 10) for i in range(20))]]
    shards[0].append(Slice("n", "U8", (pieces, 60), woven))
    path = make_checkpoint(tmp_path / "model.safetensors", raw)
    size = path.stat().st_size
    with small_blocks(4096):  # whose ends fall into both matrices
        loaded = load_cuda(path, shards, staging=64 * 4096, threads=1)
    assert loaded.slabs[0] == slab_of(raw, loaded.plan, shards, 0)
    assert loaded.result.bytes_read == size


def test_row_ends_of_one_tensor_are_not_packed_over_others(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver
) -> None:
    """A block that begins in the middle of a row, with tiny tensors behind: the pack of these does not begin at pieces
    of rows, between which other columns lie."""
    rest: Raw = {"m": ("U8", (2, 1500), noise(3000)), **{f"t{i}": ("U8", (9,), noise(9, i)) for i in range(12)}}
    pad = 5000
    for _ in range(2):  # the second time with the padding that makes a block begin at byte 1300 of the first row
        raw: Raw = {"pad": ("U8", (pad,), noise(pad)), **rest}
        path = make_checkpoint(tmp_path / "model.safetensors", raw)
        data_start = path.stat().st_size - sum(len(data) for _, _, data in raw.values())
        pad = -(data_start + 1300) % 4096 + 4096
    assert (data_start + len(raw["pad"][2]) + 1300) % 4096 == 0
    shards = []
    for cut in range(1250, 1310, 10):  # of each row 40 bytes from around there, behind 60 from elsewhere
        parts = (Part(100, 60, 2, 1500, 0, 100), Part(cut, 40, 2, 1500, 60, 100))
        shards.append([Slice("m", "U8", (2, 100), parts), *(columns(f"t{i}", 1, 9, 0, 9) for i in range(12))])
    with small_blocks(4096):
        loaded = load_cuda(path, shards, staging=64 * 4096, threads=1)
    for number, slab in enumerate(loaded.slabs):
        assert slab == slab_of(raw, loaded.plan, shards, number)


# Memory, and every way to end.


@pytest.mark.parametrize(
    ("staging", "readers"), [(8 << 20, 16), (0, 1), (20 << 20, 16), (256 << 20, 1), (256 << 20, 2)]
)
def test_pinned_memory_is_bounded(big: Path, fake: FakeDriver, staging: int, readers: int) -> None:
    """At most `staging` bytes are pinned however many readers there are, two buffers at least, never more than they
    use; nothing stays pinned."""
    most = max(2, min(BUFFERS * readers, staging // BLOCK_BYTES))
    pinned: list[int] = []

    def look(done: int) -> None:
        pinned.append(sum(fake.pinned.values()))

    load_cuda(big, staging=staging, threads=readers, progress=look)
    assert 0 < max(pinned) <= most * BLOCK_BYTES
    assert max(pinned) <= max(staging, 2 * BLOCK_BYTES)
    assert fake.live() == {}


def test_a_buffer_used_again_too_early_would_show(big: Path, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of these tests copies as late as it may: a load that does not wait for its events gets wrong bytes."""
    monkeypatch.setattr(FakeDriver, "cuEventSynchronize", lambda self, event: (Status.CUDA_SUCCESS,))
    monkeypatch.setattr(FakeDriver, "cuEventQuery", lambda self, event: (Status.CUDA_SUCCESS,))
    assert load_cuda(big, staging=0, threads=1).slabs != load_host(big, threads=1).slabs


def test_a_cold_file_stays_out_of_the_page_cache(disk: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver) -> None:
    """A load to a device leaves what others keep in the page cache alone: it goes past it, but for headers and ends."""
    raw: Raw = {f"w{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate((5 << 20, 3, 9 << 20))}
    path = make_checkpoint(disk / "model.safetensors", raw)
    expected = load_host(path, threads=1)
    drop(path)
    loaded = load_cuda(path, readers=2)
    assert cached_bytes(path) < path.stat().st_size / 2, "what reading the header brought, and the last page"
    assert (loaded.slabs, loaded.result.content) == (expected.slabs, expected.result.content)
    assert loaded.result.bytes_read == path.stat().st_size


def test_a_file_that_shrinks_leaves_nothing(big: Path, read_slab: ReadSlab) -> None:
    """An error in the middle of a load, with copies under way, frees ring, streams and slab."""

    def truncate(done: int) -> None:
        os.truncate(big, big.stat().st_size - BLOCK_BYTES)

    with pytest.raises(CheckpointChanged, match="shrank"):
        load_cuda(big, read=read_slab, readers=2, progress=truncate)


def test_a_reader_that_is_killed_leaves_nothing(big: Path, read_slab: ReadSlab) -> None:
    """The same when a reader dies under the load."""

    def kill(done: int) -> None:
        os.kill(own_children(READER)[0], 9)

    with pytest.raises(ConnectionLost, match="ended by signal SIGKILL"):
        load_cuda(big, read=read_slab, readers=1, progress=kill)


@pytest.mark.gpu
def test_a_failed_load_gives_the_memory_back(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """After an error the device has as much memory free as before the load."""
    context = PrimaryContext(0)
    path = make_checkpoint(tmp_path / "model.safetensors", {"w": ("U8", (100 << 20,), os.urandom(100 << 20))})

    def stop(done: int) -> None:
        raise KeyError(done)

    before = gpu.used_bytes(0)
    with pytest.raises(KeyError):
        load_cuda(path, progress=stop)
    assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= before + (8 << 20))
    context.close()


def test_a_forbidden_copy_is_an_error_of_the_load(big: Path, fake: FakeDriver) -> None:
    """What the device refuses long after the copy was started still fails the load; everything is freed."""
    with open_checkpoint(big) as checkpoint, thread_readers(2) as readers:
        plan = plan_load(checkpoint, [whole(checkpoint)])
        slab = CudaSlab.create(0, plan.slabs[0].nbytes)
        fake.mappings[slab.address].access = 1  # as if it were mapped read-only
        with pytest.raises(DeviceError, match="CUDA_ERROR_ILLEGAL_ADDRESS"), closing(CudaSink([slab])) as sink:
            run(plan, checkpoint, sink, readers)
        slab.close()
    assert fake.live() == {}


def test_every_call_that_fails_ends_the_load_and_leaves_nothing(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver
) -> None:
    """Whichever driver call of a load fails, from the first zeros to the last wait: an error, and nothing is left.

    The load is for two devices, and has rows, tiny tensors that are packed, and more blocks than the ring.
    """
    raw: Raw = {
        **{f"t{i}": ("U8", (8,), noise(8, i)) for i in range(12)},
        "m": ("U8", (64, 512), noise(32_768)),
        "w": ("U8", (20_000,), noise(20_000)),
    }
    path = make_checkpoint(tmp_path / "model.safetensors", raw)
    everything = [columns(name, 1, len(data), 0, len(data)) for name, (_, _, data) in raw.items()]
    shards = [everything, [*everything[:12], columns("m", 64, 512, 100, 30)]]
    undoing = {"cuMemHostUnregister", "cuStreamDestroy", "cuEventDestroy", "cuCtxPopCurrent"}

    def attempt(failures: Any) -> list[str]:
        """The names of the calls of a load that ends well."""
        with open_checkpoint(path) as checkpoint, small_blocks(4096), thread_readers(1) as readers:
            plan = plan_load(checkpoint, shards)
            slabs = [CudaSlab.create(device, plan.slabs[device].nbytes) for device in (0, 1)]
            fake.calls.clear()
            fake.failures = failures
            try:
                with closing(CudaSink(slabs, 4 * 4096)) as sink:
                    run(plan, checkpoint, sink, readers)
            finally:
                calls = list(fake.calls)
                fake.failures = {}
                for slab in slabs:
                    slab.close()
                fake.calls[:] = calls
            return calls

    calls = attempt({})
    assert {
        "cuCtxSetCurrent",
        "cuCtxSynchronize",
        "cuEventCreate",
        "cuEventQuery",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuMemHostRegister",
        "cuMemcpy2DAsync",
        "cuMemcpyHtoDAsync",
        "cuMemsetD8Async",
        "cuStreamCreate",
        "cuStreamSynchronize",
    } | undoing < set(calls)
    for name, count in Counter(calls).items():
        for number in range(1, count + 1):
            with pytest.raises(DeviceError) as caught:
                attempt(Failure(fake, name, number))
            if name != "cuCtxPopCurrent":  # after which the wrong context is current, and undoing fails too
                assert name in str(caught.value) and "CUDA_ERROR_UNKNOWN" in str(caught.value)
            last = [index for index, called in enumerate(fake.calls) if called == name][number - 1]
            if name in undoing or "cuStreamSynchronize" in fake.calls[:last]:  # by then it is being closed
                assert sum(fake.live().values()) <= 1, "what it did not undo is still there, and nothing else"
                for left in (fake.pinned, fake.streams, fake.events, fake._stack()):
                    left.clear()
            assert fake.live() == {}, f"left behind after {name} failed (for the {number}. time)"


class Failure(dict[int, Any]):
    """In the place of the fake's failures: one function fails when it is called for the `number`-th time."""

    def __init__(self, fake: FakeDriver, name: str, number: int) -> None:
        self._fake, self._name, self._number = fake, name, number

    def pop(self, key: int, default: Any = None) -> Any:  # type: ignore[override]
        calls = self._fake.calls
        if calls[-1] == self._name and calls.count(self._name) == self._number:
            return Status.CUDA_ERROR_UNKNOWN
        return default


def test_one_device_that_fails_is_not_the_end_of_the_other(big: Path, fake: FakeDriver) -> None:
    """Before memory is freed, each device is waited for, also when another one has failed by then."""
    name, (_, _, data) = next(item for item in tensors_of(big).items() if len(item[1][2]) > BLOCK_BYTES)

    def stop(done: int) -> None:
        if done > BLOCK_BYTES:
            raise KeyError(done)

    fake.failures = Failure(fake, "cuStreamSynchronize", 1)
    shards = [[columns(name, 1, len(data), 0, len(data))]] * 2
    with pytest.raises(DeviceError, match="cuStreamSynchronize: CUDA_ERROR_UNKNOWN"):
        load_cuda(big, shards, ordinals=[0, 1], threads=1, progress=stop)
    assert fake.calls.count("cuStreamSynchronize") == 2
    assert fake.live() == {}


# Replicas, from device to device.


@pytest.mark.parametrize("reachable", [True, False])
def test_a_replica_comes_from_the_other_device(
    big: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reachable: bool
) -> None:
    """Its bytes cross from the host once, and are the same. Devices that cannot reach each other get them from the host
    both, which is a warning with their names."""
    fake = use_fake(monkeypatch)
    fake.peer_access = reachable
    caplog.set_level("INFO")
    with open_checkpoint(big) as checkpoint:
        one = whole(checkpoint)
    loaded = load_cuda(big, [one, one], ordinals=[0, 1], threads=2, replicas={1: 0})
    alone = load_host(big, threads=1)
    assert loaded.slabs == alone.slabs * 2
    assert loaded.result.bytes_read == alone.result.bytes_read == big.stat().st_size
    calls = Counter(fake.calls)
    assert calls["cuMemcpyDtoDAsync"] == reachable
    said = "device to device: " if reachable else "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f cannot reach the memory of"
    assert said in caplog.text
    before = calls["cuMemcpyHtoDAsync"]
    fake.calls.clear()
    load_cuda(big, [one], threads=2)
    assert before == fake.calls.count("cuMemcpyHtoDAsync") * (1 if reachable else 2)
    assert fake.live() == {}


def test_a_replica_of_no_bytes(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to copy, and nothing to let the other device read."""
    fake = use_fake(monkeypatch)
    path = make_checkpoint(tmp_path / "model.safetensors", {"a": ("F32", (0, 4), b"")})
    with open_checkpoint(path) as checkpoint:
        one = whole(checkpoint)
    assert load_cuda(path, [one, one], ordinals=[0, 1], threads=1, replicas={1: 0}).slabs == (b"", b"")
    assert "cuMemcpyDtoDAsync" not in fake.calls


def test_a_copy_that_fails_fails_the_load(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other copy; nothing is left."""
    fake = use_fake(monkeypatch)
    with open_checkpoint(big) as checkpoint:
        one = whole(checkpoint)
    monkeypatch.setattr(fake, "cuMemcpyDtoDAsync", lambda *arguments: (Status.CUDA_ERROR_UNKNOWN,))
    with pytest.raises(DeviceError, match="cuMemcpyDtoDAsync"):
        load_cuda(big, [one, one], ordinals=[0, 1], threads=1, replicas={1: 0})
    assert fake.live() == {}


@pytest.mark.gpu
def test_a_replica_on_a_second_gpu(big: Path) -> None:
    """The same on two real GPUs."""
    if device_count() < 2:
        pytest.skip("one GPU only")
    with open_checkpoint(big) as checkpoint:
        one = whole(checkpoint)

    def read(fd: OwnedFd, nbytes: int, ordinal: int) -> bytes:
        with fd:
            mapping = CudaMapping.open(ordinal, [(fd.fileno(), nbytes)])
        data = gpu.read(ordinal, mapping.address, nbytes)
        mapping.close()
        return data

    loaded = load_cuda(big, [one, one], read=read, ordinals=[0, 1], threads=2, replicas={1: 0})
    assert loaded.slabs == load_host(big, threads=1).slabs * 2
