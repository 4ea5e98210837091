"""The configured models and what has become of each: the service's answer to "is it there yet?"."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from ..config import ModelConfig
from ..errors import LoadFailed, WeightCacheError, to_wire

# absent ─► queued ─► loading ─► cached      and from each back to absent (evicted, called off) or to failed
ModelStateName = Literal["absent", "queued", "loading", "cached", "failed"]


@dataclass(slots=True, eq=False)
class Model:
    """One configured model on its device. `generation` is that of the cached shard, None while there is none.

    A model that is loaded again while it is cached is "loading" with a generation: clients still get the old one.
    """

    config: ModelConfig
    device: str
    state: ModelStateName = "absent"
    generation: int | None = None
    nbytes: int | None = None
    bytes_done: int = 0
    bytes_to_read: int | None = None
    load_seconds: float | None = None
    error: WeightCacheError | None = None
    _load_started: float = 0.0

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def progress(self) -> float:
        """How much of the checkpoint is read, 0 to 1."""
        return self.bytes_done / self.bytes_to_read if self.bytes_to_read else 0.0

    @property
    def rate(self) -> float:
        """Bytes per second of the load in progress."""
        elapsed = time.monotonic() - self._load_started
        return self.bytes_done / elapsed if elapsed > 0 else 0.0

    def queue(self) -> None:
        self.state, self.error = "queued", None
        self.bytes_done, self.bytes_to_read = 0, None

    def begin(self) -> None:
        self.state, self.error = "loading", None
        self.bytes_done, self.bytes_to_read, self._load_started = 0, None, time.monotonic()

    def published(self, generation: int, nbytes: int) -> None:
        self.state, self.error = "cached", None
        self.generation, self.nbytes = generation, nbytes

    def fail(self, error: WeightCacheError) -> None:
        """The load failed. A shard that was cached before stays cached; the error is kept for the status."""
        self.state = "failed" if self.generation is None else "cached"
        self.error = error

    def load_failed(self, why: WeightCacheError | str) -> LoadFailed:
        """The failure of a load of this model: `why` itself if it is one, else one with that reason."""
        if isinstance(why, LoadFailed):
            return why
        return LoadFailed(model=self.name, device=self.device, reason=str(why))

    def gone(self) -> None:
        """The shard was evicted, or the load called off."""
        if self.state in ("cached", "failed"):
            self.state, self.error = "absent", None
        self.generation = self.nbytes = None

    def called_off(self) -> None:
        self.state = "absent" if self.generation is None else "cached"

    def sentence(self) -> str:
        """For systemctl status: "loading minilm 41 %, 1.2 GB/s"."""
        if self.state != "loading":
            return f"{self.name} {self.state}"
        if self.bytes_to_read is None:
            return f"loading {self.name}, reading its headers"
        return f"loading {self.name} {self.progress:.0%}, {self.rate / 1e9:.1f} GB/s".replace("%", " %")

    def for_worker(self) -> dict[str, Any]:
        """What the worker tells a client that asks for the model while it is not there."""
        return {"state": self.state, "progress": self.progress, "reason": str(self.error) if self.error else None}

    def describe(self) -> dict[str, Any]:
        """The model in a status reply."""
        return {
            "model": self.name,
            "device": self.device,
            "state": self.state,
            "checkpoint": str(self.config.checkpoint),
            "preload": self.config.preload,
            "generation": self.generation,
            "nbytes": self.nbytes,
            "bytes_done": self.bytes_done,
            "bytes_to_read": self.bytes_to_read,
            "load_seconds": self.load_seconds,
            "error": to_wire(self.error) if self.error else None,
        }
