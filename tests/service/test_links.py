"""The datagrams between nodes on real sockets: what reaches whom, and addresses that cannot be."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.service.nodes import free_port
from weightcached.config_cluster import ClusterConfig
from weightcached.errors import ConnectionFailed
from weightcached.service.links import Link, Step, open_link
from weightcached.service.membership import Beat


class End:
    """One node's end, and what it says."""

    def __init__(self, link: Link, wake: asyncio.Event, beats: list[Beat]) -> None:
        self.link = link
        self._wake = wake
        self._beats = beats

    @property
    def port(self) -> int:
        """The one that its datagrams come from."""
        assert self.link._transport is not None
        return int(self.link._transport.get_extra_info("sockname")[1])

    def say(self, **fields: object) -> None:
        self._beats[0] = replace(self._beats[0], **fields)  # type: ignore[arg-type]

    async def until(self, holds: Callable[[Step], bool]) -> Step:
        """Steps as things are heard, until it holds."""
        async with asyncio.timeout(20):
            while not holds(step := self.link.step(asyncio.get_running_loop().time())):
                self._wake.clear()
                try:
                    async with asyncio.timeout(self.link.due_in(asyncio.get_running_loop().time())):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            return step


def config(node: int, port: int, address: str = "127.0.0.1", nodes: int = 2, keep_alive: float = 0.1) -> ClusterConfig:
    return ClusterConfig(nodes=nodes, node_rank=node, master_addr=address, master_port=port, keep_alive=keep_alive)


@asynccontextmanager
async def end(
    node: int, port: int, nodes: int = 2, boot: str = "", address: str = "127.0.0.1", keep_alive: float = 0.1
) -> AsyncIterator[End]:
    wake = asyncio.Event()
    beats = [Beat(node, nodes, boot or f"boot{node}", "loaded", "d")]
    link = await open_link(config(node, port, address, nodes, keep_alive), lambda: beats[0], wake.set)
    try:
        yield End(link, wake, beats)
    finally:
        link.close()


async def both(first: End, second: End, holds: Callable[[Step], bool]) -> tuple[Step, Step]:
    """Both step until it holds for both."""
    found: dict[int, Step] = {}

    def noted(number: int) -> Callable[[Step], bool]:
        def note(step: Step) -> bool:
            if holds(step):
                found[number] = step
            return len(found) == 2

        return note

    await asyncio.gather(first.until(noted(0)), second.until(noted(1)))
    return found[0], found[1]


def test_nodes_hear_of_one_another() -> None:
    """Both know both, and have the same round."""

    async def meet() -> None:
        port = free_port()
        async with end(0, port) as first, end(1, port) as second:
            steps = await both(first, second, lambda step: step.round != "")
            assert steps[0].round == steps[1].round == "boot0/1"
            assert [item.state for item in steps[1].nodes] == ["loaded", "loaded"]
            assert steps[0].nodes[1].address == "127.0.0.1"

    asyncio.run(meet())


def test_nodes_hear_of_one_another_by_ipv6() -> None:
    """With the address in brackets, as it is written before a port."""

    async def meet() -> None:
        port = free_port("::1")
        async with end(0, port, address="[::1]") as first, end(1, port, address="::1") as second:
            steps = await both(first, second, lambda step: step.round != "")
            assert steps[0].nodes[1].address == "::1"
            with pytest.raises(ConnectionFailed, match=rf"\[::1\]:{port}: is in use by another program"):
                async with end(0, port, address="[::1]"):
                    pass

    asyncio.run(meet())


def test_who_comes_first_waits() -> None:
    """A node whose node 0 is not there yet knows nobody, fails at nothing, and is heard later."""

    async def meet() -> None:
        port = free_port()
        async with end(1, port) as second:
            for _ in range(3):
                assert second.link.step(0.0).nodes[0].state == "unknown"
            async with end(0, port) as first:
                await both(first, second, lambda step: step.round != "")
            gone = await second.until(lambda step: step.nodes[0].state == "gone")
            assert gone.round == "boot0/1"  # and no other one until node 0 is back

    asyncio.run(meet())


def test_who_leaves_says_why() -> None:
    """In either direction, at once."""

    async def meet() -> None:
        port = free_port()
        async with end(0, port) as first, end(1, port) as second:
            await both(first, second, lambda step: step.round != "")
            second.say(state="leaving", problem="it was stopped")
            second.link.say()
            step = await first.until(lambda step: step.nodes[1].state == "gone")
            assert step.nodes[1].problem == "it was stopped"
            first.say(state="leaving", problem="it failed: x")
            first.link.say()
            step = await second.until(lambda step: step.nodes[0].problem is not None)
            assert step.nodes[0].state == "gone"

    asyncio.run(meet())


