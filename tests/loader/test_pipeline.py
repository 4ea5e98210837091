"""loader.pipeline with the host sink: bytes, digests, counts, and every way in which a load can end early."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint.digest import BLOCK_BYTES, FileDigest, block_digest, checkpoint_digest, digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointChanged, CheckpointError
from weightcached.loader import pipeline
from weightcached.loader.pipeline import LoadResult, run, thread_count
from weightcached.loader.plan import LoadPlan, plan_load
from weightcached.loader.sink import HostSink
from weightcached.shard.dtypes import DTYPES, tensor_bytes
from weightcached.shard.host import HostSlab

MakeCheckpoint = Callable[..., Path]
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(autouse=True)
def nothing_left(descriptors: NoDescriptorLeaks) -> Iterator[None]:
    """No test leaves a descriptor or a thread behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def load(path: Path, **options: Any) -> tuple[LoadPlan, LoadResult, bytes]:
    """The plan, the result, and what the sealed slab holds."""
    with open_checkpoint(path) as checkpoint:
        plan = plan_load(checkpoint)
        slab = HostSlab(plan.nbytes)
        try:
            result = run(plan, checkpoint, HostSink(slab), **options)
            with slab.seal() as fd:
                return plan, result, os.pread(fd.fileno(), plan.nbytes, 0)
        finally:
            slab.close()


