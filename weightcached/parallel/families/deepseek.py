"""DeepSeek V2, V3, R1 (V3's class) and V3.2: multi-head latent attention, and experts beside shared ones.

The low-rank projections down (q_a_proj, kv_a_proj_with_mqa) and their norms are whole on every rank; the projections up
from them are cut by query heads: q_b_proj or, without a low rank for the query, q_proj has nope + rope rows a head,
kv_b_proj nope + v rows. V3.2's indexer, which chooses the tokens to attend to, is whole on every rank. Layers past
num_hidden_layers predict further tokens for drafting; they are skipped.
"""

from __future__ import annotations

from ..rules import Q_HEADS, REPLICATE, Family
from .parts import AFTER_ATTENTION, EXPERTS, MLP, PRE_NORMS, Part, decoder, shared_expert

LATENT_ATTENTION: Part = (
    ("self_attn.{q_a_proj,kv_a_proj_with_mqa,q_a_layernorm,kv_a_layernorm}", REPLICATE),
    ("self_attn.{q_proj,q_b_proj,kv_b_proj}", Q_HEADS),
    *AFTER_ATTENTION,
)
SHARED = shared_expert("mlp.shared_experts")
INDEXER: Part = (("self_attn.indexer.{wq_b,wk,weights_proj,k_norm}", REPLICATE),)

DEFAULTS = {"kv_lora_rank": 512}

# What transformers computes in float32 keeps its type: the router, e_score_correction_bias with it, and of the indexer
# the norm and the weights of its heads.
DEEPSEEK = decoder(
    "DeepSeek V2 and V3",
    LATENT_ATTENTION,
    EXPERTS,
    SHARED,
    MLP,
    PRE_NORMS,
    uncast=("mlp.gate",),
    defaults=DEFAULTS,
)
DEEPSEEK_V32 = decoder(
    "DeepSeek V3.2",
    LATENT_ATTENTION,
    INDEXER,
    EXPERTS,
    SHARED,
    MLP,
    PRE_NORMS,
    uncast=("mlp.gate", "self_attn.indexer.{k_norm,weights_proj}"),
    defaults=DEFAULTS,
)

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
}