def test_who_starts_anew_was_gone() -> None:
    """However fast it is back: both hear of it, once, and that it is there."""

    async def meet() -> None:
        port = free_port()
        async with end(0, port) as first:
            async with end(1, port) as second:
                await both(first, second, lambda step: step.round != "")
            async with end(1, port, boot="another") as second:
                step, _ = await asyncio.gather(
                    first.until(lambda step: step.nodes[1].problem == "it has started anew"),
                    second.until(lambda step: step.nodes[0].state == "loaded"),
                )
                assert step.nodes[1].state == "gone"
                await both(first, second, lambda step: step.nodes[1].state == "loaded")

    asyncio.run(meet())


def test_who_was_there_first_keeps_its_number() -> None:
    """A second service says that it is node 1: the first one has its place back after a moment, which is no restart of
    it, and all agree anew. The second one is refused with where both are and what to do, and counts when the first one
    has ended."""
    told: list[str] = []  # by node 0 of node 1, each thing once

    def note(step: Step) -> bool:
        if step.nodes[1].problem not in (None, *told[-1:]):
            told.append(step.nodes[1].problem)
        return False

    async def meet() -> None:
        port, slow = free_port(), 0.3  # so that nobody is gone who has no processor for a moment
        async with (
            end(0, port, keep_alive=slow) as first,
            end(1, port, keep_alive=slow) as one,
            end(1, port, boot="rival", keep_alive=slow) as two,
        ):
            await both(first, one, lambda step: step.round == "boot0/1")
            going_on = asyncio.create_task(one.until(lambda step: False))
            try:
                steps = await both(first, two, lambda step: note(step) or step.refusal is not None)
            finally:
                going_on.cancel()
            refusal = steps[0].refusal or ""
            assert steps[1].refusal == f"node 0 refuses this one: {refusal}"
            pattern = r"two services say that they are node 1: the one at 127\.0\.0\.1:(\d+) counts, the one at "
            pattern += r"127\.0\.0\.1:(\d+) does not; stop one of them, or correct its node_rank"
            assert (found := re.fullmatch(pattern, refusal)) is not None
            assert [int(item) for item in found.groups()] == [one.port, two.port]
            assert told == ["it has started anew", "another service has said that it is this node"]
            steps = await both(first, one, lambda step: step.round != "" and step.nodes[1].state == "loaded")
            assert steps[0].round == steps[1].round != "boot0/1"
            one.link.close()
            agreed = steps[0].round
            steps = await both(first, two, lambda step: step.round not in ("", "boot0/1", "boot0/2", agreed))
            assert steps[0].round == steps[1].round

    asyncio.run(meet())


def test_another_number_of_nodes_is_told_to_both() -> None:
    """Node 0 refuses it, and either one says so."""

    async def meet() -> None:
        port = free_port()
        async with end(0, port) as first, end(1, port, nodes=3) as second:
            steps = await both(first, second, lambda step: step.refusal is not None)
            assert steps[0].refusal == "nodes = 3 in the config of node 1, 2 in that of node 0"
            assert steps[1].refusal == f"node 0 refuses this one: {steps[0].refusal}"

    asyncio.run(meet())


def test_names_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not found, and one that is loopback on node 0, where no other node could reach it."""

    async def opened(address: str) -> None:
        await open_link(config(0, free_port(), address), lambda: Beat(0, 2, "b", "loaded", "d"), lambda: None)

    with pytest.raises(ConnectionFailed, match=r"no-such-host.invalid:\d+: master_addr is not to be found"):
        asyncio.run(opened("no-such-host.invalid"))
    answer = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(ConnectionFailed, match=r"node-a: is 127.0.1.1 on this node, where no other node reaches it"):
        asyncio.run(opened("node-a"))


def test_a_network_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel refuses, as under a unit that allows no internet sockets, is said with what to do."""

    def refused(*_: object) -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    async def opened() -> None:
        monkeypatch.setattr(socket, "socket", refused)
        await open_link(config(1, 29650), lambda: Beat(1, 2, "b", "loaded", "d"), lambda: None)

    with pytest.raises(ConnectionFailed, match="needs internet sockets, which the unit forbids; see network"):
        asyncio.run(opened())
