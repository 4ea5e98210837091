"""A model constructed without memory and filled from the cache is whole; faults of other loaders are named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.client.handmade import RunningWorker
from tests.engines.vllm import shaped
from tests.engines.vllm.conftest import Vllm, run
from weightcached.client.modules import held_tensors, named_tensors
from weightcached.errors import EngineError


def test_tied_names_are_one_object(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """lm_head and embeddings are one parameter, as on disk."""
    vllm.start(folder)
    model = vllm.start(folder)
    assert model.lm_head.weight is model.embed.weight


def test_vime_175_weight_loader_is_kept(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Parameters keep vLLM's class and what was set on them, so that a refit finds its loaders."""
    vllm.start(folder)
    weight = vllm.start(folder).linear.weight
    assert type(weight) is shaped.LoadedParameter
    assert weight.output_dim == 0
    assert weight.stride() == (1, shaped.HIDDEN)  # processed, transposed


def test_vllm_57320_absorbed_weights_are_not_written(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """MLA layers compute their absorbed weights again at a hit; those that came with the cache stay as they are."""
    vllm.start(folder)
    vllm.writes.clear()
    model = vllm.start(folder)
    assert "W_UV" in dict(model.attn.named_parameters())
    assert vllm.writes == []
    assert model.attn.W_UV.untyped_storage().data_ptr() == model.attn.kv_b.untyped_storage().data_ptr()


def test_stale_router_bias(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """A router that is no module, and captured the parameter on meta, sees the cached one; so do tuples of tensors."""
    vllm.start(folder)
    model = vllm.start(folder)
    assert model.router.bias is model.gate_bias
    assert model.router.tables[0] is model.expert_table
    assert not model.router.bias.is_meta
    assert model.expert_table.tolist() == [0, 3, 6, 9]


def test_maps_of_experts(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Which experts a rank has is computed while the model is constructed, and read there; one tensor holds it."""
    vllm.start(folder)
    made = shaped.ExpertMapManager.__init__
    model = vllm.start(folder)
    assert shaped.DefaultModelLoader.loads == 1
    assert model.experts.told == [0, 1]
    assert model._expert_map.tolist() == [0, 1, -1, -1]
    assert model.experts.expert_map is model._expert_map
    assert shaped.ExpertMapManager.__init__ is made


def test_nothing_is_left_on_meta(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Plain attributes and objects included; an empty placeholder is on the device."""
    vllm.start(folder)
    model = vllm.start(folder)
    assert not [item.name for item in named_tensors(model) if item.tensor.is_meta]
    assert not [item.path for item in held_tensors(model) if item.tensor.is_meta]
    assert model.norm.weight.tolist() == [2.0] * shaped.HIDDEN


def test_uninitialised_leftovers_are_refused(
    vllm: Vllm, worker: RunningWorker, folder: Path, warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that no cache has is never left with whatever memory holds: the engine loads from disk and says why."""

    def extra(model: Any) -> None:
        model.router.scratch = torch.zeros(3)

    monkeypatch.setattr(shaped, "extra", extra)
    expected = run(vllm.start(folder))
    model = vllm.start(folder)
    assert run(model) == expected
    assert shaped.DefaultModelLoader.loads == 2
    assert "router.scratch" in warnings()[-1]
    assert list(vllm.config.compilation_config.static_forward_context) == ["attn"]


def test_objects_hold_what_they_held(
    vllm: Vllm, worker: RunningWorker, folder: Path, warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel object that packed weights for itself, which pre-processed mode leaves out, is noticed: disk it is."""

    class Packing(shaped.LinearMethod):
        packed: torch.Tensor

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            if not shaped.utils().is_weights_pre_processed():
                self.packed = layer.weight.clone()

    Packing.__module__ = "vllm.kernels"
    monkeypatch.setattr(shaped.Linear, "method", Packing)
    vllm.start(folder)
    vllm.start(folder)
    assert shaped.DefaultModelLoader.loads == 2
    assert "lack tensors that they had after the load from disk: linear.quant_method.packed (0 of 1)" in warnings()[-1]


def test_leftovers_are_raised_without_fallback(
    vllm: Vllm, worker: RunningWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user wants the cache or nothing, the engine does not start."""
    monkeypatch.setattr(shaped, "extra", lambda model: setattr(model.router, "scratch", torch.zeros(3)))
    vllm.start(folder)
    with pytest.raises(EngineError, match=r"not in the cache: router\.scratch"):
        vllm.start(folder, options={"on_miss": "fail"})


def test_failed_build_leaves_no_shared_rotary_embedding(
    vllm: Vllm, worker: RunningWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM shares them between the models of a process: one on meta would get into the model that is loaded then."""
    rotary: Any = ModuleType("vllm.model_executor.layers.rotary_embedding")
    rotary._ROPE_DICT = {"other": 1}
    monkeypatch.setitem(sys.modules, rotary.__name__, rotary)

    def extra(model: Any) -> None:
        rotary._ROPE_DICT["meta"] = torch.zeros(3)
        model.router.scratch = torch.zeros(3)

    vllm.start(folder)
    monkeypatch.setattr(shaped, "extra", extra)
    vllm.start(folder)
    assert rotary._ROPE_DICT["other"] == 1
    assert not rotary._ROPE_DICT["meta"].is_meta
