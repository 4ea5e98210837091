"""What follows from the workers' reports; with real workers it is in test_loads, test_budget and test_survival."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import becomes_true
from tests.running import RunningService, children_of, import_path, process_of_role, wait_for_end
from tests.service.commands import PUBLISHING, publisher
from tests.service.conftest import HOST, HOSTS, StartService, attach, held_by, model
from tests.worker.process import shard
from weightcached.config import load_config
from weightcached.errors import ModelElsewhere, ModelFailed
from weightcached.service.claim import Claim, Owner
from weightcached.service.main import Service
from weightcached.service.models import Model
from weightcached.service.notify import Notifier
from weightcached.service.placement import devices_of
from weightcached.service.workers import WorkerProcess

LISTENING = 'ready = "listening"\n'
LAYOUT = {"layout": "test-1/0"}


@asynccontextmanager
async def service_of(runtime_dir: Path, config_file: Path) -> AsyncIterator[Service]:
    """A service none of whose parts is started, so that no worker needs a claim of its own."""
    config = load_config(config_file)
    owner = Owner.this_process("test")
    with contextlib.closing(
        Claim.take(runtime_dir / "test.lock", runtime_dir / "test.sock", owner, what="test")
    ) as own:
        devices = devices_of(config)
        service = Service(config, "test", devices, {device.name: own for device in devices}, own, Notifier(None))
        yield service
        service.vault.close()


def test_ranks_of_two_loads_are_named_before_they_are_given_out(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first rank of a load arrives, both workers hear that the model is not whole; when the last one does,
    nobody hears that it is until the last worker has been told of its rank."""
    (tmp_path / "test.toml").write_text(HOSTS + model("cut", checkpoint, "tensor_parallel = 2"))
    told: list[tuple[str, bool]] = []

    def tell(worker: WorkerProcess, models: dict[str, dict[str, Any]]) -> None:
        told.append((worker.device, models["cut"]["whole"]))

    async def main() -> None:
        async with service_of(runtime_dir, tmp_path / "test.toml") as service:
            shards = service.workers["host-0"]._owner
            service.models["cut"] = Model(service.config.models[0], ("host-0", "host-1"))
            monkeypatch.setattr(WorkerProcess, "tell_models", tell)
            for name, whole in (("host-0", False), ("host-1", True)):
                with shard("cut", 1, b"data") as fds:
                    service.vault.hold(name, "cut", 1, 4, fds)
                both = [("host-0", whole), ("host-1", whole)]
                shards.shard_arrived(name, "cut", 1)
                assert told == ([] if whole else both)
                told.clear()
                shards.shard_held(name, "cut", 1)
                assert told == both
                told.clear()

    asyncio.run(main())


