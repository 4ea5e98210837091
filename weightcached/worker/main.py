"""The worker process of one device: a broker of descriptors. No CUDA, no torch; it lives as long as its service.

It starts with three descriptors from the service: the channel to it, the device's listening socket and the device's
lock. The last two are the service's as well, so they outlive a worker that dies: the lock stays held, and clients that
connect meanwhile wait in the socket's queue.

Channel, service to worker:

    {"adopt": {"model", "generation"}} + descriptors    a shard that was published before this worker started
    {"serve": {"generations": {...}}}                   everything is adopted: begin to accept
    {"held": {"model", "generation"}}                   the service holds its copies of a published shard
    {"models": {name: {...}}}                           what becomes of each model, and which may be given out
    {"dropped": {"model", "generation"}}                the service and its manager have let go of a dropped shard
    {"unneeded": {"model", "generation", "reason"}}     another of its ranks is gone: this one may go, if it is idle
    {"withdrawn": {"model", "generation", "reason"}}    the load that published it has failed: nobody else gets it
    {"digested": {"model", "generation", "problem"}}    the digests of what it was loaded from are remembered now, or
                                                        given up because of `problem`
    {"lost": {"reason"}}                                the device is lost, and all that was on it, until it is back
    {"lost": {"reason", "model", "generation"}}         only this shard is
    {"back": {}}                                        a lost device is there again

Channel, worker to service:

    {"serving": {}}
    {"hold": {"model", "generation", "nbytes"}} + descriptors    keep copies of this shard
    {"drop": {"model", "generation", "room_for"}}                close them; with `room_for`: evicted so that it fits
    {"wanted": {"model"}}                                        a client waits for a model that is not being loaded
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from ..errors import ManifestError, ProtocolError
from ..fds import FdSet, OwnedFd, raise_descriptor_limit
from ..wire.framing import decode
from ..wire.messages import WORKER_OPS
from ..wire.server import Server
from ..wire.stream import Stream
from ..wire.validate import parse_manifest
from .catalogue import Catalogue, Shard
from .handlers import Handlers, describe
from .memory import give_back_unused

_log = logging.getLogger(__name__)


def run(
    *,
    device: str,
    instance: str,
    limit: int,
    channel_fd: int,
    listener_fd: int,
    lock_fd: int,
    allow_uids: tuple[int, ...] = (),
) -> int:
    """Serves until the service closes the channel. Takes over the three descriptors. Returns the exit code.

    0: the service has ended. 1: it sent what this worker does not understand; it starts another with what it holds.
    """
    raise_descriptor_limit()
    with (
        OwnedFd(lock_fd),
        socket.socket(fileno=channel_fd) as channel,
        socket.socket(fileno=listener_fd) as listener,
    ):
        return asyncio.run(Worker(device, instance, limit, listener, allow_uids).run(channel))


class Worker:
    """One device's catalogue behind its socket, and the channel to the service."""

    def __init__(
        self, device: str, instance: str, limit: int, listener: socket.socket, allow_uids: tuple[int, ...]
    ) -> None:
        self._catalogue = Catalogue(device, limit)
        self._handlers = Handlers(self._catalogue, instance, self._tell)
        self._server = Server(
            listener,
            ops=WORKER_OPS,
            device=device,
            instance=instance,
            handle=self._handlers.handle,
            allow_uids=allow_uids,
        )
        self._channel: Stream | None = None
        self._ended = asyncio.Event()
        self._exit_code = 0

    async def run(self, channel: socket.socket) -> int:
        """Serves until the channel ends, then closes everything that is held. Returns the exit code."""
        self._channel = Stream(channel, self, trusted=True)
        try:
            await self._ended.wait()
        finally:
            self._server.stop("the service has ended")
            self._catalogue.close()
            self._handlers.close()
            self._channel.close("the worker ends")
        return self._exit_code

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            try:
                self._obey(decode(data), fds)
            except BaseException:
                # The two ends are of one version: this is a defect, which the loop reports. After it nobody knows what
                # the service believes to be here, so this process ends and its successor begins with what is held.
                self._end(1)
                raise

    def message_broken(self, error: ProtocolError) -> None:
        self._end(1)
        raise error

    def stream_closed(self, reason: str) -> None:
        _log.debug("= channel %s", reason)
        self._ended.set()

    def _end(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._ended.set()

    def _obey(self, message: dict[str, Any], fds: FdSet) -> None:
        match message:
            case {"adopt": {"model": str(model), "generation": int(generation)}}:
                self._adopt(model, generation, fds)
            case {"serve": {"generations": dict(generations)}}:
                self._catalogue.remember_generations(generations)
                self._handlers.begin()
                self._server.start()
                self._tell({"serving": {}})
            case {"held": {"model": str(model), "generation": int(generation)}}:
                self._handlers.held(model, generation)
            case {"models": dict(models)}:
                self._handlers.models_changed(models)
            case {"dropped": {"model": str(model), "generation": int(generation)}}:
                self._handlers.dropped(model, generation)
            case {"unneeded": {"model": str(model), "generation": int(generation), "reason": str(reason)}}:
                self._handlers.unneeded(model, generation, reason)
            case {"withdrawn": {"model": str(model), "generation": int(generation), "reason": str(reason)}}:
                self._handlers.withdrawn(model, generation, reason)
            case {"digested": {"model": str(model), "generation": int(generation), "problem": None | str() as problem}}:
                self._handlers.digested(model, generation, problem)
            case {"lost": {"reason": str(reason), "model": str(model), "generation": int(generation)}}:
                self._handlers.shard_lost(model, generation, reason)
            case {"lost": {"reason": str(reason)}}:
                self._handlers.device_lost(reason)
            case {"back": _}:
                self._handlers.device_lost(None)
            case _:
                raise ProtocolError(problem=f"the service sent {sorted(message)}")

    def _adopt(self, model: str, generation: int, fds: FdSet) -> None:
        try:
            head, _ = parse_manifest(next(iter(fds)).fileno())
            give_back_unused()
        except ManifestError as error:  # written by another version; memory that nobody can use is not kept
            _log.error("%s generation %d cannot be adopted and is dropped: %s", model, generation, error)
            self._handlers.drop({"model": model, "generation": generation})
            return
        manifest, *slabs = fds.steal_all()
        superseded = self._catalogue.insert(Shard(head, manifest, slabs))
        if superseded is not None:  # the worker before this one died between a switch and telling of it
            self._handlers.drop(describe(superseded))

    def _tell(self, message: dict[str, object], fds: list[OwnedFd] | tuple[OwnedFd, ...] = ()) -> None:
        if self._channel is not None:
            self._channel.send(message, [item.fileno() for item in fds])
