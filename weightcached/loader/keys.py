"""The keys of what a load makes: one for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checkpoint.digest import json_digest
from ..checkpoint.fileset import main_dtype
from ..shard.key import ShardKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checkpoint.fileset import Checkpoint
    from ..parallel.ranks import Parallel, Rank
    from ..parallel.slices import ShardSlices


def keys_of(
    checkpoint: Checkpoint,
    parallel: Parallel,
    shards: Sequence[ShardSlices],
    content: str,
    *,
    dtype: str | None = None,
) -> list[ShardKey]:
    """The key of each rank's shard. `content` is the digest of the files, `dtype` what the config casts to.

    The key's own `dtype` is that after the cast. Rules matter to a model of several ranks alone, and only there count.
    """
    quantization = checkpoint.quantization
    common: dict[str, Any] = {
        "content": content,
        "architecture": checkpoint.architecture,
        "dtype": loaded_dtype(checkpoint, shards),
        "cast": dtype,
        "quantization": str(quantization.get("quant_method", "unnamed")) if quantization else None,
        "quantization_digest": json_digest(quantization) if quantization else None,
        "expert_placement": parallel.placement if parallel.expert else None,
    }
    if parallel.world > 1:
        rules = shards[0].rules  # of all ranks
        common |= {"config": json_digest(checkpoint.config), "rules": json_digest(list(rules)) if rules else None}
    return [
        ShardKey(**common, **rank_fields(rank), layers=shard.layers)
        for rank, shard in zip(parallel.ranks(), shards, strict=True)
    ]


def loaded_dtype(checkpoint: Checkpoint, shards: Sequence[ShardSlices]) -> str | None:
    """`main_dtype` of the model as it is loaded, after the cast."""
    cast_to = {piece.name: piece.dtype for shard in shards for piece in shard.slices}
    return main_dtype((cast_to.get(tensor.name, tensor.dtype), tensor.nbytes) for tensor in checkpoint.tensors())


def rank_fields(rank: Rank) -> dict[str, Any]:
    """The fields of the key, all ints, that say which of the model's ranks it is."""
    sizes, expert = rank.parallel, rank.parallel.expert
    return {
        "tensor_parallel_size": sizes.tensor,
        "tensor_parallel_rank": rank.tensor,
        "pipeline_parallel_size": sizes.pipeline,
        "pipeline_parallel_rank": rank.pipeline,
        "expert_parallel_size": rank.moe_size if expert else 1,
        "expert_parallel_rank": rank.moe_rank if expert else 0,
        "data_parallel_size": sizes.data,
        "data_parallel_rank": rank.data,
    }
