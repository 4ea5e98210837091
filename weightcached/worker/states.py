"""The service's word on each of its models, and what follows from it for who asks for one, or publishes one.

`State` is what `service.models.Model.for_worker` makes, or `for_others` where none of the model's ranks is on this
device; of a model that the service has not named it is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import LoadFailed, ModelFailed, ModelHeldBack, ModelLoading, ModelNotLoaded, NoSuchModel, WeightCacheError
from ..shard.manifest import ManifestHead

State = Mapping[str, Any]


def why_absent(model: str, state: State, device: str, known: list[str]) -> WeightCacheError:
    """Why a model is not here, or not whole, as well as the service knows. `known`: names of what is."""
    progress = state.get("progress", 0.0)
    match state.get("state"):
        case "loading" if state.get("held_back"):
            return ModelHeldBack(model=model, device=device, progress=progress, reason=state.get("reason"))
        case "loading" | "queued":
            return ModelLoading(model=model, device=device, progress=progress)
        case "absent":
            return ModelNotLoaded(model=model, device=device)
        case "failed":
            return ModelFailed(model=model, device=device, reason=state.get("reason"))
    return NoSuchModel(model=model, device=device, known=known)


def for_clients(state: State) -> dict[str, Any]:
    """What who waits for a model is told of it."""
    return {key: state[key] for key in ("state", "progress", "reason", "held_back") if key in state}


def may_retry(state: State) -> bool:
    """Whether its last load failed for want of room, which may be there by now."""
    return state.get("state") == "failed" and bool(state.get("retry"))


def check_spec(head: ManifestHead, state: State) -> None:
    """`LoadFailed` for a shard of a load that is not under way.

    It may come late, after its load has failed or was called off, from a process that was ended just then; or from one
    that has outlived its service. It would be taken for a rank of the load that has replaced its own, or stay where
    nobody expects it. An engine publishes without a spec.
    """
    spec, meant = head.attributes.get("spec"), state.get("spec")
    if spec is not None and "spec" in state and spec != meant:
        under_way = f"the one under way is of spec {meant}" if meant else "none is under way"
        if "belongs" in state:
            under_way = f"the model belongs on {', '.join(state['belongs'])}"
        reason = (
            f"it publishes for a load of spec {spec}, and {under_way}; what is cached stays as it is. End this "
            f"process, and have the service load the model: weightcachectl load {head.model}"
        )
        raise LoadFailed(model=head.model, device=head.device, reason=reason)
