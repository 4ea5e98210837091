"""loader.readers: reader processes as the loader sees them, from their start to their end, however that comes."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.loader.loads import noise
from tests.running import children_of, wait_for_end
from weightcached.checkpoint.digest import block_digest
from weightcached.errors import CheckpointChanged, CheckpointError, ConnectionLost, DeviceError
from weightcached.fds import OwnedFd
from weightcached.loader.readers import MAX_READERS, OpenFile, Place, Readers, Region, reader_count

DATA = noise(100_000)
ROOT = Path(__file__).parents[2]


_others: list[int] = []  # what earlier tests of other files have left, such as Python's own resource tracker


def reader_pids() -> list[int]:
    """Children of this process that the test has started."""
    return [pid for pid in children_of(os.getpid()) if pid not in _others]


@pytest.fixture(autouse=True)
def nothing_left(descriptors: NoDescriptorLeaks) -> Iterator[None]:
    """No test leaves a descriptor or a process behind."""
    _others[:] = children_of(os.getpid())
    yield
    assert reader_pids() == []


@pytest.fixture
def file(tmp_path: Path) -> Iterator[OpenFile]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    with path.open("rb") as opened:
        yield OpenFile(opened.fileno(), str(path))


@pytest.fixture
def memory() -> Iterator[OwnedFd]:
    """100,000 bytes to share."""
    with OwnedFd(os.memfd_create("memory", os.MFD_CLOEXEC)) as fd:
        os.ftruncate(fd.fileno(), len(DATA))
        yield fd


def region(memory: OwnedFd) -> Region:
    return Region(memory.fileno(), len(DATA))


def all_done(readers: Readers, count: int) -> dict[int, bytes]:
    """The digests of the next `count` tasks by their numbers."""
    found: dict[int, bytes] = {}
    while len(found) < count:
        found |= dict(readers.done())
    assert len(found) == count
    return found


def test_blocks_come_into_the_places(file: OpenFile, memory: OwnedFd) -> None:
    """Each task's bytes lie in its pieces, in order, in whichever region they are, with the digest of all of them."""
    with OwnedFd(os.memfd_create("other", os.MFD_CLOEXEC)) as other, Readers(2) as readers:
        os.ftruncate(other.fileno(), 500)
        regions = [Region(other.fileno(), 500), Region(other.fileno(), 0), region(memory)]
        readers.open(regions, [file])
        readers.submit(0, 7, 0, 4096, [Place(2, 0, 1000), Place(0, 17, 3), Place(2, 5000, 10_000)])
        readers.submit(1, 8, 0, 99_999, [Place(0, 100, 1)])
        assert all_done(readers, 2) == {
            7: block_digest([DATA[4096:15_099]]),
            8: block_digest([DATA[99_999:]]),
        }
        assert os.pread(memory.fileno(), 1000, 0) == DATA[4096:5096]
        assert os.pread(memory.fileno(), 10_000, 5000) == DATA[5099:15_099]
        expected = bytearray(500)
        expected[17:20], expected[100:101] = DATA[5096:5099], DATA[99_999:]
        assert os.pread(other.fileno(), 500, 0) == expected


def test_many_files_with_long_paths(tmp_path: Path, memory: OwnedFd) -> None:
    """As many files as a large model has, under names as long as a system takes, reach the readers."""
    folder = tmp_path.joinpath(*["ü" * 120] * 10)
    folder.mkdir(parents=True)
    paths = [folder / f"model-{number:05}-of-00163.safetensors" for number in range(163)]
    opened = []
    for number, path in enumerate(paths):
        path.write_bytes(DATA[number:])
        opened.append(OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))
    with Readers(1) as readers:
        files = [OpenFile(fd.fileno(), str(path)) for fd, path in zip(opened, paths, strict=True)]
        readers.open([region(memory)], files)
        for number in (0, 162):
            readers.submit(0, number, number, 0, [Place(0, 0, 50)])
            assert all_done(readers, 1) == {number: block_digest([DATA[number : number + 50]])}
    for fd in opened:
        fd.close()


def test_each_reader_does_its_own_tasks_in_order(file: OpenFile, memory: OwnedFd) -> None:
    """Tasks wait at the reader that they are for; another is idle as long as there are fewer tasks than readers."""
    with Readers(2) as readers:
        readers.open([region(memory)], [file])
        pids = reader_pids()
        os.kill(pids[1], signal.SIGSTOP)
        assert readers.has_idle
        readers.submit(1, 10, 0, 0, [Place(0, 0, 10)])
        assert readers.has_idle
        for number in range(5):
            readers.submit(0, number, 0, number, [Place(0, 0, 10)])
            assert not readers.has_idle
        assert list(all_done(readers, 5)) == [0, 1, 2, 3, 4]
        assert os.pread(memory.fileno(), 10, 0) == DATA[4:14], "the last one came last"
        assert readers.has_idle
        os.kill(pids[1], signal.SIGCONT)
        assert list(all_done(readers, 1)) == [10]


@pytest.mark.parametrize("behind", [0, 1])
def test_a_file_that_shrinks(file: OpenFile, memory: OwnedFd, behind: int) -> None:
    """The reader's error is raised as it was, also when the reader had one more task that it never looked at."""
    os.truncate(file.path, 5000)
    with Readers(1) as readers:
        readers.open([region(memory)], [file])
        for number in range(1 + behind):
            readers.submit(0, number, 0, 0, [Place(0, 0, 9000)])
        with pytest.raises(CheckpointChanged) as caught:
            all_done(readers, 1)
    assert str(caught.value) == f"{file.path}: shrank while it was read: 9000 bytes expected, 5000 found"


