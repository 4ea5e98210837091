"""The configured models and what has become of each: the service's answer to "is it there yet?"."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..config import ModelConfig
from ..errors import LoadFailed, WeightCacheError, to_wire
from ..parallel.ranks import Parallel

# absent ─► queued ─► loading ─► cached      and from each back to absent (evicted, called off) or to failed
ModelStateName = Literal["absent", "queued", "loading", "cached", "failed"]


class LoadSpec(NamedTuple):
    """What a load reads, how it cuts it, and where it puts it. Loads of equal specs differ only in the files' bytes."""

    checkpoint: Path
    parallel: Parallel
    rules: tuple[str, ...]
    dtype: str
    devices: tuple[str, ...]

    @classmethod
    def of(cls, config: ModelConfig, devices: tuple[str, ...]) -> LoadSpec:
        """`devices`: of the ranks, in their order."""
        return cls(config.checkpoint, config.parallel, config.rules, config.dtype, devices)


class CachedRank(NamedTuple):
    """The shard of one rank: its number on its device, where each device counts for itself, and its bytes."""

    generation: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Model:
    """One configured model, a group of ranks: rank n belongs on `devices[n]`. It is cached when every rank is there.

    Ranks count as there when they were published by one load. A model that is loaded again while it is cached is
    "loading": until its load publishes, clients get the shards of the one before.
    """

    config: ModelConfig
    devices: tuple[str, ...]
    state: ModelStateName = "absent"
    bytes_done: int = 0
    bytes_to_read: int | None = None
    load_seconds: float | None = None
    error: WeightCacheError | None = None
    _load_started: float = 0.0
    _shards: dict[str, CachedRank] = field(default_factory=dict)  # by device, the newest one of each
    _together: set[str] = field(default_factory=set)  # devices whose shards are of the load that published last
    _whole: bool = False  # whether every rank was there when one was last published
    _load_published: bool = False  # whether the load that was begun last has published yet

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def spec(self) -> LoadSpec:
        """What a load that begins now would do."""
        return LoadSpec.of(self.config, self.devices)

    @property
    def ranks_cached(self) -> int:
        """How many ranks of one load are there."""
        return len(self._together)

    @property
    def complete(self) -> bool:
        """Whether every rank is there."""
        return len(self._together) == len(self.devices)

    @property
    def whole(self) -> bool:
        """Whether what its workers hold may be given out by name: ranks of two loads would be a mixture of weights.

        A set of ranks stays whole while the next one is loaded, for other devices as well, until that one publishes.
        What an eviction leaves of it is of one load still.
        """
        return self._whole or len(self.devices) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of all its shards."""
        return sum(shard.nbytes for shard in self._shards.values())

    @property
    def progress(self) -> float:
        """How much of the checkpoint is read, 0 to 1."""
        return self.bytes_done / self.bytes_to_read if self.bytes_to_read else 0.0

    @property
    def rate(self) -> float:
        """Bytes per second of the load in progress."""
        elapsed = time.monotonic() - self._load_started
        return self.bytes_done / elapsed if elapsed > 0 else 0.0

    def generation_on(self, device: str) -> int | None:
        """The generation of its shard on a device, None while there is none."""
        shard = self._shards.get(device)
        return shard.generation if shard else None

    def configure(self, config: ModelConfig, devices: tuple[str, ...]) -> None:
        """Takes over what the config file says now. On other devices, or in another order, nothing of it is there.

        A failure says nothing about a load of another spec: a client that waits for the model has it tried again.
        """
        moved, changed = devices != self.devices, LoadSpec.of(config, devices) != self.spec
        if moved:
            self._shards.clear()
            self._together.clear()
        if (moved and self.state == "cached") or (changed and self.state == "failed"):
            self.state, self.error = "absent", None
        self.config, self.devices = config, devices

    def queue(self) -> None:
        self.state, self.error, self._load_published = "queued", None, False
        self.bytes_done, self.bytes_to_read = 0, None

    def begin(self) -> None:
        self.state, self.error, self._load_published = "loading", None, False
        self.bytes_done, self.bytes_to_read, self._load_started = 0, None, time.monotonic()

    def published(self, device: str, generation: int, nbytes: int) -> None:
        """A shard is there, on one of `devices`. The last rank makes the model cached."""
        if not self._load_published:
            self._together.clear()
            self._load_published = True
        self._shards[device] = CachedRank(generation, nbytes)
        self._together.add(device)
        self._whole = self.complete
        if self.complete:
            self.state, self.error = "cached", None

    def fail(self, error: WeightCacheError) -> None:
        """The load failed. What was cached before stays cached; the error is kept for the status.

        A load that had published some of its ranks leaves them, and no whole model.
        """
        if self._load_published and not self.complete:
            missing = next(rank for rank, device in enumerate(self.devices) if device not in self._together)
            error = self.load_failed(
                f"{self.ranks_cached} of {len(self.devices)} ranks are published, "
                f"rank {missing} on {self.devices[missing]} is not: {error}"
            )
        self.state = "cached" if self.complete else "failed"
        self.error, self._load_published = error, True

    def load_failed(self, why: WeightCacheError | str) -> LoadFailed:
        """The failure of a load of this model: `why` itself if it is one, else one with that reason."""
        if isinstance(why, LoadFailed):
            return why
        return LoadFailed(model=self.name, device=", ".join(self.devices), reason=str(why))

    def gone(self, device: str) -> None:
        """The shard on a device was evicted."""
        self._shards.pop(device, None)
        self._together.discard(device)
        if self.state in ("cached", "failed"):
            self.state, self.error = "absent", None

    def called_off(self) -> None:
        """Its load was. What was cached before, all ranks of it, stays cached."""
        self.state, self._load_published = "cached" if self.complete else "absent", True

    def sentence(self) -> str:
        """For systemctl status: "loading minilm 41 %, 1.2 GB/s"."""
        if self.state != "loading":
            return f"{self.name} {self.state}"
        if self.bytes_to_read is None:
            return f"loading {self.name}, reading its headers"
        return f"loading {self.name} {self.progress:.0%}, {self.rate / 1e9:.1f} GB/s".replace("%", " %")

    def for_worker(self) -> dict[str, Any]:
        """What a worker tells a client that asks for the model while it is not there, or not `whole`."""
        reason = str(self.error) if self.error else None
        return {"state": self.state, "progress": self.progress, "reason": reason, "whole": self.whole}

    def describe(self) -> dict[str, Any]:
        """The model in a status reply. `devices` and `generations` are in rank order."""
        return {
            "model": self.name,
            "devices": list(self.devices),
            "ranks": len(self.devices),
            "ranks_cached": self.ranks_cached,
            "state": self.state,
            "checkpoint": str(self.config.checkpoint),
            "preload": self.config.preload,
            "generations": [self.generation_on(device) for device in self.devices],
            "nbytes": self.nbytes if self._shards else None,
            "bytes_done": self.bytes_done,
            "bytes_to_read": self.bytes_to_read,
            "load_seconds": self.load_seconds,
            "error": to_wire(self.error) if self.error else None,
        }
