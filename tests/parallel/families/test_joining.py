"""The check that the families' tests rest on: it notices a plan that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.parallel.families import checkpoints, joining
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import ShardSlices, Slice, plan_slices

Shards = list[dict[str, Slice]]


def swap(shards: Shards, name: str, one: int, other: int) -> None:
    shards[one][name], shards[other][name] = shards[other][name], shards[one][name]


def swap_heads(shards: Shards) -> None:
    swap(shards, "model.layers.0.self_attn.k_proj.weight", 0, 2)


def unequal_replicas(shards: Shards) -> None:
    shards[1]["model.layers.0.self_attn.k_proj.weight"] = shards[2]["model.layers.0.self_attn.k_proj.weight"]


def swap_columns(shards: Shards) -> None:
    swap(shards, "model.layers.0.self_attn.o_proj.weight", 3, 4)


def lose_a_tensor(shards: Shards) -> None:
    del shards[5]["model.layers.2.input_layernorm.weight"]


def lose_a_part(shards: Shards) -> None:
    name = "model.embed_tokens.weight"
    shards[0][name] = shards[0][name]._replace(parts=())


def one_too_many(shards: Shards) -> None:
    shards[0]["model.something"] = shards[0]["model.norm.weight"]._replace(name="model.something")


@pytest.mark.parametrize(
    "damage", [swap_heads, unequal_replicas, swap_columns, lose_a_tensor, lose_a_part, one_too_many]
)
def test_a_damaged_plan_is_noticed(damage: Callable[[Shards], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices in the wrong rank, unequal replicas, a tensor, a part or a byte range too few, a tensor too many."""
    qwen3_moe = checkpoints.qwen3_moe()

    def damaged(*arguments: Any) -> list[ShardSlices]:
        shards = [{piece.name: piece for piece in shard.slices} for shard in plan_slices(*arguments)]
        damage(shards)
        return [ShardSlices(tuple(shard.values())) for shard in shards]

    joining.joins(qwen3_moe, Parallel(tensor=8), (3,))
    monkeypatch.setattr(joining, "plan_slices", damaged)

    with pytest.raises((AssertionError, KeyError)):
        joining.joins(qwen3_moe, Parallel(tensor=8), (3,))


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_an_expert_at_the_wrong_rank_is_noticed(placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placement is not only complete: each expert is where its engine looks for it."""
    qwen3_moe, parallel = checkpoints.qwen3_moe(), Parallel(tensor=4, expert=True, placement=placement)
    other = {"linear": "round_robin", "round_robin": "linear"}[placement]

    def misplaced(ranges: Any, config: Any, _: Parallel) -> Any:
        return plan_slices(ranges, config, Parallel(tensor=4, expert=True, placement=other))  # type: ignore[arg-type]

    joining.joins(qwen3_moe, parallel, (3,))
    monkeypatch.setattr(joining, "plan_slices", misplaced)

    with pytest.raises((AssertionError, KeyError)):
        joining.joins(qwen3_moe, parallel, (3,))
