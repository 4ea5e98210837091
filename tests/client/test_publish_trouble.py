"""client/publish.py where something goes wrong: the engine's tensors are valid, and it knows why. On host memory."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weightcached
from tests.client.engine import KEY, Engine, addresses, contents, same
from tests.client.handmade import RunningWorker
from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from weightcached.client import moving, storages
from weightcached.client import publish as publishing
from weightcached.client.publish import publish
from weightcached.errors import (
    CheckpointChanged,
    ConnectionLost,
    DeviceFull,
    EngineError,
    NoSuchModel,
    ServiceNotRunning,
    TimedOut,
)
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Evict


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(1)
    return Engine()


def test_refused_before_anything_moves(worker: RunningWorker, engine: Engine) -> None:
    """No room, or a bad name: the engine is as it was, and no descriptor is left."""
    before = addresses(engine)
    large = {"large": torch.empty(2 << 30, dtype=torch.uint8)}
    with NoDescriptorLeaks():
        with pytest.raises(DeviceFull):
            publish("large", large, key=KEY, device="host-0")
        with pytest.raises(EngineError, match="'a/b' cannot be the name of a model"):
            publish("a/b", engine, key=KEY, device="host-0")
    assert addresses(engine) == before


def test_no_service(runtime_dir: Path, engine: Engine) -> None:
    """Without a service it fails at once, with nothing changed."""
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    before = addresses(engine)
    with pytest.raises(ServiceNotRunning):
        publish("engine", engine, key=KEY, device="host-0")
    assert addresses(engine) == before


def test_a_service_that_ends_meanwhile(
    start_worker: Callable[[], RunningWorker], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the move it is an error, the engine's tensors are valid, and nothing but their memory is left."""
    worker, before = start_worker(), contents(engine)
    monkeypatch.setattr(publishing, "point", lambda name: worker.stop() if name == "client.publish" else None)

    with NoDescriptorLeaks(), pytest.raises(ConnectionLost):
        publish("engine", engine, key=KEY, device="host-0")

    assert same(contents(engine), before)
    assert "memfd:weightcached-slab" in Path("/proc/self/maps").read_text()
    engine.fused.data = torch.zeros(1)
    del engine
    gc.collect()


def test_a_failure_between_two_slabs(worker: RunningWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slab moved and the next refused, every tensor is valid, and the room is given back."""
    monkeypatch.setattr(storages, "SLAB_BYTES", 600)
    before, fill = contents(engine), moving._fill
    done: list[Any] = []

    def fails_second(*args: Any) -> Any:
        if done:
            raise DeviceFull(device="host-0", needed=1, free=0, evictable=0, limit=0, others=0, holders=[], advice="")
        done.append(fill(*args))
        return done[0]

    monkeypatch.setattr(moving, "_fill", fails_second)
    with NoDescriptorLeaks(), pytest.raises(DeviceFull):
        publish("engine", engine, key=KEY, device="host-0")
    assert same(contents(engine), before)
    assert worker.status()["shards"] == []
    with pytest.raises(NoSuchModel):
        weightcached.attach("engine", device="host-0")


def test_a_service_that_ends_right_after(
    start_worker: Callable[[], RunningWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once published it is no failure: the lease is taken as soon as a service is there again."""
    first = start_worker()
    monkeypatch.setattr(publishing, "point", lambda name: first.stop() if name == "client.published" else None)
    engine = Engine()

    weights = publish("engine", engine, key=KEY, device="host-0")
    second = start_worker()

    end = time.monotonic() + 20
    while second.leases() != [os.getpid()]:
        assert time.monotonic() < end
        time.sleep(0.05)  # nobody announces a renewal
    assert not weights.closed


def test_an_eviction_before_the_lease(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody evicts the shard in that moment: the engine still counts as the holder of its memory."""

    def evict(name: str) -> None:
        if name == "client.published":
            with Connection.open(worker.path, device="host-0") as connection:
                connection.request(Evict("engine"))[1].close()

    monkeypatch.setattr(publishing, "point", evict)
    engine = Engine()
    weights = publish("engine", engine, key=KEY, device="host-0")

    (shard,) = worker.status()["shards"]
    assert (shard["state"], shard["generation"]) == ("draining", weights.generation)
    assert worker.leases() == [os.getpid()]


def test_files_that_change_while_the_tensors_are_moved(
    worker: RunningWorker, tmp_path: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors may be a mapping of the files: what was copied is no version of them, and is not published."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"w": ("F32", (1,), b"abcd")})
    monkeypatch.setattr(moving, "point", lambda name: os.utime(path))
    tensors = {"w": torch.ones(4)}
    with pytest.raises(CheckpointChanged, match="model"):
        publish("engine", tensors, key={"layout": "test-1"}, device="host-0", checkpoint=tmp_path)
    assert torch.equal(tensors["w"], torch.ones(4))
    assert worker.status()["shards"] == []


def test_a_service_that_hangs(worker: RunningWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it waits for the timeout, and goes on with its own tensors; what the service takes over when it
    goes on at last is what an engine attaches."""
    before, tell = contents(engine), worker._tell
    unsaid: list[Any] = []
    monkeypatch.setattr(worker, "_tell", unsaid.append)
    monkeypatch.setattr(publishing, "ANSWER_SECONDS", 0.0)
    began = time.monotonic()
    with pytest.raises(TimedOut, match="for the service to take over engine; this process keeps the weights"):
        publish("engine", engine, key=KEY, device="host-0", timeout=0.5)
    assert time.monotonic() - began < 5
    assert same(contents(engine), before)
    with pytest.raises(NoSuchModel):
        weightcached.attach("engine", device="host-0")

    tell(*unsaid)

    with weightcached.attach("engine", device="host-0", key=KEY, on_miss="wait") as weights:
        assert same(weights, before)


def test_the_last_answer_has_its_time(worker: RunningWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was moved is handed over though the timeout is used up by then."""
    monkeypatch.setattr(
        publishing, "_reserve", lambda offer, end, reserve=publishing._reserve: reserve(offer, end + 60)
    )
    assert publish("engine", engine, key=KEY, device="host-0", timeout=0).generation == 1
