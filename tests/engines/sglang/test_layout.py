"""engines/sglang/layout.py: whatever shapes processed weights makes another key, and what does not makes the same."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

from tests.engines.sglang.standin import Engine, HfConfig, ModelConfig
from weightcached.engines.sglang import layout
from weightcached.shard.key import KEY_FIELDS

VERSIONS = {"sglang": "0.5.23", "torch": "2.14.1"}
MODEL = ModelConfig("/models/Tiny-1B")
FP8 = HfConfig(["TinyForCausalLM"], quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})


def key(model: ModelConfig = MODEL, capability: str | None = "9.0", **versions: str) -> dict[str, Any]:
    return layout.key(model, {**VERSIONS, **versions}, capability, "main")


def test_the_key_says_for_whom_and_how_the_weights_were_processed(engine: Engine) -> None:
    """Fields of `ShardKey` only, the layout with SGLang's version and a digest of 16 digits; the same each time."""
    made = key()
    assert made.keys() < KEY_FIELDS
    assert made["layout"].startswith("sglang-0.5.23/")
    assert len(made["layout"].rpartition("/")[2]) == 16
    assert made["backends"].startswith("attention_backend=fa3,moe_runner_backend=auto")
    assert key() == made


def test_what_shapes_weights_changes_the_layout(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, GPU, config, dtype, quantisation, sizes, back-ends and switches: each alone makes another layout."""
    seen = [key()["layout"]]
    seen.append(key(torch="2.15.0")["layout"])
    seen.append(key(flashinfer="0.7.3")["layout"])
    seen.append(key(capability="10.0")["layout"])
    seen.append(key(dataclasses.replace(MODEL, dtype=torch.float16))["layout"])
    seen.append(key(dataclasses.replace(MODEL, hf_config=FP8))["layout"])
    seen.append(key(dataclasses.replace(MODEL, quantization="fp8"))["layout"])
    for group, leaf, value in (
        ("exec.moe", "moe_runner_backend", "triton"),
        ("exec.moe", "some_new_setting", True),
        ("parallel", "moe_dense_tp_size", 1),
        ("model", "kv_cache_dtype", "fp8_e4m3"),
        ("spec", "speculative_algorithm", "EAGLE"),
    ):
        engine.set(group, **{leaf: value})
        seen.append(key()["layout"])
    ranks = sys.modules["sglang.srt.runtime_context"].get_parallel()
    ranks.tp_size = 2
    seen.append(key()["layout"])
    monkeypatch.setenv("SGLANG_OPT_SOMETHING", "1")
    seen.append(key()["layout"])
    assert len(set(seen)) == len(seen)


def test_the_ranks_of_a_model_have_one_layout(engine: Engine) -> None:
    """What tells them apart are fields of the key, so that a wrong rank is called that."""
    made = key()
    ranks = sys.modules["sglang.srt.runtime_context"].get_parallel()
    ranks.tp_rank = ranks.moe_tp_rank = ranks.attn_tp_rank = 1

    other = key()

    assert other["layout"] == made["layout"]
    assert {name for name in made if made[name] != other[name]} == {"tensor_parallel_rank"}


def test_what_does_not_reach_the_weights_leaves_the_layout(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports, folders, ids of one start and CUDA graph sizes: the next start is a hit all the same."""
    made = key()
    engine.set("parallel", nccl_port=4711)
    engine.set("exec.graph", cuda_graph_bs_decode=[1, 2, 4])
    engine.set("model", load_format="auto")
    for name in ("SGLANG_RUN_ID", "SGLANG_DG_CACHE_DIR", "SGLANG_HTTP_PORT", "SGLANG_DP_RANK", "SGLANG_LOG_MS"):
        monkeypatch.setenv(name, "another")
    assert key(dataclasses.replace(MODEL, model_path="/elsewhere/Tiny-1B")) == made


def test_values_that_are_no_json_are_digested_by_what_they_hold(engine: Engine) -> None:
    """An object in a setting counts by class and content, not by its address; a set by its members, not their order."""

    class Precision:
        def __init__(self, bits: int) -> None:
            self.bits = bits

    engine.set("exec.kernel", precision=Precision(8), picked={"a", "b", "c"}, dtype=torch.int8)
    made = key()
    engine.set("exec.kernel", precision=Precision(8), picked={"c", "b", "a"}, dtype=torch.int8)
    assert key() == made
    engine.set("exec.kernel", precision=Precision(4))
    assert key() != made


@pytest.mark.parametrize(
    ("group", "leaf", "value"),
    [
        ("exec.moe", "enable_eplb", True),
        ("exec.moe", "ep_num_redundant_experts", 2),
        ("exec.moe", "init_expert_location", "/placement.json"),
        ("exec.moe", "elastic_ep_backend", "mooncake"),
        ("exec.deterministic", "rl_on_policy_target", "fsdp"),
        ("exec.offload", "cpu_offload_gb", 4),
        ("exec.offload", "offload_group_size", 2),
        ("model", "startup_weight_load_mode", "overlap"),
        ("model", "weight_cache_mode", "client"),
        ("model", "delete_ckpt_after_loading", True),
    ],
)
def test_a_setting_that_moves_weights_is_refused(engine: Engine, group: str, leaf: str, value: Any) -> None:
    """The sentence names the setting and its value; without it there is none."""
    assert layout.refusal(MODEL, "cpu") is None
    if group in ("exec.offload", "exec.deterministic"):
        engine.set("exec", **{group.partition(".")[2]: type(layout_bag(engine))()})
    engine.set(group, **{leaf: value})
    assert (layout.refusal(MODEL, "cpu") or "").startswith(f"{leaf} is {value!r}: ")


def layout_bag(engine: Engine) -> Any:
    return engine.modules["sglang.srt.runtime_context"].get_context().config_bag("exec")


def test_block_fp8_is_taken_unless_its_scales_are_repacked(engine: Engine) -> None:
    """By config before the load: in blocks yes, per tensor, in MXFP4 and with UE8M0 scales no, with what would work."""
    block = dataclasses.replace(MODEL, hf_config=FP8, quantization="fp8")
    assert layout.refusal(block, "cpu") is None
    online = dataclasses.replace(MODEL, quantization="fp8")
    assert "without weight_block_size" in (layout.refusal(online, "cpu") or "")
    experts = dataclasses.replace(block, is_fp4_experts=True)
    assert "MXFP4" in (layout.refusal(experts, "cpu") or "")
    configurer = sys.modules["sglang.srt.layers.deep_gemm_wrapper.configurer"]
    vars(configurer).update(ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_SCALE_UE8M0=True)
    refusal = layout.refusal(block, "cpu") or ""
    assert "SGLANG_ENABLE_JIT_DEEPGEMM=0" in refusal
    assert refusal.endswith(layout.SUPPORTED)
    vars(configurer).update(ENABLE_JIT_DEEPGEMM=False)
    assert layout.refusal(block, "cpu") is None


def test_another_kind_of_device_is_refused(engine: Engine) -> None:
    """NPUs and the like have no shared weights."""
    assert "npu" in (layout.refusal(MODEL, "npu") or "")
