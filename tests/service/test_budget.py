"""Room on a real service: who is evicted for whom, on demand, by a reload, over several ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeCheckpoint
from tests.llama import Tensor, slab_of
from tests.manager import Manager
from tests.service.conftest import StartService, attach, generation, held_by, model, slab_bytes
from weightcached.errors import ModelFailed, NoSuchModel
from weightcached.paths import control_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Evict, Load, Reload, Request, Status, Subscribe

NBYTES = 1 << 20
LAZY = "preload = false"
Llama = tuple[Path, dict[str, Tensor]]


@pytest.fixture
def start_service(runtime_dir: Path) -> Iterator[StartService]:
    """Starts a service under a service manager that stores descriptors; at the end all of it is ended."""
    started: list[Manager] = []

    def start(config: str, **options: Any) -> Manager:
        started.append(Manager(runtime_dir, config, **options))
        return started[-1].start()

    yield start
    for service in started:
        service.abandon()


@pytest.fixture
def weights(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> dict[str, Path]:
    """Three checkpoints of one mebibyte, each full of its own letter."""
    return {name: write(make_checkpoint, tmp_path / f"{name}.safetensors", name) for name in "abc"}


def write(make_checkpoint: MakeCheckpoint, path: Path, letter: str) -> Path:
    return make_checkpoint(path, {"w": ("U8", (NBYTES,), letter.encode() * NBYTES)})


def two_fit(weights: dict[str, Path], *more: str, first: str = "", devices: str = 'devices = ["host-0"]') -> str:
    """A config of three models, to be loaded on demand, where two of them fit. `first`: keys of "a" alone."""
    models = "".join(
        model(name, path, *more, *([first] if name == "a" and first else [])) for name, path in weights.items()
    )
    return f'ready = "listening"\nmemory_limit = {2 * NBYTES}\n{devices}\n{models}'


def use(name: str) -> bytes:
    """Attaches with a wait and lets go: the first byte. What a client sees that comes and goes."""
    return held_once(name)[:1]


def held_once(name: str) -> bytes:
    worker, fds = attach(name, wait=20)
    with worker, fds:
        return slab_bytes(fds)


def ask(request: Request) -> dict[str, Any]:
    with Connection.open(control_path("test")) as service:
        answer, fds = service.request(request, timeout=30)
        fds.close()
        return answer


def shards(device: int = 0) -> list[dict[str, Any]]:
    """What a device has, as the status says it."""
    return list(ask(Status())["devices"][device]["shards"])


def cached(device: int = 0) -> set[str]:
    return {shard["model"] for shard in shards(device)}


def of_model(name: str) -> dict[str, Any]:
    return next(found for found in ask(Status())["models"] if found["model"] == name)


def let_go(*names: str) -> None:
    """Returns when the worker has seen every client of these models leave; no names: of all."""
    while any(shard["leases"] and (not names or shard["model"] in names) for shard in shards()):
        pass


class TestOnDemand:
    """Three models, room for two."""

    def test_the_least_recently_used_makes_room(self, start_service: StartService, weights: dict[str, Path]) -> None:
        """The third is loaded at its first attach; the one that was used longest ago is absent then, the log and every
        subscriber hear for which model it went, and it comes back when somebody asks for it."""
        service = start_service(two_fit(weights, LAZY)).ready()
        with Connection.open(control_path("test")) as watcher:
            watcher.request(Subscribe())[1].close()
            assert [use(name) for name in "aba"] == [b"a", b"b", b"a"]
            let_go()
            assert use("c") == b"c"
            assert cached() == {"a", "c"}
            assert (of_model("b")["state"], of_model("b")["error"]) == ("absent", None)
            assert "b generation 1 is evicted from host-0 to make room for c" in service.log
            while (event := watcher.next_event(10))["what"] != "evicted":
                pass
            assert (event["model"], event["device"], event["reason"]) == ("b", "host-0", "room for c")
        let_go()
        assert use("b") == b"b"
        assert cached() == {"c", "b"}
        assert of_model("b")["generations"] == [2]
        service.stop()

    def test_what_is_in_use_stays(self, start_service: StartService, weights: dict[str, Path]) -> None:
        """Two holders, no room: who waits for the third hears what is needed and who holds it, and nothing is evicted.
        When one holder lets go, the next one that waits gets it."""
        service = start_service(two_fit(weights, LAZY)).ready()
        with ExitStack() as stack:
            for name in "ab":
                worker, fds = attach(name, wait=20)
                stack.enter_context(fds)
                holder = stack.enter_context(worker)
            with pytest.raises(ModelFailed) as caught:
                use("c")
            message = str(caught.value)
            assert f"needed {NBYTES} bytes, free 0 bytes of a limit of {2 * NBYTES}, evictable 0 bytes" in message
            assert f"b {NBYTES} bytes (in use by pid {os.getpid()}" in message
            assert cached() == {"a", "b"}
            holder.close()
            let_go("b")
            assert use("c") == b"c"
            assert cached() == {"a", "c"}
        service.stop()

    def test_a_pinned_model_stays(self, start_service: StartService, weights: dict[str, Path]) -> None:
        """However long nobody has used it; status says so, and an operator may still evict it."""
        service = start_service(two_fit(weights, LAZY, first="pin = true")).ready()
        for name in "abc":
            assert use(name) == name.encode()
            let_go()
        assert cached() == {"a", "c"}
        assert [of_model(name)["pin"] for name in "abc"] == [True, False, False]
        assert {shard["model"]: shard["pin"] for shard in shards()} == {
            "a": True, "c": False,
        }  # fmt: skip
        assert "cached, pinned" in service.ctl("status")
        service.ctl("evict", "a")
        assert cached() == {"c"}
        service.stop()

    def test_its_descriptors_are_closed_before_the_reply(
        self, start_service: StartService, weights: dict[str, Path]
    ) -> None:
        """When the third model is there, or an eviction is answered, neither worker, service nor service manager has
        anything open of the one that went; a manager that is busy is waited for."""
        service = start_service(two_fit(weights, LAZY)).ready()
        processes = [service.pid, service.process_of_role("worker")]
        worker, fds = attach("a", wait=20)
        with worker, fds:
            inodes = {os.fstat(fd.fileno()).st_ino for fd in fds}
        assert len(inodes) == 2
        assert all(inodes <= memfds(pid) for pid in processes)
        assert use("b") == b"b"
        let_go()
        stored = service.wait_stored(4)
        assert use("c") == b"c"
        assert not any(inodes & memfds(pid) for pid in processes)
        assert len(service.wait_stored(4).keys() & stored.keys()) == 2
        let_go()
        with ThreadPoolExecutor(1) as pool:
            with service.frozen():
                evicted = pool.submit(ask, Evict(model="c"))
                while cached() != {"b"}:
                    pass
                assert not evicted.done()
            assert [item["model"] for item in evicted.result(20)["evicted"]] == ["c"]
        assert service.stored.keys() < stored.keys()
        service.stop()

    def test_many_that_ask_cause_one_load(self, start_service: StartService, weights: dict[str, Path]) -> None:
        """Twenty clients at once for a model that is not there: one load, and all of them get its one generation."""
        service = start_service(two_fit(weights, LAZY)).ready()
        together = threading.Barrier(20)

        def ask() -> int:
            together.wait(20)
            worker, fds = attach("b", wait=20)
            with worker, fds:
                assert slab_bytes(fds)[:1] == b"b"
                return generation(fds)

        with ThreadPoolExecutor(20) as pool:
            assert [task.result(30) for task in [pool.submit(ask) for _ in range(20)]] == [1] * 20
        assert len(re.findall(r"b: \d+ bytes to host-0", service.log)) == 1
        service.stop()


def memfds(pid: int) -> set[int]:
    """The inodes of a process's open memfds."""
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(entry.path).startswith("/memfd:"):
                found.add(os.stat(entry.path).st_ino)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


