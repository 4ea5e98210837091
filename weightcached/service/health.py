"""The health of the GPUs: a watcher process (`weightcached.watcher`), and what its messages mean for what is cached.

    fatal        by `xids`, or out of NVML's reach: every shard of the device is lost. It is dropped, here, by the
                 worker and by the service manager; holders are told. Models are failed until the device is back; those
                 to preload are loaded again then
    application  an engine's own fault, such as a write into its read-only mapping: it touches no shard. It is counted
                 and logged with whose it is, and each shard of the device is verified once; one that differs is lost
    other        counted and logged

`Health` keeps the watcher running and decides; `Recovery` does what follows from it to the service's other parts.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..devices import Device, is_host
from ..errors import DeviceError, ModelError, ProtocolError, WeightCacheError, from_wire
from ..fds import FdSet
from ..text import describe_exit
from ..wire.framing import decode
from ..wire.stream import Stream
from ..xids import DOUBLE_BIT_ECC, Kind, describe, kind_of
from .models import Model
from .workers import gone, spawn_role

if TYPE_CHECKING:
    from .main import Service

RESTART_DELAYS = (0.5, 2.0, 10.0, 30.0)  # seconds, one step further for each end within QUICK_END of the start
QUICK_END = 60.0
VERIFY_SECONDS = 60.0  # from the end of one verification of a device to the next
MAX_NAMES = 3  # of tensors in a reason
# What reading a slab ends with if the memory under it is broken; any other failure says nothing of the weights.
SPOILED = frozenset({"CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_CONTAINED"})
_log = logging.getLogger(__name__)

Spawn = Callable[[list[str], dict[str, int]], Awaitable[asyncio.subprocess.Process]]


class HealthOwner(Protocol):
    """Who acts on what is found."""

    def device_lost(self, device: str, error: DeviceError) -> None:
        """Nothing that was on the device is there any more. Comes once until `device_back`."""
        ...

    def device_back(self, device: str) -> None:
        """A lost device can be used again."""
        ...

    async def holders(self, device: str) -> list[str]:
        """Who has something of the device attached, as a log names them."""
        ...

    async def verify_device(self, device: str, cause: str) -> None:
        """Compares what is cached on the device with its checksums, and acts on what differs."""
        ...


class DeviceHealth:
    """One device: how often each Xid came, why it is lost if it is, which faults are still to be logged with those who
    may be to blame, and after what it has still to be verified."""

    def __init__(self) -> None:
        self.xids: collections.Counter[int] = collections.Counter()
        self.lost: str | None = None
        self.unblamed: collections.Counter[str] = collections.Counter()
        self.blaming = False
        self.unverified: str | None = None
        self.verifying = False


class Health:
    """Keeps a watcher running for some devices, from `start` to `stop`. Without devices it does nothing."""

    def __init__(
        self,
        devices: Sequence[str],
        owner: HealthOwner,
        *,
        spawn: Spawn = spawn_role,
        verify_seconds: float = VERIFY_SECONDS,
    ) -> None:
        """`spawn` starts the watcher, as `workers.spawn_role` does; `verify_seconds`: VERIFY_SECONDS."""
        self.watching = asyncio.Event()
        self._devices = {name: DeviceHealth() for name in devices}
        self._owner = owner
        self._spawn = spawn
        self._verify_seconds = verify_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Stream | None = None
        self._channel_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._devices:
            self._run(self._keep_running())

    async def stop(self) -> None:
        """Ends the watcher with SIGKILL, since all it holds are descriptors, and waits until it is gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            self._channel.close("the service stops")
        self._kill()
        if self._process is not None:
            await gone(self._process, "device watcher")

    def describe(self, device: str) -> dict[str, Any]:
        """A device's part of a status reply: {"xids": {"31": 2}, "lost": why or None}."""
        found = self._devices.get(device, _HEALTHY)
        return {"xids": {str(xid): count for xid, count in sorted(found.xids.items())}, "lost": found.lost}

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            message = decode(data)
        match message:
            case {"watching": {"devices": list(devices)}} if self._devices.keys() >= set(devices):
                _log.info("watching %s for errors", ", ".join(devices) or "no device: all are lost")
                for device in devices:
                    self._back(device)
                self.watching.set()
            case {"xid": {"device": str(device), "xid": int(xid), "pid": pid, "command": command}} if (
                device in self._devices
            ):
                self._xid(device, xid, f"pid {pid} ({command})" if pid is not None else None)
            case {"ecc": {"device": str(device)}} if device in self._devices:
                self._xid(device, DOUBLE_BIT_ECC, None)
            case {"gone": {"device": str(device), "problem": str(problem)}} if device in self._devices:
                self._lose(device, problem)
            case {"back": {"device": str(device)}} if device in self._devices:
                self._back(device)
            case _:
                self.message_broken(ProtocolError(problem=f"the device watcher sent {message}"))

    def message_broken(self, error: ProtocolError) -> None:
        _log.error("%s; starting it again", error)
        self._kill()

    def stream_closed(self, reason: str) -> None:
        self.watching.clear()
        self._channel_ended.set()

    # What happens to a device.

    def _xid(self, device: str, xid: int, whose: str | None) -> None:
        health = self._devices[device]
        health.xids[xid] += 1
        name = describe(xid)
        kind = kind_of(xid)
        if kind is Kind.FATAL:
            self._lose(device, name)
        elif kind is Kind.APPLICATION:
            if whose is not None:
                _log_fault(device, name, whose)
            else:
                self._blame_once(device, name)
            self._verify_once(device, name)
        else:
            _log.warning("%s: %s", device, name)

    def _lose(self, device: str, problem: str) -> None:
        health = self._devices[device]
        if health.lost is not None:
            return
        health.lost = problem
        health.unverified = None
        _log.error("%s is lost: %s; what was cached there is dropped until it is back", device, problem)
        self._owner.device_lost(device, DeviceError(device=device, problem=f"the device is lost: {problem}"))

    def _back(self, device: str) -> None:
        health = self._devices[device]
        if health.lost is None:
            return
        health.lost = None
        _log.warning("%s is back", device)
        self._owner.device_back(device)

    def _blame_once(self, device: str, name: str) -> None:
        """Logs a fault whose process the kernel log does not tell; many at once are asked about together."""
        health = self._devices[device]
        health.unblamed[name] += 1
        if not health.blaming:
            health.blaming = True
            self._run(self._blame(device, health))

    async def _blame(self, device: str, health: DeviceHealth) -> None:
        try:
            while health.unblamed:
                holders = await self._owner.holders(device)
                faults, health.unblamed = health.unblamed, collections.Counter()
                whose = f"one of {', '.join(holders)}" if holders else "an unknown process"
                for name, count in faults.items():
                    _log_fault(device, f"{name} x{count}" if count > 1 else name, whose)
        finally:
            health.blaming = False

    def _verify_once(self, device: str, cause: str) -> None:
        """Verifies the device, now or after the verification under way; many faults at once cause one or two."""
        health = self._devices[device]
        if health.lost is None:
            health.unverified = cause
            if not health.verifying:
                health.verifying = True
                self._run(self._verify(device, health))

    async def _verify(self, device: str, health: DeviceHealth) -> None:
        try:
            while health.unverified is not None:
                cause, health.unverified = health.unverified, None
                await self._owner.verify_device(device, cause)
                await asyncio.sleep(self._verify_seconds)
        finally:
            health.verifying = False

    # The watcher.

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        quick_ends = 0
        while True:
            started = loop.time()
            try:
                end = describe_exit(await self._run_once())
            except OSError as error:  # no descriptor or no process to be had: what is cached must outlive that
                end = f"cannot be started: {error.strerror}"
            quick_ends = quick_ends + 1 if loop.time() - started < QUICK_END else 0
            delay = RESTART_DELAYS[min(quick_ends, len(RESTART_DELAYS) - 1)]
            _log.warning(
                "device watcher ended (%s), errors of %s are not seen; starting another in %.1f s",
                end, ", ".join(self._devices), delay,
            )  # fmt: skip
            await asyncio.sleep(delay)

    async def _run_once(self) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel_ended.clear()
        self._channel = Stream(ours, self, trusted=True)
        try:
            with theirs:
                self._process = await self._spawn(["watch-devices", *self._devices], {"--channel-fd": theirs.fileno()})
            code = await self._process.wait()
            await self._channel_ended.wait()  # what it said last is heard
        finally:
            self._channel.close("the device watcher has ended")
        return code

    def _kill(self) -> None:
        """Its children too: it leads a process group of its own."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _log_fault(device: str, name: str, whose: str) -> None:
    _log.warning("%s: %s, by %s; an engine's own fault: what is cached stays and is verified", device, name, whose)


_HEALTHY = DeviceHealth()


class Recovery:
    """What becomes of the service's shards and models (`HealthOwner`). Borrows all parts of the service."""

    def __init__(
        self,
        service: Service,
        changed: Callable[[Model], None],
        holders: Callable[[str], Awaitable[list[str]]],
    ) -> None:
        """`changed(model)` is called at each change of a model's state; `holders(device)` asks its worker."""
        self._service = service
        self._changed = changed
        self._holders = holders

    def device_lost(self, device: str, error: DeviceError) -> None:
        service = self._service
        here = [model for model in service.models.values() if device in model.devices]
        lost = [model for model in here if model.device_lost(device, error)]
        for shard in service.vault.of_device(device):
            service.vault.drop(device, shard.model, shard.generation)
        service.workers[device].tell_lost(error.problem)
        service.verifications.abandon(device)
        for model in lost:
            service.loads.abandon(model)
            self._changed(model)

    def device_back(self, device: str) -> None:
        service = self._service
        service.workers[device].tell_lost(None)
        failed = [model for model in service.models.values() if device in model.devices and model.state == "failed"]
        service.load_together([model for model in failed if model.config.preload])
        for model in failed:
            if not model.config.preload:
                model.forgive()  # whoever asks for it next has it loaded
                self._changed(model)

    async def holders(self, device: str) -> list[str]:
        return await self._holders(device)

    async def verify_device(self, device: str, cause: str) -> None:
        service = self._service
        shards = service.vault.of_device(device)
        if not shards:
            return
        try:
            results = await service.verifications.verify(shards)
        except DeviceError as error:
            _log.error("%s: what is cached is not verified after %s: %s", device, cause, error)
            return
        for shard, result in zip(shards, results, strict=True):
            reason = why_spoiled(result, cause)
            if reason is None or shard not in service.vault.of_device(device):  # it was evicted meanwhile
                continue
            service.vault.drop(device, shard.model, shard.generation)
            service.workers[device].shard_lost(shard.model, shard.generation, reason)
            model = service.models.get(shard.model)
            if model is not None and model.generation_on(device) == shard.generation:
                problem = f"its generation {shard.generation} on {device} is lost: {reason}; load it again: "
                problem += f"weightcachectl load {model.name}"
                model.lost(device, ModelError(model=model.name, problem=problem))
                self._changed(model)


def why_spoiled(result: dict[str, Any], cause: str) -> str | None:
    """What a result of `Verifications.verify` says against a shard; None: nothing, or it could not be verified."""
    if "error" in result:
        error: WeightCacheError = from_wire(result["error"])
        return f"{error} (after {cause})" if error.fields.get("status") in SPOILED else None
    if not result["differ"]:
        return None
    count = f"{len(result['differ'])} of {result['tensors']}"
    return f"{count} tensors differ after {cause}: {', '.join(result['differ'][:MAX_NAMES])}"


def watched(devices: Sequence[Device]) -> list[str]:
    """The devices whose health is watched: GPUs. Warns of those that lose their state when nobody has them open."""
    for device in devices:
        if device.persistence is False:
            # https://docs.nvidia.com/deploy/driver-persistence: kept as long as anybody has the device open.
            _log.warning("%s: persistence mode is off; enable it (nvidia-smi -pm 1)", device.name)
    return [device.name for device in devices if not is_host(device.name)]