def test_an_error_is_found_by_who_asks_for_more(file: OpenFile, memory: OwnedFd) -> None:
    """A task for a reader that has ended with an error raises that error, not that nobody is there."""
    with Readers(1) as readers:
        readers.open([region(memory)], [file])
        (pid,) = reader_pids()
        os.truncate(file.path, 5000)
        readers.submit(0, 1, 0, 0, [Place(0, 0, 9000)])
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(CheckpointChanged, match="9000 bytes expected, 5000 found"):
            readers.submit(0, 2, 0, 0, [Place(0, 0, 100)])


def test_a_file_that_cannot_be_read(memory: OwnedFd, tmp_path: Path) -> None:
    """The kernel's refusal comes back with the file's name."""
    path = tmp_path / "write-only"
    with path.open("wb") as opened, Readers(1) as readers:
        readers.open([region(memory)], [OpenFile(opened.fileno(), str(path))])
        readers.submit(0, 0, 0, 0, [Place(0, 1, 10)])
        with pytest.raises(CheckpointError, match=f"{path}: cannot read at byte 0: Bad file descriptor"):
            all_done(readers, 1)


@pytest.mark.parametrize("when", ["before open", "after submit", "before submit"])
def test_a_reader_that_is_killed(file: OpenFile, memory: OwnedFd, when: str) -> None:
    """A reader that the kernel ends, as when memory is short, is a lost connection that says how it ended."""
    with Readers(1) as readers:
        (pid,) = reader_pids()

        def kill() -> None:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        with pytest.raises(
            ConnectionLost, match=f"reader process {pid}: ended by signal SIGKILL in the middle of the load"
        ):
            if when == "before open":
                kill()
            readers.open([region(memory)], [file])
            if when == "before submit":
                kill()
            else:
                os.kill(pid, signal.SIGSTOP)  # the task stays unread
            readers.submit(0, 0, 0, 0, [Place(0, 0, 10)])
            kill()
            readers.done()


def test_a_message_that_the_host_refuses(file: OpenFile, memory: OwnedFd) -> None:
    """A reader that lives has no last word: what could not be sent to it is an error at once, not a wait for one."""
    with Readers(1) as readers:
        readers.open([region(memory)], [file])
        with pytest.raises(DeviceError, match="cannot send to a reader process: Message too long"):
            readers.submit(0, 0, 0, 0, [Place(0, 0, 1)] * 100_000)


def test_a_reader_logs_as_its_loader_does(
    memory: OwnedFd, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under --debug a reader says why it does without O_DIRECT, and otherwise it says nothing."""
    with open("/proc/self/auxv", "rb") as opened:  # a file system without it
        for level in (logging.INFO, logging.DEBUG):
            caplog.set_level(level, "weightcached")
            with Readers(1) as readers:
                (pid,) = reader_pids()
                readers.open([region(memory)], [OpenFile(opened.fileno(), "auxv")])
                readers.submit(0, 0, 0, 0, [Place(0, 0, 10)])
                all_done(readers, 1)
            told = f"DEBUG reader {pid}: auxv: no O_DIRECT: Invalid argument\n" if level == logging.DEBUG else ""
            assert capfd.readouterr().err == told


def test_a_stopped_reader_is_ended_too(file: OpenFile, memory: OwnedFd) -> None:
    """Closing waits for nobody who does not run: also a reader that is stopped lets go of the memory."""
    readers = Readers(2)
    pids = reader_pids()
    readers.open([region(memory)], [file])
    os.kill(pids[0], signal.SIGSTOP)
    readers.submit(0, 0, 0, 0, [Place(0, 0, 10)])
    readers.close()
    readers.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_readers_end_with_their_loader(tmp_path: Path) -> None:
    """A loader that is killed leaves no reader behind: their channel is closed, and that ends them."""
    program = (
        "import os, sys\n"
        "from weightcached.loader.readers import Place, OpenFile, Readers, Region\n"
        "fd = os.memfd_create('memory'); os.ftruncate(fd, 4096)\n"
        "readers = Readers(2); readers.open([Region(fd, 4096)], [OpenFile(os.open(sys.argv[1], os.O_RDONLY), 'f')])\n"
        "readers.submit(0, 0, 0, 0, [Place(0, 0, 10)]); readers.done(); print('ready', flush=True); sys.stdin.read()\n"
    )
    path = tmp_path / "file"
    path.write_bytes(DATA)
    arguments = [sys.executable, "-c", program, str(path)]
    loader = subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with loader:
        assert loader.stdout is not None
        assert loader.stdout.readline() == "ready\n"
        pids = children_of(loader.pid)
        assert len(pids) == 2
        loader.kill()
    for pid in pids:
        wait_for_end(pid)


def test_a_host_out_of_descriptors() -> None:
    """Readers that cannot all be started leave none of them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, before[1]))
    try:
        with pytest.raises(DeviceError, match="cannot start 12 reader processes: Too many open files"):
            Readers(12)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("cores", "readers"), [(1, 1), (2, 2), (4, 3), (16, 12), (192, MAX_READERS)])
def test_how_many(monkeypatch: pytest.MonkeyPatch, cores: int, readers: int) -> None:
    """Three readers for four usable cores, 12 at most, never more than there are tasks, and one at least."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert reader_count(1000) == readers <= 12
    assert reader_count(1) == 1
    assert reader_count(0) == 1
