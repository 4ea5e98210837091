"""What a device's worker and its service say of a model that is not there: is it coming, is it there in another form.

The worker knows what is cached and who has reserved room; what is configured, and what is being loaded, the service
knows. It is asked at its own socket, which a service that is starting binds before it knows either.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelError, ModelFailed, ModelLoading, ModelNotLoaded, WeightCacheError
from ..paths import check_runtime_dir, control_path
from ..shard.manifest import read_key
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Status

Shard = Mapping[str, Any]  # as a worker's status describes it
_log = logging.getLogger(__name__)


class Configured(NamedTuple):
    """A model of the service's config, as the service describes it."""

    model: str
    state: str  # "absent", "queued", "loading", "cached" or "failed"
    progress: float  # of a load, 0 to 1
    reason: str | None  # why the last load failed

    @property
    def coming(self) -> bool:
        return self.state in ("queued", "loading")

    def why_not_there(self, device: str) -> ModelError | None:
        """The error of who asks for it by name; None where it is there."""
        match self.state:
            case "queued" | "loading":
                return ModelLoading(model=self.model, device=device, progress=self.progress)
            case "absent":
                return ModelNotLoaded(model=self.model, device=device)
            case "failed":
                return ModelFailed(model=self.model, device=device, reason=self.reason)
        return None


def configured(
    status: Mapping[str, Any], checkpoint: Path | None, name: str | None, layout: str, end: float
) -> Configured | None:
    """The model of the service's config that would bring what is wanted; None too where the service does not say.

    `status` is that of a worker of the service. The model is the one called `name`, or, without one, that of these
    files. The built-in loader brings the layout "checkpoint", any other one comes of a publisher only.
    """
    device = status["device"]
    try:
        check_runtime_dir()
        with Connection.open(control_path(status["instance"]), timeout=seconds_left(end)) as connection:
            models = connection.ask(Status(), timeout=seconds_left(end))["models"]
    except WeightCacheError as error:  # another user's service, say, which tells its own user alone
        _log.debug("the service of %s is not asked: %s", device, error)
        return None
    for model in models:
        published = bool(model.get("publisher"))
        meant = model["model"] == name if name is not None else _same_files(model["checkpoint"], checkpoint)
        if meant and device in model["devices"] and published == (layout != "checkpoint"):
            progress = model["bytes_done"] / model["bytes_to_read"] if model["bytes_to_read"] else 0.0
            return Configured(model["model"], model["state"], progress, (model["error"] or {}).get("message"))
    return None


def in_another_form(
    shards: Sequence[Shard], key: Mapping[str, Any], checkpoint: Path
) -> tuple[str, dict[str, list[Any]]] | None:
    """Name and differences of a cached shard of this checkpoint that is not as wanted; the most similar one."""
    found = [
        (shard["model"], differences)
        for shard in shards
        if shard["state"] == "cached"
        and _same_files(shard.get("checkpoint"), checkpoint)
        and (differences := _differences(shard, key))
    ]
    return min(found, key=lambda item: len(item[1]), default=None)


def _differences(shard: Shard, key: Mapping[str, Any]) -> dict[str, list[Any]]:
    return read_key(shard["key"]).differences(dict(key))


def _same_files(theirs: str | None, ours: Path | None) -> bool:
    """Whether two paths name one checkpoint: a folder, or the one file in it."""
    if theirs is None or ours is None:
        return False
    theirs, mine = os.path.realpath(theirs), os.path.realpath(ours)
    return (
        theirs == mine
        or (theirs.endswith(".safetensors") and os.path.dirname(theirs) == mine)
        or (mine.endswith(".safetensors") and os.path.dirname(mine) == theirs)
    )
