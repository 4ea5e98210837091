"""What one device holds: shards, leases on them, room reserved for new ones. Pure state: no sockets, no clocks.

    reserve ──► publish ──► current ──► replaced or evicted ──► draining ──► gone
                               │                                    │
                             attach: a lease                  the last lease ends

`current` has one shard per model. A shard that is replaced or evicted while leases hold it is `draining`: the worker's
own descriptors are closed at once, and its bytes count until the last holder's mapping is gone.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import DeviceFull, KeyMismatch, ManifestError, ModelInUse, NoSuchModel, ProtocolError
from ..fds import OwnedFd
from ..shard.manifest import ManifestHead
from ..wire.peer import Peer


@dataclass(slots=True, eq=False)
class Shard:
    """One published shard. Owns its descriptors until `close`."""

    head: ManifestHead
    manifest: OwnedFd
    slabs: list[OwnedFd]
    leases: dict[int, Lease] = field(default_factory=dict)

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
            "files": [asdict(file) for file in self.head.files],
            "leases": [lease.describe() for lease in self.leases.values()],
        }


@dataclass(slots=True, eq=False)
class Lease:
    """One attached client; lasts as long as its connection. `since` is UTC in RFC 3339."""

    id: int
    shard: Shard
    peer: Peer
    since: str

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "pid": self.peer.pid,
            "command": self.peer.command,
            "uid": self.peer.uid,
            "since": self.since,
        }


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for one shard that is being made; lasts as long as its connection."""

    model: str
    nbytes: int
    generation: int
    peer: Peer


class Catalogue:
    """The shards of one device. `limit` is the most bytes it may hold."""

    def __init__(self, device: str, limit: int) -> None:
        self.device = device
        self.limit = limit
        self._current: dict[str, Shard] = {}
        self._draining: list[Shard] = []
        self._reservations: list[Reservation] = []
        self._generations: dict[str, int] = {}
        self._lease_ids = itertools.count(1)

    @property
    def shards(self) -> list[Shard]:
        """Every shard whose memory is in use: current ones, then draining ones."""
        return [*self._current.values(), *self._draining]

    @property
    def reservations(self) -> list[Reservation]:
        return list(self._reservations)

    @property
    def held(self) -> int:
        """Bytes of all shards and reservations."""
        return sum(shard.head.nbytes for shard in self.shards) + sum(item.nbytes for item in self._reservations)

    def remember_generations(self, generations: dict[str, int]) -> None:
        """Numbers that were already given out before this worker started; new ones go on from there."""
        for model, number in generations.items():
            self._generations[model] = max(number, self._generations.get(model, 0))

    def find(self, model: str) -> Shard | None:
        return self._current.get(model)

    def reserve(self, model: str, nbytes: int, peer: Peer, device_free: int) -> Reservation:
        """Admits a publisher, or raises `DeviceFull` with what is needed, what is free and who holds the rest.

        `device_free`: bytes that nobody uses on the device now. What other reservations may still take of them is not
        free, and nobody knows how much they have taken already: beside a publisher in mid work this errs on the
        safe side.
        """
        if nbytes < 0:
            raise ProtocolError(problem=f"a reservation of {nbytes} bytes")
        unallocated = sum(item.nbytes for item in self._reservations)
        free = min(self.limit - self.held, device_free - unallocated)
        if nbytes > free:
            raise DeviceFull(
                device=self.device,
                needed=nbytes,
                free=max(free, 0),
                limit=self.limit,
                holders=[f"{shard.model} {shard.head.nbytes} bytes" for shard in self.shards]
                + [f"{item.model} {item.nbytes} bytes (loading)" for item in self._reservations],
            )
        generation = self._generations.get(model, 0) + 1
        self._generations[model] = generation
        reservation = Reservation(model, nbytes, generation, peer)
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
        if other is not None:
            self._drain(other)
        return other

    def check_key(self, shard: Shard, wanted: dict[str, Any]) -> None:
        """`KeyMismatch` with every differing field unless the shard is what a client wants."""
        if differences := shard.head.key.differences(wanted):
            raise KeyMismatch(model=shard.model, differences=differences)

    def lease(self, shard: Shard, peer: Peer, since: str) -> Lease:
        lease = Lease(next(self._lease_ids), shard, peer, since)
        shard.leases[lease.id] = lease
        return lease

    def end_lease(self, lease: Lease) -> None:
        """The holder is gone. The last lease of a draining shard ends the shard."""
        shard = lease.shard
        shard.leases.pop(lease.id, None)
        if shard in self._draining and not shard.leases:
            self._draining.remove(shard)

    def evict(self, model: str, *, force: bool) -> Shard:
        """Drops a model. `NoSuchModel` if absent; `ModelInUse` with its holders unless `force`."""
        shard = self._current.get(model)
        if shard is None:
            raise NoSuchModel(model=model, device=self.device, known=sorted(self._current))
        if shard.leases and not force:
            holders = [f"pid {lease.peer.pid} ({lease.peer.command})" for lease in shard.leases.values()]
            raise ModelInUse(model=model, device=self.device, holders=holders)
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
