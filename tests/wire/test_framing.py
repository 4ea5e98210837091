"""framing: one message and its descriptors over a real SEQPACKET socket, and everything that may be wrong with it."""

from __future__ import annotations

import array
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import ProtocolError
from weightcached.fds import OwnedFd
from weightcached.memfd import SEALS
from weightcached.wire import framing

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair(descriptors: NoDescriptorLeaks) -> Iterator[Pair]:
    """Two connected sockets, closed before the descriptors are counted."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.settimeout(5)
    right.settimeout(5)
    with left, right:
        yield left, right


def send(sock: socket.socket, message: dict[str, object], fds: list[int] | None = None) -> None:
    """One message by the code under test."""
    frame = framing.Frame(message, fds or [])
    try:
        frame.send(sock)
    finally:
        frame.close()


def send_raw(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    """A message as a peer sends it that does not keep the rules."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def memfd(data: bytes, seals: int = SEALS) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.pwrite(fd.fileno(), data, 0)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def message_of(nbytes: int) -> dict[str, object]:
    """A message whose JSON is exactly that long."""
    return {"x": "a" * (nbytes - len('{"x":""}'))}


@pytest.mark.parametrize("count", [0, 1, 253])
def test_descriptors_arrive_in_order_and_close_on_exec(pair: Pair, count: int) -> None:
    """A message arrives with all its descriptors, in order, each close-on-exec and owned by the receiver."""
    sent = [memfd(b"%d" % number) for number in range(count)]
    send(pair[0], {"op": "x"}, [fd.fileno() for fd in sent])
    for fd in sent:
        fd.close()

    received = framing.receive(pair[1])

    assert received is not None
    data, fds = received
    with fds:
        assert framing.decode(data) == {"op": "x"}
        assert [os.pread(fd.fileno(), 9, 0) for fd in fds] == [b"%d" % number for number in range(count)]
        assert all(fcntl.fcntl(fd.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)


def test_more_descriptors_than_the_kernel_passes_are_refused(pair: Pair) -> None:
    """254 descriptors are a `ProtocolError` with both numbers, before anything is sent."""
    with pytest.raises(ProtocolError, match="254 descriptors in one message, at most 253"):
        framing.Frame({}, [pair[0].fileno()] * 254)
    with pytest.raises(ProtocolError, match="254"):  # the memfd of a large message counts, and is closed again
        framing.Frame(message_of(framing.MAX_MESSAGE + 1), [pair[0].fileno()] * 253)


def test_a_message_of_64_kib_is_sent_as_it_is(pair: Pair) -> None:
    """Exactly MAX_MESSAGE bytes still travel in the socket."""
    send(pair[0], message_of(framing.MAX_MESSAGE))

    received = framing.receive(pair[1])

    assert received is not None
    data, fds = received
    assert len(data) == 64 << 10
    assert len(fds) == 0


def test_a_larger_message_travels_as_a_memfd(pair: Pair) -> None:
    """One byte more goes by memfd, in front of the message's own descriptors, and is read back whole."""
    message = message_of((64 << 10) + 1)
    with memfd(b"mine") as own:
        send(pair[0], message, [own.fileno()])

    received = framing.receive(pair[1], large=True)

    assert received is not None
    data, fds = received
    with fds:
        assert framing.decode(data) == message
        assert [os.pread(fd.fileno(), 9, 0) for fd in fds] == [b"mine"]


def test_a_large_message_is_not_read_unless_asked_for(pair: Pair) -> None:
    """Without `large` the receiver sees only the stand-in and reads no memfd: a server takes no large request."""
    send(pair[0], message_of(1 << 20))

    received = framing.receive(pair[1])

    assert received is not None
    data, fds = received
    with fds:
        assert framing.decode(data) == {"in": "memfd"}
        assert len(fds) == 1


@pytest.mark.parametrize(
    ("seals", "problem"), [(0, "is not sealed"), (fcntl.F_SEAL_WRITE, "is not sealed"), (None, "is not a memfd")]
)
def test_a_large_message_that_could_change_is_refused(pair: Pair, seals: int | None, problem: str) -> None:
    """The memfd of a large message must be sealed: its sender could change it while it is read."""
    with OwnedFd(os.open(os.devnull, os.O_RDONLY)) if seals is None else memfd(b"{}", seals) as fd:
        send_raw(pair[0], b'{"in":"memfd"}', [fd.fileno(), fd.fileno()])

    with pytest.raises(ProtocolError, match=problem):
        framing.receive(pair[1], large=True)


def test_a_large_message_without_its_memfd_is_refused(pair: Pair) -> None:
    """The stand-in alone is a broken message."""
    pair[0].send(b'{"in":"memfd"}')
    with pytest.raises(ProtocolError, match="without its memfd"):
        framing.receive(pair[1], large=True)


def test_a_large_message_has_a_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end sends or reads more than MAX_LARGE_MESSAGE, however little memory a sparse memfd costs its sender."""
    assert framing.MAX_LARGE_MESSAGE == 64 << 20
    monkeypatch.setattr(framing, "MAX_LARGE_MESSAGE", 1 << 20)
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    with fd:
        os.ftruncate(fd.fileno(), framing.MAX_LARGE_MESSAGE + 1)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS)
        send_raw(pair[0], b'{"in":"memfd"}', [fd.fileno()])
    with pytest.raises(ProtocolError, match=f"{framing.MAX_LARGE_MESSAGE + 1} bytes"):
        framing.receive(pair[1], large=True)
    with pytest.raises(ProtocolError, match="at most"):
        framing.Frame(message_of(framing.MAX_LARGE_MESSAGE + 1))


def test_an_oversized_message_is_refused_with_its_descriptors_closed(pair: Pair) -> None:
    """A message that the kernel had to cut (MSG_TRUNC) is a `ProtocolError`; what came with it is closed."""
    with memfd(b"") as fd:
        send_raw(pair[0], b"x" * (framing.MAX_MESSAGE + 1), [fd.fileno()] * 5)

    with pytest.raises(ProtocolError, match="more than 65536 bytes"):
        framing.receive(pair[1])

    send(pair[0], {"next": 1})
    received = framing.receive(pair[1])  # the rest of the broken message is not taken for a message of its own
    assert received is not None
    assert framing.decode(received[0]) == {"next": 1}


def test_a_message_that_carries_credentials_too_is_taken(pair: Pair) -> None:
    """Other control messages than descriptors are ignored, as long as they fit."""
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    send(pair[0], {"op": "x"})

    received = framing.receive(pair[1])

    assert received is not None
    assert len(received[1]) == 0


LIMITED = """
import os, resource, socket, sys
from tests.leaks import NoDescriptorLeaks
from weightcached.errors import ProtocolError
from weightcached.wire import framing
sock = socket.socket(fileno=int(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
with NoDescriptorLeaks():
    try:
        framing.receive(sock)
    except ProtocolError as error:
        print(error)
print(framing.receive(sock)[0])
sock.detach()
"""


def test_descriptors_that_find_no_room_are_an_error_and_no_leak(pair: Pair) -> None:
    """At the open files limit the kernel drops descriptors (MSG_CTRUNC): an error, and those that came are closed."""
    with memfd(b"") as fd:
        send_raw(pair[0], b"{}", [fd.fileno()] * 40)
    send(pair[0], {"next": 1})

    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(pair[1].fileno()), "20"],
        pass_fds=[pair[1].fileno()], capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert "descriptors did not all arrive; raise the open files limit" in child.stdout
    assert child.stdout.splitlines()[1] == "b'{\"next\":1}'"


def test_the_end_of_the_stream_is_none(pair: Pair) -> None:
    """A closed peer is None, not an empty message."""
    pair[0].close()
    assert framing.receive(pair[1]) is None


def test_a_message_without_bytes_is_an_end_too(pair: Pair) -> None:
    """An empty message cannot be told from the end (unix(7)); its descriptors are closed."""
    send_raw(pair[0], b"", [pair[0].fileno()])
    assert framing.receive(pair[1]) is None


def test_last_words_are_read_in_spite_of_a_reset(pair: Pair) -> None:
    """The kernel reports ECONNRESET when a peer closes with unread input; what the peer sent before still comes."""
    pair[1].send(b"unread")
    send(pair[0], {"last": 1})
    send(pair[0], {"last": 2})
    pair[0].close()

    received = [framing.receive(pair[1]) for _ in range(3)]

    assert [item and item[0] for item in received] == [b'{"last":1}', b'{"last":2}', None]


def test_a_full_socket_says_so(pair: Pair) -> None:
    """On a non-blocking socket a full peer is `BlockingIOError`: the caller queues the message."""
    pair[0].setblocking(False)
    frame = framing.Frame({})
    with pytest.raises(BlockingIOError):
        for _ in range(10_000):
            frame.send(pair[0])


def test_a_closed_peer_is_an_error_and_no_signal(pair: Pair) -> None:
    """Sending to a peer that is gone raises EPIPE; the process gets no SIGPIPE."""
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        send(pair[0], {})


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"{", b"{}x", b'{"a":' + b"9" * 5000 + b"}", b"[" * 60_000, b'{"a":' * 12_000 + b"1"],
    ids=["empty", "not text", "half", "trailing", "number of 5000 digits", "deep list", "deep object"],
)
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    """Whatever is no JSON, or more than the parser takes, is a `ProtocolError`."""
    with pytest.raises(ProtocolError, match="not JSON"):
        framing.decode(data)


@pytest.mark.parametrize("value", [[], "text", 1, None, True])
def test_json_that_is_no_object_is_refused(value: object) -> None:
    """A message is an object; the error says what it was."""
    with pytest.raises(ProtocolError, match=f"a JSON {type(value).__name__} where an object was expected"):
        framing.decode(json.dumps(value).encode())


def test_a_large_message_needs_a_free_descriptor(pair: Pair) -> None:
    """At the open files limit making the memfd fails as `OSError`, and nothing is left half made."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(pair[0].fileno(), pair[1].fileno()) + 1, hard))
    taken = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(pair[0].fileno()))
        with pytest.raises(OSError, match="Too many open files"):
            framing.Frame(message_of(1 << 20))
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
