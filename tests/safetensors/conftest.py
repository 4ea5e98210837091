"""A worker for host-0, files in it, and a process in which nothing has been said yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.client.conftest import listen, start_worker, worker
from tests.client.handmade import RunningWorker, make_shard, read_file
from weightcached.safetensors import find
from weightcached.shard.manifest import SourceFile

__all__ = ["listen", "start_worker", "worker"]

Cache = Callable[..., None]


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("WEIGHTCACHED_SAFETENSORS", raising=False)
    find.forget()
    yield
    find.forget()


def source(path: Path) -> SourceFile:
    """A file as a loader records it."""
    stat = path.stat()
    return SourceFile(path.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@pytest.fixture
def cache(worker: RunningWorker) -> Cache:
    """``cache(*paths, name=...)`` publishes files as one checkpoint, each byte changed by `flip` so that it shows.

    What is read from the cache then differs from the disk, as nothing but a test can make it.
    """

    def publish(*paths: Path, name: str = "m", flip: bool = True, **changes: object) -> None:
        raws = {raw.name: raw for path in paths for raw in read_file(path)}
        if flip:
            for raw in raws.values():
                raw.data = bytes(byte ^ 1 for byte in raw.data)
        key = {"content": name, **changes.pop("key", {})}  # type: ignore[dict-item]
        files = tuple(source(path) for path in changes.pop("files", paths))  # type: ignore[attr-defined]
        worker.publish(make_shard(list(raws.values()), model=name, key=key, files=files, **changes))  # type: ignore[arg-type]

    return publish


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of the dtypes and shapes that matter, with metadata."""
    path = tmp_path / "model.safetensors"
    tensors = {
        "b.weight": torch.arange(12, dtype=torch.int32).reshape(3, 4),
        "a": torch.arange(6, dtype=torch.int64),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "none": torch.zeros(0, 4),
        "half": torch.arange(8, dtype=torch.uint8).view(torch.bfloat16),
    }
    save_file(tensors, path, {"format": "pt"})
    return path
