"""What is lacking in this process is told apart from what is wrong with a file, with the next step."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.files import write_sharded
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint.documents import open_regular
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.checkpoint.resources import lacking, lacking_for_set, read_failure
from weightcached.errors import CheckpointError, ResourceError


@pytest.fixture
def few_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A soft limit that leaves ten descriptors free. Yields it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = [os.dup(0) for _ in range(10)]
    limit = max(fds) + 1
    for fd in fds:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("number", "step"),
    [(errno.EMFILE, "LimitNOFILE="), (errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "ulimit -v")],
)
def test_what_the_process_lacks(number: int, step: str) -> None:
    """No descriptor and no memory are a `ResourceError`, exit code 1, with the kernel's words and a next step."""
    error = read_failure("w", "cannot be opened", OSError(number, os.strerror(number)))
    assert isinstance(error, ResourceError)
    assert (error.exit_code, error.errno) == (1, number)
    assert str(error).startswith(f"w: cannot be opened: {os.strerror(number)}")
    assert step in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ELOOP, errno.ESTALE, errno.EFBIG])
def test_what_is_wrong_with_the_file(number: int) -> None:
    """Every other refusal of the kernel is the checkpoint's."""
    error = read_failure("w", "cannot be read", OSError(number, os.strerror(number)))
    assert isinstance(error, CheckpointError)
    assert str(error) == f"w: cannot be read: {os.strerror(number)}"


def test_the_set_s_size_matters_to_descriptors_alone() -> None:
    """How many descriptors a set needs is said where they are lacking, and not where memory is."""
    memory = lacking("w", "cannot be checked", MemoryError())
    assert lacking_for_set(memory, 3000) is memory
    descriptors = lacking("w", "cannot be opened", OSError(errno.EMFILE, ""))
    assert "to 6256 at least: the set has 3000 files" in str(lacking_for_set(descriptors, 3000))


def test_every_number_of_free_descriptors(tmp_path: Path, few_descriptors: int) -> None:
    """Whichever descriptor of a good set is one too many, it is a `ResourceError`, and nothing stays open."""
    write_sharded(tmp_path, {f"m{number:02}.safetensors": [f"t{number}"] for number in range(6)})
    outcomes = []
    with NoDescriptorLeaks():
        for taken in range(11):
            held = [os.dup(0) for _ in range(taken)]
            outcomes.append(_opens(tmp_path, few_descriptors))
            for fd in held:
                os.close(fd)
    assert outcomes == [True] * 3 + [False] * 8  # six files and, for the last one's check, two more


def _opens(folder: Path, limit: int) -> bool:
    try:
        open_checkpoint(folder).close()
    except ResourceError as error:
        assert f"Too many open files, this process may have {limit}; raise its hard limit" in str(error)
        return False
    return True


def test_a_file_that_takes_more_memory_than_there_is(tmp_path: Path) -> None:
    """A document that does not fit into the process's memory is no broken checkpoint, nor an uncaught MemoryError."""
    folder = write_sharded(tmp_path, {"m.safetensors": ["w"]})
    with (folder / "config.json").open("wb") as file:
        file.truncate(90_000_000)
    code = (
        "import resource, sys\n"
        "from weightcached.checkpoint.fileset import open_checkpoint\n"
        "from weightcached.errors import ResourceError\n"
        "with open('/proc/self/statm') as file: used = int(file.read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000, used + 50_000_000))\n"
        "try: open_checkpoint(sys.argv[1])\n"
        "except ResourceError as error: print(error)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.startswith(f"{folder}: cannot be checked: Cannot allocate memory; free memory"), done.stdout
    assert done.stderr == ""


def test_one_file_by_itself(tmp_path: Path, few_descriptors: int) -> None:
    """Opening a file without a descriptor to spare says how many this process may have."""
    (tmp_path / "file").write_bytes(b"")
    held = [os.dup(0) for _ in range(10)]
    try:
        with pytest.raises(ResourceError, match=f"cannot be opened: .* may have {few_descriptors}; ") as caught:
            open_regular(tmp_path / "file")
    finally:
        for fd in held:
            os.close(fd)
    assert caught.value.file == str(tmp_path / "file")
