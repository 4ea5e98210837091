"""Verifying what a real service holds: published by hand, since a sealed slab cannot be changed any more."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import Raw, make_shard, publish
from tests.leaks import NoDescriptorLeaks
from tests.running import RunningService, children_of, process_of_role, wait_for_end
from tests.service.conftest import HOST, StartService, model
from weightcached.errors import DeviceError
from weightcached.fds import FdSet
from weightcached.service import verify
from weightcached.service.vault import HeldShard, Vault
from weightcached.service.verify import Verifications
from weightcached.wire import framing
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Verify, request_to_json

ROOT = Path(__file__).parents[2]
TENSORS = [
    Raw("a", "U8", (50_000,), os.urandom(50_000)),
    Raw("b", "F32", (0,), b""),
    Raw("c", "F32", (2, 2), os.urandom(16)),
]
BOTH = 'devices = ["host-0", "host-1"]\n'


def test_an_untouched_model_is_verified(start_service: StartService) -> None:
    """One line with tensors, bytes and time, exit code 0; as JSON one object with the numbers."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", slabs=2, aliases={"tied": "a"}, checksums=True))
    assert service.ctl("verify", "m").startswith("m on host-0: 3 tensors, 48.8 KiB verified in ")
    found = json.loads(service.ctl("verify", "m", "--json"))
    (result,) = found["results"]
    assert (found["schema"], found["model"]) == (1, "m")
    assert result == {
        "device": "host-0",
        "generation": 1,
        "tensors": 3,
        "bytes": 50_016,
        "differ": [],
        "seconds": result["seconds"],
    }
    service.stop()


def test_what_the_loader_loaded_is_verified(start_service: StartService, checkpoint: Path) -> None:
    """The loader records checksums: a loaded model can be verified without further ado."""
    service = start_service(HOST + model("m", checkpoint)).ready()
    assert service.ctl("verify", "m").startswith("m on host-0: 2 tensors, 4.0 KiB verified in ")
    service.stop()


def test_a_planted_flip_is_found(start_service: StartService) -> None:
    """The tensor is named, on stdout and in the log, and the exit code is 1; with --json too."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", checksums=True, flip=["c"]))
    publish(make_shard(TENSORS, model="good", checksums=True))
    assert service.ctl("verify", "m", code=1) == ""
    text = _stdout(service, "verify", "m")
    assert text == "m on host-0: 1 of 3 tensors differ: c; evict the model and load it again\n"
    assert json.loads(_stdout(service, "verify", "m", "--json"))["results"][0]["differ"] == ["c"]
    assert "m on host-0, generation 1: 1 of 3 tensors are not what was published: c" in service.log
    service.ctl("verify", "good")
    service.stop()


def test_many_that_differ_are_counted(start_service: StartService) -> None:
    """A line stays a line: ten names and how many more; --json has all of them."""
    service = start_service(HOST).ready()
    many = [Raw(f"layer.{number}", "U8", (8,), os.urandom(8)) for number in range(3000)]
    publish(make_shard(many, model="m", checksums=True, flip={raw.name for raw in many}))
    text = _stdout(service, "verify", "m")
    assert "3000 of 3000 tensors differ: layer.0, layer.1, " in text
    assert "layer.9 and 2990 more; evict" in text
    assert len(json.loads(_stdout(service, "verify", "m", "--json"))["results"][0]["differ"]) == 3000
    service.stop()


def test_without_checksums_nothing_is_verified(start_service: StartService) -> None:
    """A refusal with exit code 1, never a success: nothing was compared."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m"))
    assert "m on host-0: m: generation 1 on host-0 has no checksums recorded" in service.ctl("verify", "m", code=1)
    assert _stdout(service, "verify", "m") == ""
    assert json.loads(_stdout(service, "verify", "m", "--json"))["results"][0]["error"]["code"] == "model-error"
    service.stop()


