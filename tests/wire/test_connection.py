"""connection: the client's end against real servers, and against peers that lie, dawdle or die."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.wire.serving import serving
from weightcached import __version__
from weightcached.errors import (
    ConnectionLost,
    KeyMismatch,
    PeerRefused,
    ProtocolError,
    ServiceNotRunning,
    TimedOut,
    VersionMismatch,
    WeightCacheError,
    WrongDevice,
    to_wire,
)
from weightcached.fds import FdSet, OwnedFd
from weightcached.wire import framing, protocol
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach, Publish, Request, Reserve, Status, Subscribe
from weightcached.wire.protocol import State
from weightcached.wire.server import ServerConnection

GREETING = {"protocol": 1, "version": "1", "device": "host-0", "instance": "test"}


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "host-0.sock"


def tell(peer: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    frame = framing.Frame(message, fds or [])
    try:
        frame.send(peer)
    finally:
        frame.close()


@contextlib.contextmanager
def scripted(path: Path, script: Callable[[socket.socket], None], *, greet: bool = True) -> Iterator[None]:
    """A peer that takes one connection, answers its hello, does what the script says and closes when that returns."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        listener.settimeout(10)

        def run() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(10)
                if greet:
                    assert framing.receive(peer)
                    tell(peer, {"ok": GREETING})
                script(peer)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def next_request(peer: socket.socket) -> dict[str, Any]:
    received = framing.receive(peer)
    assert received is not None
    received[1].close()
    return framing.decode(received[0])


@pytest.fixture
def open_(path: Path) -> Callable[..., Connection]:
    return lambda **options: Connection.open(path, **{"device": "host-0", "client": "test", **options})


Open = Callable[..., Connection]


