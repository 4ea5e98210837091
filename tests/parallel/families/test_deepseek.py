"""families/deepseek.py: latent attention by heads, experts, the indexer, the skipped layer; DeepSeek-V3's numbers."""

from __future__ import annotations

import pytest

from tests.parallel.families.checkpoints import DEEPSEEK, Checkpoint, deepseek, linear
from tests.parallel.families.joining import MATRIX, joins
from tests.parallel.families.released import deepseek_v3, shapes_of
from weightcached.errors import CannotCut, UnknownArchitecture
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices


@pytest.mark.parametrize("sizes", MATRIX)
@pytest.mark.parametrize("version", DEEPSEEK)
def test_the_ranks_join_to_the_checkpoint(version: str, sizes: str) -> None:
    """Each rank's slices, filled and joined, give every tensor of the model's own layers."""
    joins(DEEPSEEK[version](), *MATRIX[sizes])


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (8, {"dense": 2304, "experts": 256, "kv_b": 4096, "q_b": 3072}),
        (16, {"dense": 1152, "experts": 128, "kv_b": 2048, "q_b": 1536}),
    ],
)
def test_deepseek_v3(tensor: int, rows: dict[str, int]) -> None:
    """The published sizes: 128 heads, 18432 between in dense layers, 2048 in an expert, FP8 in blocks of 128."""
    for shard in plan_slices(*deepseek_v3(), Parallel(tensor=tensor)):
        shapes = shapes_of(shard)
        assert shapes["model.layers.0.mlp.up_proj.weight"] == (rows["dense"], 7168)
        assert shapes["model.layers.0.mlp.up_proj.weight_scale_inv"] == (rows["dense"] // 128, 56)
        assert shapes["model.layers.1.mlp.experts.255.down_proj.weight"] == (7168, rows["experts"])
        assert shapes["model.layers.1.self_attn.kv_b_proj.weight"] == (rows["kv_b"], 512)
        assert shapes["model.layers.1.self_attn.kv_b_proj.weight_scale_inv"] == (rows["kv_b"] // 128, 4)
        assert shapes["model.layers.1.self_attn.q_b_proj.weight"] == (rows["q_b"], 1536)
        assert shapes["model.layers.1.self_attn.o_proj.weight"] == (7168, 16384 // tensor)
        assert shapes["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
        assert shapes["model.embed_tokens.weight"] == (129280 // tensor, 7168)  # a multiple of 64 already


def test_deepseek_v3_for_32_ranks_is_refused() -> None:
    """576 rows of a dense layer, and 64 of an expert, divide a block of 128; 16 ranks is the most."""
    with pytest.raises(CannotCut) as refused:
        plan_slices(*deepseek_v3(), Parallel(tensor=32))

    assert refused.value.largest == 16
    assert "mlp." in refused.value.parameter and "128" in str(refused.value)


@pytest.mark.parametrize("kept", ["dense", "experts", "attention"])
def test_each_part_of_it_for_32_ranks(kept: str) -> None:
    """Attention alone fits 32 ranks: 1024 and 768 rows are whole blocks. Neither kind of layer does."""
    ranges, config = deepseek_v3()
    parts = {"dense": "layers.0.mlp", "experts": "layers.1.mlp", "attention": "self_attn"}
    ranges = [tensor for tensor in ranges if parts[kept] in tensor.name or "lm_head" in tensor.name]

    if kept == "attention":
        for shard in plan_slices(ranges, config, Parallel(tensor=32)):
            shapes = shapes_of(shard)
            assert shapes["model.layers.0.self_attn.kv_b_proj.weight"] == (1024, 512)
            assert shapes["model.layers.0.self_attn.q_b_proj.weight"] == (768, 1536)
    else:
        with pytest.raises(CannotCut, match=r"18432" if kept == "dense" else r"2048"):
            plan_slices(ranges, config, Parallel(tensor=32))


def test_the_layer_for_further_tokens_is_skipped() -> None:
    """V3's layer past num_hidden_layers is for drafting: no rank holds it, and no rule need know its names."""
    v3 = deepseek("V3")
    odd = linear("model.layers.3.something_new", 5, 7)
    both = Checkpoint(v3.config, v3.entries | odd)

    for shard in plan_slices(both.ranges(), both.config, Parallel(tensor=2)):
        assert set(shard.skipped) == {name for name in both.entries if name.startswith("model.layers.3.")}


@pytest.mark.parametrize("version", ["V2", "V2-Lite", "V3", "V32"])
def test_an_unknown_parameter_is_refused_by_name(version: str) -> None:
    """V2 and V3 have no indexer: one in their checkpoint is not cut by a guess. Nor is what none of them has."""
    known = deepseek(version)
    name = "model.layers.0.self_attn.indexer.wk" if version != "V32" else "model.layers.0.self_attn.indexer.wz"

    with pytest.raises(UnknownArchitecture, match=name.replace(".", r"\.")):
        plan_slices(Checkpoint({}, known.entries | linear(name, 16, 64)).ranges(), known.config, Parallel(tensor=2))


def test_what_engines_keep_in_float32_keeps_its_type() -> None:
    """A cast leaves the router and its correction, and the indexer's norm and weights of heads."""
    v32 = deepseek("V32")

    shard = plan_slices(v32.ranges(), v32.config, Parallel(tensor=2), dtype="float16")[0]

    types = {piece.name.removeprefix("model.layers.1."): piece.dtype for piece in shard.slices}
    assert types["mlp.gate.e_score_correction_bias"] == "F32"
    assert types["mlp.gate.weight"] == "BF16"
    assert types["self_attn.indexer.k_norm.weight"] == "F32"
    assert types["self_attn.indexer.weights_proj.weight"] == "BF16"
    assert types["self_attn.indexer.wq_b.weight"] == types["self_attn.q_b_proj.weight"] == "F16"