def test_each_device_has_its_own_result(start_service: StartService) -> None:
    """A model on two devices is verified on both at once; one that differs makes the exit code 1; --device picks."""
    service = start_service(BOTH).ready()
    publish(make_shard(TENSORS, model="m", checksums=True))
    publish(make_shard(TENSORS, model="m", device="host-1", checksums=True, flip=["a"]))
    first, second = _stdout(service, "verify", "m").splitlines()
    assert first.startswith("m on host-0: 3 tensors, ")
    assert second.startswith("m on host-1: 1 of 3 tensors differ: a")
    assert len(service.ctl("verify", "m", "--device", "host-0").splitlines()) == 1
    service.ctl("verify", "m", "--device", "host-1", code=1)
    service.stop()


def test_unknown_names_are_refused(start_service: StartService) -> None:
    """A model that is not cached, there or at all, and a device that is none: exit code 4 and what there is."""
    service = start_service(BOTH).ready()
    publish(make_shard(TENSORS, model="m", checksums=True))
    assert "no model big on weightcached@test; there: m" in service.ctl("verify", "big", code=4)
    assert "no model m on host-1; there: none" in service.ctl("verify", "m", "--device", "host-1", code=4)
    assert "no device host-7" in service.ctl("verify", "m", "--device", "host-7", code=4)
    service.stop()


def test_a_shard_may_be_evicted_meanwhile(start_service: StartService) -> None:
    """The verifier has descriptors of its own: it finishes with what was cached when it was asked."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", checksums=True))
    with ThreadPoolExecutor(1) as pool:
        verifying, pid = _stopped_verifier(service, pool)
        service.ctl("evict", "m")
        os.kill(pid, signal.SIGCONT)
        assert "3 tensors" in verifying.result(30)
    wait_for_end(pid)
    service.ctl("verify", "m", code=4)
    service.stop()


def test_a_verifier_that_is_killed_is_an_error(start_service: StartService) -> None:
    """As a fault of the device would end it: the error names the device and the signal; the service goes on."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", checksums=True))
    with ThreadPoolExecutor(1) as pool:
        verifying, pid = _stopped_verifier(service, pool, code=1)
        os.kill(pid, signal.SIGKILL)
        text = verifying.result(30)
    assert "m on host-0: host-0: the verifier of m ended by signal SIGKILL before it answered" in text
    service.ctl("verify", "m")
    service.stop()


def test_a_client_that_goes_away_ends_the_verifier(start_service: StartService) -> None:
    """Ctrl-C of the command is the end of the process that works for it; the next request is served."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", checksums=True))
    before = _descriptors(service)
    with _asking(service):
        pid = _stop_verifier(service)
        with _asking(service):  # one that goes away before it is its turn
            service.status()
    wait_for_end(pid)
    service.ctl("verify", "m")
    assert _descriptors(service) <= before  # a child that was being started may have been counted before
    service.stop()


def test_stopping_ends_the_verifier(start_service: StartService) -> None:
    """SIGTERM of the service in mid verify: the process is gone when the service is, and the end is a clean one."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", checksums=True))
    with ThreadPoolExecutor(1) as pool:
        verifying, pid = _stopped_verifier(service, pool, code=1)
        service.process.send_signal(signal.SIGTERM)
        service.wait()
        assert not Path(f"/proc/{pid}").exists()
        assert "the service stops" in verifying.result(30) or "closed" in verifying.result(30)
    service.stop()


