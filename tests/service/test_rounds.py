"""One rendezvous as the service runs it: what it gets, and what becomes of the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.running import own_children
from tests.service.nodes import free_port
from weightcached.errors import ProtocolError, TimedOut
from weightcached.meeting import Job
from weightcached.service import rounds
from weightcached.service.rounds import Round
from weightcached.service.workers import spawn_role


def job(node: int, port: int, seconds: float = 30.0) -> Job:
    return Job("127.0.0.1", port, node, 2, "r/1", seconds, f"description of {node}")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[int]]:
    """``await started()`` is the pid of the process that a round starts, as soon as there is one."""
    processes: asyncio.Queue[asyncio.subprocess.Process] = asyncio.Queue()

    async def spawn(*arguments: Any) -> asyncio.subprocess.Process:
        process = await spawn_role(*arguments)
        processes.put_nowait(process)
        return process

    async def pid() -> int:
        return (await processes.get()).pid

    monkeypatch.setattr(rounds, "spawn_role", spawn)
    return pid


def test_two_rounds_meet() -> None:
    """Each calls with both descriptions, and ends after its process; node 0 as well if it refuses what it has found,
    since the others may still be reading it."""

    async def meet() -> list[list[str]]:
        port, found = free_port(), list[list[str]]()

        def refuse(descriptions: list[str]) -> None:
            found.append(descriptions)
            raise ProtocolError(problem="not readable")

        first, second = await asyncio.gather(
            Round().run(job(0, port), refuse), Round().run(job(1, port), found.append), return_exceptions=True
        )
        assert isinstance(first, ProtocolError) and second is None
        return found

    assert asyncio.run(meet()) == [["description of 0", "description of 1"]] * 2
    assert own_children("rendezvous") == []


def test_the_error_of_the_process_is_raised() -> None:
    """As it was there."""
    with pytest.raises(TimedOut, match="for node 1 to come"):
        asyncio.run(Round().run(job(0, free_port(), seconds=0.2), print))


def test_cancelled_it_leaves_no_process(started: Callable[[], Awaitable[int]]) -> None:
    """Whatever it is doing."""

    async def cancel() -> None:
        task = asyncio.create_task(Round().run(job(0, free_port()), print))
        await started()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert own_children("rendezvous") == []


def test_a_process_that_is_killed_is_an_error(started: Callable[[], Awaitable[int]]) -> None:
    """With the signal."""

    async def kill() -> None:
        task = asyncio.create_task(Round().run(job(0, free_port()), print))
        os.kill(await started(), signal.SIGKILL)
        await task

    with pytest.raises(ProtocolError, match="the rendezvous process ended by signal SIGKILL before it answered"):
        asyncio.run(kill())
