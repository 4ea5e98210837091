"""The whole plan: ranks, stages, experts, ties, casts, the user's rules, and refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

import pytest

from tests.parallel.tensors import filled, tensor
from weightcached.checkpoint.header import TensorRange
from weightcached.errors import CannotCut, CheckpointError, SliceError, UnknownArchitecture
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import ShardSlices, Slice, plan_slices

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, LAYERS = 32, 8, 4, 4, 64, 96, 3
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5}
NEW: dict[str, Any] = LLAMA | {"architectures": ["NewForCausalLM"], "model_type": "new"}


def linear(name: str, out: int, inner: int, quantized: bool = False) -> list[TensorRange]:
    """A layer in bfloat16, or in FP8 with block scales and a static scale for its inputs."""
    if not quantized:
        return [tensor(f"{name}.weight", (out, inner))]
    return [
        tensor(f"{name}.weight", (out, inner), "F8_E4M3"),
        tensor(f"{name}.weight_scale_inv", (-(-out // 128), -(-inner // 128)), "F32"),
        tensor(f"{name}.input_scale", (), "F32"),
    ]


def llama(
    layers: int = LAYERS, head: bool = True, experts: int = 0, inner: int = INNER, fp8: bool = False
) -> list[TensorRange]:
    """The tensors of a small Llama, or of a small Mixtral with so many experts."""
    found = [tensor("model.embed_tokens.weight", (VOCAB, HIDDEN)), tensor("model.norm.weight", (HIDDEN,))]
    found += [tensor("lm_head.weight", (VOCAB, HIDDEN))] if head else []
    for number in range(layers):
        layer = f"model.layers.{number}"
        found += [
            tensor(f"{layer}.{name}.weight", (HIDDEN,)) for name in ("input_layernorm", "post_attention_layernorm")
        ]
        for name, out in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found += linear(f"{layer}.self_attn.{name}_proj", out * DIM, HIDDEN)
        found += linear(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * DIM)
        mlp = [(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")]
        if experts:
            found += linear(f"{layer}.block_sparse_moe.gate", experts, HIDDEN)
            mlp = [(f"{layer}.block_sparse_moe.experts.{expert}", "w1", "w3", "w2") for expert in range(experts)]
        for prefix, gate, up, down in mlp:
            found += linear(f"{prefix}.{gate}", inner, HIDDEN, fp8) + linear(f"{prefix}.{up}", inner, HIDDEN, fp8)
            found += linear(f"{prefix}.{down}", HIDDEN, inner, fp8)
    return found


def by_name(shard: ShardSlices) -> dict[str, Slice]:
    return {found.name: found for found in shard.slices}


def test_one_rank_has_every_tensor_as_it_is() -> None:
    """Of any architecture, quantized in any way, with or without a config.json: name, type, shape and all bytes."""
    tensors = [
        tensor("x.weight", (4096, 1), "U8"),
        tensor("x.weight.quant_state.bitsandbytes__nf4", (90,), "U8"),
        tensor("h.77.odd", (4, 6), "F6_E2M3"),
        tensor("empty", (0, 5)),
        tensor("number", (), "I64"),
    ]

    for config in ({}, {"architectures": ["NeverSeen"], "quantization_config": {"quant_method": "bitsandbytes"}}):
        (shard,) = plan_slices(tensors, config, Parallel())

        assert [(found.name, found.dtype, found.shape) for found in shard.slices] == [
            (one.name, one.dtype, one.shape) for one in tensors
        ]
        for found, one in zip(shard.slices, tensors, strict=True):
            source = Random(1).randbytes(one.nbytes)
            assert filled(found.parts, source, one.nbytes) == source
        assert (shard.aliases, shard.layers, shard.skipped) == ({}, None, ())


def test_slices_come_in_the_order_of_the_tensors() -> None:
    """Of every rank, whatever order the checkpoint has: the loader reads files front to back."""
    tensors = llama(experts=5)
    Random(2).shuffle(tensors)
    order = {one.name: index for index, one in enumerate(tensors)}

    for parallel in (Parallel(tensor=2, pipeline=3), Parallel(tensor=2, expert=True)):
        for shard in plan_slices(tensors, MOE, parallel):
            places = [order[found.name] for found in shard.slices]
            assert places == sorted(places)
            assert len(set(places)) == len(places) > 0


def test_every_tensor_of_every_layer_is_on_its_stage() -> None:
    """3 stages of one layer each: a rank has its layer, and the ends what belongs to them."""
    shards = plan_slices(llama(), LLAMA, Parallel(tensor=2, pipeline=3))

    assert [shard.layers for shard in shards] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]
    names = [set(by_name(shard)) for shard in shards]
    assert set().union(*names) == {one.name for one in llama()}
    for stage in range(3):
        assert names[2 * stage] == names[2 * stage + 1]
        assert {name.split(".")[2] for name in names[2 * stage] if ".layers." in name} == {str(stage)}
    assert ["model.embed_tokens.weight" in held for held in names[::2]] == [True, False, False]
    assert ["lm_head.weight" in held for held in names[::2]] == ["model.norm.weight" in held for held in names[::2]]
    assert ["lm_head.weight" in held for held in names[::2]] == [False, False, True]


def test_data_ranks_repeat_everything_but_experts() -> None:
    """With 2 x 2 ranks attention is cut in two and experts in four; expert parallel gives each expert to one rank."""
    cut = plan_slices(llama(experts=5), MOE, Parallel(tensor=2, data=2))
    spread = plan_slices(llama(experts=5), MOE, Parallel(tensor=2, data=2, expert=True))
    query, expert = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.block_sparse_moe.experts.{}.w1.weight"

    for shards in (cut, spread):
        held = [by_name(shard)[query] for shard in shards]
        assert held[0] == held[2] != held[1] == held[3]
    assert [by_name(shard)[expert.format(3)].shape for shard in cut] == [(INNER // 4, HIDDEN)] * 4
    owners = [[rank for rank, shard in enumerate(spread) if expert.format(e) in by_name(shard)] for e in range(5)]
    assert owners == [[0], [0], [1], [2], [3]]
    assert by_name(spread[2])[expert.format(3)].shape == (INNER, HIDDEN)


def test_expert_parallel_keeps_the_single_numbers_of_all_experts() -> None:
    """Every rank has all static input scales; weights and block scales are on one rank each."""
    tensors = llama(experts=5, inner=256, fp8=True)
    config = MOE | {"quantization_config": {"quant_method": "fp8"}}

    shards = plan_slices(tensors, config, Parallel(tensor=2, expert=True))

    held = [by_name(shard) for shard in shards]
    for one in tensors:
        if "experts" in one.name:
            assert sum(one.name in names for names in held) == (2 if one.name.endswith("input_scale") else 1)


def test_layers_for_drafting_are_skipped_when_there_are_several_ranks() -> None:
    """A single rank has them; of several none has, whether or not a rule knows their names."""
    tensors = [*llama(layers=4), tensor("model.layers.3.eh_proj.weight", (HIDDEN, 2 * HIDDEN))]
    extra = tuple(one.name for one in tensors if one.name.startswith("model.layers.3."))

    (alone,) = plan_slices(tensors, LLAMA, Parallel())
    shards = plan_slices(tensors, LLAMA, Parallel(tensor=2))

    assert set(extra) <= set(by_name(alone))
    assert alone.skipped == ()
    for shard in shards:
        assert shard.skipped == extra
        assert not set(extra) & set(by_name(shard))


def test_a_tied_head_is_another_name_for_the_embedding() -> None:
    """Where the head would be: on the last stage, which then has the embedding too; with one rank as well."""
    tied = LLAMA | {"tie_word_embeddings": True}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"

    for parallel in (Parallel(), Parallel(tensor=2), Parallel(pipeline=3)):
        shards = plan_slices(llama(head=False), tied, parallel)
        assert [shard.aliases for shard in shards if shard.aliases] == [{head: embedding}] * parallel.tensor
        assert shards[-1].aliases
        assert all(embedding in by_name(shard) for shard in shards if shard.aliases)
    assert [embedding in by_name(shard) for shard in plan_slices(llama(head=False), tied, Parallel(pipeline=3))] == [
        True,
        False,
        True,
    ]


def test_a_redundant_head_is_loaded_beside_the_embedding() -> None:
    """A checkpoint that has both although they are tied gives both, without an alias."""
    for shard in plan_slices(llama(), LLAMA | {"tie_word_embeddings": True}, Parallel(tensor=2)):
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(by_name(shard))
        assert not shard.aliases


def test_a_missing_head_is_refused_where_something_is_cut() -> None:
    """Untied and absent is a damaged checkpoint; a single rank gets what is there."""
    assert not plan_slices(llama(head=False), LLAMA, Parallel())[0].aliases
    with pytest.raises(CheckpointError, match=r"has no lm_head\.weight, and tie_word_embeddings is not set"):
        plan_slices(llama(head=False), LLAMA, Parallel(tensor=2))
    neither = [one for one in llama(head=False) if "embed" not in one.name]
    with pytest.raises(CheckpointError, match=r"neither lm_head\.weight nor model\.embed_tokens\.weight"):
        plan_slices(neither, LLAMA | {"tie_word_embeddings": True}, Parallel(tensor=2))


def test_a_cast_changes_types_and_nothing_else() -> None:
    """Plain weights get the type; shapes and bytes to read are those without a cast; FP8 and its scales stay."""
    tensors = llama(inner=256, fp8=True)
    config = LLAMA | {"quantization_config": {"quant_method": "fp8"}}

    for parallel in (Parallel(), Parallel(tensor=2)):
        plain, cast = (plan_slices(tensors, config, parallel, dtype=dtype) for dtype in (None, "float16"))
        for before, after in zip(chain(*(s.slices for s in plain)), chain(*(s.slices for s in cast)), strict=True):
            assert after == before._replace(dtype=after.dtype)
            assert after.dtype == ("F16" if before.dtype == "BF16" else before.dtype)
    with pytest.raises(SliceError, match="dtype must be one of bfloat16, float16, float32, found 'int8'"):
        plan_slices(tensors, config, Parallel(), dtype="int8")


def test_rules_of_the_user_make_an_unknown_architecture_known() -> None:
    """Cut as they say, joined again to the original; without the rules it is refused by name, with the next step."""
    rules = [
        "model.layers.*.self_attn.{q_proj,k_proj,v_proj}: col",
        "model.layers.*.self_attn.o_proj: row",
        "model.layers.*.mlp.{gate,up}_proj: col",
        "model.layers.*.mlp.down_proj: row",
        "{model.embed_tokens,lm_head}: vocab",
        "model.**: replicate",
        "model.layers.*: layers",
        "model.embed_tokens: first",
        "{model.norm,lm_head}: last",
    ]

    known = plan_slices(llama(), LLAMA, Parallel(tensor=2, pipeline=3))
    assert {shard.rules for shard in known} == {()}
    ours = tuple(replace(shard, rules=tuple(rules)) for shard in known)
    assert plan_slices(llama(), NEW, Parallel(tensor=2, pipeline=3), rules=rules) == ours
    with pytest.raises(UnknownArchitecture, match=r"NewForCausalLM: no slicing rules .* give rules = \[...\] for it"):
        plan_slices(llama(), NEW, Parallel(tensor=2, pipeline=3))
    with pytest.raises(SliceError, match="NewForCausalLM: no rule says where its layers are"):
        plan_slices(llama(), NEW, Parallel(tensor=2, pipeline=3), rules=rules[:6])


def test_rules_of_the_user_come_before_the_familys() -> None:
    """One projection kept whole in a family that cuts it."""
    rule = "model.layers.1.mlp.down_proj: replicate"

    shard = by_name(plan_slices(llama(), LLAMA, Parallel(tensor=2), rules=[rule])[0])

    assert [shard[f"model.layers.{layer}.mlp.down_proj.weight"].shape for layer in range(3)] == [
        (HIDDEN, INNER // 2),
        (HIDDEN, INNER),
        (HIDDEN, INNER // 2),
    ]


def test_rules_that_do_nothing_are_errors() -> None:
    """A typing error in a pattern would leave the family's rule in force; so would a kind that is none."""
    for rule in ("model.layer.*.mlp.down_proj: row", "model.layer.*: layers", "model.nrm: last", "model.*: layers"):
        with pytest.raises(SliceError, match="matches no tensor of the checkpoint") as caught:
            plan_slices(llama(), LLAMA, Parallel(tensor=2), rules=[rule])
        assert rule in str(caught.value)
    with pytest.raises(SliceError, match="'colwise' is no kind"):
        plan_slices(llama(), LLAMA, Parallel(), rules=["model.norm: colwise"])


