"""The same model in the quantised forms that checkpoints have: FP8 in blocks, by tensor, by channel; 4 bits in groups.

Larger than the other small checkpoints, since what is scaled together cannot be cut: heads of 128, hidden 256, 1024 in
between, so that 8 ranks have 128 of each. 2 layers; the one with experts has 3 in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.parallel.families.checkpoints import Checkpoint, Entries, linear, norms

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, SIZE, VOCAB, LAYERS, EXPERTS = 8, 4, 128, 256, 1024, 200, 2, 3
BLOCK, GROUP, PER_WORD = 128, 32, 8  # elements; 4-bit values in an int32


def fp8_block(name: str, out: int, in_: int) -> Entries:
    scales = (-(-out // BLOCK), -(-in_ // BLOCK))
    return {f"{name}.weight": ("F8_E4M3", (out, in_)), f"{name}.weight_scale_inv": ("BF16", scales)}


def fp8_tensor(name: str, out: int, in_: int) -> Entries:
    scales: Entries = {f"{name}.{scale}": ("F32", (1,)) for scale in ("weight_scale", "input_scale")}
    return {f"{name}.weight": ("F8_E4M3", (out, in_)), **scales}


def fp8_channel(name: str, out: int, in_: int) -> Entries:
    return {f"{name}.weight": ("F8_E4M3", (out, in_)), f"{name}.weight_scale": ("BF16", (out, 1))}


def packed(name: str, out: int, in_: int) -> Entries:
    return {
        f"{name}.weight_packed": ("I32", (out, in_ // PER_WORD)),
        f"{name}.weight_scale": ("BF16", (out, in_ // GROUP)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


def gptq(name: str, out: int, in_: int) -> Entries:
    return {
        f"{name}.qweight": ("I32", (in_ // PER_WORD, out)),
        f"{name}.qzeros": ("I32", (in_ // GROUP, out // PER_WORD)),
        f"{name}.scales": ("F16", (in_ // GROUP, out)),
        f"{name}.g_idx": ("I32", (in_,)),
        f"{name}.bias": ("F16", (out,)),
    }


def awq(name: str, out: int, in_: int) -> Entries:
    return {
        f"{name}.qweight": ("I32", (in_, out // PER_WORD)),
        f"{name}.qzeros": ("I32", (in_ // GROUP, out // PER_WORD)),
        f"{name}.scales": ("F16", (in_ // GROUP, out)),
    }


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


Linear = Callable[[str, int, int], Entries]
SCHEMES: dict[str, tuple[Linear, dict[str, Any]]] = {
    "fp8-block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "fp8-tensor": (fp8_tensor, compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "fp8-channel": (fp8_channel, compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "packed": (packed, compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def quantised(scheme: str, *, moe: bool = False) -> Checkpoint:
    """Qwen3, or Qwen3-MoE, whose projections are quantised; embedding, head, norms and routers are not."""
    project, quantization = SCHEMES[scheme]
    entries = linear("model.embed_tokens", VOCAB, HIDDEN) | linear("lm_head", VOCAB, HIDDEN)
    entries |= norms("model.", ["norm"], HIDDEN)
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        entries |= norms(layer, ["input_layernorm", "post_attention_layernorm"], HIDDEN)
        attention = f"{layer}self_attn."
        entries |= norms(attention, ["q_norm", "k_norm"], HEAD_DIM)
        entries |= project(f"{attention}q_proj", HEADS * HEAD_DIM, HIDDEN)
        entries |= project(f"{attention}k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        entries |= project(f"{attention}v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        entries |= project(f"{attention}o_proj", HIDDEN, HEADS * HEAD_DIM)
        if moe:
            entries |= linear(f"{layer}mlp.gate", EXPERTS, HIDDEN)
        for mlp in [f"{layer}mlp.experts.{index}." for index in range(EXPERTS)] if moe else [f"{layer}mlp."]:
            entries |= project(f"{mlp}gate_proj", SIZE, HIDDEN) | project(f"{mlp}up_proj", SIZE, HIDDEN)
            entries |= project(f"{mlp}down_proj", HIDDEN, SIZE)
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": SIZE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "quantization_config": quantization,
    }
    return Checkpoint(config | ({"num_experts": EXPERTS, "moe_intermediate_size": SIZE} if moe else {}), entries)
