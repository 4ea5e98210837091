"""Rules applied to tensors: one entry for each tensor, whatever the stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parallel.tensors import tensor
from weightcached.checkpoint.header import TensorRange
from weightcached.errors import UnknownArchitecture
from weightcached.parallel.casts import Casts
from weightcached.parallel.cuts import Part
from weightcached.parallel.entries import Entries, Refused
from weightcached.parallel.model import Model
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.rules import (
    COL,
    FIRST_ONLY,
    Q_HEADS,
    REPLICATE,
    ROW,
    Family,
    Kind,
    Rule,
    expert,
    split_name,
    stacked,
)

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6}
FP8 = {"quantization_config": {"quant_method": "fp8"}}


def entries(
    parallel: Parallel, rules: dict[str, Kind], *tensors: TensorRange, config: dict[str, Any] | None = None
) -> Entries:
    family = Family("F", rules=tuple(Rule(pattern, kind) for pattern, kind in rules.items()))
    return Entries(Model(tensors, CONFIG | (config or {}), family, Casts(None)), parallel)


def shapes(found: Entries, module: str, leaf: str) -> list[tuple[int, ...]]:
    return [template.shape for template in found.of(module, leaf).templates]


def test_a_module_is_cut_with_what_belongs_to_it() -> None:
    """Rows: weight, bias and block scales. Columns: weight and scales, while every rank has the bias."""
    module = (
        tensor("m.weight", (512, 256), "F8_E4M3"),
        tensor("m.bias", (512,)),
        tensor("m.weight_scale_inv", (4, 2), "F32"),
        tensor("m.input_scale", (), "F32"),
    )

    col = entries(Parallel(tensor=2), {"m": COL}, *module, config=FP8)
    row = entries(Parallel(tensor=2), {"m": ROW}, *module, config=FP8)

    assert [shapes(col, "m", leaf) for leaf in ("weight", "bias", "weight_scale_inv", "input_scale")] == [
        [(256, 256)] * 2,
        [(256,)] * 2,
        [(2, 2)] * 2,
        [()],
    ]
    assert [shapes(row, "m", leaf) for leaf in ("weight", "bias", "weight_scale_inv", "input_scale")] == [
        [(512, 128)] * 2,
        [(512,)],
        [(4, 1)] * 2,
        [()],
    ]
    assert col.of("m", "weight_scale_inv").templates[1].parts == (Part(16, 16, 1, 16, 0, 16),)
    assert row.of("m", "weight_scale_inv").templates[1].parts == (Part(4, 4, 4, 8, 0, 4),)


def test_heads_on_the_input_side() -> None:
    """The projection after attention is cut by columns, and by heads as those before it are."""
    found = entries(Parallel(tensor=2), {"o": Q_HEADS.on_input()}, tensor("o.weight", (6, 8)))

    assert shapes(found, "o", "weight") == [(6, 4)] * 2
    with pytest.raises(Refused, match=r"o\.weight: 4 attention heads are no multiple of 8 ranks"):
        entries(Parallel(tensor=8), {"o": Q_HEADS.on_input()}, tensor("o.weight", (6, 8))).of("o", "weight")


def test_rows_that_are_no_heads_of_the_model() -> None:
    """4 heads of 8 are 32 elements, whether packed or not, on the output or the input side; sinks may be 4 numbers."""
    head, gptq = {"head_dim": 8}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    rules = {"q": Q_HEADS, "o": Q_HEADS.on_input(), "a.sinks": Q_HEADS}

    for one in (tensor("q.weight", (32, 4)), tensor("o.weight", (4, 32)), tensor("a.sinks", (4,))):
        assert len(shapes(entries(Parallel(tensor=2), rules, one, config=head), *split_name(one.name))) == 2
    packed = tensor("o.qweight", (4, 6), "I32")  # 32 inputs, 8 in each word
    assert shapes(entries(Parallel(tensor=2), rules, packed, config=head | gptq), "o", "qweight") == [(2, 6)] * 2
    for one in (tensor("q.weight", (16, 4)), tensor("q.weight", (4, 4)), tensor("o.weight", (4, 16))):
        with pytest.raises(Refused, match=r"\.weight: \d+ is not 4 attention heads of 8"):
            entries(Parallel(tensor=2), rules, one, config=head).of(*split_name(one.name))


def test_a_rule_for_a_parameter_says_the_axis() -> None:
    """Its own, or 0 for rows and 1 for columns; other parameters of the module are not meant."""
    one, other = tensor("m.w", (4, 6, 8)), tensor("m.v", (4, 6, 8))

    for kind, shape in ((COL, (2, 6, 8)), (ROW, (4, 3, 8)), (replace(COL, axis=2), (4, 6, 4))):
        found = entries(Parallel(tensor=2), {"m.w": kind, "m.v": REPLICATE}, one, other)
        assert shapes(found, "m", "w") == [shape] * 2
        assert shapes(found, "m", "v") == [(4, 6, 8)]
    with pytest.raises(Refused, match=r"m\.w: its axis 3 should be cut, and its shape is \[4, 6, 8\]"):
        entries(Parallel(tensor=2), {"m.w": replace(COL, axis=3)}, one).of("m", "w")


def test_without_expert_parallel_experts_are_cut_over_the_stage() -> None:
    """Over data x tensor ranks, while everything else is cut over the tensor ranks and repeated."""
    found = entries(
        Parallel(tensor=2, data=2),
        {"q": COL, "e.*.up": expert(COL), "e.all": stacked(ROW, 1), "e.bias": stacked(FIRST_ONLY)},
        tensor("q.weight", (8, 4)),
        tensor("e.0.up.weight", (8, 4)),
        tensor("e.all", (6, 8, 2)),
        tensor("e.bias", (6, 4)),
    )

    assert shapes(found, "q", "weight") == [(4, 4)] * 2
    assert shapes(found, "e.0.up", "weight") == [(2, 4)] * 4
    assert shapes(found, "e", "all") == [(6, 2, 2)] * 4
    assert [len(template.parts) for template in found.of("e", "bias").templates] == [1, 0, 0, 0]


def test_with_expert_parallel_a_rank_has_whole_experts() -> None:
    """6 experts on 4 ranks are 2, 2, 1, 1; a stacked parameter is cut on its first axis only, its bias alike."""
    found = entries(
        Parallel(tensor=2, data=2, expert=True),
        {"e.*.up": expert(COL), "e.all": stacked(ROW, 1), "e.bias": stacked(FIRST_ONLY)},
        *(tensor(f"e.{number}.up.weight", (8, 4)) for number in range(6)),
        tensor("e.all", (6, 8, 2)),
        tensor("e.bias", (6, 4)),
    )

    assert [found.owner(f"e.{number}.up.weight") for number in range(6)] == [0, 0, 1, 1, 2, 3]
    assert found.of("e.5.up", "weight").owned
    assert shapes(found, "e.5.up", "weight") == [(8, 4)]
    assert shapes(found, "e", "all") == [(2, 8, 2), (2, 8, 2), (1, 8, 2), (1, 8, 2)]
    assert shapes(found, "e", "bias") == [(2, 4), (2, 4), (1, 4), (1, 4)]


def test_one_rank_of_a_stage_has_all_experts() -> None:
    """Expert parallel over a single rank changes nothing, and asks config.json for nothing."""
    found = entries(
        Parallel(pipeline=2, expert=True),
        {"e.*.up": expert(COL), "e.all": stacked(ROW, 1)},
        tensor("e.9.up.weight", (8, 4)),
        tensor("e.all", (6, 8, 2)),
    )

    assert not found.of("e.9.up", "weight").owned
    assert shapes(found, "e.9.up", "weight") == [(8, 4)]
    assert shapes(found, "e", "all") == [(6, 8, 2)]


def test_round_robin_takes_every_nth_expert() -> None:
    """Of a stacked parameter that is one run of bytes for each expert."""
    found = entries(
        Parallel(tensor=4, expert=True, placement="round_robin"),
        {"e.*.up": expert(COL), "e.all": stacked(ROW, 1)},
        *(tensor(f"e.{number}.up.weight", (8, 4)) for number in range(6)),
        tensor("e.all", (6, 4), "U8"),
    )

    assert [found.owner(f"e.{number}.up.weight") for number in range(6)] == [0, 1, 2, 3, 0, 1]
    assert found.of("e", "all").templates[1].parts == (Part(4, 4, 1, 4, 0, 4), Part(20, 4, 1, 4, 4, 4))


def test_one_number_of_an_expert_stays_everywhere() -> None:
    """Its scales of one element are on every rank, block scales and everything else only where the expert is."""
    tensors = (
        tensor("e.1.up.weight", (1, 1), "F8_E4M3"),
        tensor("e.1.up.bias", (1,)),
        tensor("e.1.up.input_scale", (), "F32"),
        tensor("e.1.up.weight_scale_2", (1,), "F32"),
        tensor("e.1.up.weight_scale_inv", (4, 2), "F32"),
    )
    found = entries(Parallel(tensor=2, expert=True), {"e.*.up": expert(COL)}, *tensors)

    places = [split_name(one.name) for one in tensors]
    assert {leaf: found.of(module, leaf).owned for module, leaf in places} == {
        "weight": True,
        "bias": True,
        "input_scale": False,
        "weight_scale_2": False,
        "weight_scale_inv": True,
    }


def test_alike_modules_share_their_templates() -> None:
    """The very same objects, for each layer and each expert: a plan of many tensors is small."""
    found = entries(
        Parallel(tensor=2),
        {"h.*.e.*.up": expert(COL), "h.*.norm": REPLICATE},
        *(tensor(f"h.{layer}.e.{number}.up.weight", (8, 4)) for layer in range(3) for number in range(3)),
        *(tensor(f"h.{layer}.norm.weight", (8,)) for layer in range(3)),
    )

    first = found.of("h.0.e.0.up", "weight").templates
    assert found.of("h.2.e.1.up", "weight").templates is first
    assert len(found.of("h.1.norm", "weight").templates) == 1


def test_scales_of_the_cache_need_no_rule() -> None:
    """One number for keys and values beside the projections is whole everywhere; a vector of that name is not known."""
    scale, vector = tensor("a.k_scale", (), "F32"), tensor("b.k_scale", (4,), "F32")

    assert shapes(entries(Parallel(tensor=2), {}, scale), "a", "k_scale") == [()]
    with pytest.raises(UnknownArchitecture, match=r"no rule says how b\.k_scale is cut"):
        entries(Parallel(tensor=2), {}, vector).of("b", "k_scale")


@pytest.mark.parametrize(
    ("rules", "made", "parallel", "sentence"),
    [
        ({"m": COL}, tensor("m.weight", (6, 4)), Parallel(tensor=4), r"m\.weight: 6 is no multiple of 4 ranks"),
        ({"m": ROW}, tensor("m.weight", (6,)), Parallel(tensor=2), r"m\.weight: its weight has no input axis"),
        ({"m": COL}, tensor("m.other", (6,)), Parallel(tensor=2), r"m\.other: its module has no weight, only other"),
        ({"e": stacked(COL, 1)}, tensor("e.up", (6, 4)), Parallel(tensor=2), "must name the parameter, not its module"),
        ({"m": replace(COL, axis=1)}, tensor("m.weight", (6, 4)), Parallel(tensor=2), "must name the parameter"),
        ({"e": stacked(COL, 1)}, tensor("e", ()), Parallel(tensor=2, expert=True), r"shape \[\] holds no experts"),
        (
            {"e": stacked(COL, 1)},
            tensor("e", (6, 0)),
            Parallel(tensor=2, expert=True),
            r"shape \[6, 0\] holds no experts",
        ),
        (
            {"e.up": stacked(COL, 1)},
            tensor("e.up", (6, 4)),
            Parallel(tensor=8, expert=True),
            r"e\.up: 6 experts leave nothing for some of 8 ranks",
        ),
        ({"m": COL}, tensor("m.weight", (6, 3), "F4"), Parallel(tensor=2), "whole bytes at 4 bits"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    rules: dict[str, Kind], made: TensorRange, parallel: Parallel, sentence: str
) -> None:
    """The parameter, and why."""
    found = entries(parallel, rules, made)

    with pytest.raises(Refused, match=sentence):
        found.of(*split_name(made.name))


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("e.6.up.weight", {}, r"e\.6\.up\.weight: expert number 6, and config\.json says that there are 6"),
        ("e.up.weight", {}, r"e\.up\.weight: expert number None"),
        ("e.0.up.weight", {"num_experts": None}, "config.json says none of num_local_experts"),
        ("e.0.up.weight", {"num_experts": 1}, "1 experts leave nothing for some of 2 ranks"),
    ],
)
def test_experts_that_config_json_does_not_have(name: str, config: dict[str, Any], sentence: str) -> None:
    """Their number must be known and hold every expert, or nobody could say whose it is."""
    found = entries(Parallel(tensor=2, expert=True), {}, config=config)

    with pytest.raises(Refused, match=sentence):
        found.owner(name)
