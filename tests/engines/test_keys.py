"""engines/keys.py: digests are the same in every process; names keep apart what must not take each other's place."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weightcached.engines.keys import bytes_on_disk, digest_of, plain, published_name, without
from weightcached.text import MODEL_NAME


class Color(enum.Enum):
    RED = 1


class Settings:
    """Says nothing of itself: its text has its address."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._cached = object()


@dataclass
class Fields:
    value: Any


def test_digest_knows_no_addresses_and_orders() -> None:
    """Sets, mappings, numbers that are equal, and objects without a text of their own."""
    assert digest_of({"a": {1, 2}, "b": 1.0}) == digest_of({"b": 1, "a": {2, 1}})
    assert digest_of(object()) == digest_of(object())
    assert digest_of(Settings(1)) == digest_of(Settings(1))
    assert len(digest_of(None)) == 16


@pytest.mark.parametrize("kind", [Settings, Fields, lambda value: {"value": value}, lambda value: [value]])
def test_digest_knows_values(kind: Any) -> None:
    """What differs inside of an object makes another digest."""
    seen = [kind(value) for value in (1, 1.5, "1", None, True, Color.RED, int, [1], {1, 2}, Settings(2), Fields(2))]
    assert len({digest_of(item) for item in seen}) == len(seen)


def test_an_object_that_holds_itself_has_an_end() -> None:
    """Engines' settings refer to each other."""
    settings = Settings(1)
    settings.value = [settings]
    assert plain(settings) == {"class": "Settings", "value": ["Settings"]}


def test_entries_are_left_out_at_every_depth() -> None:
    """Also in lists, as a config of several models has them."""
    config = {"name": 1, "parts": [{"name": 2, "size": 3}, "name"], "size": {"name": 4}}
    assert without(config, {"name"}) == {"parts": [{"size": 3}, "name"], "size": {}}


def test_names_keep_apart(tmp_path: Path) -> None:
    """Folders of one name, layouts of one folder; whatever the model is called, a service takes the name."""
    layouts = ("vllm-0.33.0/0123", "sglang-0.5.23/0123")
    names = {published_name("Qwen 3", folder, layout) for folder in (tmp_path, None) for layout in layouts}
    assert len(names) == 4
    assert published_name("org/Qwen 3", None, layouts[0]).startswith("Qwen-3-vllm-")
    for model in ("", "..", "\u00e9" * 300, "a/b", ".hidden"):
        assert MODEL_NAME.fullmatch(published_name(model, None, layouts[0]))


def test_bytes_on_disk(tmp_path: Path) -> None:
    """Only what is weights counts."""
    for name, size in (("a.safetensors", 3), ("b.safetensors", 4), ("config.json", 50)):
        (tmp_path / name).write_bytes(bytes(size))
    assert bytes_on_disk(tmp_path) == 7
    assert bytes_on_disk(None) == 0
