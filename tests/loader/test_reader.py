"""loader.reader: what is in the page cache is read from there, what is not with O_DIRECT, and every byte is right."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks, open_descriptors
from tests.loader.loads import cached_bytes, cached_pages, drop, noise
from weightcached.errors import CheckpointChanged, CheckpointError
from weightcached.loader import reader
from weightcached.loader.reader import PAGE, Reader, is_resident

SIZE = 40 * PAGE + 123
CONTENT = noise(SIZE)
Reads = list[tuple[bool, int]]  # of each preadv: whether it had O_DIRECT, and the bytes that it returned

pytestmark = pytest.mark.usefixtures("descriptors")


@pytest.fixture
def path(disk: Path) -> Path:
    """A file on a real disk that is in the page cache until it is dropped."""
    path = disk / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What each preadv returned, the one-byte probes of residency apart."""
    return counting(monkeypatch, lambda direct, views, offset: None)


def counting(monkeypatch: pytest.MonkeyPatch, act: Callable[[bool, Sequence[memoryview], int], int | None]) -> Reads:
    """Counts every preadv without flags; `act` may raise in its place, or say how many bytes it reads at most."""
    found: Reads = []
    preadv = os.preadv

    def counted(fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            return preadv(fd, views, offset, flags)
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        most = act(direct, views, offset)
        if most is None:
            count = preadv(fd, views, offset)
        else:
            with views[0][:most] as some:
                count = preadv(fd, [some], offset)
        found.append((direct, count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return found


@contextmanager
def pages(nbytes: int) -> Iterator[memoryview]:
    """Memory that begins at a page. Unmapped at the end, which another view of it would forbid."""
    with mmap.mmap(-1, nbytes + PAGE) as memory, memoryview(memory) as view, view[:nbytes] as some:
        yield some


def read_all(path: Path, nbytes: int = SIZE, *, page_aligned: bool = True) -> bytes:
    """The first `nbytes` of the file through a reader of its own."""
    with path.open("rb") as file, closing(Reader(file.fileno(), str(path))) as one, pages(nbytes) as view:
        one.read([view], 0, page_aligned=page_aligned)
        return bytes(view)


def without_cachestat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_syscall", lambda: lambda *arguments: -1)


def by_sampling(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """From here on the kernel has no cachestat, and its reads that may not wait answer exactly.

    The real ones start to read what is missing, and succeed where the disk is quicker than the rest of the call.
    """
    without_cachestat(monkeypatch)
    preadv = os.preadv

    def exactly(fd: int, views: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags and not cached_pages(path)[offset // PAGE]:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", exactly)


@pytest.mark.parametrize("sampling", [False, True])
def test_a_cold_file_is_read_past_the_page_cache(
    path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch, sampling: bool
) -> None:
    """What is not in the page cache is read with O_DIRECT, its whole pages at once, and does not come into it."""
    if sampling:
        by_sampling(monkeypatch, path)
    drop(path)
    assert read_all(path, 40 * PAGE) == CONTENT[: 40 * PAGE]
    assert reads == [(True, 40 * PAGE)]
    assert cached_bytes(path) == 0


@pytest.mark.parametrize("sampling", [False, True])
def test_a_resident_file_is_read_from_the_page_cache(
    path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch, sampling: bool
) -> None:
    """What is in the page cache is copied from there, its last bytes too, in one call."""
    if sampling:
        without_cachestat(monkeypatch)
    assert read_all(path) == CONTENT
    assert reads == [(False, SIZE)]


def test_residency_is_that_of_the_range(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that is half in the page cache, each half is told apart, by either way of asking."""
    drop(path)
    with path.open("rb") as file:
        fd = file.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead past what is asked for
        assert len(os.pread(fd, 20 * PAGE, 0)) == 20 * PAGE
        assert cached_bytes(path) == 20 * PAGE
        assert is_resident(fd, 0, 20 * PAGE)
        assert not is_resident(fd, 20 * PAGE, 20 * PAGE)
        assert not is_resident(fd, 0, 40 * PAGE)
        by_sampling(monkeypatch, path)
        assert is_resident(fd, 0, 20 * PAGE)
        assert not is_resident(fd, 20 * PAGE, 20 * PAGE)
        assert not is_resident(fd, 0, 40 * PAGE)


def test_the_kernel_says_what_would_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cachestat a cold file is told by reads that may not wait, unless the disk was quicker, now and then."""
    without_cachestat(monkeypatch)
    with path.open("rb") as file:
        for _ in range(50):
            drop(path)
            if not is_resident(file.fileno(), 0, SIZE):
                break
        else:
            pytest.fail("a cold file counted as resident 50 times")


def test_a_few_missing_pages_are_left_to_the_page_cache(path: Path) -> None:
    """Nine tenths of the pages are enough: read-ahead brings the rest."""
    drop(path)
    with path.open("rb") as file:
        fd = file.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        assert len(os.pread(fd, 35 * PAGE, 0)) == 35 * PAGE
        assert not is_resident(fd, 0, 40 * PAGE)
        assert len(os.pread(fd, PAGE, 35 * PAGE)) == PAGE
        assert is_resident(fd, 0, 40 * PAGE)


def test_where_nothing_tells_the_page_cache_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows neither cachestat nor reads that may not wait counts as resident."""
    without_cachestat(monkeypatch)
    with open("/proc/self/maps", "rb") as file:
        with pytest.raises(OSError) as caught:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        if caught.value.errno != errno.EOPNOTSUPP:
            pytest.skip("this kernel's procfs can tell")
        assert is_resident(file.fileno(), 0, PAGE)


def test_memory_that_is_not_aligned_is_filled_from_the_page_cache(path: Path, reads: Reads) -> None:
    """Without the promise of one aligned view nobody asks the cache; several views are filled in one call."""
    drop(path)
    with path.open("rb") as file, closing(Reader(file.fileno(), str(path))) as one:
        views = [memoryview(bytearray(n)) for n in (100, 4000, 36)]
        one.read(views, PAGE, page_aligned=False)
        assert b"".join(views) == CONTENT[PAGE : PAGE + 4136]
    assert reads == [(False, 4136)]


def test_the_end_of_a_file_of_any_size(path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that ends 0 to 4095 bytes behind its last whole page is right to its last byte, and each byte read once.

    Its whole pages come by O_DIRECT, the rest from the page cache.
    """
    monkeypatch.setattr(reader, "is_resident", lambda fd, offset, nbytes: False)
    with path.open("r+b") as file, closing(Reader(file.fileno(), str(path))) as one, pages(3 * PAGE) as view:
        for tail in range(PAGE - 1, -1, -1):
            size = 2 * PAGE + tail
            file.truncate(size)
            with view[:size] as whole:
                whole[:] = bytes(size)
                one.read([whole], 0, page_aligned=True)
                assert whole == CONTENT[:size]
            assert reads == [(True, 2 * PAGE), *([(False, tail)] if tail else [])]
            reads.clear()


def test_a_file_smaller_than_a_page(path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is a whole page, so the page cache serves."""
    monkeypatch.setattr(reader, "is_resident", lambda fd, offset, nbytes: False)
    os.truncate(path, 77)
    assert read_all(path, 77) == CONTENT[:77]
    assert reads == [(False, 77)]


@pytest.mark.parametrize("most", [1, 512, PAGE, PAGE + 1, 39 * PAGE])
def test_a_short_read_is_continued(path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """An O_DIRECT read that returns early, at whatever byte, loses nothing, and no byte comes twice."""
    size = -(-most // 512) * 512  # a request that O_DIRECT takes, of which not all is said to have come
    found = counting(monkeypatch, lambda direct, views, offset: size if direct else None)
    counted = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: min(counted(fd, views, offset), most_of(fd, most)))
    drop(path)
    assert read_all(path) == CONTENT
    assert found == [(True, size), (False, SIZE - most)]


def most_of(fd: int, most: int) -> int:
    return most if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else SIZE


def test_a_refusal_is_said_and_the_page_cache_serves(
    path: Path, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    """EINVAL, as for memory that is not aligned after all: all bytes come, the log says why, and it is tried once."""
    caplog.set_level(logging.DEBUG, "weightcached.loader.reader")
    drop(path)
    with path.open("rb") as file, closing(Reader(file.fileno(), str(path))) as one, pages(SIZE + 1) as view:
        with view[1:] as odd:
            one.read([odd], 0, page_aligned=True)
            assert odd == CONTENT
        assert caplog.messages == [f"{path}: O_DIRECT is refused, so it is read through the page cache"]
        assert reads == [(False, SIZE)]
        drop(path)
        with view[:SIZE] as even:
            one.read([even], 0, page_aligned=True)
            assert even == CONTENT
    assert len(caplog.messages) == 1
    assert reads == [(False, SIZE)] * 2


def test_a_file_system_without_o_direct(caplog: pytest.LogCaptureFixture) -> None:
    """Where a file cannot even be opened so, the log says it and the page cache serves."""
    caplog.set_level(logging.DEBUG, "weightcached.loader.reader")
    with open("/proc/self/auxv", "rb") as file, closing(Reader(file.fileno(), "auxv")) as one, pages(64) as view:
        one.read([view], 0, page_aligned=True)
        assert view == Path("/proc/self/auxv").read_bytes()[:64]
    assert caplog.messages == ["auxv: no O_DIRECT: Invalid argument"]


@pytest.mark.parametrize("left", [PAGE * 7 + 5, PAGE * 7, 5, 0])
def test_a_file_that_shrinks_is_a_change(path: Path, reads: Reads, left: int) -> None:
    """A file cut off behind the reader's back, at a page or within one, is an error with both sizes."""
    drop(path)
    with path.open("rb") as file, closing(Reader(file.fileno(), str(path))) as one, pages(SIZE) as view:
        os.truncate(path, left)
        with pytest.raises(CheckpointChanged, match=f"shrank while it was read: {SIZE} bytes expected, {left} found"):
            one.read([view], 0, page_aligned=True)
    assert reads[0][0], "found out by the O_DIRECT read"


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_fails_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """EIO, by either way, is the checkpoint's error with the byte. No view of the memory is left behind with it."""

    def act(found: bool, views: Sequence[memoryview], offset: int) -> None:
        assert found is direct
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if direct:
        drop(path)
    counting(monkeypatch, act)
    with path.open("rb") as file, closing(Reader(file.fileno(), str(path))) as one:
        refused = pytest.raises(CheckpointError, match=f"{path}: cannot read at byte {PAGE}: Input/output error")
        with refused as caught, pages(PAGE) as view:
            one.read([view], PAGE, page_aligned=True)
    assert caught.value.file == str(path)


def test_the_reader_follows_the_open_file(path: Path) -> None:
    """Another file under the same name is not read: the descriptor for O_DIRECT is of the file that is open."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        other = path.with_suffix(".new")
        other.write_bytes(noise(SIZE, 2))
        os.replace(other, path)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with closing(Reader(file.fileno(), str(path))) as one, pages(PAGE) as view:
            one.read([view], 0, page_aligned=True)
            assert view == CONTENT[:PAGE]


def test_the_descriptors(path: Path, descriptors: NoDescriptorLeaks) -> None:
    """A reader owns one descriptor of its own, close-on-exec, until it is closed; the caller's stays open."""
    with path.open("rb") as file:
        before = open_descriptors()
        one = Reader(file.fileno(), str(path))
        (new,) = set(open_descriptors()) - set(before)
        assert fcntl.fcntl(new, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        one.close()
        one.close()
        assert open_descriptors() == before
