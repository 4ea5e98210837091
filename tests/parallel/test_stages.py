"""Which stages hold a tensor."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.errors import SliceError
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.rules import Family
from weightcached.parallel.sizes import Sizes
from weightcached.parallel.stages import Stages, layer_of

FAMILY = Family("Llama", first=("model.embed_tokens", "model.merger.**"))


def stages(
    pipeline: int, *, tied: bool = False, family: Family = FAMILY, layers: Any = "vllm", total: int = 8
) -> Stages:
    return Stages(
        Parallel(tensor=2, pipeline=pipeline, layers=layers), family, Sizes({"num_hidden_layers": total}), tied
    )


def test_a_layer_is_on_its_stage() -> None:
    """By the number after the prefix; 8 layers on 3 stages are 3, 3 and 2."""
    found = stages(3)

    assert found.ranges == ((0, 3), (3, 6), (6, 8))
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(8)]
    assert [found.of(name) for name in names] == [(0,)] * 3 + [(1,)] * 3 + [(2,)] * 2


def test_layers_past_the_models_own_are_nobodys() -> None:
    """With any number of stages: they are for multi-token prediction."""
    for pipeline in (1, 2):
        assert stages(pipeline).of("model.layers.8.eh_proj.weight") == ()
        assert stages(pipeline).of("model.layers.80.norm.weight") == ()


def test_the_ends_are_on_the_first_and_the_last_stage() -> None:
    """Embedding first, norm and head last; by module, by pattern, and whatever of the module it is."""
    found = stages(3)

    assert found.of("model.embed_tokens.weight") == found.of("model.merger.a.bias") == (0,)
    assert found.of("model.norm.weight") == found.of("lm_head.weight") == found.of("lm_head.weight_scale") == (2,)


def test_a_tied_embedding_is_on_both_ends() -> None:
    """The last stage computes with it; with one stage the ends are the same."""
    assert stages(3, tied=True).of("model.embed_tokens.weight") == (0, 2)
    assert stages(1, tied=True).of("model.embed_tokens.weight") == (0,)


def test_what_belongs_to_no_layer_and_no_end_is_everywhere() -> None:
    """A vision tower, and names that only look like a layer's."""
    for name in ("visual.layers.3.weight", "model.layers.x.weight", "model.layers_norm.weight", "model.layers.²"):
        assert stages(3).of(name) == (0, 1, 2)


def test_a_name_of_both_ends_is_on_both() -> None:
    """A user's rules may say both of one tensor."""
    family = Family("New", layers="h.", first=("wte",), last=("wte",), embedding=None)

    assert stages(3, family=family).of("wte.weight") == (0, 2)


def test_one_stage_has_no_ranges() -> None:
    """`ranges` is for pipelines; without one everything is on the only stage."""
    assert stages(1).ranges is None
    assert stages(1).of("lm_head.weight") == stages(1).of("model.layers.7.x") == (0,)


def test_layers_that_cannot_be_shared_out() -> None:
    """No prefix, no number of layers, or counts that do not add up: the family and both numbers are named."""
    with pytest.raises(SliceError, match=r'New: no rule says where its layers are; add one such as "model.layers.\*'):
        stages(2, family=Family("New", layers=None))
    with pytest.raises(SliceError, match="Llama: pipeline layers 3, 4 add up to 7, the model has 8 layers"):
        stages(2, layers=(3, 4))
    with pytest.raises(SliceError, match="Llama: 8 layers do not fill 9 pipeline stages"):
        stages(9)
    with pytest.raises(SliceError, match=r"Llama: config\.json does not say num_hidden_layers"):
        Stages(Parallel(tensor=2), FAMILY, Sizes({}), tied=False)


def test_without_a_pipeline_nobody_asks_where_layers_are() -> None:
    """An unknown architecture with the user's rules needs none for its layers."""
    assert stages(1, family=Family("New", layers=None)).of("h.999.weight") == (0,)


def test_the_layer_of_a_name() -> None:
    """The number right behind the prefix; stages without a prefix know none."""
    assert (
        layer_of("model.layers.12.mlp.weight", "model.layers.") == stages(1).layer("model.layers.12.mlp.weight") == 12
    )
    assert layer_of("model.layers.12.mlp.weight", "model.") is None
    assert layer_of("vision.layers.12.weight", "model.layers.") is None
    assert stages(1).layers == 8
    without = stages(1, family=Family("New", layers=None))
    assert (without.layer("model.layers.12.mlp.weight"), without.layers) == (None, 0)
