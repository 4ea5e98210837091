"""Weights that are shared are never written: who writes gets copies first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import RunningWorker
from tests.engines.vllm import shaped
from tests.engines.vllm.conftest import Vllm, run
from weightcached.errors import EngineError

_RELOAD = "vllm.model_executor.model_loader.reload"


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("module", ["layerwise", "inplace"])
def test_layerwise_reload_writes_private_copies(
    vllm: Vllm, worker: RunningWorker, folder: Path, attached: bool, module: str
) -> None:
    """vLLM's reload in place changes this engine alone, be it the one that published or one that attached."""
    first = vllm.start(folder)
    model, other = (vllm.start(folder), first) if attached else (first, vllm.start(folder))
    expected = run(other)
    vllm.modules[f"{_RELOAD}.{module}"].initialize_layerwise_reload(model)
    assert model.embed.weight.sum() == 0
    assert run(other) == expected
    assert run(vllm.start(folder)) == expected
    assert model.router.bias is model.gate_bias
    assert model.lm_head.weight is model.embed.weight


def test_parameters_for_a_reload_are_private(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Also where processed weights are written one by one."""
    expected = run(vllm.start(folder))
    model = vllm.start(folder)
    parameter = vllm.modules[f"{_RELOAD}.inplace"].get_parameter_for_reload(model, "embed.weight")
    parameter.data.fill_(5)
    assert run(vllm.start(folder)) == expected


def test_reading_a_checkpoint_again_makes_copies_first(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """`reload_weights` asks the loader for a checkpoint's tensors, and writes then."""
    vllm.start(folder)
    model = vllm.start(folder)
    names = dict(vllm.loader().get_all_weights(vllm.config.model_config, model))
    assert "embed.weight" in names
    assert model._weightcached is None


def test_load_weights_copies_what_is_cached(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """A reload in place brings back the cached weights, in memory of this engine's own."""
    expected = run(vllm.start(folder))
    model = vllm.start(folder)
    vllm.modules["vllm.config"].current = vllm.config
    vllm.modules[f"{_RELOAD}.layerwise"].initialize_layerwise_reload(model)
    vllm.loader().load_weights(model, vllm.config.model_config)
    assert run(model) == expected


def test_load_weights_of_what_is_not_cached(vllm: Vllm, worker: RunningWorker, folder: Path, tmp_path: Path) -> None:
    """Nothing is written."""
    expected = run(vllm.start(folder))
    model = vllm.start(folder)
    other = shaped.ModelConfig(shaped.write_checkpoint(tmp_path / "other", seed=3))
    vllm.modules["vllm.config"].current = vllm.config
    with pytest.raises(EngineError, match="nothing to reload from"):
        vllm.loader().load_weights(model, other)
    assert run(model) == expected


def test_reload_makes_its_tensors_on_the_device(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """The model was constructed on meta; what a reload makes has memory all the same."""
    vllm.start(folder)
    model: Any = vllm.start(folder)
    assert {shaped.get_layerwise_info(layer).restore_device.type for layer in model.modules()} == {"cpu"}
