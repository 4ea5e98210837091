"""families/gpt_oss.py: alternating rows, groups of 32 shared out unevenly, the bias of one rank; the 120B's numbers."""

from __future__ import annotations

import pytest

from tests.parallel.families.checkpoints import Checkpoint, gpt_oss, linear
from tests.parallel.families.joining import MATRIX, joins
from tests.parallel.families.released import gpt_oss_120b, parts_of, shapes_of
from weightcached.errors import CannotCut, UnknownArchitecture
from weightcached.parallel.families import family_of
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices

EXPERTS = "model.layers.0.mlp.experts."


@pytest.mark.parametrize("sizes", MATRIX)
@pytest.mark.parametrize("mxfp4", [False, True], ids=["bf16", "mxfp4"])
def test_the_ranks_join_to_the_checkpoint(mxfp4: bool, sizes: str) -> None:
    """Each rank's slices, filled and joined, give every tensor; the bias of down_proj is on one rank, else zeros."""
    joins(gpt_oss(mxfp4=mxfp4), *MATRIX[sizes])


@pytest.mark.parametrize(("tensor", "shares"), [(4, [736, 736, 736, 672]), (8, [384] * 7 + [192])], ids=["T4", "T8"])
def test_gpt_oss_120b(tensor: int, shares: list[int]) -> None:
    """The published sizes: 2880 are 90 groups of 32, of which the last rank gets fewer."""
    for rank, shard in enumerate(plan_slices(*gpt_oss_120b(), Parallel(tensor=tensor))):
        shapes, parts, own = shapes_of(shard), parts_of(shard), shares[rank]
        start = rank * shares[0]
        assert shapes[f"{EXPERTS}gate_up_proj_blocks"] == (128, 2 * own, 90, 16)
        assert parts[f"{EXPERTS}gate_up_proj_blocks"] == [(2 * start * 1440, 2 * own * 1440, 128)]
        assert shapes[f"{EXPERTS}gate_up_proj_scales"] == (128, 2 * own, 90)
        assert shapes[f"{EXPERTS}gate_up_proj_bias"] == (128, 2 * own)
        assert parts[f"{EXPERTS}gate_up_proj_bias"] == [(2 * start * 2, 2 * own * 2, 128)]
        assert shapes[f"{EXPERTS}down_proj_blocks"] == (128, 2880, own // 32, 16)
        assert parts[f"{EXPERTS}down_proj_blocks"] == [(start // 2, own // 2, 128 * 2880)]
        assert shapes[f"{EXPERTS}down_proj_scales"] == (128, 2880, own // 32)
        assert shapes[f"{EXPERTS}down_proj_bias"] == (128, 2880)
        assert bool(parts[f"{EXPERTS}down_proj_bias"]) == (rank == 0)
        attention = "model.layers.0.self_attn."
        assert shapes[f"{attention}k_proj.weight"] == (512 // tensor, 2880)  # one head of 64 at T = 8
        assert shapes[f"{attention}sinks"] == (64 // tensor,)
        assert shapes[f"{attention}o_proj.bias"] == (2880,)
        assert shapes["model.embed_tokens.weight"] == (201088 // tensor, 2880)


def test_groups_that_leave_a_rank_with_nothing_are_refused() -> None:
    """9 groups for 8 ranks: two each are gone after 5. For 4 ranks, three each after 3; 2 ranks is the most."""
    oss = gpt_oss(mxfp4=True, size=9 * 32)

    with pytest.raises(CannotCut) as refused:
        plan_slices(oss.ranges(), oss.config, Parallel(tensor=8))

    assert refused.value.largest == 2
    assert refused.value.parameter.startswith(EXPERTS)


@pytest.mark.parametrize("data", [1, 2])
def test_one_rank_alone_adds_the_bias_of_down_proj(data: int) -> None:
    """Results are summed over all ranks of a stage, data-parallel ones included, so one of them all has the bias."""
    oss = gpt_oss(mxfp4=False)

    shards = plan_slices(oss.ranges(), oss.config, Parallel(tensor=2, data=data))

    assert [bool(parts_of(shard)[f"{EXPERTS}down_proj_bias"]) for shard in shards] == [True] + [False] * (2 * data - 1)


def test_spread_experts_have_their_bias() -> None:
    """With expert parallel every rank has the bias of its own experts."""
    oss = gpt_oss(mxfp4=True)

    for shard in plan_slices(oss.ranges(), oss.config, Parallel(tensor=2, expert=True)):
        assert shapes_of(shard)[f"{EXPERTS}down_proj_bias"] == (3, 64)
        assert sum(width * rows for _, width, rows in parts_of(shard)[f"{EXPERTS}down_proj_bias"]) == 3 * 64 * 2


@pytest.mark.parametrize("odd", [None, [], "mxfp4", {}, {"quant_method": None}, {"quant_method": "fp8"}])
def test_only_a_config_that_says_mxfp4_means_it(odd: object) -> None:
    """Whatever else stands in quantization_config, the names of bfloat16 apply."""
    config = {"architectures": ["GptOssForCausalLM"]}

    assert family_of({**config, "quantization_config": odd}) == family_of(config)
    assert family_of({**config, "quantization_config": {"quant_method": "mxfp4"}}) != family_of(config)


@pytest.mark.parametrize("mxfp4", [False, True], ids=["bf16", "mxfp4"])
def test_weights_that_config_json_does_not_tell_of_are_refused(mxfp4: bool) -> None:
    """mxfp4 weights under a config without it, or the other way round, are not cut by a guess."""
    oss, other = gpt_oss(mxfp4=mxfp4), gpt_oss(mxfp4=not mxfp4)

    with pytest.raises(UnknownArchitecture, match="gate_up_proj"):
        plan_slices(oss.ranges(), other.config, Parallel(tensor=2))


def test_an_unknown_parameter_is_refused_by_name() -> None:
    """A name that the family's table does not have is not cut by a guess."""
    oss = gpt_oss(mxfp4=True)
    more = linear("model.layers.1.mlp.shared.up_proj", 32, 64)

    with pytest.raises(UnknownArchitecture, match=r"layers\.1\.mlp\.shared\.up_proj\.weight"):
        plan_slices(Checkpoint({}, oss.entries | more).ranges(), oss.config, Parallel(tensor=2))
