"""The service's own copies of every published shard's descriptors, so that a worker's death loses nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ..fds import FdSet, OwnedFd


@dataclass(slots=True, eq=False)
class HeldShard:
    """Descriptors of one shard: the manifest, then its slabs in order. Owned until `close`."""

    device: str
    model: str
    generation: int
    nbytes: int
    descriptors: list[OwnedFd]

    def close(self) -> None:
        for item in self.descriptors:
            item.close()


class Vault:
    """Shards by device, model and generation."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, int], HeldShard] = {}
        self._last: dict[str, dict[str, int]] = {}

    def hold(self, device: str, model: str, generation: int, nbytes: int, fds: FdSet) -> None:
        """Takes the descriptors out of `fds` and keeps them, in place of any of the same name."""
        self.drop(device, model, generation)
        self._held[device, model, generation] = HeldShard(device, model, generation, nbytes, fds.steal_all())
        last = self._last.setdefault(device, {})
        last[model] = max(generation, last.get(model, 0))

    def drop(self, device: str, model: str, generation: int) -> None:
        """Closes a shard's copies. Idempotent."""
        if shard := self._held.pop((device, model, generation), None):
            shard.close()

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

    def close(self) -> None:
        for shard in self._held.values():
            shard.close()
        self._held.clear()
