"""One rendezvous with the other nodes, by a `rendezvous` process of its own: torch never enters the service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..errors import ProtocolError, WeightCacheError, from_wire
from ..fds import FdSet
from ..meeting import Job
from ..text import describe_exit
from ..wire.framing import decode
from ..wire.stream import Stream
from .workers import gone, kill, spawn_role

GRACE_SECONDS = 30.0  # beyond the job's own, for a process to start and to end


class Round:
    """The process of one rendezvous, from start to exit."""

    def __init__(self) -> None:
        self._answered = asyncio.Event()
        self._ended = asyncio.Event()
        self._answer: dict[str, Any] | None = None
        self._broken: ProtocolError | None = None

    async def run(self, job: Job, met: Callable[[list[str]], None]) -> None:
        """Calls `met` with the descriptions of all nodes, in their order, and returns when the process has ended too.

        Cancelled, it ends the process and waits for that. Raises what the process reports (`rendezvous.meet`), and
        `ProtocolError` when it ends without a word; `OSError` without a descriptor or a process to be had.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = Stream(ours, self, trusted=True)
        process = None
        try:
            with theirs:
                arguments = ["rendezvous", job.address, f"{job.node}/{job.nodes}"]
                process = await spawn_role(arguments, {"--channel-fd": theirs.fileno()})
            channel.send({"job": asdict(job)})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(job.seconds + GRACE_SECONDS):
                    await self._answered.wait()
            if self._answer is not None and "met" in self._answer:
                try:
                    met([str(item) for item in self._answer["met"]["descriptions"]])
                finally:  # also if `met` fails: on node 0 the process ends when the others have read
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(GRACE_SECONDS):
                            await self._ended.wait()
            if self._ended.is_set():
                await gone(process, "rendezvous")
        finally:
            if process is not None:
                kill(process)
                await gone(process, "rendezvous")
            channel.close("the rendezvous has ended")
        match self._answer:
            case {"met": _}:
                return
            case {"failed": {"error": dict(error)}}:
                raise from_wire(error)
        code = process.returncode
        end = "hangs" if code is None else f"ended by {describe_exit(code)}"
        raise self._broken or ProtocolError(problem=f"the rendezvous process {end} before it answered")

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            try:
                self._answer = decode(data)
                self._answered.set()
            except WeightCacheError as error:
                self.message_broken(ProtocolError(problem=str(error)))

    def message_broken(self, error: ProtocolError) -> None:
        self._broken = error
        self._answered.set()

    def stream_closed(self, reason: str) -> None:
        self._answered.set()
        self._ended.set()
