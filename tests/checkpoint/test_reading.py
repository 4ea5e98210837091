"""Reading until every buffer is full: short reads, files that end, reads that fail, and views that must not stay."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcached.checkpoint.reading import read_fully
from weightcached.errors import CheckpointChanged, CheckpointError

CONTENT = random.Random(3).randbytes(1000)


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """An open file with `CONTENT`."""
    path = tmp_path_factory.mktemp("reading") / "file"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        yield file.fileno()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=11), st.integers(0, 10), st.randoms(use_true_random=False))
def test_short_reads_lose_nothing(fd: int, sizes: list[int], offset: int, chance: random.Random) -> None:
    """However little each preadv returns, every view gets its bytes, in order; empty views are no end of the file."""
    preadv = os.preadv

    def stingy(fd: int, views: list[memoryview], offset: int) -> int:
        with views[0][: chance.randint(1, max(len(views[0]), 1))] as part:
            return preadv(fd, [part] if chance.random() < 0.7 else views, offset)

    views = [memoryview(bytearray(size)) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", stingy)
        read_fully(fd, "file", views, offset)
    assert b"".join(views) == CONTENT[offset : offset + sum(sizes)]


def test_one_call_when_nothing_is_short(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several views are filled by one system call, and no view at all by none."""
    calls = []
    preadv = os.preadv

    def count(fd: int, views: list[memoryview], offset: int) -> int:
        calls.append(len(views))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", count)
    read_fully(fd, "file", [memoryview(bytearray(10)) for _ in range(3)], 0)
    read_fully(fd, "file", [], 0)
    read_fully(fd, "file", [memoryview(bytearray())], 2000)
    assert calls == [3]


@pytest.mark.parametrize("offset", [900, 1000, 5000])
def test_a_file_that_ends_early(fd: int, offset: int) -> None:
    """The end of the file before the views are full is a change, with the bytes expected and those that are there."""
    views = [memoryview(bytearray(60)), memoryview(bytearray(60))]
    with pytest.raises(CheckpointChanged) as caught:
        read_fully(fd, "model.safetensors", views, offset)
    assert str(caught.value) == (
        f"model.safetensors: shrank while it was read: {offset + 120} bytes expected, 1000 found"
    )


def test_a_read_that_fails() -> None:
    """The kernel's error becomes the checkpoint's, with the byte."""
    read_end, write_end = os.pipe()  # a pipe cannot be read at an offset
    try:
        with pytest.raises(CheckpointError, match="pipe: cannot read at byte 7: Illegal seek"):
            read_fully(read_end, "pipe", [memoryview(bytearray(4))], 7)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("error", ["end", "failure"])
def test_no_view_is_left_behind(fd: int, error: str, tmp_path: Path) -> None:
    """While an error and its traceback live, the memory can still be unmapped once the caller's views are released."""
    memory = mmap.mmap(-1, 4096)
    views = [memoryview(memory)[:100], memoryview(memory)[100:300]]
    with (tmp_path / "written").open("wb") as other, pytest.raises(CheckpointError) as caught:
        read_fully(fd if error == "end" else other.fileno(), "file", views, 990)
    for view in views:
        view.release()
    memory.close()  # BufferError while another view exists
    assert caught.value.file == "file"
