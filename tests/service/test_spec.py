"""What a load is of: equal for configs that mean the same load."""

from __future__ import annotations

from weightcached.config import ModelConfig
from weightcached.service.spec import LoadSpec


def config(**options: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "checkpoint": "/models/m", **options})


def test_a_spec_is_all_that_a_load_depends_on() -> None:
    """Equal configs make equal specs, whatever of them does not concern a load."""
    devices = ("host-0", "host-1")
    spec = LoadSpec.of(config(tensor_parallel=2), devices)
    assert LoadSpec.of(config(tensor_parallel=2, preload=False), devices) == spec
    for changed in (
        {"tensor_parallel": 1, "pipeline_parallel": 2},
        {"checkpoint": "/models/n"},
        {"dtype": "bfloat16"},
        {"rules": ["model.layers.*.extra: col"]},
        {"expert_parallel": True},
        {"publisher": ["x"]},
    ):
        assert LoadSpec.of(config(**{"tensor_parallel": 2, **changed}), devices) != spec
    assert LoadSpec.of(config(tensor_parallel=2), ("host-1", "host-0")) != spec


def test_a_digest_is_of_the_whole_spec() -> None:
    """Specs differ where their digests do; what a config leaves out does not count, so that it may get more fields."""
    devices = ("host-0", "host-1")
    specs = [
        LoadSpec.of(config(**{"tensor_parallel": 2, **changed}), order)
        for changed in (
            {},
            {"checkpoint": "/models/n"},
            {"dtype": "bfloat16"},
            {"rules": ["model.layers.*.extra: col"]},
            {"publisher": ["x"]},
            {"publisher": ["x", "y"]},
        )
        for order in (devices, devices[::-1])
    ]
    assert len({spec.digest for spec in specs}) == len(set(specs)) == 12
    assert LoadSpec.of(config(tensor_parallel=2), devices).digest == specs[0].digest
    assert LoadSpec.of(config(), ("host-0",)).digest == "e09f4ac2002c08b4c6d9b450048d8942"


def test_a_spec_says_which_ranks_are_here() -> None:
    """Of equal devices on two nodes, by another digest; a model that is all here keeps the digest that it had."""
    spec = LoadSpec.of(config(tensor_parallel=2), ("host-0", "host-1"))
    assert spec.first == 0
    assert spec._replace(first=2).digest != spec.digest
