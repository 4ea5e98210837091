"""Small random checkpoints with the names, dtypes and shapes that each family has on disk.

`test_names.py` holds the unquantised ones against what transformers' own classes save. Sizes: 8 query and 4 key/value
heads of 16, hidden 64, a vocabulary of 100, 3 layers, 6 experts; block-FP8 ones are larger, since a block is 128 wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightcached.checkpoint.header import TensorRange
from weightcached.shard.dtypes import DTYPES

Entry = tuple[str, tuple[int, ...]]  # dtype, shape
Entries = dict[str, Entry]

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB, LAYERS, EXPERTS = 8, 4, 16, 64, 96, 100, 3, 6
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": HEADS,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Checkpoint:
    """config.json, and each tensor's dtype and shape by its name."""

    config: dict[str, Any]
    entries: Entries

    def ranges(self) -> list[TensorRange]:
        """The tensors as a header lists them, one after the other."""
        found, begin = [], 0
        for name, (dtype, shape) in self.entries.items():
            end = begin + nbytes(dtype, shape)
            found.append(TensorRange(name, dtype, shape, begin, end))
            begin = end
        return found

    def random(self) -> dict[str, torch.Tensor]:
        """Random bytes of each tensor, as uint8 with the shape on disk and the last dimension counted in bytes."""
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randint(0, 256, in_bytes(dtype, shape), dtype=torch.uint8, generator=generator)
            for name, (dtype, shape) in self.entries.items()
        }

    def but(self, **changes: Any) -> Checkpoint:
        """The same tensors under another config."""
        return Checkpoint({**self.config, **changes}, self.entries)


