"""A checkpoint by modules, and what config.json says of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.tensors import tensor
from weightcached.parallel.casts import Casts
from weightcached.parallel.model import Model, architecture
from weightcached.parallel.rules import COL, Family, Rule

TENSORS = [
    *(
        tensor(f"model.layers.{layer}.{part}", (4, 4))
        for layer in range(3)
        for part in ("up.weight", "up.weight_scale", "down.weight")
    ),
    tensor("model.layers.3.up.weight", (8, 4)),
    tensor("alone", (1,)),
]


def model(config: dict[str, Any] | None = None, family: Family | None = None, dtype: str | None = None) -> Model:
    family = family or Family("F")
    return Model(TENSORS, config or {}, family, Casts(dtype, family.uncast))


def test_tensors_by_module() -> None:
    """Each tensor once, in its module, under what it is there."""
    found = model()

    assert [f"{module}.{leaf}".lstrip(".") for module, leaf in found.places] == [one.name for one in TENSORS]
    assert sorted(found.modules["model.layers.1.up"]) == ["weight", "weight_scale"]
    assert found.modules[""]["alone"] is TENSORS[-1]
    assert found.holds("model.layers.3.up.qweight")
    assert not found.holds("model.layers.3.down.weight")


def test_modules_that_are_alike_have_one_signature() -> None:
    """A layer is like the next one; another shape, or a rule about just this layer, makes it different."""
    plain = model()
    assert plain.signature("model.layers.0.up") == plain.signature("model.layers.2.up")
    assert plain.signature("model.layers.0.up") != plain.signature("model.layers.3.up")
    assert plain.signature("model.layers.0.up") != plain.signature("model.layers.0.down")

    for family in (Family("F", rules=(Rule("model.layers.2.up", COL),)), Family("F", uncast=("model.layers.2.up",))):
        special = model(family=family)
        assert special.signature("model.layers.0.up") != special.signature("model.layers.2.up")


def test_a_sample_has_each_signature_once() -> None:
    """Whole modules: one of the three equal layers, the odd one, and the tensor without a module."""
    found = model().sample()

    assert len(found.tensors) == 5
    assert {found.signature(module) for module in found.modules} == {
        model().signature(name) for name in model().modules
    }


@pytest.mark.parametrize(
    ("config", "family_ties", "tied"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"tie_word_embeddings": True}, False, True),
        ({"tie_word_embeddings": False}, True, False),
        ({"tie_word_embeddings": None}, True, True),
        ({"text_config": {"tie_word_embeddings": True}}, False, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False, False),
    ],
)
def test_whether_embeddings_are_tied(config: dict[str, Any], family_ties: bool, tied: bool) -> None:
    """config.json decides, its top level first; where it is silent the family's habit does."""
    assert model(config, Family("F", tied=family_ties)).tied is tied


def test_the_type_in_the_shard() -> None:
    """A plain weight is cast, the scale beside it is not."""
    found = model(dtype="float16")

    assert found.dtype("model.layers.0.up", "weight") == "F16"
    assert found.dtype("model.layers.0.up", "weight_scale") == "BF16"


def test_the_name_of_an_architecture() -> None:
    """The first of the list, or words for its absence."""
    assert architecture({"architectures": ["A", "B"]}) == "A"
    for config in ({}, {"architectures": []}, {"architectures": "A"}):
        assert architecture(config) == "a model whose config.json names no architecture"
