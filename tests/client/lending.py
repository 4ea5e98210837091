"""Workers that grant leases and end: real ones, and listeners that lie, dawdle or flap. For `conftest`'s fixtures."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.worker.process import Shard, WorkerProcess, shard
from weightcached.client.keeper import Grant
from weightcached.client.leases import Lease
from weightcached.wire import framing
from weightcached.wire.connection import Connection
from weightcached.wire.validate import parse_manifest

DATA = bytes(range(256)) * 16
SECONDS = 20.0
GONE = "weightcached: the service of host-0 is gone; the weights stay mapped"
GRANT = Grant("host-0", "tiny", 3, "2026-01-01T00:00:00+00:00", 4096, "2026-01-02T00:00:00+00:00")


class Host:
    """A worker process and, after it, its successors, with this process as the service that keeps all descriptors."""

    def __init__(self) -> None:
        self._first = WorkerProcess()
        self._ended: list[WorkerProcess] = []
        self._held: list[Shard] = []
        self.worker = self._first
        self._open = True

    def hold(self, model: str, generation: int = 1) -> None:
        """A shard to be adopted by the next worker that is started."""
        self._held.append(shard(model, generation, DATA))

    def serve(self, *, adopt: bool = True) -> None:
        for item in self._held if adopt else ():
            head, _ = parse_manifest(next(iter(item)).fileno())
            self.worker.tell({"adopt": {"model": head.model, "generation": head.generation}}, list(item))
        self.worker.serve()

    def kill(self) -> None:
        """SIGKILL. Clients that connect wait in the socket's queue; the next worker is not started yet."""
        self.worker.process.kill()
        self.worker.wait()

    def replace(self, *, adopt: bool = True) -> None:
        """The next worker, serving what is held."""
        self._ended.append(self.worker)
        self.worker = WorkerProcess(share=self._first)
        self.serve(adopt=adopt)

    def leases(self) -> list[dict[str, Any]]:
        return [lease for item in self.worker.status()["shards"] for lease in item["leases"]]

    def wait_leases(self, count: int) -> list[dict[str, Any]]:
        """The leases, once there are so many."""
        end = time.monotonic() + SECONDS
        while len(found := self.leases()) != count:
            assert time.monotonic() < end, found
        return found

    def close(self) -> None:
        for worker in self._ended:
            worker.channel.close()
            worker._log.close()
        for item in self._held:
            item.close()
        self.worker.close()


class Listener:
    """A socket at a path, whose other end is the test: each `accept` is one connection that nobody has answered yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.bind(str(path))
        self.sock.listen(64)
        self.sock.settimeout(SECONDS)
        self.peers: list[socket.socket] = []

    def accept(self) -> socket.socket:
        """The next connection; its hello is read."""
        peer, _ = self.sock.accept()
        peer.settimeout(SECONDS)
        self.peers.append(peer)
        assert heard(peer)["op"] == "hello"
        return peer

    def greet(self) -> socket.socket:
        """The next connection, its hello answered."""
        peer = self.accept()
        tell(peer, {"ok": {"protocol": 1, "version": "1", "device": "host-0", "instance": "test"}})
        return peer

    def renew(self) -> tuple[socket.socket, dict[str, Any]]:
        """The next connection with its renewal granted, and what was asked for."""
        peer = self.greet()
        asked = heard(peer)
        assert asked.pop("op") == "renew"
        tell(peer, {"ok": {}})
        return peer, asked

    def quiet(self, seconds: float) -> bool:
        """Whether nobody connects for so long."""
        return not select.select([self.sock], [], [], seconds)[0]

    def close(self) -> None:
        """The path is gone, as where a service stops."""
        self.path.unlink(missing_ok=True)
        self.die()

    def die(self) -> None:
        """The file stays, as where a service is killed."""
        for peer in self.peers:
            peer.close()
        self.sock.close()


def tell(peer: socket.socket, message: dict[str, Any]) -> None:
    framing.Frame(message).send(peer)


def heard(peer: socket.socket) -> dict[str, Any]:
    """The next message."""
    received = framing.receive(peer)
    assert received is not None
    received[1].close()
    return framing.decode(received[0])


def hung_up(peer: socket.socket) -> bool:
    """Whether the other side closes its end now, and says nothing before."""
    return framing.receive(peer) is None


def held_lease(listener: Listener, grant: Grant = GRANT) -> tuple[Lease, socket.socket]:
    """A lease as `attach` makes one, and the listener's end of its connection."""
    opened: list[Connection] = []
    thread = threading.Thread(
        target=lambda: opened.append(Connection.open(listener.path, device="host-0", timeout=SECONDS))
    )
    thread.start()
    peer = listener.greet()
    thread.join()
    lease = Lease(opened.pop())
    lease.keep(grant)
    return lease, peer


def wait_for(caplog: pytest.LogCaptureFixture, text: str, count: int = 1) -> None:
    """Returns when so many lines of the log contain the text."""
    end = time.monotonic() + SECONDS
    while sum(text in line for line in lines(caplog)) < count:
        assert time.monotonic() < end, lines(caplog)
        time.sleep(0.005)  # a log record wakes nobody


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged from INFO on."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weightcached leases"]
