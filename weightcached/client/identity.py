"""Which cached model holds the bytes of a checkpoint on disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import NoSuchModel, TimedOut
from ..shard.manifest import SourceFile, known_fields
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Status, Subscribe

if TYPE_CHECKING:
    from ..checkpoint.fileset import Checkpoint


class Wanted(NamedTuple):
    """What a caller asks for: a checkpoint, perhaps under a name, perhaps with fields of its key."""

    checkpoint: Path
    model: str | None
    key: dict[str, Any]


class Found(NamedTuple):
    """A cached model with the checkpoint's bytes, whose digest `content` is. `digesting` took so many seconds."""

    model: str
    content: str
    digesting: float


def find_checkpoint(wanted: Wanted, socket: Path, device: str, end: float, *, wait: bool) -> Found:
    """The cached model with the same bytes; with `wait`, looked for again at every change until `end` (monotonic).

    `end` moves by the seconds that a digest takes: reading many gigabytes would otherwise always be too late. Raises
    `NoSuchModel` (`TimedOut` with `wait`) if there is none, `CheckpointError` for a checkpoint that cannot be read, and
    what `Connection` raises.
    """
    from ..checkpoint.fileset import open_checkpoint

    started = time.monotonic()
    with open_checkpoint(wanted.checkpoint) as checkpoint:
        disk = _OnDisk(checkpoint)
        with Connection.open(socket, device=device, timeout=seconds_left(end)) as connection:
            status, fds = connection.request(Subscribe() if wait else Status(), timeout=seconds_left(end))
            fds.close()
            while (found := disk.find(_candidates(status["shards"], wanted))) is None:
                if not wait:
                    known = sorted({shard["model"] for shard in status["shards"]})
                    raise NoSuchModel(model=wanted.model or str(wanted.checkpoint), device=device, known=known)
                try:
                    connection.next_event(seconds_left(end + disk.digesting))
                except TimedOut:
                    there = ", ".join(sorted({shard["model"] for shard in status["shards"]})) or "nothing"
                    wanted_for = f"a cached model with the bytes of {wanted.checkpoint}; on {device} there is {there}"
                    seconds = round(time.monotonic() - started, 1)
                    raise TimedOut(path=str(socket), seconds=seconds, waited_for=wanted_for) from None
                status, fds = connection.request(Status(), timeout=seconds_left(end + disk.digesting))
                fds.close()
            return Found(*found, disk.digesting)


class _OnDisk:
    """An open checkpoint to compare with; digested once at most, and only if sizes leave no other way."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = _by_name(file.source for file in checkpoint.files)
        self._content: str | None = None
        self.digesting = 0.0

    def find(self, shards: list[dict[str, Any]]) -> tuple[str, str] | None:
        """Model and content of the first shard whose files are these files, else of the first with their content."""
        sizes = []
        for shard in shards:
            files = _by_name(SourceFile(**known_fields(SourceFile, file)) for file in shard["files"])
            if [file.stat for file in files] == [file.stat for file in self._files]:
                return shard["model"], shard["key"]["content"]
            if [file.size for file in files] == [file.size for file in self._files]:
                sizes.append(shard)
        for shard in sizes:
            if shard["key"]["content"] == self._digest():
                return shard["model"], self._digest()
        return None

    def _digest(self) -> str:
        if self._content is None:
            start = time.monotonic()
            from ..checkpoint.digest import digest_checkpoint

            self._content, _ = digest_checkpoint(self._checkpoint)
            self.digesting = time.monotonic() - start
        return self._content


def _candidates(shards: Iterable[dict[str, Any]], wanted: Wanted) -> list[dict[str, Any]]:
    """Shards that could be meant, first those with the wanted key; of the others the worker says why not."""
    key = {"layout": "checkpoint", **wanted.key}
    named = [
        shard
        for shard in shards
        if shard["state"] == "cached"
        and wanted.model in (None, shard["model"])
        and shard["key"]["layout"] == key["layout"]
    ]
    return sorted(named, key=lambda shard: any(shard["key"].get(field) != value for field, value in key.items()))


def _by_name(files: Iterable[SourceFile]) -> list[SourceFile]:
    return sorted(files, key=lambda file: file.name)
