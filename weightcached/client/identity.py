"""Which cached model holds the bytes of a checkpoint on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DigestPending, ModelError, ModelFailed, NoSuchModel, OtherContent, TimedOut
from ..shard.key import GIVEN_UP, STAT_CONTENT
from ..shard.manifest import SourceFile, read_key, source_files
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Status, Subscribe

if TYPE_CHECKING:
    from ..checkpoint.fileset import Checkpoint

Shard = dict[str, Any]  # as a worker's status describes it
Digests = dict[str, str]  # of one file: definition, such as "sha256" -> digest, such as "sha256:9f86..."


class Wanted(NamedTuple):
    """What a caller asks for: a checkpoint, perhaps under a name, perhaps with fields of its key."""

    checkpoint: Path
    model: str | None
    key: dict[str, Any]


class Found(NamedTuple):
    """A cached model with the checkpoint's bytes, the key to ask for, and the seconds that a digest took."""

    model: str
    key: dict[str, Any]
    digesting: float


def find_checkpoint(
    wanted: Wanted, socket: Path, device: str, end: float, *, wait: bool, waiting: Callable[[str], object] = str
) -> Found:
    """The cached model with the same bytes; with `wait`, looked for again at every change until `end` (monotonic).

    Of several, one with the wanted key comes first. `end` moves by the seconds that a digest takes: reading many
    gigabytes would otherwise always be too late. `waiting` is told why nothing is found yet.

    Raises `NoSuchModel` (`TimedOut` with `wait`) if there is none, more exactly `OtherContent` where a file that
    differs can be named, or `ModelFailed` where what might be it has never been digested; `CheckpointError` for a
    checkpoint that cannot be read, and what `Connection` raises.
    """
    from ..checkpoint.fileset import open_checkpoint

    started = time.monotonic()
    with open_checkpoint(wanted.checkpoint) as checkpoint:
        wanted = wanted._replace(key=_strict_key(wanted.key, checkpoint))
        disk = _OnDisk(checkpoint)
        with Connection.open(socket, device=device, timeout=seconds_left(end)) as connection:
            status = connection.ask(Subscribe() if wait else Status(), timeout=seconds_left(end))
            while (found := disk.find(status["shards"], wanted)) is None:
                miss = disk.miss(status["shards"], wanted, device)
                if not wait or isinstance(miss, ModelFailed):  # a digest that was given up does not come any more
                    raise miss
                waiting(str(miss))
                try:
                    connection.next_event(seconds_left(end + disk.digesting))
                except TimedOut:
                    waited_for = f"a cached model with the bytes of {wanted.checkpoint}: {miss}"
                    seconds = round(time.monotonic() - started, 1)
                    raise TimedOut(path=str(socket), seconds=seconds, waited_for=waited_for) from None
                status = connection.ask(Status(), timeout=seconds_left(end + disk.digesting))
            model, content = found
            return Found(model, {**wanted.key, "content": content}, disk.digesting)


