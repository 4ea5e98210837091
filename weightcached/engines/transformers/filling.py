"""The skeleton filled with the service's own copy of a checkpoint, for models whose checkpoint names are their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.weights import Weights
from ..names import Assignment, match_names
from .skeleton import building, compute, finish, major_version, put, refuse_meta, replace

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def fill(transformers: Any, model: PreTrainedModel, weights: Weights, folder: Path | None) -> PreTrainedModel:
    """`model`, fresh from `skeleton.build`, with the tensors of `weights` as its parameters.

    Nothing is half-done: with anything missing, left over or of another shape it is an `EngineError`.
    """
    with building:
        assignment = match_names(model, weights)
        if major_version(transformers) >= 5:
            compute(model, assignment.own)
        _assign(model, weights, assignment)
    refuse_meta(model)
    return finish(transformers, model, folder)


def _assign(model: PreTrainedModel, weights: Weights, assignment: Assignment) -> None:
    """Puts the cached tensors in place of the model's own; moves the buffers that the model computed."""
    import torch

    device = next((weights[source].device for source in assignment.parameters.values()), torch.device("cpu"))
    made: dict[str, torch.nn.Parameter] = {}
    for target, source in assignment.parameters.items():
        if source not in made:
            old = model.get_parameter(target)
            made[source] = torch.nn.Parameter(weights[source], requires_grad=False)
            made[source].__dict__.update(old.__dict__)
        put(model, target, made[source])
    own = {name: model.get_parameter(name) for name in assignment.own}
    replace(
        model,
        {name: old for name, old in own.items() if not old.is_meta},  # transformers 4 computes none of them
        lambda old: torch.nn.Parameter(old.to(device), requires_grad=False),
    )
    move_buffers(model, device, except_for=assignment.buffers)
    for target, source in assignment.buffers.items():
        # A model may write its buffers, so they are never the cached memory itself.
        put(model, target, weights[source].clone())


def move_buffers(model: PreTrainedModel, device: torch.device, except_for: dict[str, str]) -> None:
    """Moves the buffers that the model has computed, those of these names excepted."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    computed = {name: buffer for name, buffer in buffers.items() if name not in except_for}
    replace(model, computed, lambda old: old.to(device))
