"""Folders as they are found in the world, and which files of each are the checkpoint.

`test_fileset` opens each with `open_checkpoint`, and `tests/cli/test_check.py` shows each to ``weightcached check``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.checkpoint.files import INDEX, shard_bytes, write_sharded

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: ["a", "b"], SECOND: ["c"]}
REVISION = "snapshots/0f1e2d"


@dataclass(frozen=True)
class SetCase:
    """A layout: `build` makes it in an empty folder and returns the path to give.

    Accepted: file name -> tensors that are loaded, and the files that are ignored. Refused: a part of the sentence.
    """

    name: str
    build: Callable[[Path], Path]
    files: Mapping[str, Sequence[str]]
    ignored: tuple[str, ...] = ()
    refusal: str | None = None


def accepted(name: str, build: Callable[[Path], Path], files: Mapping[str, Sequence[str]], *ignored: str) -> SetCase:
    return SetCase(name, build, files, ignored)


def refused(name: str, build: Callable[[Path], Path], words: str) -> SetCase:
    return SetCase(name, build, {}, refusal=words)


def plain(folder: Path, files: Mapping[str, Sequence[str]]) -> Path:
    """Files without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        (folder / name).write_bytes(shard_bytes(tensors))
    return folder


def with_strays(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_bytes(b"not even weights")
    return folder


def hub(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A Hugging Face cache of one revision: links of good names to blobs without a suffix."""
    (folder / "blobs").mkdir(parents=True)
    (folder / REVISION).mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        blob = f"{number:064x}"
        (folder / "blobs" / blob).write_bytes(content)
        (folder / REVISION / name).symlink_to(f"../../blobs/{blob}")
    return folder / REVISION


def hub_sharded(folder: Path) -> Path:
    weight_map = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    contents = {name: shard_bytes(tensors) for name, tensors in SHARDS.items()}
    return hub(folder, {**contents, INDEX: json.dumps({"weight_map": weight_map}).encode()})


def hub_single(folder: Path) -> Path:
    return hub(folder, {"model.safetensors": shard_bytes(["w"]), "config.json": b"{}"})


def unfinished(snapshot: Path, name: str) -> Path:
    """A link to a blob that is not complete by its name, whatever its bytes look like."""
    (snapshot.parents[1] / "blobs" / "ff.incomplete").write_bytes(shard_bytes(["c"]))
    (snapshot / name).unlink(missing_ok=True)
    (snapshot / name).symlink_to("../../blobs/ff.incomplete")
    return snapshot


def without_index(folder: Path) -> Path:
    (folder / INDEX).unlink()
    return folder


CASES = (
    accepted("one file", lambda f: plain(f, {"model.safetensors": ["w"]}), {"model.safetensors": ["w"]}),
    accepted("shards with an index", lambda f: write_sharded(f, SHARDS), SHARDS),
    accepted(
        "one file of several, given explicitly",
        lambda f: with_strays(write_sharded(f, SHARDS), "pytorch_model.bin") / SECOND,
        {SECOND: ["c"]},
        FIRST,
        "pytorch_model.bin",
    ),
    accepted(
        "one file of several without an index, given explicitly",
        lambda f: (
            plain(f, {"model.safetensors": ["w"], "consolidated.safetensors": ["v"]}) / "consolidated.safetensors"
        ),
        {"consolidated.safetensors": ["v"]},
        "model.safetensors",
    ),
    accepted(
        "one part without the others, given explicitly", lambda f: plain(f, {SECOND: ["c"]}) / SECOND, {SECOND: ["c"]}
    ),
    accepted("hub snapshot", hub_single, {"model.safetensors": ["w"]}),
    accepted("hub snapshot, its file", lambda f: hub_single(f) / "model.safetensors", {"model.safetensors": ["w"]}),
    accepted("hub snapshot of shards", hub_sharded, SHARDS),
    accepted("hub snapshot of shards, one file", lambda f: hub_sharded(f) / FIRST, {FIRST: ["a", "b"]}, SECOND),
    accepted(
        "hub snapshot with a stray that is not complete",
        lambda f: unfinished(hub_sharded(f), "consolidated.safetensors"),
        SHARDS,
        "consolidated.safetensors",
    ),
    accepted(
        "consolidated beside shards and index",
        lambda f: plain(write_sharded(f, SHARDS), {"consolidated.safetensors": ["layers.0.a"]}),
        SHARDS,
        "consolidated.safetensors",
    ),
    accepted(
        "consolidated shards beside shards and index",
        lambda f: with_strays(
            write_sharded(f, SHARDS), "consolidated-00001-of-00002.safetensors", "consolidated.00.pth"
        ),
        SHARDS,
        "consolidated-00001-of-00002.safetensors",
        "consolidated.00.pth",
    ),
    accepted(
        "model.safetensors beside shards and index",
        lambda f: plain(write_sharded(f, SHARDS), {"model.safetensors": ["a", "b", "c"]}),
        SHARDS,
        "model.safetensors",
    ),
    accepted(
        "half a download beside shards and index",
        lambda f: with_strays(write_sharded(f, SHARDS), f"{FIRST}.incomplete"),
        SHARDS,
        f"{FIRST}.incomplete",
    ),
    accepted(
        "half a download beside one file",
        lambda f: with_strays(plain(f, {"model.safetensors": ["w"]}), "other.safetensors.incomplete"),
        {"model.safetensors": ["w"]},
        "other.safetensors.incomplete",
    ),
    refused(
        "two files without an index",
        lambda f: plain(f, {"model.safetensors": ["w"], "consolidated.safetensors": ["v"]}),
        f"2 files and no {INDEX} that says which belong together: 'consolidated.safetensors', 'model.safetensors'",
    ),
    refused(
        "shards without their index",
        lambda f: without_index(write_sharded(f, SHARDS)),
        f"2 files and no {INDEX} that says which belong together: '{FIRST}', '{SECOND}'",
    ),
    refused(
        "one part without the others",
        lambda f: plain(f, {SECOND: ["c"]}),
        f"'{SECOND}' is one of 2 files by its name, and neither the others nor {INDEX} are here",
    ),
    refused(
        "a file that the index names is not complete",
        lambda f: unfinished(hub_sharded(f), SECOND),
        f"{SECOND}: still being downloaded: wait for it",
    ),
    refused(
        "a file that the index names is half a download",
        lambda f: (write_sharded(f, SHARDS) / SECOND).rename(f / f"{SECOND}.incomplete").parent,
        f"1 of its 2 files are missing: '{SECOND}'; fetch them",
    ),
    refused(
        "nothing but half a download",
        lambda f: with_strays(plain(f, {}), "model.safetensors.incomplete"),
        "'model.safetensors.incomplete': still being downloaded: wait for it",
    ),
    refused(
        "half a download, given explicitly",
        lambda f: with_strays(plain(f, {}), "model.safetensors.incomplete") / "model.safetensors.incomplete",
        "model.safetensors.incomplete: still being downloaded: wait for it",
    ),
    refused(
        "a file that aria2 has not finished",
        lambda f: with_strays(plain(f, {"model.safetensors": ["w"]}), "model.safetensors.aria2"),
        "model.safetensors: still being downloaded: wait for it",
    ),
    refused(
        "a blob instead of its link",
        lambda f: hub_single(f).parents[1] / "blobs" / f"{0:064x}",
        "only files named *.safetensors and folders of them are read",
    ),
)