def test_requests_are_served_one_after_the_other(start_service: StartService) -> None:
    """A second request while one is under way starts no second verifier of the shard; both are answered."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", checksums=True))
    with _asking(service) as first:
        pid = _stop_verifier(service)
        with _asking(service) as second:
            service.status()  # which the service answers after it has taken the second request
            assert [child for child in children_of(service.process.pid) if _is_verifier(child)] == [pid]
            os.kill(pid, signal.SIGCONT)
            for answer in (_answer(first), _answer(second)):
                assert answer["results"][0]["differ"] == []
    service.stop()


def test_no_descriptor_is_left_behind(start_service: StartService) -> None:
    """After verifies of all outcomes, and one that was cut off, the service holds what it held before."""
    service = start_service(HOST).ready()
    publish(make_shard(TENSORS, model="m", slabs=3, checksums=True))
    publish(make_shard(TENSORS, model="flipped", checksums=True, flip=["a"]))
    publish(make_shard(TENSORS, model="none"))
    service.ctl("verify", "m")
    before = _descriptors(service)
    for _ in range(3):
        service.ctl("verify", "m")
        service.ctl("verify", "flipped", code=1)
        service.ctl("verify", "none", code=1)
    with ThreadPoolExecutor(1) as pool:
        verifying, pid = _stopped_verifier(service, pool, code=1)
        os.kill(pid, signal.SIGKILL)
        verifying.result(30)
    assert _descriptors(service) == before
    service.stop()


def test_stop_waits_until_every_verifier_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only killed: when `stop` returns, the process is reaped, none is started any more, and who asked has errors
    that say it."""
    started: list[asyncio.subprocess.Process] = []

    async def main() -> None:
        verifications = Verifications()
        under_way = asyncio.Event()

        async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec("sleep", "1000")
            started.append(process)
            under_way.set()
            return process

        monkeypatch.setattr(verify, "spawn_role", spawn)
        verifying = asyncio.create_task(verifications.verify(vault.of_device("host-0")))
        await asyncio.wait_for(under_way.wait(), 10)
        await verifications.stop()
        assert started[0].returncode == -signal.SIGKILL
        first, second = await verifying
        assert "ended by signal SIGKILL before it answered" in first["error"]["message"]
        assert "is not started: given up" in second["error"]["message"]
        assert len(started) == 1

    with _vault() as vault:
        asyncio.run(main())


def test_the_verifiers_of_a_lost_device_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one under way is killed, so that it does not keep the device, and one whose turn has not come never starts;
    those of another device are left alone."""
    started: list[asyncio.subprocess.Process] = []

    async def main() -> None:
        verifications = Verifications()
        under_way = asyncio.Event()

        async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec("sleep", "1000", pass_fds=tuple(fds.values()))
            started.append(process)
            under_way.set()
            return process

        monkeypatch.setattr(verify, "spawn_role", spawn)
        first = asyncio.create_task(verifications.verify(vault.of_device("host-0")))
        second = asyncio.create_task(verifications.verify(vault.of_device("host-0")))
        await asyncio.wait_for(under_way.wait(), 10)
        verifications.abandon("host-1")
        assert [process.returncode for process in started] == [None]
        verifications.abandon("host-0")
        results = [*await asyncio.wait_for(first, 10), *await asyncio.wait_for(second, 10)]
        ends = ["ended by signal SIGKILL", *["is not started: given up"] * 3]
        assert [end in result["error"]["message"] for end, result in zip(ends, results, strict=True)] == [True] * 4
        assert len(started) == 1

    with _vault() as vault:
        asyncio.run(main())


def test_one_verifier_at_a_time_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may need a CUDA context on a device that is nearly full: the next one waits; another device's does not."""
    running: dict[str, asyncio.subprocess.Process] = {}
    started: list[str] = []

    async def main() -> None:
        verifications = Verifications()
        changed = asyncio.Event()

        async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
            device = arguments[1]
            assert device not in running or running[device].returncode is not None
            running[device] = await asyncio.create_subprocess_exec("sleep", "1000", pass_fds=tuple(fds.values()))
            started.append(device)
            changed.set()
            return running[device]

        async def until(*devices: str) -> None:
            while len(started) < len(devices):
                changed.clear()
                await asyncio.wait_for(changed.wait(), 10)
            assert sorted(started) == sorted(devices)

        monkeypatch.setattr(verify, "spawn_role", spawn)
        both = [*vault.of_device("host-0"), *vault.of_device("host-1")]
        verifying = asyncio.create_task(verifications.verify(both))
        await until("host-0", "host-1")
        running["host-0"].kill()
        await until("host-0", "host-1", "host-0")
        for process in running.values():
            if process.returncode is None:
                process.kill()
        results = await asyncio.wait_for(verifying, 10)
        assert [(result["device"], result["generation"]) for result in results] == [
            ("host-0", 1), ("host-0", 2), ("host-1", 1),
        ]  # fmt: skip

    with _vault(("host-0", 1), ("host-0", 2), ("host-1", 1)) as vault:
        asyncio.run(main())


