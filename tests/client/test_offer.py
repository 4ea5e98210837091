"""client/offer.py: what can be published, and under which key. On host memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.engine import KEY, Engine
from tests.client.handmade import RunningWorker
from weightcached.client import offer
from weightcached.client.modules import NamedTensor
from weightcached.client.publish import checkpoint_files, publish
from weightcached.errors import (
    CheckpointChanged,
    EngineError,
)


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(1)
    return Engine()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1], b"x", torch.float16], ids=str)
def test_attributes_that_are_no_scalars(value: Any, engine: Engine) -> None:
    """Nothing is converted: such an attribute is an error that names it."""
    with pytest.raises(EngineError, match=r"attribute layer\.scale is"):
        publish("engine", engine, key=KEY, device="host-0", attributes={"layer.scale": value})


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.empty(3, device="meta"), "a meta tensor"),
        (torch.eye(3).to_sparse(), "not elements in one storage"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "not elements in one storage"),
        (torch.ones(2, dtype=torch.complex128), "has no torch.complex128"),
        (torch.nn.parameter.UninitializedParameter(), "not elements in one storage"),
    ],
    ids=["meta", "sparse", "quantised", "complex128", "lazy"],
)
def test_tensors_that_cannot_be_carried(worker: RunningWorker, tensor: torch.Tensor, says: str) -> None:
    """Such a tensor is named, and nothing has moved or been reserved."""
    other = torch.ones(4)
    before = other.data_ptr()
    with pytest.raises(EngineError, match=says) as caught:
        publish("model", {"good": other, "bad": tensor}, key=KEY, device="host-0")
    assert "bad" in str(caught.value)
    assert other.data_ptr() == before
    assert worker.status()["shards"] == worker.status()["reservations"] == []


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ({"content": "c"}, "layout is None"),
        ({"content": "c", "layout": "checkpoint"}, "a tag of its own"),
        ({"layout": "x"}, "no content"),
        ({**KEY, "colour": 1}, "no field colour"),
        ({**KEY, "tensor_parallel_rank": 1}, "tensor parallel rank 1 of 1"),
        ({**KEY, "dtype": torch.float16}, "dtype is"),
    ],
)
def test_keys_that_are_none(key: dict[str, Any], says: str, engine: Engine) -> None:
    """A key that no client could ask for is refused before anything else."""
    with pytest.raises(EngineError, match=says):
        publish("engine", engine, key=key, device="host-0")


def test_files_and_provisional_content(worker: RunningWorker, engine: Engine, tmp_path: Path) -> None:
    """Without a digest the content stands for the files' stat tuples; changed files are not published."""
    from safetensors.torch import save_file

    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    files = checkpoint_files(tmp_path)
    weights = publish("engine", engine, key={"layout": "x"}, device="host-0", checkpoint=tmp_path, files=files)

    assert weights.key.content.startswith("stat:")
    assert weights.manifest.files == files
    assert weights.manifest.attributes == {"checkpoint": str(tmp_path)}

    os.utime(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointChanged, match=r"model\.safetensors changed"):
        publish("engine", engine, key={"layout": "x"}, device="host-0", checkpoint=tmp_path, files=files)
    assert [shard["generation"] for shard in worker.status()["shards"]] == [1]


def test_default_privacy(engine: Engine) -> None:
    """Small buffers are private, large ones and parameters are not."""
    small, large = torch.zeros(4), torch.zeros(1 << 18)
    assert offer.is_small_buffer(NamedTensor("b", small, "buffer"))
    assert not offer.is_small_buffer(NamedTensor("b", large, "buffer"))
    assert not offer.is_small_buffer(NamedTensor("p", small))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"key": dict([*KEY.items(), (5, 1)])}, "no field 5"),
        ({"key": {**KEY, "layers": (1.5, 2)}}, r"layers is \(1.5, 2\)"),
        ({"attributes": {"a": "\ud800"}}, "attribute 'a'"),
        ({"attributes": {5: 1}}, "attribute 5"),
        ({"name": "a/b"}, "'a/b' cannot be the name of a model: 1 to 128 letters"),
        ({"name": ""}, "'' cannot be the name"),
        ({"name": 3}, "3 cannot be the name"),
        ({"tensors": None}, "NoneType is neither a module nor a mapping of tensors"),
    ],
)
def test_what_cannot_be_carried_moves_nothing(worker: RunningWorker, arguments: dict[str, Any], problem: str) -> None:
    """It is refused before the first tensor is touched."""
    tensor = torch.ones(4)
    before = tensor.data_ptr()
    good = {"name": "engine", "tensors": {"w": tensor}, "key": KEY, "device": "host-0"}
    with pytest.raises(EngineError, match=problem):
        publish(**{**good, **arguments})
    assert tensor.data_ptr() == before
