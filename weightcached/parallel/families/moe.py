"""Decoders with a name per expert: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4 MoE.

Routers are whole on every rank. Shared experts are cut like a dense layer, under expert parallel too. OLMoE's q_norm
and k_norm, over all heads, are replicated as OLMo's are (see `dense`).

Qwen3-VL-MoE is not here: its stacked experts are [E, hidden, 2I] in the releases and [E, 2I, hidden] as transformers 5
saves them, under the same names. Which one a checkpoint has, its user says with `rules`.
"""

from __future__ import annotations

from ..rules import COL, REPLICATE, ROW, Family, expert
from .parts import ATTENTION, EXPERTS, HEAD_NORMS, MLP, PRE_NORMS, Part, decoder, shared_expert

MIXTRAL_EXPERTS: Part = (
    ("block_sparse_moe.gate", REPLICATE),
    ("block_sparse_moe.experts.*.{w1,w3}", expert(COL)),
    ("block_sparse_moe.experts.*.w2", expert(ROW)),
)
QWEN2_SHARED: Part = (*shared_expert("mlp.shared_expert"), ("mlp.shared_expert_gate", REPLICATE))

MIXTRAL = decoder("Mixtral", ATTENTION, MIXTRAL_EXPERTS, PRE_NORMS, defaults={"num_key_value_heads": 8})
QWEN2_MOE = decoder("Qwen2-MoE", ATTENTION, EXPERTS, QWEN2_SHARED, MLP, PRE_NORMS)
QWEN3_MOE = decoder("Qwen3-MoE", ATTENTION, HEAD_NORMS, EXPERTS, MLP, PRE_NORMS)
OLMOE = decoder("OLMoE", ATTENTION, HEAD_NORMS, EXPERTS, PRE_NORMS)
GLM4_MOE = decoder(
    "GLM-4 MoE",
    ATTENTION,
    HEAD_NORMS,
    EXPERTS,
    shared_expert("mlp.shared_experts"),
    MLP,
    PRE_NORMS,
    uncast=("mlp.gate",),  # with e_score_correction_bias: transformers computes the router in float32
)

FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "OlmoeForCausalLM": OLMOE,
    "Glm4MoeForCausalLM": GLM4_MOE,
}
