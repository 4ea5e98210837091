"""The sizes of a parallel model, its ranks in order, and which layers each pipeline stage holds. Pure numbers.

world = data x pipeline x tensor          data slowest, tensor fastest: vLLM's order
stage = the data x tensor ranks that hold the same layers; experts are spread over exactly these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Placement = Literal["linear", "round_robin"]
LayerSplit = Literal["vllm", "transformers"]


@dataclass(frozen=True, slots=True)
class Parallel:
    """The sizes of one model. `ValueError` with one sentence for sizes that cannot be.

    `expert`: whole experts are spread over the data x tensor ranks of a stage, instead of each being cut. `placement`:
    which ones a rank gets, neighbours ("linear") or every n-th ("round_robin"). `layers`: whose way the stages share
    the layers, since engines give the remainder of an uneven division to different stages, or how many each one has.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    placement: Placement = "linear"
    layers: LayerSplit | tuple[int, ...] = "vllm"

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} parallel size must be a whole number of at least 1, found {value!r}")
        if self.placement not in get_args(Placement):
            choices = ", ".join(get_args(Placement))
            raise ValueError(f"expert placement must be one of {choices}, found {self.placement!r}")
        if isinstance(self.layers, str) and self.layers in get_args(LayerSplit):
            return
        if not isinstance(self.layers, tuple):
            choices = ", ".join(get_args(LayerSplit))
            raise ValueError(
                f"pipeline layers must be one of {choices} or the layers of each stage, found {self.layers!r}"
            )
        if not all(type(count) is int and count >= 1 for count in self.layers):
            shown = ", ".join(map(str, self.layers))
            raise ValueError(f"every pipeline stage needs at least 1 layer, found {shown}")
        if len(self.layers) != self.pipeline:
            raise ValueError(
                f"pipeline layers are given for {len(self.layers)} stages, pipeline parallel size is {self.pipeline}"
            )

    @property
    def world(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def moe_size(self) -> int:
        """Ranks of one stage, over which its experts are cut or spread."""
        return self.data * self.tensor

    def ranks(self) -> tuple[Rank, ...]:
        return tuple(
            Rank(self, tensor, pipeline, data)
            for data in range(self.data)
            for pipeline in range(self.pipeline)
            for tensor in range(self.tensor)
        )

    def stage_layers(self, total: int) -> tuple[tuple[int, int], ...]:
        """The range [first, last) of each stage of a model of `total` layers.

        "vllm": the remainder goes one layer each to the stages before the last, backwards. "transformers": all of it
        to the last stage. `ValueError` when explicit counts do not add up to `total`, or a stage would be empty.
        """
        counts = self._layer_counts(total)
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    def _layer_counts(self, total: int) -> list[int]:
        if not isinstance(self.layers, str):
            if sum(self.layers) != total:
                raise ValueError(
                    f"pipeline layers {', '.join(map(str, self.layers))} add up to {sum(self.layers)}, "
                    f"the model has {total} layers"
                )
            return list(self.layers)
        base, remainder = divmod(total, self.pipeline)
        if not base:
            raise ValueError(f"{total} layers do not fill {self.pipeline} pipeline stages")
        counts = [base] * self.pipeline
        if self.layers == "transformers":
            counts[-1] += remainder
        else:
            for stage in range(self.pipeline - 1 - remainder, self.pipeline - 1):
                counts[stage] += 1
        return counts

    def experts_of(self, total: int, moe_rank: int) -> range:
        """The experts of `total` that rank `moe_rank` of a stage holds under expert parallel, in order."""
        if self.placement == "round_robin":
            return range(moe_rank, total, self.moe_size)
        base, remainder = divmod(total, self.moe_size)
        start = moe_rank * base + min(moe_rank, remainder)
        return range(start, start + base + (moe_rank < remainder))

    def owner_of(self, expert: int, total: int) -> int:
        """The rank of a stage that holds `expert` of `total`: the inverse of `experts_of`."""
        if self.placement == "round_robin":
            return expert % self.moe_size
        base, remainder = divmod(total, self.moe_size)
        larger = remainder * (base + 1)  # experts on the ranks that have one more
        return expert // (base + 1) if expert < larger else remainder + (expert - larger) // base


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: its place in each of the three dimensions of `parallel`."""

    parallel: Parallel
    tensor: int
    pipeline: int
    data: int

    @property
    def moe_size(self) -> int:
        return self.parallel.moe_size

    @property
    def moe_rank(self) -> int:
        """Its place among the ranks of its stage."""
        return self.data * self.parallel.tensor + self.tensor
