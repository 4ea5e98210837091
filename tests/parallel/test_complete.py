"""What a checkpoint must have of the model that config.json describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.parallel.tensors import tensor
from weightcached.checkpoint.header import TensorRange
from weightcached.errors import CheckpointError
from weightcached.parallel.casts import Casts
from weightcached.parallel.complete import require_complete
from weightcached.parallel.model import Model
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.rules import COL, ROW, Family, Rule, expert, stacked
from weightcached.parallel.stages import Stages

RULES = (Rule("model.layers.*.e.*.up", expert(COL)), Rule("model.layers.*.e.all", stacked(ROW, 1)))
LAYERS = [tensor(f"model.layers.{layer}.norm.weight", (4,)) for layer in range(3)]
EXPERTS = [tensor(f"model.layers.{layer}.e.{number}.up.weight", (4, 4)) for layer in (1, 2) for number in range(6)]


def check(tensors: Sequence[TensorRange], layers: str | None = "model.layers.", **config: Any) -> None:
    family = Family("F", rules=RULES, layers=layers)
    model = Model(tensors, {"num_hidden_layers": 3} | config, family, Casts(None))
    require_complete(model, Stages(Parallel(tensor=2), family, model.sizes, model.tied))


def test_a_complete_model() -> None:
    """Layers without experts, a layer past the model's own with just one of them: nothing is missing."""
    drafting = tensor("model.layers.3.e.0.up.weight", (4, 4))

    check([*LAYERS, *EXPERTS, drafting, tensor("model.layers.0.e.all", (6, 4))], num_experts=6)
    check([], layers=None)


@pytest.mark.parametrize("gone", range(3))
def test_every_layer_has_a_tensor(gone: int) -> None:
    """The first, one between, the last: how many are missing, and which."""
    with pytest.raises(CheckpointError, match=rf"of the 3 layers, model\.layers\.\*, 1 have no tensor, number {gone} "):
        check([one for index, one in enumerate(LAYERS) if index != gone])


def test_every_expert_of_a_layer_has_a_tensor() -> None:
    """One missing in one layer, or all past the sixth; without a number in config.json none is expected."""
    with pytest.raises(
        CheckpointError, match=r"the 6 experts model\.layers\.2\.e\.\*, 1 have no tensor, number 4 first"
    ):
        check([*LAYERS, *(one for one in EXPERTS if "2.e.4" not in one.name)], num_experts=6)
    with pytest.raises(
        CheckpointError, match=r"the 12 experts model\.layers\.1\.e\.\*, 6 have no tensor, number 6 first"
    ):
        check([*LAYERS, *EXPERTS], num_experts=12)
    check([*LAYERS, *EXPERTS[3:]])
    with pytest.raises(CheckpointError, match=r"num_experts of config\.json must be a whole number"):
        check([*LAYERS, *EXPERTS], num_experts="six")


@pytest.mark.parametrize("shape", [(6, 4), ()])
def test_a_stacked_parameter_has_all_experts(shape: tuple[int, ...]) -> None:
    """Its first side is their number, if config.json says one."""
    stack = tensor("model.layers.0.e.all", shape)

    with pytest.raises(
        CheckpointError, match=r"layers\.0\.e\.all is \[.*\], and config.json says that there are 12 exp"
    ):
        check([*LAYERS, stack], num_experts=12)
    check([*LAYERS, stack])
