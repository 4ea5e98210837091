"""engines/transformers/quantised.py: which quantised checkpoints are shared, and why the others are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.handmade import DEVICE, RunningWorker
from tests.engines.models import TINY, assert_same, save_random, to_fp8
from weightcached.engines.transformers import from_cache
from weightcached.engines.transformers.quantised import loads_compressed_dense, method_of, require_supported
from weightcached.errors import EngineError

transformers = pytest.importorskip("transformers")
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def config_of(quantization: Any) -> Any:
    return transformers.Qwen3Config(**TINY, head_dim=8, quantization_config=quantization)


def save_fp8(folder: Path, quantization: dict[str, Any], scale: str) -> Path:
    """A random Qwen3 whose projections are stored in FP8 with scales, as such checkpoints are."""
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, head_dim=8)).to(torch.bfloat16)
    return to_fp8(save_random(model, folder), quantization, scale)


def check(folder: Path, device: str = DEVICE) -> None:
    """Disk, first and attached are the same, bit for bit."""
    want = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    assert_same(from_cache(folder, device=device, on_miss="fallback"), want)
    assert_same(from_cache(folder, device=device), want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU transformers does not dequantise by itself")
def test_fp8_without_a_gpu(worker: RunningWorker, tmp_path: Path) -> None:
    """Where no GPU has FP8, transformers dequantises block FP8 while it loads, and that is what is shared."""
    pytest.importorskip("accelerate", reason="transformers loads FP8 only with accelerate there")
    check(save_fp8(tmp_path / "fp8", FP8, "_scale_inv"))
    (shard,) = worker.status()["shards"]
    assert (shard["key"]["quantization"], shard["key"]["dtype"]) == ("fp8", "bfloat16")


def test_dequantised_compressed_tensors(worker: RunningWorker, tmp_path: Path) -> None:
    """With dequantize in its config such a checkpoint is shared as the dense model that it then is."""
    pytest.importorskip("compressed_tensors")
    if not loads_compressed_dense():
        folder = save_fp8(tmp_path / "later", {**COMPRESSED, "dequantize": True}, "_scale")
        with pytest.raises(EngineError, match="which this version of transformers changes after it has loaded"):
            from_cache(folder, device=DEVICE)
        return
    check(save_fp8(tmp_path / "ct", {**COMPRESSED, "dequantize": True}, "_scale"))


def test_compressed_tensors_that_stay_compressed_are_refused() -> None:
    """They become private memory at the first forward pass; the error says so, and what would be shared."""
    with pytest.raises(EngineError, match=r"at the first forward pass.*dequantize=True"):
        require_supported(config_of(dict(COMPRESSED)))
    if not loads_compressed_dense():
        return
    require_supported(config_of({**COMPRESSED, "use_optimized_inference": True}))
    require_supported(config_of({**COMPRESSED, "run_compressed": False}))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes.*in Python objects beside"),
        ({"load_in_4bit": True}, "bitsandbytes.*in Python objects beside"),
        ({"quant_method": "gptq", "bits": 4}, "gptq.*repack"),
        ({"quant_method": "mxfp4"}, "mxfp4.*not tried; fp8 and compressed-tensors are supported"),
        ({}, "unnamed.*not tried"),
    ],
)
def test_others_are_refused_by_name(quantization: dict[str, Any], message: str) -> None:
    """Each with its reason, and from_pretrained as the way that works."""
    with pytest.raises(EngineError, match=f"quantised with {message}.*use from_pretrained"):
        require_supported(config_of(quantization))


def test_a_refused_one_falls_back(
    worker: RunningWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under "fallback" one warning gives the reason and transformers loads it; under "fail" the reason is raised."""
    folder = save_random(transformers.Qwen3ForCausalLM(config_of(None)), tmp_path / "random")
    config = config_of({"quant_method": "bitsandbytes", "load_in_4bit": True})
    asked: list[dict[str, Any]] = []

    def load(folder: Path, **options: Any) -> Any:  # bitsandbytes itself needs a GPU
        asked.append(options)
        return transformers.Qwen3ForCausalLM(config_of(None))

    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "from_pretrained", load)
    with pytest.raises(EngineError, match="bitsandbytes"):
        from_cache(folder, device=DEVICE, config=config, model_class=transformers.Qwen3ForCausalLM)
    with caplog.at_level(logging.WARNING, "weightcached"):
        from_cache(folder, device=DEVICE, config=config, model_class=transformers.Qwen3ForCausalLM, on_miss="fallback")
    (record,) = [record for record in caplog.records if record.name.startswith("weightcached")]
    assert "is loaded from disk: quantised with bitsandbytes" in record.getMessage()
    assert asked[0]["device_map"] == {"": "cpu"}


def test_method_of() -> None:
    """From a dict as in config.json, or from transformers' own class."""
    assert method_of(config_of(None)) is None
    assert method_of(config_of(FP8)) == "fp8"
    assert method_of(config_of(transformers.FineGrainedFP8Config())) == "fp8"
