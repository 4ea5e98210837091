"""families/parts.py: what `decoder` makes of parts, and names that only some releases have."""

from __future__ import annotations

import pytest

from tests.parallel.families.checkpoints import Checkpoint, dense
from weightcached.parallel.families.parts import HEAD_NORMS, MLP, decoder, shared_expert
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.rules import COL, REPLICATE, ROW, VOCAB, Rule
from weightcached.parallel.slices import plan_slices


def test_a_decoder_puts_its_prefix_before_every_part() -> None:
    """Layers, ends and what keeps its type are named as in the checkpoint; what is outside has its own names."""
    family = decoder(
        "Mine", MLP, prefix="text.", head="text_head", outside=("sight.**",), tied=True, uncast=("mlp.down_proj",)
    )

    assert family.rules == (
        Rule("text.layers.*.mlp.{gate_proj,up_proj}", COL),
        Rule("text.layers.*.mlp.down_proj", ROW),
        Rule("text.embed_tokens", VOCAB),
        Rule("text.norm", REPLICATE),
        Rule("text_head", VOCAB),
        Rule("sight.**", REPLICATE),
    )
    assert (family.layers, family.first, family.last) == (
        "text.layers.",
        ("text.embed_tokens",),
        ("text.norm", "text_head"),
    )
    assert (family.embedding, family.head, family.tied) == ("text.embed_tokens.weight", "text_head.weight", True)
    assert "text.layers.*.mlp.down_proj" in family.uncast


def test_a_shared_expert_is_cut_like_a_dense_layer() -> None:
    """It is no expert to expert parallel: no kind of it spreads."""
    rules = dict(shared_expert("mlp.shared_experts"))

    assert rules == {"mlp.shared_experts.{gate_proj,up_proj}": COL, "mlp.shared_experts.down_proj": ROW}
    assert dict(HEAD_NORMS) == {"self_attn.{q_norm,k_norm}": REPLICATE}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_rotary_buffers_of_old_releases_are_whole_and_keep_their_type(dtype: str | None) -> None:
    """Early Llama files hold inv_freq in float32 in every layer; float16 would round its small values away."""
    llama = dense("LlamaForCausalLM")
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    old = Checkpoint(llama.config, {**llama.entries, name: ("F32", (8,))})

    for shard in plan_slices(old.ranges(), old.config, Parallel(tensor=2), dtype=dtype):
        (found,) = [piece for piece in shard.slices if piece.name == name]
        assert (found.dtype, found.shape) == ("F32", (8,))


def test_scales_of_a_quantised_cache_are_whole() -> None:
    """One number for keys and one for values in a layer, under any of the names that releases use."""
    llama = dense("LlamaForCausalLM")
    layer = "model.layers.0.self_attn."
    names = [f"{layer}{name}" for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "attn.k_scale")]
    more = dict.fromkeys(names, ("F32", ()))
    scaled = Checkpoint(llama.config, llama.entries | more)

    for shard in plan_slices(scaled.ranges(), scaled.config, Parallel(tensor=8)):
        assert {piece.name: piece.shape for piece in shard.slices if piece.name in names} == dict.fromkeys(names, ())
