"""workers: one that dies is replaced, with the shards it held; also when it cannot be started, dies in mid sentence or
babbles."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.running import process_of_role, wait_for_end
from tests.service.conftest import HOST, StartService, attach, generation, model, slab_bytes
from tests.wire.serving import HELLO, Client
from tests.worker.process import shard
from weightcached.errors import DeviceError
from weightcached.service import workers
from weightcached.service.claim import Claim, Owner
from weightcached.service.vault import Vault
from weightcached.service.workers import WorkerProcess, kill, spawn_role

ROOT = Path(__file__).parents[2]
Spawn = Callable[[list[str], dict[str, int]], Awaitable[asyncio.subprocess.Process]]


class Told:
    """What a service is told by its workers."""

    def __init__(self) -> None:
        self.wanted: list[str] = []
        self.arrived: list[tuple[str, int]] = []
        self.held: list[tuple[str, int]] = []
        self.dropped: list[tuple[str, int]] = []
        self.made: list[tuple[str, int, str]] = []
        self.at_first: Callable[[], None] = lambda: None
        self.at_arrival: Callable[[], None] = lambda: None

    def model_wanted(self, device: str, model: str) -> None:
        if not self.wanted:
            self.at_first()
        self.wanted.append(model)

    def shard_arrived(self, device: str, model: str, generation: int) -> None:
        self.at_arrival()
        self.arrived.append((model, generation))

    def shard_held(self, device: str, model: str, generation: int) -> None:
        self.held.append((model, generation))

    def made_room(self, device: str, model: str, generation: int, room_for: str) -> None:
        self.made.append((model, generation, room_for))

    def shard_dropped(self, device: str, model: str, generation: int) -> None:
        self.dropped.append((model, generation))


def run(runtime_dir: Path, body: Callable[[WorkerProcess, Told, Vault], Awaitable[None]]) -> None:
    """Runs `body` with a started worker process, which is stopped afterwards."""

    async def main() -> None:
        claim = Claim.take(
            runtime_dir / "host-0.lock", runtime_dir / "host-0.sock", Owner.this_process("test"), what="host-0"
        )
        told, vault = Told(), Vault()
        worker = WorkerProcess("host-0", 1 << 20, "test", claim, vault, told)
        task = worker.start()
        try:
            async with asyncio.timeout(30):
                await body(worker, told, vault)
            assert not task.done()
        finally:
            await worker.stop()
            vault.close()
            claim.close()

    asyncio.run(main())


def scripted(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> list[str]:
    """In place of the first workers these scripts run, with the channel as `channel`; then real ones. Returns what has
    been started so far."""
    started: list[str] = []
    left = list(scripts)

    async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        if not left:
            started.append("worker")
            return await spawn_role(arguments, fds)
        started.append("script")
        code = (
            "import socket, sys\nfrom weightcached.wire import framing\n"
            f"channel = socket.socket(fileno={fds['--channel-fd']})\n{left.pop(0)}"
        )
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            pass_fds=tuple(fds.values()),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    monkeypatch.setattr(workers, "spawn_role", spawn)
    return started


def test_a_killed_worker_loses_nothing(start_service: StartService, checkpoint: Path) -> None:
    """After SIGKILL of the worker the shard is served again with its generation, and nothing is read from disk."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    holder, held = attach("small")
    before = slab_bytes(held)
    checkpoint.unlink()  # so that a second load could not succeed
    for round_number in range(3):
        pid = process_of_role(service, "worker")
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        # Connecting waits in the socket's queue, which outlives the worker.
        worker, fds = attach("small", wait=10)
        with worker, fds:
            assert slab_bytes(fds) == before
            assert generation(fds) == 1
        assert service.status()["devices"][0]["worker_restarts"] == round_number + 1
    assert slab_bytes(held) == before
    held.close()
    holder.close()
    service.stop()


