"""Which cached tensor goes where in a transformers model, or why they do not fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..client.weights import Weights
from ..errors import EngineError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_SHOWN = 8  # names of a kind in one message


@dataclass(slots=True)
class Assignment:
    """Model name -> cached name; tied parameters name the same cached tensor.

    `own` are parameters that are in no checkpoint, since the model's code computes them.
    """

    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)


def match_names(model: PreTrainedModel, weights: Weights) -> Assignment:
    """Places every cached tensor. The model's parameters are still those of its constructor, tied ones one object.

    The base model's prefix is added or taken off where only that makes names meet, as `from_pretrained` does; the heads
    of a larger model are then left out. `EngineError` lists what is missing, unexpected or of another shape, except
    what the model class itself says to ignore.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    persistent = set(model.state_dict())
    buffers = {name: value for name, value in model.named_buffers(remove_duplicate=False) if name in persistent}
    placed, unexpected = _place(model, weights, parameters.keys() | buffers.keys())
    assignment, missing, wrong = Assignment(), [], []
    for names in _groups(parameters | buffers):
        chosen = _tie(names, placed, weights)
        if chosen is None:
            ignored = all(_ignored(name, model, "_keys_to_ignore_on_load_missing") for name in names)
            if not ignored:
                missing.append(names[0])
            elif names[0] in parameters:
                assignment.own += names
            continue
        for name in names:
            target = assignment.parameters if name in parameters else assignment.buffers
            target[name] = chosen[name]
            expected = parameters[name] if name in parameters else buffers[name]
            wrong += _misfit(name, expected, weights[chosen[name]])
    unexpected = [name for name in unexpected if not _ignored(name, model, "_keys_to_ignore_on_load_unexpected")]
    problems = [
        *_listed("not in the cache", missing),
        *_listed("not in the model", unexpected),
        *_listed("of another kind", wrong),
    ]
    if problems:
        raise EngineError(
            problem=f"{type(model).__name__} does not fit {weights.manifest.model}: {'; '.join(problems)}"
        )
    return assignment


def conversion(model: PreTrainedModel, names: Iterable[str]) -> str | None:
    """What transformers does to a checkpoint's tensors of these names while it loads them, as half a sentence.

    None where it takes them as they are. Tensors that it fuses, splits or transposes count even if names and shapes
    happen to fit; names that it changes count where the model does not have them.
    """
    names = list(names)
    conversions = _conversions(model)
    rewriting = [item for item in conversions if getattr(item, "operations", None)]
    touched = [name for name in names if any(item.rename_source_key(name)[1] is not None for item in rewriting)]
    if touched:
        return f"transformers rewrites weights while it loads them ({_listed('rewritten', touched)[0]})"
    targets = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(model.state_dict())
    _, unexpected = _place(model, names, targets)
    renamed = [name for name in unexpected if any(item.rename_source_key(name)[0] != name for item in conversions)]
    if renamed:
        return f"transformers renames tensors while it loads them ({_listed('renamed', renamed)[0]})"
    return None


def _groups(named: dict[str, torch.Tensor]) -> Iterable[list[str]]:
    """Names that are one and the same tensor, together."""
    groups: dict[int, list[str]] = {}
    for name, value in named.items():
        groups.setdefault(id(value), []).append(name)
    return groups.values()


def _place(model: PreTrainedModel, found: Iterable[str], targets: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Model name -> found name for all that meet, and the found names that meet nothing."""
    targets = set(targets)
    computed = {name for name, _ in model.named_buffers(remove_duplicate=False)} - targets
    computed_leaves = {leaf for leaf in ("position_ids", "rotary_emb.inv_freq") if any(map(_ends(leaf), computed))}
    prefix = f"{model.base_model_prefix}."
    placed, unexpected, stripped = {}, [], False
    for name in found:
        if name in targets:
            placed[name] = name
        elif name.startswith(prefix) and name.removeprefix(prefix) in targets:
            placed[name.removeprefix(prefix)] = name
            stripped = True
        elif prefix + name in targets:
            placed[prefix + name] = name
        # Buffers that old checkpoints hold and the model now computes; the old ones sat in other modules, too.
        elif name not in computed and not any(_ends(leaf)(name) for leaf in computed_leaves):
            unexpected.append(name)
    if stripped:
        # A base model taken out of a larger one: what is not its own belongs to heads that were not asked for.
        unexpected = [name for name in unexpected if name.startswith(prefix)]
    return placed, unexpected


def _tie(names: list[str], placed: dict[str, str], weights: Weights) -> dict[str, str] | None:
    """The cached tensor for each name of one tied parameter; None if the cache has none of them.

    The bytes decide: names that the checkpoint holds with different bytes are not tied, whatever the config says.
    """
    present = [name for name in names if name in placed]
    if not present:
        return None
    first = placed[present[0]]
    chosen = dict.fromkeys(names, first)
    for name in present[1:]:
        if not _same(weights[first], weights[placed[name]]):
            chosen[name] = placed[name]
            logger.warning("%s and %s should be tied, but the checkpoint holds them with different values", first, name)
    return chosen


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype:
        return True
    return a.dtype == b.dtype and bool(a.equal(b))


def _misfit(name: str, expected: torch.Tensor, found: torch.Tensor) -> list[str]:
    if expected.shape != found.shape:
        return [f"{name} is {list(found.shape)}, the model's is {list(expected.shape)}"]
    if expected.is_floating_point() and (not found.is_floating_point() or found.dtype.itemsize < 2):
        return [f"{name} is {found.dtype}, quantised perhaps"]
    return []


def _conversions(model: PreTrainedModel) -> list[Any]:
    """What transformers 5 does to names and tensors of this model's checkpoints while it loads them; 4 does nothing."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model))


def _ignored(name: str, model: PreTrainedModel, attribute: str) -> bool:
    """Whether a pattern of the model's own list of exceptions finds the name."""
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


def _ends(leaf: str) -> Any:
    return re.compile(rf"(^|\.){re.escape(leaf)}$").search


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]
