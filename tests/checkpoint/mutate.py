"""Changes to a JSON document that a reader of safetensors should be shown: small, aimed, many of them still valid.

Shared by the property tests and the fuzz targets. All chance comes from the caller's `random.Random`, so a run that
hypothesis or libFuzzer repeats makes the same document.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tests.checkpoint.oracle import BITS, Pairs


class Raw(str):
    """JSON text that Python's writer would not write."""


# What readers of JSON differ in, and the edges of integers and sizes.
VALUES = (
    *map(
        Raw, ("null", "true", "false", "-0", "0.0", "1.0", "1e2", "NaN", "Infinity", "1e999", "01", "+1", '"\\ud800"')
    ),
    *map(Raw, ("[]", "{}", '""', '"\\u0000"', '"\\ud83d\\ude00"', "9" * 5000, "[" * 200 + "]" * 200)),
    *map(Raw, ('["F32",[1],[0,4]]', '{"a":"b"}', '{"a":"b","a":"b"}', '"a" "b"', "/**/1", "'a'", "1,", '"\t"')),
    *(-1, 0, 1, 2, 3, 4, 7, 8, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
)
KEYS = ("__metadata__", "dtype", "shape", "data_offsets", "weight_map", "metadata", "total_size", "", "w", "é", "\0")
TOKENS = (
    b"0",
    b"-",
    b"9" * 30,
    b'"',
    b"{",
    b"]",
    b",",
    b":",
    b"\\ud800",
    b"\0",
    b"\xff",
    b"true",
    b"\xef\xbb\xbf",
    b" ",
)


def mutate(text: bytes, chance: random.Random) -> bytes:
    """`text` with one to three changes: to its JSON values where it is JSON, to its bytes otherwise and at times."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        try:
            tree = json.loads(text, object_pairs_hook=Pairs)
        except (ValueError, RecursionError):
            tree = None
        text = mutate_bytes(text, chance) if tree is None or chance.random() < 0.1 else write(change(tree, chance))
    return text


def mutate_bytes(text: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, put in or left out anywhere."""
    at = chance.randint(0, len(text))
    inserted = chance.choice(TOKENS) if chance.random() < 0.5 else chance.randbytes(chance.randint(0, 2))
    return text[:at] + inserted + text[at + chance.randint(0, 3) :]


def write(tree: Any) -> bytes:
    """The JSON text of a tree of `Pairs`, lists, `Raw` and plain values, in any spacing that JSON allows."""
    return _text(tree).encode("utf-8", "surrogatepass")


def _text(node: Any) -> str:
    if isinstance(node, Raw):
        return node
    if isinstance(node, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{_text(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(_text, node)) + "]"
    return json.dumps(node)


def change(tree: Any, chance: random.Random) -> Any:
    """The tree with one change, somewhere in it."""
    if isinstance(tree, Pairs | list) and tree and chance.random() < (0.8 if isinstance(tree, Pairs) else 0.5):
        at = chance.randrange(len(tree))
        if isinstance(tree, list):
            return [*tree[:at], change(tree[at], chance), *tree[at + 1 :]]
        key, value = tree[at]
        if chance.random() < 0.1:
            return Pairs([*tree[:at], (chance.choice(KEYS), value), *tree[at + 1 :]])
        return Pairs([*tree[:at], (key, change(value, chance)), *tree[at + 1 :]])
    if isinstance(tree, Pairs):
        return _change_members(tree, chance)
    if isinstance(tree, list):
        return _change_elements(tree, chance)
    if tree in BITS and chance.random() < 0.7:
        return chance.choice(list(BITS))
    if type(tree) is int and chance.random() < 0.7:
        return chance.choice((tree + 1, tree - 1, tree * 2, tree + 8, tree // 2))
    return chance.choice(VALUES)


def _change_members(pairs: Pairs, chance: random.Random) -> Any:
    members = list(pairs)
    kind = chance.randrange(6)
    if kind == 0:  # a valid tensor more, behind the others
        return Pairs([*members, (f"n{chance.randrange(9)}", _entry_behind(members, chance))])
    if kind == 1:
        return Pairs([*members, (chance.choice(KEYS), chance.choice(VALUES))])
    if kind == 2:
        chance.shuffle(members)
        return Pairs(members)
    if members and kind == 3:
        members.insert(chance.randrange(len(members) + 1), chance.choice(members))
        return Pairs(members)
    if members and kind == 4:
        del members[chance.randrange(len(members))]
        return Pairs(members)
    return chance.choice(VALUES)


def _change_elements(elements: list[Any], chance: random.Random) -> Any:
    kind = chance.randrange(5)
    if kind == 0:
        return [*elements, chance.choice(VALUES)]
    if kind == 1:  # no other size, for a shape
        return [*elements[: (at := chance.randint(0, len(elements)))], 1, *elements[at:]]
    if kind == 2:
        return elements[::-1]
    if kind == 3:
        return elements[1:]
    return chance.choice(VALUES)


def _entry_behind(members: list[tuple[str, Any]], chance: random.Random) -> Pairs:
    begin = last_end(members)
    dtype, shape = chance.choice(list(BITS)), [chance.choice((0, 1, 2, 8)), chance.choice((0, 4, 16))]
    nbytes = shape[0] * shape[1] * BITS[dtype] // 8
    return Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", [begin, begin + nbytes])])


def last_end(members: Any) -> int:
    """The largest end that an entry of a header's members states: how many bytes of data it asks for. 0 without one."""
    ends = [0]
    for entry in (value for _, value in members if isinstance(value, Pairs)):
        for field, offsets in entry:
            if field == "data_offsets" and isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int:
                ends.append(offsets[1])
    return max(ends)
