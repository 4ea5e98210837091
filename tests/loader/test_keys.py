"""loader.keys: what a load makes is named for each rank, by what is in it and not by how it was written down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.loader import llama
from tests.loader.loads import MakeCheckpoint, Raw, noise
from weightcached.checkpoint.digest import json_digest
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.loader.keys import keys_of
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices
from weightcached.shard.key import ShardKey

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "vocab_size": 64,
}


def keys(
    path: Path, parallel: Parallel | None = None, *, dtype: str | None = None, rules: tuple[str, ...] = ()
) -> list[ShardKey]:
    parallel = parallel or Parallel()
    with open_checkpoint(path) as checkpoint:
        shards = plan_slices(list(checkpoint.tensors()), checkpoint.config, parallel, rules=rules, dtype=dtype)
        return keys_of(checkpoint, parallel, shards, "content", dtype=dtype)


def moe(folder: Path, make_checkpoint: MakeCheckpoint) -> Path:
    raw: Raw = {"model.embed_tokens.weight": ("BF16", (64, 16), noise(2048))}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        raw[f"{prefix}mlp.gate.weight"] = ("BF16", (4, 16), noise(128))
        for expert in range(4):
            for name, shape in (("gate_proj", (8, 16)), ("up_proj", (8, 16)), ("down_proj", (16, 8))):
                raw[f"{prefix}mlp.experts.{expert}.{name}.weight"] = ("BF16", shape, noise(256, expert))
    raw["lm_head.weight"] = ("BF16", (64, 16), noise(2048))
    make_checkpoint(folder / "model.safetensors", raw)
    (folder / "config.json").write_text(json.dumps(MOE))
    return folder


def one_file(folder: Path, make_checkpoint: MakeCheckpoint, raw: Raw, **config: Any) -> Path:
    make_checkpoint(folder / "model.safetensors", raw)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_one_rank_of_a_plain_checkpoint(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Without a config.json the key has the content, the type of most bytes, and the sizes of one rank."""
    raw: Raw = {"a": ("F16", (64,), noise(128)), "b": ("F32", (8,), noise(32)), "c": ("I64", (99,), noise(792))}
    assert keys(one_file(tmp_path, make_checkpoint, raw)) == [ShardKey(content="content", dtype="float16")]


def test_the_ranks_of_a_dense_model(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Each rank's key has its places and its stage's layers, in the order of the ranks, and nothing of experts."""
    found = keys(llama.write(tmp_path, make_checkpoint), Parallel(tensor=2, pipeline=2, data=2, layers=(1, 2)))
    assert found == [
        ShardKey(
            content="content",
            architecture="LlamaForCausalLM",
            dtype="bfloat16",
            tensor_parallel_size=2,
            tensor_parallel_rank=tensor,
            pipeline_parallel_size=2,
            pipeline_parallel_rank=stage,
            layers=((0, 1), (1, 3))[stage],
            config=json_digest(json.loads((tmp_path / "config.json").read_text())),
            data_parallel_size=2,
            data_parallel_rank=data,
        )
        for data in range(2)
        for stage in range(2)
        for tensor in range(2)
    ]


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_the_ranks_of_experts(tmp_path: Path, make_checkpoint: MakeCheckpoint, placement: Any) -> None:
    """Spread experts are counted over the data and tensor ranks of a stage, and their placement is in the key."""
    parallel = Parallel(tensor=2, data=2, expert=True, placement=placement)
    found = keys(moe(tmp_path, make_checkpoint), parallel)
    assert [(key.expert_parallel_size, key.expert_parallel_rank) for key in found] == [(4, 0), (4, 1), (4, 2), (4, 3)]
    assert [(key.data_parallel_rank, key.tensor_parallel_rank) for key in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {key.expert_placement for key in found} == {placement}
    cut = keys(tmp_path, Parallel(tensor=2, placement=placement))
    assert {(key.expert_parallel_size, key.expert_parallel_rank, key.expert_placement) for key in cut} == {(1, 0, None)}


def test_every_two_ranks_differ(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """No rank could attach to another's shard, of whatever combination of sizes."""
    path = moe(tmp_path, make_checkpoint)
    sizes = [
        Parallel(tensor=tensor, pipeline=pipeline, data=data, expert=expert)
        for tensor in (1, 2)
        for pipeline in (1, 2)
        for data in (1, 2)
        for expert in (False, True)
    ]
    found = [key for parallel in sizes for key in keys(path, parallel)]
    # One rank that "spreads" its experts over itself holds what it holds anyway, under the same numbers or others.
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, "bfloat16"), ("float16", "float16"), ("float32", "float32"), ("bfloat16", "bfloat16")],
)
def test_the_type_is_that_after_a_cast(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, dtype: str | None, expected: str
) -> None:
    """A cast shows as the type of most bytes and as what was asked for, and nowhere else: the content is the files'."""
    path = llama.write(tmp_path, make_checkpoint)
    (plain,) = keys(path)
    (cast,) = keys(path, dtype=dtype)
    assert cast == replace(plain, dtype=expected, cast=dtype)


def test_rules_count_where_something_is_cut(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """The config's own rules, in their order, make another key for several ranks; one rank holds the same without."""
    path = llama.write(tmp_path, make_checkpoint)
    one, other = "model.norm: replicate", "model.layers.*.input_layernorm: replicate"
    found = [keys(path, Parallel(tensor=2), rules=rules) for rules in ((), (one,), (one, other), (other, one))]
    assert [key.rules for key in found[0]] == [None, None]
    assert len({key.rules for ranks in found for key in ranks}) == 4
    assert keys(path, rules=(one,)) == keys(path)


def test_what_a_cast_leaves_counts_as_it_is(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Quantised weights are not cast: their type stays the one of most bytes."""
    raw: Raw = {
        "l.weight": ("F8_E4M3", (64, 64), noise(4096)),
        "l.weight_scale": ("F32", (1,), noise(4)),
        "n.weight": ("F32", (64,), noise(256)),
    }
    (key,) = keys(one_file(tmp_path, make_checkpoint, raw), dtype="bfloat16")
    assert key.dtype == "float8_e4m3fn"


def test_quantisation(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """The method is in the key by name, its settings by a digest that no order of keys changes but every value does."""
    raw: Raw = {"w": ("F8_E4M3", (4,), b"1234")}
    written = [
        {"quant_method": "fp8", "bits": 8, "ignored": {"a": 1, "b": 2}},
        {"ignored": {"b": 2, "a": 1}, "bits": 8, "quant_method": "fp8"},
        {"quant_method": "fp8", "bits": 4, "ignored": {"a": 1, "b": 2}},
    ]
    found = []
    for number, settings in enumerate(written):
        (key,) = keys(one_file(tmp_path / str(number), make_checkpoint, raw, quantization_config=settings))
        assert key.quantization == "fp8"
        found.append(key.quantization_digest)
    assert found[0] == found[1] != found[2]
    assert [len(digest or "") for digest in found] == [32] * 3
    (key,) = keys(one_file(tmp_path / "unnamed", make_checkpoint, raw, quantization_config={"bits": 8}))
    assert key.quantization == "unnamed"
