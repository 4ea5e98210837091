"""Nodes of a cluster for tests: each a real service with a runtime directory of its own, as on a host of its own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.running import RunningService
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Subscribe

SECONDS = 40.0  # for anything that is waited for
KEEP_ALIVE = 0.3  # of the nodes, in seconds: one is gone after 0.9


def free_port(host: str = "127.0.0.1") -> int:
    """A port of that address that nobody has, neither by TCP nor by UDP."""
    while True:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as tcp, socket.socket(family, socket.SOCK_DGRAM) as udp:
            port = int(tcp.getsockname()[1])
            try:
                udp.bind((host, port))
            except OSError:
                continue
            return port


def table(nodes: int, rank: int, port: int, *more: str, address: str = "127.0.0.1") -> str:
    """The [cluster] part of a node's config."""
    lines = [f"nodes = {nodes}", f"node_rank = {rank}", f'master_addr = "{address}"', f"master_port = {port}"]
    return "\n".join(["[cluster]", *lines, *(more or (f"keep_alive = {KEEP_ALIVE}", "timeout = 60")), ""])


class Node:
    """A service that can be killed and started again, and what it says of the cluster."""

    def __init__(self, rank: int, config: str, within: tuple[str, ...] = ()) -> None:
        self.rank = rank
        self.config = config
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="wcn-", dir="/tmp"))
        self._within = within
        self._service: RunningService | None = None
        self._channel: Connection | None = None
        self._cluster: dict[str, Any] = {}

    @property
    def service(self) -> RunningService:
        assert self._service is not None
        return self._service

    def start(self) -> Node:
        self._service = RunningService(self.runtime_dir, self.config, instance=f"node{self.rank}", within=self._within)
        return self

    def ready(self) -> Node:
        self.service.wait_for("READY=1", SECONDS)
        return self

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The cluster in this node's status, as soon as `holds` of it."""
        end = time.monotonic() + SECONDS
        if self._channel is None:
            path = self.runtime_dir / f"node{self.rank}.control.sock"
            self._channel = Connection.open(path, client="test", timeout=SECONDS)
            status, fds = self._channel.request(Subscribe(), timeout=SECONDS)
            fds.close()
            self._cluster = status["cluster"]
        while not holds(self._cluster):
            event = self._channel.next_event(end - time.monotonic())
            if event.get("what") == "cluster":
                self._cluster = event
        return self._cluster

    def sees(self, node: int, *states: str) -> dict[str, Any]:
        """What it says of a node, as soon as that is in one of these states."""
        return dict(self.until(lambda cluster: cluster["nodes"][node]["state"] in states)["nodes"][node])

    def agreed(self, beyond: str | None = None) -> str:
        """The round in which the nodes have agreed, as soon as that is another one than `beyond`."""
        return str(self.until(lambda cluster: cluster["agreed"] and cluster["round"] not in (None, beyond))["round"])

    def generations(self, model: str) -> list[int | None]:
        return list(self.service.model(model)["generations"])

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self._leave()
        self.service.process.kill()
        self.service.stop(code=None)
        self._service = None

    def stop(self, code: int = 0) -> None:
        self._leave()
        self.service.stop(code)
        self._service = None

    def close(self) -> None:
        """Ends what still runs."""
        self._leave()
        if self._service is not None:
            self._service.abandon()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class LossyPath:
    """An address that leads to a node 0, on which datagrams to and from it are lost: of each `keep` + 1 one arrives.

    Connections pass, as TCP repeats what is lost.
    """

    def __init__(self, address: str, target: tuple[str, int], lose: Sequence[bool]) -> None:
        """`lose`: of successive datagrams in either direction whether it is lost, over and over."""
        self.lost = 0
        self._target = target
        self._lose = lose
        self._count = 0
        self._tcp = socket.create_server((address, target[1]))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((address, target[1]))
        self._beyond = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._beyond.connect(target)
        self._node: Any = None
        self._open: list[socket.socket] = [self._tcp, self._udp, self._beyond]
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._there, self._back, self._accept)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for sock in self._open:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # not connected; for UDP it wakes the reader all the same
                continue
        for thread in self._threads:
            thread.join(5)
        for sock in self._open:
            sock.close()

    def _drops(self) -> bool:
        drop = self._lose[self._count % len(self._lose)]
        self._count += 1
        self.lost += drop
        return drop

    def _there(self) -> None:
        while True:
            data, self._node = self._udp.recvfrom(65536)
            if not data:
                return
            if not self._drops():
                with contextlib.suppress(ConnectionRefusedError):  # node 0 is not there
                    self._beyond.send(data)

    def _back(self) -> None:
        while True:
            try:
                data = self._beyond.recv(65536)
            except ConnectionRefusedError:  # node 0 is not there yet
                continue
            if not data:
                return
            if not self._drops():
                self._udp.sendto(data, self._node)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._tcp.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except ConnectionRefusedError:
                near.close()
                continue
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return
