"""Every rank's slices, filled from random bytes and joined again: what comes out is the checkpoint, byte for byte.

Written from the words of the engines' rules and not from weightcached's: which parameter is cut how stands here a
second time, and joining is a few calls of torch. Bytes are uint8 tensors whose last dimension counts bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import torch

from tests.parallel.families.checkpoints import Checkpoint, in_bytes, nbytes
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import Slice, plan_slices

# Sizes that the small checkpoints divide by, and how many of the 3 layers each pipeline stage holds.
MATRIX: dict[str, tuple[Parallel, tuple[int, ...]]] = {
    "alone": (Parallel(), (3,)),
    "T2": (Parallel(tensor=2), (3,)),
    "T4": (Parallel(tensor=4), (3,)),
    "T8": (Parallel(tensor=8), (3,)),  # two ranks for each key/value head
    "T2-P2": (Parallel(tensor=2, pipeline=2), (2, 1)),
    "T2-P2-transformers": (Parallel(tensor=2, pipeline=2, layers="transformers"), (1, 2)),
    "P3": (Parallel(pipeline=3), (1, 1, 1)),
    "T2-P2-own": (Parallel(tensor=2, pipeline=2, layers=(1, 2)), (1, 2)),
    "T2-D2": (Parallel(tensor=2, data=2), (3,)),
    "T4-EP": (Parallel(tensor=4, expert=True), (3,)),  # 6 experts: 2, 2, 1, 1
    "T4-EP-round-robin": (Parallel(tensor=4, expert=True, placement="round_robin"), (3,)),
    "T2-P2-D2-EP": (Parallel(tensor=2, pipeline=2, data=2, expert=True), (2, 1)),
    "D2-EP-round-robin": (Parallel(data=2, expert=True, placement="round_robin"), (3,)),
}

# The first pattern that is found in a name says how it is cut: out (rows), in (columns), by heads, ...
CUTS = (
    (r"vision_|visual\.|multi_modal_projector", "whole"),
    (r"(embed_tokens|lm_head)\.", "vocab"),
    (r"experts\.down_proj_bias$", "first"),
    (r"experts\.(gate_up_proj|gate_up_proj_(blocks|scales|bias)|down_proj|down_proj_(blocks|scales))$", "stacked"),
    (r"experts\.\d+\.(gate_proj|up_proj|w1|w3)\.", "expert out"),
    (r"experts\.\d+\.(down_proj|w2)\.", "expert in"),
    (r"(\.q_proj|q_b_proj|kv_b_proj)\.|sinks$", "out"),
    (r"\.[kv]_proj\.", "kv"),
    (r"o_proj\.", "in"),
    (r"qkv_proj\.", "qkv"),
    (r"gate_up_proj\.", "halves"),
    (r"(gate_proj|up_proj)\.", "out"),
    (r"down_proj\.", "in"),
)

# The dimension that counts outputs, and the one that counts inputs; None: the tensor is not cut that way.
DIMENSIONS = {
    "weight": (0, 1),
    "sinks": (0, None),
    "bias": (0, None),
    "weight_scale_inv": (0, 1),
    "input_scale": (None, None),
    "weight_packed": (0, 1),
    "weight_shape": (None, None),
    "weight_zero_point": (0, 1),
    "qweight": (1, 0),
    "qzeros": (1, 0),
    "scales": (1, 0),
    "g_idx": (None, 0),
}


def dimension(suffix: str, shape: tuple[int, ...], cut: str) -> int | None:
    """Which dimension of a linear layer's tensor is cut."""
    if suffix == "weight_scale":  # one number, one for each output, or one for each output and group of inputs
        out, in_ = (None, None) if shape in ((), (1,)) else (0, 1 if len(shape) == 2 and shape[1] > 1 else None)
    else:
        out, in_ = DIMENSIONS[suffix]
    return in_ if cut == "in" else out


def filled(data: torch.Tensor, piece: Slice) -> torch.Tensor:
    """The rank's tensor: zeros, and what each part copies."""
    found = torch.zeros(nbytes(piece.dtype, piece.shape), dtype=torch.uint8)
    source = data.reshape(-1)
    for part in piece.parts:
        to = found.as_strided((part.rows, part.width), (part.target_pitch, 1), part.target)
        to.copy_(source.as_strided((part.rows, part.width), (part.pitch, 1), part.start))
    return found.reshape(in_bytes(piece.dtype, piece.shape))