def test_a_shard_that_comes_after_its_load_has_ended_does_not_count(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker had taken it over when its process was ended: it is withdrawn when that holds it, and the model stays
    failed. One of the load under way counts, and one that an engine publishes."""
    (tmp_path / "test.toml").write_text(HOST + model("m", checkpoint))
    told: list[dict[str, Any]] = []

    async def main() -> None:
        async with service_of(runtime_dir, tmp_path / "test.toml") as service:
            shards = service.workers["host-0"]._owner
            loaded = service.models["m"] = Model(service.config.models[0], ("host-0",))
            monkeypatch.setattr(WorkerProcess, "_send", lambda worker, message: told.append(message))

            def arrives(generation: int, **attributes: str) -> None:
                with shard("m", generation, b"data", attributes=attributes) as fds:
                    service.vault.hold("host-0", "m", generation, 4, fds)
                shards.shard_arrived("host-0", "m", generation)
                shards.shard_held("host-0", "m", generation)

            loaded.begin()
            spec = str(loaded.load_spec)
            loaded.fail(loaded.load_failed("its process was killed"))
            loaded.load_spec = None
            arrives(1, spec=spec)
            assert (loaded.state, loaded.ranks_cached, loaded.error is None) == ("failed", 0, False)
            assert service.vault.find("host-0", "m") is None
            assert [list(message) for message in told if "withdrawn" in message] == [["withdrawn"]]
            loaded.begin()
            arrives(2, spec=spec)  # of the load before
            assert (loaded.state, loaded.ranks_cached) == ("loading", 0)
            arrives(3, spec=str(loaded.load_spec))
            assert (loaded.state, loaded.generation_on("host-0")) == ("cached", 3)
            loaded.load_spec = None
            arrives(4)
            assert (loaded.state, loaded.generation_on("host-0")) == ("cached", 4)

    asyncio.run(main())


def test_a_withdrawn_shard_is_given_to_no_other_worker(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a failed load had published is held no more when its worker is told: one that is started in that moment
    would have it back. Generations that are not of that load stay."""
    (tmp_path / "test.toml").write_text(HOST + model("m", checkpoint))
    told: list[dict[str, Any]] = []

    async def main() -> None:
        async with service_of(runtime_dir, tmp_path / "test.toml") as service:
            failed = Model(service.config.models[0], ("host-0",))
            monkeypatch.setattr(WorkerProcess, "_send", lambda worker, message: told.append(message))
            for generation in (1, 2):
                with shard("m", generation, b"data") as fds:
                    service.vault.hold("host-0", "m", generation, 4, fds)
            service.loads._withdraw(failed, [("host-0", 2)])
            assert [item.generation for item in service.vault.of_device("host-0")] == [1]
            reason = "the load of m failed"
            assert told == [{"withdrawn": {"model": "m", "generation": 2, "reason": reason}}]

    asyncio.run(main())


def test_who_uses_what_a_failed_load_published_keeps_it_alone(
    start_service: StartService, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher ends with an error after an engine has attached: the shard drains, as the status says, and nobody
    else gets it, by its name or its content."""
    monkeypatch.setenv("PYTHONPATH", import_path())
    os.mkfifo(tmp_path / "status")
    service = start_service(
        LISTENING + HOST + model("bad", checkpoint, publisher(f"hold=0:{tmp_path / 'status'}"))
    ).ready()
    worker, fds = attach("bad", wait=30, **LAYOUT)
    with worker, fds:
        (tmp_path / "status").write_text("3")
        assert "ended by exit status 3" in service.ctl("wait", "bad", "--timeout", "30", code=1)
        assert becomes_true(lambda: [item["state"] for item in shards_of(service)] == ["draining"])
        (found,) = shards_of(service)
        assert len(found["leases"]) == 1
        row = next(line for line in service.ctl("status").splitlines() if line.startswith("bad  "))
        assert row.split()[:4] == ["bad", "host-0", "-", "draining"]
        for key in (LAYOUT, {**LAYOUT, "content": found["key"]["content"]}):
            with pytest.raises(ModelFailed):
                attach("bad", **key)
    assert becomes_true(lambda: shards_of(service) == [])
    service.stop()


def shards_of(service: RunningService) -> list[dict[str, Any]]:
    return list(service.status()["devices"][0]["shards"])


@pytest.mark.parametrize("loaded", [True, False], ids=["by another command", "not at all"])
def test_an_orphan_publishes_nothing(
    start_service: StartService, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    """A process that a publisher has started outlives the service, which is killed and started again: what it brings
    then is not taken for a rank of the load that is meant, or for one that nobody has begun, and leaves nothing."""
    monkeypatch.setenv("PYTHONPATH", import_path())
    os.mkfifo(tmp_path / "gate")
    script = f"{sys.executable} {PUBLISHING} value=old gate={tmp_path / 'gate'} & wait"
    of_shell = f"publisher = {json.dumps(['sh', '-c', script])}"
    first = start_service(LISTENING + HOST + model("m", checkpoint, of_shell)).ready()
    with open(tmp_path / "gate", "wb") as gate:  # it is about to publish
        children = children_of(first.process.pid)
        (orphan,) = children_of(process_of_role(first, script))
        try:
            first.process.kill()
            first.process.wait()
            for pid in children:
                wait_for_end(pid)
            by = [publisher("value=new")] if loaded else [of_shell, "preload = false"]
            second = start_service(LISTENING + HOST + model("m", checkpoint, *by)).ready()
            if loaded:
                second.ctl("wait", "m", "--timeout", "30")
            gate.close()
            wait_for_end(orphan)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
            raise
    device = second.status()["devices"][0]
    cached = [(item["generation"], item["state"]) for item in device["shards"]]
    assert cached == ([(1, "cached")] if loaded else [])
    if loaded:
        assert held_by("m", "host-0", **LAYOUT) == b"new0".ljust(16)
    assert device["reservations"] == []
    second.stop()


def test_a_device_without_a_rank_says_where_the_ranks_are(start_service: StartService, checkpoint: Path) -> None:
    """A client that waits there need not sit out its time; a reload that moves the model is heard of on all devices."""
    service = start_service(HOSTS + model("m", checkpoint, 'devices = ["host-1"]')).ready()
    for device in ("host-0", "host-3"):
        with pytest.raises(ModelElsewhere, match=f"m belongs on host-1, and is not on {device}; attach it with device"):
            attach("m", 30, device=device)
    service.config.write_text(HOSTS + model("m", checkpoint, 'devices = ["host-3"]'))
    service.ctl("reload")
    service.ctl("wait", "m", "--timeout", "30")
    with pytest.raises(ModelElsewhere, match="m belongs on host-3"):
        attach("m", 30)
    assert held_by("m", "host-3")
    service.stop()
