"""The configured models and what has become of each: the service's answer to "is it there yet?"."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..config import Config, ModelConfig
from ..errors import (
    CheckpointChanged,
    CheckpointError,
    ConfigError,
    DeviceError,
    DeviceFull,
    LoadFailed,
    MissingDependency,
    SliceError,
    WeightCacheError,
    to_wire,
)
from .spec import LoadSpec

# absent ─► queued ─► loading ─► cached      and from each back to absent (evicted, called off) or to failed
ModelStateName = Literal["absent", "queued", "loading", "cached", "failed"]
_SAME_NEXT_TIME = (CheckpointError, SliceError, MissingDependency)  # files, the config's sizes, what is installed


class CachedRank(NamedTuple):
    """The shard of one rank: its number on its device, where each device counts for itself, and its bytes."""

    generation: int
    nbytes: int


class HeldBack(NamedTuple):
    """Why a model is not given out by name although it may be here. `final`: who waits for it need not."""

    reason: str
    final: bool


@dataclass(slots=True, eq=False)
class Model:
    """One configured model, a group of ranks: rank n belongs on `devices[n]`. It is cached when every rank is there.

    Ranks count as there when they were published by one load. A model that is loaded again while it is cached is
    "loading": until its load publishes, clients get the shards of the one before. `keep`: not evicted to make room now,
    since it is preloaded, or loaded by the start, the reload or the device's return that is in progress.
    """

    config: ModelConfig
    devices: tuple[str, ...]
    state: ModelStateName = "absent"
    bytes_done: int = 0
    bytes_to_read: int | None = None
    load_seconds: float | None = None
    error: WeightCacheError | None = None
    keep: bool = False
    held_back: HeldBack | None = None  # by the other nodes of a cluster
    load_spec: str | None = None  # what shards of the load under way carry, by which alone the service publishes
    order: tuple[str, ...] = ()  # devices that ranks of another slicing of it may go to (`slicings`)
    _load_started: float = 0.0
    _shards: dict[str, CachedRank] = field(default_factory=dict)  # by device, the newest one of each
    _together: set[str] = field(default_factory=set)  # devices whose shards are of the load that published last
    _weights: object = None  # which weights those are
    _whole: bool = False  # whether every rank was there when one was last published
    _load_published: bool = False  # whether the load that was begun last has published yet
    _passing: WeightCacheError | None = None  # the last load's error, if it passes by itself
    _evicted: bool = False  # whether a rank has been evicted since all of them were there

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
        What an eviction leaves of it is of one load still, but whoever waits for the rank that has gone gets that of
        the next load.
        """
        return (self._whole and not self._evicted) or len(self.devices) == 1

    @property
    def given_out(self) -> bool:
        """Whether its workers give it out by name."""
        return self.whole and self.held_back is None

    @property
    def is_ending(self) -> bool:
        """Whether its load has published all ranks here and is not over: a publisher's processes have not ended."""
        return self.state == "loading" and self._load_published and self.complete

    @property
    def kept_from_all(self) -> HeldBack | None:
        """Why nobody gets it by name though all its ranks are here; None for any other one."""
        return self.held_back if self.complete else None

    @property
    def weights(self) -> Any:
        """What its shards are, as they were `published`."""
        return self._weights

    @property
    def rank_bytes(self) -> list[int]:
        """Bytes of each rank that is there, in rank order."""
        return [self._shards[device].nbytes for device in self.devices if device in self._shards]

    @property
    def may_be_tried_again(self) -> bool:
        """Whether its load failed for want of room, or its loader was killed: by now that may be over."""
        return self.state == "failed" and self.error is self._passing

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
            self._evicted = False
        if (moved and self.state == "cached") or (changed and self.state == "failed"):
            self.state, self.error = "absent", None
        self.config, self.devices = config, devices

    def queue(self) -> None:
        self.state, self.error, self._load_published = "queued", None, False
        self.bytes_done, self.bytes_to_read = 0, None

    def begin(self) -> None:
        self.state, self.error, self._load_published = "loading", None, False
        self.load_spec = f"{self.spec.digest}/{secrets.token_hex(4)}"
        self.bytes_done, self.bytes_to_read, self._load_started = 0, None, time.monotonic()

    def published(self, device: str, generation: int, nbytes: int, weights: object = None) -> None:
        """A shard is there, on one of `devices`. The last rank makes the model cached; with a publisher, whose memory
        is its own until it has ended, the end of the load does (`called_off`).

        `weights`, equal for all ranks of one load: whoever publishes a rank of others begins a new set, without which
        the model is not cached any more.
        """
        if not self._load_published or weights != self._weights:
            self._together.clear()
            self._load_published, self._weights = True, weights
        self._shards[device] = CachedRank(generation, nbytes)
        self._together.add(device)
        self._whole = self.complete
        if self.complete:
            ends_later = self.state == "loading" and bool(self.config.publisher)
            self.state, self.error, self._evicted = "loading" if ends_later else "cached", None, False
        elif self.state == "cached":
            self.state, self.error = "absent", None

    def fail(
        self, error: WeightCacheError, *, killed: bool = False, own: Collection[str] = ()
    ) -> list[tuple[str, int]]:
        """The load failed. What was cached before stays cached; the error is kept for the status.

        `killed`: its loader was ended by a signal that is not the service's. `own`: devices of ranks that its publisher
        had published. Returns device and generation of the ranks that do not count any more: those published, if others
        are missing, since they are of no use to anybody, or if the publisher failed after all of them were there.
        """
        half = []
        passes = killed or isinstance(error, DeviceFull)
        first = self.config.ranks_here.start
        if self._load_published and not self.complete:
            missing = next(rank for rank, device in enumerate(self.devices) if device not in self._together)
            error = self.load_failed(
                f"{self.ranks_cached} of {len(self.devices)} ranks were published and are evicted again, "
                f"rank {first + missing} on {self.devices[missing]} was not: {error}"
            )
            half = [(device, self._shards.pop(device).generation) for device in sorted(self._together)]
            self._together.clear()
        elif own and self.state == "loading" and self.complete and self._load_published:
            half = [(device, self._shards.pop(device).generation) for device in self.devices if device in own]
            shards = ", ".join(f"generation {generation} on {device}" for device, generation in half)
            why = error.fields["reason"] if isinstance(error, LoadFailed) else error
            error = self.load_failed(f"what it had published, {shards}, is evicted again: {why}")
            self._together.difference_update(own)
            self._whole = False
        elif self.state == "loading" and self.spec.parallel.world > 1 and self._is_of_a_rank(error):
            device = error.fields["device"]
            error = self.load_failed(f"rank {first + self.devices.index(device)} on {device}: {error}")
        self.state = "cached" if self.complete else "failed"
        self.error, self._load_published = error, True
        self._passing = error if passes else None
        return half

    def _is_of_a_rank(self, error: WeightCacheError) -> bool:
        """Whether it is of one rank, whose device it names; not of a whole load, which with one rank names it too."""
        whole = isinstance(error, LoadFailed) and len(self.devices) == 1
        return error.fields.get("device") in self.devices and not whole

    def load_failed(self, why: WeightCacheError | str) -> LoadFailed:
        """The failure of a load of this model: `why` itself if it is one, else one with that reason."""
        if isinstance(why, LoadFailed):
            return why
        return LoadFailed(model=self.name, device=", ".join(self.devices), reason=str(why))

    def gone(self, device: str) -> None:
        """The shard on a device was evicted."""
        self._shards.pop(device, None)
        self._together.discard(device)
        self._evicted = True
        if self.state in ("cached", "failed"):
            self.state, self.error = "absent", None

    def lost(self, device: str, error: WeightCacheError) -> None:
        """The shard on a device is, which nobody wanted, unlike an eviction. A load in progress goes on."""
        self.gone(device)
        if self.state == "absent":
            self.state, self.error = "failed", error

    def device_lost(self, device: str, error: DeviceError) -> bool:
        """One of `devices` is, with the rank on it, and a load for it is in vain. Whether that changes anything."""
        concerned = device in self._shards or self.state in ("queued", "loading")
        if concerned:
            self.gone(device)
            self.state, self.error = "failed", error
        return concerned

    def forgive(self) -> None:
        """What made it fail is over: it is absent, and who asks for it has it loaded."""
        self.state, self.error = "absent", None

    def called_off(self) -> None:
        """Its load was, or its publisher has ended. What is cached, all ranks of it, stays cached."""
        self.state, self._load_published = "cached" if self.complete else "absent", True

    def sentence(self) -> str:
        """For systemctl status: "loading minilm 41 %, 1.2 GB/s"."""
        if self.state != "loading":
            return f"{self.name} {self.state}"
        if self.config.publisher:
            return f"loading {self.name} by its publisher"
        if self.bytes_to_read is None:
            return f"loading {self.name}, reading its headers"
        return f"loading {self.name} {self.progress:.0%}, {self.rate / 1e9:.1f} GB/s".replace("%", " %")

    def for_worker(self) -> dict[str, Any]:
        """What a worker tells a client that asks for the model while it is not there, or not `given_out`; and whether
        the shard there may make room for others (`worker.budget.ModelPolicy`). `retry`: who waits has it loaded.
        """
        said = {
            "state": self.state,
            "progress": self.progress,
            "reason": str(self.error) if self.error else None,
            "whole": self.given_out,
            "retry": self.may_be_tried_again,
            "pin": self.config.pin,
            "keep": self.keep,
            # Ranks that are not given out by name are worth nothing beside those that a load would bring.
            "replace": self.config.replace if self.whole else "evict-first",
            "spec": self.load_spec,
        }
        if (held := self.kept_from_all) is not None:
            state = "failed" if held.final else "loading"
            said |= {"state": state, "progress": 1.0, "reason": held.reason, "held_back": True}
        return {**said, **self.group()}

    def for_others(self) -> dict[str, Any]:
        """What the workers of devices that none of its ranks is on know of it."""
        return {"belongs": list(self.devices), "spec": None, **self.group()}

    def group(self) -> dict[str, Any]:
        """What a worker knows of the ranks on other devices (`worker.groups`); nothing where there are none."""
        parallel, first = self.config.parallel, self.config.ranks_here.start
        if parallel.world == 1 and not self.order:
            return {}
        sizes = [parallel.data, parallel.pipeline, parallel.tensor]
        return {"group": {"first": first, "ranks": list(self.devices), "sizes": sizes, "order": list(self.order)}}

    def describe(self) -> dict[str, Any]:
        """The model in a status reply. `devices` and `generations` are in rank order."""
        held = self.kept_from_all
        return {
            "model": self.name,
            "devices": list(self.devices),
            "ranks": len(self.devices),
            "ranks_cached": self.ranks_cached,
            "state": self.state,
            "checkpoint": str(self.config.checkpoint),
            "preload": self.config.preload,
            "pin": self.config.pin,
            "publisher": list(self.config.publisher),
            "generations": [self.generation_on(device) for device in self.devices],
            "nbytes": self.nbytes if self._shards else None,
            "bytes_done": self.bytes_done,
            "bytes_to_read": self.bytes_to_read,
            "load_seconds": self.load_seconds,
            "held_back": held.reason if held else None,
            "held_back_for_good": held is not None and held.final,
            "error": to_wire(self.error) if self.error else None,
        }


