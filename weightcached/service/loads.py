"""The queue of loads and the loader process of the one in progress, which feeds all ranks of its model.

A model with a `publisher` is loaded by that command instead, see `publishers`.

One load at a time bounds host memory and gives the disk to one reader. A loader that makes no progress for
STALL_SECONDS is ended: a disk or a device that hangs must not hold up the models behind it for ever. One that hangs in
the kernel cannot even be killed, and is left to itself.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..errors import ConnectionLost, ProtocolError, ServiceNotRunning, WeightCacheError, from_wire
from ..fds import FdSet
from ..paths import socket_path
from ..text import describe_exit
from ..wire.framing import decode
from ..wire.stream import Stream
from .joint import JointLoad
from .models import Model
from .publishers import Publishers
from .underway import UnderWay
from .vault import Vault
from .workers import END_SECONDS, gone, kill, spawn_role

STALL_SECONDS = 600.0
TRIES = 3  # of one load whose worker died under it; its own errors are final
_log = logging.getLogger(__name__)


class Loads:
    """Loads queued models one after the other. `changed(model)` is called at each change of a model's state.

    `staging()`, asked for each loader: bytes of host memory that it may pass the checkpoint through. `vault` tells what
    a publisher has published; borrowed. `withdraw(model, shards)` evicts what a load had published of a model, device
    and generation of each, before it failed. `joint`: what other nodes do of loads together with them, if there
    are any. `under_way` remembers a publisher's load over the death of this process.
    """

    def __init__(
        self,
        changed: Callable[[Model], None],
        staging: Callable[[], int],
        vault: Vault | None = None,
        withdraw: Callable[[Model, list[tuple[str, int]]], None] = lambda model, shards: None,
        joint: JointLoad | None = None,
        under_way: UnderWay | None = None,
    ) -> None:
        self._withdraw = withdraw
        self._joint = joint
        self._under_way = under_way or UnderWay()
        self._changed = changed
        self._staging = staging
        self._vault = vault or Vault()
        self._queue: collections.deque[Model] = collections.deque()
        self._current: LoaderProcess | Publishers | None = None
        self._again: Model | None = None
        self._wake = asyncio.Event()

    @property
    def idle(self) -> bool:
        return self._current is None and not self._queue

    def add(self, model: Model) -> None:
        """Queues a model. Does nothing if it is queued already, or loading as its config says.

        A load that its config does not mean any more, from another checkpoint or for other ranks, is called off and
        begun anew.
        """
        if model.state == "queued":
            return
        if model.state == "loading":
            if self._current is not None and self._current.spec != model.spec:
                self._current.call_off()
                self._again = model
            return
        model.queue()
        self._queue.append(model)
        self._changed(model)
        self._wake.set()

    async def call_off(self, model: Model) -> None:
        """Takes a model out of the queue, or ends its loader; the model is as it was before."""
        if model in self._queue:
            self._queue.remove(model)
            model.called_off()
            self._changed(model)
        elif self._current is not None and self._current.model is model:
            self._again = None
            await self._current.end()

    def abandon(self, model: Model) -> None:
        """Ends the model's loader, if one runs, and does not wait for it."""
        if self._current is not None and self._current.model is model:
            self._again = None
            self._current.call_off()

    def settle(self) -> None:
        """At a start: what an earlier process of the service has left of a load that was never over is dropped."""
        self._under_way.settle(self._vault)

    async def run(self) -> None:
        """Loads until cancelled; a cancelled load's process is ended and awaited."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            model = self._next()
            if model.state == "queued":  # and was not published by somebody else meanwhile
                await self._load(model)

    async def _load(self, model: Model) -> None:
        error: WeightCacheError | None = None
        killed = False
        own: set[str] = set()
        half: list[tuple[str, int]] = []
        for attempt in range(1, TRIES + 1):
            model.begin()
            self._changed(model)
            self._current = loader = self._loader_of(model)
            if isinstance(loader, Publishers) and model.load_spec is not None:
                self._under_way.begin(model.name, model.load_spec)
            try:
                error = await loader.run()
            except OSError as failure:  # no descriptor or no process to be had: what is cached must outlive that
                error = model.load_failed(f"its loader cannot be started: {failure.strerror}")
            except WeightCacheError as failure:  # such as a socket directory that is no longer to be trusted
                error = failure
            finally:
                self._current = None
            killed = loader.killed
            own = loader.own() if isinstance(loader, Publishers) else set()
            if not isinstance(error, ConnectionLost | ServiceNotRunning) or attempt == TRIES:
                break
            _log.warning("%s: %s; loading it again", model.name, error)
        if error is not None:
            half = model.fail(error, killed=killed, own=own)
            _log.error("%s", model.load_failed(model.error or error))
            self._withdraw(model, half)
        elif model.state == "loading":
            # Published models were marked by the worker's word; what is left here was called off, or was published by
            # a command that has ended now.
            model.called_off()
        model.load_spec = None
        if self._again is model:  # before anybody hears that it is called off
            self._again = None
            model.queue()
            self._queue.append(model)
        self._changed(model)
        if half:  # it must not come back by a restart in this moment
            await self._vault.settled()
        self._under_way.end()

    def _next(self) -> Model:
        """Takes a model out of the queue. Those with ranks on several nodes go in the order of their names, in the
        places that they have: nodes that began with different ones would wait for each other."""
        model = self._queue.popleft()
        together = [item for item in self._queue if item.config.meeting is not None]
        if model.config.meeting is not None and together:
            first = min(together, key=lambda item: item.name)
            if first.name < model.name:
                self._queue[self._queue.index(first)] = model
                return first
        return model

    def _loader_of(self, model: Model) -> LoaderProcess | Publishers:
        if model.spec.publisher:
            return Publishers(model, self._vault, self._joint)
        return LoaderProcess(model, self._staging(), self._changed)


class LoaderProcess:
    """One loader, which feeds all ranks of a model, from start to exit; see `loader.process` for what it says."""

    def __init__(self, model: Model, staging: int, changed: Callable[[Model], None]) -> None:
        self.model = model
        self.spec = model.spec  # its config may change meanwhile
        self.killed = False  # by somebody else, such as the kernel when memory is short
        self._staging = staging
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        self._called_off = False
        self._done: dict[str, Any] | None = None
        self._error: WeightCacheError | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._channel: Stream | None = None

    async def run(self) -> WeightCacheError | None:
        """Runs the load. None: published, or called off by `end`. Cancelled, it ends the process and waits for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = self._channel = Stream(ours, self, trusted=True)
        try:
            with theirs:
                arguments = ["loader", ",".join(self.spec.devices), self.model.name]
                self._process = await spawn_role(arguments, {"--channel-fd": theirs.fileno()})
            if self._called_off:  # while it was being started
                self._kill()
            channel.send({"job": self._job()})
            self._watch()
            await self._ended.wait()  # all that it said is read, or it hangs
            await gone(self._process, "loader")
        finally:
            if self._process is not None and self._process.returncode is None:
                self._kill()
                await gone(self._process, "loader")
            for timer in (self._stall, self._give_up):
                if timer is not None:
                    timer.cancel()
            channel.close("the loader has ended")
        if self._called_off:
            return None
        if self._error is None and self._done is None:
            code = self._process.returncode
            self.killed = code is not None and code < 0
            end = "hangs" if code is None else f"ended by {describe_exit(code)}"
            return self.model.load_failed(f"the loader {end} before it was done")
        return self._error

    def _job(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "model": self.model.name,
            "checkpoint": str(spec.checkpoint),
            "targets": [{"device": device, "socket": str(socket_path(device))} for device in spec.devices],
            "parallel": asdict(spec.parallel),
            "rules": list(spec.rules),
            "dtype": None if spec.dtype == "checkpoint" else spec.dtype,
            "staging": self._staging,
            "spec": self.model.load_spec,
            "first": spec.first,
        }

    def call_off(self) -> None:
        """Ends the loader with SIGKILL: all it holds are descriptors. `run` returns when nothing of it is left."""
        self._called_off = True
        self._kill()

    async def end(self) -> None:
        """`call_off`, and waits until nothing of it is left."""
        self.call_off()
        await self._ended.wait()

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            message = decode(data)
        self._watch()
        match message:
            case {"plan": {"nbytes": list(sizes), "bytes_to_read": int(to_read)}}:
                self.model.bytes_to_read = to_read
                for device, nbytes in zip(self.spec.devices, sizes, strict=True):
                    _log.info("%s: %d bytes to %s", self.model.name, nbytes, device)
            case {"progress": {"bytes_done": int(done)}}:
                self.model.bytes_done = done
            case {"done": {"seconds": float(seconds), "bytes_read": int(nbytes)} as done}:
                self._done = done
                self.model.load_seconds = seconds
                self.model.bytes_done = nbytes
                rate = nbytes / seconds / 1e9 if seconds else 0.0
                _log.info("%s: %d bytes read in %.2f s, %.1f GB/s", self.model.name, nbytes, seconds, rate)
            case {"failed": {"error": dict(error)}}:
                self._error = from_wire(error)
            case _:
                self._error = ProtocolError(problem=f"the loader sent {sorted(message)}")
                self._kill()
        self._changed(self.model)

    def message_broken(self, error: ProtocolError) -> None:
        self._error = error
        self._kill()

    def stream_closed(self, reason: str) -> None:
        self._ended.set()

    def _watch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        self._stall = asyncio.get_running_loop().call_later(STALL_SECONDS, self._stalled)

    def _stalled(self) -> None:
        self._error = self.model.load_failed(
            f"no progress for {STALL_SECONDS:.0f} s after {self.model.bytes_done} bytes; is its disk there?"
        )
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._channel is not None:
            kill(self._process)
            if self._give_up is None:  # its end closes the channel; this does it for one that does not end
                loop = asyncio.get_running_loop()
                self._give_up = loop.call_later(END_SECONDS, self._channel.close, "the loader hangs")
