"""Released models by their sizes alone: the tensors of a layer or two, which is all they have, without bytes."""

from __future__ import annotations

from typing import Any

from tests.parallel.families.checkpoints import Checkpoint, Entries, linear
from weightcached.checkpoint.header import TensorRange
from weightcached.parallel.slices import ShardSlices

Model = tuple[list[TensorRange], dict[str, Any]]
BLOCK = 128


def shapes_of(shard: ShardSlices) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.shape for piece in shard.slices}


def parts_of(shard: ShardSlices) -> dict[str, list[tuple[int, int, int]]]:
    """For each tensor where its parts begin, how wide and how many they are: bytes, bytes, count."""
    return {piece.name: [(part.start, part.width, part.rows) for part in piece.parts] for piece in shard.slices}


def fp8(name: str, out: int, in_: int) -> Entries:
    scales = (-(-out // BLOCK), -(-in_ // BLOCK))
    return {f"{name}.weight": ("F8_E4M3", (out, in_)), f"{name}.weight_scale_inv": ("F32", scales)}


def model(config: dict[str, Any], entries: Entries) -> Model:
    return Checkpoint(config, entries).ranges(), config


def llama_3_8b() -> Model:
    layer = "model.layers.0."
    entries = linear("model.embed_tokens", 128256, 4096) | linear("lm_head", 128256, 4096)
    entries |= linear(f"{layer}self_attn.q_proj", 4096, 4096) | linear(f"{layer}self_attn.o_proj", 4096, 4096)
    entries |= linear(f"{layer}self_attn.k_proj", 1024, 4096) | linear(f"{layer}self_attn.v_proj", 1024, 4096)
    entries |= linear(f"{layer}mlp.gate_proj", 14336, 4096) | linear(f"{layer}mlp.up_proj", 14336, 4096)
    entries |= linear(f"{layer}mlp.down_proj", 4096, 14336)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    return model(config, entries)


def experts(prefix: str, count: int, size: int, hidden: int, *, block_fp8: bool) -> Entries:
    project = fp8 if block_fp8 else linear
    found: Entries = {}
    for name in (f"{prefix}experts.{index}." for index in range(count)):
        found |= project(f"{name}gate_proj", size, hidden) | project(f"{name}up_proj", size, hidden)
        found |= project(f"{name}down_proj", hidden, size)
    return found


def qwen3_30b_a3b(*, block_fp8: bool = False) -> Model:
    project = fp8 if block_fp8 else linear
    layer = "model.layers.0."
    entries = linear("model.embed_tokens", 151936, 2048) | linear("lm_head", 151936, 2048)
    entries |= project(f"{layer}self_attn.q_proj", 4096, 2048) | project(f"{layer}self_attn.o_proj", 2048, 4096)
    entries |= project(f"{layer}self_attn.k_proj", 512, 2048) | project(f"{layer}self_attn.v_proj", 512, 2048)
    entries |= linear(f"{layer}mlp.gate", 128, 2048) | experts(f"{layer}mlp.", 128, 768, 2048, block_fp8=block_fp8)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    if block_fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return model(config, entries)


def deepseek_v3() -> Model:
    """A dense layer and one with its 256 experts; all FP8 in blocks but embedding, head and router."""
    entries = linear("model.embed_tokens", 129280, 7168) | linear("lm_head", 129280, 7168)
    for index in (0, 1):
        layer, attention = f"model.layers.{index}.", f"model.layers.{index}.self_attn."
        entries |= fp8(f"{attention}q_a_proj", 1536, 7168) | fp8(f"{attention}q_b_proj", 24576, 1536)
        entries |= fp8(f"{attention}kv_a_proj_with_mqa", 576, 7168) | fp8(f"{attention}kv_b_proj", 32768, 512)
        entries |= fp8(f"{attention}o_proj", 7168, 16384)
        if index == 0:
            entries |= fp8(f"{layer}mlp.gate_proj", 18432, 7168) | fp8(f"{layer}mlp.up_proj", 18432, 7168)
            entries |= fp8(f"{layer}mlp.down_proj", 7168, 18432)
        else:
            entries |= linear(f"{layer}mlp.gate", 256, 7168)
            entries |= experts(f"{layer}mlp.", 256, 2048, 7168, block_fp8=True)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_hidden_layers": 2,
        "num_key_value_heads": 128,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "tie_word_embeddings": False,
    }
    return model(config, entries)


def gpt_oss_120b() -> Model:
    layer, name = "model.layers.0.", "model.layers.0.mlp.experts."
    entries = linear("model.embed_tokens", 201088, 2880) | linear("lm_head", 201088, 2880)
    entries |= linear(f"{layer}self_attn.q_proj", 4096, 2880, bias=True)
    entries |= linear(f"{layer}self_attn.k_proj", 512, 2880, bias=True)
    entries |= linear(f"{layer}self_attn.v_proj", 512, 2880, bias=True)
    entries |= linear(f"{layer}self_attn.o_proj", 2880, 4096, bias=True)
    entries |= {
        f"{layer}self_attn.sinks": ("BF16", (64,)),
        f"{name}gate_up_proj_blocks": ("U8", (128, 5760, 90, 16)),
        f"{name}gate_up_proj_scales": ("U8", (128, 5760, 90)),
        f"{name}gate_up_proj_bias": ("BF16", (128, 5760)),
        f"{name}down_proj_blocks": ("U8", (128, 2880, 90, 16)),
        f"{name}down_proj_scales": ("U8", (128, 2880, 90)),
        f"{name}down_proj_bias": ("BF16", (128, 2880)),
    }
    config = {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 64,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "quantization_config": {"quant_method": "mxfp4"},
        "tie_word_embeddings": False,
    }
    return model(config, entries)
