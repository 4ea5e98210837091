"""Patterns of names, and the kinds that can be made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightcached.parallel.rules import (
    COL,
    KV_HEADS,
    Q_HEADS,
    ROW,
    VOCAB,
    Patterns,
    compile_pattern,
    even,
    expert,
    interleaved2,
    last_number,
    merged,
    number,
    split_name,
    stacked,
)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("model.norm", ["model.norm"], ["model.norm.weight", "model_norm", "xmodel.norm"]),
        (
            "model.layers.*.mlp",
            ["model.layers.0.mlp", "model.layers.x.mlp"],
            ["model.layers.0.1.mlp", "model.layers.mlp"],
        ),
        ("visual.**", ["visual.a", "visual.a.b.0.c"], ["visual", "model.visual.a"]),
        ("**", ["a", "a.b"], []),
        ("a.{q,k}_proj.*", ["a.q_proj.weight", "a.k_proj.bias"], ["a.v_proj.weight", "a.qk_proj.weight"]),
        ("{a.b,c}.d", ["a.b.d", "c.d"], ["a.d"]),
        ("a+b", ["a+b"], ["aab"]),
    ],
)
def test_what_a_pattern_matches(pattern: str, matching: list[str], other: list[str]) -> None:
    """`*` is one component, `**` some of them, braces a choice; everything else is meant literally."""
    regex = compile_pattern(pattern)

    assert [name for name in matching + other if regex.fullmatch(name)] == matching


@pytest.mark.parametrize("pattern", ["", ".", "a..b", "a.", ".a", "a.{b", "a}.b", "a.{b{c}}"])
def test_what_is_no_pattern(pattern: str) -> None:
    """A component without a character or an open brace could match nothing that is meant."""
    with pytest.raises(ValueError, match="is no pattern of names"):
        compile_pattern(pattern)


def test_the_first_pattern_wins_for_a_parameter_or_its_module() -> None:
    """Each pattern is tried on the parameter and on its module before the next one."""
    patterns = Patterns(["a.*.b.bias", "a.*.b", "a.**"])

    assert patterns.find("a.7.b.bias") == (0, True)
    assert patterns.find("a.7.b.weight") == (1, False)
    assert patterns.find("a.7.c") == (2, True)
    assert patterns.find("b.7.c") is None
    assert Patterns(["a.b"]).find("a.bc.weight") is None
    assert Patterns(["a.b"]).find("a.b.c.weight") is None
    assert Patterns([]).find("a") is None


@pytest.mark.parametrize("component", ["12", "1*", "*2", "1{1,2}", "{1,3}2", "{7,12}"])
def test_a_number_may_be_spelled_in_part(component: str) -> None:
    """A pattern that has digits of a layer's number beside something else is about these layers and no others."""
    patterns = Patterns([f"h.{component}.w1"])

    assert patterns.find("h.12.w1") == (0, True)
    assert patterns.find("h.34.w1") is None


def test_names_share_an_answer_unless_a_pattern_spells_a_number() -> None:
    """Layer 3 is any layer, but not where a rule is about layer 3; a number inside a word is part of the word."""
    general, special = Patterns(["h.*.w1"]), Patterns(["h.3.w1", "h.*.w1"])

    assert general.key("h.3.w1") == general.key("h.4.w1") != general.key("h.4.w2")
    assert special.find("h.3.w1") == (0, True)
    assert special.find("h.4.w1") == (1, True)
    assert Patterns(["h.{3,5}.w1", "h.*.w1"]).find("h.4.w1") == (1, True)
    assert Patterns(["h.{3,5}.w1", "h.*.w1"]).find("h.5.w1") == (0, True)


def test_a_name_is_a_module_and_what_it_is_there() -> None:
    """The last component, or more of them where bitsandbytes hangs its own on a weight."""
    assert split_name("model.norm.weight") == ("model.norm", "weight")
    assert split_name("a.q_proj.weight.absmax") == ("a.q_proj", "weight.absmax")
    assert split_name("a.q_proj.weight.quant_state.nf4") == ("a.q_proj", "weight.quant_state.nf4")
    assert split_name("alone") == ("", "alone")


def test_kinds_are_made_of_kinds() -> None:
    """A kind on another axis, of experts, of two alternating projections: what is not changed stays."""
    assert Q_HEADS.on_input().side == "in"
    assert Q_HEADS.on_input().cut == Q_HEADS.cut
    assert stacked(replace(ROW, axis=1)).axis is None
    assert stacked(ROW, axis=2).axis == 2
    assert expert(COL).experts == "named"
    assert interleaved2(32, uneven=True) == even(64, uneven=True)
    assert merged(Q_HEADS, KV_HEADS, KV_HEADS).segments == (Q_HEADS, KV_HEADS, KV_HEADS)


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        ("0", 0),
        ("61", 61),
        ("007", 7),
        ("", None),
        ("x1", None),
        ("-1", None),
        ("²", None),
        ("٣", None),
        ("9" * 5000, None),
    ],
)
def test_numbers_in_names(component: str, expected: int | None) -> None:
    """Plain digits, and not so many that they could be no layer's."""
    assert number(component) == expected


def test_axes_and_units_that_cannot_be() -> None:
    """An axis counts from the front, and a unit has at least one element."""
    for make in (lambda: replace(COL, axis=-1), lambda: even(0)):
        with pytest.raises(ValueError, match="unit must be at least 1 and axis at least 0"):
            make()


@pytest.mark.parametrize("segments", [(), (COL,), (COL, Q_HEADS), (VOCAB, VOCAB), (ROW, ROW)])
def test_segments_whose_lengths_nothing_says(segments: tuple[object, ...]) -> None:
    """Only equal columns, or heads, have lengths that follow from config.json and the shape."""
    with pytest.raises(ValueError, match="merged"):
        merged(*segments)  # type: ignore[arg-type]


def test_the_number_of_an_expert_is_the_last_one() -> None:
    """With what stands before it; a name without a number has none."""
    assert last_number("model.layers.3.mlp.experts.17.up_proj.weight") == ("model.layers.3.mlp.experts", 17)
    assert last_number("model.norm.weight") is None
