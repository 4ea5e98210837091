"""A server on a real socket, in a thread of its own, and clients that speak to it with plain blocking sockets."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcached.fds import FdSet
from weightcached.wire import framing
from weightcached.wire.messages import WORKER_OPS, Request
from weightcached.wire.server import Handler, Server, ServerConnection

HELLO = {"op": "hello", "client": "test", "version": "1", "device": "host-0", "protocol": 1}
STATUS = {"op": "status"}
SECONDS = 10.0  # for everything that must happen; a test that waits longer has failed


def answer_at_once(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
    """The handler of tests that need no other: it names the operation."""
    return {"op": request.op}


@dataclass
class Serving:
    """A running server. `call` runs a function on its loop and returns what it returns."""

    path: Path
    server: Server
    loop: asyncio.AbstractEventLoop
    defects: list[dict[str, Any]]

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SECONDS)

    def connections(self) -> int:
        return int(self.call(lambda: len(self.server.connections)))


@contextlib.contextmanager
def serving(
    path: Path,
    handle: Handler = answer_at_once,
    *,
    ops: frozenset[str] = WORKER_OPS,
    device: str | None = "host-0",
    allow_uids: tuple[int, ...] = (),
) -> Iterator[Serving]:
    """Serves at `path` until the block ends; then every connection is closed and the thread has ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(path))
    listener.listen(1024)
    running = threading.Event()
    made: list[Serving] = []
    stop: list[asyncio.Event] = []

    async def main() -> None:
        server = Server(listener, ops=ops, device=device, instance="test", handle=handle, allow_uids=allow_uids)
        loop = asyncio.get_running_loop()
        made.append(Serving(path, server, loop, []))
        loop.set_exception_handler(lambda _, context: made[0].defects.append(context))
        stop.append(asyncio.Event())
        server.start()
        running.set()
        await stop[0].wait()
        server.stop("the test has ended")
        assert not server.connections

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert running.wait(SECONDS)
        yield made[0]
    finally:
        made[0].loop.call_soon_threadsafe(stop[0].set)
        thread.join()
        listener.close()
        path.unlink()


class Client:
    """The other end, by hand: it may send what it likes."""

    def __init__(self, path: Path, *, hello: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(SECONDS)
        self.sock.connect(os.fspath(path))
        if hello:
            self.ask(HELLO)

    def send(self, message: dict[str, Any] | bytes, fds: list[int] | tuple[int, ...] = ()) -> None:
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])

    def receive(self) -> dict[str, Any] | None:
        """The next message, its descriptors dropped; None at the end."""
        received = framing.receive(self.sock, large=True)
        if received is None:
            return None
        received[1].close()
        return framing.decode(received[0])

    def ask(self, message: dict[str, Any] | bytes, fds: list[int] | tuple[int, ...] = ()) -> dict[str, Any]:
        """The content of the reply, which must be ok."""
        self.send(message, fds)
        reply = self.receive()
        assert reply is not None and "ok" in reply, reply
        return reply["ok"]  # type: ignore[no-any-return]

    def refused(self, message: dict[str, Any] | bytes, fds: list[int] | tuple[int, ...] = ()) -> dict[str, Any]:
        """The error in the reply, which must be one."""
        self.send(message, fds)
        reply = self.receive()
        assert reply is not None and "error" in reply, reply
        return reply["error"]  # type: ignore[no-any-return]

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
