"""Whether the checkpoint has all of the model that config.json describes. Pure.

A part that is missing cannot be seen in the shards of many ranks, where each is expected to lack something. One tensor
of each layer and each expert is enough here; a layer without any expert may be meant so.
"""

from __future__ import annotations

from collections.abc import Collection

from ..errors import CheckpointError
from .cuts import Misfit
from .model import Model
from .rules import last_number
from .stages import Stages


def require_complete(model: Model, stages: Stages) -> None:
    """`CheckpointError` when a layer of the model, or an expert of a layer that has some, is without any tensor.

    And when a stacked parameter holds more or fewer experts than config.json says. Layers past the model's own are not
    looked at. Where neither config.json nor the model class says a number, nothing is expected.
    """
    layers: set[int] = set()
    experts: dict[str, set[int]] = {}
    rules = model.family.rules
    for tensor in model.tensors:
        layer = stages.layer(tensor.name)
        if layer is not None:
            if layer >= stages.layers:
                continue
            layers.add(layer)
        found = model.rules.find(tensor.name)
        kind = rules[found[0]].kind.experts if found else "no"
        if kind == "named" and (expert := last_number(tensor.name)) is not None:
            experts.setdefault(expert[0], set()).add(expert[1])
        elif kind == "stacked" and (total := _experts(model)) is not None and tensor.shape[:1] != (total,):
            raise _incomplete(
                f"{tensor.name} is {list(tensor.shape)}, and config.json says that there are {total} experts"
            )
    _require_all(layers, stages.layers, f"layers, {stages.prefix}*")
    for prefix, numbers in experts.items():
        _require_all(numbers, _experts(model) or 0, f"experts {prefix}.*")


def _require_all(numbers: Collection[int], total: int, what: str) -> None:
    missing = [number for number in range(total) if number not in numbers]
    if missing:
        raise _incomplete(
            f"of the {total} {what}, {len(missing)} have no tensor, number {missing[0]} first: fetch what is missing"
        )


def _experts(model: Model) -> int | None:
    try:
        return model.sizes.find_experts()
    except Misfit as misfit:
        raise _incomplete(str(misfit)) from None


def _incomplete(problem: str) -> CheckpointError:
    return CheckpointError(file="config.json", problem=problem)