def same(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one tensor that all `pieces` are."""
    for one, other in pairwise(pieces):
        assert torch.equal(one, other)
    return pieces[0]


def even(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    assert len({piece.shape for piece in pieces}) == 1
    return torch.cat(list(pieces), dim)


def kv_heads(pieces: Sequence[torch.Tensor], heads: int, dim: int = 0) -> torch.Tensor:
    """Neighbours share a head where there are more ranks than heads."""
    sharing = max(1, len(pieces) // heads)
    groups = [pieces[first : first + sharing] for first in range(0, len(pieces), sharing)]
    return even([same(group) for group in groups], dim)


def join(
    name: str, pieces: Sequence[torch.Tensor], shape: tuple[int, ...], config: dict[str, int], cut: str
) -> torch.Tensor:
    """The whole of a tensor that is no expert's, from the pieces of the tensor-parallel ranks."""
    if cut == "whole" or len(pieces) == 1:
        return same(pieces)
    ranks, heads, kv = len(pieces), config["num_attention_heads"], config["num_key_value_heads"]
    if cut == "vocab":
        padded = even(pieces, 0)
        assert padded.shape[0] == -(-shape[0] // 64) * 64
        assert not padded[shape[0] :].any()
        return padded[: shape[0]]
    if cut == "first":
        assert not any(piece.any() for piece in pieces[1:])
        return pieces[0]
    if cut == "qkv":
        sizes = [count * config["head_dim"] for count in (heads // ranks, max(1, kv // ranks), max(1, kv // ranks))]
        q, k, v = zip(*(piece.split(sizes) for piece in pieces), strict=True)
        return torch.cat([even(q, 0), kv_heads(k, kv), kv_heads(v, kv)])
    if cut == "halves":
        gate, up = zip(*(piece.chunk(2) for piece in pieces), strict=True)
        return torch.cat([even(gate, 0), even(up, 0)])
    dim = dimension(name.rpartition(".")[2], shape, cut)
    if dim is None:
        return same(pieces)
    return kv_heads(pieces, kv, dim) if cut == "kv" else even(pieces, dim)


def join_stacked(name: str, pieces: Sequence[torch.Tensor], mxfp4: bool) -> torch.Tensor:
    """All experts' parameter, from pieces that are cut inside each expert."""
    parameter = name.rpartition(".")[2]
    if mxfp4 and parameter.startswith("down_proj"):
        return uneven(pieces, 2)  # each of which is a group of 32
    if parameter in ("gate_up_proj_blocks", "gate_up_proj_scales"):
        return uneven(pieces, 1, group=64)  # gate and up of a group
    if parameter == "gate_up_proj_bias":  # as bytes of bfloat16
        return uneven(pieces, 1, group=2 * 64) if mxfp4 else even(pieces, 1)
    if parameter == "down_proj":
        return even(pieces, 1)
    if "feed_forward" in name:  # Llama 4: gate, then up
        gate, up = zip(*(piece.chunk(2, dim=2) for piece in pieces), strict=True)
        return torch.cat([even(gate, 2), even(up, 2)], 2)
    return even(pieces, 2)


def uneven(pieces: Sequence[torch.Tensor], dim: int, *, group: int = 1) -> torch.Tensor:
    """Whole groups each: all ranks as many, the last one what is left."""
    sizes = [piece.shape[dim] for piece in pieces]
    share = -(-sum(sizes) // group // len(pieces)) * group
    assert sizes == [*[share] * (len(pieces) - 1), sum(sizes) - share * (len(pieces) - 1)]
    return torch.cat(list(pieces), dim)


def owned(rank: int, ranks: int, experts: int, placement: str) -> list[int]:
    """The experts that one rank of an expert-parallel group holds."""
    if placement == "round_robin":
        return list(range(rank, experts, ranks))
    start = rank * (experts // ranks) + min(rank, experts % ranks)
    return list(range(start, start + experts // ranks + (rank < experts % ranks)))


def joins(checkpoint: Checkpoint, parallel: Parallel, stages: Sequence[int]) -> None:
    """Plans the slices and joins them: each stage has its layers, each rank its tensors, all bytes are there once.

    `stages`: how many layers each pipeline stage holds.
    """
    shards = plan_slices(checkpoint.ranges(), checkpoint.config, parallel)
    bytes_of = checkpoint.random()
    held = [{piece.name: piece for piece in shard.slices} for shard in shards]
    expected: list[set[str]] = [set() for _ in held]
    for name, entry in checkpoint.entries.items():
        for stage in stages_of(name, checkpoint, stages, len(held)):
            # The ranks of a stage, by data and then tensor rank; in the world the stages stand between the two.
            ranks = [
                (data * parallel.pipeline + stage) * parallel.tensor + tensor
                for data in range(parallel.data)
                for tensor in range(parallel.tensor)
            ]
            holders = join_stage(name, entry, ranks, parallel, checkpoint, held, bytes_of[name])
            for rank in holders:
                expected[rank].add(name)
    assert [set(names) for names in held] == expected
    assert len(shards) == parallel.data * parallel.pipeline * parallel.tensor
    for shard in shards:
        assert len(shard.slices) == len({piece.name for piece in shard.slices})


def stages_of(name: str, checkpoint: Checkpoint, stages: Sequence[int], world: int) -> list[int]:
    """The pipeline stages that hold a tensor. A single rank holds even what is for drafting."""
    if world == 1:
        return [0]
    embedding = next(name for name in checkpoint.entries if name.endswith("embed_tokens.weight"))
    prefix = embedding.removesuffix("embed_tokens.weight")
    layer = re.match(re.escape(prefix) + r"layers\.(\d+)\.", name)
    if layer:
        ends = [sum(stages[: stage + 1]) for stage in range(len(stages))]
        return [stage for stage, end in enumerate(ends) if int(layer[1]) < end][:1]  # none: past the model's layers
    last = len(stages) - 1
    if name == embedding:
        tied = checkpoint.config.get("text_config", checkpoint.config).get("tie_word_embeddings", False)
        return sorted({0, last}) if tied else [0]
    if name.startswith(f"{prefix}norm.") or "lm_head." in name:
        return [last]
    return list(range(len(stages)))


def join_stage(
    name: str,
    entry: tuple[str, tuple[int, ...]],
    ranks: Sequence[int],
    parallel: Parallel,
    checkpoint: Checkpoint,
    held: Sequence[dict[str, Slice]],
    original: torch.Tensor,
) -> list[int]:
    """Joins one tensor's slices on the ranks of one stage and compares; the ranks that must hold it."""
    dtype, shape = entry
    config = checkpoint.config.get("text_config", checkpoint.config)
    mxfp4 = "quantization_config" in config and config["quantization_config"]["quant_method"] == "mxfp4"
    cut = next((cut for pattern, cut in CUTS if re.search(pattern, name)), "whole")
    experts = next(
        (config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config), 0
    )

    def pieces(of: Sequence[int]) -> list[torch.Tensor]:
        return [filled(original, held[rank][name]) for rank in of]

    if parallel.expert and cut in ("first", "stacked") and len(ranks) > 1:
        seen: dict[int, torch.Tensor] = {}
        for place, found in enumerate(pieces(ranks)):
            mine = owned(place, len(ranks), experts, parallel.placement)
            assert found.shape[0] == len(mine)
            assert not seen.keys() & set(mine)
            seen |= dict(zip(mine, found, strict=True))
        assert torch.equal(torch.stack([seen[index] for index in range(experts)]), original)
        return list(ranks)
    if parallel.expert and cut.startswith("expert") and len(ranks) > 1:
        index = int(re.search(r"experts\.(\d+)\.", name)[1])  # type: ignore[index]
        one = nbytes(dtype, shape) == nbytes(dtype, ())
        owner = [
            rank
            for place, rank in enumerate(ranks)
            if (one and "scale" in name) or index in owned(place, len(ranks), experts, parallel.placement)
        ]
        assert torch.equal(same(pieces(owner)), original)
        return owner
    if cut == "stacked":
        found = join_stacked(name, pieces(ranks), mxfp4) if len(ranks) > 1 else pieces(ranks)[0]
        assert torch.equal(found, original)
    elif cut == "first" or cut.startswith("expert"):  # over all ranks of the stage
        assert torch.equal(join(name, pieces(ranks), shape, config, cut.removeprefix("expert ")), original)
    else:
        for first in range(0, len(ranks), parallel.tensor):  # each data-parallel copy by itself
            of = ranks[first : first + parallel.tensor]
            assert torch.equal(join(name, pieces(of), shape, config, cut), original)
    return list(ranks)
