"""What the tests of this folder share: checkpoints to write, another user to be, a clock to wait for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.checkpoint.strict_cases import entry, file_of

INDEX = "model.safetensors.index.json"


def shard_bytes(names: Sequence[str], fill: int = 0) -> bytes:
    """A valid file with one U8[4] tensor per name."""
    head = {name: entry("U8", [4], 4 * i, 4 * i + 4) for i, name in enumerate(names)}
    return file_of(head) + bytes([fill]) * 4 * len(names)


def write_sharded(
    folder: Path, shards: Mapping[str, Sequence[str]], weight_map: Mapping[str, Any] | None = None, **index: Any
) -> Path:
    """A folder of shards (file name -> tensor names) and their index; `weight_map` overrides the true one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        (folder / name).write_bytes(shard_bytes(tensors))
    true_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    document = {"weight_map": true_map if weight_map is None else weight_map, **index}
    (folder / INDEX).write_text(json.dumps(document))
    return folder


def hub_cache(folder: Path, source: Path, change: str | None = None) -> Path:
    """A snapshot of the files of `source`, laid out as huggingface_hub does; the one named `change` ends otherwise."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        data = path.read_bytes()
        if path.name == change:
            data = data[:-1] + bytes([data[-1] ^ 1])
        name = hashlib.sha256(data).hexdigest() if path.suffix == ".safetensors" else hashlib.sha1(data).hexdigest()
        (blobs / name).write_bytes(data)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def wait_for_tick(path: Path) -> None:
    """Returns when a change to `path` would get a later time than it has now.

    Kernels before 6.13 take file times from a clock that moves every few milliseconds, so two changes in one tick look
    like one. A probe file beside it is changed until its own time is later.
    """
    probe = path.with_name("probe.tmp")
    end = time.monotonic() + 5
    while True:
        probe.write_bytes(b"x")
        if os.stat(probe).st_ctime_ns > os.stat(path).st_ctime_ns:
            break
        assert time.monotonic() < end, "the file system's clock stands still"
    probe.unlink()


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter (pytest's own are private to the user who runs it), with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root reads everything, so root becomes another user for the block; anyone else stays who they are."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
