"""Rules of the config file."""

from __future__ import annotations

import pytest

from weightcached.parallel.custom import extend, parse_rules
from weightcached.parallel.rules import (
    COL,
    KV_HEADS,
    Q_HEADS,
    REPLICATE,
    ROW,
    VOCAB,
    Family,
    Kind,
    Place,
    Rule,
    expert,
    merged,
    stacked,
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("q_heads", Q_HEADS),
        ("kv_heads", KV_HEADS),
        ("col", COL),
        ("row", ROW),
        ("replicate", REPLICATE),
        ("vocab", VOCAB),
        ("merged(col, col)", merged(COL, COL)),
        ("merged( q_heads,kv_heads ,kv_heads )", merged(Q_HEADS, KV_HEADS, KV_HEADS)),
        ("experts(row)", expert(ROW)),
        ("experts(merged(col, col))", expert(merged(COL, COL))),
        ("experts", expert(REPLICATE)),
        ("stacked(row, 1)", stacked(ROW, 1)),
        ("stacked(merged(col, col), 2)", stacked(merged(COL, COL), 2)),
    ],
)
def test_every_kind_can_be_written(text: str, kind: Kind) -> None:
    """The words of the config file, with or without spaces."""
    assert parse_rules([f"model.*.proj: {text}"]) == (Rule("model.*.proj", kind),)
    assert parse_rules([f"model.*.proj:{text} "]) == (Rule("model.*.proj", kind),)


def test_places_in_a_pipeline() -> None:
    """Where layers are counted, and what the first and the last stage hold."""
    parsed = parse_rules(["model.layers.*: layers", "model.embed: first", "model.norm: last"])

    assert parsed == (Place("model.layers.*", "layers"), Place("model.embed", "first"), Place("model.norm", "last"))


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("model.norm", 'must be "pattern: kind", with a kind of q_heads, kv_heads, col'),
        (
            "model.norm: colwise",
            "'colwise' is no kind; valid are q_heads, kv_heads, col, row, replicate, vocab, merged",
        ),
        ("model.norm:", "'' is no kind"),
        (": col", "'' is no pattern of names"),
        ("model..norm: col", "'model..norm' is no pattern of names"),
        ("a: merged(col)", "merged needs at least two segments"),
        ("a: merged(col, q_heads)", "merged takes col segments only, or q_heads and kv_heads segments only"),
        ("a: merged(col, merged(col, col))", r"cannot stand in merged\(...\); there, valid are q_heads"),
        ("a: merged()", "'' cannot stand in merged"),
        ("a: experts(experts(col))", "cannot stand inside another"),
        ("a: stacked(col)", r'as in "stacked\(col, 2\)"'),
        ("a: stacked(col, 0)", "axis 0 counts the experts"),
        ("a: stacked(col, x)", r'as in "stacked\(col, 2\)"'),
        ("model.layers: layers", r'such as "model.layers.\*" with one \*'),
        ("model.*.layers.*: layers", r'such as "model.layers.\*" with one \*'),
    ],
)
def test_a_bad_rule_is_shown_with_what_may_stand_there(rule: str, sentence: str) -> None:
    """One sentence, with the rule as it was written."""
    with pytest.raises(ValueError, match=sentence) as caught:
        parse_rules(["a: col", rule])

    assert repr(rule) in str(caught.value)


def test_layers_are_in_one_place() -> None:
    """A second prefix would be ignored without a word."""
    with pytest.raises(ValueError, match="only one rule may say where layers are"):
        parse_rules(["model.layers.*: layers", "h.*: layers"])


def test_rules_go_before_the_familys_own() -> None:
    """The user's rule is found first, and the family's places stay unless they are given anew."""
    family = Family("F", rules=(Rule("a", COL),))

    found = extend(family, parse_rules(["a: row", "b: last", "h.*: layers"]), "F")

    assert found.rules == (Rule("a", ROW), Rule("a", COL))
    assert found.last == ("b", *family.last)
    assert found.layers == "h."
    assert extend(family, (), "F") == family


def test_an_unknown_architecture_has_only_the_users_rules() -> None:
    """No layers, no head and no ties are supposed."""
    found = extend(None, parse_rules(["a: row"]), "NewForCausalLM")

    assert found == Family(
        "NewForCausalLM", rules=(Rule("a", ROW),), layers=None, first=(), last=(), embedding=None, head=None
    )
