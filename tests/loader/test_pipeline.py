"""loader.pipeline with the host sink: bytes, digests, counts, and every way in which a load can end early.

Where a test changes a system call, the readers are threads of its own process (`tests.loader.in_threads`).
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.leaks import NoDescriptorLeaks
from tests.loader.in_threads import thread_readers
from tests.loader.loads import (
    Loaded,
    MakeCheckpoint,
    Raw,
    digest_of,
    load_host,
    noise,
    slab_of,
    small_blocks,
    tensors_of,
)
from tests.loader.whole import any_cut, columns, whole
from tests.running import READER, children_of, own_children
from weightcached.checkpoint.digest import BLOCK_BYTES, checkpoint_digest, digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointChanged, CheckpointError, ConnectionLost
from weightcached.loader.pipeline import run
from weightcached.loader.plan import Copy, plan_load
from weightcached.loader.readers import reader_count
from weightcached.loader.sink import HostSink, Placed
from weightcached.parallel.slices import Slice
from weightcached.shard.dtypes import DTYPES, tensor_bytes
from weightcached.shard.host import HostSlab


@pytest.fixture(autouse=True)
def nothing_left(descriptors: NoDescriptorLeaks) -> Iterator[None]:
    """No test leaves a descriptor, a thread or a process behind."""
    before = set(threading.enumerate()), children_of(os.getpid())
    yield
    assert (set(threading.enumerate()), children_of(os.getpid())) == before


def check(loaded: Loaded, expected: Raw) -> None:
    """Every tensor is in the slab with its type and shape, and between them are zeros."""
    (slab,), (data,) = loaded.plan.slabs, loaded.slabs
    assert {entry.name for entry in slab.entries} == set(expected)
    position = 0
    for entry in slab.entries:
        dtype, shape, content = expected[entry.name]
        assert (entry.dtype, entry.shape, entry.nbytes) == (dtype, shape, len(content))
        assert data[entry.offset : entry.offset + entry.nbytes] == content, entry.name
        assert not any(data[position : entry.offset]), "a gap that is not zero"
        position = entry.offset + entry.nbytes
    assert position == len(data)


@pytest.fixture
def big(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A file of six blocks in a few tensors, one of which ends at an odd byte."""
    sizes = [BLOCK_BYTES, 3 * BLOCK_BYTES + 13, 1, BLOCK_BYTES // 2, BLOCK_BYTES - 77]
    tensors = {f"w{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate(sizes)}
    path = make_checkpoint(tmp_path / "model.safetensors", tensors)
    os.utime(path, (0, 0))  # long ago: a kernel whose clock ticks slowly shows a later write all the same
    return path


@pytest.mark.parametrize("readers", [1, 3])
def test_every_dtype_at_odd_offsets(tmp_path: Path, make_checkpoint: MakeCheckpoint, readers: int) -> None:
    """Tensors of all types, 0-dim and empty ones among them, arrive whole although the file aligns nothing."""
    tensors: Raw = {"odd": ("U8", (1,), b"\x07")}
    for number, dtype in enumerate(DTYPES):
        for shape in ((), (0,), (4, 0), (3, 8), (5, 4, 2)):
            nbytes = tensor_bytes(dtype, shape)
            if nbytes is not None:  # one element of 4 bits is not a whole byte
                tensors[f"{dtype}{shape}"] = (dtype, shape, noise(nbytes, number))
        tensors[f"odd{number}"] = ("U8", (3,), b"abc")
    path = make_checkpoint(tmp_path / "model.safetensors", tensors)
    check(load_host(path, readers=readers), tensors)


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_a_file_of_several_blocks(big: Path, readers: int) -> None:
    """Tensors over many blocks are put together rightly, whatever the number of readers."""
    loaded = load_host(big, readers=readers)
    check(loaded, tensors_of(big))
    result = loaded.result
    assert result.bytes_read == big.stat().st_size
    assert [file.digest for file in result.files] == [digest_of(big)]
    assert result.content == checkpoint_digest([digest_of(big)])
    assert result.seconds > 0


def test_twenty_thousand_tiny_tensors(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 tensors of 0 to 400 bytes, each at a multiple of 256 bytes, arrive whole, by few system calls."""
    sizes = random.Random(3).choices(range(401), k=20_000)
    tensors: Raw = {f"t{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate(sizes)}
    path = make_checkpoint(tmp_path / "model.safetensors", tensors)
    calls = counting(monkeypatch)
    loaded = load_host(path, threads=2)
    monkeypatch.undo()
    check(loaded, tensors)
    assert len(calls) < 100


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each preadv of this process returns from here on, the one-byte probes of residency apart."""
    found: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            return preadv(fd, buffers, offset, flags)
        found.append(preadv(fd, buffers, offset))
        return found[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return found


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
    loaded = load_host(tmp_path)
    check(loaded, expected)
    result = loaded.result
    digests = {path.name: digest_of(path) for path in tmp_path.glob("*.safetensors")}
    assert {file.name: file.digest for file in result.files} == digests
    assert result.content == checkpoint_digest([digests[file.name] for file in result.files])


def test_the_real_model(minilm: Path) -> None:
    """all-MiniLM-L6-v2 lies in the slab exactly as in its file, under the digest that the file has by itself."""
    loaded = load_host(minilm)
    result = loaded.result
    with open_checkpoint(minilm) as checkpoint:
        assert result.content == digest_checkpoint(checkpoint)[0]
    check(loaded, tensors_of(minilm / "model.safetensors"))
    assert result.bytes_read == (minilm / "model.safetensors").stat().st_size


def test_a_checkpoint_without_bytes(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """A checkpoint of empty tensors is an empty slab; its file is read and hashed all the same."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"a": ("F32", (0, 4), b""), "b": ("I8", (0,), b"")})
    plan, result, slabs = load_host(path)
    assert (plan.slabs[0].nbytes, slabs) == (0, (b"",))
    assert result.bytes_read == path.stat().st_size
    assert [file.digest for file in result.files] == [digest_of(path)]


@pytest.mark.parametrize("several", [False, True])
def test_every_byte_is_read_once(big: Path, monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """What preadv returns over a load adds up to the file's size exactly, for one rank as for five."""
    got = counting(monkeypatch)
    result = load_host(big, ranks_of(big) if several else None, threads=3).result
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

    def stingy(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            return preadv(fd, buffers, offset, flags)
        first = buffers[0]
        if chance.random() < 0.3 and len(buffers) > 1:
            return preadv(fd, [first], offset)
        with first[: chance.randint(1, len(first))] as part:
            return preadv(fd, [part], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    loaded = load_host(path, threads=2)
    monkeypatch.undo()
    check(loaded, tensors)
    assert loaded.result.content == checkpoint_digest([digest_of(path)])


def ranks_of(path: Path) -> list[list[Slice]]:
    """Rows for the first rank, what is whole for two more, something else for the fourth, nothing for the last."""
    sizes = {name: len(data) for name, (_, _, data) in tensors_of(path).items()}
    everything = [columns(name, 1, nbytes, 0, nbytes) for name, nbytes in sizes.items()]
    rows = [columns(name, nbytes // 1000, 1000, 7, 500, 3) for name, nbytes in sizes.items() if nbytes > 1000]
    return [rows, everything, everything, everything[2:4], []]


@pytest.mark.parametrize("readers", [1, 3])
def test_the_slices_of_several_ranks(big: Path, readers: int) -> None:
    """Each rank's slab is what slicing in Python gives, and all come from one pass over the file."""
    shards = ranks_of(big)
    loaded = load_host(big, shards, readers=readers)
    for number, slab in enumerate(loaded.slabs):
        assert slab == slab_of(tensors_of(big), loaded.plan, shards, number)
    assert loaded.result.bytes_read == big.stat().st_size
    assert loaded.result.content == checkpoint_digest([digest_of(big)])


# The fixture is a function without state.
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_slices(scratch: Path, make_checkpoint: MakeCheckpoint, data: st.DataObject) -> None:
    """Any cut for any ranks, in blocks of 64 bytes, which cut rows at every place: what Python's slicing gives."""
    sizes = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=5))
    raw: Raw = {f"w{i}": ("U8", (size,), noise(size, i)) for i, size in enumerate(sizes)}
    shards = any_cut(data, {name: len(item[2]) for name, item in raw.items()}, data.draw(st.integers(1, 3)))
    path = make_checkpoint(scratch / "model.safetensors", raw)
    with small_blocks(64):
        loaded = load_host(path, shards, staging=256, threads=2)
    for number, slab in enumerate(loaded.slabs):
        assert slab == slab_of(raw, loaded.plan, shards, number)
    assert loaded.result.bytes_read == path.stat().st_size


def at_half(path: Path, act: Callable[[], None]) -> Callable[[int], None]:
    """A progress callback that does something once, when half of the file is read."""
    return at(path.stat().st_size // 2, act)


def at(nbytes: int, act: Callable[[], None]) -> Callable[[int], None]:
    """A progress callback that does something once, when that many bytes are read."""
    done = False

    def progress(bytes_done: int) -> None:
        nonlocal done
        if bytes_done >= nbytes and not done:
            done = True
            act()

    return progress


@pytest.mark.parametrize("readers", [1, 2])
def test_a_file_that_shrinks_is_an_error(big: Path, readers: int) -> None:
    """Truncated in the middle of a load: an error that says so; the slab can be freed at once."""
    with pytest.raises(
        CheckpointChanged, match=r"model.safetensors: shrank while it was read: \d+ bytes expected, \d+ found"
    ):
        load_host(big, readers=readers, progress=at_half(big, lambda: os.truncate(big, big.stat().st_size * 3 // 4)))


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
        load_host(big, readers=2, progress=at_half(big, lambda: act(big)))


def test_a_file_that_cannot_be_read_is_an_error(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO from the kernel becomes an error with the file and the byte."""

    def broken(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)  # the header is read with pread
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot read at byte \d+: Input/output error"):
        load_host(big, threads=2)


def test_the_first_error_ends_every_reader(big: Path) -> None:
    """After one reader fails nobody waits for another, not even if that does not run: the error is the first one's."""

    def stop_one_and_truncate() -> None:
        os.kill(own_children(READER)[0], signal.SIGSTOP)
        os.truncate(big, 100)

    with pytest.raises(CheckpointChanged, match=r"\d+ bytes expected, 100 found"):
        load_host(big, readers=2, progress=at(1, stop_one_and_truncate))


def test_a_reader_that_is_killed_is_an_error(big: Path) -> None:
    """The load ends, with the reader's signal in the error; what the slab holds by then is nobody's."""

    def kill_one() -> None:
        os.kill(own_children(READER)[0], signal.SIGKILL)

    with pytest.raises(ConnectionLost, match=r"reader process \d+: ended by signal SIGKILL in the middle of the load"):
        load_host(big, readers=2, progress=at(1, kill_one))


def test_an_error_of_the_progress_callback_ends_the_load(big: Path) -> None:
    """The loader ends when the service that listens to its progress is gone."""

    with pytest.raises(ZeroDivisionError):
        load_host(big, readers=2, progress=lambda done: 1 // 0)


def test_an_exception_of_a_signal_handler_ends_the_load(big: Path) -> None:
    """A signal whose handler raises, while the load waits for readers, stops it; nothing runs on behind it."""

    class Terminated(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Terminated

    def wait_for_ever() -> None:
        for pid in own_children(READER):
            os.kill(pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    before = signal.signal(signal.SIGALRM, lambda number, frame: signal.signal(signal.SIGALRM, handler))
    try:
        with pytest.raises(Terminated):
            load_host(big, readers=1, progress=at(1, wait_for_ever))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_progress_counts_up_to_the_whole(big: Path) -> None:
    """Progress grows with each block, one call at a time, and ends at the size of the files."""
    seen: list[int] = []
    load_host(big, readers=3, progress=seen.append)
    assert seen == sorted(set(seen))
    assert seen[-1] == big.stat().st_size


class Recording(HostSink):
    """A host sink that notes what is asked of it and can fail at one step."""

    def __init__(self, slab: HostSlab, fail: str = "") -> None:
        super().__init__([slab])
        self.asked: list[str] = []
        self._fail = fail

    def note(self, what: str) -> None:
        self.asked.append(what)
        if what == self._fail:
            raise RuntimeError(what)

    def start(self, readers: int) -> None:
        super().start(readers)
        self.note("start")

    def place(self, nbytes: int, copies: Sequence[Copy], *, wait: bool) -> Placed | None:
        if "place" not in self.asked:
            self.note("place")
        return super().place(nbytes, copies, wait=wait)

    def write(self, placed: Placed) -> None:
        if "write" not in self.asked:
            self.note("write")
        super().write(placed)

    def finish(self) -> None:
        self.note("finish")


STEPS = ["start", "place", "write", "finish"]


@pytest.mark.parametrize("fail", ["", *STEPS])
def test_one_step_after_the_other(big: Path, fail: str) -> None:
    """Whatever fails, nothing comes after it; sink and readers can be closed then, and the slab be sealed."""
    with open_checkpoint(big) as checkpoint:
        plan = plan_load(checkpoint, [whole(checkpoint)])
        slab = HostSlab(plan.slabs[0].nbytes)
        with thread_readers(2) as readers, closing(Recording(slab, fail)) as sink:
            with pytest.raises(RuntimeError, match=fail) if fail else nullcontext():
                run(plan, checkpoint, sink, readers)
            assert sink.asked == (STEPS[: STEPS.index(fail) + 1] if fail else STEPS)
        slab.seal().close()


def test_as_many_readers_as_suit_the_load(big: Path) -> None:
    """They run while it loads, and end with it."""
    seen: list[int] = []
    loaded = load_host(big, progress=lambda done: seen.append(len(own_children(READER))))
    assert set(seen) == {reader_count(loaded.plan.task_count)}


@pytest.mark.parametrize("readers", [1, 4])
def test_a_ring_smaller_than_what_the_readers_could_take(big: Path, readers: int) -> None:
    """With two buffers for all readers the load takes turns, and is the same load."""
    shards = ranks_of(big)
    loaded = load_host(big, shards, staging=0, readers=readers)
    for number, slab in enumerate(loaded.slabs):
        assert slab == slab_of(tensors_of(big), loaded.plan, shards, number)
