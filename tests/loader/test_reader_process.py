"""The reader process by itself, with the test in the place of the loader at the other end of its channel."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.loader.loads import noise
from weightcached.checkpoint.digest import BLOCK_BYTES, block_digest
from weightcached.errors import from_wire
from weightcached.fds import OwnedFd
from weightcached.loader import reader_process
from weightcached.loader.reader import Reader
from weightcached.loader.reader_process import DONE, MAX_PIECES, MAX_TASK_BYTES, PIECE, TASK
from weightcached.wire import framing

ROOT = Path(__file__).parents[2]
DATA = noise(BLOCK_BYTES + 5)
HEAVY = ["torch", "cuda", "pydantic", "pynvml", "asyncio", "rich"]

pytestmark = pytest.mark.usefixtures("descriptors")


class Running:
    """One reader process and the loader's end of its channel."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self.channel = channel

    def tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        framing.Frame(message, fds).send(self.channel)

    def ask(self, number: int, file: int, offset: int, *pieces: tuple[int, int, int]) -> None:
        self.channel.send(TASK.pack(number, file, offset) + b"".join(PIECE.pack(*piece) for piece in pieces))

    def answer(self) -> tuple[int, bytes]:
        number, digest = DONE.unpack(self.channel.recv(1 << 16))
        return number, digest

    def error(self) -> str:
        """What it says before it ends with exit status 1."""
        message = framing.decode(self.channel.recv(1 << 16))
        assert self.process.wait(30) == 1
        return str(from_wire(message["error"]))


@contextmanager
def reader(*regions: OwnedFd, path: Path | None = None) -> Iterator[Running]:
    """A reader that has these regions and one file, if any, and is started then; killed at the end if it still runs.

    However it ends, it writes nothing to its standard error.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with ours, theirs, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightcached.loader.reader_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stderr=log,
            cwd=ROOT,
        )
        theirs.close()
        running = Running(process, ours)
        try:
            if path is not None:
                sizes = [os.fstat(region.fileno()).st_size for region in regions]
                running.tell({"regions": sizes}, [region.fileno() for region in regions])
                with path.open("rb") as file:
                    running.tell({"files": [str(path)]}, [file.fileno()])
                running.tell({"start": True})
            yield running
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        assert log.read() == b""


@contextmanager
def memory(nbytes: int = BLOCK_BYTES) -> Iterator[OwnedFd]:
    with OwnedFd(os.memfd_create("memory", os.MFD_CLOEXEC)) as fd:
        os.ftruncate(fd.fileno(), nbytes)
        yield fd


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


def test_a_whole_block_and_what_is_left(path: Path) -> None:
    """A block read into one piece, and the few bytes behind it: the bytes, and each block's digest."""
    with memory() as first, memory(100) as second, reader(first, second, path=path) as running:
        running.ask(5, 0, 0, (0, 0, BLOCK_BYTES))
        running.ask(6, 0, BLOCK_BYTES, (1, 3, 5))
        assert running.answer() == (5, block_digest([DATA[:BLOCK_BYTES]]))
        assert running.answer() == (6, block_digest([DATA[BLOCK_BYTES:]]))
        assert os.pread(first.fileno(), BLOCK_BYTES, 0) == DATA[:BLOCK_BYTES]
        assert os.pread(second.fileno(), 100, 0) == bytes(3) + DATA[BLOCK_BYTES:] + bytes(92)


def test_as_many_pieces_as_a_message_takes(path: Path) -> None:
    """512 pieces here and there are one task; the digest is that of their bytes in order."""
    with memory() as region, reader(region, path=path) as running:
        pieces = [(0, 1000 * (MAX_PIECES - number), 10 + number % 2) for number in range(MAX_PIECES)]
        running.ask(1, 0, 77, *pieces)
        end = 77 + sum(nbytes for _, _, nbytes in pieces)
        assert running.answer() == (1, block_digest([DATA[77:end]]))
        position = 77
        for _, offset, nbytes in pieces:
            assert os.pread(region.fileno(), nbytes, offset) == DATA[position : position + nbytes]
            position += nbytes
    assert TASK.size + MAX_PIECES * PIECE.size == MAX_TASK_BYTES


