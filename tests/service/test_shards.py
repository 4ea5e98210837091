"""What follows from the workers' reports; with real workers it is in test_loads, test_budget and test_survival."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import HOSTS, model
from tests.worker.process import shard
from weightcached.config import load_config
from weightcached.service.claim import Claim, Owner
from weightcached.service.main import Service
from weightcached.service.models import Model
from weightcached.service.notify import Notifier
from weightcached.service.placement import devices_of
from weightcached.service.workers import WorkerProcess


def test_ranks_of_two_loads_are_named_before_they_are_given_out(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first rank of a load arrives, both workers hear that the model is not whole; when the last one does,
    nobody hears that it is until the last worker has been told of its rank."""
    (tmp_path / "test.toml").write_text(HOSTS + model("cut", checkpoint, "tensor_parallel = 2"))
    config = load_config(tmp_path / "test.toml")
    told: list[tuple[str, bool]] = []

    def tell(worker: WorkerProcess, models: dict[str, dict[str, Any]]) -> None:
        told.append((worker.device, models["cut"]["whole"]))

    async def main() -> None:
        owner = Owner.this_process("test")
        with contextlib.closing(
            Claim.take(runtime_dir / "test.lock", runtime_dir / "test.sock", owner, what="test")
        ) as own:
            devices = devices_of(config)
            # No worker is started: none of them needs a claim of its own.
            service = Service(config, "test", devices, {device.name: own for device in devices}, own, Notifier(None))
            shards = service.workers["host-0"]._owner
            service.models["cut"] = Model(config.models[0], ("host-0", "host-1"))
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
            service.vault.close()

    asyncio.run(main())
