"""server: real clients on a real socket, most of them bad ones."""

from __future__ import annotations

import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks, open_descriptors
from tests.wire.serving import HELLO, SECONDS, STATUS, Client, serving
from weightcached import __version__
from weightcached.errors import NoSuchModel
from weightcached.fds import FdSet
from weightcached.wire import limits, protocol, server, stream
from weightcached.wire.messages import Attach, Request, Reserve, Subscribe
from weightcached.wire.protocol import State
from weightcached.wire.server import ServerConnection


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "host-0.sock"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> float:
    """Every deadline is this many seconds."""
    limit = 0.2
    for state in (State.NEW, State.OPEN, State.RESERVED):
        monkeypatch.setitem(protocol._LIMITS, state, limit)
    return limit


class Held:
    """A handler that answers subscribe with a hold, reserve with a reservation, and attach not at all."""

    def __init__(self) -> None:
        self.connections: list[ServerConnection] = []
        self.closed: list[str] = []
        self.waiting = threading.Event()

    def __call__(self, connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        match request:
            case Subscribe():
                self.connections.append(connection)
                for name in ("first", "second"):
                    connection.on_close.append(lambda name=name: self.closed.append(name))
                connection.hold()
            case Reserve():
                connection.reserved()
            case Attach():
                self.connections.append(connection)
                self.waiting.set()
                return None
        return {}


def test_hello_is_answered_with_who_is_here(path: Path) -> None:
    """The greeting names the protocol, the version, the device and the instance."""
    with serving(path), Client(path, hello=False) as client:
        assert client.ask(HELLO) == {"protocol": 1, "version": __version__, "device": "host-0", "instance": "test"}
        assert client.ask(STATUS) == {"op": "status"}


def test_a_request_may_be_answered_later(path: Path) -> None:
    """A handler that returns None answers by `reply` when it can; until then the peer has no deadline."""
    held = Held()
    with serving(path, held) as running, Client(path) as client:
        client.send({"op": "attach", "model": "m"})
        assert held.waiting.wait(SECONDS)
        running.call(held.connections[0].event, {"progress": 0.5})
        running.call(held.connections[0].reply, {"here": True})
        assert client.receive() == {"event": {"progress": 0.5}}
        assert client.receive() == {"ok": {"here": True}}
        assert client.ask(STATUS) == {}


def test_an_error_of_the_handler_is_a_reply(path: Path) -> None:
    """An error of the tree is sent as code, fields and sentence, and the connection goes on."""

    def handle(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        raise NoSuchModel(model="m", device="host-0", known=["a"])

    with serving(path, handle), Client(path) as client:
        for _ in range(2):
            error = client.refused(STATUS)
            assert error["code"] == "no-such-model"
            assert error["fields"] == {"model": "m", "device": "host-0", "known": ["a"]}
            assert error["message"] == "no model m on host-0; there: a"


@pytest.mark.parametrize("hello", [False, True], ids=["before hello", "after hello"])
def test_a_silent_client_is_told_and_closed(path: Path, hasty: float, hello: bool) -> None:
    """A client that sends nothing in time gets the reason and the end, not earlier than its deadline."""
    with serving(path) as running, Client(path, hello=hello) as client:
        started = time.monotonic()
        reply = client.receive()
        elapsed = time.monotonic() - started
        assert reply is not None and reply["error"]["message"].startswith("protocol: no message in time")
        assert client.receive() is None
        assert elapsed >= hasty * 0.9
        assert running.connections() == 0


def test_a_lease_has_no_deadline(path: Path, hasty: float) -> None:
    """A connection that holds something stays open in silence; a later reservation on it is limited as any other."""
    held = Held()
    with serving(path, held) as running, Client(path) as client:
        client.ask({"op": "subscribe"})
        client.sock.settimeout(hasty * 3)
        with pytest.raises(TimeoutError):
            client.receive()
        running.call(held.connections[0].event, {"still": "here"})
        assert client.receive() == {"event": {"still": "here"}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"\xff\x00garbage", "Invalid JSON"),
        (b"{}", "discriminator"),
        (b'{"op":"status"}', "the first message must be hello"),
        (b'{"in":"memfd"}', "discriminator"),
        (b"x" * (70 << 10), "more than 65536 bytes"),
    ],
    ids=["garbage", "no op", "no hello", "by memfd", "oversized"],
)
def test_garbage_is_answered_and_closed(path: Path, message: bytes, words: str) -> None:
    """Whatever breaks the protocol is answered with a `protocol-error`, then the connection ends."""
    with serving(path) as running, Client(path, hello=False) as client:
        error = client.refused(message, [0])
        assert error["code"] == "protocol-error"
        assert words in error["message"]
        assert client.receive() is None
        assert running.connections() == 0
        assert running.defects == []