def test_open_says_hello_and_keeps_the_greeting(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """After `open` the two sides know each other; `close` is idempotent and a closed connection says so."""
    with serving(path), open_() as connection:
        assert connection.greeting == {
            "protocol": 1, "version": __version__, "device": "host-0", "instance": "test"
        }  # fmt: skip
        assert connection.fileno() >= 0
        reply, fds = connection.request(Status())
        assert (reply, len(fds)) == ({"op": "status"}, 0)
        connection.close()
        connection.close()
        assert connection.closed
        with pytest.raises(ConnectionLost, match="send failed: Bad file descriptor"):
            connection.request(Status())


def test_the_halves_of_open_and_request(path: Path, descriptors: NoDescriptorLeaks) -> None:
    """A caller with a poll of its own connects and asks in two steps each, and reads an answer when it is there."""
    with serving(path), Connection.begin(path, device="host-0", client="test") as connection:
        assert connection.greeting == {}
        assert select.select([connection], [], [], 10)[0]
        connection.greeted(0.1)
        assert connection.greeting["device"] == "host-0"
        connection.send(Status())
        assert select.select([connection], [], [], 10)[0]
        reply, fds = connection.answer("status", 0.1)
        assert (reply, len(fds)) == ({"op": "status"}, 0)


def test_a_greeting_that_does_not_fit_closes(path: Path, descriptors: NoDescriptorLeaks) -> None:
    """The second half of `open` refuses what `open` refuses, and the connection is closed then."""
    with serving(path):
        connection = Connection.begin(path, device="host-7", client="test")
        with pytest.raises(WrongDevice):
            connection.greeted(10)
        assert connection.closed


def test_no_socket_is_no_service(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """Where nothing is, `ServiceNotRunning` names the path and how to start one."""
    with pytest.raises(ServiceNotRunning, match=r"host-0.sock; start it: systemctl --user start") as caught:
        open_()
    assert caught.value.exit_code == 3


def test_a_system_wide_service_is_started_by_the_system(
    path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """Who is told whose service it is, is not sent to the manager of its own user."""
    monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", "0")
    with pytest.raises(ServiceNotRunning, match=r"start it: systemctl start weightcached@INSTANCE$"):
        open_()


def test_a_dead_socket_is_no_service(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A socket file that a killed service has left behind is the same."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
    with pytest.raises(ServiceNotRunning):
        open_()


@pytest.mark.parametrize("kind", ["a file", "a directory", "a stream socket", "a long path"])
def test_what_is_no_service_at_all_is_an_error(path: Path, kind: str, descriptors: NoDescriptorLeaks) -> None:
    """Other things at the path are errors of the tree, with the path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        match kind:
            case "a file":
                path.touch()
            case "a directory":
                path.mkdir()
            case "a stream socket":
                other.bind(os.fspath(path))
                other.listen()
            case "a long path":
                path = path.with_name("x" * 200)
        with pytest.raises((ConnectionLost, ServiceNotRunning)) as caught:
            Connection.open(path, device="host-0")
        assert caught.value.path == str(path)


def test_the_wrong_device_is_refused_by_the_server(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A worker of another device says so, and which one it serves."""
    with serving(path, device="host-1"), pytest.raises(WrongDevice) as caught:
        open_()
    assert (caught.value.wanted, caught.value.found) == ("host-0", "host-1")


@pytest.mark.parametrize(
    ("greeting", "error", "words"),
    [
        ({**GREETING, "device": "host-1"}, WrongDevice, "wanted host-0, found host-1"),
        ({**GREETING, "device": None}, WrongDevice, "found none"),
        ({**GREETING, "protocol": 2, "version": "9.9"}, VersionMismatch, "protocol 2 of weightcached 9.9"),
        ({}, VersionMismatch, "protocol None of weightcached None"),
    ],
)
def test_a_greeting_that_does_not_fit_is_refused_by_the_client(
    path: Path, open_: Open, greeting: dict[str, Any], error: type[WeightCacheError], words: str,
    descriptors: NoDescriptorLeaks,
) -> None:  # fmt: skip
    """The client believes no peer that greets it with another device or protocol, and closes."""

    def script(peer: socket.socket) -> None:
        next_request(peer)
        tell(peer, {"ok": greeting}, [0])
        assert framing.receive(peer) is None

    with scripted(path, script, greet=False), pytest.raises(error, match=words):
        open_()


def test_a_listener_of_another_user_is_refused(
    path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """A client says nothing, not even hello, to a listener that runs as somebody else."""
    uid = os.geteuid()

    def script(peer: socket.socket) -> None:
        assert framing.receive(peer) is None

    with scripted(path, script, greet=False):
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", str(uid + 2))
        with pytest.raises(PeerRefused) as caught:
            open_()
    assert caught.value.fields == {"uid": uid, "allowed": [uid + 1, uid + 2]}


def test_a_listener_of_the_named_user_is_believed(path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """$WEIGHTCACHED_SERVICE_USER names whose service is believed beside this process's own user's."""
    uid = os.geteuid()
    with serving(path):
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", str(uid))
        with open_() as connection:
            assert connection.greeting["device"] == "host-0"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_socket_that_is_closed_to_this_user_says_so(path: Path) -> None:
    """A client that may not even connect is told to ask for its uid in allow_uids; waiting for the service is vain."""
    path.parent.chmod(0o711)
    with serving(path):
        path.chmod(0o600)
        code = (
            "import os, sys; from pathlib import Path; from weightcached.wire.connection import Connection\n"
            "from weightcached.errors import ConnectionFailed, ConnectionLost, ServiceNotRunning\n"
            "os.setresuid(65534, 65534, 65534)\n"
            "try: Connection.open(Path(sys.argv[1]), device='host-0')\n"
            "except ConnectionFailed as error: print(type(error).__name__, error)"
        )
        done = subprocess.run([sys.executable, "-c", code, os.fspath(path)], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"ConnectionFailed {path}: is closed to uid 65534; its service must list that in allow_uids\n"
    )


def test_an_error_of_the_peer_is_raised_as_its_class(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """Code and fields become the same error on this side, and the connection goes on."""

    def handle(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        if isinstance(request, Status):
            return {}
        raise KeyMismatch(model="m", differences={"dtype": ["float32", "bfloat16"]})

    with serving(path, handle), open_() as connection:
        with pytest.raises(KeyMismatch, match="dtype") as caught:
            connection.request(Attach(model="m"))
        assert caught.value.differences == {"dtype": ["float32", "bfloat16"]}
        connection.request(Status())


def test_an_unknown_error_keeps_its_sentence(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A code of a newer version is the root error with the peer's own sentence."""

    def script(peer: socket.socket) -> None:
        next_request(peer)
        tell(peer, {"error": {"code": "too-hot", "fields": {"degrees": 99}, "message": "the device is too hot"}})
        assert framing.receive(peer) is None

    with scripted(path, script), open_() as connection, pytest.raises(WeightCacheError, match="the device is too hot"):
        connection.request(Status())


def test_a_silent_peer_is_a_timeout(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """`TimedOut` says how long and for what, and closes: a late reply must not be taken for the next one."""
    release = threading.Event()

    def script(peer: socket.socket) -> None:
        next_request(peer)
        release.wait(10)

    with scripted(path, script):
        connection = open_()
        started = time.monotonic()
        with pytest.raises(TimedOut, match=r"waited 0.2 s for the reply to status"):
            connection.request(Status(), timeout=0.2)
        assert 0.2 <= time.monotonic() - started < 2
        assert connection.closed
        release.set()


def test_events_do_not_stretch_the_timeout(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A peer that sends events and never the reply is out of time like a silent one."""
    release = threading.Event()

    def script(peer: socket.socket) -> None:
        next_request(peer)
        with contextlib.suppress(OSError):
            while not release.is_set():
                tell(peer, {"event": {"progress": 0.1}})

    with scripted(path, script):
        connection = open_()
        with pytest.raises(TimedOut):
            connection.request(Status(), timeout=0.2)
        release.set()


def test_a_peer_that_never_greets_is_a_timeout(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A listener that accepts nobody keeps a client no longer than its timeout."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        with pytest.raises(TimedOut, match=r"0.1 s for the reply to hello"):
            open_(timeout=0.1)


def test_a_peer_that_does_not_read_is_a_timeout(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A request that finds the socket full for its whole timeout is `TimedOut` as well, and closes."""
    release = threading.Event()

    def script(peer: socket.socket) -> None:
        release.wait(10)

    with scripted(path, script):
        connection = open_()
        connection._sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection._sock.send(b"{}")
        with pytest.raises(TimedOut, match=r"0\.1 s for"):
            connection.request(Status(), timeout=0.1)
        assert connection.closed
        release.set()


def test_a_peer_that_ends_is_a_lost_connection(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """The end before the reply is `ConnectionLost` with what was waited for, and so is every later request."""

    def script(peer: socket.socket) -> None:
        next_request(peer)

    with scripted(path, script):
        connection = open_()
        with pytest.raises(ConnectionLost, match="closed by the other side before the reply to status"):
            connection.request(Status())
        assert connection.closed


def lost_for(connection: Connection) -> None:
    """Returns when the other side has closed; reads nothing."""
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLRDHUP)
    assert poller.poll(10_000)


@pytest.mark.parametrize("events", [0, 3])
def test_last_words_are_better_than_a_broken_pipe(
    path: Path, open_: Open, events: int, descriptors: NoDescriptorLeaks
) -> None:
    """A peer that says why it closes is quoted, even when the request only finds a closed socket, and even when events
    that nobody has read lie before its last words."""

    def script(peer: socket.socket) -> None:
        for _ in range(events):
            tell(peer, {"event": {}})
        tell(peer, {"error": to_wire(ProtocolError(problem="no message in time"))})

    with scripted(path, script):
        connection = open_()
        lost_for(connection)
        with pytest.raises(ProtocolError, match="no message in time"):
            connection.request(Status())
        assert connection.closed


def test_a_broken_pipe_without_words_is_a_lost_connection(
    path: Path, open_: Open, descriptors: NoDescriptorLeaks
) -> None:
    """A peer that closed in silence is `ConnectionLost`."""
    with scripted(path, lambda peer: None):
        connection = open_()
        lost_for(connection)
        with pytest.raises(ConnectionLost, match="send failed: Broken pipe"):
            connection.request(Status())
        assert connection.closed


def test_last_words_survive_a_crossing_request(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A peer that closes while a request is on its way to it is quoted too, although the kernel reports a reset."""

    def script(peer: socket.socket) -> None:
        assert select.select([peer], [], [], 10)[0]  # the request is here and stays unread
        tell(peer, {"error": to_wire(ProtocolError(problem="no message in time"))})

    with scripted(path, script), open_() as connection, pytest.raises(ProtocolError, match="no message in time"):
        connection.request(Status())


def test_an_idle_client_is_told_why(
    path: Path, open_: Open, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """Against the real server: a client that was silent for too long learns it from its next request."""
    monkeypatch.setitem(protocol._LIMITS, State.OPEN, 0.1)
    with serving(path), open_() as connection:
        lost_for(connection)
        with pytest.raises(ProtocolError, match="no message in time"):
            connection.request(Status())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"garbage", "not JSON"),
        (b"[]", "a JSON list"),
        (b"{}", "neither ok, error nor event"),
        (b'{"ok":[]}', "neither ok, error nor event"),
        (b'{"in":"memfd"}', "large message without its memfd"),
        (b"x" * (70 << 10), "more than 65536 bytes"),
    ],
)
def test_a_lying_peer_is_left(path: Path, open_: Open, data: bytes, words: str, descriptors: NoDescriptorLeaks) -> None:
    """A reply that is none raises `ProtocolError` and closes the connection: what else is in it cannot be trusted."""

    def script(peer: socket.socket) -> None:
        next_request(peer)
        peer.send(data)
        assert framing.receive(peer) is None

    with scripted(path, script), open_() as connection:
        with pytest.raises(ProtocolError, match=words):
            connection.request(Status())
        assert connection.closed


def test_a_lying_last_word_is_a_lost_connection(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """Garbage in front of the end does not hide that the connection is lost."""
    with scripted(path, lambda peer: peer.send(b"{}") and None):
        connection = open_()
        lost_for(connection)
        with pytest.raises(ConnectionLost, match="Broken pipe"):
            connection.request(Status())
        assert connection.closed


def test_descriptors_go_both_ways(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A request's descriptors stay the caller's; a reply's are the caller's to close. Those of events are closed."""

    def handle(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        if isinstance(request, Reserve):
            connection.reserved()
            return {}
        connection.event({"something": "else"})
        content = [os.pread(fd.fileno(), 100, 0).decode() for fd in fds]
        connection.reply({"content": content}, list(fds)[:1])
        return None

    with serving(path, handle), open_() as connection, OwnedFd(os.memfd_create("test")) as fd:
        os.pwrite(fd.fileno(), b"hello", 0)
        connection.request(Reserve(model="m", nbytes=1))
        reply, fds = connection.request(Publish(), [fd.fileno(), fd.fileno()])
        with fds:
            assert reply == {"content": ["hello", "hello"]}
            assert [os.pread(item.fileno(), 100, 0) for item in fds] == [b"hello"]
        connection.ask(Reserve(model="m", nbytes=1))
        assert connection.ask(Publish(), [fd.fileno()]) == {"content": ["hello"]}, "and what came with it is closed"


def test_a_large_reply_arrives(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A status of 500 KB, which no single message could carry, comes back whole, twenty times in a row."""
    status = {"shards": [{"model": f"model-{number}", "padding": "x" * 480} for number in range(1000)]}

    def handle(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        return status

    with serving(path, handle), open_() as connection:
        for _ in range(20):
            reply, fds = connection.request(Status())
            fds.close()
            assert reply == status


def test_a_request_that_is_too_large_is_refused_here(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """A server takes no request by memfd; the client hears of it as a `ProtocolError`."""
    with serving(path), open_() as connection, pytest.raises(ProtocolError):
        connection.request(Attach(model="m" * (70 << 10)))


def test_events_of_a_subscription(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """Events come in order, by `next_event` alone; its timeout is its own, and None waits without end."""
    subscribed: list[ServerConnection] = []

    def handle(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        connection.hold()
        subscribed.append(connection)
        return {}

    with serving(path, handle) as running, open_() as connection:
        connection.request(Subscribe())
        for number in range(2):
            running.call(subscribed[0].event, {"n": number})
        assert [connection.next_event(0.2) for _ in range(2)] == [{"n": 0}, {"n": 1}]
        # The short timeout of the events before must not be the one of the endless wait.
        later = threading.Timer(0.4, running.call, (subscribed[0].event, {"n": 2}))
        later.start()
        assert connection.next_event(None) == {"n": 2}
        later.join()
        with pytest.raises(TimedOut, match=r"0.1 s for an event"):
            connection.next_event(0.1)
        assert connection.closed


def test_a_subscription_ends_with_an_error_or_the_end(path: Path, open_: Open, descriptors: NoDescriptorLeaks) -> None:
    """An error in place of an event is raised; the end is `ConnectionLost`."""

    def script(peer: socket.socket) -> None:
        tell(peer, {"error": to_wire(ProtocolError(problem="too slow"))})

    with scripted(path, script), open_() as connection:
        with pytest.raises(ProtocolError, match="too slow"):
            connection.next_event(5.0)
        with pytest.raises(ConnectionLost, match="before an event"):
            connection.next_event(5.0)
