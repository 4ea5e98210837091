"""A real service for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.llama import Tensor, write_llama
from tests.running import RunningService
from weightcached.fds import FdSet
from weightcached.paths import socket_path
from weightcached.shard.manifest import parse_head, read_documents
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach

StartService = Callable[..., RunningService]


@pytest.fixture
def start_service(runtime_dir: Path) -> Iterator[StartService]:
    """``start_service(config, instance="test", options=())`` starts one; those still running are stopped at the end."""
    started: list[RunningService] = []

    def start(config: str, **options: object) -> RunningService:
        service = RunningService(runtime_dir, config, **options)  # type: ignore[arg-type]
        started.append(service)
        return service

    yield start
    for service in started:
        service.abandon()


@pytest.fixture
def llama(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a small Llama, which can be cut for two ranks, and its tensors."""
    return tmp_path / "llama", write_llama(tmp_path / "llama", make_checkpoint)


@pytest.fixture
def checkpoint(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A small checkpoint file of two tensors with random bytes."""
    tensors = {"a": ("F32", (64, 16), os.urandom(4096)), "b": ("BF16", (7,), os.urandom(14))}
    return make_checkpoint(tmp_path / "small.safetensors", tensors)


def model(name: str, checkpoint: Path, *more: str) -> str:
    """The [[model]] part of a config file."""
    return "\n".join(["[[model]]", f'name = "{name}"', f'checkpoint = "{checkpoint}"', *more, ""])


HOST = 'devices = ["host-0"]\n'
HOSTS = 'devices = ["host-0", "host-1", "host-2", "host-3"]\n'


def attach(name: str, wait: float = 0.0, *, device: str = "host-0", **key: object) -> tuple[Connection, FdSet]:
    """A lease on a model and the shard's descriptors; the caller closes both."""
    worker = Connection.open(socket_path(device), device=device, client="test")
    try:
        _, fds = worker.request(Attach(model=name, key=key, wait=wait), timeout=wait + 10)
    except BaseException:
        worker.close()
        raise
    return worker, fds


def slab_bytes(fds: FdSet) -> bytes:
    """The content of the first slab."""
    slab = list(fds)[1].fileno()
    return os.pread(slab, os.fstat(slab).st_size, 0)


def held_by(name: str, device: str, **key: object) -> bytes:
    """What a client of a device gets: the content of the model's slab there."""
    worker, fds = attach(name, device=device, **key)
    with worker, fds:
        return slab_bytes(fds)


def generation(fds: FdSet) -> int:
    return parse_head(read_documents(next(iter(fds)).fileno())[0]).generation
