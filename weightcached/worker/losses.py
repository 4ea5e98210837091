"""What is lost on a device, a shard or all of it, and who is told: holders on their leases, subscribers."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import DeviceError
from ..wire.server import ServerConnection
from .catalogue import Catalogue, Lease, Shard


class Losses:
    """`reason` is why the device is lost, None while it is there: until then nobody may attach, reserve or publish."""

    def __init__(self, catalogue: Catalogue, drop: Callable[[Shard], None], announce: Callable[..., None]) -> None:
        """`drop(shard)` tells the service to let go; `announce(what, shard, to=..., **more)` tells these and those who
        have subscribed."""
        self.reason: str | None = None
        self._catalogue = catalogue
        self._drop = drop
        self._announce = announce
        self._holders: dict[Lease, ServerConnection] = {}

    def attached(self, lease: Lease, connection: ServerConnection) -> None:
        """The holder of the lease is at the other end of the connection, until that closes."""
        self._holders[lease] = connection
        connection.on_close.append(lambda: self._holders.pop(lease))

    def require_device(self) -> None:
        """`DeviceError` while the device is lost."""
        if self.reason is not None:
            raise DeviceError(device=self._catalogue.device, problem=self.reason)

    def device(self, reason: str | None) -> None:
        """All shards are lost, those that drain as well; their leases last, the memory is the holders' to unmap. None:
        the device is there again."""
        self.reason = reason
        if reason is not None:
            for shard in self._catalogue.shards:
                self._lose(shard, reason)

    def shard(self, model: str, generation: int, reason: str) -> None:
        """One generation of a model is lost, if it is still here."""
        for shard in self._catalogue.shards:
            if (shard.model, shard.generation) == (model, generation):
                self._lose(shard, reason)

    def _lose(self, shard: Shard, reason: str) -> None:
        if not shard.closed:
            self._catalogue.evict(shard.model, force=True)
            self._drop(shard)
        holders = [self._holders[lease] for lease in shard.leases.values()]
        self._announce("lost", shard, to=holders, reason=reason)
