"""Numbers of config.json."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.parallel.cuts import Misfit
from weightcached.parallel.sizes import Sizes


def test_the_numbers_of_a_plain_config() -> None:
    """Each under the name that config.json has for it; head_dim is derived when it is left out."""
    sizes = Sizes(
        {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "num_hidden_layers": 61}
        | {"n_routed_experts": 256}
    )

    assert (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.layers, sizes.experts) == (32, 8, 128, 61, 256)
    assert Sizes({"head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64}).head_dim == 64


def test_the_sizes_of_a_head() -> None:
    """head_dim or what it is derived from, beside it that of values; none where nothing says one or it depends."""
    derived = {"hidden_size": 64, "num_attention_heads": 8}

    assert Sizes(derived).head_sizes == (8,)
    assert Sizes(derived | {"head_dim": 16, "v_head_dim": 16}).head_sizes == (16,)
    assert Sizes(derived | {"head_dim": 24, "v_head_dim": 16}).head_sizes == (24, 16)
    assert Sizes(derived | {"kv_lora_rank": 32}).head_sizes == ()
    assert Sizes({"num_attention_heads": 8}).head_sizes == ()


def test_a_nested_config_is_read_first() -> None:
    """text_config goes before the top level, and the top level is there for what it leaves out."""
    sizes = Sizes({"text_config": {"num_attention_heads": 8}, "num_attention_heads": 16, "num_hidden_layers": 2})

    assert (sizes.heads, sizes.layers) == (8, 2)


def test_what_the_model_class_supplies() -> None:
    """A default is a number or another key, and gives way to config.json; null counts as left out."""
    defaults: dict[str, int | str] = {"num_attention_heads": 8, "num_key_value_heads": "num_attention_heads"}

    assert Sizes({"num_key_value_heads": None}, defaults).kv_heads == 8
    assert Sizes({"num_attention_heads": 4}, defaults).kv_heads == 4
    assert Sizes({"num_attention_heads": 4, "num_key_value_heads": 2}, defaults).kv_heads == 2


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_each_family_has_its_word_for_experts(key: str) -> None:
    """Mixtral, Qwen and DeepSeek name the same number differently."""
    assert Sizes({key: 60}).experts == Sizes({key: 60}).find_experts() == 60
    assert Sizes({}).find_experts() is None


@pytest.mark.parametrize(
    ("config", "name", "sentence"),
    [
        ({}, "heads", "config.json does not say num_attention_heads"),
        ({"num_attention_heads": 8}, "kv_heads", "config.json does not say num_key_value_heads"),
        ({"num_hidden_layers": [1, 2]}, "layers", r"num_hidden_layers of config.json must be .* found \[1, 2\]"),
        ({"num_hidden_layers": 0}, "layers", "at least 1, found 0"),
        ({"num_attention_heads": True}, "heads", "at least 1, found True"),
        ({"num_attention_heads": 7, "hidden_size": 64}, "head_dim", "hidden_size 64 is no multiple of 7 heads"),
        ({}, "experts", "config.json says none of num_local_experts, num_experts, n_routed_experts"),
    ],
)
def test_what_is_not_said_is_not_guessed(config: dict[str, Any], name: str, sentence: str) -> None:
    """The key and what stands there are in the refusal."""
    with pytest.raises(Misfit, match=sentence):
        getattr(Sizes(config), name)