@pytest.mark.parametrize("where", ["spawn", "socketpair"])
def test_a_verifier_that_cannot_be_started_is_an_error(
    monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks, where: str
) -> None:
    """No process and no descriptor to be had: an answer that says so, nothing left open, and the shard stays held."""

    async def no_process(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    given = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)] if where == "socketpair" else []

    def no_second_socket(*arguments: object) -> tuple[socket.socket, socket.socket]:
        if not given:
            raise OSError(errno.EMFILE, "Too many open files")
        return given.pop()

    async def main(shards: list[HeldShard]) -> None:
        verifications = Verifications()
        if where == "spawn":
            monkeypatch.setattr(verify, "spawn_role", no_process)
            for result in await verifications.verify(shards):
                assert "cannot be started: Resource temporarily unavailable" in result["error"]["message"]
        else:  # the first has one, the second has none
            with monkeypatch.context() as patch:
                patch.setattr(verify.socket, "socketpair", no_second_socket)
                with pytest.raises(DeviceError, match="no channel to a verifier: Too many open files"):
                    await verifications.verify(shards)
        await verifications.stop()

    with _vault() as vault:
        asyncio.run(main(vault.of_device("host-0")))
        assert [shard.generation for shard in vault.of_device("host-0")] == [1, 2]


@contextmanager
def _vault(*held: tuple[str, int]) -> Iterator[Vault]:
    """Holds these generations of a model on these devices; none named: two on host-0."""
    vault = Vault()
    for device, generation in held or (("host-0", 1), ("host-0", 2)):
        shard = make_shard(TENSORS, device=device, generation=generation)
        fds = FdSet(item.steal() for item in (shard.manifest, *shard.slabs))
        vault.hold(device, "m", generation, shard.head.nbytes, fds)
    yield vault
    vault.close()


def _stdout(service: RunningService, *arguments: str) -> str:
    """What the command prints, whatever its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "weightcached.cli.ctl", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    return done.stdout


def _stopped_verifier(service: RunningService, pool: ThreadPoolExecutor, code: int = 0) -> tuple[Future[str], int]:
    """``weightcachectl verify m`` under way: what it will print, and the pid of its verifier, which is stopped."""
    verifying = pool.submit(service.ctl, "verify", "m", code=code)
    return verifying, _stop_verifier(service)


def _stop_verifier(service: RunningService) -> int:
    """The pid of the verifier, which is stopped, once the service knows that it has started."""
    pid = process_of_role(service, "verifier")
    os.kill(pid, signal.SIGSTOP)
    service.status()
    return pid


def _is_verifier(pid: int) -> bool:
    return b"verifier" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@contextmanager
def _asking(service: RunningService) -> Iterator[socket.socket]:
    """A client that has asked for a verify and awaits the answer, until it goes away."""
    with Connection.open(service.control) as client, socket.socket(fileno=os.dup(client.fileno())) as sock:
        framing.Frame(request_to_json(Verify(model="m"))).send(sock)
        yield sock


def _answer(sock: socket.socket) -> dict[str, Any]:
    sock.settimeout(30)
    received = framing.receive(sock)
    assert received is not None
    received[1].close()
    return framing.decode(received[0])["ok"]


def _descriptors(service: RunningService) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))
