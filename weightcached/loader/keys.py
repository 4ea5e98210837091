"""The keys of what a load makes: one for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checkpoint.digest import json_digest
from ..checkpoint.fileset import main_dtype
from ..shard.key import ShardKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checkpoint.fileset import Checkpoint
    from ..parallel.ranks import Parallel
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
    cast_to = {piece.name: piece.dtype for shard in shards for piece in shard.slices}
    held = main_dtype((cast_to.get(tensor.name, tensor.dtype), tensor.nbytes) for tensor in checkpoint.tensors())
    quantization = checkpoint.quantization
    return [
        ShardKey(
            content=content,
            architecture=checkpoint.architecture,
            dtype=held,
            cast=dtype,
            quantization=str(quantization.get("quant_method", "unnamed")) if quantization else None,
            quantization_digest=json_digest(quantization) if quantization else None,
            tensor_parallel_size=parallel.tensor,
            tensor_parallel_rank=rank.tensor,
            pipeline_parallel_size=parallel.pipeline,
            pipeline_parallel_rank=rank.pipeline,
            layers=shard.layers,
            expert_parallel_size=rank.moe_size if parallel.expert else 1,
            expert_parallel_rank=rank.moe_rank if parallel.expert else 0,
            expert_placement=parallel.placement if parallel.expert else None,
            config=json_digest(checkpoint.config) if parallel.world > 1 else None,
            rules=json_digest(list(shard.rules)) if shard.rules and parallel.world > 1 else None,
            data_parallel_size=parallel.data,
            data_parallel_rank=rank.data,
        )
        for rank, shard in zip(parallel.ranks(), shards, strict=True)
    ]
