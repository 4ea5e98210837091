"""A checkpoint that is not loadable is refused before anything is asked of a worker, let alone of a device's memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint import sets
from tests.checkpoint.strict_cases import CASES, Case
from tests.leaks import NoDescriptorLeaks
from weightcached.errors import CheckpointError, ServiceNotRunning
from weightcached.loader.process import Job, Report, Target, load
from weightcached.wire import framing


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The service's end and the loader's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def job(checkpoint: Path) -> Job:
    """A load to a worker that is not there: to ask it for room is `ServiceNotRunning`."""
    return Job("m", str(checkpoint), (Target("host-0", str(checkpoint.parent / "no.sock")),))


def nothing_was_said(ours: socket.socket) -> bool:
    ours.setblocking(False)
    try:
        ours.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("case", [case for case in CASES if case.refusal is not None], ids=lambda case: case.name)
def test_file(case: Case, tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    """Every malformed file ends the load before there is a plan, and leaves no descriptor."""
    ours, theirs = channel
    path = tmp_path / "model.safetensors"
    path.write_bytes(case.content)
    with NoDescriptorLeaks(), pytest.raises(CheckpointError):
        load(job(path), Report(theirs))
    assert nothing_was_said(ours)


@pytest.mark.parametrize("case", [case for case in sets.CASES if case.refusal is not None], ids=lambda case: case.name)
def test_set(case: sets.SetCase, tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    """So does every folder that is no complete set."""
    ours, theirs = channel
    path = case.build(tmp_path / "models")
    with pytest.raises(CheckpointError):
        load(job(path), Report(theirs))
    assert nothing_was_said(ours)


def test_good_file_gets_as_far_as_the_worker(tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    """The same load of a good file says its plan, then asks the worker: the order that the tests above rely on."""
    ours, theirs = channel
    path = sets.plain(tmp_path, {"model.safetensors": ["w"]}) / "model.safetensors"
    with pytest.raises(ServiceNotRunning):
        load(job(path), Report(theirs))
    received = framing.receive(ours)
    assert received is not None
    received[1].close()
    assert list(framing.decode(received[0])) == ["plan"]
