"""The datagrams between the nodes of a cluster: node 0's socket, and that of each other one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from ..config_cluster import ClusterConfig
from ..errors import ConnectionFailed
from ..meeting import host_and_port, listen, refused, resolve
from .membership import MISSED, Beat, Datagrams, Members, Seen, State, View, cluster_id, encode

STARTED_ANEW = "it has started anew"
RETURNED = "another service has said that it is this node"


class Step(NamedTuple):
    """What a node knows now: every node, the round to take part in ("" for none), and why a node is not counted."""

    nodes: tuple[Seen, ...]
    round: str
    refusal: str | None


class Link(asyncio.DatagramProtocol):
    """One end. Owns its socket until `close`. `host` and `port` are where the nodes meet."""

    def __init__(
        self, config: ClusterConfig, address: tuple[str, int], beat: Callable[[], Beat], wake: Callable[[], None]
    ) -> None:
        """`beat()` is what to say of this node now. `wake()` is called when something was heard: `step` is due."""
        self.host, self.port = address
        self.datagrams = Datagrams(cluster_id(self.port), config.nodes)
        self._config = config
        self._beat = beat
        self._wake = wake
        self._cluster = cluster_id(self.port)
        self._number = 0
        self._refusal: tuple[str, float] | None = None
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # which asyncio's own is not derived from

    def error_received(self, exc: Exception) -> None:
        """The other end is not there: what is not heard of for long enough is gone, which is all that matters."""

    def close(self) -> None:
        """Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def step(self, now: float) -> Step:
        """Says what is due, and returns what is known."""
        raise NotImplementedError

    def due_in(self, now: float) -> float:
        """Seconds until the next `step`, if nothing is heard before."""
        raise NotImplementedError

    def say(self) -> None:
        """Says now what there is to say."""
        raise NotImplementedError

    def _send(self, content: Beat | View, address: Any = None) -> None:
        self._number += 1
        if self._transport is not None:
            data = encode(self._cluster, replace(content, number=self._number))
            with contextlib.suppress(OSError):  # no route now; it counts as lost
                self._transport.sendto(data, address)

    def _refused(self, now: float) -> str | None:
        """Why somebody was not counted, for as long as that goes on."""
        if self._refusal is not None and now - self._refusal[1] > MISSED * self._config.keep_alive:
            self._refusal = None
        return self._refusal[0] if self._refusal is not None else None


class MasterLink(Link):
    """Node 0's: it hears the others, and answers with its view."""

    def __init__(
        self, config: ClusterConfig, address: tuple[str, int], beat: Callable[[], Beat], wake: Callable[[], None]
    ) -> None:
        super().__init__(config, address, beat, wake)
        self._members = Members(config.nodes, config.keep_alive, config.publisher_port or 0)
        self._asked: set[int] = set()
        self._replaced: dict[int, str] = {}  # nodes of which another process counts than at the last step, and why
        self._said: object = None

    def datagram_received(self, data: bytes, addr: Any) -> None:
        beat = self.datagrams.beat(data)
        if beat is None:
            return
        now = time.monotonic()
        before = self._members.boot_of(beat.node) if self._members.is_there(beat.node, now) else None
        known = self._members.has_heard(beat.node, beat.boot)
        reason = self._members.heard(beat, addr, now)
        if reason is None:
            self._asked.add(beat.node)
            if before not in (None, self._members.boot_of(beat.node)):
                self._replaced[beat.node] = RETURNED if known else STARTED_ANEW
        else:
            self._refusal = reason, time.monotonic()
            self._send(View(self._beat().boot, 0, (), refused=reason), addr)
        self._wake()

    def step(self, now: float) -> Step:
        own = self._beat()
        self._number += 1
        self._members.heard(replace(own, number=self._number), (self.host, self.port), now)
        # A node that has started anew was gone, however fast it was: publishers elsewhere wait for its former process.
        # So was one whose place another process had meanwhile, which they may wait for.
        nodes = tuple(
            replace(item, state="gone", problem=self._replaced[node]) if node in self._replaced else item
            for node, item in enumerate(self._members.seen(now))
        )
        view = View(own.boot, self._members.next_round(now), nodes)
        said = view.round, [(item.state, item.problem, item.load) for item in nodes]
        for node, address in self._members.addresses():
            if said != self._said or node in self._asked:
                self._send(view, address)
        self._said = said
        self._asked.clear()
        if self._replaced:
            self._replaced.clear()
            self._wake()
        return Step(nodes, f"{own.boot}/{view.round}" if view.round else "", self._refused(now))

    def due_in(self, now: float) -> float:
        return self._config.keep_alive

    def say(self) -> None:
        self._said = None
        self.step(time.monotonic())


