"""Reloading weights into a running engine: shared memory is never written; it gets copies of its own first."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from ...client.modules import held_tensors, named_tensors
from ...errors import EngineError
from .build import holders

if TYPE_CHECKING:
    import torch

    from ...client.weights import Weights

_log = logging.getLogger(__name__)
ATTRIBUTE = "_weightcached"  # of a model: the Weights that it runs from
_MARK = "_weightcached_guard"
# All of vLLM's ways to write into a model that runs; each gets the model first.
_WRITERS = (
    ("vllm.model_executor.model_loader.reload.layerwise", "initialize_layerwise_reload"),
    ("vllm.model_executor.model_loader.reload.inplace", "get_parameter_for_reload"),
)


def guard_reloads() -> None:
    """Has vLLM's reloads, and weight transfers that go through them, call `make_private` first. May be called again."""
    for path, name in _WRITERS:
        try:
            original = getattr(importlib.import_module(path), name, None)
        except ModuleNotFoundError:  # 0.30 and 0.31 have no `inplace`
            continue
        if original is None or hasattr(original, _MARK):
            continue
        guarded = _guarded(original)
        for names in holders(original, name):
            names[name] = guarded


def make_private(model: Any) -> None:
    """Gives the model writable copies of what it shares. Needs the memory for them; nothing if it shares nothing."""
    weights: Weights | None = getattr(model, ATTRIBUTE, None)
    if weights is None:
        return
    _log.info("the weights of %s are copied for this engine (%d bytes), since they are about to be written",
              weights.manifest.model, weights.nbytes)  # fmt: skip
    # Also what the engine derived from the weights, such as the views that a kernel object holds.
    for item in named_tensors(model):
        weights.hand_out(item.name, item.tensor)
    for held in held_tensors(model):
        weights.hand_out(held.path, held.tensor)
    weights.private_copy()
    setattr(model, ATTRIBUTE, None)


def copy_into(model: torch.nn.Module, weights: Weights) -> None:
    """Writes cached weights into a model that was loaded before. `EngineError`, and nothing written, if any differs."""
    import torch

    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    names = [entry.name for entry in weights.table.tensors if entry.role != "attribute"]
    wrong = [
        name
        for name in names
        if name not in own or own[name].shape != weights[name].shape or own[name].dtype != weights[name].dtype
    ]
    if wrong:
        shown = ", ".join(wrong[:8])
        raise EngineError(problem=f"not reloaded, since these are of another form in the cache: {shown}; restart vLLM")
    make_private(model)
    with torch.no_grad():
        for name in names:
            own[name].data.copy_(weights[name])


def _guarded(original: Any) -> Any:
    @functools.wraps(original)
    def guarded(model: Any, *args: Any, **kwargs: Any) -> Any:
        make_private(model)
        return original(model, *args, **kwargs)

    setattr(guarded, _MARK, True)
    return guarded
