"""What a load is of: the part of a model's config that makes a difference to what it publishes, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.digest import json_digest
from ..config import ModelConfig
from ..parallel.ranks import Parallel


class LoadSpec(NamedTuple):
    """What a load reads, how it cuts it, and where it puts it. Loads of equal specs differ only in the files' bytes."""

    checkpoint: Path
    parallel: Parallel
    rules: tuple[str, ...]
    dtype: str
    devices: tuple[str, ...]
    publisher: tuple[str, ...] = ()
    first: int = 0  # the rank of the first device; those before it are on other nodes

    @classmethod
    def of(cls, config: ModelConfig, devices: tuple[str, ...]) -> LoadSpec:
        """`devices`: of the ranks, in their order."""
        first = config.ranks_here.start
        return cls(config.checkpoint, config.parallel, config.rules, config.dtype, devices, config.publisher, first)

    @property
    def digest(self) -> str:
        """Equal for equal specs, in every process; manifests carry it. Sizes that a config leaves out do not count, so
        that a later version may have more of them."""
        sizes = {
            item.name: getattr(self.parallel, item.name)
            for item in fields(Parallel)
            if getattr(self.parallel, item.name) != item.default
        }
        parts = [str(self.checkpoint), sizes, list(self.rules), self.dtype, list(self.devices)]
        parts += [list(self.publisher)] if self.publisher else []
        return json_digest([*parts, {"first": self.first}] if self.first else parts)


def spec_of(attributes: Mapping[str, Any]) -> str | None:
    """The digest of the spec that a shard was published for, by its head's attributes; None for one of an engine.

    There it is followed by what tells the load from others of the spec (`Model.load_spec`).
    """
    found = attributes.get("spec")
    return None if found is None else str(found).partition("/")[0]