def in_bytes(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last dimension counted in bytes; that of a scalar is one dimension of its bytes."""
    *most, last = shape or (1,)
    assert last * DTYPES[dtype].bits % 8 == 0
    return (*most, last * DTYPES[dtype].bits // 8)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return torch.Size(in_bytes(dtype, shape)).numel()


def linear(name: str, out: int, in_: int, *, bias: bool = False, dtype: str = "BF16") -> Entries:
    """An ordinary linear layer, [out, in]."""
    found: Entries = {f"{name}.weight": (dtype, (out, in_))}
    if bias:
        found[f"{name}.bias"] = (dtype, (out,))
    return found


def norms(prefix: str, names: Iterable[str], size: int = HIDDEN) -> Entries:
    return {f"{prefix}{name}.weight": ("BF16", (size,)) for name in names}


def outer(prefix: str = "model.", head: str | None = "lm_head", *, vocab: int = VOCAB, hidden: int = HIDDEN) -> Entries:
    """Embedding, last norm and, unless `head` is None, the head."""
    found = {**linear(f"{prefix}embed_tokens", vocab, hidden), **norms(prefix, ["norm"], hidden)}
    if head is not None:
        found |= linear(head.removesuffix("."), vocab, hidden)
    return found


def attention(prefix: str, *, bias: bool = False, o_bias: bool = False, kv_heads: int = KV_HEADS) -> Entries:
    """q, k, v and o of one layer."""
    q, kv = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    return {
        **linear(f"{prefix}self_attn.q_proj", q, HIDDEN, bias=bias),
        **linear(f"{prefix}self_attn.k_proj", kv, HIDDEN, bias=bias),
        **linear(f"{prefix}self_attn.v_proj", kv, HIDDEN, bias=bias),
        **linear(f"{prefix}self_attn.o_proj", HIDDEN, q, bias=o_bias),
    }


def mlp(prefix: str, size: int = INTERMEDIATE, hidden: int = HIDDEN) -> Entries:
    """gate, up and down of one layer or one expert."""
    return {
        **linear(f"{prefix}gate_proj", size, hidden),
        **linear(f"{prefix}up_proj", size, hidden),
        **linear(f"{prefix}down_proj", hidden, size),
    }


def experts(prefix: str, size: int = INTERMEDIATE, count: int = EXPERTS) -> Entries:
    """Experts with a name each."""
    found: Entries = {}
    for index in range(count):
        found |= mlp(f"{prefix}experts.{index}.", size)
    return found


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **more}


PRE = ("input_layernorm", "post_attention_layernorm")


def dense(
    architecture: str,
    *,
    layer_norms: Iterable[str] = PRE,
    head_norm: int = 0,
    bias: bool = False,
    prefix: str = "model.",
    head: str | None = "lm_head",
    **more: Any,
) -> Checkpoint:
    """Llama and its likes; `head_norm` is the size of q_norm and k_norm, 0 for none."""
    entries = outer(prefix, head)
    for layer in (f"{prefix}layers.{index}." for index in range(LAYERS)):
        entries |= attention(layer, bias=bias) | mlp(f"{layer}mlp.") | norms(layer, layer_norms)
        if head_norm:
            entries |= norms(f"{layer}self_attn.", ["q_norm", "k_norm"], head_norm)
    return Checkpoint(config(architecture, **more), entries)


GEMMA = (*PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
OLMO2 = ("post_attention_layernorm", "post_feedforward_layernorm")


def whole_norms(prefix: str) -> Entries:
    """OLMo's norms over all heads."""
    return {
        **norms(f"{prefix}self_attn.", ["q_norm"], HEADS * HEAD_DIM),
        **norms(f"{prefix}self_attn.", ["k_norm"], KV_HEADS * HEAD_DIM),
    }


def olmo2(architecture: str = "Olmo2ForCausalLM") -> Checkpoint:
    base = dense(architecture, layer_norms=OLMO2)
    more: Entries = {}
    for index in range(LAYERS):
        more |= whole_norms(f"model.layers.{index}.")
    return Checkpoint(base.config, base.entries | more)


def phi3() -> Checkpoint:
    entries = outer()
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        entries |= linear(f"{layer}self_attn.qkv_proj", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        entries |= linear(f"{layer}self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        entries |= linear(f"{layer}mlp.gate_up_proj", 2 * INTERMEDIATE, HIDDEN)
        entries |= linear(f"{layer}mlp.down_proj", HIDDEN, INTERMEDIATE) | norms(layer, PRE)
    return Checkpoint(config("Phi3ForCausalLM"), entries)


def tower(names: Iterable[str]) -> Entries:
    """A few tensors of a vision tower; 10 and 7 divide by no number of ranks."""
    return dict.fromkeys(names, ("BF16", (10, 7)))


def nested(base: Checkpoint, architecture: str, names: Iterable[str]) -> Checkpoint:
    """A language model inside one that also sees: its sizes are in `text_config`."""
    text = {key: value for key, value in base.config.items() if key != "architectures"}
    return Checkpoint({"architectures": [architecture], "text_config": text}, base.entries | tower(names))


def gemma3_nested() -> Checkpoint:
    base = dense("", layer_norms=GEMMA, head_norm=HEAD_DIM, prefix="language_model.model.", head=None)
    names = ["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"]
    names += ["multi_modal_projector.mm_input_projection_weight"]
    found = nested(base, "Gemma3ForConditionalGeneration", names)
    return found.but(text_config={**found.config["text_config"], "tie_word_embeddings": True})


def mistral3() -> Checkpoint:
    base = dense("", prefix="language_model.model.", head="language_model.lm_head")
    names = ["vision_tower.transformer.layers.0.attention.q_proj.weight", "multi_modal_projector.linear_1.weight"]
    return nested(base, "Mistral3ForConditionalGeneration", names)


def qwen3_vl() -> Checkpoint:
    base = dense("", head_norm=HEAD_DIM, prefix="model.language_model.")
    return nested(base, "Qwen3VLForConditionalGeneration", ["model.visual.blocks.0.attn.qkv.weight"])


def qwen2_vl(architecture: str) -> Checkpoint:
    """Its sizes are at the top of config.json, and its language model has no prefix of its own."""
    base = dense(architecture, bias=True)
    return Checkpoint(base.config, base.entries | tower(["visual.blocks.0.attn.qkv.weight"]))


def mixtral() -> Checkpoint:
    entries = outer()
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        entries |= attention(layer) | norms(layer, PRE) | linear(f"{layer}block_sparse_moe.gate", EXPERTS, HIDDEN)
        for expert in (f"{layer}block_sparse_moe.experts.{index}." for index in range(EXPERTS)):
            entries |= linear(f"{expert}w1", INTERMEDIATE, HIDDEN) | linear(f"{expert}w3", INTERMEDIATE, HIDDEN)
            entries |= linear(f"{expert}w2", HIDDEN, INTERMEDIATE)
    return Checkpoint(config("MixtralForCausalLM", num_local_experts=EXPERTS), entries)


MOE_INTERMEDIATE, SHARED = 32, 48


def qwen2_moe() -> Checkpoint:
    """The middle layer is dense, as `mlp_only_layers` may say."""
    entries = outer()
    for index, layer in ((index, f"model.layers.{index}.") for index in range(LAYERS)):
        entries |= attention(layer, bias=True) | norms(layer, PRE)
        if index == 1:
            entries |= mlp(f"{layer}mlp.")
            continue
        entries |= linear(f"{layer}mlp.gate", EXPERTS, HIDDEN) | experts(f"{layer}mlp.", MOE_INTERMEDIATE)
        entries |= mlp(f"{layer}mlp.shared_expert.", SHARED) | linear(f"{layer}mlp.shared_expert_gate", 1, HIDDEN)
    more = {"moe_intermediate_size": MOE_INTERMEDIATE, "shared_expert_intermediate_size": SHARED}
    return Checkpoint(config("Qwen2MoeForCausalLM", num_experts=EXPERTS, mlp_only_layers=[1], **more), entries)


def qwen3_moe() -> Checkpoint:
    """The middle layer is dense here too."""
    entries = outer()
    for index, layer in ((index, f"model.layers.{index}.") for index in range(LAYERS)):
        entries |= attention(layer) | norms(layer, PRE) | norms(f"{layer}self_attn.", ["q_norm", "k_norm"], HEAD_DIM)
        if index == 1:
            entries |= mlp(f"{layer}mlp.")
        else:
            entries |= linear(f"{layer}mlp.gate", EXPERTS, HIDDEN) | experts(f"{layer}mlp.", MOE_INTERMEDIATE)
    more = {"moe_intermediate_size": MOE_INTERMEDIATE, "mlp_only_layers": [1]}
    return Checkpoint(config("Qwen3MoeForCausalLM", num_experts=EXPERTS, **more), entries)


def olmoe() -> Checkpoint:
    entries = outer()
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        entries |= attention(layer) | norms(layer, PRE) | whole_norms(layer)
        entries |= linear(f"{layer}mlp.gate", EXPERTS, HIDDEN) | experts(f"{layer}mlp.")
    return Checkpoint(config("OlmoeForCausalLM", num_experts=EXPERTS), entries)


def mtp(prefix: str) -> Entries:
    """What a layer for multi-token prediction has beside the names of an ordinary one."""
    return {
        **norms(prefix, ["enorm", "hnorm", "shared_head.norm"]),
        **linear(f"{prefix}eh_proj", HIDDEN, 2 * HIDDEN),
        **linear(f"{prefix}shared_head.head", VOCAB, HIDDEN),
        **linear(f"{prefix}embed_tokens", VOCAB, HIDDEN),
    }


def glm4_moe() -> Checkpoint:
    """One dense layer, two with experts, and one behind them for multi-token prediction."""
    entries = outer()
    for index, layer in ((index, f"model.layers.{index}.") for index in range(LAYERS + 1)):
        entries |= attention(layer, bias=True) | norms(layer, PRE)
        entries |= norms(f"{layer}self_attn.", ["q_norm", "k_norm"], HEAD_DIM)
        entries |= mlp(f"{layer}mlp.") if index == 0 else sigmoid_experts(layer)
    entries |= mtp(f"model.layers.{LAYERS}.")
    more = {"moe_intermediate_size": MOE_INTERMEDIATE, "first_k_dense_replace": 1, "n_shared_experts": 1}
    more |= {"num_nextn_predict_layers": 1, "attention_bias": True, "use_qk_norm": True}
    return Checkpoint(config("Glm4MoeForCausalLM", n_routed_experts=EXPERTS, **more), entries)


def sigmoid_experts(layer: str) -> Entries:
    """Router with its correction, experts and the shared one."""
    return {
        **linear(f"{layer}mlp.gate", EXPERTS, HIDDEN),
        f"{layer}mlp.gate.e_score_correction_bias": ("F32", (EXPERTS,)),
        **experts(f"{layer}mlp.", MOE_INTERMEDIATE),
        **mlp(f"{layer}mlp.shared_experts.", MOE_INTERMEDIATE),
    }


def mla(layer: str, *, low_rank_q: bool = True) -> Entries:
    """Multi-head latent attention."""
    attn, rank, query_rank = f"{layer}self_attn.", MLA["kv_lora_rank"], MLA["q_lora_rank"]
    query = HEADS * (MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"])
    entries = linear(f"{attn}kv_a_proj_with_mqa", rank + MLA["qk_rope_head_dim"], HIDDEN)
    entries |= norms(attn, ["kv_a_layernorm"], rank)
    entries |= linear(f"{attn}kv_b_proj", HEADS * (MLA["qk_nope_head_dim"] + MLA["v_head_dim"]), rank)
    entries |= linear(f"{attn}o_proj", HIDDEN, HEADS * MLA["v_head_dim"])
    if not low_rank_q:
        return entries | linear(f"{attn}q_proj", query, HIDDEN)
    entries |= linear(f"{attn}q_a_proj", query_rank, HIDDEN) | norms(attn, ["q_a_layernorm"], MLA["q_lora_rank"])
    return entries | linear(f"{attn}q_b_proj", query, MLA["q_lora_rank"])


def indexer(layer: str) -> Entries:
    """DeepSeek V3.2's choice of tokens to attend to: 4 heads of 16."""
    name = f"{layer}self_attn.indexer."
    return {
        **linear(f"{name}wq_b", 64, MLA["q_lora_rank"]),
        **linear(f"{name}wk", 16, HIDDEN),
        **linear(f"{name}weights_proj", 4, HIDDEN),
        f"{name}k_norm.weight": ("F32", (16,)),
        f"{name}k_norm.bias": ("F32", (16,)),
    }


def deepseek(version: str) -> Checkpoint:
    """V2 (softmax router), V2-Lite (no low-rank query), V3 (with a layer for multi-token prediction), V32 (indexer)."""
    entries = outer()
    layers = LAYERS + (version in ("V3", "V32"))
    for index, layer in ((index, f"model.layers.{index}.") for index in range(layers)):
        entries |= mla(layer, low_rank_q=version != "V2-Lite") | norms(layer, PRE)
        entries |= indexer(layer) if version == "V32" else {}
        entries |= mlp(f"{layer}mlp.") if index == 0 else sigmoid_experts(layer)
    if layers > LAYERS:
        entries |= mtp(f"model.layers.{LAYERS}.")
    else:
        entries = {name: entry for name, entry in entries.items() if "e_score" not in name}
    more: dict[str, Any] = {**MLA, "n_routed_experts": EXPERTS, "moe_intermediate_size": MOE_INTERMEDIATE}
    more |= {"n_shared_experts": 1, "num_nextn_predict_layers": layers - LAYERS}
    if version == "V2-Lite":
        more["q_lora_rank"] = None
    return Checkpoint(config(f"Deepseek{version.removesuffix('-Lite')}ForCausalLM", **more), entries)


OSS_INTERMEDIATE = 480  # 15 groups of 32: 8 and 7 for 2 ranks, 4, 4, 4, 3 for 4


def gpt_oss(*, mxfp4: bool, size: int = OSS_INTERMEDIATE) -> Checkpoint:
    count = EXPERTS
    entries = outer()
    for layer in (f"model.layers.{index}." for index in range(LAYERS)):
        entries |= attention(layer, bias=True, o_bias=True) | norms(layer, PRE)
        entries[f"{layer}self_attn.sinks"] = ("BF16", (HEADS,))
        entries |= linear(f"{layer}mlp.router", count, HIDDEN, bias=True)
        name = f"{layer}mlp.experts."
        if mxfp4:
            entries[f"{name}gate_up_proj_blocks"] = ("U8", (count, 2 * size, HIDDEN // 32, 16))
            entries[f"{name}gate_up_proj_scales"] = ("U8", (count, 2 * size, HIDDEN // 32))
            entries[f"{name}down_proj_blocks"] = ("U8", (count, HIDDEN, size // 32, 16))
            entries[f"{name}down_proj_scales"] = ("U8", (count, HIDDEN, size // 32))
        else:
            entries[f"{name}gate_up_proj"] = ("BF16", (count, HIDDEN, 2 * size))
            entries[f"{name}down_proj"] = ("BF16", (count, size, HIDDEN))
        entries[f"{name}gate_up_proj_bias"] = ("BF16", (count, 2 * size))
        entries[f"{name}down_proj_bias"] = ("BF16", (count, HIDDEN))
    more: dict[str, Any] = {"num_local_experts": count, "intermediate_size": size}
    if mxfp4:
        skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        more["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return Checkpoint(config("GptOssForCausalLM", **more), entries)


def llama4(*, per_expert: bool = False, prefix: str = "model.", head: str = "lm_head") -> Checkpoint:
    """A dense layer, then layers with experts: stacked and transposed, or by name as in FP8 releases."""
    entries = outer(prefix, head)
    for index, layer in ((index, f"{prefix}layers.{index}.") for index in range(LAYERS)):
        entries |= attention(layer) | norms(layer, PRE)
        name = f"{layer}feed_forward."
        if index == 0:
            entries |= mlp(name, 80)
            continue
        entries |= linear(f"{name}router", EXPERTS, HIDDEN) | mlp(f"{name}shared_expert.")
        if per_expert:
            entries |= experts(name)
        else:
            entries[f"{name}experts.gate_up_proj"] = ("BF16", (EXPERTS, HIDDEN, 2 * INTERMEDIATE))
            entries[f"{name}experts.down_proj"] = ("BF16", (EXPERTS, INTERMEDIATE, HIDDEN))
    more = {"intermediate_size_mlp": 80, "moe_layers": list(range(1, LAYERS))}
    return Checkpoint(config("Llama4ForCausalLM", num_local_experts=EXPERTS, **more), entries)


def llama4_nested(*, per_expert: bool = False) -> Checkpoint:
    base = llama4(per_expert=per_expert, prefix="language_model.model.", head="language_model.lm_head")
    names = ["vision_model.model.layers.0.self_attn.q_proj.weight", "multi_modal_projector.linear_1.weight"]
    return nested(base, "Llama4ForConditionalGeneration", names)


DENSE: dict[str, Callable[[], Checkpoint]] = {
    "llama": partial(dense, "LlamaForCausalLM"),
    "mistral": partial(dense, "MistralForCausalLM"),
    "mistral3": mistral3,
    "qwen2": partial(dense, "Qwen2ForCausalLM", bias=True),
    "qwen2-vl": partial(qwen2_vl, "Qwen2VLForConditionalGeneration"),
    "qwen2.5-vl": partial(qwen2_vl, "Qwen2_5_VLForConditionalGeneration"),
    "qwen3": partial(dense, "Qwen3ForCausalLM", head_norm=HEAD_DIM),
    "qwen3-vl": qwen3_vl,
    "gemma": partial(dense, "GemmaForCausalLM", head=None, tie_word_embeddings=True),
    "gemma2": partial(dense, "Gemma2ForCausalLM", layer_norms=GEMMA, head=None, tie_word_embeddings=True),
    "gemma3": partial(
        dense, "Gemma3ForCausalLM", layer_norms=GEMMA, head_norm=HEAD_DIM, head=None, tie_word_embeddings=True
    ),
    "gemma3-nested": gemma3_nested,
    "phi3": phi3,
    "olmo2": olmo2,
    "olmo3": partial(olmo2, "Olmo3ForCausalLM"),
}
MOE: dict[str, Callable[[], Checkpoint]] = {
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "qwen3-moe": qwen3_moe,
    "olmoe": olmoe,
    "glm4-moe": glm4_moe,
}
DEEPSEEK: dict[str, Callable[[], Checkpoint]] = {
    "deepseek-v2": partial(deepseek, "V2"),
    "deepseek-v2-lite": partial(deepseek, "V2-Lite"),
    "deepseek-v3": partial(deepseek, "V3"),
    "deepseek-v32": partial(deepseek, "V32"),
}
GPT_OSS: dict[str, Callable[[], Checkpoint]] = {
    "gpt-oss": partial(gpt_oss, mxfp4=False),
    "gpt-oss-mxfp4": partial(gpt_oss, mxfp4=True),
}
LLAMA4: dict[str, Callable[[], Checkpoint]] = {
    "llama4": llama4,
    "llama4-a-name-each": partial(llama4, per_expert=True),
    "llama4-nested": llama4_nested,
    "llama4-nested-a-name-each": partial(llama4_nested, per_expert=True),
}
EVERY = {**DENSE, **MOE, **DEEPSEEK, **GPT_OSS, **LLAMA4}
