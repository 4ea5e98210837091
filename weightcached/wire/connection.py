"""The connecting side: one blocking connection to a worker or a service, after a successful hello."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import (
    ConnectionFailed,
    ConnectionLost,
    ProtocolError,
    ServiceNotRunning,
    TimedOut,
    VersionMismatch,
    WeightCacheError,
    WrongDevice,
    from_wire,
)
from ..fds import FdSet
from ..paths import start_command, trusted_uids
from . import framing
from .messages import PROTOCOL, Hello, Request, request_to_json
from .peer import peer_of, require_user

DEFAULT_TIMEOUT = 10.0  # seconds for one reply
_GRACE = 0.1  # seconds after a timeout in which what is already here is still read


class Connection:
    """Owns its socket until `close`. Not for use by several threads at once."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        """Takes over a connected socket; `open` is the way in."""
        self._sock = sock
        self.path = path
        self.greeting: dict[str, Any] = {}
        self.on_event: Callable[[dict[str, Any]], object] | None = None  # for those that come before a reply
        self._device: str | None = None

    @classmethod
    def open(
        cls, path: Path, *, device: str | None = None, client: str = "python", timeout: float = DEFAULT_TIMEOUT
    ) -> Connection:
        """Connects, checks that the listener is of a trusted user, and says hello. `timeout` in seconds for both.

        Raises `ServiceNotRunning`, `PeerRefused`, `VersionMismatch`, `WrongDevice`, `TimedOut`, `ConnectionLost`, or
        `ConnectionFailed` where the socket is closed to this user.
        """
        connection = cls.begin(path, device=device, client=client, timeout=timeout)
        connection.greeted(timeout)
        return connection

    @classmethod
    def begin(
        cls, path: Path, *, device: str | None = None, client: str = "python", timeout: float = DEFAULT_TIMEOUT
    ) -> Connection:
        """The first half of `open`: the hello is sent, and `greeted` must read its answer.

        For callers that wait in a poll of their own. It does not block: the kernel connects at once or refuses.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(timeout)
            sock.connect(os.fspath(path))
            require_user(peer_of(sock), trusted_uids())
            connection = cls(sock, path)
            connection._device = device
            connection.send(Hello(client=client, version=__version__, device=device), timeout=timeout)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            raise ServiceNotRunning(path=str(path), start=start_command()) from None
        except PermissionError:  # waiting would not help
            sock.close()
            problem = f"is closed to uid {os.geteuid()}; its service must list that in allow_uids"
            raise ConnectionFailed(path=str(path), problem=problem) from None
        except TimeoutError:
            sock.close()
            raise TimedOut(path=str(path), seconds=timeout, waited_for="a connection") from None
        except OSError as error:
            sock.close()
            raise ConnectionLost(path=str(path), problem=f"cannot connect: {error.strerror or error}") from error
        except WeightCacheError:
            sock.close()
            raise

    def greeted(self, timeout: float | None) -> None:
        """Reads the answer to the hello; raises as `open` does, with the connection closed."""
        try:
            self.greeting, fds = self.answer("hello", timeout)
            fds.close()
            self._check_greeting(self._device)
        except WeightCacheError:
            self.close()
            raise

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def request(
        self, message: Request, fds: list[int] | tuple[int, ...] = (), *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> tuple[dict[str, Any], FdSet]:
        """Sends one request and waits up to `timeout` seconds (None: for ever) for its reply.

        Returns the reply's object and its descriptors, which the caller owns. `fds` stay the caller's. An error that
        the peer sent is raised as the same class. After `TimedOut` or a reply that is none the connection is closed: a
        late reply must never be taken for the next one.
        """
        self.send(message, fds, timeout=timeout)
        return self.answer(message.op, timeout)

    def ask(
        self, message: Request, fds: list[int] | tuple[int, ...] = (), *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> dict[str, Any]:
        """`request` where the reply needs no descriptors: returns its object, and closes any that come all the same."""
        reply, received = self.request(message, fds, timeout=timeout)
        received.close()
        return reply

    def send(
        self, message: Request, fds: list[int] | tuple[int, ...] = (), *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> None:
        """The first half of `request`; `answer` must read the reply."""
        frame = framing.Frame(request_to_json(message), fds)
        try:
            self._sock.settimeout(timeout)
            frame.send(self._sock)
        except TimeoutError:
            self.close()
            raise TimedOut(path=str(self.path), seconds=timeout, waited_for=f"room to send {message.op}") from None
        except OSError as error:
            # The peer may have said why it is about to close; that is the better error.
            last_words = self._last_words()
            self.close()
            if last_words is not None:
                raise last_words from None
            raise ConnectionLost(path=str(self.path), problem=f"send failed: {error.strerror or error}") from error
        finally:
            frame.close()

    def answer(self, op: str, timeout: float | None) -> tuple[dict[str, Any], FdSet]:
        """The second half of `request`: the reply to the message of that name that was sent."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            kind, content, received = self._next(end, timeout, f"the reply to {op}")
            if kind == "ok":
                return content, received
            received.close()
            if kind == "error":
                raise from_wire(content)
            if self.on_event is not None:
                self.on_event(content)

    def next_event(self, timeout: float | None) -> dict[str, Any]:
        """The next event of a subscription, waiting up to `timeout` seconds (None: for ever)."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            kind, content, received = self._next(end, timeout, "an event")
            received.close()
            if kind == "event":
                return content
            if kind == "error":
                raise from_wire(content)

    def close(self) -> None:
        """Ends the connection, and with it a lease, a reservation or a subscription. Idempotent."""
        self._sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _next(self, end: float | None, timeout: float | None, waited_for: str) -> tuple[str, dict[str, Any], FdSet]:
        left = None if end is None else end - time.monotonic()
        try:
            if left is not None and left < -_GRACE:
                raise TimeoutError  # whatever else may still come: events, mostly
            # 0 would mean non-blocking to settimeout; a reply that is already here is still read.
            self._sock.settimeout(None if left is None else max(left, 0.001))
            received = framing.receive(self._sock, large=True)
        except TimeoutError:
            self.close()
            raise TimedOut(path=str(self.path), seconds=timeout, waited_for=waited_for) from None
        except OSError as error:
            self.close()
            raise ConnectionLost(path=str(self.path), problem=f"receive failed: {error.strerror or error}") from error
        except ProtocolError:
            self.close()
            raise
        if received is None:
            self.close()
            raise ConnectionLost(path=str(self.path), problem=f"closed by the other side before {waited_for}")
        data, fds = received
        try:
            return (*_take_apart(data), fds)
        except ProtocolError:
            fds.close()
            self.close()
            raise

    def _last_words(self) -> WeightCacheError | None:
        """The error that the peer sent before it closed, behind events that nobody has read."""
        try:
            self._sock.settimeout(0.001)
            while (received := framing.receive(self._sock, large=True)) is not None:
                received[1].close()
                kind, content = _take_apart(received[0])
                if kind == "error":
                    return from_wire(content)
        except (OSError, ProtocolError):  # nothing, or nothing that can be understood
            return None
        return None

    def _check_greeting(self, device: str | None) -> None:
        theirs = self.greeting.get("protocol")
        if theirs != PROTOCOL:
            raise VersionMismatch(
                ours=f"protocol {PROTOCOL} of weightcached {__version__}",
                theirs=f"protocol {theirs} of weightcached {self.greeting.get('version')}",
            )
        if self.greeting.get("device") != device:
            raise WrongDevice(wanted=device, found=self.greeting.get("device"))


def seconds_left(end: float) -> float:
    """Seconds until `end` (monotonic); never 0, which sockets take for "do not block"."""
    return max(end - time.monotonic(), 0.001)


def _take_apart(data: bytes) -> tuple[str, dict[str, Any]]:
    message = framing.decode(data)
    for kind in ("ok", "error", "event"):
        content = message.get(kind)
        if isinstance(content, dict):
            return kind, content
    raise ProtocolError(problem=f"neither ok, error nor event: {sorted(message)}")
