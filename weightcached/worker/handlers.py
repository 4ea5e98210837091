"""The operations of a worker's socket, on the device's catalogue."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..errors import (
    ManifestError,
    ModelFailed,
    ModelLoading,
    ModelNotLoaded,
    NoSuchModel,
    TimedOut,
    WeightCacheError,
    WrongDevice,
)
from ..fds import FdSet
from ..probe import probe_memory
from ..wire.messages import Attach, Evict, Publish, Request, Reserve, Subscribe
from ..wire.server import ServerConnection
from ..wire.validate import parse_manifest
from .catalogue import Catalogue, Lease, Reservation, Shard
from .memory import give_back_unused
from .slabs import check_slabs

Tell = Callable[..., None]


@dataclass(slots=True)
class Pending:
    """A publish that the service has been asked to hold."""

    connection: ServerConnection
    reservation: Reservation
    shard: Shard


@dataclass(slots=True)
class Waiting:
    """A client whose attach waits for its model."""

    request: Attach
    timer: asyncio.TimerHandle


class Handlers:
    """One method per operation, and what outlives a request: waiting clients, publishes in flight, subscribers."""

    def __init__(self, catalogue: Catalogue, instance: str, tell: Tell) -> None:
        """`tell(message, fds)` sends to the service; see `worker.main` for the messages."""
        self._catalogue = catalogue
        self._instance = instance
        self._tell = tell
        self._models: dict[str, dict[str, Any]] = {}
        self._reservations: dict[ServerConnection, Reservation] = {}
        self._publishing: dict[tuple[str, int], Pending] = {}
        self._waiting: dict[ServerConnection, Waiting] = {}
        self._subscribers: set[ServerConnection] = set()

    def handle(self, connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        """Answers one request, now or later (`wire.server.Handler`)."""
        match request:
            case Attach():
                self._attach(connection, request)
                return None
            case Reserve():
                connection.reply_later(self._reserve(connection, request))
                return None
            case Publish():
                self._publish(connection, fds)
                return None
            case Evict():
                return self._evict(request)
            case Subscribe():
                self._subscribers.add(connection)
                connection.on_close.append(lambda: self._subscribers.discard(connection))
                connection.hold()
        return self.status()

    def status(self) -> dict[str, Any]:
        """The device as one JSON object; bytes as integers."""
        catalogue = self._catalogue
        return {
            "device": catalogue.device,
            "instance": self._instance,
            "pid": os.getpid(),
            "limit": catalogue.limit,
            "held": catalogue.held,
            "shards": [shard.describe() for shard in catalogue.shards],
            "reservations": [
                {"model": item.model, "nbytes": item.nbytes, "pid": item.peer.pid} for item in catalogue.reservations
            ],
        }

    def models_changed(self, models: dict[str, dict[str, Any]]) -> None:
        """The service's word on its models: name -> {"state", "progress", "reason", "whole"}. Waiting clients are told.

        A model that has become whole is given to those who wait for it.
        """
        known, self._models = self._models, models
        for connection, waiting in list(self._waiting.items()):
            name = waiting.request.model
            state = models.get(name, {})
            if (shard := self._find(waiting.request)) is not None:
                self._grant_waiting(connection, shard)
                continue
            if state.get("state") == "failed":
                if self._end_wait(connection):
                    connection.fail(self._absent(name))
                continue
            if name not in known:  # it was asked for before the service had named its models
                self._want(name)
            elif state.get("state") == "absent" and known[name].get("state") in ("queued", "loading"):
                # Evicted by an operator in mid load: waiting on would be for nothing, loading again against his word.
                if self._end_wait(connection):
                    connection.fail(ModelFailed(model=name, device=self._catalogue.device, reason="called off"))
                continue
            if "progress" in state:
                connection.event({"model": name, **state})

    def held(self, model: str, generation: int) -> None:
        """The service holds its copies: the shard is published now, and its publisher is told."""
        pending = self._publishing.pop((model, generation))
        self._catalogue.release(pending.reservation)
        replaced = self._catalogue.insert(pending.shard)
        if replaced is not None:
            self._tell({"drop": describe(replaced)})
        pending.connection.reply(describe(pending.shard))
        if replaced is pending.shard:  # a later one was done first
            return
        self._announce("published", pending.shard)
        for connection, waiting in list(self._waiting.items()):
            if waiting.request.model == model and self._find(waiting.request) is not None:
                self._grant_waiting(connection, pending.shard)

    def close(self) -> None:
        """Closes the descriptors of publishes that were never confirmed."""
        for pending in self._publishing.values():
            pending.shard.close()
        self._publishing.clear()

    def _attach(self, connection: ServerConnection, request: Attach) -> None:
        shard = self._find(request)
        if shard is not None:
            self._grant(connection, request, shard)
            return
        absent = self._absent(request.model)
        if request.wait <= 0 or isinstance(absent, ModelFailed):
            raise absent
        self._want(request.model)
        timer = asyncio.get_running_loop().call_later(request.wait, self._waited_enough, connection)
        self._waiting[connection] = Waiting(request, timer)
        connection.on_close.append(lambda: self._forget(connection))

    def _find(self, request: Attach) -> Shard | None:
        """The shard that a request is for, None while it may not be given out.

        The ranks of a model that is not whole are of two loads, or some are not there yet. Each is good for who names
        the content; by the model's name alone, clients of several devices would get a mixture.
        """
        if "content" in request.key or self._models.get(request.model, {}).get("whole", True):
            return self._catalogue.find(request.model)
        return None

    def _want(self, model: str) -> None:
        if self._models.get(model, {}).get("state") == "absent":
            self._tell({"wanted": {"model": model}})

    def _grant(self, connection: ServerConnection, request: Attach, shard: Shard) -> None:
        self._catalogue.check_key(shard, request.key)
        lease = self._catalogue.lease(shard, connection.peer, datetime.now(UTC).isoformat(timespec="seconds"))
        connection.on_close.append(lambda: self._end_lease(lease))
        connection.hold()
        reply = {"model": shard.model, "generation": shard.generation, "lease": lease.id}
        connection.reply(reply, shard.descriptors)

    def _grant_waiting(self, connection: ServerConnection, shard: Shard) -> None:
        """Ends a wait with the shard, or with why it is not what the client asked for."""
        waiting = self._end_wait(connection)
        if waiting is None:  # it was cut off meanwhile, by what another one's grant has set off
            return
        try:
            self._grant(connection, waiting.request, shard)
        except WeightCacheError as error:
            connection.fail(error)

    def _end_lease(self, lease: Lease) -> None:
        self._catalogue.end_lease(lease)
        self._announce("released", lease.shard)

    async def _reserve(self, connection: ServerConnection, request: Reserve) -> dict[str, Any]:
        memory = await asyncio.to_thread(probe_memory, self._catalogue.device)
        reservation = self._catalogue.reserve(request.model, request.nbytes, connection.peer, memory.free)
        self._reservations[connection] = reservation
        connection.on_close.append(lambda: self._end_reservation(connection))
        connection.reserved()
        return {"model": reservation.model, "nbytes": reservation.nbytes, "generation": reservation.generation}

    def _end_reservation(self, connection: ServerConnection) -> None:
        if reservation := self._reservations.pop(connection, None):
            self._catalogue.release(reservation)

    def _publish(self, connection: ServerConnection, fds: FdSet) -> None:
        reservation = self._reservations[connection]
        try:
            if not len(fds):
                raise ManifestError(problem="publish carries no descriptors")
            head, _ = parse_manifest(next(iter(fds)).fileno())
            give_back_unused()
            self._catalogue.check_publish(reservation, head)
            check_slabs(head, list(fds)[1:])
        except WeightCacheError:
            self._end_reservation(connection)
            raise
        # From here the room belongs to the publish, which completes even if its publisher goes away.
        del self._reservations[connection]
        manifest, *slabs = fds.steal_all()
        shard = Shard(head, manifest, slabs)
        self._publishing[head.model, head.generation] = Pending(connection, reservation, shard)
        self._tell({"hold": describe(shard)}, shard.descriptors)

    def _evict(self, request: Evict) -> dict[str, Any]:
        if request.device not in (None, self._catalogue.device):
            raise WrongDevice(wanted=request.device, found=self._catalogue.device)
        shard = self._catalogue.evict(request.model, force=request.force)
        self._tell({"drop": describe(shard)})
        self._announce("evicted", shard)
        return {**describe(shard), "draining": [lease.describe() for lease in shard.leases.values()]}

    def _absent(self, model: str) -> WeightCacheError:
        """Why a model is not here, or not whole, as well as the service knows."""
        state = self._models.get(model, {})
        device = self._catalogue.device
        match state.get("state"):
            case "loading" | "queued":
                return ModelLoading(model=model, device=device, progress=state.get("progress", 0.0))
            case "absent":
                return ModelNotLoaded(model=model, device=device)
            case "failed":
                return ModelFailed(model=model, device=device, reason=state.get("reason"))
        known = sorted({shard.model for shard in self._catalogue.shards} | set(self._models))
        return NoSuchModel(model=model, device=device, known=known)

    def _waited_enough(self, connection: ServerConnection) -> None:
        waiting = self._end_wait(connection)
        if waiting is not None:
            reason = self._absent(waiting.request.model)
            path = f"{self._catalogue.device}.sock"
            connection.fail(TimedOut(path=path, seconds=waiting.request.wait, waited_for=f"an attach: {reason}"))

    def _forget(self, connection: ServerConnection) -> None:
        self._end_wait(connection)

    def _end_wait(self, connection: ServerConnection) -> Waiting | None:
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            waiting.timer.cancel()
        return waiting

    def _announce(self, what: str, shard: Shard) -> None:
        for connection in list(self._subscribers):
            connection.event({"what": what, **describe(shard)})


def describe(shard: Shard) -> dict[str, Any]:
    """A shard's name in messages: model, generation, bytes."""
    return {"model": shard.model, "generation": shard.generation, "nbytes": shard.head.nbytes}
