"""The worker processes: one per device, started, fed with the shards they held, started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any, Protocol

from ..errors import DeviceError, ProtocolError
from ..fds import FdSet
from ..text import describe_exit
from ..trace import point
from ..wire.framing import decode
from ..wire.stream import Stream
from .claim import Claim
from .notify import clean_environment
from .vault import Vault

RESTART_DELAYS = (0.0, 0.1, 0.5, 2.0, 5.0)  # seconds, one step further for each death within QUICK_DEATH of the start
QUICK_DEATH = 5.0
START_TRIES = 4  # of a worker that has never served; one that has is started again for ever
STOP_SECONDS = 5.0
END_SECONDS = 5.0  # for a child that was killed, or has said its last word, to be gone
_log = logging.getLogger(__name__)


class WorkerOwner(Protocol):
    """Who is told what workers say."""

    def model_wanted(self, device: str, model: str) -> None:
        """A client waits for a configured model that is not being loaded."""
        ...

    def shard_arrived(self, device: str, model: str, generation: int) -> None:
        """A shard is in the vault. Its worker gives it out when it has read what it is sent after this."""
        ...

    def shard_held(self, device: str, model: str, generation: int) -> None:
        """Its worker is told that the shard is published on the device."""
        ...

    def made_room(self, device: str, model: str, generation: int, room_for: str) -> None:
        """An idle shard was evicted so that another model, or the next generation, fits. It is dropped after this."""
        ...

    def shard_dropped(self, device: str, model: str, generation: int) -> None:
        """A shard was replaced or evicted."""
        ...


class WorkerProcess:
    """Keeps one device's worker running from `start` to `stop`. Borrows the claim and the vault; see `worker.main`."""

    def __init__(
        self,
        device: str,
        limit: int,
        instance: str,
        claim: Claim,
        vault: Vault,
        owner: WorkerOwner,
        allow_uids: tuple[int, ...] = (),
    ) -> None:
        """`limit`: the most bytes the worker may hold. `allow_uids`: other users whom it lets in."""
        self.device = device
        self.limit = limit
        self.restarts = 0
        self.serving = asyncio.Event()
        self._has_served = False
        self._instance = instance
        self._claim = claim
        self._vault = vault
        self._owner = owner
        self._allow_uids = allow_uids
        self._models: dict[str, dict[str, Any]] = {}
        self._lost: str | None = None
        self._channel: Stream | None = None
        self._channel_ended = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._confirming: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The running worker's pid, None between two."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def start(self) -> asyncio.Task[None]:
        """The task that keeps the worker alive; it ends with an exception only on a defect of this service."""
        self._task = asyncio.create_task(self._keep_running(), name=f"worker {self.device}")
        return self._task

    async def stop(self) -> None:
        """Ends the worker by closing its channel, and waits for its exit; SIGKILL after STOP_SECONDS."""
        tasks = [*self._confirming] if self._task is None else [self._task, *self._confirming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._channel is not None:
            self._channel.close("the service stops")
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                _log.warning("worker %s pid=%d does not end; killed", self.device, self._process.pid)
                kill(self._process)
                await self._process.wait()

    def tell_models(self, models: dict[str, dict[str, Any]]) -> None:
        """Passes on what becomes of the models on the device; a restarted worker is told again."""
        self._models = models
        self._send({"models": models})

    def tell_lost(self, reason: str | None) -> None:
        """The device is lost for this reason, or there again (None); a restarted worker is told too."""
        self._lost = reason
        self._send({"lost": {"reason": reason}} if reason is not None else {"back": {}})

    def shard_lost(self, model: str, generation: int, reason: str) -> None:
        """What is in one shard is not what was published."""
        self._send({"lost": {"reason": reason, "model": model, "generation": generation}})

    def digested(self, model: str, generation: int, problem: str | None) -> None:
        """The digests of the files that a shard was loaded from are remembered by now, or given up; told again to a
        restarted worker."""
        self._send({"digested": {"model": model, "generation": generation, "problem": problem}})

    def unneeded(self, model: str, generation: int, reason: str) -> None:
        """Another rank of the model had to make room: an idle one here is evicted as well."""
        self._send({"unneeded": {"model": model, "generation": generation, "reason": reason}})

    def withdraw(self, model: str, generation: int, reason: str) -> None:
        """A shard of a load that has failed is evicted: who has it keeps it, and nobody else gets it."""
        # The copies here go first: a worker that is started meanwhile is not given them.
        self._vault.drop(self.device, model, generation)
        self._send({"withdrawn": {"model": model, "generation": generation, "reason": reason}})

    def message_received(self, data: bytes, fds: FdSet) -> None:
        with fds:
            message = decode(data)
            match message:
                case {"serving": _}:
                    self._has_served = True
                    self.serving.set()
                case {"hold": {"model": str(model), "generation": int(generation)}} if self._lost is not None:
                    # Sent before the worker heard of the loss; it knows better by now, and tells the publisher.
                    self._send({"held": {"model": model, "generation": generation}})
                case {"hold": {"model": str(model), "generation": int(generation), "nbytes": int(nbytes)}}:
                    point("service.hold-received")
                    self._vault.hold(self.device, model, generation, nbytes, fds)
                    if self._channel is not None:
                        self._begin(self._confirm_hold(self._channel, model, generation))
                case {"drop": {"model": str(model), "generation": int(generation)} as drop}:
                    self._vault.drop(self.device, model, generation)
                    point("service.dropped")
                    if "room_for" in drop:
                        self._owner.made_room(self.device, model, generation, str(drop["room_for"]))
                    self._owner.shard_dropped(self.device, model, generation)
                    if self._channel is not None:
                        self._begin(self._confirm_drop(self._channel, model, generation))
                case {"wanted": {"model": str(model)}}:
                    self._owner.model_wanted(self.device, model)
                case _:
                    self.message_broken(ProtocolError(problem=f"it sent {sorted(message)}"))

    def message_broken(self, error: ProtocolError) -> None:
        # Out of descriptors, most likely. A worker ends with its channel; the next one gets what is held here.
        _log.error("worker %s: %s; starting it again", self.device, error)
        if self._channel is not None:
            self._channel.close(str(error))

    def stream_closed(self, reason: str) -> None:
        _log.debug("= worker %s channel %s", self.device, reason)
        self.serving.clear()
        self._channel_ended.set()

    def _begin(self, confirmation: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(confirmation)
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)

    async def _confirm_hold(self, channel: Stream, model: str, generation: int) -> None:
        """Tells the worker that a shard is safe: from here on no death of a process loses it."""
        await self._vault.sent(self.device, model, generation)
        self._owner.shard_arrived(self.device, model, generation)
        point("service.before-held")
        if channel is self._channel:  # a worker that was started meanwhile has adopted it
            channel.send({"held": {"model": model, "generation": generation}})
        self._owner.shard_held(self.device, model, generation)

    async def _confirm_drop(self, channel: Stream, model: str, generation: int) -> None:
        """Tells the worker when the service manager, too, has closed what it had of a shard."""
        await self._vault.settled()
        channel.send({"dropped": {"model": model, "generation": generation}})

    async def _keep_running(self) -> None:
        quick_deaths = 0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                end = describe_exit(await self._run_once())
            except OSError as error:  # no descriptor or no process to be had: what is cached must outlive that
                end = f"cannot be started: {error.strerror}"
                if self._channel is not None:
                    self._channel.close(end)
            self.restarts += 1
            quick_deaths = quick_deaths + 1 if loop.time() - started < QUICK_DEATH else 0
            if not self._has_served and quick_deaths == START_TRIES:
                # Another try would end the same way; what was adopted stays with the service manager.
                raise DeviceError(device=self.device, problem=f"its worker cannot start ({end}); its log is above")
            delay = RESTART_DELAYS[min(quick_deaths, len(RESTART_DELAYS) - 1)]
            _log.warning(
                "worker %s ended (%s), its shards are kept here; starting another in %.1f s",
                self.device, end, delay,
            )  # fmt: skip
            await asyncio.sleep(delay)

    async def _run_once(self) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._channel_ended.clear()
            self._channel = Stream(ours, self, trusted=True)
            shared = {
                "--channel-fd": theirs.fileno(),
                "--listener-fd": self._claim.listener.fileno(),
                "--lock-fd": self._claim.lock.fileno(),
            }
            self._process = await spawn_role(
                ["worker", self.device, "--instance", self._instance, "--limit", str(self.limit)]
                + [f"--allow-uid={uid}" for uid in self._allow_uids],
                shared,
            )
        await self._vault.filled.wait()
        while self._confirming:  # what the worker before this one handed over is complete then
            await asyncio.wait(self._confirming)
        for shard in self._vault.of_device(self.device):
            name = {"model": shard.model, "generation": shard.generation}
            self._channel.send({"adopt": name}, [item.fileno() for item in shard.descriptors])
            if shard.digest is not None:
                self.digested(shard.model, shard.generation, shard.digest.problem)
        self._send({"models": self._models})  # before any client is served: not all that is adopted may be given out
        if self._lost is not None:
            self._send({"lost": {"reason": self._lost}})
        self._send({"serve": {"generations": self._vault.generations(self.device)}})
        code = await self._process.wait()
        await self._channel_ended.wait()  # what it said last is read before another one is given what is held
        return code

    def _send(self, message: dict[str, Any]) -> None:
        if self._channel is not None:
            self._channel.send(message)


async def spawn_role(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
    """Starts ``weightcached <role> ...`` with the named descriptors, without what systemd meant for the service alone.

    The child has its own session: a terminal's Ctrl-C reaches the service only, which ends its children in order.
    """
    for option, fd in fds.items():
        arguments = [*arguments, option, str(fd)]
    if _log.isEnabledFor(logging.DEBUG):
        arguments = [*arguments, "--debug"]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "weightcached", *arguments,
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(fds.values()),
        env=clean_environment(os.environ),
        start_new_session=True,
    )  # fmt: skip


def kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to a child, unless it has ended.

    Not `send_signal`, which looks first whether the child has ended: one that just has is then reaped by that look, and
    asyncio, which finds nothing to wait for, reports 255 in place of its exit status.
    """
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            # An error once it is reaped: the number may be another process's by then.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(process.pid, signal.SIGKILL)


async def gone(process: asyncio.subprocess.Process, role: str) -> None:
    """Waits until a child is gone that was killed or has said its last word; END_SECONDS at most, which is logged.

    One that hangs in a driver or on a disk cannot be killed (state D), and must not hold up everything else.
    """
    # Not `wait_for`: that of Python 3.11 drops a cancellation that comes when the child has just ended, and then the
    # task that waits here goes on for ever.
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        _log.error("%s pid=%d does not end; does its device or its disk hang?", role, process.pid)