def test_a_message_without_bytes_is_an_end(path: Path) -> None:
    """An empty message cannot be told from the end of the connection, and ends it."""
    with serving(path) as running, Client(path) as client:
        client.send(b"")
        assert client.receive() is None
        assert running.connections() == 0


def test_the_process_of_a_peer(path: Path) -> None:
    """A handler may ask about the process at the other end; one descriptor is kept for it until the connection ends."""
    asked = []

    def handle(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any]:
        asked.append(connection.process())
        return {"ended": connection.process().ended}

    with serving(path, handle) as running:
        with Client(path) as client:
            before = len(open_descriptors())
            assert client.ask(STATUS) == {"ended": False}
            assert client.ask(STATUS) == {"ended": False}
            assert asked[0] is asked[1]
            assert len(open_descriptors()) == before + 1
        while running.connections():
            pass
        assert len(open_descriptors()) == before - 2  # the pidfd, and the two ends of the connection


def test_impatience_is_an_error(path: Path) -> None:
    """A second request before the first reply ends the connection, whose `on_close` callbacks run."""
    held = Held()
    with serving(path, held) as running, Client(path) as client:
        client.send({"op": "attach", "model": "m"})
        assert "await the reply first" in client.refused(STATUS)["message"]
        assert client.receive() is None
        assert running.connections() == 0


def test_another_device_may_be_corrected(path: Path) -> None:
    """A wrong device is an error, not a broken protocol: the same connection may say hello again."""
    with serving(path), Client(path, hello=False) as client:
        assert client.refused({**HELLO, "device": "host-1"})["code"] == "wrong-device"
        assert client.ask(HELLO)["device"] == "host-0"


def test_a_later_protocol_is_named(path: Path) -> None:
    """A hello of another protocol gets both versions, then the end."""
    with serving(path), Client(path, hello=False) as client:
        error = client.refused({**HELLO, "protocol": 2, "version": "9", "new": True})
        assert error["code"] == "version-mismatch"
        assert error["fields"] == {
            "ours": f"protocol 1 of weightcached {__version__}",
            "theirs": "protocol 2 of test 9",
        }
        assert client.receive() is None


