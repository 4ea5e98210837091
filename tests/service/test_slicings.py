"""service.slicings and worker.groups: an engine with other parallel sizes than the config's, with a real service."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.llama import Tensor, slab_of
from tests.running import RunningService, wait_for_end
from tests.service.conftest import StartService, attach, model, slab_bytes
from tests.service.test_survival import StartManager, manage  # noqa: F401 - a fixture
from weightcached.config import ModelConfig
from weightcached.errors import KeyMismatch, ModelFailed, TimedOut
from weightcached.service.models import Model
from weightcached.service.slicings import kept, order_of, slicing

Llama = tuple[Path, dict[str, Tensor]]
PAIR = 'devices = ["host-0", "host-1"]\n'
RELOAD = 'on_mismatch = "reload"'
SIZES = {"pipeline_parallel_size": 1, "data_parallel_size": 1}


def rank_of(name: str, rank: int, size: int, wait: float = 0.0, *, device: str | None = None) -> bytes:
    """What a client gets that asks for one of `size` tensor parallel ranks, on the device of that number."""
    key = {**SIZES, "tensor_parallel_size": size, "tensor_parallel_rank": rank}
    worker, fds = attach(name, wait, device=device or f"host-{rank}", **key)
    with worker, fds:
        return slab_bytes(fds)


def both(name: str, wait: float) -> list[bytes]:
    """What two ranks get that are started together."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: rank_of(name, rank, 2, wait), (0, 1)))


def states(service: RunningService) -> dict[str, str]:
    return {item["model"]: item["state"] for item in service.status()["models"]}


def test_without_it_other_sizes_are_refused(start_service: StartService, llama: Llama) -> None:
    """Whether the engine waits or not: the error has both sizes, and says what can be done."""
    service = start_service(PAIR + model("m", llama[0])).ready()
    for wait in (0.0, 20.0):
        with pytest.raises(KeyMismatch, match="host-0 has the whole model; start the engine with these") as caught:
            rank_of("m", 0, 2, wait)
        assert caught.value.differences == {"tensor_parallel_size": [2, 1]}
    service.stop()


def test_ranks_that_wait_have_their_slicing_loaded(start_service: StartService, llama: Llama) -> None:
    """Both get their part, one load reads for both, and the config's slicing stays beside it."""
    folder, tensors = llama
    service = start_service(PAIR + model("m", folder, RELOAD)).ready()
    with pytest.raises(KeyMismatch, match=r"on_miss='wait' the service loads this slicing, as m\.tp2"):
        rank_of("m", 0, 2)
    assert both("m", 30) == [slab_of(tensors, rank, 2) for rank in (0, 1)]
    assert states(service) == {"m": "cached", "m.tp2": "cached"}
    assert service.model("m.tp2")["generations"] == [1, 1]
    assert [rank_of("m", rank, 2) for rank in (0, 1)] == [slab_of(tensors, rank, 2) for rank in (0, 1)]
    assert rank_of("m", 0, 1) == slab_of(tensors, 0, 1)
    assert rank_of("m.tp2", 1, 2) == slab_of(tensors, 1, 2)
    service.stop()


def test_a_rank_on_another_device_is_told_where_it_is(start_service: StartService, llama: Llama) -> None:
    """Before anything is loaded; and a slicing with more ranks than there are devices is refused with both numbers."""
    service = start_service(PAIR + model("m", llama[0], RELOAD)).ready()
    with pytest.raises(KeyMismatch, match=r"puts tensor parallel rank 0 of 2 on host-0, not on host-1; attach it with"):
        rank_of("m", 0, 2, 20, device="host-1")
    with pytest.raises(KeyMismatch, match="4 ranks need as many devices of one kind, and 2 are served"):
        rank_of("m", 0, 4, 20)
    assert states(service) == {"m": "cached"}
    service.stop()


def test_it_takes_the_place_of_what_is_idle(start_service: StartService, llama: Llama) -> None:
    """Where both have no room the config's slicing goes, unless it is pinned: then who waits has the reason."""
    folder, tensors = llama
    limit = f"memory_limit = {len(slab_of(tensors, 0, 1)) + 1000}\n"
    service = start_service(limit + PAIR + model("m", folder, RELOAD)).ready()
    assert both("m", 30) == [slab_of(tensors, rank, 2) for rank in (0, 1)]
    assert states(service) == {"m": "absent", "m.tp2": "cached"}
    service.stop()
    service = start_service(limit + PAIR + model("m", folder, RELOAD, "pin = true")).ready()
    with pytest.raises(ModelFailed, match="rank 0 on host-0: host-0 has no room"):
        rank_of("m", 0, 2, 30)
    assert states(service) == {"m": "cached", "m.tp2": "failed"}
    service.stop()


