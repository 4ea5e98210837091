"""Llama 4, alone and beside its vision model, which every rank holds whole.

Stacked experts are transposed: gate_up_proj [E, hidden, 2I], gate then up on the last axis, and down_proj
[E, I, hidden]. FP8 releases have a name per expert instead, [out, in] each. The norm of queries and keys has no
weights.
"""

from __future__ import annotations

from ..rules import COL, REPLICATE, ROW, Family, even, expert, merged, stacked
from .parts import ATTENTION, PRE_NORMS, Part, decoder, shared_expert

FEED_FORWARD: Part = (
    ("feed_forward.router", REPLICATE),
    ("feed_forward.experts.gate_up_proj", stacked(merged(COL, COL), axis=2)),
    ("feed_forward.experts.down_proj", stacked(even(), axis=1)),
    ("feed_forward.experts.*.{gate_proj,up_proj}", expert(COL)),
    ("feed_forward.experts.*.down_proj", expert(ROW)),
    *shared_expert("feed_forward.shared_expert"),
    ("feed_forward.{gate_proj,up_proj}", COL),
    ("feed_forward.down_proj", ROW),
)
DEFAULTS = {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 48}

LLAMA4 = decoder("Llama 4", ATTENTION, FEED_FORWARD, PRE_NORMS, defaults=DEFAULTS)
LLAMA4_NESTED = decoder(
    "Llama 4 with vision",
    ATTENTION,
    FEED_FORWARD,
    PRE_NORMS,
    prefix="language_model.model.",
    head="language_model.lm_head",
    outside=("vision_model.**", "multi_modal_projector.**"),
    defaults=DEFAULTS,
)

FAMILIES: dict[str, Family] = {
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4_NESTED,
}
