"""health: what a scripted watcher says, and what becomes of the shards and models of a real service."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import Raw, make_shard, publish
from tests.leaks import NoDescriptorLeaks
from tests.running import import_path, wait_for_end
from tests.scripted_gpus import ScriptedGpus
from tests.service.conftest import attach, generation, model, slab_bytes
from weightcached.config import load_config
from weightcached.devices import Device, Memory, find_devices
from weightcached.errors import DeviceError, DeviceFull, ModelFailed, to_wire
from weightcached.fds import FdSet
from weightcached.paths import control_path, lock_path, socket_path
from weightcached.service import health, loads
from weightcached.service.claim import Claim, Owner
from weightcached.service.health import Health, Recovery, watched, why_spoiled
from weightcached.service.main import Service
from weightcached.service.notify import Notifier
from weightcached.wire.connection import Connection

ROOT = Path(__file__).parents[2]
A, B = "GPU-aaaa", "GPU-bbbb"
SECONDS = 20.0

# In the place of the watcher: each line on stdin is a message. It ends with its channel or at the word "end".
SCRIPT = """
import json, socket, sys, threading
from weightcached.wire.framing import Frame
channel = socket.socket(fileno=int(sys.argv[1]))
def say():
    for line in sys.stdin:
        if line.strip() == "end":
            channel.shutdown(socket.SHUT_RD)
            return
        Frame(json.loads(line)).send(channel)
threading.Thread(target=say, daemon=True).start()
channel.recv(1)
"""


class Script:
    """Starts watchers that say what the test tells them to."""

    def __init__(self) -> None:
        self.started: list[asyncio.subprocess.Process] = []
        self.arguments: list[list[str]] = []
        self.fail: OSError | None = None
        self._more = asyncio.Event()

    async def spawn(self, arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        self.arguments.append(arguments)
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, str(fds["--channel-fd"]),
            pass_fds=tuple(fds.values()), stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        self._more.set()
        return process

    async def number(self, count: int) -> asyncio.subprocess.Process:
        """The watcher of that number, from 1, once it has been started."""
        async with asyncio.timeout(SECONDS):
            while len(self.started) < count:
                self._more.clear()
                await self._more.wait()
        return self.started[count - 1]

    def say(self, *messages: dict[str, Any] | str) -> None:
        stdin = self.started[-1].stdin
        assert stdin is not None
        for message in messages:
            stdin.write((message if isinstance(message, str) else json.dumps(message)).encode() + b"\n")


class Told:
    """Who would act on what is found, and only writes it down."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []
        self.users: list[str] = []
        self.asked = 0
        self.answer = asyncio.Event()
        self.answer.set()
        self.verified = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._more = asyncio.Event()

    def device_lost(self, device: str, error: DeviceError) -> None:
        self._say("lost", device, str(error))

    def device_back(self, device: str) -> None:
        self._say("back", device)

    async def holders(self, device: str) -> list[str]:
        self.asked += 1
        await self.answer.wait()
        return self.users

    async def verify_device(self, device: str, cause: str) -> None:
        self._say("verify", device, cause)
        await self.go_on.wait()

    async def wait(self, count: int) -> list[tuple[str, ...]]:
        """The first `count` things that were said, once they were."""
        async with asyncio.timeout(SECONDS):
            while len(self.said) < count:
                self._more.clear()
                await self._more.wait()
        assert len(self.said) == count
        return self.said

    def _say(self, *words: str) -> None:
        self.said.append(words)
        self._more.set()


def xid(number: int, device: str = A, pid: int | None = None) -> dict[str, Any]:
    command = "python" if pid is not None else None
    return {"xid": {"device": device, "xid": number, "pid": pid, "command": command}}


