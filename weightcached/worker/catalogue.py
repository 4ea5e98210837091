"""What one device holds: shards, leases on them, room reserved for new ones. Pure state: no sockets, no clocks.

    reserve ──► publish ──► current ──► replaced or evicted ──► draining ──► gone
                               │                                    │
                     attach, renew: a lease                   the last lease ends

`current` has one shard per model. A shard that is replaced or evicted while leases hold it is `draining`: the worker's
own descriptors are closed at once, and its bytes count until the last holder's mapping is gone. What a client renews
that is not here at all, since another worker held it, is draining from the start.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..devices import Memory
from ..errors import KeyMismatch, ManifestError, ModelInUse, NoSuchModel, ProtocolError
from ..fds import OwnedFd
from ..shard.key import STAT_CONTENT, ShardKey
from ..shard.manifest import ManifestHead, SlabEntry
from ..text import holder
from ..wire.messages import Renew
from ..wire.peer import Peer, PeerProcess
from .budget import Need, Policies, choose_victims, device_full, missing_bytes

MAX_RENEWED_BYTES = 1 << 48  # more than any device has
_MAX_GENERATION = 1 << 53
_MAX_CREATED = 64  # characters of a time
_MAX_SINCE = 40  # the same; RFC 3339 with nanoseconds has 35


@dataclass(slots=True, eq=False)
class Shard:
    """One published shard. Owns its descriptors until `close`.

    `used` grows with every shard that is published or adopted, every lease and every end of one: the smallest is the
    least recently used. `settling`: adopted a moment ago, so that without leases it is not known to be idle yet.
    `digest`: what the service says of the digest of its files, None where it has said nothing.
    """

    head: ManifestHead
    manifest: OwnedFd
    slabs: list[OwnedFd]
    leases: dict[int, Lease] = field(default_factory=dict)
    used: int = 0
    settling: bool = False
    digest: str | None = None

    @property
    def model(self) -> str:
        return self.head.model

    @property
    def generation(self) -> int:
        return self.head.generation

    @property
    def descriptors(self) -> list[OwnedFd]:
        """The manifest, then the slabs in order: as every message carries them."""
        return [self.manifest, *self.slabs]

    @property
    def closed(self) -> bool:
        return self.manifest.closed

    @property
    def counted_bytes(self) -> int:
        """Bytes that the shard takes of the limit."""
        return self.head.nbytes

    @property
    def holders(self) -> list[str]:
        """Who has it attached, as errors name them."""
        return [lease.holder for lease in self.leases.values()]

    def close(self) -> None:
        for item in self.descriptors:
            item.close()

    def describe(self) -> dict[str, Any]:
        """The shard in a status reply; bytes as integers, times as the publisher wrote them."""
        return {
            "model": self.model,
            "generation": self.generation,
            "state": "draining" if self.closed else "cached",
            "nbytes": self.head.nbytes,
            "tensors": self.head.tensor_count,
            "created": self.head.created,
            "checkpoint": self.head.attributes.get("checkpoint"),
            "key": asdict(self.head.key),
            "digest": self.digest or ("pending" if self.head.key.content.startswith(STAT_CONTENT) else "known"),
            "files": [asdict(file) for file in self.head.files],
            "leases": [lease.describe() for lease in self.leases.values()],
        }


class UnheldShard(Shard):
    """Memory that clients have mapped and this worker has no descriptors of. Known by what they say of it.

    Its bytes count only by the word of the worker's own user: another one could take all room with a lie, and what it
    really has mapped is missing from the device's free memory anyway.
    """

    __slots__ = ()

    def __init__(self, device: str, request: Renew) -> None:
        self.head = ManifestHead(
            model=request.model,
            generation=request.generation,
            device=device,
            key=ShardKey(content="unknown"),
            slabs=(SlabEntry(request.nbytes),),
            tensor_count=0,
            created=request.created,
        )
        self.leases = {}
        self.used = 0
        self.settling = False
        self.digest = "unknown"

    @property
    def counted_bytes(self) -> int:
        own = os.geteuid()
        return self.head.nbytes if any(lease.peer.uid == own for lease in self.leases.values()) else 0

    @property
    def descriptors(self) -> list[OwnedFd]:
        return []

    @property
    def closed(self) -> bool:
        return True


@dataclass(slots=True, eq=False)
class Lease:
    """One attached client; lasts as long as its connection. `since` is UTC in RFC 3339.

    Not shorter: where the `process` has ended and a child that it forked still has the connection, that child has the
    memory as well. The lease goes on naming the process that attached, and says that it has ended.
    """

    id: int
    shard: Shard
    peer: Peer
    since: str
    process: PeerProcess | None = None

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.ended

    @property
    def holder(self) -> str:
        """As errors name it."""
        return holder(self.peer.pid, self.peer.command, self.ended)

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "pid": self.peer.pid,
            "command": self.peer.command,
            "uid": self.peer.uid,
            "since": self.since,
            "nbytes": self.shard.head.nbytes,
            "ended": self.ended,
        }


def held_since(text: str, now: datetime) -> str:
    """The time since which a client says that it holds its lease, in UTC; now for what is no time, or one to come."""
    since = now
    if len(text) <= _MAX_SINCE:
        try:
            said = datetime.fromisoformat(text)
            since = min(said.astimezone(UTC), now) if said.tzinfo else now
        except (ValueError, OverflowError):  # the latter: a zone's difference at the ends of the calendar
            since = now
    return since.isoformat(timespec="seconds")


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for one shard that is being made; lasts as long as its connection. `peak` as in `Reserve`."""

    model: str
    nbytes: int
    generation: int
    peer: Peer
    peak: int

    def describe(self) -> dict[str, Any]:
        """The reservation in a status reply. Of two for one model, the lower `generation` has come first."""
        return {"model": self.model, "nbytes": self.nbytes, "generation": self.generation, "pid": self.peer.pid}