def test_a_parameter_without_a_rule_is_refused_by_name() -> None:
    """A known family with something new in a layer: nothing about it is guessed."""
    tensors = [*llama(), tensor("model.layers.1.mlp.new.weight", (HIDDEN,))]

    with pytest.raises(
        UnknownArchitecture, match=r"LlamaForCausalLM: no rule says how model\.layers\.1\.mlp\.new\.weight"
    ):
        plan_slices(tensors, LLAMA, Parallel(tensor=2))
    assert len(plan_slices(tensors, LLAMA, Parallel())[0].slices) == len(tensors)


def test_a_refusal_names_the_next_smaller_size_that_fits_the_model() -> None:
    """Three ranks do not divide 8 heads, two do; with FP8 blocks of 128 rows 512 can be cut in 4, not in 8."""
    drafting = tensor(f"model.layers.{LAYERS}.eh_proj.weight", (HIDDEN, 2 * HIDDEN))  # which no rule knows
    with pytest.raises(CannotCut) as heads:
        plan_slices([*llama(), drafting], LLAMA, Parallel(tensor=3))
    with pytest.raises(CannotCut) as blocks:
        plan_slices(
            llama(inner=512, fp8=True), LLAMA | {"quantization_config": {"quant_method": "fp8"}}, Parallel(tensor=8)
        )

    assert heads.value.largest == 2
    assert blocks.value.largest == 4
    assert blocks.value.parameter == "model.layers.0.mlp.gate_proj.weight_scale_inv"
    assert str(blocks.value) == (
        "model.layers.0.mlp.gate_proj.weight_scale_inv cannot be cut: "
        "[0, 64) of 512 does not fall on multiples of 128; "
        "the next smaller tensor_parallel that fits the model: 4"
    )


