"""Devices that are there or not, by config and at a start, and where models go then."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.handmade import Raw, make_shard
from tests.leaks import NoDescriptorLeaks
from tests.manager import Manager
from tests.service.conftest import held_by, model
from tests.service.test_survival import put, shards
from weightcached.config import Config, load_config
from weightcached.devices import Device, Memory
from weightcached.errors import ConfigError, DeviceError
from weightcached.service.models import Model
from weightcached.service.placement import NOWHERE, Placement, devices_of
from weightcached.service.vault import Vault

GONE, ALSO = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in range(2))
WITHOUT = f'devices = ["{GONE}", "{ALSO}", "host-0"]\n'
TENSORS = [Raw("w", "U8", (5000,), os.urandom(5000))]


def read(path: Path, text: str) -> Config:
    (path / "test.toml").write_text(text)
    return load_config(path / "test.toml")


def test_a_device_that_is_gone_is_left_out_of_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only with something to lose, and as long as there is another one."""
    both, alone = read(tmp_path, WITHOUT), read(tmp_path, f'devices = ["{GONE}"]\n')
    with pytest.raises(ConfigError, match=f"devices: no device {GONE}"):
        devices_of(both)
    assert not caplog.records
    assert [device.name for device in devices_of(both, to_lose=True)] == ["host-0"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert f"no device {GONE}; devices here: host-0" in caplog.text
    with pytest.raises(ConfigError, match=f"devices: no device {GONE}"):
        devices_of(alone, to_lose=True)


def test_a_model_does_not_move_because_a_device_is_gone(tmp_path: Path) -> None:
    """Ranks keep the places that the config's list gives them; why nothing can be loaded there is said."""
    text = 'devices = ["host-0", "host-1"]\n' + model("first", tmp_path) + model("cut", tmp_path, "tensor_parallel = 2")
    config = read(tmp_path, text)
    place = Placement.of(config, {"host-1": 1}, to_lose=True)
    assert [place.devices_for(item) for item in config.models] == [("host-0",), ("host-0", "host-1")]
    assert str(place.problem(["host-1", "host-0"])).startswith("host-0: was not there when the service started")
    assert place.problem(["host-1"]) is None


def test_of_all_devices_too_few_are_there(tmp_path: Path) -> None:
    """A model names one that is gone, or has more ranks than devices are left: the config's error, or, with something
    to lose, the model's."""
    named, wide = (f'devices = ["{GONE}"]', "tensor_parallel = 2")
    config = read(tmp_path, model("named", tmp_path, named) + model("wide", tmp_path, wide))
    strict = Placement.of(config, {"host-0": 1}, to_lose=False)
    for item in config.models:
        with pytest.raises(ConfigError, match=f"model {item.name}: "):
            strict.devices_for(item)
    place = Placement.of(config, {"host-0": 1}, to_lose=True)
    assert [place.devices_for(item) for item in config.models] == [(GONE,), (NOWHERE, NOWHERE)]
    assert "not as many devices" in str(place.problem((NOWHERE, NOWHERE)))


@pytest.fixture
def manage(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> Iterator[Callable[[str], Manager]]:
    """``manage(config)`` makes a manager that has started nothing yet."""
    made: list[Manager] = []

    def make(config: str) -> Manager:
        made.append(Manager(runtime_dir, config))
        return made[-1]

    yield make
    for manager in made:
        manager.abandon()


@pytest.mark.parametrize("devices", [WITHOUT, ""], ids=["listed", "all"])
def test_a_gpu_that_is_gone_at_a_restart_costs_no_other_device(
    manage: Callable[[str], Manager], checkpoint: Path, devices: str
) -> None:
    """What is cached on the others is served; models with a rank on it have failed and say why, now and when they are
    asked for, and its own shard is dropped. A reload takes the same file."""
    config = devices + model("lost", checkpoint, f'devices = ["{GONE}"]')
    config += model("lazy", checkpoint, f'devices = ["{GONE}"]', "preload = false")
    config += model("cut", checkpoint, "tensor_parallel = 2", f'devices = ["{GONE}", "{ALSO}"]')
    manager = manage(config)
    put(manager, make_shard(TENSORS, model="good"))
    put(manager, make_shard(TENSORS, model="lost", device=GONE))
    manager.start().ready()
    manager.wait_stored(2)
    before = held_by("good", "host-0")
    assert before.startswith(TENSORS[0].data)
    assert f"{GONE}, generation 1, was kept by the service manager and is dropped: {GONE}: is not served" in manager.log
    for again in (lambda: None, lambda: manager.ctl("reload"), lambda: manager.ctl("load", "lazy")):
        again()
        for name in ("lost", "lazy", "cut"):
            found = manager.model(name)
            assert (found["state"], found["error"]["code"]) == ("failed", "device-error")
            assert f"{GONE}: was not there when the service started" in found["error"]["message"]
    assert held_by("good", "host-0") == before
    assert shards(manager) == [("good", 1)]
    manager.restart().ready()
    assert held_by("good", "host-0") == before
    manager.stop()


def test_the_freest_device_is_kept_while_the_model_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is chosen by what is free when the file is read, and said once; what is cached, or coming, does not move. A
    probe that fails changes nothing."""
    caplog.set_level("INFO")
    text = f'devices = ["{GONE}", "{ALSO}"]\n' + model("m", tmp_path)
    config = read(tmp_path, text)
    (item,) = config.models
    place = Placement.of(config, {GONE: 5, ALSO: 9}, to_lose=False)
    place.look(config)
    place.choose(config, {}, Vault())
    assert place.devices_for(item) == (ALSO,)
    place.choose(config, {}, Vault())
    assert caplog.text.count(f"m: of 2 devices the most memory is free on {ALSO}") == 1
    free = {GONE: 8, ALSO: 2}
    monkeypatch.setattr(
        "weightcached.service.placement.probe_devices",
        lambda names: [Device(name, "fake", Memory(10, free[name])) for name in names],
    )
    cached = Model(item, (ALSO,))
    cached.published(ALSO, 1, 3)
    place.look_again(config.file)
    place.choose(config, {"m": cached}, Vault())
    assert place.devices_for(item) == (ALSO,)
    cached.gone(ALSO)
    place.choose(config, {"m": cached}, Vault())
    assert place.devices_for(item) == (GONE,)
    cached.queue()
    place.choose(config, {"m": cached}, Vault())
    assert place.devices_for(item) == (ALSO,)

    def fail(names: object) -> list[Device]:
        raise DeviceError(device="NVML", problem="hangs")

    monkeypatch.setattr("weightcached.service.placement.probe_devices", fail)
    place.look_again(config.file)
    assert place.free == free
    assert "devices are chosen by what they had free before: NVML: hangs" in caplog.text


def test_an_adopted_model_does_not_move(manage: Callable[[str], Manager], tmp_path: Path) -> None:
    """A restart finds it on the second device, where it was put by name, though the first one would be chosen."""
    checkpoint = tmp_path / "m.safetensors"
    checkpoint.write_bytes(len(b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}').to_bytes(8, "little")
                           + b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}' + b"abc")  # fmt: skip
    both = 'devices = ["host-0", "host-1"]\n'
    manager = manage(both + model("m", checkpoint, 'devices = ["host-1"]'))
    manager.start().ready()
    manager.kill()
    manager.configure(both + model("m", checkpoint))
    manager.start().ready()
    assert manager.model("m")["devices"] == ["host-1"]
    assert manager.model("m")["generations"] == [1]
    assert held_by("m", "host-1") == b"abc"
    manager.stop()
    manager.start().ready()
    assert manager.model("m")["devices"] == ["host-0"]
