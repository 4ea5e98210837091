"""choosing: the devices with the most free memory, for models that name none."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcached import devices
from weightcached.choosing import checkpoint_bytes, choose
from weightcached.config import ModelConfig

GPUS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
FREE = {"GPU-a": 40, "GPU-b": 90, "GPU-c": 10, "GPU-d": 90}


def model(name: str = "m", **options: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "checkpoint": f"/models/{name}", **options})


def test_the_most_free_memory_in_the_order_of_the_config() -> None:
    """Ranks lie in the config's order on the devices that have most; where two have as much the first one is taken."""
    assert choose([model()], GPUS, FREE, {}, {}) == {"m": ("GPU-b",)}
    assert choose([model(tensor_parallel=2)], GPUS, FREE, {}, {}) == {"m": ("GPU-b", "GPU-d")}
    assert choose([model(tensor_parallel=3)], GPUS, FREE, {}, {}) == {"m": ("GPU-a", "GPU-b", "GPU-d")}
    assert choose([model()], GPUS, dict.fromkeys(GPUS, 5), {}, {}) == {"m": ("GPU-a",)}


def test_where_there_is_no_choice_nothing_is_said() -> None:
    """A model that names its devices, or needs all there are, or more; other kinds than the first device's are none."""
    models = [model("a", devices=["GPU-c"]), model("b", tensor_parallel=4), model("c", tensor_parallel=5)]
    assert choose(models, GPUS, FREE, {}, {}) == {}
    assert choose([model()], ["GPU-c", "host-0"], {"GPU-c": 1, "host-0": 99}, {}, {}) == {}


def test_what_is_cached_stays() -> None:
    """However little its devices have free, and in whichever order; unless they are too few by now, or not served."""
    kept = {"m": ("GPU-c", "GPU-a")}
    assert choose([model(tensor_parallel=2)], GPUS, FREE, kept, {}) == kept
    assert choose([model()], GPUS, FREE, kept, {}) == {"m": ("GPU-b",)}
    assert choose([model()], GPUS, FREE, {"m": ("GPU-e",)}, {}) == {"m": ("GPU-b",)}


def test_models_that_are_yet_to_come_count() -> None:
    """Preloads of one start are spread by their sizes; those that are cached, or loaded on demand only, are not
    counted: what they take is gone already, or makes room."""
    sizes = dict.fromkeys(("a", "b", "c"), 60)
    chosen = choose([model("a"), model("b"), model("c")], GPUS, FREE, {}, sizes)
    assert chosen == {"a": ("GPU-b",), "b": ("GPU-d",), "c": ("GPU-a",)}
    named = model("a", devices=["GPU-b"])
    assert choose([model("b"), named], GPUS, FREE, {}, sizes) == {"b": ("GPU-d",)}
    later = model("a", preload=False)
    assert choose([later, model("b")], GPUS, FREE, {}, sizes) == {"a": ("GPU-b",), "b": ("GPU-b",)}
    assert choose([model("b"), model("a")], GPUS, FREE, {"b": ("GPU-b",)}, sizes)["a"] == ("GPU-b",)


def test_host_devices_that_share_their_memory_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was read of each, and whatever is put on one of them."""
    monkeypatch.setattr(devices, "_numa_nodes", lambda: [0])
    hosts = ["host-0", "host-1", "host-2"]
    free = {"host-0": 7, "host-1": 9, "host-2": 8}
    assert choose([model("a"), model("b")], hosts, free, {}, {"a": 5}) == {"a": ("host-0",), "b": ("host-0",)}
    monkeypatch.setattr(devices, "_numa_nodes", lambda: [0, 1])
    assert choose([model("a")], hosts, free, {}, {}) == {"a": ("host-1",)}


def test_the_bytes_of_a_checkpoint(tmp_path: Path) -> None:
    """Those of a folder's safetensors files, or of a file; what is not there has none."""
    (tmp_path / "a.safetensors").write_bytes(bytes(10))
    (tmp_path / "b.safetensors").write_bytes(bytes(5))
    (tmp_path / "config.json").write_bytes(bytes(100))
    assert checkpoint_bytes(tmp_path) == 15
    assert checkpoint_bytes(tmp_path / "b.safetensors") == 5
    assert checkpoint_bytes(tmp_path / "c.safetensors") == 0
