"""Shards made by hand in real memfds, and a real worker to serve them."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weightcached.fds import OwnedFd
from weightcached.paths import socket_path
from weightcached.shard.checksum import checksum_host
from weightcached.shard.host import HostSlab
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import (
    ALIGNMENT,
    XXH3_64,
    Checksums,
    ManifestHead,
    SlabEntry,
    SourceFile,
    TensorEntry,
    TensorTable,
    write_manifest,
)
from weightcached.wire import framing
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Publish, Reserve, Status, Subscribe
from weightcached.worker.main import run as run_worker

DEVICE = "host-0"


@dataclass
class Raw:
    """One tensor before it is in a slab."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class HandMade:
    """A shard as a publisher makes it; owns its descriptors until `close`."""

    head: ManifestHead
    table: TensorTable
    manifest: OwnedFd
    slabs: list[OwnedFd]

    def close(self) -> None:
        for item in (self.manifest, *self.slabs):
            item.close()


def make_shard(
    tensors: list[Raw],
    *,
    model: str = "tiny",
    generation: int = 1,
    device: str = DEVICE,
    slabs: int = 1,
    aliases: dict[str, str] | None = None,
    files: tuple[SourceFile, ...] = (),
    key: dict[str, Any] | None = None,
    attributes: dict[str, Any] | None = None,
    change_head: dict[str, Any] | None = None,
    checksums: bool = False,
    flip: Collection[str] = (),
) -> HandMade:
    """Lays tensors round-robin over `slabs` sealed memfds.

    With `checksums` the manifest has them; of the tensors named in `flip` a bit is changed after they were computed.
    """
    entries: list[TensorEntry] = []
    sizes = [0] * slabs
    for number, raw in enumerate(tensors):
        slab = number % slabs
        offset = -(-sizes[slab] // ALIGNMENT) * ALIGNMENT
        sizes[slab] = offset + len(raw.data)
        entries.append(TensorEntry(raw.name, slab, offset, len(raw.data), raw.dtype, raw.shape, **raw.extra))
    writers = [HostSlab(size) for size in sizes]
    for raw, entry in zip(tensors, entries, strict=True):
        writers[entry.slab].view[entry.offset : entry.offset + entry.nbytes] = raw.data
    head = ManifestHead(
        model=model,
        generation=generation,
        device=device,
        key=ShardKey(**{"content": "c0", "dtype": "float32", **(key or {})}),
        slabs=tuple(SlabEntry(size) for size in sizes),
        tensor_count=len(entries),
        created="2026-01-01T00:00:00+00:00",
        files=files,
        attributes=attributes or {},
    )
    head = replace(head, **(change_head or {}))
    table = TensorTable(tuple(entries), aliases or {})
    recorded = Checksums(XXH3_64, tuple(checksum_host(writers[e.slab].view, [e], 1).values[0] for e in entries))
    for entry in entries:
        if entry.name in flip:
            writers[entry.slab].view[entry.offset + entry.nbytes // 2] ^= 0x10
    manifest = write_manifest(head, table, recorded if checksums else None)
    return HandMade(head, table, manifest, [writer.seal() for writer in writers])


def publish(shard: HandMade, path: Path | None = None) -> None:
    """Publishes to the worker of the shard's device as a loader does, and closes the publisher's descriptors."""
    device = shard.head.device
    with Connection.open(path or socket_path(device), device=device) as connection:
        granted, fds = connection.request(Reserve(shard.head.model, shard.head.nbytes))
        fds.close()
        assert granted["generation"] == shard.head.generation
        _, fds = connection.request(Publish(), [item.fileno() for item in (shard.manifest, *shard.slabs)])
        fds.close()
    shard.close()


def read_file(path: Path) -> list[Raw]:
    """The tensors of a safetensors file, by the format's definition: length, JSON header, bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    data = data[8 + length :]
    return [
        Raw(name, item["dtype"], tuple(item["shape"]), data[slice(*item["data_offsets"])])
        for name, item in header.items()
    ]


class RunningWorker:
    """A real worker in a thread, with this object as its service."""

    def __init__(self, directory: Path) -> None:
        self.path = socket_path(DEVICE)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        arguments = {
            "device": DEVICE,
            "instance": "test",
            "limit": 1 << 30,
            "channel_fd": theirs.detach(),
            "listener_fd": os.dup(self._listener.fileno()),
            "lock_fd": lock,
        }
        self._serving = threading.Event()
        self._worker = threading.Thread(target=run_worker, kwargs=arguments)
        self._service = threading.Thread(target=self._serve)
        self._worker.start()
        self._service.start()
        self._tell({"serve": {"generations": {}}})
        assert self._serving.wait(10)

    def publish(self, shard: HandMade) -> None:
        """Publishes as a loader does, and closes the publisher's descriptors."""
        publish(shard, self.path)

    def models(self, **models: dict[str, Any]) -> None:
        """What the service says of models that are not there (yet), known to the worker when this returns."""
        self._tell({"models": models})
        self.status()

    def digested(self, model: str, generation: int, problem: str | None = None) -> None:
        """What the service says when the digest of a shard's files is known, or is given up."""
        self._tell({"digested": {"model": model, "generation": generation, "problem": problem}})

    def status(self) -> dict[str, Any]:
        with Connection.open(self.path, device=DEVICE) as connection:
            found, fds = connection.request(Status())
            fds.close()
            return found

    def leases(self) -> list[int]:
        """The pids that hold shards now."""
        return [lease["pid"] for shard in self.status()["shards"] for lease in shard["leases"]]

    def lose(self, model: str, generation: int, reason: str) -> None:
        """The service says that this shard's memory is lost; its holders are told."""
        self._tell({"lost": {"reason": reason, "model": model, "generation": generation}})

    def wait_released(self, drop: Callable[[], None], seconds: float = 10.0) -> None:
        """Runs `drop`, then waits until the worker has seen a lease end."""
        with Connection.open(self.path, device=DEVICE) as connection:
            _, fds = connection.request(Subscribe())
            fds.close()
            drop()
            while connection.next_event(seconds)["what"] != "released":
                pass

    def stop(self) -> None:
        """Ends the worker as its service's end would; idempotent."""
        if self._channel.fileno() < 0:
            return
        self._channel.shutdown(socket.SHUT_RDWR)
        self._worker.join(10)
        self._service.join(10)
        self._channel.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _tell(self, message: dict[str, Any]) -> None:
        framing.Frame(message).send(self._channel)

    def _serve(self) -> None:
        while (received := framing.receive(self._channel)) is not None:
            data, fds = received
            fds.close()
            match framing.decode(data):
                case {"serving": _}:
                    self._serving.set()
                case {"hold": what}:
                    self._tell({"held": {"model": what["model"], "generation": what["generation"]}})
                case {"drop": what}:
                    self._tell({"dropped": {"model": what["model"], "generation": what["generation"]}})
