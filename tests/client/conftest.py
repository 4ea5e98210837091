"""A real worker for the client's tests, started on demand."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.handmade import RunningWorker
from tests.client.lending import Host, Listener
from tests.client.on_disk import folder, no_digest, reads, sharded
from weightcached.client.keeper import Grant
from weightcached.client.leases import Lease
from weightcached.wire.connection import Connection

__all__ = ["folder", "no_digest", "reads", "sharded"]  # fixtures, found here by their names


@pytest.fixture(scope="session", autouse=True)
def _keeper() -> None:
    """The keeper of this process's leases is there, so that its own descriptor is no test's leak."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        lease = Lease(Connection(ours, Path("/nowhere")))
        lease.keep(Grant("host-0", "none", 1, "", 0, ""))
        del lease
        assert theirs.recv(1) == b""


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


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Two models on host-0, served; this process attaches there."""
    found = Host()
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(found.worker.folder))
    monkeypatch.delenv("WEIGHTCACHED_SOCKET_TEMPLATE", raising=False)
    found.hold("tiny")
    found.hold("other")
    found.serve()
    yield found
    gc.collect()
    found.close()


@pytest.fixture
def listen(runtime_dir: Path) -> Iterator[Callable[[], Listener]]:
    """Opens listeners at one path, one after the other."""
    opened: list[Listener] = []

    def start() -> Listener:
        path = runtime_dir / "host-0.sock"
        path.unlink(missing_ok=True)
        opened.append(Listener(path))
        return opened[-1]

    yield start
    for listener in opened:
        listener.die()
