"""A load whose processes are killed at each of its stages: what was cached stays, nothing of the load is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.tracing import POINTS, Tracer, Trap
from tests.conftest import MakeCheckpoint
from tests.manager import Manager
from tests.running import wait_for_end
from tests.service.conftest import HOST, attach, generation, held_by, model, slab_bytes

STAGES = [
    *POINTS["loader"],
    "worker.publish-checked",
    "worker.hold-told",
    "worker.held",
    "service.hold-received",
    "store.sent",
    "service.before-held",
    "store.answered",
]


@pytest.fixture
def tracer(runtime_dir: Path) -> Iterator[Tracer]:
    found = Tracer(runtime_dir / "trace")
    yield found
    found.close()


@pytest.fixture
def manager(runtime_dir: Path, checkpoint: Path, tracer: Tracer) -> Iterator[Manager]:
    """A service with one model cached, that stops at every point until the tracer lets it go on."""
    environ = {"WEIGHTCACHED_TRACE": str(tracer.path)}
    running = Manager(runtime_dir, HOST + model("small", checkpoint), environ=environ)
    try:
        running.start().ready()
        running.ctl("wait", "small", "--timeout", "30")
        yield running
    finally:
        tracer.disarm()
        running.abandon()


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_a_stage(
    manager: Manager, tracer: Tracer, checkpoint: Path, make_checkpoint: MakeCheckpoint, stage: str
) -> None:
    """Loader, worker or main process, whoever passes the stage: a holder of the old generation keeps its bytes, a
    client gets all of the old or all of the new ones, and in the end the new ones; one shard is stored, and no process
    is left but the main one and its worker."""
    worker, fds = attach("small")
    with worker, fds:
        old = slab_bytes(fds)
        make_checkpoint(checkpoint, {"a": ("F32", (64, 16), os.urandom(4096)), "b": ("BF16", (7,), os.urandom(14))})
        main = manager.pid
        tracer.arm([Trap(stage, 1, lambda pid: os.kill(pid, signal.SIGKILL))])
        manager.ctl("reload")
        assert tracer.wait(30), f"nobody passed {stage}"
        tracer.disarm()
        if stage.startswith(("service.", "store.")):
            wait_for_end(main)
            manager.ended(-signal.SIGKILL)
            manager.start().ready()
        between = held_by("small", "host-0", wait=20)
        assert slab_bytes(fds) == old
        manager.ctl("load", "small")
        manager.ctl("wait", "small", "--timeout", "30")
        new = held_by("small", "host-0")
        assert between in (old, new)
        assert new != old
        other, copies = attach("small")
        with other, copies:
            assert generation(copies) > 1
    manager.wait_stored(2)
    for pid, role in roles(manager).items():
        if role == "loader":  # the last one is ending: what it published is there before it has ended
            wait_for_end(pid)
    assert sorted(roles(manager).values()) == ["serve", "worker"]
    manager.stop()
    assert manager.processes() == {}


def roles(manager: Manager) -> dict[int, str]:
    """Pid and role of each process of the unit."""
    return {pid: arguments[arguments.index("weightcached") + 1] for pid, arguments in manager.processes().items()}