class TestTogether:
    """What a start or a reload loads."""

    def test_preloads_do_not_evict_one_another(self, start_service: StartService, weights: dict[str, Path]) -> None:
        """A config that preloads more than fits is refused at the start, whichever model comes last."""
        service = start_service(two_fit(weights).replace("listening", "loaded"))
        service.ended(1)
        assert f"loading c to host-0 failed: host-0 has no room: needed {NBYTES} bytes, free 0 bytes" in service.log
        assert f"a {NBYTES} bytes (preloaded)" in service.log

    def test_nor_at_a_reload(self, start_service: StartService, weights: dict[str, Path]) -> None:
        """A third one in the file does not drive out what is preloaded; once that is over it may make room."""
        service = start_service(two_fit({name: weights[name] for name in "ab"})).ready()
        for name in "ab":
            service.ctl("wait", name, "--timeout", "30")
        service.config.write_text(two_fit(weights))
        assert ask(Reload())["loading"] == ["c"]
        assert "host-0 has no room" in service.ctl("wait", "c", code=1)
        assert cached() == {"a", "b"}
        assert use("c") == b"c"
        assert cached() == {"b", "c"}
        service.stop()


class TestReplace:
    """A model that is loaded again while it is cached."""

    def changed(self, service: Manager, make_checkpoint: MakeCheckpoint, path: Path) -> None:
        write(make_checkpoint, path, "x")
        assert ask(Reload())["loading"] == ["a"]

    def test_beside_keeps_the_old_one(
        self, start_service: StartService, weights: dict[str, Path], make_checkpoint: MakeCheckpoint
    ) -> None:
        """No room for both: the load is refused with what is missing and what to change, the old one is served. The new
        one is loaded beside it as soon as a model that nobody uses can make room."""
        config = two_fit({name: weights[name] for name in "ab"}, LAZY)
        service = start_service(config).ready()
        use("a")
        holder, fds = attach("b", wait=20)
        let_go("a")
        self.changed(service, make_checkpoint, weights["a"])
        refusal = service.ctl("wait", "a", code=1)
        assert f"needed {NBYTES} bytes, free 0 bytes" in refusal
        assert 'replace = "evict-first" in its config lets it go before' in refusal
        assert held_by("a", "host-0")[:1] == b"a"
        fds.close()
        holder.close()
        let_go()
        ask(Load(model="a"))
        service.ctl("wait", "a", "--timeout", "30")
        assert held_by("a", "host-0")[:1] == b"x"
        assert cached() == {"a"}
        service.stop()

    def test_evict_first_drops_the_old_one(
        self, start_service: StartService, weights: dict[str, Path], make_checkpoint: MakeCheckpoint
    ) -> None:
        """No room for both: the old one goes, not the other model, and the next generation takes its place. In use it
        stays, and the refusal names who uses it."""
        config = two_fit({name: weights[name] for name in "ab"}, LAZY, first='replace = "evict-first"')
        service = start_service(config).ready()
        use("a")
        holder, fds = attach("b", wait=20)
        let_go("a")
        with holder, fds:
            self.changed(service, make_checkpoint, weights["a"])
            service.ctl("wait", "a", "--timeout", "30")
            worker, found = attach("a")
            with worker, found:
                assert (slab_bytes(found)[:1], generation(found)) == (b"x", 2)
                write(make_checkpoint, weights["a"], "y")
                ask(Reload())
                refusal = service.ctl("wait", "a", code=1)
                assert f"its generation 2 of {NBYTES} bytes is in use, by pid {os.getpid()}" in refusal
                assert held_by("a", "host-0")[:1] == b"x"
        assert cached() == {"a", "b"}
        service.stop()

    def test_evict_first_may_leave_nothing(
        self, start_service: StartService, weights: dict[str, Path], make_checkpoint: MakeCheckpoint, runtime_dir: Path
    ) -> None:
        """That is its price: with the old one gone, a load that fails leaves no model; the next load brings it."""
        trace = runtime_dir / "trace"
        config = f'ready = "listening"\nmemory_limit = {NBYTES}\ndevices = ["host-0"]\n'
        config += model("a", weights["a"], LAZY, 'replace = "evict-first"')
        service = start_service(config, environ={"WEIGHTCACHED_TRACE": str(trace)}).ready()
        use("a")
        let_go()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tracer:
            tracer.bind(os.fspath(trace))
            tracer.listen()
            with ThreadPoolExecutor(1) as pool:  # the service itself stops at points too
                changed = pool.submit(self.changed, service, make_checkpoint, weights["a"])
                kill_at(tracer, "loader.reserved")
                tracer.close()  # nobody stops any more
                changed.result(20)
        assert "the loader ended by signal SIGKILL" in service.ctl("wait", "a", code=1)
        assert (of_model("a")["state"], cached()) == ("failed", set())
        ask(Load(model="a"))
        assert use("a") == b"x"
        service.stop()