class NodeLink(Link):
    """That of every other node: it sends beats to node 0, and hears its view."""

    def __init__(
        self, config: ClusterConfig, address: tuple[str, int], beat: Callable[[], Beat], wake: Callable[[], None]
    ) -> None:
        super().__init__(config, address, beat, wake)
        self._view: View | None = None
        self._heard = 0.0
        self._said: Beat | None = None
        self._due = 0.0

    def datagram_received(self, data: bytes, addr: Any) -> None:
        view = self.datagrams.view(data)
        if view is None:
            return
        if view.refused is not None:
            self._refusal = f"node 0 refuses this one: {view.refused}", time.monotonic()
            self._heard = self._refusal[1]  # node 0 is there
        elif self._view is None or view.boot != self._view.boot or view.number >= self._view.number:
            self._view, self._heard = view, time.monotonic()
        self._wake()

    def step(self, now: float) -> Step:
        beat = self._beat()
        if beat != self._said or now >= self._due:
            self._send(beat)
            self._said, self._due = beat, now + self._config.keep_alive
        nodes = list(self._view.nodes) if self._view is not None else [Seen()] * self._config.nodes
        mine: State = "gone" if beat.state == "leaving" else beat.state
        nodes[beat.node] = Seen(mine, None, 0.0, beat.problem, beat.load)
        age = now - self._heard
        if self._view is not None:
            state: State = "gone" if age > MISSED * self._config.keep_alive else nodes[0].state
            problem = nodes[0].problem if state == nodes[0].state else None  # a silent one has given none
            nodes[0] = replace(nodes[0], state=state, address=self.host, age=round(age, 1), problem=problem)
        name = f"{self._view.boot}/{self._view.round}" if self._view is not None and self._view.round else ""
        return Step(tuple(nodes), name, self._refused(now))

    def due_in(self, now: float) -> float:
        return max(self._due - now, 0.0)

    def say(self) -> None:
        self._send(self._beat())


async def open_link(config: ClusterConfig, beat: Callable[[], Beat], wake: Callable[[], None]) -> Link:
    """The socket of this node. `ConnectionFailed` for an address or a port that cannot be used, with what to do."""
    assert config.master_addr is not None and config.master_port is not None
    host, port = await resolve(config.master_addr, config.master_port), config.master_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    master = config.node_rank == 0
    if master:
        if host != config.master_addr != "localhost" and ipaddress.ip_address(host).is_loopback:
            problem = f"is {host} on this node, where no other node reaches it; write the address that they reach"
            raise ConnectionFailed(path=config.master_addr, problem=problem)
        listen(host, port).close()  # the rendezvous will listen there, for some moments: better known now than then
    made = (MasterLink if master else NodeLink)(config, (host, port), beat, wake)
    try:
        sock = socket.socket(family, socket.SOCK_DGRAM)
    except OSError as error:
        raise refused(host, port, error) from error
    try:
        sock.setblocking(False)
        if master:
            sock.bind((host, port))
        else:
            sock.connect((host, port))  # nobody else is heard then
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: made, sock=sock)
    except OSError as error:
        sock.close()
        if not master and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
            problem = "is not reached from here; is the network up, and does the unit allow it (network.conf.example)?"
            raise ConnectionFailed(path=host_and_port(host, port), problem=problem) from error
        raise refused(host, port, error) from error
    return made
