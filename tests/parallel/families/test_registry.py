"""families: which family an architecture has; what is left out on purpose; every rule is about names that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.parallel.families.checkpoints import EVERY, Checkpoint, attention, config, linear, norms, outer
from weightcached.errors import CannotCut, UnknownArchitecture
from weightcached.parallel.families import family_of
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.rules import Patterns, compile_pattern
from weightcached.parallel.slices import plan_slices

# Rules about names that only some releases have, and none of the small checkpoints.
RARE = {"self_attn.rotary_emb.inv_freq"}


@pytest.mark.parametrize("name", EVERY)
def test_every_rule_names_something(name: str) -> None:
    """No rule of a family is dead: each is the first to match some name of one of its checkpoints."""
    family = family_of(EVERY[name]().config)
    assert family is not None
    same = [make().entries for make in EVERY.values() if family_of(make().config) == family]
    patterns = Patterns([rule.pattern for rule in family.rules])
    used = {found[0] for entries in same for tensor in entries if (found := patterns.find(tensor)) is not None}

    dead = [rule.pattern for index, rule in enumerate(family.rules) if index not in used]
    # A tied model without a head has a rule for one, which some checkpoints hold all the same.
    assert [pattern for pattern in dead if not pattern.endswith((*RARE, "lm_head"))] == []


@pytest.mark.parametrize("name", EVERY)
def test_ends_and_layers_have_the_families_names(name: str) -> None:
    """The embedding and the first stage, the norm and the last one, and the layers are found in the checkpoint."""
    checkpoint = EVERY[name]()
    family = family_of(checkpoint.config)
    assert family is not None and family.layers is not None
    assert family.embedding in checkpoint.entries
    assert f"{family.layers}0.input_layernorm.weight" in checkpoint.entries or name in ("olmo2", "olmo3")
    for pattern in (*family.first, *family.last, *family.uncast):
        compile_pattern(pattern)
    assert Patterns(family.first).find(family.embedding) and family.head and Patterns(family.last).find(family.head)


# Modules of attention; sinks are a parameter of self_attn itself.
HEADS = r"self_attn\.(q_proj|q_b_proj|kv_b_proj|qkv_proj|o_proj)$|self_attn$"


@pytest.mark.parametrize("name", EVERY)
def test_heads_bind_attention_alone(name: str) -> None:
    """With 2 heads for 4 ranks each projection of attention is refused, though its rows divide; the rest is as with 8.

    Key/value heads may be fewer than ranks. DeepSeek's projections up from a low rank have query heads.
    """
    checkpoint = EVERY[name]()
    text = checkpoint.config.get("text_config", checkpoint.config)
    few = {**text, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}  # as many rows as before
    config = {**checkpoint.config, "text_config": few} if text is not checkpoint.config else few
    modules = {
        re.sub(r"\.\d+\.", ".*.", key).rpartition(".")[0]: key.rpartition(".")[0]
        for key in checkpoint.entries
        if re.search(r"\.layers\.[01]\.", key) and not key.startswith("vision")
    }

    for module in filter(re.compile(HEADS).search, modules.values()):
        own = {key: entry for key, entry in checkpoint.entries.items() if key.rpartition(".")[0] == module}
        with pytest.raises(CannotCut, match=r"2 attention heads") as refused:
            plan_slices(Checkpoint({}, own).ranges(), config, Parallel(tensor=4))
        assert refused.value.parameter.startswith(module)
    bound = re.compile(rf"{HEADS}|[kv]_proj$")
    rest = {key: entry for key, entry in checkpoint.entries.items() if not bound.search(key.rpartition(".")[0])}
    ranges = Checkpoint({}, rest).ranges()
    assert plan_slices(ranges, config, Parallel(tensor=4)) == plan_slices(ranges, checkpoint.config, Parallel(tensor=4))


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"architectures": None},
        {"architectures": []},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": ["BertModel"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"]},  # experts of two orientations, under one name
    ],
)
def test_what_is_not_known_has_no_family(found: dict[str, Any]) -> None:
    """Nothing is inferred from a name that is like another, or from one of several."""
    assert family_of(found) is None


def linear_attention() -> Checkpoint:
    """Qwen3-Next: one layer of linear attention, whose projections are interleaved by groups of heads, one ordinary."""
    entries = outer()
    for layer in ("model.layers.0.", "model.layers.1."):
        entries |= norms(layer, ["input_layernorm", "post_attention_layernorm"])
        entries |= linear(f"{layer}mlp.gate", 4, 64) | linear(f"{layer}mlp.experts.0.up_proj", 32, 64)
    entries |= attention("model.layers.1.")
    entries |= linear("model.layers.0.linear_attn.in_proj_qkvz", 96, 64)
    entries |= linear("model.layers.0.linear_attn.in_proj_ba", 8, 64)
    entries |= {"model.layers.0.linear_attn.A_log": ("F32", (4,))}
    more = {"model_type": "qwen3_next", "num_experts": 4, "num_hidden_layers": 2}
    return Checkpoint(config("Qwen3NextForCausalLM", **more), entries)


@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(pipeline=2), Parallel(data=2, expert=True)])
def test_linear_attention_is_refused(parallel: Parallel) -> None:
    """Qwen3-Next has no family, and transformers' plan for it is no substitute: it is refused by name."""
    qwen3_next = linear_attention()

    with pytest.raises(UnknownArchitecture, match="Qwen3NextForCausalLM"):
        plan_slices(qwen3_next.ranges(), qwen3_next.config, parallel)


def test_linear_attention_alone_is_loaded_whole() -> None:
    """One rank needs no rules."""
    qwen3_next = linear_attention()

    (shard,) = plan_slices(qwen3_next.ranges(), qwen3_next.config, Parallel())

    assert [piece.name for piece in shard.slices] == list(qwen3_next.entries)
