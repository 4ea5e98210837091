"""The digests of what engines have published, computed in the background by `digester` processes.

An engine records the stat tuples of the files that its own loader read. Once their digest is remembered under those
tuples, a client with the same bytes elsewhere finds what was published (`client.identity`). One process at a time reads
from a file system: more would only take more of the disk, and one that hangs with its disk holds up no other disk's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..checkpoint.remembered import recall
from ..errors import CheckpointError, ProtocolError, WeightCacheError, from_wire
from ..shard.key import STAT_CONTENT
from ..shard.manifest import SourceFile
from ..text import describe_exit
from ..wire.framing import MAX_MESSAGE, Frame, decode
from .vault import DigestOutcome, HeldShard
from .workers import gone, kill, spawn_role

_log = logging.getLogger(__name__)

Files = tuple[SourceFile, ...]
Job = tuple[str, Files]  # a checkpoint, and its files when they were loaded
Told = Callable[[str, str, int, str | None], None]

# How long a process may take: these seconds, and what the bytes take at this rate (bytes/s). Reading at idle priority
# is slow, but a disk that has not answered by then hangs.
PATIENCE_SECONDS = 3600.0
_SLOWEST = 10e6


class Digests:
    """The queue of checkpoints to digest.

    `told(device, model, generation, problem)` is called once for each shard, when the digest of its files is known, or
    given up because of `problem`.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        # In order, each once, since all ranks are loaded from the same; with the shards of each.
        self._queue: dict[Job, list[HeldShard]] = {}
        self._running: set[Job] = set()
        self._wake = asyncio.Event()

    def add(self, shard: HeldShard) -> None:
        """Queues what a shard was loaded from, if its digest is not in its key."""
        head = shard.read_head()
        checkpoint = head.attributes.get("checkpoint")
        if not head.key.content.startswith(STAT_CONTENT):
            return
        if head.files and isinstance(checkpoint, str):
            self._queue.setdefault((checkpoint, head.files), []).append(shard)
            self._wake.set()
        else:
            self._tell(shard, "its publisher has not said which checkpoint it has loaded")

    async def run(self) -> None:
        """Computes until cancelled, which ends the processes."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                for job in [job for job in self._queue if job not in self._running]:
                    if not _file_systems(job) & {disk for other in self._running for disk in _file_systems(other)}:
                        self._running.add(job)
                        tasks.create_task(self._finish(job), name=f"digest {job[0]}")
                await self._wake.wait()

    async def _finish(self, job: Job) -> None:
        """Digests the files of a job, or gives it up, takes it off the queue and tells the outcome."""
        checkpoint, files = job
        problem = None
        try:
            if None in await asyncio.to_thread(recall, files):
                done = await _digest(checkpoint, files)
                _log.info("%s: %d bytes digested in %.1f s", checkpoint, done["bytes"], done["seconds"])
        except (WeightCacheError, OSError) as error:  # no descriptor or no process to be had among the latter
            problem = str(error)
            _log.warning(
                "%s: its digest is given up, what was published of it is found by the very same files only: %s",
                checkpoint,
                problem,
            )
        self._running.discard(job)
        for shard in self._queue.pop(job):
            self._tell(shard, problem)
        self._wake.set()

    def _tell(self, shard: HeldShard, problem: str | None) -> None:
        shard.digest = DigestOutcome(problem)
        self._told(shard.device, shard.model, shard.generation, problem)


def _file_systems(job: Job) -> set[int]:
    """The device numbers of a job's files (stat(2))."""
    return {file.device for file in job[1]}


async def _digest(checkpoint: str, files: Files) -> dict[str, Any]:
    """What a process answers that has the digest remembered: {"bytes", "seconds"}. Cancelled, it ends the process."""
    listed = [{item.name: getattr(file, item.name) for item in fields(file)} for file in files]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        with contextlib.closing(Frame({"job": {"checkpoint": checkpoint, "files": listed}})) as frame:
            frame.send(ours)
        process = await spawn_role(["digest", checkpoint], {"--channel-fd": theirs.fileno()})
        theirs.close()
        patience = PATIENCE_SECONDS + sum(file.size for file in files) / _SLOWEST
        try:
            data = b""
            async with asyncio.timeout(patience):
                with contextlib.suppress(ConnectionResetError):  # ended before it has read its job
                    data = await asyncio.get_running_loop().sock_recv(ours, MAX_MESSAGE)
            await gone(process, "digest")
        except TimeoutError:
            raise CheckpointError(
                file=checkpoint, problem=f"not read within {patience:.0f} s; does its disk hang?"
            ) from None
        finally:
            kill(process)
            await gone(process, "digest")
    if not data:
        code = process.returncode
        end = "hangs" if code is None else f"ended by {describe_exit(code)}"
        raise ProtocolError(problem=f"the digest process {end} before it answered")
    match decode(data):
        case {"digested": {"bytes": int(), "seconds": float()} as done}:
            return dict(done)
        case {"failed": {"error": dict(error)}}:
            raise from_wire(error)
    raise ProtocolError(problem="the digest process sent something else than a digest")