def test_a_worker_that_cannot_be_started_is_tried_again(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """No descriptor or no process to be had is a bad moment and not the end of a service that holds weights."""
    monkeypatch.setattr(workers, "RESTART_DELAYS", (0.0, 0.01))
    failures = [errno.EAGAIN, errno.EMFILE]

    async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        return await spawn_role(arguments, fds)

    monkeypatch.setattr(workers, "spawn_role", spawn)

    async def body(worker: WorkerProcess, told: Told, vault: Vault) -> None:
        await worker.serving.wait()
        assert worker.restarts == 2

    run(runtime_dir, body)


def test_what_a_worker_says_last_is_heard(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """Everything that a worker sent before it died is acted on before its successor is given what is held: a shard that
    it had dropped does not come back."""
    started = scripted(
        monkeypatch,
        "for n in range(150): framing.Frame({'wanted': {'model': str(n)}}).send(channel)\n"
        "framing.Frame({'drop': {'model': 'm', 'generation': 1}}).send(channel)\n",
    )

    async def body(worker: WorkerProcess, told: Told, vault: Vault) -> None:
        with shard("m", 1, b"data") as fds:
            vault.hold("host-0", "m", 1, 4, fds)
        # The loop stands still from the first message to the end of the process, so that the rest is unread at that.
        told.at_first = lambda: wait_for_end(worker.pid) if worker.pid else None
        await worker.serving.wait()
        assert started == ["script", "worker"]
        assert told.wanted == [str(number) for number in range(150)]
        assert told.dropped == [("m", 1)]
        assert await asyncio.to_thread(models_at, runtime_dir) == []

    run(runtime_dir, body)


def models_at(runtime_dir: Path) -> list[str]:
    with Client(runtime_dir / "host-0.sock") as client:
        return [item["model"] for item in client.ask({"op": "status"})["shards"]]


def test_a_broken_message_starts_the_worker_again(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """A message that did not arrive whole, as when this process is out of descriptors, would leave its publisher
    waiting for ever: the worker is ended by its channel, and the next one serves what is held."""
    started = scripted(monkeypatch, "channel.send(b'x' * 70000)\nwhile channel.recv(65536): pass\n")

    async def body(worker: WorkerProcess, told: Told, vault: Vault) -> None:
        with shard("m", 1, b"data") as fds:
            vault.hold("host-0", "m", 1, 4, fds)
        await worker.serving.wait()
        assert started == ["script", "worker"]
        assert await asyncio.to_thread(models_at, runtime_dir) == ["m"]

    run(runtime_dir, body)


IN_PART = {"m": {"state": "failed", "progress": 0.0, "reason": "half of it", "whole": False}}


def test_a_model_in_part_is_named_before_its_rank_is_published(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """What the owner tells at the arrival of a shard is read by the worker before the shard is published."""
    scripted(
        monkeypatch,
        "framing.Frame({'hold': {'model': 'm', 'generation': 1, 'nbytes': 4}}).send(channel)\n"
        "said = [framing.decode(framing.receive(channel)[0]) for _ in range(4)]\n"
        "for one in said: framing.Frame({'wanted': {'model': sorted(one)[0]}}).send(channel)\n"
        "framing.Frame({'drop': {'model': 'm', 'generation': 1}}).send(channel)\n",
    )

    async def body(worker: WorkerProcess, told: Told, vault: Vault) -> None:
        told.at_arrival = lambda: worker.tell_models(IN_PART)
        await worker.serving.wait()
        assert (told.arrived, told.held) == ([("m", 1)], [("m", 1)])
        assert told.wanted == ["models", "serve", "models", "held"]

    run(runtime_dir, body)


def test_a_restarted_worker_gives_out_no_model_in_part(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> None:
    """What is to be known of the models is there before the first client is, who may have waited in the queue."""

    async def body(worker: WorkerProcess, told: Told, vault: Vault) -> None:
        await worker.serving.wait()
        with shard("m", 1, b"data") as fds:
            vault.hold("host-0", "m", 1, 4, fds)
        worker.tell_models(IN_PART)
        for _ in range(3):
            assert worker.pid is not None
            worker.serving.clear()
            os.kill(worker.pid, signal.SIGKILL)
            with Client(runtime_dir / "host-0.sock", hello=False) as client:
                client.send(HELLO)
                client.send({"op": "attach", "model": "m"})
                await worker.serving.wait()
                replies = [await asyncio.to_thread(client.receive) for _ in range(2)]
            assert replies[1] is not None and replies[1]["error"]["code"] == "model-failed", replies
            assert await asyncio.to_thread(models_at, runtime_dir) == ["m"]

    run(runtime_dir, body)


def test_a_late_publish_of_an_older_generation_changes_nothing(
    start_service: StartService, checkpoint: Path, runtime_dir: Path
) -> None:
    """Of two publishers the one that reserved last wins, in the service's books as well: when the older one comes late
    and is dropped, the model is still cached, as the newer one."""
    service = start_service(HOST + model("m", checkpoint, "preload = false")).ready()
    path = runtime_dir / "host-0.sock"
    with Client(path) as older, Client(path) as newer:
        generations = [
            int(client.ask({"op": "reserve", "model": "m", "nbytes": 4})["generation"]) for client in (older, newer)
        ]
        for client, number in ((newer, generations[1]), (older, generations[0])):
            with shard("m", number, b"data") as fds:
                client.ask({"op": "publish"}, [fd.fileno() for fd in fds])
    found = service.model("m")
    assert (found["state"], found["generations"]) == ("cached", generations[1:])
    service.stop()


def test_a_worker_that_can_never_serve_ends_the_service(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """Before anything is cached, a worker that dies again and again is an error with its exit, not an endless start."""
    monkeypatch.setattr(workers, "RESTART_DELAYS", (0.0,))
    started = scripted(monkeypatch, *["raise SystemExit(3)"] * 10)

    async def main() -> None:
        with contextlib.closing(
            Claim.take(runtime_dir / "host-0.lock", runtime_dir / "host-0.sock", Owner.this_process("t"), what="host-0")
        ) as claim:
            worker = WorkerProcess("host-0", 1 << 20, "test", claim, Vault(), Told())
            with pytest.raises(DeviceError, match=r"cannot start \(exit status 3\)"):
                await asyncio.wait_for(worker.start(), 30)
            await worker.stop()

    asyncio.run(main())
    assert len(started) == workers.START_TRIES


class Ending:
    """A child that ends when it is told to."""

    pid = 1

    def __init__(self) -> None:
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self.end


@pytest.mark.parametrize("steps", range(4))
def test_who_awaits_a_childs_end_can_be_cancelled(steps: int) -> None:
    """At any moment, also when the child has just ended: a service that stops waits for the task it has cancelled."""

    async def main() -> None:
        child = Ending()
        waiting = asyncio.create_task(workers.gone(child, "loader"))  # type: ignore[arg-type]
        for _ in range(5):  # turns of the loop, until it waits
            await asyncio.sleep(0)
        child.end.set_result(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        asked = waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() == asked

    asyncio.run(main())


def test_kills_leave_the_exit_status_as_it_is() -> None:
    """A child that is killed again while it ends is said to have died of SIGKILL."""

    async def main() -> list[int]:
        codes = []
        for _ in range(100):
            process = await asyncio.create_subprocess_exec("sleep", "1000")
            for pause in (100e-6, 50e-6, 0):  # in which the child ends, and the loop must not hear of it
                kill(process)
                end = time.monotonic() + pause
                while time.monotonic() < end:
                    pass
            codes.append(await process.wait())
            kill(process)
        return codes

    assert set(asyncio.run(main())) == {-signal.SIGKILL}
