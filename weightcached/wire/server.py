"""The listening side: accepts peers of the users it knows, keeps their deadlines, hands requests to a handler.

A worker and a service are the same server with other operations. One slow, silent or hostile client costs one small
object and a timer: every socket is non-blocking, every connection has a deadline for its next message, a pace at which
it is read, a most that it may hold, and is one of the share of its user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from .. import __version__
from ..errors import PeerRefused, ProtocolError, WeightCacheError, to_wire
from ..fds import FdSet, OwnedFd
from .framing import Frame
from .limits import MAX_HELD, Pace, Shares, connection_limit
from .messages import GUEST_OPS, PROTOCOL, Hello, Request
from .peer import Peer, PeerProcess, peer_of
from .protocol import Session
from .stream import Stream

# `handle(connection, request, fds)` answers now (a dict), later (None, then `Connection.reply`), or raises.
Handler = Callable[["ServerConnection", Request, FdSet], dict[str, Any] | None]
_ACCEPTS_PER_TURN = 64  # then the loop turns to the clients that are already in
ACCEPT_PAUSE_SECONDS = 0.5  # when there is no descriptor for another client
REFUSAL_LOG_SECONDS = 10.0  # between two lines about refused peers, of whom there may be any number
_log = logging.getLogger(__name__)


class ServerConnection:
    """One client, from accept to close. `on_close` callbacks run once, in reverse order of their adding."""

    def __init__(self, server: Server, sock: socket.socket, peer: Peer) -> None:
        self.peer = peer
        self.on_close: list[Callable[[], object]] = []
        self._server = server
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._session = Session(
            ops=server.ops,
            uid=peer.uid,
            allowed=server.ops_for(peer),
            device=server.device,
            version=__version__,
            now=now,
        )
        self._pace = Pace(now)
        self._sock = sock
        self._process: PeerProcess | None = None
        self._stream = Stream(sock, self)
        self._timer: asyncio.TimerHandle | None = None
        self._set_timer()

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def process(self) -> PeerProcess:
        """The process at the other end, until the connection is closed."""
        if self._process is None:
            self._process = PeerProcess(self._sock, self.peer.pid)
            self.on_close.append(self._process.close)
        return self._process

    def hold(self) -> None:
        """The next reply grants a lease or a subscription."""
        self._session.hold()

    def reserved(self) -> None:
        """The next reply grants a reservation."""
        self._session.reserved()

    def reply(self, ok: dict[str, Any], fds: list[OwnedFd] | tuple[OwnedFd, ...] = ()) -> None:
        """Answers the request in hand; the descriptors stay the caller's."""
        self._stream.send({"ok": ok}, [item.fileno() for item in fds])
        self._answered()

    def fail(self, error: WeightCacheError) -> None:
        """Answers the request in hand with an error. A broken protocol also ends the connection."""
        self._stream.send({"error": to_wire(error)})
        if isinstance(error, ProtocolError):
            self._stream.close_when_sent(str(error))
        else:
            self._answered()

    def reply_later(self, answer: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Answers the request in hand with what the coroutine returns or raises; it ends with the connection."""

        async def finish() -> None:
            try:
                self.reply(await answer)
            except WeightCacheError as error:
                self.fail(error)
            except Exception:
                self._stream.close("a defect of this process")
                raise

        task = self._loop.create_task(finish())
        cancel = task.cancel
        self.on_close.append(cancel)
        task.add_done_callback(lambda _: self.on_close.remove(cancel) if cancel in self.on_close else None)

    def event(self, event: dict[str, Any]) -> None:
        """Something a subscriber or a waiting client wants to know."""
        self._stream.send({"event": event})

    def close(self, reason: str) -> None:
        self._stream.close(reason)

    def message_received(self, data: bytes, fds: FdSet) -> None:
        now = self._loop.time()
        if pause := self._pace.read(now):
            self._stream.pause(pause)
        with fds:  # what a handler has not taken out is closed here
            try:
                if len(self.on_close) > MAX_HELD:
                    raise ProtocolError(problem=f"{MAX_HELD} leases and the like are held; open another connection")
                request = self._session.receive(data, len(fds), now)
                self._set_timer()
                _log.debug("> %s pid=%d", request, self.peer.pid)
                if isinstance(request, Hello):
                    answer: dict[str, Any] | None = self._server.greeting()
                else:
                    answer = self._server.handle(self, request, fds)
            except WeightCacheError as error:
                _log.debug("< %s pid=%d", error, self.peer.pid)
                self.fail(error)
            except BaseException:
                # A defect, which the loop reports. The peer must not wait for an answer that will never come.
                self._stream.close("a defect of this process")
                raise
            else:
                if answer is not None:
                    self.reply(answer)

    def message_broken(self, error: ProtocolError) -> None:
        self.fail(error)

    def stream_closed(self, reason: str) -> None:
        _log.debug("= closed pid=%d: %s", self.peer.pid, reason)
        self._session.close()
        self._set_timer()
        while self.on_close:
            self.on_close.pop()()
        self._server.ended(self)

    def _answered(self) -> None:
        self._session.replied(self._loop.time())
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._session.deadline is not None:
            self._timer = self._loop.call_at(self._session.deadline, self._too_late)

    def _too_late(self) -> None:
        self.fail(ProtocolError(problem=f"no message in time (connection was {self._session.state.value})"))


class Server:
    """Accepts on a bound, listening SEQPACKET socket, which it does not own."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        ops: frozenset[str],
        device: str | None,
        instance: str,
        handle: Handler,
        allow_uids: Collection[int] = (),
    ) -> None:
        """`allow_uids`: other users who are let in, for the operations of `GUEST_OPS`."""
        listener.setblocking(False)
        self.ops = ops
        self.device = device
        self.instance = instance
        self.handle = handle
        self.connections: set[ServerConnection] = set()
        self._listener = listener
        self._own = os.geteuid()
        self._shares = Shares(connection_limit(), self._own, allow_uids)
        self._resume: asyncio.TimerHandle | None = None
        self._refused = 0
        self._refusals_logged = -REFUSAL_LOG_SECONDS

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def stop(self, reason: str) -> None:
        """Accepts no more and closes every connection. Idempotent; the listening socket stays open."""
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._resume is not None:
            self._resume.cancel()
        for connection in list(self.connections):
            connection.close(reason)

    def greeting(self) -> dict[str, Any]:
        return {"protocol": PROTOCOL, "version": __version__, "device": self.device, "instance": self.instance}

    def ops_for(self, peer: Peer) -> frozenset[str]:
        """The operations that a peer may ask for."""
        return self.ops if peer.uid == self._own else self.ops & GUEST_OPS

    def ended(self, connection: ServerConnection) -> None:
        """A connection is closed. Comes once for each."""
        self.connections.discard(connection)
        self._shares.give_back(connection.peer.uid)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors; the client stays in the queue, which stays readable
                _log.warning("no client can be accepted for %.1f s: %s", ACCEPT_PAUSE_SECONDS, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._resume = loop.call_later(ACCEPT_PAUSE_SECONDS, self.start)
                return
            peer = peer_of(sock)
            try:
                self._shares.take(peer.uid)
            except PeerRefused as error:
                self._log_refusal(error, peer)
                _refuse(sock, error)
                continue
            self.connections.add(ServerConnection(self, sock, peer))

    def _log_refusal(self, error: PeerRefused, peer: Peer) -> None:
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now - self._refusals_logged >= REFUSAL_LOG_SECONDS:
            _log.warning("%s (pid %d, %s); refused since start: %d", error, peer.pid, peer.command, self._refused)
            self._refusals_logged = now


def _refuse(sock: socket.socket, error: PeerRefused) -> None:
    with sock:
        sock.setblocking(False)
        try:
            Frame({"error": to_wire(error)}).send(sock)
        except OSError as failure:
            _log.debug("the refused peer was not told: %s", failure)
