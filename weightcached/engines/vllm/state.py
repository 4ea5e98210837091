"""What loading and processing leave on a model beside its parameters: what of it is published, and how.

A constructor runs again in every engine, so what it has set needs no carrying: a scalar is carried if it was set or
changed after that. Tensors are another matter, since the model that attaches is constructed without memory.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...client.modules import HeldTensor, NamedTensor, held_tensors
from ...shard.manifest import Scalar, is_scalar

if TYPE_CHECKING:
    import torch

    from ...client.weights import Weights

SMALL = 1 << 20  # bytes
HELD = "weightcached_held"  # a scalar that is on no model for long
_MISSING = object()
_SCALARS = (bool, int, float, str, type(None))
# The last says that a hook has run and need not again: in the next engine it has not, and builds the kernel.
_NOT_CARRIED = frozenset({"training", "_is_full_backward_hook", "_already_called_process_weights_after_loading"})
# Set again by `process_weights_after_loading` on the CPU, or by the engine once it has a KV cache.
_REBUILT = frozenset({"kv_cache", "_k_scale_cpu", "_v_scale_cpu"})
_SCRATCH = ("buffer", "workspace", "scratch", "_buf")  # in names of what is written while the engine runs
# Tables that are only read. Every other buffer may be written: scales, counters, states.
_READ_ONLY = frozenset({"cos_sin_cache", "cos_cached", "sin_cached", "cos_cache", "sin_cache", "inv_freq"})

Snapshot = dict[str, dict[str, Any]]


def snapshot(model: torch.nn.Module) -> Snapshot:
    """The scalars of each module, and which plain attributes are tensors, as its constructor left them."""
    import torch

    kept = (*_SCALARS, torch.Tensor)
    return {
        path: {name: value for name, value in vars(module).items() if isinstance(value, kept)}
        for path, module in model.named_modules()
    }


def changed_scalars(model: torch.nn.Module, before: Snapshot) -> dict[str, Scalar]:
    """Scalars that were set since, by dotted name, such as the flags of drafts (`SupportsEagleBase`)."""
    return {
        _dotted(path, name): value
        for path, module in model.named_modules()
        for name, value in changed(vars(module), before.get(path, {})).items()
        if name not in _NOT_CARRIED
    }


def changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Scalar]:
    """The scalars among the values `now` that `before` lacks, or has with another value or type."""
    return {
        name: value
        for name, value in now.items()
        if is_scalar(value) and (type(known := before.get(name, _MISSING)) is not type(value) or known != value)
    }


def tensor_attributes(model: torch.nn.Module, before: Snapshot) -> dict[str, bool]:
    """Plain tensor attributes to publish, by dotted name -> whether its constructor had made it.

    Of those that constructors make, only small ones that are no scratch memory: constants such as the weight of a norm
    that has none.
    """
    import torch

    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or name in _REBUILT or not value.numel() or value.is_meta:
                continue
            constructed = isinstance(before.get(path, {}).get(name), torch.Tensor)
            if constructed and (_is_scratch(name) or value.nbytes > SMALL):
                continue
            found[_dotted(path, name)] = constructed
    return found


def private(model: torch.nn.Module, attributes: dict[str, bool]) -> Callable[[NamedTensor], bool]:
    """Whether the engine may write a tensor while it runs, so that each needs a copy of its own. `attributes` as above.

    Parameters are never written but by a reload, for which see `reload`.
    """
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def is_private(named: NamedTensor) -> bool:
        if named.role == "parameter" or named.tensor.untyped_storage().data_ptr() in of_parameters:
            return False
        leaf = named.name.rpartition(".")[2]
        if named.role == "buffer":
            return leaf not in _READ_ONLY or named.tensor.nbytes < SMALL
        return attributes.get(named.name, True) or named.tensor.nbytes < SMALL or _is_scratch(leaf)

    return is_private


def other_shapes(model: torch.nn.Module, weights: Weights) -> list[str]:
    """Plain tensor attributes that the model's constructor has made in another shape than the cached ones."""
    import torch

    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for entry in weights.table.tensors:
        path, _, name = entry.name.rpartition(".")
        own = vars(modules[path]).get(name) if entry.role == "attribute" and path in modules else None
        if isinstance(own, torch.Tensor) and own.numel() and tuple(own.shape) != tuple(entry.shape):
            found.append(f"{entry.name} is {list(own.shape)} here, {list(entry.shape)} in the cache")
    return found


def held(tensors: Iterable[HeldTensor]) -> dict[str, int]:
    """How many tensors plain objects hold, by path, with * for numbers: what a kernel has must be there again."""
    paths = (item.path for item in tensors if item.tensor.numel())
    return dict(Counter(re.sub(r"\d+", "*", path) for path in paths if path.rpartition(".")[2] not in _REBUILT))


def held_scalar(model: torch.nn.Module) -> dict[str, Scalar]:
    """`held`, as a scalar that is published with the others."""
    return {HELD: json.dumps(held(held_tensors(model)), sort_keys=True)}


def not_held(model: torch.nn.Module, tensors: Iterable[HeldTensor]) -> list[str]:
    """What plain objects of the publisher held and those of this model, `tensors`, do not. Takes the scalar off it."""
    published = vars(model).pop(HELD, None)
    if published is None:
        return []
    here = held(tensors)
    expected: dict[str, int] = json.loads(published)
    return [f"{path} ({here.get(path, 0)} of {n})" for path, n in expected.items() if here.get(path, 0) < n]


def _is_scratch(name: str) -> bool:
    return any(word in name for word in _SCRATCH)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