def test_a_slicing_that_cannot_be_cut_says_why(start_service: StartService, llama: Llama) -> None:
    """To whoever waits; the model itself is served as before."""
    devices = "devices = [" + ", ".join(f'"host-{number}"' for number in range(3)) + "]\n"
    service = start_service(devices + model("m", llama[0], RELOAD)).ready()
    with pytest.raises(ModelFailed, match="3"):
        rank_of("m", 0, 3, 30)
    assert states(service)["m"] == "cached"
    service.stop()


def test_it_follows_the_config(start_service: StartService, llama: Llama) -> None:
    """A reload loads the slicing again with its model's files, and forgets it where the config does not allow it."""
    folder, _ = llama
    text = PAIR + model("m", folder, RELOAD)
    service = start_service(text).ready()
    both("m", 30)
    os.utime(folder / "model.safetensors")
    service.ctl("reload")
    for name in ("m", "m.tp2"):
        service.ctl("wait", name, "--timeout", "30")
    assert service.model("m.tp2")["generations"] == [2, 2]
    service.config.write_text(text.replace("reload", "refuse"))
    assert "m.tp2" in service.ctl("reload")  # left over
    assert list(states(service)) == ["m"]
    with pytest.raises(KeyMismatch, match="start the engine with these sizes"):
        rank_of("m", 0, 2)
    service.stop()


def test_it_outlives_a_restart_and_a_worker(manage: StartManager, llama: Llama) -> None:  # noqa: F811
    """What is cached is adopted under its name, and given out by the model's."""
    folder, tensors = llama
    manager = manage(PAIR + model("m", folder, RELOAD))
    manager.start().ready()
    both("m", 30)
    pid = manager.status()["devices"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert rank_of("m", 1, 2) == slab_of(tensors, 1, 2)
    manager.kill()
    manager.start().ready()
    assert [rank_of("m", rank, 2) for rank in (0, 1)] == [slab_of(tensors, rank, 2) for rank in (0, 1)]
    assert manager.model("m.tp2")["generations"] == [1, 1]


def test_a_wait_for_no_rank_ends_at_once(start_service: StartService, llama: Llama) -> None:
    """Who asks for two ranks and says no rank of them would wait for nothing."""
    service = start_service(PAIR + model("m", llama[0], RELOAD)).ready()
    with pytest.raises(KeyMismatch, match="no rank of 2 is asked for"):
        attach("m", 20, tensor_parallel_size=2)
    with pytest.raises(TimedOut):
        attach("n.tp2", 0.2, tensor_parallel_size=2, tensor_parallel_rank=0)
    service.stop()


def config(**options: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "checkpoint": "/models/m", "on_mismatch": "reload", **options})


def test_the_devices_of_other_slicings() -> None:
    """Those that the model names come first, then the others of their kind, in the order of the config."""
    served = ["host-0", "GPU-1", "GPU-2", "host-1"]
    assert order_of(config(devices=["GPU-2"]), served) == ("GPU-2", "GPU-1")
    assert order_of(config(), served) == ("host-0", "host-1")
    assert order_of(config(on_mismatch="refuse"), served) == ()
    assert order_of(config(), []) == ()


def test_what_a_slicing_takes_over() -> None:
    """All of its model's settings but the sizes, the devices, and that it is preloaded or pinned."""
    given = config(pin=True, dtype="float16", pipeline_parallel=2, pipeline_layers=[1, 2])
    base = Model(given, ("host-0", "host-1"))
    base.order = ("host-0", "host-1", "host-2", "host-3")
    models = {"m": base, "m.tp3": Model(config(name="m.tp3"), ("host-0",))}
    made = slicing("m.pp2tp2", models)
    assert made is not None
    assert made.model_dump() == {
        **given.model_dump(),
        "name": "m.pp2tp2",
        "preload": False,
        "pin": False,
        "on_mismatch": "refuse",
        "tensor_parallel": 2,
        "pipeline_layers": "vllm",
        "devices": base.order,
    }
    for name in ("m", "m.pp2tp1", "m.tp5", "m.tp3", "n.tp2", "m.pp5tp1"):
        assert slicing(name, models) is None, name
    assert [item.name for item in kept(models, [], ["m.tp2", "other", "m"])] == ["m.tp2"]
