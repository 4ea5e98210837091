"""A load whose processes are killed at each of its stages: what was cached stays, nothing of the load is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.tracing import POINTS, Tracer, Trap
from tests.conftest import MakeCheckpoint
from tests.gpu import becomes_true
from tests.llama import Tensor, slab_of
from tests.manager import Manager
from tests.running import wait_for_end
from tests.service.conftest import HOST, HOSTS, attach, generation, held_by, model, slab_bytes
from weightcached.errors import ModelFailed

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


@pytest.fixture
def pair(
    runtime_dir: Path, checkpoint: Path, llama: tuple[Path, dict[str, Tensor]], tracer: Tracer
) -> Iterator[Manager]:
    """A service of two devices with one model cached, and one of two ranks that is loaded on demand."""
    config = HOSTS + model("small", checkpoint) + model("cut", llama[0], "tensor_parallel = 2", "preload = false")
    running = Manager(runtime_dir, config, environ={"WEIGHTCACHED_TRACE": str(tracer.path)})
    try:
        running.start().ready()
        yield running
    finally:
        tracer.disarm()
        running.abandon()


def test_a_worker_dies_between_the_publishes_of_two_ranks(
    pair: Manager, tracer: Tracer, llama: tuple[Path, dict[str, Tensor]]
) -> None:
    """Rank 0 is published when the worker of rank 1 is killed: the load is tried again by itself and makes the model
    whole, of one load; the other model is served all the while."""
    victim = pair.status()["devices"][1]["pid"]
    tracer.arm([Trap("loader.published", 1, lambda pid: os.kill(victim, signal.SIGKILL))])
    pair.ctl("load", "cut")
    assert tracer.wait(30)
    tracer.disarm()
    assert held_by("small", "host-0")
    pair.ctl("wait", "cut", "--timeout", "30")
    assert [held_by("cut", f"host-{rank}") for rank in (0, 1)] == [slab_of(llama[1], rank, 2) for rank in (0, 1)]
    found = pair.model("cut")
    assert (found["state"], found["ranks_cached"], found["error"]) == ("cached", 2, None)
    pair.stop()


def test_a_load_that_ends_between_the_publishes_of_two_ranks(
    pair: Manager, tracer: Tracer, llama: tuple[Path, dict[str, Tensor]]
) -> None:
    """What rank 0 had is evicted again and counts for nothing; the error names the rank that is missing, its device and
    the reason, to clients of either device. Other models go on, and the next load is as any other."""
    tracer.arm([Trap("loader.published", 1, lambda pid: os.kill(pid, signal.SIGKILL))])
    pair.ctl("load", "cut")
    assert tracer.wait(30)
    tracer.disarm()
    assert "rank 1 on host-1 was not: " in pair.ctl("wait", "cut", code=1)
    for device in ("host-0", "host-1"):
        with pytest.raises(ModelFailed, match=r"rank 1 on host-1 was not: .*SIGKILL"):
            attach("cut", device=device)
    assert becomes_true(lambda: [item["model"] for item in pair.status()["devices"][0]["shards"]] == ["small"])
    pair.wait_stored(2)  # the descriptors of "small"
    assert held_by("small", "host-0")
    pair.ctl("load", "cut")
    pair.ctl("wait", "cut", "--timeout", "30")
    assert held_by("cut", "host-1") == slab_of(llama[1], 1, 2)
    pair.stop()
