"""Rules from the config file: one string each, placed before the rules of the model's own family.

    "model.layers.*.self_attn.q_proj: q_heads"
    "model.layers.*.self_attn.qkv_proj: merged(q_heads, kv_heads, kv_heads)"
    "model.layers.*.mlp.experts.*.down_proj: experts(row)"       the last number in the name is the expert
    "model.layers.*.mlp.experts.down_proj: stacked(row, 1)"      a parameter with all experts on axis 0, cut on axis 1
    "model.layers.*: layers"                                     the * is the number of a layer: its pipeline stage
    "model.embed_tokens: first"                                  only on the first stage; "last": only on the last one

What a pattern may hold is in rules.py. `experts` alone is `experts(replicate)`: experts are spread, never cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .rules import (
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
    compile_pattern,
    expert,
    merged,
    stacked,
)

_SIMPLE = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "col": COL, "row": ROW, "replicate": REPLICATE, "vocab": VOCAB}
VALID = f"{', '.join(_SIMPLE)}, merged(...), experts(...), stacked(..., axis), layers, first, last"
_CALL = re.compile(r"(merged|experts|stacked)\s*\((.*)\)")


def parse_rules(rules: Sequence[str]) -> tuple[Rule | Place, ...]:
    """The rules in their order. `ValueError` with one sentence that shows the rule and what may stand there."""
    parsed = tuple(_parse(rule) for rule in rules)
    if sum(isinstance(rule, Place) and rule.stage == "layers" for rule in parsed) > 1:
        raise ValueError("only one rule may say where layers are")
    return parsed


def extend(family: Family | None, parsed: Sequence[Rule | Place], architecture: str) -> Family:
    """The family with the parsed rules before its own. None: an unknown architecture, which has only these."""
    if family is None:
        family = Family(architecture, layers=None, first=(), last=(), embedding=None, head=None)
    places = [rule for rule in parsed if isinstance(rule, Place)]
    prefixes = [place.pattern.removesuffix("*") for place in places if place.stage == "layers"]
    return replace(
        family,
        rules=(*(rule for rule in parsed if isinstance(rule, Rule)), *family.rules),
        layers=prefixes[0] if prefixes else family.layers,
        first=(*(place.pattern for place in places if place.stage == "first"), *family.first),
        last=(*(place.pattern for place in places if place.stage == "last"), *family.last),
    )


def _parse(rule: str) -> Rule | Place:
    pattern, colon, text = (part.strip() for part in rule.partition(":"))
    if not colon:
        raise ValueError(f'rule {rule!r} must be "pattern: kind", with a kind of {VALID}')
    try:
        compile_pattern(pattern)
        if text == "layers":
            return Place(_layers(pattern), "layers")
        if text == "first":
            return Place(pattern, "first")
        if text == "last":
            return Place(pattern, "last")
        return Rule(pattern, _kind(text))
    except ValueError as problem:
        raise ValueError(f"rule {rule!r}: {problem}") from None


def _layers(pattern: str) -> str:
    if not pattern.endswith(".*") or re.search(r"[*{]", pattern[:-1]):
        raise ValueError('layers needs a pattern such as "model.layers.*" with one *, for the number')
    return pattern


def _kind(text: str) -> Kind:
    if text in _SIMPLE:
        return _SIMPLE[text]
    if text == "experts":
        return expert(REPLICATE)
    call = _CALL.fullmatch(text)
    if call is None:
        raise ValueError(f"{text!r} is no kind; valid are {VALID}")
    name, inside = call[1], call[2].strip()
    if name == "merged":
        return merged(*(_simple(part) for part in inside.split(",")))
    if name == "experts":
        return expert(_inner(inside))
    kind, comma, axis = inside.rpartition(",")
    if not comma or not axis.strip().isdecimal() or int(axis) < 1:
        raise ValueError(
            'stacked needs a kind and the axis it cuts, as in "stacked(col, 2)"; axis 0 counts the experts'
        )
    return stacked(_inner(kind.strip()), int(axis))


def _inner(text: str) -> Kind:
    """The kind inside experts(...) or stacked(...)."""
    if text.startswith(("experts", "stacked")):
        raise ValueError(f"{text!r} cannot stand inside another; there, valid are {', '.join(_SIMPLE)} and merged(...)")
    return _kind(text)


def _simple(text: str) -> Kind:
    kind = _SIMPLE.get(text.strip())
    if kind is None:
        raise ValueError(f"{text.strip()!r} cannot stand in merged(...); there, valid are {', '.join(_SIMPLE)}")
    return kind
