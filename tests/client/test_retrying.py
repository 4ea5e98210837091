"""client/retrying.py: an attach that waits for whoever is to answer it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.handmade import DEVICE, RunningWorker
from tests.client.lending import Listener, tell
from tests.client.test_attach import VALUES, tiny
from weightcached import attach
from weightcached.errors import (
    ConnectionFailed,
    TimedOut,
    TooManyConnections,
    to_wire,
)

StartWorker = Callable[[], RunningWorker]


def test_waiting_for_a_connection(listen: Callable[[], Listener], start_worker: StartWorker) -> None:
    """A user who has too many connections may have fewer in a moment: with on_miss="wait" it is tried again."""
    listener = listen()
    attached: list[Any] = []
    thread = threading.Thread(
        target=lambda: attached.append(attach("tiny", device=DEVICE, on_miss="wait", timeout=30)["a"].clone())
    )
    thread.start()
    for _ in range(2):
        tell(listener.accept(), {"error": to_wire(TooManyConnections(uid=1, limit=2))})
    listener.close()

    start_worker().publish(tiny())
    thread.join(30)

    assert torch.equal(attached[0], VALUES)


def test_waiting_for_a_connection_has_an_end(listen: Callable[[], Listener]) -> None:
    """Too many connections until the time is over: `TimedOut`, which says so."""
    listener = listen()
    caught: list[Exception] = []

    def wait() -> None:
        try:
            attach("tiny", device=DEVICE, on_miss="wait", timeout=0.5)
        except (TimedOut, TooManyConnections) as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    refusals = 0
    while thread.is_alive():
        if not listener.quiet(0.05):
            with contextlib.suppress(BrokenPipeError):  # its time was over in this moment
                tell(listener.accept(), {"error": to_wire(TooManyConnections(uid=1, limit=2))})
            refusals += 1
    thread.join()

    assert isinstance(caught[0], TimedOut)
    assert "for a connection: uid 1 has 2 connections here" in str(caught[0])
    assert 2 <= refusals <= 8


def test_waiting_without_inotify(runtime_dir: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel gives no watch, on_miss="wait" looks by the clock: not too often, to its end or to the model."""
    asked = []

    def none(path: Path) -> None:
        asked.append(path)
        raise ConnectionFailed(path=str(path), problem="no watch")

    monkeypatch.setattr("weightcached.client.retrying.PathWatch", none)
    with pytest.raises(TimedOut, match="for the service"):
        attach("tiny", device=DEVICE, on_miss="wait", timeout=0.3)
    assert 2 <= len(asked) <= 6
    attached: list[Any] = []
    thread = threading.Thread(
        target=lambda: attached.append(attach("tiny", device=DEVICE, on_miss="wait", timeout=30)["a"].clone())
    )
    thread.start()
    thread.join(0.3)

    start_worker().publish(tiny())
    thread.join(30)

    assert torch.equal(attached[0], VALUES)