def test_a_hundred_silent_clients_delay_nobody(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a hundred clients that connected and say nothing, a hello and a status take as long as without them."""

    def measure() -> float:
        times = []
        for _ in range(20):
            started = time.perf_counter()
            with Client(path) as client:
                client.ask(STATUS)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    with serving(path) as running:
        alone = measure()
        silent = [Client(path, hello=False) for _ in range(100)]
        crowded = measure()
        assert running.connections() >= 100
        for client in silent:
            client.close()
    with capsys.disabled():
        print(f"\nhello and status: {alone * 1e3:.2f} ms alone, {crowded * 1e3:.2f} ms beside 100 silent clients")
    assert crowded < max(10 * alone, 0.05)


def test_a_subscriber_that_does_not_read_is_cut_off(path: Path) -> None:
    """A subscriber that never reads is closed once MAX_QUEUED messages wait for it; another one gets every event."""
    held = Held()
    with serving(path, held) as running, Client(path) as deaf, Client(path) as good:
        deaf.ask({"op": "subscribe"})
        good.ask({"op": "subscribe"})
        seen = []
        sent = 0
        while not held.connections[0].closed:
            assert sent < 10_000
            running.call(lambda number: [item.event({"n": number}) for item in held.connections], sent)
            seen.append(good.receive())
            sent += 1
        assert seen == [{"event": {"n": number}} for number in range(sent)]
        assert sent > stream.MAX_QUEUED
        assert held.closed == ["second", "first"]
        assert good.ask(STATUS) == {}
        unread = 0
        while deaf.receive() is not None:
            unread += 1
        assert 0 < unread < sent  # what the socket itself had taken; the queue was dropped


def test_a_client_that_reads_nothing_and_breaks_the_protocol_is_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last words that a peer does not read hold its connection for LAST_WORDS_SECONDS, not for ever."""
    monkeypatch.setattr(stream, "LAST_WORDS_SECONDS", 0.2)
    held = Held()
    with serving(path, held) as running, Client(path) as client:
        client.ask({"op": "subscribe"})
        closed = threading.Event()
        running.call(held.connections[0].on_close.append, closed.set)
        # The socket takes some; from the first that is queued on, nothing goes out any more.
        running.call(lambda: [held.connections[0].event({"n": "x" * 2000}) for _ in range(200)])
        client.send(b"garbage")
        assert closed.wait(SECONDS)
        assert running.connections() == 0


def test_callbacks_run_once(path: Path) -> None:
    """`on_close` callbacks run once, in reverse order, when the client goes away."""
    held = Held()
    with serving(path, held) as running:
        with Client(path) as client:
            client.ask({"op": "subscribe"})
            gone = threading.Event()
            running.call(held.connections[0].on_close.insert, 0, gone.set)
        assert gone.wait(SECONDS)
        running.call(held.connections[0].close, "again")
        assert held.closed == ["second", "first"]
        assert running.connections() == 0


def test_a_defect_ends_the_connection_only(path: Path) -> None:
    """A handler that fails in a way nobody foresaw closes its connection, so that the peer does not wait in vain; the
    loop reports it, and other clients are served on."""

    def handle(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        if isinstance(request, Reserve):
            raise KeyError("a defect")
        return {}

    with serving(path, handle) as running, Client(path) as other:
        with Client(path) as client:
            client.send({"op": "reserve", "model": "m", "nbytes": 1})
            assert client.receive() is None
        assert other.ask(STATUS) == {}
        assert [type(item["exception"]) for item in running.defects] == [KeyError]


def test_stop_closes_every_connection(path: Path) -> None:
    """`stop` ends leases, waiting clients and silent ones alike, and nothing is accepted after it."""
    held = Held()
    with serving(path, held) as running:
        clients = [Client(path), Client(path), Client(path, hello=False)]
        clients[0].ask({"op": "subscribe"})
        clients[1].send({"op": "attach", "model": "m"})
        assert held.waiting.wait(SECONDS)
        running.call(running.server.stop, "enough")
        running.call(running.server.stop, "twice is once")
        assert [client.receive() for client in clients] == [None] * 3
        assert held.closed == ["second", "first"]
        late = Client(path, hello=False)  # the queue of the listening socket takes it
        late.sock.settimeout(0.1)
        late.send(HELLO)
        with pytest.raises(TimeoutError):
            late.receive()
        for client in [*clients, late]:
            client.close()


def test_no_descriptor_is_left_by_two_hundred_clients(path: Path, descriptors: NoDescriptorLeaks) -> None:
    """Clients that say hello, send garbage with descriptors, vanish at once or in mid request leave nothing open."""
    with serving(path) as running:
        before = NoDescriptorLeaks()
        with Client(path) as client:
            client.ask(STATUS)
        with before:
            for number in range(200):
                with Client(path, hello=number % 2 == 0) as client:
                    match number % 5:
                        case 1:
                            client.refused(b"garbage", [0, 1, 2])
                        case 2:
                            client.send(STATUS, [0] * 253)
                        case 3:
                            client.send(b"x" * (70 << 10), [0])
                        case 4:
                            client.send(b"")
            last = Client(path)  # when it is answered, everyone before it has been accepted and read
            last.close()
            end = time.monotonic() + SECONDS
            while running.connections():
                assert time.monotonic() < end
        assert running.defects == []


def test_a_server_out_of_descriptors_waits_for_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the open files limit new clients wait in the socket's queue; the loop neither spins nor dies, and accepts them
    as soon as there is room."""
    monkeypatch.setattr(server, "ACCEPT_PAUSE_SECONDS", 0.1)
    accepts = 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(path) as running, Client(path) as early, Client(path, hello=False) as warm:
        warm.close()
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waiting.settimeout(SECONDS)
        early.ask(STATUS)
        accept = running.server._accept

        def counted() -> None:
            nonlocal accepts
            accepts += 1
            accept()

        running.call(setattr, running.server, "_accept", counted)
        running.call(running.server.start)  # watch the listener with the counting one
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.dup(0))
            waiting.connect(os.fspath(path))
            waiting.send(b'{"op":"hello","client":"c","version":"1","device":"host-0"}')
            before = time.process_time()
            for _ in range(10):
                assert early.ask(STATUS)
                time.sleep(0.05)  # the time over which spinning would show
            assert accepts < 20
            assert time.process_time() - before < 0.4
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with waiting:
            assert b'"ok"' in waiting.recv(1000)


def test_a_hasty_client_is_read_at_a_pace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks without end is answered each time, after a burst at the pace of the server; one that connects
    anew for each question is not slowed down."""
    monkeypatch.setattr(limits, "BURST", 10)
    monkeypatch.setattr(limits, "PER_SECOND", 50.0)
    asked = 20
    with serving(path), Client(path) as client, Client(path) as other:
        started = time.monotonic()
        for _ in range(asked):
            client.ask(STATUS)
        elapsed = time.monotonic() - started
        # The hello counts too, and the bucket fills from then on, before this clock starts.
        assert elapsed >= (asked + 1 - limits.BURST) / limits.PER_SECOND * 0.6
        for _ in range(asked):
            with Client(path) as new:
                new.ask(STATUS)
        other.ask(STATUS)
        assert time.monotonic() - started < 3 * elapsed


def test_a_slowed_client_that_goes_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a connection is not read its end is not seen, but right after."""
    monkeypatch.setattr(limits, "BURST", 1)
    with serving(path) as running:
        with Client(path) as client:
            client.ask(STATUS)
        with Client(path) as client:
            client.send(b"garbage")  # the last words go out and nothing is read after them
        end = time.monotonic() + SECONDS
        while running.connections():
            assert time.monotonic() < end
        assert running.defects == []


def test_what_one_connection_collects_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that takes one lease after the other is told to open another one, and loses what it has."""
    monkeypatch.setattr(server, "MAX_HELD", 10)
    held = Held()  # each subscription registers two callbacks
    with serving(path, held) as running, Client(path) as client:
        for _ in range(6):
            client.ask({"op": "subscribe"})
        assert "10 leases and the like are held" in client.refused(STATUS)["message"]
        assert client.receive() is None
        assert (running.connections(), len(held.closed)) == (0, 12)


def test_connections_beyond_the_share_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its share a user is refused with the number, everybody else is served, and each end makes room for one."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 3)
    with serving(path) as running:
        clients = [Client(path) for _ in range(3)]
        for _ in range(2):
            with Client(path, hello=False) as refused:
                reply = refused.receive()
                assert reply is not None
                assert reply["error"]["code"] == "too-many-connections"
                assert reply["error"]["fields"] == {"uid": os.geteuid(), "limit": 3}
                assert refused.receive() is None
        assert clients[0].ask(STATUS)
        clients.pop().close()
        end = time.monotonic() + SECONDS
        while running.connections() == 3:
            assert time.monotonic() < end
        clients.append(Client(path))
        for client in clients:
            client.close()


OTHER_USER = """
import os, socket, sys
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(10)
sock.connect(sys.argv[1])
try:
    sock.send(b'{"op":"hello"}')
except BrokenPipeError:
    pass
while True:
    try:
        data = sock.recv(65536)
    except ConnectionResetError:
        continue
    if not data:
        break
    print(data.decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_refused_and_told(path: Path) -> None:
    """A process of another uid that can reach the socket gets a `peer-refused` error and nothing else."""
    path.parent.chmod(0o711)
    with serving(path) as running:
        path.chmod(0o666)
        done = subprocess.run(
            [sys.executable, "-c", OTHER_USER, os.fspath(path)], capture_output=True, text=True, timeout=30, check=True
        )
        assert running.connections() == 0
    assert '"code":"peer-refused"' in done.stdout
    assert '"uid":65534' in done.stdout
    assert '"ok"' not in done.stdout


GUEST = """
import os, sys
from pathlib import Path
from tests.wire.serving import Client, HELLO
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
with Client(Path(sys.argv[1])) as client:
    for op in ({"op": "attach", "model": "m"}, {"op": "status"}, {"op": "subscribe"}):
        print(client.ask(op)["op"])
    for op in ({"op": "evict", "model": "m"}, {"op": "reserve", "model": "m", "nbytes": 1}, {"op": "publish"}):
        print(client.refused(op)["code"])
    print(client.ask({"op": "status"})["op"])
    with Client(Path(sys.argv[1])), Client(Path(sys.argv[1]), hello=False) as refused:
        print(refused.receive()["error"]["message"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_an_allowed_user_attaches_and_looks_and_no_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a listed uid attaches, and reads the status; evict, reserve and publish are not for it and leave its
    connection as it was. It cannot fill the server: half of the connections stay the service's own."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 4)
    path.parent.chmod(0o711)
    with serving(path, allow_uids=(65534,)) as running:
        path.chmod(0o666)
        done = subprocess.run(
            [sys.executable, "-c", GUEST, os.fspath(path)], capture_output=True, text=True, timeout=30, check=True
        )
        with Client(path) as own:
            assert own.ask({"op": "evict", "model": "m"}) == {"op": "evict"}
        assert running.defects == []
    assert done.stdout.split("\n")[:-1] == [
        "attach", "status", "subscribe", "not-permitted", "not-permitted", "not-permitted", "status",
        "uid 65534 has 2 connections here, all that it may have; close some",
    ]  # fmt: skip


def test_refusals_do_not_fill_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that is refused again and again makes one line of log in a while, which says how often."""
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 0)
    with serving(path) as running:
        for number in range(30):
            if number == 29:
                running.call(setattr, running.server, "_refusals_logged", -1e9)  # as if the time were over
            with Client(path, hello=False) as client:
                assert client.receive() is not None
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == [
        "refused since start: 1",
        "refused since start: 30",
    ]