class Catalogue:
    """The shards of one device. `limit` is the most bytes it may hold; `policies` says what may be evicted for room."""

    def __init__(self, device: str, limit: int) -> None:
        self.device = device
        self.limit = limit
        self.policies: Policies = {}
        self._current: dict[str, Shard] = {}
        self._draining: list[Shard] = []
        self._reservations: list[Reservation] = []
        self._generations: dict[str, int] = {}
        self._lease_ids = itertools.count(1)
        self._uses = itertools.count(1)

    @property
    def shards(self) -> list[Shard]:
        """Every shard whose memory is in use: current ones, then draining ones."""
        return [*self._current.values(), *self._draining]

    @property
    def reservations(self) -> list[Reservation]:
        return list(self._reservations)

    @property
    def reserved(self) -> int:
        """Bytes of all reservations."""
        return sum(item.nbytes for item in self._reservations)

    @property
    def peaks(self) -> int:
        """Bytes that reservations may still take of what is free on the device."""
        return sum(item.peak for item in self._reservations)

    @property
    def held(self) -> int:
        """Bytes of all shards and reservations."""
        return sum(shard.counted_bytes for shard in self.shards) + self.reserved

    def remember_generations(self, generations: dict[str, int]) -> None:
        """Numbers that were already given out before this worker started; new ones go on from there."""
        for model, number in generations.items():
            self._generations[model] = max(number, self._generations.get(model, 0))

    def find(self, model: str) -> Shard | None:
        return self._current.get(model)

    def victims(self, model: str, nbytes: int, memory: Memory, peak: int | None = None) -> list[Shard]:
        """What must be evicted, in this order, before `nbytes` of `model` can be reserved; often nothing.

        `memory`: the device's, now. `DeviceFull` if nothing helps.
        """
        return choose_victims(self, model, Need.of(nbytes, peak), memory)

    def reserve(self, model: str, nbytes: int, peer: Peer, memory: Memory, peak: int | None = None) -> Reservation:
        """Admits a publisher into what is free, or raises `DeviceFull`; see `budget`. `memory`: the device's, now."""
        if nbytes < 0 or (peak is not None and peak < 0):
            raise ProtocolError(problem=f"a reservation of {nbytes} bytes, {peak} at the peak")
        need = Need.of(nbytes, peak)
        if missing_bytes(self, need, memory) > 0:
            raise device_full(self, model, need, memory)
        generation = self._generations.get(model, 0) + 1
        self._generations[model] = generation
        reservation = Reservation(model, nbytes, generation, peer, need.peak)
        self._reservations.append(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Gives the room back. Idempotent."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)

    def check_publish(self, reservation: Reservation, head: ManifestHead) -> None:
        """`ManifestError` unless the manifest is what was reserved, for this device."""
        for what, found, expected in (
            ("model", head.model, reservation.model),
            ("generation", head.generation, reservation.generation),
            ("device", head.device, self.device),
        ):
            if found != expected:
                raise ManifestError(problem=f"{what} is {found!r}, reserved was {expected!r}")
        if head.nbytes > reservation.nbytes:
            raise ManifestError(problem=f"{head.nbytes} bytes published, {reservation.nbytes} were reserved")

    def insert(self, shard: Shard) -> Shard | None:
        """Takes over a published shard and returns the one that is not current any more, its descriptors closed.

        The higher generation stays: of two publishers of one model, the one that reserved last. Holders of the other
        keep their mappings.
        """
        self.remember_generations({shard.model: shard.generation})
        other = self._current.get(shard.model)
        if other is not None and other.generation > shard.generation:
            shard.close()
            return shard
        self._current[shard.model] = shard
        shard.used = next(self._uses)
        if other is not None:
            self._drain(other)
        return other

    def check_key(self, shard: Shard, wanted: dict[str, Any]) -> None:
        """`KeyMismatch` with every differing field unless the shard is what a client wants."""
        if differences := shard.head.key.differences(wanted):
            raise KeyMismatch(model=shard.model, differences=differences)

    def lease(self, shard: Shard, peer: Peer, since: str, process: PeerProcess | None = None) -> Lease:
        lease = Lease(next(self._lease_ids), shard, peer, since, process)
        shard.leases[lease.id] = lease
        shard.used = next(self._uses)
        return lease

    def renew(self, request: Renew, peer: Peer, since: str, process: PeerProcess | None = None) -> Lease:
        """A lease for a client that had one of a worker before this one, and has the memory mapped.

        It is on the shard here that is the same one: services that did not know of each other may have given out a
        number twice, so the time of making is compared too. On an `UnheldShard` if there is none. `ProtocolError` for
        what no shard can be.
        """
        if not (0 < request.generation <= _MAX_GENERATION and 0 <= request.nbytes <= MAX_RENEWED_BYTES):
            raise ProtocolError(problem=f"no shard is generation {request.generation} of {request.nbytes} bytes")
        if len(request.created) > _MAX_CREATED:
            raise ProtocolError(problem=f"no shard was created at a time of {len(request.created)} characters")
        wanted = (request.model, request.generation, request.created, request.nbytes)
        for shard in self.shards:
            if (shard.model, shard.generation, shard.head.created, shard.head.nbytes) == wanted:
                return self.lease(shard, peer, since, process)
        unheld = UnheldShard(self.device, request)
        self._draining.append(unheld)
        return self.lease(unheld, peer, since, process)

    def end_lease(self, lease: Lease) -> None:
        """The holder is gone. The last lease of a draining shard ends the shard."""
        shard = lease.shard
        shard.leases.pop(lease.id, None)
        shard.used = next(self._uses)
        if shard in self._draining and not shard.leases:
            self._draining.remove(shard)

    def evict(self, model: str, *, force: bool) -> Shard:
        """Drops a model. `NoSuchModel` if absent; `ModelInUse` with its holders unless `force`."""
        shard = self._current.get(model)
        if shard is None:
            raise NoSuchModel(model=model, device=self.device, known=sorted(self._current))
        if shard.leases and not force:
            raise ModelInUse(model=model, device=self.device, holders=shard.holders)
        del self._current[model]
        self._drain(shard)
        return shard

    def close(self) -> None:
        """Closes every descriptor held here."""
        for shard in self._current.values():
            shard.close()
        self._current.clear()
        self._draining.clear()

    def _drain(self, shard: Shard) -> None:
        shard.close()
        if shard.leases:
            self._draining.append(shard)
