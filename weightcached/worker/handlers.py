"""The operations of a worker's socket, on the device's catalogue."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..errors import (
    DeviceError,
    ManifestError,
    ModelElsewhere,
    ModelFailed,
    TimedOut,
    WeightCacheError,
    WrongDevice,
)
from ..fds import FdSet
from ..shard.key import GIVEN_UP
from ..trace import point
from ..wire.messages import Attach, Evict, Publish, Renew, Request, Reserve, Subscribe
from ..wire.server import ServerConnection
from ..wire.validate import parse_manifest
from .budget import ModelPolicy
from .catalogue import Catalogue, Lease, Reservation, Shard, held_since
from .groups import absent_now, check_key, elsewhere, may_be_made, meant
from .losses import Losses
from .memory import give_back_unused
from .room import Room
from .settling import Settling
from .slabs import check_slabs
from .states import check_spec, for_clients, may_retry, why_absent

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
        self._settling = Settling(catalogue)
        self._room = Room(catalogue, self._settling, self._evicted)
        self._models: dict[str, dict[str, Any]] = {}
        self._reservations: dict[ServerConnection, Reservation] = {}
        self._publishing: dict[tuple[str, int], Pending] = {}
        self._waiting: dict[ServerConnection, Waiting] = {}
        self._subscribers: set[ServerConnection] = set()
        self._losses = Losses(catalogue, lambda shard: self.drop(describe(shard)), self._announce)

    def begin(self) -> None:
        """Everything is adopted, and the first client is about to come."""
        self._settling.begin()

    def handle(self, connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        """Answers one request, now or later (`wire.server.Handler`)."""
        match request:
            case Attach():
                self._attach(connection, request)
                return None
            case Renew():
                self._renew(connection, request)
                return None
            case Reserve():
                connection.reply_later(self._reserve(connection, request))
                return None
            case Publish():
                self._publish(connection, fds)
                return None
            case Evict():
                shard = self._catalogue.find(request.model)
                if shard is not None and shard.settling and not request.force:
                    connection.reply_later(self._evict_settled(request))
                else:
                    connection.reply_later(self._gone(self._evict(request)))
                return None
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
            "settles_in": round(self._settling.seconds_left, 3),
            "shards": [
                {**shard.describe(), "pin": shard.model in catalogue.policies and catalogue.policies[shard.model].pin}
                for shard in catalogue.shards
            ],
            "reservations": [item.describe() for item in catalogue.reservations],
        }

    def models_changed(self, models: dict[str, dict[str, Any]]) -> None:
        """The service's word on its models (`service.models.Model.for_worker`). Waiting clients are told.

        A model that has become whole is given to those who wait for it.
        """
        known, self._models = self._models, models
        policy_fields = ModelPolicy._fields
        self._catalogue.policies = {
            name: ModelPolicy(**{key: state[key] for key in policy_fields if key in state})
            for name, state in models.items()
        }
        for connection, waiting in list(self._waiting.items()):
            name = waiting.request.model
            state = models.get(name, {})
            if (shard := self._find(waiting.request)) is not None:
                self._grant_waiting(connection, shard)
                continue
            before = known.get(name, {}).get("state")
            if state.get("state") == "failed":
                if before == "failed" and state.get("retry"):  # of a load before this client asked for another one
                    continue
                self._fail_wait(connection, self._absent(waiting.request))
                continue
            if isinstance(absent := self._absent(waiting.request), ModelElsewhere):
                self._fail_wait(connection, absent)
                continue
            if name not in known or (before == "cached" and state.get("state") == "absent"):
                # It was asked for before the service had named its models, or heard that this one is evicted.
                self._want(name)
            elif state.get("state") == "absent" and before in ("queued", "loading"):
                # Evicted by an operator in mid load: waiting on would be for nothing, loading again against his word.
                called_off = ModelFailed(model=name, device=self._catalogue.device, reason="called off")
                self._fail_wait(connection, called_off)
                continue
            if "progress" in state:
                connection.event({"model": name, **for_clients(state)})

    def held(self, model: str, generation: int) -> None:
        """The service holds its copies: the shard is published now, and its publisher is told."""
        pending = self._publishing.pop((model, generation))
        self._catalogue.release(pending.reservation)
        try:
            self._losses.require_device()
        except DeviceError as error:
            pending.shard.close()
            self.drop(describe(pending.shard))
            pending.connection.fail(error)
            return
        replaced = self._catalogue.insert(pending.shard)
        point("worker.held")
        if replaced is not None:
            self.drop(describe(replaced))
        pending.connection.reply(describe(pending.shard))
        if replaced is pending.shard:  # a later one was done first
            return
        self._announce("published", pending.shard)
        for connection, waiting in list(self._waiting.items()):
            if waiting.request.model == model and self._find(waiting.request) is not None:
                self._grant_waiting(connection, pending.shard)

    def drop(self, name: dict[str, Any]) -> None:
        """Tells the service to let go of a shard that is not current any more; see `dropped`. `name` as `describe`."""
        self._room.leaving(name["model"], name["generation"])
        self._tell({"drop": name})

    def dropped(self, model: str, generation: int) -> None:
        """The service has let go of a shard: but for those who have it mapped, its memory is free."""
        self._room.left(model, generation)

    def unneeded(self, model: str, generation: int, reason: str) -> None:
        """Another rank of the model has made room, so this one goes as well, unless somebody uses it."""
        self._settling.then(lambda: self._evict_one(model, generation, reason, force=False))

    def withdrawn(self, model: str, generation: int, reason: str) -> None:
        """The load that has published it has failed: who has it keeps it, and nobody else gets it."""
        self._evict_one(model, generation, reason, force=True)

    def _evict_one(self, model: str, generation: int, reason: str, *, force: bool) -> None:
        shard = self._catalogue.find(model)
        if shard is not None and shard.generation == generation and (force or not shard.leases):
            self._catalogue.evict(model, force=force)
            self.drop(describe(shard))
            self._announce("evicted", shard, reason=reason)

    def digested(self, model: str, generation: int, problem: str | None) -> None:
        """What a shard was loaded from has a digest by now, so that who has the same bytes finds it; or never will."""
        if (shard := self._catalogue.find(model)) is not None and shard.generation == generation:
            shard.digest = "known" if problem is None else f"{GIVEN_UP}: {problem}"
            why: dict[str, Any] = {} if problem is None else {"problem": problem}
            self._announce("digested", shard, **why)

    def device_lost(self, reason: str | None) -> None:
        """The device is lost for this reason, and all that was on it; None: it is there again, and empty."""
        self._losses.device(reason)
        for connection, waiting in list(self._waiting.items()) if reason is not None else ():
            lost = ModelFailed(model=waiting.request.model, device=self._catalogue.device, reason=reason)
            self._fail_wait(connection, lost)

    def shard_lost(self, model: str, generation: int, reason: str) -> None:
        """What is in one shard is not what was published."""
        self._losses.shard(model, generation, reason)

    def close(self) -> None:
        """Closes the descriptors of publishes that were never confirmed."""
        for pending in self._publishing.values():
            pending.shard.close()
        self._publishing.clear()

    def _attach(self, connection: ServerConnection, request: Attach) -> None:
        if self._losses.reason is not None:
            raise ModelFailed(model=request.model, device=self._catalogue.device, reason=self._losses.reason)
        asked, said = request, self._models.get(request.model, {})
        request = meant(asked, said, self._catalogue.device)
        shard = self._find(request)
        if shard is not None:
            self._grant(connection, request, shard)
            return
        absent, state = self._absent(request), self._models.get(request.model, {})
        for_good = isinstance(absent, ModelElsewhere) or (isinstance(absent, ModelFailed) and not may_retry(state))
        if request.wait <= 0 or for_good:
            raise absent_now(absent, asked, request, said)
        self._want(request.model)
        timer = asyncio.get_running_loop().call_later(request.wait, self._waited_enough, connection)
        self._waiting[connection] = Waiting(request, timer)
        connection.on_close.append(lambda: self._end_wait(connection))
        connection.event({"model": request.model, "state": None, "progress": 0.0, **for_clients(state)})

    def _find(self, request: Attach) -> Shard | None:
        """The shard that a request is for, None while it may not be given out.

        The ranks of a model that is not whole are of two loads, or some are not there yet. Each is good for who names
        the content; by the model's name alone, clients of several devices would get a mixture.
        """
        if "content" in request.key or self._models.get(request.model, {}).get("whole", True):
            return self._catalogue.find(request.model)
        return None

    def _want(self, model: str) -> None:
        state = self._models.get(model, {})
        absent = state.get("state") == "absent" or may_be_made(model, self._models, self._catalogue.device)
        if absent or may_retry(state):
            self._tell({"wanted": {"model": model}})

    def _grant(self, connection: ServerConnection, request: Attach, shard: Shard) -> None:
        check_key(shard, request, self._models.get(request.model, {}), self._catalogue.device)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        lease = self._catalogue.lease(shard, connection.peer, now, connection.process())
        connection.reply(self._granted(connection, lease), shard.descriptors)

    def _renew(self, connection: ServerConnection, request: Renew) -> None:
        point("worker.renew")
        since = held_since(request.since, datetime.now(UTC))
        lease = self._catalogue.renew(request, connection.peer, since, connection.process())
        connection.reply(self._granted(connection, lease))
        if self._losses.reason is not None:  # it was away when the others were told
            connection.event({"what": "lost", **describe(lease.shard), "reason": self._losses.reason})

    def _granted(self, connection: ServerConnection, lease: Lease) -> dict[str, Any]:
        """The reply that grants a lease, which lasts as long as the connection."""
        connection.on_close.append(lambda: self._end_lease(lease))
        self._losses.attached(lease, connection)
        connection.hold()
        shard = lease.shard
        return {"model": shard.model, "generation": shard.generation, "lease": lease.id, "since": lease.since}

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
        self._losses.require_device()
        reservation = await self._room.reserve(request.model, request.nbytes, connection.peer, request.peak)
        self._reservations[connection] = reservation
        connection.on_close.append(lambda: self._end_reservation(connection))
        connection.reserved()
        return {"model": reservation.model, "nbytes": reservation.nbytes, "generation": reservation.generation}

    def _end_reservation(self, connection: ServerConnection) -> None:
        if reservation := self._reservations.pop(connection, None):
            self._catalogue.release(reservation)
            for other, waiting in list(self._waiting.items()):
                absent = self._absent(waiting.request)
                if isinstance(absent, ModelElsewhere):  # until now it was coming
                    self._fail_wait(other, absent)

    def _publish(self, connection: ServerConnection, fds: FdSet) -> None:
        reservation = self._reservations[connection]
        try:
            self._losses.require_device()
            if not len(fds):
                raise ManifestError(problem="publish carries no descriptors")
            head, _ = parse_manifest(next(iter(fds)).fileno())
            give_back_unused()
            self._catalogue.check_publish(reservation, head)
            check_spec(head, self._models.get(head.model, {}))
            check_slabs(head, list(fds)[1:])
            point("worker.publish-checked")
        except WeightCacheError:
            self._end_reservation(connection)
            raise
        # From here the room belongs to the publish, which completes even if its publisher goes away.
        del self._reservations[connection]
        manifest, *slabs = fds.steal_all()
        shard = Shard(head, manifest, slabs)
        self._publishing[head.model, head.generation] = Pending(connection, reservation, shard)
        self._tell({"hold": describe(shard)}, shard.descriptors)
        point("worker.hold-told")

    def _evict(self, request: Evict) -> Shard:
        if request.device not in (None, self._catalogue.device):
            raise WrongDevice(wanted=request.device, found=self._catalogue.device)
        shard = self._catalogue.evict(request.model, force=request.force)
        point("worker.evicted")
        self.drop(describe(shard))
        self._announce("evicted", shard)
        return shard

    async def _evict_settled(self, request: Evict) -> dict[str, Any]:
        await self._settling.over()
        return await self._gone(self._evict(request))

    async def _gone(self, shard: Shard) -> dict[str, Any]:
        """The reply to an eviction: when the service has let go as well, and only holders keep the memory."""
        await self._room.settled()
        return {**describe(shard), "draining": [lease.describe() for lease in shard.leases.values()]}

    def _evicted(self, shard: Shard, room_for: str) -> None:
        """A shard has gone so that another model fits."""
        self.drop({**describe(shard), "room_for": room_for})
        self._announce("evicted", shard, reason=f"room for {room_for}")

    def _absent(self, request: Attach) -> WeightCacheError:
        """Why a model is not here, or not whole. What somebody is publishing here is not said to belong elsewhere."""
        catalogue, state = self._catalogue, self._models.get(request.model, {})
        coming = any(item.model == request.model for item in catalogue.reservations)
        if not coming and (error := elsewhere(request, state, catalogue.device)) is not None:
            return error
        here = {name for name, said in self._models.items() if "belongs" not in said}
        known = sorted(here | {shard.model for shard in catalogue.shards})
        return why_absent(request.model, state, catalogue.device, known)

    def _waited_enough(self, connection: ServerConnection) -> None:
        waiting = self._end_wait(connection)
        if waiting is not None:
            reason = self._absent(waiting.request)
            path = f"{self._catalogue.device}.sock"
            connection.fail(TimedOut(path=path, seconds=waiting.request.wait, waited_for=f"an attach: {reason}"))

    def _fail_wait(self, connection: ServerConnection, error: WeightCacheError) -> None:
        """Ends a wait with an error, unless it was cut off meanwhile."""
        if self._end_wait(connection):
            connection.fail(error)

    def _end_wait(self, connection: ServerConnection) -> Waiting | None:
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            waiting.timer.cancel()
        return waiting

    def _announce(self, what: str, shard: Shard, *, to: Iterable[ServerConnection] = (), **more: Any) -> None:
        """Tells subscribers, and these."""
        for connection in {*to, *self._subscribers}:
            connection.event({"what": what, **describe(shard), **more})


def describe(shard: Shard) -> dict[str, Any]:
    """A shard's name in messages: model, generation, bytes."""
    return {"model": shard.model, "generation": shard.generation, "nbytes": shard.head.nbytes}