def test_it_is_light(path: Path) -> None:
    """A reader imports nothing that takes time: up to twelve of them are started for each load."""
    program = "import json, sys; from weightcached.loader import reader_process\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(json.loads(run.stdout)) & set(HEAVY) == set()


@pytest.mark.parametrize("started", [False, True])
def test_it_ends_with_its_loader(path: Path, started: bool) -> None:
    """When the loader closes the channel, whatever it had said before, the reader ends and is content."""
    with memory() as region, reader(region, path=path if started else None) as running:
        if started:
            running.ask(1, 0, 0, (0, 0, 10))
            running.answer()
        running.channel.close()
        assert running.process.wait(30) == 0


def test_a_loader_that_does_not_wait_for_the_answer(path: Path) -> None:
    """A loader that is gone when the answer comes is no failure that anybody must read about."""
    with memory() as region, reader(region, path=path) as running:
        os.kill(running.process.pid, signal.SIGSTOP)
        running.ask(1, 0, 0, (0, 0, 10))
        running.channel.close()
        os.kill(running.process.pid, signal.SIGCONT)
        running.process.wait(30)


def test_an_interrupt_is_for_the_loader(path: Path) -> None:
    """Ctrl-C in a terminal reaches all processes of a load; a reader leaves it to its loader to end."""
    with memory() as region, reader(region, path=path) as running:
        running.ask(1, 0, 0, (0, 0, 10))
        running.answer()
        running.process.send_signal(signal.SIGINT)
        running.ask(2, 0, 1, (0, 0, 10))
        assert running.answer() == (2, block_digest([DATA[1:11]]))


def test_a_file_that_shrinks(path: Path) -> None:
    """The typed error comes in place of the answer, and the reader ends; what it did before has been answered."""
    with memory() as region, reader(region, path=path) as running:
        os.truncate(path, 1000)
        running.ask(1, 0, 0, (0, 0, 1000))
        running.ask(2, 0, 500, (0, 0, 1000))
        assert running.answer() == (1, block_digest([DATA[:1000]]))
        assert running.error() == f"{path}: shrank while it was read: 1500 bytes expected, 1000 found"


@pytest.mark.parametrize(
    ("message", "with_fd"),
    [({"regions": [4096]}, False), ({"regions": []}, True), ({"files": ["a", "b"]}, True), ({"hello": 1}, False)],
    ids=["a size without memory", "memory without a size", "a path without a file", "something else"],
)
def test_a_loader_that_is_not_understood(message: dict[str, Any], with_fd: bool) -> None:
    """What does not fit together is an error of the protocol, and nothing is read."""
    with memory() as region, reader() as running:
        running.tell(message, [region.fileno()] if with_fd else [])
        assert running.error() == f"protocol: the loader sent {sorted(message)} to a reader"


def test_what_o_direct_may_be_used_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O_DIRECT is promised only what it takes: a single piece, where it lies and what it reads both begin at a page."""
    promised: list[bool] = []
    read = Reader.read

    def noted(self: Reader, views: list[memoryview], offset: int, *, page_aligned: bool) -> None:
        promised.append(page_aligned)
        if page_aligned:
            (view,) = views
            assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % mmap.PAGESIZE == 0
        read(self, views, offset, page_aligned=page_aligned)

    monkeypatch.setattr(Reader, "read", noted)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, memory() as region, path.open("rb") as file:
        thread = threading.Thread(target=reader_process.serve, args=(theirs,))
        thread.start()
        framing.Frame({"regions": [BLOCK_BYTES]}, [region.fileno()]).send(ours)
        framing.Frame({"files": [str(path)]}, [file.fileno()]).send(ours)
        framing.Frame({"start": True}).send(ours)
        found = []
        one, odd, two = [(0, 8192, 9000)], [(0, 8193, 9000)], [(0, 0, 4096), (0, 8192, 4096)]
        for offset, pieces in ((4096, one), (4096, odd), (4097, one), (4096, two)):
            ours.send(TASK.pack(0, 0, offset) + b"".join(PIECE.pack(*piece) for piece in pieces))
            DONE.unpack(ours.recv(100))
            found.append(set(promised))
            promised.clear()
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert found == [{True}, {False}, {False}, {False}]