def tensors_of(path: Path) -> Raw:
    """Name -> dtype, shape, bytes, by the format's definition."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: (item["dtype"], tuple(item["shape"]), body[slice(*item["data_offsets"])]) for name, item in header.items()
    }


def check(plan: LoadPlan, slab: bytes, expected: Raw) -> None:
    """Every tensor is in the slab with its type and shape, and between them are zeros."""
    assert {entry.name for entry in plan.entries} == set(expected)
    position = 0
    for entry in plan.entries:
        dtype, shape, data = expected[entry.name]
        assert (entry.dtype, entry.shape, entry.nbytes) == (dtype, shape, len(data))
        assert slab[entry.offset : entry.offset + entry.nbytes] == data, entry.name
        assert not any(slab[position : entry.offset]), "a gap that is not zero"
        position = entry.offset + entry.nbytes
    assert position == len(slab)


def digest_of(path: Path) -> str:
    """The file's digest, computed block by block in one thread."""
    data = path.read_bytes()
    digest = FileDigest(len(data))
    for index in range(0, len(data), BLOCK_BYTES):
        digest.put(index // BLOCK_BYTES, block_digest([data[index : index + BLOCK_BYTES]]))
    return digest.value()


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def big(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A file of six blocks in a few tensors, one of which ends at an odd byte."""
    sizes = [BLOCK_BYTES, 3 * BLOCK_BYTES + 13, 1, BLOCK_BYTES // 2, BLOCK_BYTES - 77]
    tensors = {f"w{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate(sizes)}
    path = make_checkpoint(tmp_path / "model.safetensors", tensors)
    os.utime(path, (0, 0))  # long ago: a kernel whose clock ticks slowly shows a later write all the same
    return path


@pytest.mark.parametrize("threads", [1, 3])
def test_every_dtype_at_odd_offsets(tmp_path: Path, make_checkpoint: MakeCheckpoint, threads: int) -> None:
    """Tensors of all types, 0-dim and empty ones among them, arrive whole although the file aligns nothing."""
    tensors: Raw = {"odd": ("U8", (1,), b"\x07")}
    for number, dtype in enumerate(DTYPES):
        for shape in ((), (0,), (4, 0), (3, 8), (5, 4, 2)):
            nbytes = tensor_bytes(dtype, shape)
            if nbytes is not None:  # one element of 4 bits is not a whole byte
                tensors[f"{dtype}{shape}"] = (dtype, shape, noise(nbytes, number))
        tensors[f"odd{number}"] = ("U8", (3,), b"abc")
    path = make_checkpoint(tmp_path / "model.safetensors", tensors)
    plan, _, slab = load(path, threads=threads)
    check(plan, slab, tensors)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_file_of_several_blocks(big: Path, threads: int) -> None:
    """Tensors over many blocks are put together rightly, whatever the number of threads."""
    plan, result, slab = load(big, threads=threads)
    check(plan, slab, tensors_of(big))
    assert result.bytes_read == big.stat().st_size
    assert [file.digest for file in result.files] == [digest_of(big)]
    assert result.content == checkpoint_digest([digest_of(big)])
    assert result.seconds > 0


def test_twenty_thousand_tiny_tensors(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """20,000 tensors of 0 to 40 bytes, 256 bytes apart in the slab, arrive whole."""
    sizes = random.Random(3).choices(range(41), k=20_000)
    tensors: Raw = {f"t{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate(sizes)}
    plan, _, slab = load(make_checkpoint(tmp_path / "model.safetensors", tensors), threads=2)
    check(plan, slab, tensors)


def test_several_files_and_their_digests(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """The files of a set share one slab; each has its digest, and together they have one."""
    expected: Raw = {}
    weight_map = {}
    for number in range(3):
        tensors: Raw = {f"m{number}.{i}": ("F32", (size,), noise(4 * size, size)) for i, size in enumerate((7, 70_000))}
        name = f"model-{number + 1:05}-of-00003.safetensors"
        make_checkpoint(tmp_path / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
        expected.update(tensors)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plan, result, slab = load(tmp_path, threads=2)
    check(plan, slab, expected)
    digests = {path.name: digest_of(path) for path in tmp_path.glob("*.safetensors")}
    assert {file.name: file.digest for file in result.files} == digests
    assert result.content == checkpoint_digest([digests[file.name] for file in result.files])


def test_the_real_model(minilm: Path) -> None:
    """all-MiniLM-L6-v2 lies in the slab exactly as in its file, under the digest that the file has by itself."""
    plan, result, slab = load(minilm)
    with open_checkpoint(minilm) as checkpoint:
        assert result.content == digest_checkpoint(checkpoint)[0]
    check(plan, slab, tensors_of(minilm / "model.safetensors"))
    assert result.bytes_read == (minilm / "model.safetensors").stat().st_size


def test_a_checkpoint_without_bytes(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """A checkpoint of empty tensors is an empty slab; its file is read and hashed all the same."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"a": ("F32", (0, 4), b""), "b": ("I8", (0,), b"")})
    plan, result, slab = load(path)
    assert (plan.nbytes, slab) == (0, b"")
    assert result.bytes_read == path.stat().st_size
    assert [file.digest for file in result.files] == [digest_of(path)]


def test_every_byte_is_read_once(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What preadv returns over a load adds up to the file's size exactly."""
    got: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got.append(preadv(fd, buffers, offset))
        return got[-1]

    monkeypatch.setattr(os, "preadv", counting)
    _, result, _ = load(big, threads=3)
    assert sum(got) == result.bytes_read == big.stat().st_size


def test_short_reads_are_continued(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preadv that returns early, in the middle of a buffer or at its end, loses nothing."""
    sizes = [1, 300, 0, 4096, 77, 2 * BLOCK_BYTES + 5, 3, 3, 3, 50_000]
    tensors: Raw = {f"t{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate(sizes)}
    path = make_checkpoint(tmp_path / "model.safetensors", tensors)
    preadv = os.preadv
    chance = random.Random(5)

    def stingy(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        first = buffers[0]
        if chance.random() < 0.3 and len(buffers) > 1:
            return preadv(fd, [first], offset)
        with first[: chance.randint(1, len(first))] as part:
            return preadv(fd, [part], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    plan, result, slab = load(path, threads=2)
    monkeypatch.undo()
    check(plan, slab, tensors)
    assert result.content == checkpoint_digest([digest_of(path)])


def at_half(path: Path, act: Callable[[], None]) -> Callable[[int], None]:
    """A progress callback that does something to the file once, when half of it is read."""
    half = path.stat().st_size // 2
    done = False

    def progress(bytes_done: int) -> None:
        nonlocal done
        if bytes_done >= half and not done:
            done = True
            act()

    return progress


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_shrinks_is_an_error(big: Path, threads: int) -> None:
    """Truncated in the middle of a load: an error that says so; the slab can be freed at once."""
    with pytest.raises(
        CheckpointChanged, match=r"model.safetensors: shrank while it was read: it ends at byte \d+ now"
    ):
        load(big, threads=threads, progress=at_half(big, lambda: os.truncate(big, big.stat().st_size * 3 // 4)))


def rewrite(path: Path) -> None:
    """Changes one byte in place; size and inode stay."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    "act", [rewrite, replace, append, os.unlink], ids=["rewritten", "replaced", "grown", "removed"]
)
def test_a_file_that_changes_is_an_error(big: Path, act: Callable[[Path], None]) -> None:
    """A file that is written, replaced or removed during a load makes the load fail at its end."""
    with pytest.raises(CheckpointChanged):
        load(big, threads=2, progress=at_half(big, lambda: act(big)))


def test_a_file_that_cannot_be_read_is_an_error(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO from the kernel becomes an error with the file and the byte."""

    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)  # the header is read with pread
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read at byte \d+: Input/output error"):
        load(big, threads=2)


def test_the_first_error_stops_the_other_threads(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one thread fails, each other thread ends with the block that it is at, and the error is the first one."""
    reading = threading.Barrier(3)
    stopped = threading.Event()
    reads: list[int] = []
    preadv = os.preadv

    def one_fails(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        reading.wait(30)  # all three are in the middle of a block
        if offset == 0:
            raise OSError(errno.EIO, "planted")
        assert stopped.wait(30)
        return preadv(fd, buffers, offset)

    class Pool(ThreadPoolExecutor):
        """Lets the others go on when the load begins to wait for their end, and not before."""

        def shutdown(self, *args: Any, **options: Any) -> None:
            stopped.set()
            super().shutdown(*args, **options)

    monkeypatch.setattr(pipeline, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(os, "preadv", one_fails)
    with pytest.raises(CheckpointError, match="planted"):
        load(big, threads=3)
    assert len(reads) == 3, "one read per thread, of a file of more blocks than that"


def test_an_error_of_the_progress_callback_ends_the_load(big: Path) -> None:
    """The loader ends when the service that listens to its progress is gone."""

    with pytest.raises(ZeroDivisionError):
        load(big, threads=2, progress=lambda done: 1 // 0)


def test_an_exception_of_a_signal_handler_ends_the_load(big: Path) -> None:
    """A signal whose handler raises, in the thread that waits, stops the load; nothing runs on behind it."""

    class Terminated(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Terminated):
            load(big, threads=1, progress=at_half(big, lambda: signal.raise_signal(signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_progress_counts_up_to_the_whole(big: Path) -> None:
    """Progress grows with each block, one call at a time, and ends at the size of the files."""
    seen: list[int] = []
    load(big, threads=3, progress=seen.append)
    assert seen == sorted(set(seen))
    assert seen[-1] == big.stat().st_size


class Recording(HostSink):
    """A host sink that notes what is asked of it and can fail at one step."""

    def __init__(self, slab: HostSlab, fail: str = "") -> None:
        super().__init__(slab)
        self.asked: list[str] = []
        self._fail = fail

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what == self._fail:
            raise RuntimeError(what)

    def start(self, threads: int, reads: int) -> None:
        self._note("start")

    def finish(self) -> None:
        self._note("finish")

    def close(self) -> None:
        super().close()
        self._note("close")


@pytest.mark.parametrize(
    ("fail", "asked"),
    [
        ("", ["start", "finish", "close"]),
        ("start", ["start", "close"]),
        ("finish", ["start", "finish", "close"]),
    ],
)
def test_the_sink_is_always_closed(big: Path, fail: str, asked: list[str]) -> None:
    """`run` starts, finishes and closes the sink; it is closed whatever fails."""
    with open_checkpoint(big) as checkpoint:
        plan = plan_load(checkpoint)
        slab = HostSlab(plan.nbytes)
        sink = Recording(slab, fail)
        with pytest.raises(RuntimeError, match=fail) if fail else nullcontext():
            run(plan, checkpoint, sink, threads=2)
        slab.close()
    assert sink.asked == asked


def test_the_number_of_threads(big: Path) -> None:
    """One per usable core, 16 at most, never more than there are blocks."""
    with open_checkpoint(big) as checkpoint:
        plan = plan_load(checkpoint)
    cores = len(os.sched_getaffinity(0))
    assert thread_count(plan) == min(cores, 16, len(plan.tasks))
    assert thread_count(plan, 3) == 3
    assert thread_count(plan, 500) == len(plan.tasks)
    assert thread_count(LoadPlan((), 0, (), 0)) == 1
