"""GPT-OSS, in bfloat16 and in mxfp4: stacked experts whose gate and up rows alternate, and attention sinks.

bfloat16   gate_up_proj [E, hidden, 2I]        down_proj [E, I, hidden]
mxfp4      gate_up_proj_blocks [E, 2I, hidden/32, 16], _scales [E, 2I, hidden/32]
           down_proj_blocks [E, hidden, I/32, 16], _scales [E, hidden, I/32]
both       gate_up_proj_bias [E, 2I]           down_proj_bias [E, hidden]

In mxfp4 32 values share a scale, so I is cut in groups of 32: ceil(groups/T) for each rank and fewer for the last
(2880 over 4 ranks: 736, 736, 736, 672). gate_up_proj and its bias follow that cut, two rows for each value. The bias of
down_proj is added by the first rank alone: the others hold zeros, since the ranks' results are summed.
"""

from __future__ import annotations

from typing import Any

from ..rules import FIRST_ONLY, Q_HEADS, REPLICATE, Family, even, interleaved2, stacked
from .parts import ATTENTION, PRE_NORMS, Part, decoder

GROUP = 32  # values that share a scale in mxfp4

ATTENTION_AND_ROUTER: Part = (
    *ATTENTION,
    ("self_attn.sinks", Q_HEADS),
    ("mlp.router", REPLICATE),
    ("mlp.experts.down_proj_bias", stacked(FIRST_ONLY)),
)
BF16_EXPERTS: Part = (
    ("mlp.experts.gate_up_proj", stacked(interleaved2(), axis=2)),
    ("mlp.experts.gate_up_proj_bias", stacked(interleaved2(), axis=1)),
    ("mlp.experts.down_proj", stacked(even(), axis=1)),
)
MXFP4_EXPERTS: Part = (
    ("mlp.experts.gate_up_proj_{blocks,scales}", stacked(interleaved2(GROUP, uneven=True), axis=1)),
    ("mlp.experts.gate_up_proj_bias", stacked(interleaved2(GROUP, uneven=True), axis=1)),
    ("mlp.experts.down_proj_{blocks,scales}", stacked(even(uneven=True), axis=2)),  # axis 2 counts groups
)

DEFAULTS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
BF16 = decoder("GPT-OSS", ATTENTION_AND_ROUTER, BF16_EXPERTS, PRE_NORMS, defaults=DEFAULTS)
MXFP4 = decoder("GPT-OSS mxfp4", ATTENTION_AND_ROUTER, MXFP4_EXPERTS, PRE_NORMS, defaults=DEFAULTS)


def gpt_oss(config: dict[str, Any]) -> Family:
    """The family of a GPT-OSS checkpoint: the bias of gate_up_proj is cut as the weights are, and config.json says how.

    A checkpoint whose weights and config.json disagree has names that the family does not know, and is refused.
    """
    quantization = config.get("quantization_config")
    return MXFP4 if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4" else BF16