def test_a_slip_of_the_finger_is_refused_at_once() -> None:
    """A size far too large is not tried rank by rank on the way down to one that fits."""
    with pytest.raises(CannotCut) as caught:
        plan_slices(llama(), LLAMA, Parallel(tensor=20_001))

    assert caught.value.largest == 8


def test_a_refusal_without_a_size_that_fits_says_none() -> None:
    """Five experts cannot be spread over 2 x 3 data and tensor ranks, nor over 6 data ranks alone."""
    with pytest.raises(CannotCut, match=r"5 experts leave nothing for some of 12 ranks.* the model: none") as caught:
        plan_slices(llama(experts=5), MOE, Parallel(tensor=2, data=6, expert=True))

    assert caught.value.largest is None
    assert "(with data_parallel 6 no smaller one fits, with 1 tensor_parallel 4 does)" in str(caught.value)


@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(pipeline=2), Parallel(tensor=2, expert=True)])
def test_a_checkpoint_with_parts_missing_is_refused_where_something_is_cut(parallel: Parallel) -> None:
    """A layer that is not there, an expert that is not there; a single rank gets what is there."""
    without_layer = [one for one in llama() if not one.name.startswith("model.layers.1.")]
    assert len(plan_slices(without_layer, LLAMA, Parallel())[0].slices) == len(without_layer)
    with pytest.raises(CheckpointError, match=r"of the 3 layers, model\.layers\.\*, 1 have no tensor, number 1 first"):
        plan_slices(without_layer, LLAMA, parallel)
    with pytest.raises(CheckpointError, match=r"of the 12 experts model\.layers\.0\..*experts\.\*, 7 have no tensor"):
        plan_slices(llama(experts=5), MOE | {"num_local_experts": 12}, parallel)


