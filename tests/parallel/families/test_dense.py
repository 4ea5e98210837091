"""families/dense.py: the dense decoders, cut for many sizes and joined again; worked numbers; what is refused."""

from __future__ import annotations

import pytest

from tests.parallel.families import checkpoints
from tests.parallel.families.checkpoints import DENSE, HEAD_DIM, Checkpoint, dense, linear, norms
from tests.parallel.families.joining import MATRIX, joins
from tests.parallel.families.quantised import SCHEMES, quantised
from tests.parallel.families.released import llama_3_8b, parts_of, shapes_of
from weightcached.errors import CannotCut, CheckpointError, UnknownArchitecture
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices


@pytest.mark.parametrize("sizes", [name for name in MATRIX if not name.startswith(("T4-EP", "D2-EP"))])
@pytest.mark.parametrize("family", DENSE)
def test_the_ranks_join_to_the_checkpoint(family: str, sizes: str) -> None:
    """Each rank's slices, filled and joined, give every tensor of the checkpoint, on the stages that must have it."""
    joins(DENSE[family](), *MATRIX[sizes])


@pytest.mark.parametrize("tensor", [2, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_projections_join(scheme: str, tensor: int) -> None:
    """Scales, zero points and packed values follow their weight, with shared key/value heads at T = 8."""
    joins(quantised(scheme), Parallel(tensor=tensor), (2,))


def test_expert_parallel_changes_nothing_without_experts() -> None:
    """A dense model has the same slices with it and without."""
    llama = DENSE["llama"]()

    with_it = plan_slices(llama.ranges(), llama.config, Parallel(tensor=2, data=2, expert=True))

    assert with_it == plan_slices(llama.ranges(), llama.config, Parallel(tensor=2, data=2))


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (8, {"q": 512, "kv": 128, "intermediate": 1792, "vocab": 16032}),
        (16, {"q": 256, "kv": 128, "intermediate": 896, "vocab": 8016}),
    ],
)
def test_llama_3_8b(tensor: int, rows: dict[str, int]) -> None:
    """The published sizes: 32 heads and 8 key/value heads of 128, 14336 between, 128256 words."""
    shards = plan_slices(*llama_3_8b(), Parallel(tensor=tensor))

    for rank, shard in enumerate(shards):
        shapes, parts = shapes_of(shard), parts_of(shard)
        layer = "model.layers.0."
        assert shapes[f"{layer}self_attn.q_proj.weight"] == (rows["q"], 4096)
        assert shapes[f"{layer}self_attn.k_proj.weight"] == shapes[f"{layer}self_attn.v_proj.weight"] == (128, 4096)
        head = rank // (tensor // 8)  # at T = 16 ranks 2i and 2i + 1 hold head i
        assert parts[f"{layer}self_attn.k_proj.weight"] == [(head * 128 * 8192, 128 * 8192, 1)]
        assert shapes[f"{layer}self_attn.o_proj.weight"] == (4096, rows["q"])
        assert parts[f"{layer}self_attn.o_proj.weight"] == [(rank * rows["q"] * 2, rows["q"] * 2, 4096)]
        assert shapes[f"{layer}mlp.gate_proj.weight"] == (rows["intermediate"], 4096)
        assert shapes[f"{layer}mlp.down_proj.weight"] == (4096, rows["intermediate"])
        assert parts[f"{layer}mlp.down_proj.weight"] == [
            (rank * rows["intermediate"] * 2, rows["intermediate"] * 2, 4096)
        ]
        assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (rows["vocab"], 4096)


def test_a_vocabulary_is_padded_to_64() -> None:
    """32001 words for 8 ranks: 4008 rows each, of which the last rank has 3945 and 63 of zeros."""
    entries = linear("model.embed_tokens", 32001, 64) | linear("lm_head", 32001, 64)
    layer = norms("model.layers.0.", ["input_layernorm"])
    config = checkpoints.config("LlamaForCausalLM", vocab_size=32001, num_hidden_layers=1)
    vocabulary = Checkpoint(config, entries | layer)

    shards = plan_slices(vocabulary.ranges(), vocabulary.config, Parallel(tensor=8))

    for rank, shard in enumerate(shards):
        assert shapes_of(shard) == dict.fromkeys(entries, (4008, 64)) | dict.fromkeys(layer, (64,))
        real = 3945 if rank == 7 else 4008
        parts = parts_of(shard)
        assert [parts[name] for name in entries] == [[(rank * 4008 * 128, real * 128, 1)]] * 2


def test_more_ranks_than_heads_are_refused() -> None:
    """8 heads for 16 ranks: the message has the parameter, both numbers and the size that fits the whole model."""
    llama = DENSE["llama"]()

    with pytest.raises(CannotCut) as refused:
        plan_slices(llama.ranges(), llama.config, Parallel(tensor=16))

    assert str(refused.value) == (
        "model.layers.0.self_attn.q_proj.weight cannot be cut: 8 attention heads are no multiple of 16 ranks; "
        "the next smaller tensor_parallel that fits the model: 8"
    )


