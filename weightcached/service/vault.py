"""The service's own copies of every published shard's descriptors, so that a worker's death loses nothing.

What is held here is also given to the service manager, whose copies outlive this process (`store`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..fds import FdSet, OwnedFd
from ..shard.manifest import ManifestHead, parse_head, read_documents
from .store import ANSWER_SECONDS, KeptShard, ShardName, Store

_log = logging.getLogger(__name__)


class DigestOutcome(NamedTuple):
    """What has come of the digest of a shard's files: it is remembered, or given up because of `problem`."""

    problem: str | None


@dataclass(slots=True, eq=False)
class HeldShard:
    """Descriptors of one shard: the manifest, then its slabs in order. Owned until `close`."""

    device: str
    model: str
    generation: int
    nbytes: int
    descriptors: list[OwnedFd]
    kept: KeptShard | None = None  # as the service manager keeps it
    digest: DigestOutcome | None = None  # None while it is computed, or where the key has it

    def read_head(self) -> ManifestHead:
        """The head of its manifest."""
        return parse_head(read_documents(self.descriptors[0].fileno())[0])

    @property
    def load_spec(self) -> str | None:
        """Which load it is of (`Model.load_spec`); None of an engine's."""
        found = self.read_head().attributes.get("spec")
        return None if found is None else str(found)

    def close(self) -> None:
        for item in self.descriptors:
            item.close()


class Vault:
    """Shards by device, model and generation. Borrows the store.

    `filled` is set when what an earlier process left has been taken in: a worker is given all of it at once.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.filled = asyncio.Event()
        self.filled.set()
        self._store = store or Store(None)
        self._held: dict[tuple[str, str, int], HeldShard] = {}
        self._last: dict[str, dict[str, int]] = {}

    def hold(self, device: str, model: str, generation: int, nbytes: int, fds: FdSet) -> None:
        """Takes the descriptors out of `fds` and keeps them, in place of any of the same name.

        The service manager gets them a moment later; see `sent`.
        """
        self.drop(device, model, generation)
        shard = self._hold(HeldShard(device, model, generation, nbytes, fds.steal_all()))
        if self._store.active:
            shard.kept = self._store.keep(model, ShardName.of(shard.read_head()), shard.descriptors)

    def adopt(self, head: ManifestHead, descriptors: list[OwnedFd]) -> None:
        """Takes over a shard that an earlier process of this service held, and that the service manager still has."""
        self.drop(head.device, head.model, head.generation)
        shard = self._hold(HeldShard(head.device, head.model, head.generation, head.nbytes, descriptors))
        shard.kept = self._store.adopted(head.model, ShardName.of(head), descriptors)

    def drop(self, device: str, model: str, generation: int) -> None:
        """Closes a shard's copies, and has the service manager close its own. Idempotent."""
        if shard := self._held.pop((device, model, generation), None):
            if shard.kept is not None:
                self._store.forget(shard.kept)
            shard.close()

    def shards(self) -> list[HeldShard]:
        """All that are held, on whichever device."""
        return list(self._held.values())

    def of_device(self, device: str) -> list[HeldShard]:
        """The device's shards, older generations first."""
        held = [shard for shard in self._held.values() if shard.device == device]
        return sorted(held, key=lambda shard: shard.generation)

    def find(self, device: str, model: str) -> HeldShard | None:
        """The newest shard of a model on a device."""
        newest = None
        for shard in self.of_device(device):
            if shard.model == model:
                newest = shard
        return newest

    def generations(self, device: str) -> dict[str, int]:
        """Model -> the highest generation ever held for it, so that a number is never given out twice."""
        return dict(self._last.get(device, {}))

    async def sent(self, device: str, model: str, generation: int) -> None:
        """Returns when a shard's descriptors are on their way to the service manager: they outlive this process then.

        At once without a manager; after 5 seconds, with a warning, when it reads nothing.
        """
        shard = self._held.get((device, model, generation))
        if shard is None or shard.kept is None:
            return
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await shard.kept.sent.wait()
        except TimeoutError:
            _log.warning("%s: the service manager takes nothing; it is served all the same", shard.kept.label)

    async def settled(self) -> None:
        """Returns when the service manager has done all that it was asked for so far; at once without one."""
        await self._store.settled()

    def describe_store(self) -> dict[str, Any]:
        """What the service manager keeps, for a status reply."""
        return self._store.describe()

    def close(self) -> None:
        """Closes the copies here. What the service manager has stays there, for the next process."""
        for shard in self._held.values():
            shard.close()
        self._held.clear()

    def _hold(self, shard: HeldShard) -> HeldShard:
        self._held[shard.device, shard.model, shard.generation] = shard
        last = self._last.setdefault(shard.device, {})
        last[shard.model] = max(shard.generation, last.get(shard.model, 0))
        return shard
