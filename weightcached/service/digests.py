"""The digests of what engines have published, computed in the background by `digester` processes, one at a time.

An engine records the stat tuples of the files that its own loader read. Once their digest is remembered under those
tuples, a client with the same bytes elsewhere finds what was published (`client.identity`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..checkpoint.remembered import recall
from ..errors import ProtocolError, WeightCacheError, from_wire
from ..shard.key import STAT_CONTENT
from ..shard.manifest import SourceFile
from ..text import describe_exit
from ..wire.framing import MAX_MESSAGE, Frame, decode
from .vault import HeldShard
from .workers import gone, spawn_role

_log = logging.getLogger(__name__)

Files = tuple[SourceFile, ...]
ShardId = tuple[str, str, int]  # device, model, generation


class Digests:
    """The queue of checkpoints to digest. `known(device, model, generation)` is called for each shard at the end."""

    def __init__(self, known: Callable[[str, str, int], None]) -> None:
        self._known = known
        # In order, each once, since all ranks are loaded from the same; with the shards of each.
        self._queue: dict[tuple[str, Files], list[ShardId]] = {}
        self._wake = asyncio.Event()

    def add(self, shard: HeldShard) -> None:
        """Queues what a shard was loaded from, if its digest is not in its key."""
        head = shard.read_head()
        checkpoint = head.attributes.get("checkpoint")
        if head.key.content.startswith(STAT_CONTENT) and head.files and isinstance(checkpoint, str):
            shards = self._queue.setdefault((checkpoint, head.files), [])
            shards.append((shard.device, shard.model, shard.generation))
            self._wake.set()

    async def run(self) -> None:
        """Computes until cancelled, which ends the process of the current one."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            checkpoint, files = next(iter(self._queue))
            known = False
            try:
                if None in await asyncio.to_thread(recall, files):
                    done = await _digest(checkpoint, files)
                    _log.info("%s: %d bytes digested in %.1f s", checkpoint, done["bytes"], done["seconds"])
                known = True
            except (WeightCacheError, OSError) as error:  # no descriptor or no process to be had among the latter
                _log.warning(
                    "%s: its digest is given up, what was published of it is found by the very same files only: %s",
                    checkpoint,
                    error,
                )
            for shard in self._queue.pop((checkpoint, files)):
                if known:  # who waits for these bytes looks again
                    self._known(*shard)


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
        try:
            data = b""
            with contextlib.suppress(ConnectionResetError):  # ended before it has read its job
                data = await asyncio.get_running_loop().sock_recv(ours, MAX_MESSAGE)
            await gone(process, "digest")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
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
