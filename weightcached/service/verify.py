"""Verifying what is cached by `verifier` processes: a shard's bytes on request, GPU slabs that are adopted."""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
from collections.abc import Sequence
from typing import Any

from ..errors import DeviceError, ProtocolError, WeightCacheError, from_wire, to_wire
from ..fds import FdSet, OwnedFd
from ..text import describe_exit
from ..wire.framing import decode
from ..wire.stream import Stream
from .vault import HeldShard
from .workers import gone, kill, spawn_role

INSPECT_SECONDS = 30.0  # for a driver to initialise and to import all slabs of a device, which takes milliseconds each
MAX_NAMES = 10  # of tensors in a line of the log
_log = logging.getLogger(__name__)


class Verifications:
    """Runs verifiers: one after the other on each device, where each has a CUDA context; devices at once."""

    def __init__(self) -> None:
        self._turns: collections.defaultdict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
        self._processes: set[VerifierProcess] = set()

    async def verify(self, shards: list[HeldShard]) -> list[dict[str, Any]]:
        """One result for each shard: device and generation with what `verifier.verify` found, or with an "error".

        A shard may be dropped meanwhile: its verifier has descriptors of its own. Cancelled, it ends the verifiers.
        """
        processes: list[VerifierProcess] = []
        try:
            for shard in shards:  # before anything is awaited, while all of them are there
                job = {"model": shard.model, "device": shard.device, "generation": shard.generation}
                processes.append(VerifierProcess(shard.device, shard.model, [({"job": job}, shard.descriptors)]))
                self._processes.add(processes[-1])
            return list(await asyncio.gather(*map(self._verify_in_turn, shards, processes)))
        except OSError as error:
            raise DeviceError(device=shards[0].device, problem=f"no channel to a verifier: {error.strerror}") from error
        finally:
            await _end_all(processes)
            self._processes.difference_update(processes)

    def abandon(self, device: str) -> None:
        """Gives up the verifiers of a device that is lost: they may hang with it, and keep it from being reset."""
        for process in self._processes:
            if process.device == device:
                process.give_up()

    async def stop(self) -> None:
        """Ends every verifier and waits until it is gone."""
        await _end_all(list(self._processes))

    async def _verify_in_turn(self, shard: HeldShard, process: VerifierProcess) -> dict[str, Any]:
        async with self._turns[shard.device]:
            return await _verify(shard, process)


async def inspect(device: str, shards: Sequence[tuple[str, list[OwnedFd]]]) -> list[WeightCacheError | None]:
    """What a short-lived process finds wrong with the slabs of each shard on a GPU, or None.

    A shard is its model's name and its descriptors, which stay the caller's. `DeviceError` where nothing can be found
    out: no process, no driver, no answer.
    """
    process = None
    try:
        last = len(shards) - 1
        messages = [
            ({"inspect": {"model": model, "device": device, "more": number < last}}, descriptors)
            for number, (model, descriptors) in enumerate(shards)
        ]
        process = VerifierProcess(device, "adopted", messages)
        async with asyncio.timeout(INSPECT_SECONDS):
            answer = await process.run()
    except TimeoutError:
        raise DeviceError(device=device, problem=f"no answer of its driver for {INSPECT_SECONDS:.0f} s") from None
    except OSError as error:
        raise DeviceError(device=device, problem=f"no channel to a verifier: {error.strerror}") from error
    finally:
        if process is not None:
            await process.end()
    match answer:
        case {"inspected": list(problems)} if len(problems) == len(shards):
            return [from_wire(problem) if problem is not None else None for problem in problems]
    raise DeviceError(device=device, problem=f"its verifier sent {sorted(answer)}")


async def _end_all(processes: list[VerifierProcess]) -> None:
    for process in processes:
        process.give_up()
    await asyncio.gather(*(process.end() for process in processes))


async def _verify(shard: HeldShard, process: VerifierProcess) -> dict[str, Any]:
    """A result of `Verifications.verify`, which is logged."""
    name = {"device": shard.device, "generation": shard.generation}
    try:
        answer = await process.run()
        match answer:
            case {"verified": {"tensors": int(), "bytes": int(), "differ": list(), "seconds": float()} as found}:
                _log_result(shard, found)
                return {**name, **found}
        raise ProtocolError(problem=f"the verifier sent {sorted(answer)}")
    except WeightCacheError as failure:
        _log.warning("%s on %s is not verified: %s", shard.model, shard.device, failure)
        return {**name, "error": to_wire(failure)}


def _log_result(shard: HeldShard, found: dict[str, Any]) -> None:
    name = f"{shard.model} on {shard.device}, generation {shard.generation}"
    if found["differ"]:
        count = f"{len(found['differ'])} of {found['tensors']} tensors"
        _log.error("%s: %s are not what was published: %s", name, count, ", ".join(found["differ"][:MAX_NAMES]))
    else:
        _log.info("%s: %d bytes verified in %.2f s", name, found["bytes"], found["seconds"])


class VerifierProcess:
    """One verifier from its job to its exit; see `verifier` for what it says."""

    def __init__(self, device: str, model: str, messages: Sequence[tuple[dict[str, Any], list[OwnedFd]]]) -> None:
        """Puts the messages of its job and their descriptors on the channel, where they wait for the process.

        `model` is what a process list shows. The descriptors stay the caller's. `OSError` without a channel.
        """
        self.device = device
        self._model = model
        self._process: asyncio.subprocess.Process | None = None
        self._channel_ended = asyncio.Event()
        self._why_closed = ""
        self._answer: dict[str, Any] | None = None
        self._error: WeightCacheError | None = None
        ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = Stream(ours, self, trusted=True)
        for message, descriptors in messages:
            self._channel.send(message, [item.fileno() for item in descriptors])

    async def run(self) -> dict[str, Any]:
        """Its answer. `DeviceError` for a process that cannot be started, ends without one or is given up, or its own
        error."""
        try:
            if self._channel.closed:
                end = f"is not started: {self._why_closed}"
            else:
                with self._theirs:
                    arguments = ["verifier", self.device, self._model]
                    self._process = await spawn_role(arguments, {"--channel-fd": self._theirs.fileno()})
                if self._channel.closed:  # while it was being started
                    self._kill()
                await self._channel_ended.wait()  # all that it said is read, or it is given up
                await gone(self._process, "verifier")
                code = self._process.returncode
                end = "hangs" if code is None else f"ended by {describe_exit(code)} before it answered"
        except OSError as error:  # no descriptor or no process to be had: what is cached must outlive that
            end = f"cannot be started: {error.strerror}"
        if self._error is not None:
            raise self._error
        if self._answer is None:
            raise DeviceError(device=self.device, problem=f"the verifier of {self._model} {end}")
        return self._answer

    def give_up(self) -> None:
        """Kills it, since all it holds are descriptors and a CUDA context; `run` returns soon."""
        self._kill()
        self._channel.close("given up")

    async def end(self) -> None:
        """Ends it, and waits until it is gone or hangs."""
        self.give_up()
        self._theirs.close()
        if self._process is not None:
            await gone(self._process, "verifier")

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            message = decode(data)
        match message:
            case {"verified": dict()} | {"inspected": list()}:
                self._answer = message
            case {"failed": {"error": dict(error)}}:
                self._error = from_wire(error)
            case _:
                self.message_broken(ProtocolError(problem=f"the verifier sent {sorted(message)}"))

    def message_broken(self, error: ProtocolError) -> None:
        self._error = error
        self._kill()

    def stream_closed(self, reason: str) -> None:
        self._why_closed = reason
        self._channel_ended.set()

    def _kill(self) -> None:
        if self._process is not None:
            kill(self._process)
