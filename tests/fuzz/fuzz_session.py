"""Fuzzes a real worker process over its real socket: sequences of good, mutated and half messages, with and without
descriptors of every kind, cut off at any moment.

    python -m tests.fuzz.fuzz_session [MESSAGES] [SEED]

`check` then finds out whether the worker still serves, holds the descriptors that it held before, and has not grown.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.messages import HELLO, Mutator
from tests.wire.serving import SECONDS
from tests.worker.process import LIMIT, WorkerProcess, shard
from tests.worker.test_handlers import unsealed
from weightcached.errors import BY_CODE
from weightcached.fds import OwnedFd
from weightcached.shard.host import HostSlab
from weightcached.wire import framing

CLIENTS = 12
GROWTH = 2 << 20  # bytes of memory by which a worker may differ from itself
MESSAGES = 6000


class Fuzzer:
    """A dozen clients of one worker, driven from one seed. `close` ends them and what they hold."""

    def __init__(self, worker: WorkerProcess, seed: int) -> None:
        self._worker = worker
        self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        self._clients: list[socket.socket] = []
        self.sent = 0
        self.descriptors = 0
        self.cut_short = 0
        self.replies: dict[str, int] = {}
        self._steps = {
            self._connect: 10, self._hello: 10, self._send_good: 20, self._send_mutated: 20, self._send_odd: 4,
            self._publish: 10, self._read: 25, self._close: 8, self._shut: 2,
        }  # fmt: skip

    def run(self, messages: int) -> None:
        """Random steps until so many messages more are sent; of one the worker cannot take all descriptors."""
        end = self.sent + messages
        steps, weights = list(self._steps), list(self._steps.values())
        self._starve()
        while self.sent < end:
            for step in self._chance.choices(steps, weights, k=50):
                if not self._clients:
                    self._connect()
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    step()

    def close(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def _connect(self) -> None:
        if len(self._clients) == CLIENTS:
            self._close()
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(SECONDS)
        client.connect(os.fspath(self._worker.path))
        client.setblocking(False)
        self._clients.append(client)
        if self._chance.random() < 0.7:
            self._hello(client)

    def _any(self) -> socket.socket:
        return self._chance.choice(self._clients)

    def _hello(self, client: socket.socket | None = None) -> None:
        self._send(client or self._any(), json.dumps(HELLO).encode())

    def _send_good(self) -> None:
        self._send(self._any(), self._chance.choice(self._mutator.valid))

    def _send_mutated(self) -> None:
        number = self._chance.choice((0, 0, 0, 1, 2, 7, 253))
        with self._things(number) as fds:
            self._send(self._any(), self._mutator.message(), fds)

    def _send_odd(self) -> None:
        """No bytes at all, more than a message may have, or what only a service may send; descriptors beside them."""
        data = self._chance.choice((b"", b"x" * (70 << 10), b'{"in":"memfd"}', b"\0" * 65_536))
        with self._things(self._chance.choice((0, 1, 253))) as fds:
            self._send(self._any(), data, fds)

    def _publish(self) -> None:
        """A publisher as it should be up to a point, on a connection of its own, which may end after each step."""
        chance = self._chance.random
        model = self._chance.choice(("m", "n"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(SECONDS)
            client.connect(os.fspath(self._worker.path))
            self._send(client, json.dumps(HELLO).encode())
            self._send(client, json.dumps({"op": "reserve", "model": model, "nbytes": 256}).encode())
            if chance() < 0.1:
                return
            self._reply(client)
            generation = self._reply(client).get("ok", {}).get("generation")
            if generation is None or chance() < 0.1:
                return
            wrong = {
                "device": {"device": "host-1"}, "generation": {"generation": generation + 1}, "size": {"nbytes": 512},
                "seals": {"change_slab": unsealed},
                "model": {"model": "other"}, "count": {"tensor_count": 2},
            }  # fmt: skip
            changes = wrong[self._chance.choice(list(wrong))] if chance() < 0.5 else {}
            fields = {"model": model, "generation": generation, **changes}
            made = shard(fields.pop("model"), fields.pop("generation"), b"x" * 256, **fields)
            with made as fds, self._things(self._chance.choice((0, 0, 0, 1, 200))) as more:
                numbers = [fd.fileno() for fd in fds] + more
                if chance() < 0.2:
                    self._chance.shuffle(numbers)
                self._send(client, b'{"op":"publish"}', numbers)
            if chance() < 0.7:
                self._reply(client)

    def _read(self) -> None:
        client = self._any()
        while self._take(client) is not None:
            pass

    def _close(self) -> None:
        client = self._any()
        self._clients.remove(client)
        client.close()

    def _shut(self) -> None:
        self._any().shutdown(self._chance.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))

    def _starve(self) -> None:
        """The worker may open two files more and is sent 253: some do not arrive (MSG_CTRUNC)."""
        pid = self._worker.process.pid
        with self._worker.client() as client, self._things(253) as fds:
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            highest = max(map(int, os.listdir(f"/proc/{pid}/fd")))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 3, hard))
            try:
                self._send(client.sock, b'{"op":"publish"}', fds)
                while (reply := self._take(client.sock)) is not None:
                    self.cut_short += "did not all arrive" in reply.get("error", {}).get("message", "")
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    def _send(self, client: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        client.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        self.sent += 1
        self.descriptors += len(fds or ())

    def _take(self, client: socket.socket) -> dict[str, dict[str, Any]] | None:
        """The next reply; None at the end. What it carries is closed."""
        received = framing.receive(client, large=True)
        if received is None:
            return None
        received[1].close()
        reply = framing.decode(received[0])
        kind = next(iter(reply))
        assert kind in ("ok", "error", "event"), reply
        if kind == "error":
            kind = reply["error"]["code"]
            assert kind in BY_CODE, reply
        self.replies[kind] = self.replies.get(kind, 0) + 1
        return reply

    def _reply(self, client: socket.socket) -> dict[str, dict[str, Any]]:
        return self._take(client) or {}

    @contextlib.contextmanager
    def _things(self, number: int) -> Iterator[list[int]]:
        """Descriptors of every kind, not all of them different; closed afterwards."""
        with contextlib.ExitStack() as stack:
            kinds = []
            for _ in range(min(number, 4)):
                match self._chance.randrange(6):
                    case 0:
                        slab = HostSlab(256)
                        kinds.append(stack.enter_context(slab.seal()).fileno())
                    case 1:
                        kinds.append(stack.enter_context(OwnedFd(os.memfd_create("fuzz"))).fileno())
                    case 2:
                        kinds += [stack.enter_context(OwnedFd(fd)).fileno() for fd in os.pipe()]
                    case 3:
                        kinds += [stack.enter_context(end).fileno() for end in socket.socketpair()]
                    case 4:
                        kinds.append(stack.enter_context(OwnedFd(os.open(os.devnull, os.O_RDONLY))).fileno())
                    case 5:  # a client of this very worker, perhaps the one that it is sent by
                        kinds.append(self._any().fileno() if self._clients else 0)
            yield [self._chance.choice(kinds) for _ in range(number)]


class Service:
    """The other end of a worker's channel: confirms what it is asked to hold and to drop. `close` before the worker."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.close()
        self._thread.join()
        self._stopped.close()

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._worker.channel, self._stopped], [], [])
            if self._worker.channel not in readable:
                return
            received = framing.receive(self._worker.channel, large=True)
            if received is None:
                return
            received[1].close()
            message = framing.decode(received[0])
            for said, answer in (("hold", "held"), ("drop", "dropped")):
                if said in message:
                    name = {key: message[said][key] for key in ("model", "generation")}
                    self._worker.tell({answer: name})


