"""The library's verdict beside ours: on the same bytes, without the weights, without numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors

from tests.checkpoint.strict_cases import CASES, PAIR, Case, entry, file_of
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint import reference
from weightcached.checkpoint.header import read_header
from weightcached.checkpoint.reference import reference_refusal
from weightcached.errors import CheckpointError, ResourceError

GOOD = file_of(f"{{{PAIR}}}".encode())


@pytest.mark.parametrize("case", [case for case in CASES if len(case.content) >= 8], ids=lambda case: case.name)
def test_verdict_is_the_library_s(case: Case) -> None:
    """The verdict on a header alone is the one that the library gives on the whole file."""
    with NoDescriptorLeaks():
        refusal = reference_refusal(case.content, len(case.content), "model.safetensors")
    assert (refusal is None) == case.library_accepts


def test_no_weights_are_read() -> None:
    """A tebibyte of weights is judged from its header: there are no weights in what the library gets."""
    size = 1 << 40
    start = file_of({"w": entry("U8", [size], 0, size)})
    assert reference_refusal(start, len(start) + size, "model.safetensors") is None
    assert "not fully covered" in str(reference_refusal(start, len(start) + size + 1, "model.safetensors"))


def test_the_file_itself_is_never_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library opens a memfd of ours and never the checkpoint, which could shrink under its mapping."""
    opened = []

    def spy(path: str, **options: str) -> object:
        opened.append(os.readlink(path))
        return safetensors.safe_open(path, **options)

    monkeypatch.setattr(reference, "safe_open", spy)
    assert reference_refusal(GOOD, len(GOOD) + 8, "model.safetensors") is None
    assert opened == ["/memfd:weightcached-header (deleted)"]


def test_its_refusal_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that only the library refuses is refused, with its reason."""

    def refuse(path: str, **options: str) -> object:
        raise safetensors.SafetensorError("a rule of tomorrow")

    monkeypatch.setattr(reference, "safe_open", refuse)
    fd = os.memfd_create("file", os.MFD_CLOEXEC)
    try:
        os.write(fd, GOOD + bytes(8))
        with pytest.raises(CheckpointError, match="refused by the safetensors library: a rule of tomorrow"):
            read_header(fd, len(GOOD) + 8, "model.safetensors")
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("NOFILE, free", "m: no memory to check the header in: Too many open files, this process may have {free}; "),
        ("NOFILE, free + 1", "m: cannot check the header: Too many open files, this process may have {more}; "),
        ("FSIZE, 10", "m: cannot check the header: File too large; "),
        ("FSIZE, 1 << 30", "m: cannot check the header: File too large; "),
        ("AS, 1 << 32", "m: cannot check the header, which maps {size} bytes without using them: Cannot allocate mem"),
    ],
)
def test_a_check_that_cannot_be_made(limit: str, words: str) -> None:
    """No descriptor for the memfd or for the library's own, no size, no room to map: no pass, nor the file's fault.

    The library says "No such file or directory" of the second, whatever the kernel says.
    """
    size = 1 << 40
    start = file_of({"w": entry("U8", [size], 0, size)})
    code = (
        "import os, resource\n"
        "from weightcached.checkpoint.reference import reference_refusal\n"
        "from weightcached.errors import ResourceError\n"
        "os.close(free := os.dup(0))\n"
        f"number, value = resource.RLIMIT_{limit}\n"
        "resource.setrlimit(number, (value, value))\n"
        f"try: print('judged', reference_refusal({start!r}, {len(start) + size}, 'm'))\n"
        "except ResourceError as error: print(free, error)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    free, _, sentence = done.stdout.partition(" ")
    assert sentence.startswith(words.format(free=free, more=int(free) + 1, size=len(start) + size)), done.stdout


def test_descriptors_that_are_back_when_it_asks_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to open our own memfd is not the file's fault even where its reason is gone a moment later."""

    def refuse(path: str, **options: str) -> object:
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr(reference, "safe_open", refuse)
    with NoDescriptorLeaks(), pytest.raises(ResourceError, match="cannot check the header: No such file"):
        reference_refusal(GOOD, len(GOOD) + 8, "model.safetensors")


def test_numpy_is_not_imported(tmp_path: Path) -> None:
    """Opening a checkpoint loads neither numpy nor torch: the service does it too, and keeps what it imported."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD + bytes(8))
    code = (
        "import sys; from weightcached.checkpoint.fileset import open_checkpoint; "
        "open_checkpoint(sys.argv[1]).close(); "
        "print(sorted({'numpy', 'torch', 'paddle', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "[]\n"
