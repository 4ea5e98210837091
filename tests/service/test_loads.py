"""Loads of a real service: queued, waited for, called off, killed."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.running import process_of_role, wait_for_end
from tests.service.conftest import HOST, StartService, attach, generation, model
from weightcached.config import ModelConfig
from weightcached.errors import ModelFailed, ModelLoading, NoSuchModel, RuntimeDirectoryError
from weightcached.service import loads
from weightcached.service.models import Model


def test_a_model_without_preload_loads_when_a_client_waits_for_it(
    start_service: StartService, checkpoint: Path
) -> None:
    """`preload = false`: absent at the start, refused to a client that does not wait, loaded for one that does."""
    service = start_service(HOST + model("lazy", checkpoint, "preload = false")).ready()
    assert service.model("lazy")["state"] == "absent"
    with pytest.raises(NoSuchModel):
        attach("lazy")
    worker, fds = attach("lazy", wait=20)
    with worker, fds:
        assert generation(fds) == 1
    service.stop()


def test_a_model_that_is_loading_says_so(start_service: StartService, checkpoint: Path) -> None:
    """While the loader is stopped, an attach is refused as loading and `wait` times out; the start goes on."""
    service = start_service('ready = "listening"\n' + HOST + model("small", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ready()
    with pytest.raises(ModelLoading):
        attach("small")
    assert "small (loading)" in service.ctl("wait", "--timeout", "0.2", code=1)
    os.kill(loader, signal.SIGCONT)
    service.ctl("wait", "small", "--timeout", "30")
    service.stop()


def test_stopping_during_a_load(start_service: StartService, checkpoint: Path) -> None:
    """SIGTERM while a model loads ends the loader, leaves nothing, and is a clean end."""
    service = start_service(HOST + model("small", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.stop()
    wait_for_end(loader)


def test_a_killed_loader_is_a_failed_model(start_service: StartService, checkpoint: Path) -> None:
    """SIGKILL of the loader: the model is failed with that reason, others are served, a later `load` succeeds."""
    config = 'ready = "listening"\n' + HOST + model("first", checkpoint) + model("second", checkpoint)
    service = start_service(config)
    os.kill(process_of_role(service, "loader"), signal.SIGKILL)
    service.ready()
    service.ctl("wait", "second", "--timeout", "30")
    assert "SIGKILL" in service.ctl("wait", "first", code=1)
    with pytest.raises(ModelFailed, match="SIGKILL"):
        attach("first", wait=5)
    service.ctl("load", "first")
    service.ctl("wait", "first", "--timeout", "30")
    assert service.status()["devices"][0]["reservations"] == []
    service.stop()


def test_an_eviction_calls_a_load_off(start_service: StartService, checkpoint: Path) -> None:
    """Evicting a model that is being loaded ends its loader, says so, and is not an error."""
    service = start_service('ready = "listening"\n' + HOST + model("small", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ready()
    assert "called off" in service.ctl("evict", "small")
    wait_for_end(loader)
    assert service.model("small")["state"] == "absent"
    service.ctl("load", "small")
    service.ctl("wait", "small", "--timeout", "30")
    service.stop()


def test_a_refused_eviction_leaves_the_load_alone(
    start_service: StartService, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """While a used model is loaded again, an eviction is refused and the load goes on."""
    path = make_checkpoint(tmp_path / "w.safetensors", {"a": ("U8", (4096,), b"1" * 4096)})
    service = start_service(HOST + model("w", path)).ready()
    holder, held = attach("w")
    make_checkpoint(path, {"a": ("U8", (4096,), b"2" * 4096)})
    service.ctl("reload")
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ctl("evict", "w", code=5)
    os.kill(loader, signal.SIGCONT)
    service.ctl("wait", "w", "--timeout", "30")
    assert service.model("w")["generation"] == 2
    held.close()
    holder.close()
    service.stop()


def test_a_loader_that_cannot_be_started_is_a_failed_model(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, runtime_dir: Path
) -> None:
    """No process or descriptor to be had, or a socket directory not to be trusted: the model fails, nothing else."""
    failures: list[Exception] = [
        OSError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeDirectoryError(path="/x", problem="open to others"),
    ]

    async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        raise failures.pop(0)

    monkeypatch.setattr(loads, "spawn_role", spawn)

    async def main() -> None:
        models = [Model(ModelConfig(name=name, checkpoint=str(checkpoint)), "host-0") for name in ("a", "b")]
        ended = asyncio.Event()
        queue = loads.Loads(lambda model: ended.set() if models[1].state == "failed" else None)
        task = asyncio.create_task(queue.run())
        for item in models:
            queue.add(item)
        await asyncio.wait_for(ended.wait(), 10)
        assert not task.done()
        task.cancel()
        assert "cannot be started: Resource temporarily unavailable" in str(models[0].error)
        assert "open to others" in str(models[1].error)

    asyncio.run(main())


def test_an_eviction_in_mid_load_ends_the_waiting(start_service: StartService, checkpoint: Path) -> None:
    """Who waits for a load is told at once when an operator calls it off."""
    service = start_service(HOST + model("lazy", checkpoint, "preload = false")).ready()
    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(attach, "lazy", 60)  # its request is what starts the load
        os.kill(process_of_role(service, "loader"), signal.SIGSTOP)
        service.ctl("evict", "lazy")
        with pytest.raises(ModelFailed, match="called off"):
            attaching.result(20)
    service.stop()


def test_wait_ends_when_nobody_loads_the_model(start_service: StartService, checkpoint: Path) -> None:
    """`weightcachectl wait` says so when the load is called off, before or while it waits, and exits with 4."""
    service = start_service('ready = "listening"\n' + HOST + model("small", checkpoint))
    os.kill(process_of_role(service, "loader"), signal.SIGSTOP)
    service.ready()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.ctl, "wait", "small", code=4)
        service.ctl("evict", "small")
        assert "weightcachectl load small" in waiting.result(20)
    assert "weightcachectl load small" in service.ctl("wait", "small", code=4)
    service.stop()


def test_an_eviction_during_the_start_does_not_hold_it_up(start_service: StartService, checkpoint: Path) -> None:
    """A model to preload that is evicted while it loads is not waited for: the service is ready with the others."""
    service = start_service(HOST + model("small", checkpoint) + model("other", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ctl("evict", "small")
    service.ready()
    assert (service.model("small")["state"], service.model("other")["state"]) == ("absent", "cached")
    service.stop()


def test_load_tries_again_after_a_failed_reload(start_service: StartService, checkpoint: Path) -> None:
    """A model whose last load failed is loaded again by `load`, although an older generation is served."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    good = checkpoint.read_bytes()
    checkpoint.write_bytes(good[:-1])
    service.ctl("reload")
    service.ctl("wait", "small", code=1)
    checkpoint.write_bytes(good)
    assert "follow it" in service.ctl("load", "small")
    service.ctl("wait", "small", "--timeout", "30")
    assert (service.model("small")["generation"], service.model("small")["error"]) == (2, None)
    service.stop()
