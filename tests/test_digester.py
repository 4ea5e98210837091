"""The digest process: what it has remembered, what it gives up, and that it stays behind everybody else."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import write_sharded
from tests.leaks import NoDescriptorLeaks
from weightcached import digester
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.checkpoint.remembered import recall
from weightcached.digester import digest, stay_behind
from weightcached.errors import CheckpointChanged, CheckpointError, from_wire
from weightcached.shard.manifest import SourceFile
from weightcached.wire import framing

ROOT = Path(__file__).parents[1]
IOPRIO_GET = {"x86_64": 252, "aarch64": 31, "riscv64": 31, "ppc64le": 274, "s390x": 283}
IDLE = 3


def io_class(pid: int) -> int:
    """The I/O scheduling class of a process (ioprio_get(2)): 0 none, 1 real time, 2 best effort, 3 idle."""
    return int(ctypes.CDLL(None).syscall(IOPRIO_GET[platform.machine()], 1, pid)) >> 13


@pytest.fixture(autouse=True)
def _no_leaks(descriptors: NoDescriptorLeaks, runtime_dir: Path) -> None:
    """Digests are remembered in the test's own cache folder."""


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of two files, written a moment ago."""
    return write_sharded(tmp_path / "sharded", {f"{name}.safetensors": [name] for name in "ab"})


def sources(path: Path) -> list[SourceFile]:
    with open_checkpoint(path) as checkpoint:
        return [file.source for file in checkpoint.files]


def test_the_digest_of_a_young_file_is_remembered_when_it_is_old_enough(sharded: Path) -> None:
    """Every file's digest is kept under its stat tuple, and is that of its bytes; what was written a moment ago is not
    read before its times tell a later write."""
    files = sources(sharded)
    youngest = max(file.ctime_ns for file in files)
    done = digest(sharded, files)
    assert time.time_ns() - youngest >= 2_000_000_000
    assert done == {"bytes": sum(file.size for file in files), "seconds": done["seconds"]}
    with open_checkpoint(sharded) as checkpoint:
        assert recall(files) == digest_checkpoint(checkpoint)[1]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are old enough at once."""
    monkeypatch.setattr(digester, "SETTLED_NS", 0)
    monkeypatch.setattr("weightcached.checkpoint.remembered.SETTLED_NS", 0)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", ["other times", "one more was loaded", "one less was loaded", "gone"])
def test_other_files_than_those_loaded_are_given_up(sharded: Path, change: str) -> None:
    """A file that is another one by now, or a set of other files: an error that names the file, nothing remembered."""
    files = sources(sharded)
    match change:
        case "other times":
            os.utime(sharded / "b.safetensors")
        case "one more was loaded":
            files.append(SourceFile("b2.safetensors", 1, 2, 3, 4, 5))
        case "one less was loaded":
            files.pop()
        case "gone":
            (sharded / "b.safetensors").unlink()
    error = CheckpointError if change == "gone" else CheckpointChanged
    with pytest.raises(error, match=r"b2?\.safetensors"):
        digest(sharded, files)
    assert set(recall(files)) == {None}


@pytest.mark.usefixtures("settled")
def test_a_change_while_it_reads_is_given_up(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are not those of the recorded times are not remembered under them."""
    files = sources(sharded)
    preadv = os.preadv

    def change(*args: Any) -> int:
        os.utime(sharded / "a.safetensors")
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", change)
    with pytest.raises(CheckpointChanged, match=r"a\.safetensors"):
        digest(sharded, files)
    assert recall(files) == [None, None]


@pytest.mark.usefixtures("settled")
def test_a_digest_that_cannot_be_kept_is_an_error(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the service would take it for known, and read it all again at the next start."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(CheckpointError, match="its digest cannot be kept"):
        digest(sharded, sources(sharded))


def test_it_has_the_least_claim_to_disk_and_core() -> None:
    """Idle I/O class and nice 19, as the kernel says them."""
    program = "import os; from weightcached.digester import stay_behind; stay_behind(); print(os.nice(0)); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "19\n"
        assert io_class(process.pid) == IDLE
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        process.communicate("\n", timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("machine", "number", "words"),
    [("vax", None, "no idle I/O priority on vax"), ("x86_64", 100_000, "Function not implemented")],
)
def test_a_refused_priority_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str, number: int | None, words: str
) -> None:
    """On a machine whose number is not known, or a kernel that refuses it: it says so and goes on."""
    monkeypatch.setattr(os, "nice", lambda step: 19)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(digester, "_IOPRIO_SET", {} if number is None else {machine: number})
    with caplog.at_level(logging.WARNING):
        stay_behind()
    assert [words in record.getMessage() for record in caplog.records] == [True]


def ask(checkpoint: Path, message: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of a real process for what it is sent; None closes the channel at once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightcached", "digest", str(checkpoint), "--channel-fd", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        if message is None:
            ours.shutdown(socket.SHUT_WR)
        else:
            frame = framing.Frame(message)
            frame.send(ours)
            frame.close()
        received = framing.receive(ours)
        assert received is not None
        received[1].close()
        return process.wait(30), framing.decode(received[0])


def test_the_process_answers_with_what_it_has_read(sharded: Path) -> None:
    """Exit code 0 and the bytes; the digests are remembered then."""
    files = sources(sharded)
    code, answer = ask(sharded, {"job": {"checkpoint": str(sharded), "files": [asdict(file) for file in files]}})
    assert (code, answer["digested"]["bytes"]) == (0, sum(file.size for file in files))
    assert None not in recall(files)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (None, "closed the channel before it sent a job"),
        ({"job": {"checkpoint": "/x"}}, "a job that is not readable: KeyError"),
        ({"job": {"checkpoint": "/x", "files": [{"name": "a"}]}}, "a job that is not readable: TypeError"),
        ({"job": {"checkpoint": "/no/such", "files": []}}, "/no/such"),
    ],
)
def test_what_is_no_job_is_answered_with_an_error(tmp_path: Path, message: dict[str, Any] | None, words: str) -> None:
    """Exit code 1, and the error as it is, whatever was sent."""
    code, answer = ask(tmp_path, json.loads(json.dumps(message)))
    assert code == 1
    assert words in str(from_wire(answer["failed"]["error"]))
