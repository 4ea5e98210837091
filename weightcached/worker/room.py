"""Room on the device: reservations one after the other, evictions for them, and the wait until memory is really free.

The service's vault and the service manager hold copies of every descriptor. A shard that was dropped here takes its
memory until they have let go as well, which the service says; only then is the device asked what it has left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..devices import Memory
from ..probe import probe_memory
from ..wire.peer import Peer
from .catalogue import Catalogue, Reservation, Shard
from .settling import Settling

DROP_SECONDS = 10.0  # for the service to let go of a shard; then its memory counts as the device says
MEASURES = 5  # tries to ask the device while nothing changes
_log = logging.getLogger(__name__)


class Room:
    """What is going on between "evicted" and "free" on one device."""

    def __init__(self, catalogue: Catalogue, settling: Settling, evicted: Callable[[Shard, str], None]) -> None:
        """`evicted(shard, room_for)` tells the service, and who subscribes, that a shard has gone for a model."""
        self._catalogue = catalogue
        self._settling = settling
        self._evicted = evicted
        self._leaving: dict[tuple[str, int], asyncio.Future[None]] = {}
        # One at a time: between the device's answer and the reservation nobody else may count the same free bytes.
        self._making = asyncio.Lock()

    async def reserve(self, model: str, nbytes: int, peer: Peer, peak: int | None = None) -> Reservation:
        """Reserves, after evicting what must and may go. `DeviceFull` with nothing evicted if that would not help.

        What is evicted stays so if the device then has less than expected, or the requester goes away.
        """
        catalogue = self._catalogue
        async with self._making:
            memory = await self._measure()
            while victims := catalogue.victims(model, nbytes, memory, peak):
                if any(shard.settling for shard in victims):  # perhaps not idle: their holders may be on their way
                    await self._settling.over()
                    memory = await self._measure()
                    continue
                for shard in victims:
                    catalogue.evict(shard.model, force=False)
                    self._evicted(shard, model)
                memory = await self._measure()
            return catalogue.reserve(model, nbytes, peer, memory, peak)

    def leaving(self, model: str, generation: int) -> None:
        """The service is being told to let go of a shard."""
        self._leaving[model, generation] = asyncio.get_running_loop().create_future()

    def left(self, model: str, generation: int) -> None:
        """The service has let go of a shard."""
        future = self._leaving.pop((model, generation), None)
        if future is not None and not future.done():
            future.set_result(None)

    async def settled(self) -> None:
        """Returns when the service has let go of everything that was dropped so far; bounded by DROP_SECONDS."""
        waited = dict(self._leaving)
        if not waited:
            return
        _, late = await asyncio.wait(waited.values(), timeout=DROP_SECONDS)
        for (model, generation), future in waited.items():
            if future in late:
                _log.warning(
                    "%s generation %d: the service has not let go of it within %.0f s", model, generation, DROP_SECONDS
                )
                self._leaving.pop((model, generation), None)

    async def _measure(self) -> Memory:
        """The device's memory at a moment in which the books say the same as before and after it."""
        tries = 0
        while True:
            await self.settled()
            before = (self._catalogue.held, self._catalogue.reserved)
            memory = await asyncio.to_thread(probe_memory, self._catalogue.device)
            tries += 1
            steady = not self._leaving and before == (self._catalogue.held, self._catalogue.reserved)
            if steady or tries == MEASURES:
                return memory
