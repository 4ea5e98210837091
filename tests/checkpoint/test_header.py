"""What the strict reader takes and refuses, case by case; `test_properties` has files that a machine made up."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.oracle import library_refusal
from tests.checkpoint.strict_cases import CASES, PAIR, Case, entry, file_of
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint import header
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.checkpoint.header import Header, TensorRange, read_exactly, read_header
from weightcached.errors import CheckpointChanged, CheckpointError


@contextmanager
def opened(content: bytes) -> Iterator[int]:
    """A descriptor with this content."""
    fd = os.memfd_create("file", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


def read(content: bytes) -> Header:
    with opened(content) as fd:
        return read_header(fd, len(content), "model.safetensors")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    """Every case gets the verdict of its table; a refusal names the file and says which rule broke."""
    if case.refusal is None:
        read(case.content)
        return
    with pytest.raises(CheckpointError) as caught:
        read(case.content)
    assert caught.value.file == "model.safetensors"
    assert case.refusal in caught.value.problem
    assert str(caught.value) == f"model.safetensors: {caught.value.problem}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_library_verdict(case: Case) -> None:
    """The safetensors library takes what the table says, so our strictness is known in full."""
    refusal = library_refusal(case.content, len(case.content))
    assert (refusal is None) == case.library_accepts, refusal


def test_never_laxer_than_the_library() -> None:
    """Nothing that the library refuses is in the table as accepted."""
    assert [case.name for case in CASES if case.refusal is None and not case.library_accepts] == []
    assert len(CASES) >= 53


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_leaves_no_descriptor(case: Case, tmp_path: Path) -> None:
    """Opened as a file, no case leaves a descriptor behind, refused or not."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(case.content)
    with NoDescriptorLeaks():
        if case.refusal is None:
            open_checkpoint(path).close()
        else:
            with pytest.raises(CheckpointError):
                open_checkpoint(path)


def test_offsets_are_absolute() -> None:
    """Ranges count from the start of the file, and come in the order of the bytes, not of the names."""
    content = file_of({"b": entry("F32", [1], 1, 5), "a": entry("U8", [1], 0, 1), "z": entry("F32", [0], 0, 0)}, 5)
    found = read(content)
    start = len(content) - 5
    assert found.data_start == start
    assert found.tensors == (
        TensorRange("z", "F32", (0,), start, start),
        TensorRange("a", "U8", (1,), start, start + 1),
        TensorRange("b", "F32", (1,), start + 1, start + 5),
    )
    assert [tensor.nbytes for tensor in found.tensors] == [0, 1, 4]


def test_metadata_is_kept() -> None:
    """The string map comes back as it was written, and is no tensor."""
    found = read(file_of({"__metadata__": {"format": "pt", "é": "ü"}}))
    assert (found.metadata, found.tensors) == ({"format": "pt", "é": "ü"}, ())


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown fields are named in one warning for the file, however many tensors carry them."""
    content = file_of({str(i): entry("U8", [1], i, i + 1, colour="red", **{f"x{i}": 0}) for i in range(3)}, 3)
    with caplog.at_level(logging.WARNING, logger=header.__name__):
        read(content)
    [record] = caplog.records
    assert record.getMessage() == "model.safetensors: unknown fields of tensors ignored: ['colour', 'x0', 'x1', 'x2']"


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_oversized_header_is_not_read(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header over the limit is refused from its length alone, even where the file is that long."""
    asked = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: asked.append(count) or pread(fd, count, offset))
    with opened(length.to_bytes(8, "little")) as fd:
        os.ftruncate(fd, 200_000_000)
        with pytest.raises(CheckpointError, match=rf"header of {length} bytes, at most 100000000"):
            read_header(fd, 200_000_000, "model.safetensors")
    assert sum(asked) < 64


def test_short_reads_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pread that returns less than asked for is continued."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: pread(fd, min(count, 3), offset))
    assert read(file_of(f"{{{PAIR}}}".encode(), 8)).tensors[0].name == "w"


def test_file_that_shrinks_is_a_change() -> None:
    """A file that ends before the size that was seen is a change, and the sentence has both numbers."""
    content = file_of(f"{{{PAIR}}}".encode(), 8)
    end = len(content) - 8  # of the header
    with (
        opened(content[:30]) as fd,
        pytest.raises(CheckpointChanged, match=f"shrank .* {end} bytes expected, 30 found"),
    ):
        read_header(fd, len(content), "model.safetensors")


def test_read_error_is_typed() -> None:
    """A read that the kernel refuses is a checkpoint's error with the kernel's words."""
    fd = os.open(os.devnull, os.O_WRONLY)
    try:
        with pytest.raises(CheckpointError, match="cannot read at byte 5: Bad file descriptor"):
            read_exactly(fd, 1, 5, "model.safetensors")
    finally:
        os.close(fd)


def test_hostile_names_do_not_fill_the_log() -> None:
    """A sentence stays short and printable, whatever a name holds."""
    with pytest.raises(CheckpointError) as caught:
        read(file_of({"\n\x1b[2J" + "x" * 1_000_000: entry("F32", [3], 0, 8)}, 8))
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_many_tensors_are_read_quickly() -> None:
    """20,000 tensors, as mixture-of-experts checkpoints have, are validated in seconds at most (here: 0.2 s)."""
    names = {f"model.layers.{i}.weight": entry("BF16", [4, 8], 64 * i, 64 * i + 64) for i in range(20_000)}
    assert len(read(file_of(names, 64 * 20_000)).tensors) == 20_000
