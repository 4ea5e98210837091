"""stream: messages in and out of a non-blocking socket on a real loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import ProtocolError
from weightcached.fds import FdSet, OwnedFd
from weightcached.wire import framing, stream
from weightcached.wire.framing import decode
from weightcached.wire.stream import Stream


class Owner:
    """Writes down what a stream tells; `happened` is set at each."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.descriptors: list[int] = []
        self.broken: list[str] = []
        self.closed: list[str] = []
        self.happened = asyncio.Event()

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            self.messages.append(decode(data))
            self.descriptors.append(len(fds))
        self.happened.set()

    def message_broken(self, error: ProtocolError) -> None:
        self.broken.append(error.problem)
        self.happened.set()

    def stream_closed(self, reason: str) -> None:
        self.closed.append(reason)
        self.happened.set()

    async def until(self, condition: Callable[[Owner], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition(self):
                self.happened.clear()
                await self.happened.wait()


Body = Callable[[Stream, Owner, socket.socket], Coroutine[Any, Any, None]]


def run(body: Body, *, trusted: bool = False) -> None:
    """Runs `body(stream, owner, peer)`; `peer` is the other end, a plain socket with a short timeout."""

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.settimeout(0.2)
        owner = Owner()
        mine = Stream(ours, owner, trusted=trusted)
        with theirs:
            try:
                await body(mine, owner, theirs)
            finally:
                mine.close("the test has ended")

    asyncio.run(main())


def receive(peer: socket.socket) -> dict[str, Any] | None:
    """The next message at the other end, None at its end."""
    received = framing.receive(peer, large=True)
    if received is None:
        return None
    received[1].close()
    return decode(received[0])


async def receive_later(peer: socket.socket) -> dict[str, Any] | None:
    """`receive` off the loop, which sends meanwhile."""
    return await asyncio.to_thread(receive, peer)


def test_messages_go_out_at_once_and_come_in_by_callback(descriptors: NoDescriptorLeaks) -> None:
    """A send needs no turn of the loop if the socket takes it; what comes in reaches the owner with its descriptors."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        mine.send({"n": 1}, [0])
        assert receive(peer) == {"n": 1}
        frame = framing.Frame({"n": 2}, [0, 1])
        frame.send(peer)
        await owner.until(lambda owner: bool(owner.messages))
        assert (owner.messages, owner.descriptors) == ([{"n": 2}], [2])

    run(body)


def test_what_the_socket_does_not_take_is_queued_in_order(descriptors: NoDescriptorLeaks) -> None:
    """Messages that wait for a slow peer keep their order, and hold descriptors of their own meanwhile."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        count = 400
        for number in range(count):
            with OwnedFd(os.dup(0)) as fd:
                mine.send({"n": number}, [fd.fileno()])
        for number in range(count):
            received = await asyncio.to_thread(framing.receive, peer)
            assert received is not None
            data, fds = received
            with fds:
                assert (decode(data), len(fds)) == ({"n": number}, 1)
        assert owner.closed == []

    run(body)


def test_closing_drops_the_queue(descriptors: NoDescriptorLeaks) -> None:
    """A close in mid queue closes every duplicate and every memfd in it, tells the owner once, and later sends do
    nothing."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        for number in range(300):
            mine.send({"n": number}, [0, 1])
        mine.send({"large": "x" * (1 << 20)})
        mine.close("enough")
        mine.close("again")
        mine.close_when_sent("again")
        mine.send({"late": 1})
        assert owner.closed == ["enough"]
        assert mine.closed

    run(body)


def test_a_peer_that_does_not_read_is_cut_off(descriptors: NoDescriptorLeaks) -> None:
    """One message more than MAX_QUEUED in the queue ends the stream."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        sent = 0
        while not mine.closed:
            mine.send({"n": sent})
            sent += 1
            assert sent < 10_000
        assert owner.closed == [f"{stream.MAX_QUEUED} messages were not read"]
        taken = 0
        while receive(peer) is not None:
            taken += 1
        assert sent == taken + stream.MAX_QUEUED + 1

    run(body)


def test_a_peer_that_takes_no_descriptors_is_cut_off(descriptors: NoDescriptorLeaks) -> None:
    """More than MAX_QUEUED_DESCRIPTORS in the queue end the stream, in however few messages, and all are closed."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        sent = 0
        while not mine.closed:
            mine.send({"n": "x" * 20_000}, [0] * 250)
            sent += 1
            assert sent < 100
        assert owner.closed == [f"{stream.MAX_QUEUED_DESCRIPTORS} descriptors were not received"]
        taken = 0
        while receive(peer) is not None:
            taken += 1
        assert sent == taken + stream.MAX_QUEUED_DESCRIPTORS // 250 + 1

    run(body)


def test_what_has_gone_out_counts_no_more(descriptors: NoDescriptorLeaks) -> None:
    """A peer that reads may be sent any number of descriptors."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        for _ in range(20):
            mine.send({"n": 1}, [0] * 253)
            assert await receive_later(peer) == {"n": 1}
        assert not mine.closed

    run(body)


def test_a_paused_stream_reads_later(descriptors: NoDescriptorLeaks) -> None:
    """What comes during a pause waits in the socket, and is read when the pause is over, the end of the peer too."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        mine.pause(0.1)
        peer.send(b'{"n":1}')
        await asyncio.sleep(0.02)
        assert owner.messages == []
        await owner.until(lambda owner: owner.messages == [{"n": 1}])
        assert loop.time() - started >= 0.09
        mine.pause(0.02)
        peer.close()
        await owner.until(lambda owner: owner.closed == ["closed by the peer"])

    run(body)


@pytest.mark.parametrize("how", ["close", "close_when_sent"])
def test_a_pause_does_not_outlive_its_stream(descriptors: NoDescriptorLeaks, how: str) -> None:
    """A stream that is closed, or about to be, is not read again when a pause ends; the socket's number may be
    another's by then."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        while mine.send({"n": "x" * 20_000}) is None and not mine._queue:  # something stays queued
            pass
        mine.pause(0.01)
        getattr(mine, how)("enough")
        with contextlib.suppress(BrokenPipeError):
            peer.send(b"{}")
        await asyncio.sleep(0.03)
        assert owner.messages == []
        mine.close("the end")

    run(body)


def test_a_trusted_peer_is_not_cut_off(descriptors: NoDescriptorLeaks) -> None:
    """On a channel to a child any number of messages waits: a worker with a thousand shards gets them all."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        for number in range(1000):
            mine.send({"n": number}, [0])
        for number in range(1000):
            assert await receive_later(peer) == {"n": number}

    run(body, trusted=True)


@pytest.mark.parametrize("trusted", [False, True])
def test_large_messages_come_from_a_trusted_peer_only(descriptors: NoDescriptorLeaks, trusted: bool) -> None:
    """A message by memfd is read on a channel to a child; elsewhere its stand-in is all that the owner sees."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        large = {"x": "a" * (100 << 10)}
        frame = framing.Frame(large)
        frame.send(peer)
        frame.close()
        await owner.until(lambda owner: bool(owner.messages))
        assert owner.messages == [large if trusted else {"in": "memfd"}]

    run(body, trusted=trusted)


def test_a_broken_message_leaves_the_stream_open(descriptors: NoDescriptorLeaks) -> None:
    """An oversized message is told to the owner, who decides; the next one comes as usual."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        peer.send(b"x" * (framing.MAX_MESSAGE + 1))
        await owner.until(lambda owner: bool(owner.broken))
        peer.send(b"{}")
        await owner.until(lambda owner: bool(owner.messages))
        assert (len(owner.broken), owner.messages, owner.closed) == (1, [{}], [])

    run(body)


def test_last_words_go_out_before_the_end(descriptors: NoDescriptorLeaks) -> None:
    """`close_when_sent` sends what is queued, reads no more, and closes then."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        for number in range(400):
            mine.send({"n": number})
        peer.send(b'{"not":"read"}')
        mine.close_when_sent("bye")
        mine.send({"not": "sent"})
        assert owner.closed == []
        for number in range(400):
            assert await receive_later(peer) == {"n": number}
        assert await receive_later(peer) is None
        await owner.until(lambda owner: bool(owner.closed))
        assert (owner.closed, owner.messages) == (["bye"], [])

    run(body)


def test_last_words_wait_for_a_limited_time(descriptors: NoDescriptorLeaks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not read its last words is closed all the same."""
    monkeypatch.setattr(stream, "LAST_WORDS_SECONDS", 0.1)

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        for number in range(400):
            mine.send({"n": number})
        mine.close_when_sent("bye")
        assert owner.closed == []
        await owner.until(lambda owner: bool(owner.closed))
        assert owner.closed == ["bye"]

    run(body)


@pytest.mark.parametrize("unread", [False, True], ids=["read all", "left unread"])
def test_what_a_peer_sent_before_its_end_is_received(descriptors: NoDescriptorLeaks, unread: bool) -> None:
    """A peer that sends and dies has been heard, also when it left messages unread, which the kernel calls a reset."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        if unread:
            mine.send({"never": "read"})
        for number in range(3):
            framing.Frame({"n": number}).send(peer)
        peer.close()
        await owner.until(lambda owner: bool(owner.closed))
        assert owner.messages == [{"n": number} for number in range(3)]
        assert owner.closed == ["closed by the peer"]

    run(body)


def test_a_peer_that_is_gone_ends_the_stream_at_the_next_send(descriptors: NoDescriptorLeaks) -> None:
    """Sending to a closed peer closes this side, once, without an exception."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        peer.close()
        mine.send({"n": 1}, [0])
        assert owner.closed == ["send failed: Broken pipe"]

    run(body)


def test_without_free_descriptors_a_send_closes_the_stream(descriptors: NoDescriptorLeaks) -> None:
    """At the open files limit a message with descriptors cannot be kept: the peer sees the end and not silence, and
    nothing is left half made."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 2, hard))
        try:
            mine.send({"n": 1}, [0] * 5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert owner.closed == ["send failed: Too many open files"]
        assert receive(peer) is None

    run(body)


def test_too_many_descriptors_are_the_callers_mistake(descriptors: NoDescriptorLeaks) -> None:
    """254 descriptors raise, with every duplicate closed and the stream still usable."""

    async def body(mine: Stream, owner: Owner, peer: socket.socket) -> None:
        with pytest.raises(ProtocolError, match="254 descriptors"):
            mine.send({}, [0] * 254)
        mine.send({"n": 1})
        assert receive(peer) == {"n": 1}

    run(body)
