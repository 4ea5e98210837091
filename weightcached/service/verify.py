"""Verifying what is cached: a `verifier` process for each shard, given its descriptors from the vault."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import Any

from ..errors import DeviceError, ProtocolError, WeightCacheError, from_wire, to_wire
from ..fds import FdSet
from ..text import describe_exit
from ..wire.framing import decode
from ..wire.stream import Stream
from .vault import HeldShard
from .workers import spawn_role

END_SECONDS = 5.0
MAX_NAMES = 10  # of tensors in a line of the log
_log = logging.getLogger(__name__)


class Verifications:
    """Runs verifiers: those of one request at once, one request after the other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._processes: set[VerifierProcess] = set()

    async def verify(self, shards: list[HeldShard]) -> list[dict[str, Any]]:
        """One result for each shard: device and generation with what `verifier.verify` found, or with an "error".

        A shard may be dropped meanwhile: its verifier has descriptors of its own. Cancelled, it ends the verifiers.
        """
        processes: list[VerifierProcess] = []
        try:
            for shard in shards:  # before anything is awaited, while all of them are there
                processes.append(VerifierProcess(shard))
                self._processes.add(processes[-1])
            async with self._lock:
                return list(await asyncio.gather(*(process.run() for process in processes)))
        except OSError as error:
            raise DeviceError(device=shards[0].device, problem=f"no channel to a verifier: {error.strerror}") from error
        finally:
            for process in processes:
                await process.end()
                self._processes.discard(process)

    async def stop(self) -> None:
        """Ends every verifier and waits until it is gone."""
        for process in list(self._processes):
            await process.end()


class VerifierProcess:
    """One verifier from its job to its exit; see `verifier` for what it says."""

    def __init__(self, shard: HeldShard) -> None:
        """Puts the job and the shard's descriptors on the channel, where they wait for the process."""
        self._shard = shard
        self._process: asyncio.subprocess.Process | None = None
        self._channel_ended = asyncio.Event()
        self._answer: dict[str, Any] | None = None
        self._error: WeightCacheError | None = None
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = Stream(ours, self, trusted=True)
        job = {"model": shard.model, "device": shard.device, "generation": shard.generation}
        self._channel.send({"job": job}, [item.fileno() for item in shard.descriptors])

    async def run(self) -> dict[str, Any]:
        """The result; a process that cannot be started, or ends without an answer, is an error in it."""
        shard = self._shard
        try:
            with self._theirs:
                arguments = ["verifier", shard.device, shard.model]
                self._process = await spawn_role(arguments, {"--channel-fd": self._theirs.fileno()})
            code = await self._process.wait()
            await self._channel_ended.wait()  # what it said last is read before its exit is judged
            end = f"ended by {describe_exit(code)} before it answered"
        except OSError as error:  # no descriptor or no process to be had: what is cached must outlive that
            end = f"cannot be started: {error.strerror}"
        name = {"device": shard.device, "generation": shard.generation}
        if self._error is None and self._answer is not None:
            self._log(self._answer)
            return {**name, **self._answer}
        failure = self._error or DeviceError(device=shard.device, problem=f"the verifier of {shard.model} {end}")
        _log.warning("%s on %s is not verified: %s", shard.model, shard.device, failure)
        return {**name, "error": to_wire(failure)}

    async def end(self) -> None:
        """Ends it with SIGKILL, since all it holds are descriptors and a CUDA context, and waits until it is gone.

        Not for ever: a process that hangs inside a driver cannot be killed (state D).
        """
        self._kill()
        self._theirs.close()
        self._channel.close("the verifier has ended")
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), END_SECONDS)
            except TimeoutError:
                _log.error("verifier pid=%d hangs and cannot be killed; is its device there?", self._process.pid)

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            message = decode(data)
        match message:
            case {"verified": {"tensors": int(), "bytes": int(), "differ": list(), "seconds": float()} as answer}:
                self._answer = answer
            case {"failed": {"error": dict(error)}}:
                self._error = from_wire(error)
            case _:
                self.message_broken(ProtocolError(problem=f"the verifier sent {sorted(message)}"))

    def message_broken(self, error: ProtocolError) -> None:
        self._error = error
        self._kill()

    def stream_closed(self, reason: str) -> None:
        self._channel_ended.set()

    def _log(self, answer: dict[str, Any]) -> None:
        name = f"{self._shard.model} on {self._shard.device}, generation {self._shard.generation}"
        if answer["differ"]:
            count = f"{len(answer['differ'])} of {answer['tensors']} tensors"
            _log.error("%s: %s are not what was published: %s", name, count, ", ".join(answer["differ"][:MAX_NAMES]))
        else:
            _log.info("%s: %d bytes verified in %.2f s", name, answer["bytes"], answer["seconds"])

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