def run(body: Callable[[Health, Script, Told], Awaitable[None]], *, seconds: float = 0.0) -> None:
    """Runs `body` with a scripted watcher of two GPUs that has said that it watches both."""

    async def main() -> None:
        script, told = Script(), Told()
        checked = Health([A, B], told, spawn=script.spawn, verify_seconds=seconds)
        checked.start()
        try:
            await script.number(1)
            script.say({"watching": {"devices": [A, B]}})
            async with asyncio.timeout(2 * SECONDS):
                await checked.watching.wait()
                await body(checked, script, told)
        finally:
            await checked.stop()
        assert script.started[-1].returncode is not None

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Returns when it is true, for what nothing announces."""
    for _ in range(int(SECONDS / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not come true")


async def heard(checked: Health, script: Script, *messages: dict[str, Any]) -> None:
    """Says these, and returns when they have been acted on: the count of a later Xid proves it."""
    before = checked.describe(B)["xids"].get("1", 0)
    script.say(*messages, xid(1, B))
    await until(lambda: checked.describe(B)["xids"].get("1", 0) > before)


def test_a_fatal_xid_loses_its_device_until_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    """Told once, whatever else comes of the same device, which is counted; the other device is not concerned. Then it
    is back, once, and can be lost again."""

    async def body(checked: Health, script: Script, told: Told) -> None:
        gone = {"gone": {"device": A, "problem": "GPU is lost"}}
        await heard(checked, script, xid(79), xid(79), xid(31), gone, {"ecc": {"device": A}})
        why = "Xid 79 (GPU has fallen off the bus)"
        assert told.said == [("lost", A, f"{A}: the device is lost: {why}")]
        assert checked.describe(A) == {"xids": {"31": 1, "48": 1, "79": 2}, "lost": why}
        assert checked.describe(B)["lost"] is None
        back = {"back": {"device": A}}
        await heard(checked, script, back, back)
        assert told.said[1:] == [("back", A)]
        await heard(checked, script, gone)
        assert told.said[2:] == [("lost", A, f"{A}: the device is lost: GPU is lost")]

    run(body)
    assert f"{A} is lost: Xid 79 (GPU has fallen off the bus); what was cached there is dropped" in caplog.text


def test_a_double_bit_error_is_fatal() -> None:
    """NVML has an event of its own for it, which counts as the Xid of the kernel log."""

    async def body(checked: Health, script: Script, told: Told) -> None:
        await heard(checked, script, {"ecc": {"device": A}})
        assert told.said == [("lost", A, f"{A}: the device is lost: Xid 48 (double-bit ECC error)")]
        assert checked.describe(A)["xids"] == {"48": 1}

    run(body)


def test_an_applications_xid_is_counted_logged_and_verified(caplog: pytest.LogCaptureFixture) -> None:
    """With the process where the kernel log names it, else with those that could have done it. Nothing is lost."""
    caplog.set_level(logging.INFO)

    async def body(checked: Health, script: Script, told: Told) -> None:
        script.say(xid(31, pid=4242))
        assert await told.wait(1) == [("verify", A, "Xid 31 (GPU memory page fault)")]
        told.users = ["pid 7 (vllm)", "pid 8 (python)"]
        await heard(checked, script, xid(13, B))
        await told.wait(2)
        assert checked.describe(A) == {"xids": {"31": 1}, "lost": None}

    run(body, seconds=3600.0)
    assert f"{A}: Xid 31 (GPU memory page fault), by pid 4242 (python); an engine's own fault" in caplog.text
    assert f"{B}: Xid 13 (graphics engine exception), by one of pid 7 (vllm), pid 8 (python);" in caplog.text


def test_many_faults_cause_one_verification_and_one_after_it() -> None:
    """One at a time for each device; what came meanwhile is verified once more afterwards, and not for each fault."""

    async def body(checked: Health, script: Script, told: Told) -> None:
        told.go_on.clear()
        script.say(xid(31))
        await told.wait(1)
        await heard(checked, script, xid(31), xid(43), xid(31), xid(45))
        assert len(told.said) == 1
        script.say(xid(31, B))
        assert (await told.wait(2))[1] == ("verify", B, "Xid 31 (GPU memory page fault)")
        told.go_on.set()
        assert (await told.wait(3))[2][:2] == ("verify", A)
        await heard(checked, script)
        assert len(told.said) == 3

    run(body)


def test_many_faults_ask_for_holders_once(caplog: pytest.LogCaptureFixture) -> None:
    """A crash brings a fault for each part of the GPU: its worker is asked once for all that came meanwhile."""

    async def body(checked: Health, script: Script, told: Told) -> None:
        told.users = ["pid 7 (vllm)"]
        told.answer.clear()
        await heard(checked, script, xid(13), xid(13), xid(13), xid(31))
        assert told.asked == 1
        told.answer.set()
        await until(lambda: "Xid 31" in caplog.text)
        assert told.asked == 1

    run(body, seconds=3600.0)
    assert f"{A}: Xid 13 (graphics engine exception) x3, by one of pid 7 (vllm); an engine's own fault" in caplog.text
    assert f"{A}: Xid 31 (GPU memory page fault), by one of pid 7 (vllm); an engine's own fault" in caplog.text


def test_none_within_a_minute_of_the_last() -> None:
    """After one verification the next one waits, however many faults ask for it."""

    async def body(checked: Health, script: Script, told: Told) -> None:
        script.say(xid(31))
        await told.wait(1)
        await heard(checked, script, xid(31), xid(31))
        assert len(told.said) == 1

    run(body, seconds=3600.0)
    assert health.VERIFY_SECONDS == 60.0


def test_other_xids_are_counted_only(caplog: pytest.LogCaptureFixture) -> None:
    """Logged with their meaning; nobody is blamed, nothing is verified, nothing is lost."""

    async def body(checked: Health, script: Script, told: Told) -> None:
        await heard(checked, script, xid(63), xid(63), xid(777))
        assert told.said == []
        assert checked.describe(A) == {"xids": {"63": 2, "777": 1}, "lost": None}

    run(body)
    assert f"{A}: Xid 63 (GPU memory was remapped)" in caplog.text
    assert f"{A}: Xid 777" in caplog.text


def test_a_watcher_that_ends_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The service knows what it knew: counts go on, and a lost device is back when the new watcher reaches it."""
    monkeypatch.setattr(health, "RESTART_DELAYS", (0.0,))

    async def body(checked: Health, script: Script, told: Told) -> None:
        await heard(checked, script, xid(79))
        script.say("end")
        await script.number(2)
        script.say({"gone": {"device": A, "problem": "GPU is lost"}}, {"watching": {"devices": [B]}}, xid(1, B))
        await checked.watching.wait()
        assert [words[0] for words in told.said] == ["lost"]
        script.started[-1].kill()
        await script.number(3)
        script.say({"watching": {"devices": [A, B]}})
        assert (await told.wait(2))[1] == ("back", A)
        assert checked.describe(A) == {"xids": {"79": 1}, "lost": None}
        assert script.arguments == [["watch-devices", A, B]] * 3

    run(body)
    assert "device watcher ended (exit status 0), errors of GPU-aaaa, GPU-bbbb are not seen; starting" in caplog.text
    assert "device watcher ended (signal SIGKILL)" in caplog.text


