"""A real worker for the client's tests, started on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.handmade import RunningWorker


@pytest.fixture
def start_worker(runtime_dir: Path) -> Iterator[Callable[[], RunningWorker]]:
    """Starts workers for host-0, one after the other; what still runs at the end is stopped."""
    started: list[RunningWorker] = []

    def start() -> RunningWorker:
        runtime_dir.mkdir(mode=0o700, exist_ok=True)
        started.append(RunningWorker(runtime_dir))
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


@pytest.fixture
def worker(start_worker: Callable[[], RunningWorker]) -> RunningWorker:
    """One worker for host-0, ready."""
    return start_worker()
