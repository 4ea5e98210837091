"""Identity: what makes two shards the same."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import pytest

from weightcached.shard.key import FORMAT_VERSION, KEY_FIELDS, ShardKey

KEY = ShardKey(
    content="xxh3:00",
    architecture="BertModel",
    dtype="float32",
    tensor_parallel_size=2,
    tensor_parallel_rank=1,
    pipeline_parallel_size=2,
    layers=(0, 6),
)
OTHER = {str: "another", int: 77, tuple: (3, 9), type(None): "another"}


@pytest.mark.parametrize("name", sorted(KEY_FIELDS))
def test_every_field_counts(name: str) -> None:
    """A key that differs in any one field is another key, and the difference names the field with both values."""
    cached = getattr(KEY, name)
    wanted = OTHER[type(cached)]

    other = replace(KEY, **{name: wanted})

    assert other != KEY
    found = KEY.differences(asdict(other))
    assert found == {name: json.loads(json.dumps([wanted, cached]))}


def test_only_the_fields_asked_for_must_match() -> None:
    """An attach by name alone asks for nothing, and one field asks for one."""
    assert KEY.differences({}) == {}
    assert KEY.differences({"dtype": "float32"}) == {}
    assert KEY.differences({"dtype": "bfloat16"}) == {"dtype": ["bfloat16", "float32"]}


def test_several_differences_are_all_listed() -> None:
    """The answer to a mismatch is complete at once."""
    assert set(KEY.differences({"dtype": "x", "content": "y", "role": "main", "layers": None})) == {
        "dtype",
        "content",
        "layers",
    }


def test_none_asks_for_none() -> None:
    """A field wanted as None matches only a shard that has none."""
    assert KEY.differences({"revision": None}) == {}
    assert KEY.differences({"architecture": None}) == {"architecture": [None, "BertModel"]}


def test_a_key_out_of_json_matches_itself() -> None:
    """A client's key crosses the socket as JSON, where the layer range is a list; it is still the same key."""
    assert KEY.differences(json.loads(json.dumps(asdict(KEY)))) == {}


def test_keys_are_hashable_and_complete() -> None:
    """Equal keys find each other in a dict; the format version is part of the identity."""
    assert {KEY: 1}[replace(KEY)] == 1
    assert KEY.format_version == FORMAT_VERSION
    assert {field.name for field in fields(ShardKey)} == KEY_FIELDS