def test_a_watcher_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process to be had: what is cached must outlive that."""
    monkeypatch.setattr(health, "RESTART_DELAYS", (0.0,))

    async def body(checked: Health, script: Script, told: Told) -> None:
        script.fail = OSError(errno.EAGAIN, "Resource temporarily unavailable")
        script.say("end")
        await script.number(2)
        assert len(script.arguments) == 3

    run(body)


@pytest.mark.parametrize(
    "message", [xid(79, "GPU-cccc"), {"watching": {"devices": ["GPU-cccc"]}}, {"hello": {}}], ids=str
)
def test_a_watcher_that_makes_no_sense_is_replaced(monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]) -> None:
    """A device that nobody asked about, or a word that is none: it is killed, and nothing is done by its word."""
    monkeypatch.setattr(health, "RESTART_DELAYS", (0.0,))

    async def body(checked: Health, script: Script, told: Told) -> None:
        script.say(message)
        await script.number(2)
        assert script.started[0].returncode == -signal.SIGKILL
        assert told.said == []

    run(body)


def test_stopping_ends_the_watcher_and_its_children(descriptors: NoDescriptorLeaks) -> None:
    """A child that looks for a lost device goes with its watcher, and no descriptor is left."""

    async def main() -> None:
        pids: list[int] = []

        async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec(
                "sh", "-c", "sleep 1000 & echo $!; wait", stdout=subprocess.PIPE, start_new_session=True
            )
            assert process.stdout is not None
            pids.append(int(await process.stdout.readline()))
            return process

        checked = Health([A], Told(), spawn=spawn)
        checked.start()
        await until(lambda: bool(pids))
        await checked.stop()
        wait_for_end(pids[0])

    asyncio.run(main())


def test_without_gpus_nothing_runs() -> None:
    """Host memory has no NVML: no process is started, and a status says that nothing is wrong."""

    async def main() -> None:
        script = Script()
        checked = Health([], Told(), spawn=script.spawn)
        checked.start()
        assert checked.describe("host-0") == {"xids": {}, "lost": None}
        await checked.stop()
        assert script.arguments == []

    asyncio.run(main())


def test_what_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    """GPUs and MIG instances, not host memory; a GPU whose state goes when nobody has it open is warned about."""
    memory = Memory(1, 1)
    devices = [Device("GPU-1", "", memory, False), Device("MIG-2", "", memory), Device("host-0", "", memory)]
    assert watched(devices) == ["GPU-1", "MIG-2"]
    assert caplog.text.count("persistence mode is off") == 1
    assert "GPU-1: persistence mode is off; enable it (nvidia-smi -pm 1)" in caplog.text


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"differ": [], "tensors": 3}, None),
        ({"differ": ["w"], "tensors": 3}, "1 of 3 tensors differ after Xid 31: w"),
        ({"differ": list("abcd"), "tensors": 9}, "4 of 9 tensors differ after Xid 31: a, b, c"),
        ({"error": "CUDA_ERROR_ECC_UNCORRECTABLE"}, "CUDA: broken (after Xid 31)"),
        ({"error": "CUDA_ERROR_CONTAINED"}, "CUDA: broken (after Xid 31)"),
        ({"error": "CUDA_ERROR_OUT_OF_MEMORY"}, None),
        ({"error": None}, None),
    ],
    ids=str,
)
def test_what_speaks_against_a_shard(result: dict[str, Any], why: str | None) -> None:
    """Other bytes, or memory that cannot be read; a verifier that finds no memory for itself says nothing."""
    if "error" in result:
        fields = {"status": result["error"]} if result["error"] else {}
        result = {"error": to_wire(DeviceError(device="CUDA", problem="broken", **fields))}
    assert why_spoiled(result, "Xid 31") == why


# A real service on host memory, which has a scripted watcher as if host-0 were a GPU.


class Whole:
    """The service in this process, and what its clients do in threads of their own."""

    def __init__(self, service: Service, script: Script) -> None:
        self.service = service
        self.script = script

    async def attach(self, name: str, wait: float = 0.0) -> tuple[Connection, FdSet]:
        return await asyncio.to_thread(attach, name, wait)

    async def refusal(self, name: str, wait: float = 0.0) -> ModelFailed:
        with pytest.raises(ModelFailed) as caught:
            await self.attach(name, wait)
        return caught.value

    def state(self, name: str) -> str:
        return self.service.models[name].state


def whole(runtime_dir: Path, tmp_path: Path, config: str, body: Callable[[Whole], Awaitable[None]]) -> None:
    """Runs `body` with a service that is ready and watches host-0."""
    file = tmp_path / "test.toml"
    file.write_text('devices = ["host-0", "host-1"]\nready = "listening"\n' + config)

    async def main() -> None:
        with contextlib.ExitStack() as held:
            owner = Owner.this_process("test")
            claims = {}
            for name in ("host-0", "host-1"):
                claims[name] = Claim.take(lock_path(name), socket_path(name, create=True), owner, what=name)
                held.callback(claims[name].close)
            control = control_path("test")
            own = Claim.take(control.with_suffix(".lock"), control, owner, what="test")
            held.callback(own.close)
            devices = find_devices(["host-0", "host-1"])
            service = Service(load_config(file), "test", devices, claims, own, Notifier.from_environ())
            script = Script()
            recovery = Recovery(service, service._model_changed, service._control.holders)
            service.health = Health(["host-0"], recovery, spawn=script.spawn, verify_seconds=0.0)
            running = asyncio.create_task(service.run())
            try:
                await script.number(1)
                script.say({"watching": {"devices": ["host-0"]}})
                async with asyncio.timeout(2 * SECONDS):
                    await body(Whole(service, script))
            finally:
                service.stop()
                assert await running == 0

    asyncio.run(main())


def next_event(lease: Connection) -> dict[str, Any]:
    return lease.next_event(SECONDS)


def test_a_lost_device_is_loaded_again_when_it_is_back(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, descriptors: NoDescriptorLeaks
) -> None:
    """The holder hears it on its lease; nothing of the device is held any more; everybody hears the reason, also from a
    worker that was started since. When it is back, what is preloaded is loaded, by the old name, as a new generation;
    what is loaded on demand waits for its demand."""
    why = "the device is lost: Xid 79 (GPU has fallen off the bus)"

    async def body(all: Whole) -> None:
        service, script = all.service, all.script
        await until(lambda: all.state("small") == "cached")
        lease, fds = await all.attach("small")
        other, other_fds = await all.attach("on-demand", 10.0)
        before = slab_bytes(fds)

        script.say(xid(79, "host-0"))
        event = await asyncio.to_thread(next_event, lease)
        assert (event["what"], event["model"], event["generation"], event["reason"]) == ("lost", "small", 1, why)
        assert (await asyncio.to_thread(next_event, other))["model"] == "on-demand"
        assert service.vault.of_device("host-0") == []
        for name in ("small", "on-demand"):
            error = service.models[name].error
            assert (all.state(name), str(error)) == ("failed", f"host-0: {why}")
            assert isinstance(error, DeviceError)
        assert str(await all.refusal("small", 10.0)) == f"small is not on host-0: {why}"
        assert service._control is not None
        status = (await service._control._status())["devices"][0]
        assert (status["lost"], status["xids"]) == ("Xid 79 (GPU has fallen off the bus)", {"79": 1})
        assert {shard["state"] for shard in status["shards"]} == {"draining"}
        assert slab_bytes(fds) == before  # a mapping of its own is the holder's
        for item in (lease, fds, other, other_fds):
            item.close()

        pid = service.workers["host-0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await all.refusal("small", 10.0)).reason == why

        script.say({"back": {"device": "host-0"}})
        await until(lambda: all.state("small") == "cached")
        lease, fds = await all.attach("small")
        with lease, fds:
            assert (slab_bytes(fds), generation(fds)) == (before, 2)
        assert all.state("on-demand") == "absent"
        lease, fds = await all.attach("on-demand", 10.0)
        lease.close()
        fds.close()

    config = model("small", checkpoint) + model("on-demand", checkpoint, "preload = false")
    whole(runtime_dir, tmp_path, config, body)


def test_what_is_loaded_after_a_return_stays(runtime_dir: Path, tmp_path: Path, checkpoint: Path) -> None:
    """As at a start: of two models that do not fit together the second is refused, and does not evict the first."""

    async def body(all: Whole) -> None:
        def states() -> list[str]:
            return [all.state(name) for name in ("first", "second")]

        await until(lambda: states() == ["cached", "failed"])
        all.script.say(xid(79, "host-0"))
        await until(lambda: all.state("first") == "failed")
        all.script.say({"back": {"device": "host-0"}})
        await until(lambda: states() == ["cached", "failed"])
        assert isinstance(all.service.models["second"].error, DeviceFull)

    config = "memory_limit = 6000\n" + model("first", checkpoint) + model("second", checkpoint)
    whole(runtime_dir, tmp_path, config, body)


def test_a_load_to_a_lost_device_is_ended(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader is killed instead of waiting for a device that may hang; the next one after the return succeeds."""
    stopped: list[asyncio.subprocess.Process] = []
    spawn_role = loads.spawn_role

    async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        process = await spawn_role(arguments, fds)
        if not stopped:
            stopped.append(process)
            process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(loads, "spawn_role", spawn)

    async def body(all: Whole) -> None:
        await until(lambda: bool(stopped))
        all.script.say({"gone": {"device": "host-0", "problem": "GPU is lost"}})
        await until(lambda: stopped[0].returncode is not None)
        assert all.state("small") == "failed"
        assert "GPU is lost" in str(await all.refusal("small"))
        all.script.say({"back": {"device": "host-0"}})
        await until(lambda: all.state("small") == "cached")

    whole(runtime_dir, tmp_path, model("small", checkpoint), body)