def at_rest(worker: WorkerProcess, wanted: int | None = None, patience: float = SECONDS) -> tuple[int, int]:
    """Descriptors and bytes of memory of a worker that serves and holds nothing: every model is evicted first.

    Looks again until the worker has seen the end of every connection, as the kernel tells nobody when that is; and one
    that sent too fast is not listened to for a moment. So it looks until there are as many descriptors as are `wanted`,
    or, where nobody knows how many, twice the same; for `SECONDS`, or until nothing has changed for `patience` seconds.
    """
    with worker.client() as client:
        for held in client.ask({"op": "status"})["shards"]:
            if held["state"] == "cached":
                client.ask({"op": "evict", "model": held["model"], "force": True})
    started = changed = time.monotonic()
    found = -1
    while time.monotonic() < min(started + SECONDS, changed + patience):
        with worker.client() as client:
            status = client.ask({"op": "status"})
            before, found = found, worker.descriptors()
        if found != before:
            changed = time.monotonic()
        if found == (before if wanted is None else wanted) and not status["shards"] and not status["reservations"]:
            break
        time.sleep(0.02)
    pages = int(Path(f"/proc/{worker.process.pid}/statm").read_text().split()[1])
    return found, pages * resource.getpagesize()


def check(worker: WorkerProcess, before: tuple[int, int], patience: float) -> tuple[int, int]:
    """Fails unless the worker is what it was: it serves, without a defect, no descriptor and no memory is left."""
    now = at_rest(worker, before[0], patience)
    assert worker.process.poll() is None
    assert "Traceback" not in worker.log(), worker.log()
    assert now[0] == before[0], f"{now[0]} descriptors, {before[0]} before"
    assert now[1] - before[1] <= GROWTH, f"{now[1] - before[1]} bytes more than before"
    return now


def fuzz(messages: int, seed: int, *, spoiled: str = "", patience: float = SECONDS) -> dict[str, Any]:
    """A worker is fuzzed for a while, looked at, fuzzed on, and must then be as it was (`at_rest`). Returns what was
    met."""
    worker = WorkerProcess(limit=64 * LIMIT, spoiled=spoiled).serve()
    service = Service(worker)
    try:
        cold = at_rest(worker)
        fuzzer = Fuzzer(worker, seed)
        for share in (0.4, 0.6):
            fuzzer.run(int(messages * share))
            fuzzer.close()
            if share == 0.4:  # pools of memory have filled; the descriptors must be the first ones all the same
                warm = at_rest(worker)
        now = check(worker, (cold[0], warm[1]), patience)
        met = {"sent": fuzzer.sent, "descriptors": fuzzer.descriptors, "cut_short": fuzzer.cut_short}
        return {**met, "growth": now[1] - warm[1], "replies": fuzzer.replies}
    finally:
        service.close()
        worker.close()


def main() -> None:
    messages, seed = [*map(int, sys.argv[1:]), *(MESSAGES, 1)[len(sys.argv) - 1 :]]
    print(json.dumps(fuzz(messages, seed)))


if __name__ == "__main__":
    main()
