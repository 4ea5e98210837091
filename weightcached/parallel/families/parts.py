"""Parts that many families share: the rules of one layer, and a decoder's family around them.

Names are those in the checkpoint. A part's patterns are relative to a layer; `decoder` puts the layer in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..rules import COL, KV_HEADS, Q_HEADS, REPLICATE, ROW, VOCAB, Family, Kind, Rule, expert

Part = tuple[tuple[str, Kind], ...]

ROTARY = "self_attn.rotary_emb.inv_freq"  # a buffer that old releases saved
AFTER_ATTENTION: Part = (("self_attn.o_proj", Q_HEADS.on_input()), (ROTARY, REPLICATE))
ATTENTION: Part = (
    ("self_attn.q_proj", Q_HEADS),
    ("self_attn.{k_proj,v_proj}", KV_HEADS),
    *AFTER_ATTENTION,
)
HEAD_NORMS: Part = (("self_attn.{q_norm,k_norm}", REPLICATE),)
MLP: Part = (("mlp.{gate_proj,up_proj}", COL), ("mlp.down_proj", ROW))
PRE_NORMS: Part = (("{input_layernorm,post_attention_layernorm}", REPLICATE),)
EXPERTS: Part = (
    ("mlp.gate", REPLICATE),  # the router, with the bias that some models add to its scores
    ("mlp.experts.*.{gate_proj,up_proj}", expert(COL)),
    ("mlp.experts.*.down_proj", expert(ROW)),
)


def shared_expert(name: str) -> Part:
    """Experts that every token passes: cut like a dense layer, under expert parallel too."""
    return ((f"{name}.{{gate_proj,up_proj}}", COL), (f"{name}.down_proj", ROW))


def decoder(
    name: str,
    *parts: Part,
    prefix: str = "model.",
    head: str = "lm_head",
    outside: Sequence[str] = (),
    tied: bool = False,
    uncast: Sequence[str] = (),
    defaults: Mapping[str, int | str] | None = None,
) -> Family:
    """A decoder whose names begin with `prefix`: an embedding, layers made of `parts`, a norm and a head.

    `outside`: patterns of what is not the language model, vision towers and their projectors. Every rank of every
    stage holds them whole: engines differ in whether and how they cut them. `uncast` is relative to a layer.
    """
    layer = f"{prefix}layers.*."
    own = tuple(Rule(layer + pattern, kind) for part in parts for pattern, kind in part)
    ends = (Rule(f"{prefix}embed_tokens", VOCAB), Rule(f"{prefix}norm", REPLICATE), Rule(head, VOCAB))
    return Family(
        name=name,
        rules=(*own, *ends, *(Rule(pattern, REPLICATE) for pattern in outside)),
        layers=f"{prefix}layers.",
        first=(f"{prefix}embed_tokens",),
        last=(f"{prefix}norm", head),
        embedding=f"{prefix}embed_tokens.weight",
        head=f"{head}.weight",
        tied=tied,
        uncast=tuple(layer + pattern for pattern in (ROTARY, *uncast)),
        defaults=defaults or {},
    )