def test_a_publisher_for_a_lost_device_is_ended(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command and its other ranks are killed; after the return it is run again."""
    monkeypatch.setenv("PYTHONPATH", import_path())
    gate, pids = tmp_path / "gate", tmp_path / "pids"
    script = f'echo $$ >> {pids}; [ -e {gate} ] || exec sleep 600; exec {sys.executable} "$0"'
    command = ["sh", "-c", script, str(ROOT / "tests" / "service" / "publishing.py")]

    async def body(all: Whole) -> None:
        await until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        running = [int(pid) for pid in pids.read_text().split()]
        all.script.say({"gone": {"device": "host-0", "problem": "GPU is lost"}})
        await until(lambda: all.state("made") == "failed")
        for pid in running:
            await asyncio.to_thread(wait_for_end, pid)
        assert "GPU is lost" in str(await all.refusal("made"))
        gate.touch()
        all.script.say({"back": {"device": "host-0"}})
        await until(lambda: all.state("made") == "cached")

    more = ["tensor_parallel = 2", f"publisher = {json.dumps(command)}"]
    whole(runtime_dir, tmp_path, model("made", checkpoint, *more), body)


def test_after_an_engines_fault_what_differs_is_lost_alone(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every shard of the device is verified; the flipped one is dropped and its holder told, the others stay, as does
    the same model on the device that had no fault. Without a fault nothing is verified at all."""
    caplog.set_level(logging.INFO)
    data = [Raw("w", "U8", (512,), os.urandom(512))]

    async def body(all: Whole) -> None:
        service = all.service
        for device in ("host-0", "host-1"):
            await asyncio.to_thread(publish, make_shard(data, model="bad", device=device, checksums=True, flip=["w"]))
        await asyncio.to_thread(publish, make_shard(data, model="good", checksums=True))
        await asyncio.to_thread(publish, make_shard(data, model="unknown"))
        lease, fds = await all.attach("bad")
        all.script.say(xid(31, "host-0"))
        event = await asyncio.to_thread(next_event, lease)
        why = "1 of 1 tensors differ after Xid 31 (GPU memory page fault): w"
        assert (event["what"], event["model"], event["reason"]) == ("lost", "bad", why)
        lease.close()
        fds.close()
        held = {(shard.device, shard.model) for name in service.workers for shard in service.vault.of_device(name)}
        assert held == {("host-0", "good"), ("host-0", "unknown"), ("host-1", "bad")}
        lease, fds = await all.attach("good")
        lease.close()
        fds.close()

    whole(runtime_dir, tmp_path, "", body)
    assert f"host-0: Xid 31 (GPU memory page fault), by one of pid {os.getpid()} (" in caplog.text


def test_a_configured_model_that_differs_has_failed(runtime_dir: Path, tmp_path: Path, checkpoint: Path) -> None:
    """It says why and what to do; loading it again makes it good."""
    data = [Raw("w", "U8", (512,), os.urandom(512))]

    async def body(all: Whole) -> None:
        flipped = make_shard(data, model="small", checksums=True, flip=["w"])
        await asyncio.to_thread(publish, flipped)
        await until(lambda: all.state("small") == "cached")
        all.script.say(xid(31, "host-0"))
        await until(lambda: all.state("small") == "failed")
        reason = (await all.refusal("small")).reason
        assert reason.startswith("small: its generation 1 on host-0 is lost: 1 of 1 tensors differ after Xid 31")
        assert reason.endswith("; load it again: weightcachectl load small")
        all.service.load("small")
        await until(lambda: all.state("small") == "cached")

    whole(runtime_dir, tmp_path, model("small", checkpoint, "preload = false"), body)


def test_an_engines_fault_loses_nothing(
    runtime_dir: Path, tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is as it was published stays where it is, with its leases; its state does not change for a moment."""
    caplog.set_level(logging.INFO)

    async def body(all: Whole) -> None:
        await until(lambda: all.state("small") == "cached")
        lease, fds = await all.attach("small")
        with lease, fds:
            all.script.say(xid(31, "host-0", 4242), xid(43, "host-0", 4242))
            await until(lambda: caplog.text.count("bytes verified in") >= 1)
            status = (await all.service._control._status())["devices"][0]
            assert status["xids"] == {"31": 1, "43": 1}
            assert [len(shard["leases"]) for shard in status["shards"]] == [1]
            assert all.state("small") == "cached"

    whole(runtime_dir, tmp_path, model("small", checkpoint), body)
    assert "GPU memory page fault), by pid 4242 (python); an engine's own fault" in caplog.text


def test_a_real_watcher_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The two ends agree on every message: which devices, an Xid, a loss, and the return."""
    gpus = ScriptedGpus(tmp_path, [A, B])
    for name, value in gpus.environ.items():
        monkeypatch.setenv(name, value)

    async def main() -> None:
        told = Told()
        checked = Health([A, B], told)
        checked.start()
        try:
            async with asyncio.timeout(SECONDS):
                await checked.watching.wait()
                gpus.say(device=B, xid=31)
                await told.wait(1)
                gpus.say(device=B, ecc=True)
                assert (await told.wait(2))[1][:2] == ("lost", B)
                gpus.set(A, "lost")
                gpus.say(error=15)
                assert (await told.wait(3))[2][:2] == ("lost", A)
                gpus.set(A, "ok")
                assert {words[:2] for words in (await told.wait(5))[3:]} == {("back", A), ("back", B)}
                assert checked.describe(B) == {"xids": {"31": 1, "48": 1}, "lost": None}
        finally:
            await checked.stop()
            gpus.close()

    asyncio.run(main())
