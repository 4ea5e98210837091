"""The service's own socket: what weightcachectl asks for."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import ModelInUse, ModelNotLoaded, NoSuchDevice, NoSuchModel, WeightCacheError
from ..fds import FdSet
from ..paths import socket_path
from ..text import holder
from ..wire.connection import Connection
from ..wire.messages import SERVICE_OPS, Evict, Load, Reload, Request, Status, Stop, Subscribe, Verify
from ..wire.server import Server, ServerConnection

if TYPE_CHECKING:
    from .main import Service

WORKER_TIMEOUT = 5.0  # seconds for a worker's answer; it has nothing to do but answer
EVICT_TIMEOUT = 20.0  # it waits for the service manager to let go of the memory


class Control:
    """The server on the control socket, and its subscribers."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._server = Server(
            listener,
            ops=SERVICE_OPS,
            device=None,
            instance=service.instance,
            handle=self._handle,
            allow_uids=service.config.allow_uids,
        )
        self._subscribers: set[ServerConnection] = set()

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop("the service stops")

    def announce(self, event: dict[str, Any]) -> None:
        """Tells every subscriber."""
        for connection in list(self._subscribers):
            connection.event(event)

    def announce_cluster(self) -> None:
        """Tells every subscriber of the nodes, and of the models, which may be given out now, or not any more."""
        self.announce({"what": "cluster", **(self._service.cluster.describe() or {})})
        for model in self._service.models.values():
            self.announce({"what": "model", **model.describe()})

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
            case Verify():
                connection.reply_later(self._verify(request))
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
            "store": service.vault.describe_store(),
            "cluster": service.cluster.describe(),
        }

    async def _device_status(self, device: str) -> dict[str, Any]:
        worker = self._service.workers[device]
        common = {"device": device, "worker_restarts": worker.restarts, **self._service.health.describe(device)}
        try:
            answer = await _ask(device, Status())
        except WeightCacheError as error:
            # Between a worker's death and its successor; its shards are in the vault meanwhile.
            return {**common, "error": str(error), "pid": worker.pid, "limit": worker.limit, "shards": []}
        return {**common, **answer}

    async def holders(self, device: str) -> list[str]:
        """Who has something of the device attached now: "pid 42 (python)"."""
        shards = (await self._device_status(device))["shards"]
        return sorted({name for shard in shards for name in _holders(shard)})

    async def _evict(self, request: Evict) -> dict[str, Any]:
        """Evicts on one device or on all. The workers decide; only then is a load of the model called off.

        Only devices that have the model, or are to have it, are asked: the worker of another one need not answer.

        A model of several ranks that is in use on one device is refused before it is dropped from another.
        """
        service = self._service
        model = service.models.get(request.model)
        configured = () if model is None else model.devices
        meant = self._devices_meant(request)
        names = [name for name in meant if name in configured or service.vault.find(name, request.model)]
        holding = [name for name in names if service.vault.find(name, request.model)]
        if len(holding) > 1 and not request.force:
            await self._refuse_used(holding, request.model)
        evicted = await self._evict_on(names, request)
        model = service.models.get(request.model)  # a reload may have changed it
        called_off = False
        if model is not None and set(model.devices) & set(names) and model.state in ("queued", "loading"):
            called_off = True
            await service.loads.call_off(model)
            evicted += await self._evict_on(names, request)  # it may have been published in the meantime
        if not evicted and not called_off:
            raise self._not_cached(request)
        return {"evicted": evicted, "called_off": called_off}

    async def _verify(self, request: Verify) -> dict[str, Any]:
        """A result for each shard of the model, see `Verifications.verify`."""
        service = self._service
        held = [shard for name in self._devices_meant(request) for shard in service.vault.of_device(name)]
        shards = [shard for shard in held if shard.model == request.model]
        if not shards:
            raise self._not_cached(request)
        return {"model": request.model, "results": await service.verifications.verify(shards)}

    def _devices_meant(self, request: Evict | Verify) -> list[str]:
        devices = list(self._service.workers)
        if request.device is None:
            return devices
        if request.device not in devices:
            raise NoSuchDevice(device=request.device, known=sorted(devices))
        return [request.device]

    def _not_cached(self, request: Evict | Verify) -> NoSuchModel:
        service = self._service
        model = service.models.get(request.model)
        if model is not None and not any(service.vault.find(name, request.model) for name in service.workers):
            return ModelNotLoaded(model=request.model, device=", ".join(model.devices))
        held = [shard for name in self._devices_meant(request) for shard in service.vault.of_device(name)]
        return NoSuchModel(
            model=request.model,
            device=request.device or f"weightcached@{service.instance}",
            known=sorted({shard.model for shard in held}),
        )

    async def _refuse_used(self, devices: list[str], model: str) -> None:
        """`ModelInUse` for the first of the devices on which somebody has the model attached."""
        for device in devices:
            status = await _ask(device, Status())
            while status["settles_in"]:  # its worker has just started: those who use something are on their way back
                await asyncio.sleep(status["settles_in"])
                status = await _ask(device, Status())
            for shard in status["shards"]:
                if shard["model"] == model and shard["state"] == "cached" and shard["leases"]:
                    raise ModelInUse(model=model, device=device, holders=_holders(shard))

    async def _evict_on(self, devices: list[str], request: Evict) -> list[dict[str, Any]]:
        evicted = []
        for device in devices:
            try:
                answer = await _ask(device, Evict(model=request.model, force=request.force), EVICT_TIMEOUT)
            except NoSuchModel:
                continue
            evicted.append({"device": device, **answer})
        return evicted


def _holders(shard: dict[str, Any]) -> list[str]:
    """Who has a shard of a worker's status attached."""
    return [holder(lease["pid"], lease["command"], lease["ended"]) for lease in shard["leases"]]


async def _ask(device: str, request: Request, seconds: float = WORKER_TIMEOUT) -> dict[str, Any]:
    """One request to a worker, as any client would make it, off the loop."""

    def ask() -> dict[str, Any]:
        with Connection.open(socket_path(device), device=device, client="service", timeout=WORKER_TIMEOUT) as worker:
            return worker.ask(request, timeout=seconds)

    return await asyncio.to_thread(ask)
