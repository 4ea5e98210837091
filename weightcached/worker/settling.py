"""The moment after a worker's start in which holders of adopted shards come back and renew their leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .catalogue import Catalogue

RENEW_SECONDS = 2.0  # clients see the end of the worker before at once, and are back within milliseconds


class Settling:
    """Which shards may be in use though nobody has renewed a lease on them yet: `Shard.settling`.

    Whoever wants to evict such a shard waits: for `over`, or by `then`.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._ends: float | None = None
        self._then: list[Callable[[], None]] = []

    def begin(self) -> None:
        """The worker starts to serve: what it holds by now was adopted, and settles within RENEW_SECONDS."""
        adopted = self._catalogue.shards
        for shard in adopted:
            shard.settling = True
        if adopted:
            loop = asyncio.get_running_loop()
            self._ends = loop.time() + RENEW_SECONDS
            loop.call_at(self._ends, self._end)

    @property
    def seconds_left(self) -> float:
        """0.0 when every shard without leases is known to be idle."""
        return 0.0 if self._ends is None else max(self._ends - asyncio.get_running_loop().time(), 0.001)

    def then(self, what: Callable[[], None]) -> None:
        """Calls `what` when it is over; at once if it is."""
        if self._ends is None:
            what()
        else:
            self._then.append(what)

    async def over(self) -> None:
        """Returns when it is over."""
        ended = asyncio.Event()
        self.then(ended.set)
        await ended.wait()

    def _end(self) -> None:
        self._ends = None
        for shard in self._catalogue.shards:
            shard.settling = False
        waiting, self._then = self._then, []
        for what in waiting:
            what()
