"""The other end of `weightcached.trace`: counts who stops where, and strikes at the points that a round has chosen."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Every point in the code, by the process that passes it; test_chaos compares it with the source.
POINTS = {
    "main": [
        "service.hold-received",
        "service.before-held",
        "service.dropped",
        "service.reload",
        "service.adopted",
        "store.sent",
        "store.answered",
        "store.removed",
    ],
    "worker": [
        "worker.publish-checked",
        "worker.hold-told",
        "worker.held",
        "worker.evicted",
        "worker.renew",
    ],
    "loader": [
        "loader.planned",
        "loader.reserved",
        "loader.filled",
        "loader.publish",
        "loader.published",
    ],
    "engine": [
        "client.received",
        "client.mapped",
        "client.renew",
    ],
}
# Of an engine that publishes, which those of these tests do not; tests/client/test_publish.py strikes there.
OF_PUBLISHERS = ["client.reserved", "client.slab-moved", "client.publish", "client.published"]

STRIKE_SECONDS = 60.0


@dataclass
class Trap:
    """What is to happen when a point is passed for the nth time in a round: `strike(pid)`, and whether it stays there.

    `strike` gets the pid of the process that is stopped at the point.
    """

    point: str
    occurrence: int
    strike: Callable[[int], None]
    freeze: bool = False
    taken: bool = False  # nobody else is caught in it
    sprung: bool = False  # and it has struck


class Tracer:
    """Listens in a thread of its own until `close`. `hits` counts every pass of every point."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hits: collections.Counter[str] = collections.Counter()
        self.struck: collections.Counter[str] = collections.Counter()
        self._in_round: collections.Counter[str] = collections.Counter()
        self._traps: list[Trap] = []
        self._frozen: list[socket.socket] = []
        self._lock = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(path))
        self._listener.listen(128)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracer")
        self._running = self._thread.submit(self._run)

    def arm(self, traps: list[Trap]) -> None:
        """Begins a round: from now on passes are counted for these traps."""
        with self._lock:
            self._in_round.clear()
            self._traps = traps

    def wait(self, seconds: float) -> bool:
        """Whether every trap has sprung within that time."""
        with self._lock:
            return self._lock.wait_for(lambda: all(trap.sprung for trap in self._traps), seconds)

    def release(self) -> None:
        """Lets every process go on that a trap has frozen; no trap of this round freezes another one."""
        with self._lock:
            frozen, self._frozen = self._frozen, []
            for trap in self._traps:
                if trap.freeze:
                    trap.taken = trap.sprung = True
        for connection in frozen:
            _let_go(connection)

    def disarm(self) -> None:
        """Ends a round: nothing strikes any more, what was struck is dead, and nothing stays frozen."""
        with self._lock:
            struck = self._lock.wait_for(
                lambda: all(trap.sprung or not trap.taken for trap in self._traps), STRIKE_SECONDS
            )
            assert struck, f"a blow that does not fall: {self._traps}"
            self._traps = []
        self.release()

    def check(self) -> None:
        """Raises what has ended the thread, if anything has."""
        if self._running.done():
            self._running.result()

    def close(self) -> None:
        self.disarm()
        os.close(self._wake_write)
        self._thread.shutdown()
        os.close(self._wake_read)
        self._listener.close()
        self.path.unlink()

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._listener, self._wake_read], [], [])
            if self._wake_read in readable:
                return
            connection, _ = self._listener.accept()
            self._passed(connection)

    def _passed(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            data = connection.recv(4096)  # sent right after the connect
            if data:
                here = json.loads(data)
                if self._strike(str(here["point"]), int(here["pid"]), connection):
                    return
        _let_go(connection)

    def _strike(self, point: str, pid: int, connection: socket.socket) -> bool:
        """Whether the process is to stay where it is."""
        with self._lock:
            self.hits[point] += 1
            self._in_round[point] += 1
            trap = next((trap for trap in self._traps if self._hits(trap, point)), None)
            if trap is None:
                return False
            trap.taken = True
            if trap.freeze:
                self._frozen.append(connection)
        trap.strike(pid)
        with self._lock:
            trap.sprung = True
            self.struck[point] += 1
            self._lock.notify_all()
        return trap.freeze

    def _hits(self, trap: Trap, point: str) -> bool:
        return not trap.taken and trap.point == point and trap.occurrence == self._in_round[point]


def _let_go(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.send(b"\1")
