"""The identity of a shard: which weights, in which layout, cut for which rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT_VERSION = 1  # of slabs and manifests; another number is never attached
STAT_CONTENT = "stat:"  # what `content` begins with where the files are known by their stat tuples alone
GIVEN_UP = "given up"  # how a shard's `digest` in a status begins if it never will be known; the reason follows


@dataclass(frozen=True, slots=True)
class ShardKey:
    """Two shards with equal keys hold the same bytes at the same names.

    `content` is the digest of every byte of the checkpoint. `layout` is "checkpoint" for names and bytes as on disk, or
    an engine's own tag for weights it has processed. `dtype` is the torch name of the element type that holds most of
    the floating-point bytes, `cast` the one that the weights were cast to while loading, None for as they are on disk.
    `layers` is the range [first, last) of this pipeline stage, None for all. Of a rank among several, `config` is the
    digest of config.json, by which it was cut, and `rules` one of the rules where they are not this version's own.
    `compute_capability` and `backends` are set by engine layouts only.
    """

    content: str
    layout: str = "checkpoint"
    architecture: str | None = None
    dtype: str | None = None
    cast: str | None = None
    quantization: str | None = None
    quantization_digest: str | None = None
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    layers: tuple[int, int] | None = None
    expert_parallel_size: int = 1
    expert_parallel_rank: int = 0
    expert_placement: str | None = None
    config: str | None = None
    rules: str | None = None
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    revision: str | None = None
    role: str = "main"
    compute_capability: str | None = None
    backends: str | None = None
    format_version: int = FORMAT_VERSION

    def differences(self, wanted: dict[str, Any]) -> dict[str, list[Any]]:
        """Every field of `wanted` that this key does not match: field -> [wanted, cached].

        `wanted` may come out of JSON, where a tuple is a list.
        """
        cached = {name: _as_json(value) for name, value in asdict(self).items()}
        wanted = {name: _as_json(value) for name, value in wanted.items()}
        return {name: [value, cached.get(name)] for name, value in wanted.items() if cached.get(name) != value}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


KEY_FIELDS: frozenset[str] = frozenset(field.name for field in fields(ShardKey))