def keep_together(models: Iterable[Model], loading: Container[Model]) -> None:
    """Before a start, a reload or a device's return begins `loading`: it evicts none of them, and no preloaded model.

    A config that asks for more than fits is refused so, instead of its last models replacing its first ones.
    """
    for model in models:
        model.keep = model.config.preload or model in loading


def release_kept(models: Iterable[Model]) -> bool:
    """Ends what `keep_together` began, once all of it is loaded. Whether anything has changed."""
    kept = [model for model in models if model.keep]
    if any(model.state in ("queued", "loading") for model in kept):
        return False
    for model in kept:
        model.keep = False
    return bool(kept)


def summary(models: Iterable[Model]) -> str:
    """All models in one line, for systemctl status."""
    models = list(models)
    loading = [model.sentence() for model in models if model.state == "loading"]
    cached = [model for model in models if model.complete and model.held_back is None]
    held_back = [model.name for model in models if model.kept_from_all is not None]
    failed = [model.name for model in models if model.error is not None]
    names, size = ", ".join(model.name for model in cached) or "nothing yet", sum(model.nbytes for model in cached)
    parts = [*loading, f"serving {names} ({len(cached)} of {len(models)} models, {size / 1e9:.1f} GB)"]
    if held_back:
        parts.append(f"held back: {', '.join(held_back)}")
    if failed:
        parts.append(f"failed: {', '.join(failed)}")
    return "; ".join(parts)


def start_failure(model: Model, error: WeightCacheError, config: Config) -> WeightCacheError:
    """What a start ends with that cannot load a model."""
    if isinstance(error, _SAME_NEXT_TIME) and not isinstance(error, CheckpointChanged):
        # Another start would most likely find the same: exit 78, so that systemd does not try again.
        return ConfigError(file=str(config.file), problem=f"model {model.name}: {error}")
    return model.load_failed(error)
