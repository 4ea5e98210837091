"""What the tests of the policies' table have in common: the engine's checkpoint, services for it, what is looked at."""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeCheckpoint
from tests.engines.tiny import FILE, said
from tests.running import RunningService
from weightcached.engines.policy import Options

POLICIES = ("wait", "start", "fallback", "fail")
VALUES = [1.0, 2.0, 3.0, 4.0]
Caplog = pytest.LogCaptureFixture


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """The engine's checkpoint."""
    return tensors_in(tmp_path / "tiny", make_checkpoint, *VALUES)


def tensors_in(folder: Path, make_checkpoint: MakeCheckpoint, *values: float) -> Path:
    """A checkpoint of one tensor; those of equally many values have equal headers and sizes."""
    make_checkpoint(folder / FILE, {"w": ("F32", (len(values),), struct.pack(f"<{len(values)}f", *values))})
    return folder


def config(folder: Path, *more: str) -> str:
    """Of a service that has the checkpoint as a model."""
    model = ["[[model]]", 'name = "tiny"', f'checkpoint = "{folder}"', *more]
    return "\n".join(['devices = ["host-0"]', 'ready = "listening"', *model, ""])


def options(on_miss: str, timeout: float = 30.0, **more: Any) -> Options:
    return Options.parse({"on_miss": on_miss, "timeout": timeout, **more})


def never(instance: str, timeout: float) -> None:
    raise AssertionError(f"weightcached@{instance} was to be started")


def warned_once(caplog: Caplog, reason: str) -> None:
    """One warning, which names engine and checkpoint, says what is done, and why."""
    (warning,) = said(caplog)
    assert warning.startswith("tiny 1.0: /"), warning
    assert "/tiny is loaded from disk: " in warning, warning
    assert reason in warning, warning


def wait_until_it_listens(path: Path, seconds: float = 30.0) -> None:
    """Nothing announces that: between bind(2) and listen(2) the socket is there, and refuses."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            try:
                client.connect(str(path))
                return
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.001)  # as early as can be; the service says nothing before
    raise AssertionError(f"nobody listens at {path}")


@contextlib.contextmanager
def quick(seconds: float = 10.0) -> Iterator[None]:
    """What is inside takes far less than the 30 s that a wait would."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@contextlib.contextmanager
def running(service: RunningService) -> Iterator[RunningService]:
    try:
        yield service
        gc.collect()
        service.stop()
    finally:
        service.abandon()
