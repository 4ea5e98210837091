"""A SEQPACKET socket on the asyncio loop: messages in by callback, messages out by a bounded queue."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
from collections.abc import Iterable
from typing import Any, Protocol

from ..errors import ProtocolError
from ..fds import FdSet, OwnedFd
from . import framing

MAX_QUEUED = 256  # messages; a peer that reads none of them is cut off
MAX_QUEUED_DESCRIPTORS = 4 * framing.MAX_DESCRIPTORS  # the same for what the messages carry
LAST_WORDS_SECONDS = 5.0  # for a peer to read why it is cut off


class StreamOwner(Protocol):
    """Whoever speaks through a stream."""

    def message_received(self, data: bytes, fds: FdSet) -> None:
        """One message came; its descriptors are the owner's now."""
        ...

    def message_broken(self, error: ProtocolError) -> None:
        """A message came that cannot be taken apart; it has been dropped, the stream is still open."""
        ...

    def stream_closed(self, reason: str) -> None:
        """The stream is closed, by either side. Comes once."""
        ...


class Stream:
    """Owns a connected socket. Nothing blocks: what the socket does not take at once is queued.

    A queued message holds duplicates of its descriptors, so the caller's may be closed meanwhile.
    """

    def __init__(self, sock: socket.socket, owner: StreamOwner, *, trusted: bool = False) -> None:
        """`trusted`: a channel between a service and its own child, where large messages are read and any number may
        queue: a worker that starts is given all its shards before it reads the first."""
        sock.setblocking(False)
        self._sock = sock
        self._owner = owner
        self._trusted = trusted
        self._loop = asyncio.get_running_loop()
        self._queue: collections.deque[tuple[framing.Frame, list[OwnedFd]]] = collections.deque()
        self._closing: str | None = None
        self._queued_descriptors = 0
        self._loop.add_reader(sock, self._readable)

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def send(self, message: dict[str, Any], fds: Iterable[int] = ()) -> None:
        """Sends or queues one message; the descriptors stay the caller's. Does nothing on a closed stream."""
        if self.closed or self._closing is not None:
            return
        with contextlib.ExitStack() as undo:
            try:
                kept = [undo.enter_context(OwnedFd(os.dup(fd))) for fd in fds]
                frame = framing.Frame(message, [item.fileno() for item in kept])
            except OSError as error:  # out of descriptors: the peer must not wait for what will never come
                self.close(f"send failed: {error.strerror}")
                return
            undo.pop_all()
        self._queue.append((frame, kept))
        self._queued_descriptors += len(kept)
        if len(self._queue) == 1:
            self._flush()
        elif self._trusted:
            return
        elif len(self._queue) > MAX_QUEUED:
            self.close(f"{MAX_QUEUED} messages were not read")
        elif self._queued_descriptors > MAX_QUEUED_DESCRIPTORS:
            self.close(f"{MAX_QUEUED_DESCRIPTORS} descriptors were not received")

    def pause(self, seconds: float) -> None:
        """Reads nothing for a while; what the peer sends meanwhile waits in the socket. Call when not paused."""
        self._loop.remove_reader(self._sock)
        self._loop.call_later(seconds, self._resume)

    def close_when_sent(self, reason: str) -> None:
        """Reads no more, and closes after what is queued has gone out, or when the peer does not read it in time."""
        if self.closed or self._closing is not None:
            return
        self._closing = reason
        self._loop.remove_reader(self._sock)
        self._flush()
        if not self.closed:
            self._loop.call_later(LAST_WORDS_SECONDS, self.close, reason)

    def close(self, reason: str) -> None:
        """Closes now and drops what is queued. Idempotent."""
        if self.closed:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while self._queue:
            self._drop_first()
        self._owner.stream_closed(reason)

    def _resume(self) -> None:
        if not self.closed and self._closing is None:
            self._loop.add_reader(self._sock, self._readable)

    def _readable(self) -> None:
        try:
            received = framing.receive(self._sock, large=self._trusted)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._owner.message_broken(error)
            return
        except OSError as error:
            self.close(f"receive failed: {error.strerror}")
            return
        if received is None:
            self.close("closed by the peer")
        else:
            self._owner.message_received(*received)

    def _flush(self) -> None:
        while self._queue:
            try:
                self._queue[0][0].send(self._sock)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                self.close(f"send failed: {error.strerror}")
                return
            self._drop_first()
        self._loop.remove_writer(self._sock)
        if self._closing is not None:
            self.close(self._closing)

    def _drop_first(self) -> None:
        frame, kept = self._queue.popleft()
        self._queued_descriptors -= len(kept)
        frame.close()
        for item in kept:
            item.close()