class _OnDisk:
    """An open checkpoint to compare with; digested once at most, and only if sizes leave no other way."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = [file.source for file in checkpoint.files]
        self._content: str | None = None
        self._read_already = False
        self._digests: list[Digests] = [{} for _ in self._files]  # what is known of each file so far
        self._learn(checkpoint.blob_digests())
        self.pending: set[str] = set()  # models whose digest is not known yet, and which may be it
        self.given_up: dict[str, str] = {}  # those whose digest never will be, and why
        self.digesting = 0.0

    def find(self, shards: list[Shard], wanted: Wanted) -> tuple[str, str] | None:
        """Model and content of a shard with this checkpoint's content, one with the wanted key before any other."""
        self.pending.clear()
        self.given_up.clear()
        for shard in _candidates(shards, wanted):
            if _by_stat(shard) and self._is_loaded_by(shard):
                return shard["model"], shard["key"]["content"]
        content = self._find_content([shard for shard in shards if not _by_stat(shard)], wanted)
        candidates = (shard["model"] for shard in _candidates(shards, wanted) if shard["key"]["content"] == content)
        model = next(candidates, None)
        return None if model is None or content is None else (model, content)

    def miss(self, shards: list[Shard], wanted: Wanted, device: str) -> ModelError:
        """Why no shard was found: against the one with the fewest other files, if it has a file that can be named."""
        compared = [
            (len(differing), shard["model"], differing[0])
            for shard in _candidates(shards, wanted)
            if self._has_sizes_of(shard) and (differing := self._differing(shard))
        ]
        fields = {
            "model": wanted.model or str(wanted.checkpoint),
            "device": device,
            "known": sorted({shard["model"] for shard in shards}),
        }
        if self.pending:
            return DigestPending(**fields, cached=sorted(self.pending))
        if not compared and self.given_up:
            whose = ", ".join(f"what {model} was loaded from: {why}" for model, why in sorted(self.given_up.items()))
            reason = f"it cannot be compared with {whose}; only the very same files find it"
            return ModelFailed(model=fields["model"], device=device, reason=reason)
        if not compared:
            return NoSuchModel(**fields)
        count, cached, (name, digest, recorded) = min(compared, key=lambda item: item[0])
        return OtherContent(
            **fields,
            cached=cached,
            file=str(self._checkpoint.folder / name),
            digest=digest,
            recorded=recorded,
            differing=count,
            files=len(self._files),
        )

    def _is_loaded_by(self, shard: Shard) -> bool:
        """Whether an engine loaded these bytes: the very same files, or files whose digests are known and the same.

        Never where the index chooses among the files' tensors: an engine does not record how it chose.
        """
        files = _files_of(shard)
        if self._checkpoint.left_out or not self._has_sizes_of(shard):
            return False
        if [file.stat for file in files] == [file.stat for file in self._files]:
            return True
        from ..checkpoint.digest import FILE_PREFIX
        from ..checkpoint.remembered import recall

        self._learn(recall(self._files))
        theirs = _known_of(shard)
        same = _same_bytes(self._digests, theirs)
        if same is None and all(FILE_PREFIX.rstrip(":") in known for known in theirs):
            self._read()
            same = _same_bytes(self._digests, theirs)
        if same is None and str(shard.get("digest")).startswith(GIVEN_UP):
            self.given_up[shard["model"]] = f"its digest is {shard['digest']}"
        elif same is None:
            self.pending.add(shard["model"])
        return bool(same)

    def _read(self) -> None:
        """The digests of the checkpoint's files, which are read once at most."""
        if not self._read_already:
            start = time.monotonic()
            from ..checkpoint.remembered import digest_once

            self._content, digests = digest_once(self._checkpoint)
            self._learn(digests)
            self._read_already = True
            self.digesting = time.monotonic() - start

    def _learn(self, digests: Iterable[str | None]) -> None:
        """Takes in what is known of each file, in order."""
        for known, digest in zip(self._digests, digests, strict=True):
            known.update(_by_definition(digest))

    def _find_content(self, shards: list[Shard], wanted: Wanted) -> str | None:
        """The checkpoint's digest: as recorded for exactly these files, else by reading them.

        None when it is not needed: no shard that could be meant was loaded from files of these sizes.
        """
        for shard in shards:
            files = _files_of(shard)
            if [file.stat for file in files] == [file.stat for file in self._files]:
                self._learn(file.digest for file in files)
                if self._checkpoint.left_out:
                    break  # the files are these, but the index chooses among their tensors
                recorded: str = shard["key"]["content"]
                return recorded
        if any(map(self._has_sizes_of, _candidates(shards, wanted))):
            self._read()
        return self._content

    def _has_sizes_of(self, shard: Shard) -> bool:
        return [file.size for file in _files_of(shard)] == [file.size for file in self._files]

    def _differing(self, shard: Shard) -> list[tuple[str, str, str]]:
        """Name, digest and recorded digest of each file that differs from the one that the shard was loaded from."""
        compared = zip(self._files, map(_comparable, self._digests, _known_of(shard)), strict=True)
        return [(file.name, *pair) for file, pair in compared if pair is not None and pair[0] != pair[1]]


def _strict_key(key: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields to match, and what goes without saying for who names files: their bytes, cut as their config says.

    Not cast, unless a dtype is named; by no rules of somebody's config; and what the cut follows from, heads and
    quantisation among it, is in config.json, which is no part of the content.
    """
    from ..checkpoint.digest import json_digest

    if key.get("layout", "checkpoint") != "checkpoint":
        return key  # an engine's own, whose tag says all that shaped it
    implied: dict[str, Any] = {"rules": None}
    if "dtype" not in key:
        implied["cast"] = None
    if any(value != 1 for field, value in key.items() if field.endswith("_parallel_size")):
        implied["config"] = json_digest(checkpoint.config)
    return {**implied, **key}


def _candidates(shards: Iterable[Shard], wanted: Wanted) -> list[Shard]:
    """Shards that could be meant, first those with the wanted key; of the others the worker says why not."""
    key = {"layout": "checkpoint", **wanted.key}
    named = [
        shard
        for shard in shards
        if shard["state"] == "cached"
        and wanted.model in (None, shard["model"])
        and shard["key"]["layout"] == key["layout"]
    ]
    return sorted(named, key=lambda shard: bool(read_key(shard["key"]).differences(key)))


def _by_stat(shard: Shard) -> bool:
    """Whether an engine published it, whose files are known by their stat tuples."""
    return str(shard["key"]["content"]).startswith(STAT_CONTENT)


def _files_of(shard: Shard) -> list[SourceFile]:
    """The files that a shard was loaded from, in the order in which a checkpoint's are: by name."""
    return sorted(source_files(shard["files"]), key=lambda file: file.name)


def _known_of(shard: Shard) -> list[Digests]:
    """What is known of the files that a shard was loaded from: as recorded, and as remembered for what is not read yet
    when an engine publishes it."""
    from ..checkpoint.remembered import recall

    files = _files_of(shard)
    read = recall(files) if _by_stat(shard) else [None] * len(files)
    return [_by_definition(file.digest) | _by_definition(digest) for file, digest in zip(files, read, strict=True)]


def _by_definition(digest: str | None) -> Digests:
    return {digest.partition(":")[0]: digest} if digest else {}


def _comparable(ours: Digests, theirs: Digests) -> tuple[str, str] | None:
    """Two digests of one definition. None where there are none: then nothing is said of the file."""
    both = ours.keys() & theirs.keys()
    # A blob's name comes last: it is what somebody else has read.
    definition = min(both, key=lambda name: name == "sha256", default=None)
    return None if definition is None else (ours[definition], theirs[definition])


def _same_bytes(ours: list[Digests], theirs: list[Digests]) -> bool | None:
    """Whether files have the same bytes, as many there as here; None while that is not known."""
    pairs = list(map(_comparable, ours, theirs))
    if any(pair is not None and pair[0] != pair[1] for pair in pairs):
        return False
    return None if None in pairs else True
