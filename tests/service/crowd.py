"""Clients of a worker by the hundred, each a small state machine in one process, speaking the protocol by hand.

    python -m tests.service.crowd attach SOCKET MODEL CLIENTS SECONDS    each attaches, lets go, attaches again
    python -m tests.service.crowd idle SOCKET CLIENTS                    silent and half clients, until stdin ends

Both print one JSON object at the end; `idle` first prints a line when all are connected.
"""

from __future__ import annotations

import array
import errno
import json
import os
import random
import resource
import selectors
import socket
import statistics
import sys
import time

HELLO = b'{"op":"hello","client":"crowd","version":"1","device":"host-0"}'
HALVES = (HELLO[:40], b'{"op":"attach","model":"sm', b"{", b'{"op"')
_CLOEXEC = socket.MSG_CMSG_CLOEXEC
_SPACE = socket.CMSG_SPACE(253 * 4)


def connected(path: str) -> socket.socket | None:
    """A connection, or None where the queue of the listening socket is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(path)
    except BlockingIOError:
        sock.close()
        return None
    return sock


class Attacher:
    """Connects, says hello, attaches, checks what it was given, goes, and begins again. Each round is timed."""

    def __init__(self, crowd: Attachers) -> None:
        self._crowd = crowd
        self._sock: socket.socket | None = None
        self.begin()

    def begin(self) -> None:
        self._started = time.perf_counter()
        self._greeted = False
        self._sock = connected(self._crowd.path)
        if self._sock is None:
            self._crowd.waiting.append(self)
            return
        self._crowd.selector.register(self._sock, selectors.EVENT_READ, self)
        self._sock.send(HELLO)

    def readable(self) -> None:
        assert self._sock is not None
        data, ancillary, flags, _ = self._sock.recvmsg(65536, _SPACE, _CLOEXEC)
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        for fd in fds:
            os.close(fd)
        if not data.startswith(b'{"ok"') or flags & socket.MSG_CTRUNC:
            self._crowd.failures.append(data[:300].decode(errors="replace") or "closed")
        elif not self._greeted:
            self._greeted = True
            self._sock.send(self._crowd.attach)
            return
        elif len(fds) != 2:
            self._crowd.failures.append(f"{len(fds)} descriptors")
        else:
            self._crowd.times.append(time.perf_counter() - self._started)
        self._crowd.selector.unregister(self._sock)
        self._sock.close()
        self._crowd.finished.append(self)


class Attachers:
    """`clients` attachers for `seconds`. The rounds under way at the end are finished and counted too."""

    def __init__(self, path: str, model: str, clients: int) -> None:
        self.path = path
        self.attach = json.dumps({"op": "attach", "model": model}).encode()
        self.selector = selectors.DefaultSelector()
        self.times: list[float] = []
        self.failures: list[str] = []
        self.finished: list[Attacher] = []
        self.waiting: list[Attacher] = []
        self._clients = [Attacher(self) for _ in range(clients)]

    def run(self, seconds: float) -> dict[str, object]:
        end = time.monotonic() + seconds
        left = len(self._clients)
        while left:
            events = self.selector.select(1.0)
            for key, _ in events:
                key.data.readable()
            again, self.finished = self.finished + self.waiting, []
            self.waiting = []
            for attacher in again:
                if time.monotonic() < end:
                    attacher.begin()
                else:
                    left -= 1
            if not events and time.monotonic() > end + 30:
                self.failures.append(f"{left} clients got no answer")
                break
        return {
            "attaches": len(self.times),
            "per_second": round(len(self.times) / seconds),
            "median_ms": round(statistics.median(self.times) * 1e3, 3),
            "p99_ms": round(statistics.quantiles(self.times, n=100)[98] * 1e3, 3),
            "max_ms": round(max(self.times) * 1e3, 3),
            "failures": self.failures[:5],
            "failed": len(self.failures),
        }


def idle(path: str, clients: int) -> dict[str, object]:
    """Half of the clients say nothing at all, a third say hello and no more, the others say half of a message after up
    to four seconds. Whoever is cut off connects again at once, until stdin ends."""
    chance = random.Random(1)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    kinds: dict[socket.socket, str] = {}
    due: list[tuple[float, socket.socket]] = []
    missing = ["silent"] * (clients // 2) + ["greeted"] * (clients // 3)
    missing += ["half"] * (clients - len(missing))
    connects = cut = 0
    told = False
    while True:
        now = time.monotonic()
        while missing and (sock := connected(path)) is not None:
            kinds[sock] = kind = missing.pop()
            selector.register(sock, selectors.EVENT_READ)
            connects += 1
            if kind == "greeted":
                sock.send(HELLO)
            elif kind == "half":
                due.append((now + chance.uniform(0, 4), sock))
        if not missing and not told:
            print("here", flush=True)
            told = True
        for item in [item for item in due if item[0] <= now]:
            due.remove(item)
            if item[1] in kinds:
                item[1].send(chance.choice(HALVES))
        for key, _ in selector.select(0.01 if missing else 0.05):
            if key.fileobj is sys.stdin:
                for sock in kinds:
                    sock.close()
                return {"connects": connects, "cut_off": cut, "connected": len(kinds)}
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                data = sock.recv(65536)
            except OSError as error:
                if error.errno != errno.ECONNRESET:
                    raise
                data = b""
            if not data:
                cut += 1
                selector.unregister(sock)
                sock.close()
                missing.append(kinds.pop(sock))


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    match sys.argv[1:]:
        case ["attach", path, model, clients, seconds]:
            result = Attachers(path, model, int(clients)).run(float(seconds))
        case ["idle", path, clients]:
            result = idle(path, int(clients))
        case _:
            sys.exit(__doc__)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
