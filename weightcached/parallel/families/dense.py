"""Dense decoders: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3 and Phi-4, OLMo 2 and 3.

Where a checkpoint nests the language model beside a vision tower, the tower and its projector are held whole by every
rank; the language model is cut as the one without a tower is.

OLMo's q_norm and k_norm are over all heads, [H*d] and [K*d]. They are replicated: the norm's statistic is over the full
width, so an engine gathers it (vLLM gathers queries and keys, takes the whole norm and cuts the result).

`defaults` are those of the model classes in transformers, for the keys that a release may leave out: nested configs are
written without what equals the class's default.
"""

from __future__ import annotations

from ..rules import COL, KV_HEADS, Q_HEADS, REPLICATE, ROW, Family, merged
from .parts import AFTER_ATTENTION, ATTENTION, HEAD_NORMS, MLP, PRE_NORMS, Part, decoder

ALL_HEADS = {"num_key_value_heads": "num_attention_heads"}  # releases older than grouped-query attention
LLAVA = ("vision_tower.**", "multi_modal_projector.**")

GEMMA2_NORMS: Part = (*PRE_NORMS, ("{pre_feedforward_layernorm,post_feedforward_layernorm}", REPLICATE))
OLMO2_NORMS: Part = (("{post_attention_layernorm,post_feedforward_layernorm}", REPLICATE),)
FUSED: Part = (
    ("self_attn.qkv_proj", merged(Q_HEADS, KV_HEADS, KV_HEADS)),
    ("mlp.gate_up_proj", merged(COL, COL)),
    ("mlp.down_proj", ROW),
)

LLAMA = decoder("Llama", ATTENTION, MLP, PRE_NORMS, defaults=ALL_HEADS)
MISTRAL_DEFAULTS = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
MISTRAL = decoder("Mistral", ATTENTION, MLP, PRE_NORMS, defaults=MISTRAL_DEFAULTS)
# Not tied unless config.json says so, as the releases are; the class of transformers 5 alone would tie them.
MISTRAL3 = decoder(
    "Mistral 3",
    ATTENTION,
    MLP,
    PRE_NORMS,
    prefix="language_model.model.",
    head="language_model.lm_head",
    outside=LLAVA,
    defaults=MISTRAL_DEFAULTS,
)

QWEN2 = decoder("Qwen2", ATTENTION, MLP, PRE_NORMS)
QWEN2_VL = decoder(
    "Qwen2-VL",
    ATTENTION,
    MLP,
    PRE_NORMS,
    outside=("visual.**",),
    defaults={"num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80},
)
QWEN3 = decoder("Qwen3", ATTENTION, HEAD_NORMS, MLP, PRE_NORMS, defaults={"head_dim": 128})
QWEN3_VL = decoder(
    "Qwen3-VL",
    ATTENTION,
    HEAD_NORMS,
    MLP,
    PRE_NORMS,
    prefix="model.language_model.",
    outside=("model.visual.**",),
    defaults={"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "num_hidden_layers": 32},
)

GEMMA_DEFAULTS = {"head_dim": 256}
GEMMA3_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "num_hidden_layers": 26}
GEMMA = decoder("Gemma", ATTENTION, MLP, PRE_NORMS, tied=True, defaults=GEMMA_DEFAULTS)
GEMMA2 = decoder("Gemma 2", ATTENTION, MLP, GEMMA2_NORMS, tied=True, defaults=GEMMA_DEFAULTS)
GEMMA3 = decoder("Gemma 3", ATTENTION, HEAD_NORMS, MLP, GEMMA2_NORMS, tied=True, defaults=GEMMA3_DEFAULTS)
GEMMA3_NESTED = decoder(
    "Gemma 3 with vision",
    ATTENTION,
    HEAD_NORMS,
    MLP,
    GEMMA2_NORMS,
    prefix="language_model.model.",
    head="language_model.lm_head",
    outside=LLAVA,
    tied=True,
    defaults=GEMMA3_DEFAULTS,
)

# Phi-4 has Phi-3's class and names; its multimodal variant, with adapters inside its layers, does not.
PHI3 = decoder("Phi-3", FUSED, AFTER_ATTENTION, PRE_NORMS, defaults=ALL_HEADS)
OLMO2 = decoder("OLMo 2", ATTENTION, HEAD_NORMS, MLP, OLMO2_NORMS, defaults=ALL_HEADS)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Mistral3ForConditionalGeneration": MISTRAL3,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_VL,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3_NESTED,
    "Phi3ForCausalLM": PHI3,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2,
}
