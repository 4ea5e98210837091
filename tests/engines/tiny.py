"""A tiny engine for the tests of policies: one torch module, whose own loader reads one safetensors file."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.handmade import DEVICE, HandMade, RunningWorker, make_shard, read_file
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.engines.policy import Options, Start, Wanted, find
from weightcached.shard.manifest import SourceFile

NAME = "tiny-1"
FILE = "model.safetensors"


class Tiny(torch.nn.Module):
    """Adds its one weight to what it gets. Without a weight it is on meta."""

    def __init__(self, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        weight = torch.empty(4, device="meta") if weight is None else weight
        self.w = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + self.w


def run(module: Tiny) -> list[float]:
    return module(torch.zeros(4)).tolist()


def from_disk(folder: Path) -> Tiny:
    """As the engine's own loader does it."""
    (raw,) = read_file(folder / FILE)
    return Tiny(torch.frombuffer(bytearray(raw.data), dtype=torch.float32))


def wanted(folder: Path | None, layout: str = "checkpoint", **changes: Any) -> Wanted:
    """What the engine asks for; `changes` to the fields of `Wanted`, those of "key" to its key."""
    key = {"layout": layout, "dtype": "float32", **changes.pop("key", {})}
    return replace(Wanted("tiny 1.0", folder, key, DEVICE, 16, NAME), **changes)


def attached(wanted: Wanted, options: Options, start: Start | None = None) -> Tiny | None:
    """The engine's model over the cached weights; None where it is to load from disk."""
    weights = find(wanted, options, start=start)
    if weights is None:
        return None
    with weights:
        return Tiny(weights["w"])


def digests_of(folder: Path) -> tuple[str, tuple[SourceFile, ...]]:
    """The content of a checkpoint, and its files with their digests, as a loader records them."""
    with open_checkpoint(folder) as checkpoint:
        content, digests = digest_checkpoint(checkpoint)
        files = zip(checkpoint.files, digests, strict=True)
        return content, tuple(replace(file.source, digest=digest) for file, digest in files)


def shard_of(folder: Path, model: str = "tiny", **changes: Any) -> HandMade:
    """The shard that a loader makes of the folder; `changes` as of `make_shard`."""
    content, files = digests_of(folder)
    key = {"content": content, **changes.pop("key", {})}
    attributes = {"checkpoint": str(folder)}
    return make_shard(read_file(folder / FILE), model=model, files=files, key=key, attributes=attributes, **changes)


def cache(worker: RunningWorker, folder: Path, model: str = "tiny", **changes: Any) -> None:
    worker.publish(shard_of(folder, model, **changes))


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """What weightcached has logged at this level or above."""
    records = [record for record in caplog.records if record.name.startswith("weightcached")]
    return [record.getMessage() for record in records if record.levelno >= level]
