"""The loader process, started by hand over its channel, publishing to the worker of a real service."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeCheckpoint
from tests.running import RunningService
from weightcached.errors import from_wire
from weightcached.paths import socket_path
from weightcached.shard.manifest import parse_head, parse_table, read_documents
from weightcached.wire import framing
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach, Status


@pytest.fixture
def worker(runtime_dir: Path) -> Iterator[Path]:
    """The socket of a host worker whose service has no models of its own."""
    service = RunningService(runtime_dir, 'devices = ["host-0"]\n')
    try:
        service.ready()
        yield socket_path("host-0")
        service.stop()
    finally:
        service.abandon()


class Loader:
    """One loader process with the test in the place of the service."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self.channel = channel

    def next(self) -> dict[str, Any] | None:
        """The next message, None when the loader has closed its end."""
        received = framing.receive(self.channel)
        if received is None:
            return None
        received[1].close()
        return framing.decode(received[0])

    def rest(self) -> list[dict[str, Any]]:
        """Every message until the end."""
        messages = []
        while (message := self.next()) is not None:
            messages.append(message)
        return messages


@contextmanager
def loader(checkpoint: Path, worker: Path, model: str = "m") -> Iterator[Loader]:
    """A loader with its job sent; killed at the end if it still runs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightcached", "loader", "host-0", model, "--channel-fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).parents[2],
        )
        theirs.close()
        job = {"model": model, "checkpoint": str(checkpoint), "device": "host-0", "socket": str(worker)}
        framing.Frame({"job": job}).send(ours)
        try:
            yield Loader(process, ours)
        finally:
            process.kill()
            process.wait()


def status(worker: Path) -> dict[str, Any]:
    with Connection.open(worker, device="host-0") as connection:
        answer, fds = connection.request(Status())
        fds.close()
        return answer


def test_says_its_plan_and_its_result_and_publishes(
    worker: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """The plan comes first, the result last, every byte of the file was read once; the manifest says what was read."""
    weights = os.urandom(9 << 20)
    path = make_checkpoint(tmp_path / "w.safetensors", {"w": ("BF16", (9 << 19,), weights), "x": ("U8", (), b"7")})
    with loader(path, worker) as running:
        plan, *_, done = running.rest()
        assert running.process.wait(30) == 0
    assert plan["plan"]["bytes_to_read"] == done["done"]["bytes_read"] == path.stat().st_size
    assert plan["plan"]["tensors"] == 2
    with Connection.open(worker, device="host-0") as connection:
        _, fds = connection.request(Attach(model="m"))
        with fds:
            manifest, slab = fds
            head_json, table_json = read_documents(manifest.fileno())
            head, table = parse_head(head_json), parse_table(table_json)
            assert os.pread(slab.fileno(), len(weights), 0) == weights
    assert [entry.name for entry in table.tensors] == ["w", "x"]
    assert (head.key.dtype, head.key.layout, head.device) == ("bfloat16", "checkpoint", "host-0")
    assert head.files[0].stat[1:3] == (path.stat().st_ino, path.stat().st_size)
    assert head.attributes["checkpoint"] == str(path)


def test_a_quantised_checkpoint_carries_its_method(
    worker: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """The key has the quantisation of config.json and a digest of its settings, and the first architecture."""
    make_checkpoint(tmp_path / "model.safetensors", {"w": ("F8_E4M3", (4,), b"1234")})
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "fp8", "bits": 8}}'
    )
    with loader(tmp_path, worker) as running:
        running.rest()
        assert running.process.wait(30) == 0
    key = status(worker)["shards"][0]["key"]
    assert (key["architecture"], key["quantization"]) == ("Qwen3ForCausalLM", "fp8")
    assert len(key["quantization_digest"]) == 32


def test_an_error_is_said_and_leaves_nothing(worker: Path, tmp_path: Path) -> None:
    """A checkpoint that is not there: the typed error comes over the channel, exit status 1, no reservation stays."""
    with loader(tmp_path / "nowhere", worker) as running:
        (message,) = running.rest()
        assert running.process.wait(30) == 1
    error = from_wire(message["failed"]["error"])
    assert error.code == "bad-checkpoint"
    assert str(tmp_path / "nowhere") in str(error)
    assert status(worker)["reservations"] == []


def test_a_loader_whose_service_is_gone_ends(worker: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """When the channel closes, the load ends without publishing."""
    path = make_checkpoint(tmp_path / "w.safetensors", {"w": ("U8", (64 << 20,), os.urandom(64 << 20))})
    with loader(path, worker) as running:
        running.channel.close()
        assert running.process.wait(30) == 1
    assert status(worker)["shards"] == []


def test_a_killed_loader_gives_its_room_back(worker: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """SIGKILL while it holds a reservation and a half-filled slab: the worker's figures are as before."""
    path = make_checkpoint(tmp_path / "w.safetensors", {"w": ("U8", (64 << 20,), os.urandom(64 << 20))})
    with loader(path, worker) as running:
        assert "plan" in (running.next() or {})
        end = time.monotonic() + 30
        while not status(worker)["reservations"]:
            assert time.monotonic() < end
            assert running.process.poll() is None
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        while (now := status(worker))["reservations"]:  # the worker sees the connection close in its own time
            assert time.monotonic() < end
    assert (now["shards"], now["held"]) == ([], 0)