@pytest.mark.parametrize(("heads", "kv_heads", "parameter"), [(8, 8, "k_proj"), (8, None, "k_proj"), (16, 4, "q_proj")])
def test_a_head_is_never_cut(heads: int, kv_heads: int | None, parameter: str) -> None:
    """More heads in config.json, or by the class's default, than the rows have: they would be parts of heads."""
    config = LLAMA | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": DIM}

    with pytest.raises(CannotCut, match=rf"is not {16 if heads == 16 else 8} .* heads of {DIM},") as no:
        plan_slices(llama(), config, Parallel(tensor=8))

    assert no.value.parameter == f"model.layers.0.self_attn.{parameter}.weight"
    assert no.value.largest == 1


def test_an_unknown_quantization_fits_one_rank() -> None:
    """What cannot be cut can still be held whole, and the refusal says both."""
    tensors = [*llama(), tensor("model.layers.0.mlp.up_proj.weight.absmax", (4,), "F32")]
    config = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}

    with pytest.raises(CannotCut, match=r"up_proj\.weight\.absmax cannot .*\(quantization: 'bitsandbytes'\).*: 1$"):
        plan_slices(tensors, config, Parallel(tensor=2))


def test_what_all_ranks_hold_is_one_object() -> None:
    """Slices that are equal on all ranks are shared: a plan for many ranks stays small."""
    norms = [by_name(shard)["model.norm.weight"] for shard in plan_slices(llama(), LLAMA, Parallel(tensor=4))]

    assert all(norm is norms[0] for norm in norms)


def test_a_plan_grows_with_the_tensors_and_not_with_their_layers() -> None:
    """Alike modules are worked out once: the parts of the hundredth layer are the very parts of the first."""
    config = LLAMA | {"num_hidden_layers": 100}

    shard = by_name(plan_slices(llama(layers=100), config, Parallel(tensor=2))[1])

    for name in ("self_attn.q_proj", "mlp.down_proj"):
        assert shard[f"model.layers.99.{name}.weight"].parts is shard[f"model.layers.0.{name}.weight"].parts
