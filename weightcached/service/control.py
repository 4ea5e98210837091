"""The service's own socket: what weightcachectl asks for."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import NoSuchDevice, NoSuchModel, WeightCacheError
from ..fds import FdSet
from ..paths import socket_path
from ..wire.connection import Connection
from ..wire.messages import SERVICE_OPS, Evict, Load, Reload, Request, Status, Stop, Subscribe
from ..wire.server import Server, ServerConnection

if TYPE_CHECKING:
    from .main import Service

WORKER_TIMEOUT = 5.0  # seconds for a worker's answer; it has nothing to do but answer


class Control:
    """The server on the control socket, and its subscribers."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._server = Server(listener, ops=SERVICE_OPS, device=None, instance=service.instance, handle=self._handle)
        self._subscribers: set[ServerConnection] = set()

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop("the service stops")

    def announce(self, event: dict[str, Any]) -> None:
        """Tells every subscriber."""
        for connection in list(self._subscribers):
            connection.event(event)

    def _handle(self, connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, Any] | None:
        match request:
            case Load():
                return self._service.load(request.model).describe()
            case Reload():
                connection.reply_later(self._service.reload())
            case Stop():
                self._service.stop()
                return {}
            case Evict():
                connection.reply_later(self._evict(request))
            case Subscribe():
                connection.hold()
                self._subscribers.add(connection)
                connection.on_close.append(lambda: self._subscribers.discard(connection))
                connection.reply_later(self._status())
            case Status():
                connection.reply_later(self._status())
        return None

    async def _status(self) -> dict[str, Any]:
        service = self._service
        devices = await asyncio.gather(*(self._device_status(device.name) for device in service.devices))
        return {
            "schema": 1,
            "instance": service.instance,
            "version": __version__,
            "pid": os.getpid(),
            "started": service.started,
            "ready": service.ready,
            "config": str(service.config.file),
            "models": [model.describe() for model in service.models.values()],
            "devices": devices,
        }

    async def _device_status(self, device: str) -> dict[str, Any]:
        worker = self._service.workers[device]
        common = {"device": device, "worker_restarts": worker.restarts}
        try:
            answer = await _ask(device, Status())
        except WeightCacheError as error:
            # Between a worker's death and its successor; its shards are in the vault meanwhile.
            return {**common, "error": str(error), "pid": worker.pid, "limit": worker.limit, "shards": []}
        return {**common, **answer}

    async def _evict(self, request: Evict) -> dict[str, Any]:
        """Evicts on one device or on all. The workers decide; only then is a load of the model called off."""
        service = self._service
        if request.device and request.device not in service.workers:
            raise NoSuchDevice(device=request.device, known=sorted(service.workers))
        names = [request.device] if request.device else list(service.workers)
        evicted = await self._evict_on(names, request)
        model = service.models.get(request.model)
        called_off = False
        if model is not None and model.device in names and model.state in ("queued", "loading"):
            called_off = True
            await service.loads.call_off(model)
            evicted += await self._evict_on(names, request)  # it may have been published in the meantime
        if not evicted and not called_off:
            raise NoSuchModel(
                model=request.model,
                device=request.device or f"weightcached@{service.instance}",
                known=sorted({shard.model for name in names for shard in service.vault.of_device(name)}),
            )
        return {"evicted": evicted, "called_off": called_off}

    async def _evict_on(self, devices: list[str], request: Evict) -> list[dict[str, Any]]:
        evicted = []
        for device in devices:
            try:
                answer = await _ask(device, Evict(model=request.model, force=request.force))
            except NoSuchModel:
                continue
            self._service.vault.drop(device, request.model, answer["generation"])
            evicted.append({"device": device, **answer})
        return evicted


async def _ask(device: str, request: Request) -> dict[str, Any]:
    """One request to a worker, as any client would make it, off the loop."""

    def ask() -> dict[str, Any]:
        with Connection.open(socket_path(device), device=device, client="service", timeout=WORKER_TIMEOUT) as worker:
            answer, fds = worker.request(request, timeout=WORKER_TIMEOUT)
            fds.close()
            return answer

    return await asyncio.to_thread(ask)
