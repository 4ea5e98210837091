"""families/moe.py: models with a name per expert, cut or spread and joined again; Qwen3-30B-A3B's numbers."""

from __future__ import annotations

import pytest

from tests.parallel.families import checkpoints
from tests.parallel.families.checkpoints import MOE, Checkpoint, linear
from tests.parallel.families.joining import MATRIX, joins
from tests.parallel.families.quantised import SCHEMES, quantised
from tests.parallel.families.released import parts_of, qwen3_30b_a3b, shapes_of
from weightcached.errors import CannotCut, UnknownArchitecture
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices


@pytest.mark.parametrize("sizes", MATRIX)
@pytest.mark.parametrize("family", MOE)
def test_the_ranks_join_to_the_checkpoint(family: str, sizes: str) -> None:
    """Each rank's slices, filled and joined, give every tensor; experts are cut or spread over all ranks of a stage."""
    joins(MOE[family](), *MATRIX[sizes])


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(tensor=4),
        Parallel(tensor=2, data=2),
        Parallel(tensor=2, expert=True),
        Parallel(data=3, expert=True, placement="round_robin"),
    ],
    ids=["T4", "T2-D2", "T2-EP", "D3-EP"],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_experts_join(scheme: str, parallel: Parallel) -> None:
    """An expert's scales follow its weight, cut with it or whole with its owner; one number is on every rank."""
    joins(quantised(scheme, moe=True), parallel, (2,))


def test_qwen3_30b_a3b() -> None:
    """8 ranks: 512 rows of queries, 4 key/value heads of two ranks each, 96 rows of each expert, 18992 words."""
    shards = plan_slices(*qwen3_30b_a3b(), Parallel(tensor=8))

    for rank, shard in enumerate(shards):
        shapes, parts = shapes_of(shard), parts_of(shard)
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (512, 2048)
        assert parts["model.layers.0.self_attn.k_proj.weight"] == [(rank // 2 * 128 * 4096, 128 * 4096, 1)]
        assert shapes["model.layers.0.mlp.experts.127.up_proj.weight"] == (96, 2048)
        assert shapes["model.layers.0.mlp.experts.127.down_proj.weight"] == (2048, 96)
        assert shapes["model.embed_tokens.weight"] == (18992, 2048)


@pytest.mark.parametrize("tensor", [4, 8])
def test_its_experts_in_fp8_blocks_are_refused(tensor: int) -> None:
    """768 rows are 6 blocks of 128: 192 for 4 ranks and 96 for 8 divide one; 2 ranks is the most."""
    with pytest.raises(CannotCut) as refused:
        plan_slices(*qwen3_30b_a3b(block_fp8=True), Parallel(tensor=tensor))

    assert "mlp.experts." in refused.value.parameter
    assert refused.value.largest == 2
    assert "768" in str(refused.value) and "128" in str(refused.value)


def test_its_experts_in_fp8_blocks_fit_two_ranks() -> None:
    """384 rows, with 3 rows of scales."""
    for rank, shard in enumerate(plan_slices(*qwen3_30b_a3b(block_fp8=True), Parallel(tensor=2))):
        name, shapes = "model.layers.0.mlp.experts.5.", shapes_of(shard)
        assert shapes[f"{name}gate_proj.weight"] == (384, 2048)
        assert shapes[f"{name}gate_proj.weight_scale_inv"] == (3, 16)
        assert shapes[f"{name}down_proj.weight_scale_inv"] == (16, 3)
        assert parts_of(shard)[f"{name}down_proj.weight_scale_inv"] == [(rank * 3 * 4, 3 * 4, 16)]


def test_spread_experts_in_fp8_blocks_are_whole() -> None:
    """Expert parallel cuts no block: 4 ranks hold 32 experts each."""
    shards = plan_slices(*qwen3_30b_a3b(block_fp8=True), Parallel(tensor=4, expert=True))

    for rank, shard in enumerate(shards):
        shapes = shapes_of(shard)
        held = {int(name.split(".")[5]) for name in shapes if ".experts." in name}
        assert held == set(range(rank * 32, rank * 32 + 32))
        assert shapes[f"model.layers.0.mlp.experts.{rank * 32}.up_proj.weight"] == (768, 2048)


def test_sixty_experts_for_eight_ranks() -> None:
    """The first four ranks hold 8, the others 7: they start at 0, 8, 16, 24, 32, 39, 46, 53."""
    names = [f"model.layers.0.mlp.experts.{index}.up_proj" for index in range(60)]
    entries = {key: entry for name in names for key, entry in linear(name, 8, 8).items()}
    config = checkpoints.config("Qwen2MoeForCausalLM", num_experts=60, num_hidden_layers=1)
    one = Checkpoint(config, entries | linear("lm_head", 128, 8))

    shards = plan_slices(one.ranges(), one.config, Parallel(tensor=8, expert=True))

    held = [[int(name.split(".")[5]) for name in shapes_of(shard) if "experts" in name] for shard in shards]
    assert [experts[0] for experts in held] == [0, 8, 16, 24, 32, 39, 46, 53]
    assert [len(experts) for experts in held] == [8, 8, 8, 8, 7, 7, 7, 7]


def test_experts_that_the_ranks_do_not_divide_are_refused() -> None:
    """Without expert parallel an expert is cut over data x tensor ranks: 96 rows do not divide by 5 copies."""
    mixtral = checkpoints.mixtral()

    with pytest.raises(CannotCut, match=r"experts\.0\.w[123]\.weight cannot be cut: 96 is no multiple of 5 ranks"):
        plan_slices(mixtral.ranges(), mixtral.config, Parallel(data=5))


def test_layers_for_further_tokens_are_skipped() -> None:
    """What stands behind GLM-4's last layer predicts further tokens; no rank holds it, and the plan says so."""
    glm4 = checkpoints.glm4_moe()

    for shard in plan_slices(glm4.ranges(), glm4.config, Parallel(tensor=2)):
        assert set(shard.skipped) == {name for name in glm4.entries if name.startswith("model.layers.3.")}
        assert "model.layers.3.eh_proj.weight" in shard.skipped


@pytest.mark.parametrize("family", MOE)
def test_an_unknown_parameter_is_refused_by_name(family: str) -> None:
    """A name that the family's table does not have is not cut by a guess."""
    known = MOE[family]()
    more = linear("model.layers.1.mlp.experts.0.middle_proj", 32, 64)

    with pytest.raises(UnknownArchitecture, match=r"layers\.1\.mlp\.experts\.0\.middle_proj\.weight"):
        plan_slices(Checkpoint({}, known.entries | more).ranges(), known.config, Parallel(tensor=2))


def test_router_biases_keep_their_type() -> None:
    """A cast leaves GLM-4's router and its correction as they are, and casts what surrounds them."""
    glm4 = checkpoints.glm4_moe()

    shard = plan_slices(glm4.ranges(), glm4.config, Parallel(tensor=2), dtype="float16")[0]

    types = {piece.name: piece.dtype for piece in shard.slices}
    assert types["model.layers.1.mlp.gate.e_score_correction_bias"] == "F32"
    assert types["model.layers.1.mlp.gate.weight"] == "BF16"
    assert types["model.layers.1.mlp.experts.0.up_proj.weight"] == "F16"
