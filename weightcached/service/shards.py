"""What the workers report of their shards, and what becomes of the models by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from .models import Model
from .reload import weights_of
from .slicings import slicing
from .vault import HeldShard

if TYPE_CHECKING:
    from .main import Service

_log = logging.getLogger(__name__)


class Shards:
    """Who is told what workers say (`workers.WorkerOwner`). Borrows all parts of the service."""

    def __init__(
        self,
        service: Service,
        *,
        load: Callable[[list[Model]], None],
        take_over: Callable[[ModelConfig, tuple[str, ...], Model | None], Model],
        changed: Callable[[Model], None],
        tell_workers: Callable[[Iterable[str]], None],
        announce: Callable[[dict[str, Any]], None],
    ) -> None:
        """`load` queues models, `take_over` makes one of a config, `changed` is called at each change of a model's
        state, `tell_workers` tells those of some devices what has become of the models there, `announce` tells who
        follows the service of an event."""
        self._service = service
        self._load = load
        self._take_over = take_over
        self._changed = changed
        self._tell_workers = tell_workers
        self._announce = announce

    def model_wanted(self, device: str, model: str) -> None:
        state = self._model_on(device, model) or self._make_slicing(model)
        if state is not None and (state.state == "absent" or state.may_be_tried_again):
            self._load([state])

    def shard_arrived(self, device: str, model: str, generation: int) -> None:
        shard = self._service.vault.find(device, model)
        state = self._model_on(device, model)
        if state is not None and shard is not None and not _is_late(shard, state):
            # The newest, whichever was published last.
            state.published(device, shard.generation, shard.nbytes, weights_of(shard))
            self._service.cluster.models_changed()
            if not state.given_out:
                # Before the shard is given out. That a model is whole is said after it, in `shard_held`: until then its
                # worker has the rank of the load before.
                self._tell_workers(state.devices)

    def shard_held(self, device: str, model: str, generation: int) -> None:
        shard = self._service.vault.find(device, model)
        state = self._model_on(device, model)
        if shard is not None and state is not None and _is_late(shard, state):
            self.withdraw(state, [(device, shard.generation)])
            return
        if shard is not None:
            self._service.digests.add(shard)
        if state is not None:
            self._changed(state)

    def made_room(self, device: str, model: str, generation: int, room_for: str) -> None:
        _log.info("%s generation %d is evicted from %s to make room for %s", model, generation, device, room_for)
        name = {"model": model, "generation": generation, "device": device}
        self._announce({"what": "evicted", **name, "reason": f"room for {room_for}"})
        state = self._service.models.get(model)
        if model == room_for or state is None or state.generation_on(device) != generation:
            return
        for other in state.devices:  # the model's other ranks are of no use without this one
            rank = state.generation_on(other)
            if other != device and rank is not None:
                self._service.workers[other].unneeded(model, rank, f"room for {room_for}")

    def shard_dropped(self, device: str, model: str, generation: int) -> None:
        state = self._service.models.get(model)
        if state is not None and state.generation_on(device) == generation:
            state.gone(device)
            self._changed(state)

    def withdraw(self, model: Model, half: list[tuple[str, int]]) -> None:
        """Evicts what a failed load published of some ranks, device and generation of each; who uses it keeps it."""
        for device, generation in half:
            self._service.workers[device].withdraw(model.name, generation, f"the load of {model.name} failed")

    def _make_slicing(self, name: str) -> Model | None:
        """A model for another slicing of one that the config has, if that lets the service make it."""
        config = slicing(name, self._service.models)
        if config is None:
            return None
        devices = config.devices or ()
        _log.info("%s is wanted: %d ranks on %s", name, len(devices), ", ".join(devices))
        return self._take_over(config, devices, None)

    def _model_on(self, device: str, name: str) -> Model | None:
        """The configured model of that name, if it has a rank on the device."""
        model = self._service.models.get(name)
        return model if model is not None and device in model.devices else None


def _is_late(shard: HeldShard, model: Model) -> bool:
    """Whether it is of a load that has ended without it: its worker had taken it over when its process was ended."""
    return shard.load_spec not in (None, model.load_spec)
