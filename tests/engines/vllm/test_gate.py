"""What cannot be served is refused with a reason and with what would work, or loaded from disk with a warning."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.client.handmade import RunningWorker
from tests.engines.vllm import shaped
from tests.engines.vllm.conftest import Vllm
from weightcached.engines.policy import Options
from weightcached.engines.vllm import gate
from weightcached.errors import EngineError


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_eplb": True}, "expert load balancing"),
        ({"offload_config": SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=4))}, "offloaded weights"),
        ({"offload_config": SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=2))}, "offloaded weights"),
        ({"weight_transfer_config": object()}, "weight transfer writes weights"),
    ],
)
def test_settings_that_write_weights_are_refused(
    vllm: Vllm, worker: RunningWorker, folder: Path, settings: dict[str, Any], reason: str
) -> None:
    """Before anything is loaded, and under every policy."""
    with pytest.raises(EngineError, match=reason):
        vllm.start(folder, **settings)
    assert shaped.DefaultModelLoader.loads == 0


def test_sleep_mode_is_refused(vllm: Vllm, folder: Path) -> None:
    """vLLM would free memory that is not its own."""
    with pytest.raises(EngineError, match="sleep mode"):
        vllm.start(folder, model={"enable_sleep_mode": True})


def test_lora_is_no_reason(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Adapters are beside the weights."""
    vllm.start(folder, lora_config=object())
    vllm.start(folder, lora_config=object())
    assert shaped.DefaultModelLoader.loads == 1


@pytest.mark.parametrize("quantization", ["awq", "compressed-tensors", "fp8"])
def test_unsupported_quantisation_is_told_before_the_load(
    vllm: Vllm, worker: RunningWorker, folder: Path, warnings: Any, quantization: str
) -> None:
    """With what works; "fp8" here is one of a checkpoint that is not FP8. Nothing is published."""
    model = {"quantization": quantization}
    with pytest.raises(EngineError, match="what works: unquantised"):
        vllm.start(folder, model=model, options={"on_miss": "fail"})
    vllm.start(folder, model=model)
    assert "loaded from disk" in warnings()[-1]
    assert worker.status()["shards"] == []


def test_fp8_checkpoint_is_no_problem() -> None:
    """Of a checkpoint that is quantised the methods decide."""
    config = shaped.Config(quantization_config={"quant_method": "fp8"})
    model_config = SimpleNamespace(quantization="fp8", hf_config=config, hf_text_config=config)
    assert gate.quantization_problem(model_config) is None


def test_method_without_pre_processed_mode_is_not_published(
    vllm: Vllm, worker: RunningWorker, folder: Path, warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM does not declare is not cached: the engine runs, one warning names the layer and the method."""
    monkeypatch.setattr(shaped.Linear, "method", shaped.UnknownMethod)
    vllm.start(folder)
    assert "UnknownMethod does not take processed weights (of linear)" in warnings()[-1]
    assert worker.status()["shards"] == []


def test_kernel_decides_and_not_the_flag(vllm: Vllm) -> None:
    """MXFP4 MoE declares support, and has it on one kernel only."""
    method: Any = type("Mxfp4MoEMethod", (shaped.LinearMethod,), {})()
    layer = SimpleNamespace(quant_method=method)
    model: Any = SimpleNamespace(named_modules=lambda: [("experts", layer)])
    method.mxfp4_backend = SimpleNamespace(name="MARLIN")
    problem = gate.method_problem(model)
    assert problem is not None
    assert "on the kernel MARLIN (of experts)" in str(problem)
    method.mxfp4_backend = SimpleNamespace(name="FLASHINFER_TRTLLM_MXFP4_MXFP8")
    assert gate.method_problem(model) is None


def test_experts_that_prepare_themselves_are_told() -> None:
    """In pre-processed mode vLLM leaves out what experts do after loading: only where that is nothing it may."""

    class FusedMoEExperts:
        def process_weights_after_loading(self, layer: Any) -> None:
            """Nothing."""

    class TritonExperts(FusedMoEExperts):
        pass

    class PackingExperts(FusedMoEExperts):
        def process_weights_after_loading(self, layer: Any) -> None:
            self.packed = layer.w13_weight.t()

    method: Any = type("UnquantizedFusedMoEMethod", (shaped.LinearMethod,), {"experts_cls": TritonExperts})()
    assert gate._method(method) is None
    method.experts_cls = PackingExperts
    assert gate._method(method) == "UnquantizedFusedMoEMethod does not repeat what PackingExperts makes of the weights"


@pytest.mark.parametrize("zen", [False, True])
def test_experts_of_a_cpu(monkeypatch: pytest.MonkeyPatch, zen: bool) -> None:
    """On AMD's Zen they keep to themselves that they have packed weights; elsewhere the parameters have it all."""
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_zen_cpu=lambda: zen)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert gate._repeated("CPUUnquantizedExperts") is not zen


def test_weights_in_kernel_objects_are_not_published(
    vllm: Vllm, worker: RunningWorker, folder: Path, warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU kernels take a weight into an object of their own and leave an empty parameter: nothing to share."""

    class Packing(shaped.LinearMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            layer.packed = [layer.weight.clone()]
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    monkeypatch.setattr(shaped.Linear, "method", Packing)
    vllm.start(folder)
    assert "1 parameters are kept by kernels in a form of their own, such as linear.weight" in warnings()[-1]
    assert worker.status()["shards"] == []


def test_further_checkpoints_are_not_published(vllm: Vllm) -> None:
    """Their files are no part of the identity."""
    model: Any = SimpleNamespace(named_modules=list, secondary_weights=["other/repo"])
    assert "further checkpoints" in str(gate.method_problem(model))


def test_copy_mode_takes_weight_transfer(folder: Path) -> None:
    """Copies may be written."""
    config = shaped.vllm_config(shaped.ModelConfig(folder), weight_transfer_config=object())
    gate.refuse_settings(config, shaped.LoadConfig(), Options(mode="copy"))
