"""Checkpoints on disk for the tests of `client.identity`, how they are cached, and what is read of them."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import wait_for_tick, write_sharded
from tests.client.handmade import HandMade, make_shard, read_file
from tests.conftest import MakeCheckpoint
from weightcached.checkpoint import remembered
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.shard.manifest import SourceFile


def tensors(value: float) -> dict[str, Any]:
    """A checkpoint's only tensor; checkpoints of different values have equal headers and sizes."""
    return {"w": ("F32", (4,), struct.pack("<4f", value, value, value, value))}


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint folder with one file."""
    return make_checkpoint(tmp_path / "base" / "model.safetensors", tensors(1.0)).parent


def shard_of(folder: Path, model: str = "base", **key: Any) -> HandMade:
    """The shard that a loader makes of the folder."""
    content, files = digests_of(folder)
    raws = [raw for file in files for raw in read_file(folder / file.name)]
    return make_shard(raws, model=model, files=tuple(files), key={"content": content, **key})


def digests_of(folder: Path) -> tuple[str, list[SourceFile]]:
    """The content of a checkpoint and its files with their digests, as a loader records them."""
    with open_checkpoint(folder) as checkpoint:
        content, digests = digest_checkpoint(checkpoint)
        files = zip(checkpoint.files, digests, strict=True)
        return content, [replace(file.source, digest=digest) for file, digest in files]


def flip_last_bit(path: Path) -> None:
    """Changes the lowest bit of the file's last byte in place; length, inode and mtime stay."""
    wait_for_tick(path)
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of three files."""
    return write_sharded(tmp_path / "sharded", {f"{name}.safetensors": [name, name * 2] for name in "abc"})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each preadv from now on, with every file old enough to be remembered; only digests read with it."""
    monkeypatch.setattr(remembered, "SETTLED_NS", 0)
    counted: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counted.append(preadv(*args)) or counted[-1])
    return counted


@pytest.fixture
def no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digesting a checkpoint fails the test."""

    def refuse(checkpoint: Any) -> Any:
        raise AssertionError("the checkpoint was read")

    monkeypatch.setattr(remembered, "digest_once", refuse)
