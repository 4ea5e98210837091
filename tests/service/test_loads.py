"""Loads of a real service: queued, waited for, called off, killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.running import process_of_role, wait_for_end
from tests.service.conftest import HOST, StartService, attach, generation, model
from weightcached.errors import ModelFailed, ModelLoading, NoSuchModel


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