@pytest.mark.parametrize(
    ("change", "tensor", "parameter", "words", "largest"),
    [
        ({"num_attention_heads": 6}, 4, "self_attn.q_proj.weight", "6 attention heads", 3),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 4, "self_attn.k_proj.weight", "3 key/value heads", 3),
    ],
)
def test_the_message_has_parameter_sizes_and_what_fits(
    change: dict[str, int], tensor: int, parameter: str, words: str, largest: int
) -> None:
    """Query and key/value heads that the ranks do not divide."""
    name, rows = f"model.layers.0.{parameter}", int(words.split()[0]) * HEAD_DIM
    one = Checkpoint(checkpoints.config("LlamaForCausalLM", **change), linear(name.removesuffix(".weight"), rows, 64))
    whole = linear("lm_head", 192, 64)

    with pytest.raises(CannotCut) as refused:
        plan_slices(Checkpoint({}, one.entries | whole).ranges(), one.config, Parallel(tensor=tensor))

    assert (refused.value.parameter, refused.value.largest) == (name, largest)
    assert words in str(refused.value) and str(tensor) in str(refused.value)


@pytest.mark.parametrize("family", DENSE)
def test_an_unknown_parameter_is_refused_by_name(family: str) -> None:
    """A name that the family's table does not have is not cut by a guess."""
    known = DENSE[family]()
    prefix = next(name for name in known.entries if name.endswith("embed_tokens.weight")).removesuffix(
        "embed_tokens.weight"
    )
    more = linear(f"{prefix}layers.1.self_attn.w_proj", 128, 64)

    with pytest.raises(UnknownArchitecture, match=r"layers\.1\.self_attn\.w_proj\.weight"):
        plan_slices(Checkpoint({}, known.entries | more).ranges(), known.config, Parallel(tensor=2))


@pytest.mark.parametrize("pipeline", [1, 3])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_tied_head_is_an_alias(tensor: int, pipeline: int) -> None:
    """A tied model without a head gets the head's name for the embedding's slice, on the stage that computes logits."""
    gemma = DENSE["gemma2"]()

    shards = plan_slices(gemma.ranges(), gemma.config, Parallel(tensor=tensor, pipeline=pipeline))

    for number, shard in enumerate(shards):
        last = number // tensor == pipeline - 1
        assert shard.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if last else {})
        assert ("model.embed_tokens.weight" in shapes_of(shard)) == (last or number < tensor)


def test_gemma_is_tied_though_its_config_may_not_say_so() -> None:
    """The model class ties them."""
    gemma = DENSE["gemma2"]()
    silent = {key: value for key, value in gemma.config.items() if key != "tie_word_embeddings"}

    shards = plan_slices(gemma.ranges(), silent, Parallel(tensor=2))

    assert shards == plan_slices(gemma.ranges(), gemma.config, Parallel(tensor=2))


def test_a_redundant_head_is_loaded_too() -> None:
    """Qwen3-0.6B is tied and ships both: both are there, and nothing is an alias."""
    qwen3 = DENSE["qwen3"]().but(tie_word_embeddings=True)

    joins(qwen3, Parallel(tensor=2), (3,))
    for shard in plan_slices(qwen3.ranges(), qwen3.config, Parallel(tensor=2)):
        assert {"lm_head.weight", "model.embed_tokens.weight"} <= shapes_of(shard).keys()
        assert shard.aliases == {}


def test_a_head_that_is_missing_is_refused() -> None:
    """Where head and embedding are not tied, the head must be there."""
    llama = dense("LlamaForCausalLM", head=None)

    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        plan_slices(llama.ranges(), llama.config, Parallel(tensor=2))


def test_norms_over_all_heads_are_whole() -> None:
    """OLMo 2 takes the norm over the full width, so every rank has all of its weights."""
    olmo2 = checkpoints.olmo2()

    for shard in plan_slices(olmo2.ranges(), olmo2.config, Parallel(tensor=4)):
        shapes = shapes_of(shard)
        assert shapes["model.layers.0.self_attn.q_norm.weight"] == (128,)
        assert shapes["model.layers.0.self_attn.k_norm.weight"] == (64,)


def test_what_a_nested_config_leaves_out_is_the_classs() -> None:
    """Gemma 3's text_config names no heads where they are the class's 8, 4 and 256."""
    nested = checkpoints.gemma3_nested()
    heads = ("num_attention_heads", "num_key_value_heads")
    text = {key: value for key, value in nested.config["text_config"].items() if key not in heads}

    shards = plan_slices(nested.ranges(), {**nested.config, "text_config": text}, Parallel(tensor=8))

    assert shards == plan_slices(nested.ranges(), nested.config, Parallel(tensor=8))


def test_a_vision_tower_is_whole_on_every_rank() -> None:
    """Its sizes divide by no number of ranks, and need not."""
    mistral3 = checkpoints.mistral3()

    for shard in plan_slices(mistral3.ranges(), mistral3.config, Parallel(tensor=4, pipeline=3)):
        shapes = shapes_of(shard)
        assert shapes["vision_tower.transformer.layers.0.attention.q_proj.weight"] == (10, 7)
        assert shapes["multi_modal_projector.linear_1.weight"] == (10, 7)