def kill_at(tracer: socket.socket, name: str) -> None:
    """Lets the service's processes pass trace points until one comes to `name`, where it is killed."""
    while True:
        connection, _ = tracer.accept()
        with connection:
            point = json.loads(connection.recv(4096))
            if point["point"] == name:
                os.kill(point["pid"], signal.SIGKILL)
                return


def test_the_other_ranks_go_too(start_service: StartService, llama: Llama) -> None:
    """When one device needs the room of a rank, the idle ones of that model on other devices are of no use: the model
    is absent, and comes back whole. A rank in use stays with its holder."""
    folder, tensors = llama
    part = max(len(slab_of(tensors, rank, 2)) for rank in range(2))
    whole = len(slab_of(tensors, 0, 1))
    cut = [LAZY, "tensor_parallel = 2", 'devices = ["host-0", "host-1"]']
    config = f'ready = "listening"\nmemory_limit = {whole + part - 1}\ndevices = ["host-0", "host-1"]\n'
    config += model("cut", folder, *cut) + model("one", folder, LAZY, 'devices = ["host-0"]')
    service = start_service(config).ready()
    ask(Load(model="cut"))
    service.ctl("wait", "cut", "--timeout", "30")
    assert len(held_once("one")) == whole
    let_go()
    while cached(1):  # the other worker hears of it a moment later
        pass
    assert (of_model("cut")["state"], of_model("cut")["ranks_cached"]) == ("absent", 0)
    with pytest.raises(NoSuchModel):
        attach("cut", device="host-1", tensor_parallel_rank=1)
    worker, fds = attach("cut", wait=20, device="host-1", tensor_parallel_rank=1)
    with worker, fds:
        assert of_model("cut")["ranks_cached"] == 2
        assert cached() == {"cut"}
        assert len(held_once("one")) == whole
        assert cached(1) == {"cut"}
    service.stop()
