"""Plain values that processing leaves in kernel objects, such as the width of a weight before it was padded.

A quantisation method has such objects, which are no modules. Pre-processed mode does not call them, so that the CUTLASS
kernel of FP8 weights with one scale, for one, would not know its `logical_output_size` (vLLM 0.32.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...shard.manifest import Scalar, is_scalar
from . import state

if TYPE_CHECKING:
    import torch

KERNELS = "weightcached_kernels"  # the scalar that carries them, as JSON, in the manifest

Values = dict[str, dict[str, Scalar]]  # by the module's path, a colon, and the method's attribute that is the kernel


def values(model: torch.nn.Module) -> Values:
    """The plain values of all kernel objects of a model as they are now."""
    return {
        f"{path}:{name}": {key: value for key, value in vars(kernel).items() if is_scalar(value)}
        for path, module in model.named_modules()
        for name, kernel in _kernels(module)
    }


def changed(model: torch.nn.Module, before: Values) -> dict[str, Scalar]:
    """The values that are new or others than `before`, as the scalar KERNELS, to be published; {} if there are none."""
    now = values(model)
    found = {place: new for place in now if (new := state.changed(now[place], before.get(place, {})))}
    return {KERNELS: json.dumps(found, sort_keys=True)} if found else {}


def restore(model: torch.nn.Module) -> list[str]:
    """Sets the values in KERNELS, which `install` has put on the model, and takes it off the model.

    Returns the kernels that this model lacks.
    """
    published = vars(model).pop(KERNELS, None)
    lacking = []
    for place, new in json.loads(published or "{}").items():
        path, _, name = place.rpartition(":")
        kernel = dict(_kernels(model.get_submodule(path))).get(name)
        if kernel is None:
            lacking.append(place)
        else:
            vars(kernel).update(new)
    return lacking


def _kernels(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The objects in a module's quantisation method that process weights, by the method's name for them."""
    method = getattr(module, "quant_method", None)
    for name, value in getattr(method, "__dict__", {}).items():
        if hasattr(type(value), "process_weights_after_loading") and hasattr(value, "__dict__"):
            yield name, value
