"""What outlives the service's processes under a service manager: the whole service, killed, restarted and stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import HandMade, Raw, make_shard, publish
from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from tests.llama import Tensor, slab_of, write_llama
from tests.manager import Manager
from tests.running import ROOT, wait_for_end
from tests.service.conftest import HOST, HOSTS, attach, generation, held_by, model, slab_bytes
from weightcached.errors import ModelNotLoaded
from weightcached.fds import OwnedFd
from weightcached.memfd import sealed_memfd
from weightcached.service.store import ANSWER_SECONDS, ShardName, parse_name

StartManager = Callable[..., Manager]
TENSORS = [Raw("w", "U8", (5000,), os.urandom(5000)), Raw("v", "U8", (10,), os.urandom(10))]
BOTH = 'devices = ["host-0", "host-1"]\n'


@pytest.fixture
def manage(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> Iterator[StartManager]:
    """``manage(config, ...)`` makes a manager that has started nothing yet. At the end nothing is left open here."""
    made: list[Manager] = []

    def make(config: str, **options: Any) -> Manager:
        made.append(Manager(runtime_dir, config, **options))
        return made[-1]

    yield make
    for manager in made:
        manager.abandon()


def put(manager: Manager, shard: HandMade, *, name: ShardName | None = None, without: tuple[int, ...] = ()) -> None:
    """Puts a shard into the store as a service would have, but for the parts in `without`; closes it here."""
    for part, item in enumerate((shard.manifest, *shard.slabs)):
        if part not in without:
            manager.put((name or ShardName.of(shard.head)).part(part), item.fileno())
    shard.close()


def generations(manager: Manager) -> set[int]:
    """Of what is in the store; fails on names that are none."""
    found = [parse_name(name) for name in manager.stored]
    assert None not in found, manager.stored
    return {name[0].generation for name in found if name is not None}


def shards(manager: Manager, device: int = 0) -> list[tuple[str, int]]:
    """Model and generation of what a device's worker holds."""
    return [(item["model"], item["generation"]) for item in manager.status()["devices"][device]["shards"]]


def loaded(manager: Manager) -> bool:
    """Whether anything was loaded since the last start, by what it has told its manager."""
    return any("loading" in message for message in manager.messages)


def test_the_main_process_is_killed(manage: StartManager, checkpoint: Path) -> None:
    """Started again it is ready with the same generation and bytes, without the files; who was attached has the bytes.

    So it is after a restart, and a stop frees all: nothing of it is in the store, in a process or in this one.
    """
    manager = manage(HOST + model("small", checkpoint)).start().ready()
    manager.wait_stored(2)
    worker, fds = attach("small")
    with worker, fds:
        before = slab_bytes(fds)
        checkpoint.unlink()
        for again in (lambda: (manager.kill(), manager.start()), manager.restart):
            again()
            manager.ready()
            assert not loaded(manager)
            assert manager.model("small")["state"] == "cached"
            other, copies = attach("small")
            with other, copies:
                assert generation(copies) == 1
                assert slab_bytes(copies) == before
            assert manager.status()["store"] == {
                "active": True, "stored": 2, "shards": 1, "pending": 0, "refused": [],
            }  # fmt: skip
        assert slab_bytes(fds) == before
    assert manager.log.count("adopted small on host-0, generation 1: ") == 2
    manager.stop()
    assert manager.stored == {}
    assert manager.processes() == {}


def test_what_an_engine_has_published_survives(manage: StartManager) -> None:
    """A model that no config lists: adopted, attached, idle, and gone for good when it is evicted."""
    manager = manage(HOST).start().ready()
    publish(make_shard(TENSORS, model="engine", slabs=3, key={"layout": "engine-1/x"}))
    manager.wait_stored(4)
    before = held_by("engine", "host-0")
    manager.kill()
    manager.start().ready()
    assert held_by("engine", "host-0") == before
    assert shards(manager) == [("engine", 1)]
    manager.ctl("evict", "engine")
    manager.wait_stored(0)
    assert shards(manager.restart().ready()) == []
    manager.stop()


def test_killed_in_the_middle_of_a_load(manage: StartManager, checkpoint: Path) -> None:
    """Nothing half is found: the store is empty, and the next start loads from the beginning."""
    manager = manage(HOST + model("small", checkpoint)).start()
    os.kill(manager.process_of_role("loader"), signal.SIGSTOP)
    manager.wait_for("loading small")
    manager.kill()
    assert manager.stored == {}
    manager.start().ready()
    assert manager.log.count("bytes read in") == 1
    assert shards(manager) == [("small", 1)]
    manager.stop()


def test_killed_between_two_ranks(manage: StartManager, llama: tuple[Path, dict[str, Tensor]]) -> None:
    """One rank of the next load was published, the other one was not: they are no model; it is loaded again, whole."""
    config = BOTH + model("cut", llama[0], "tensor_parallel = 2")
    manager = manage(config).start().ready()
    manager.wait_stored(4)
    manager.kill()
    key = {"content": "of the next load", "tensor_parallel_size": 2}
    put(manager, make_shard(TENSORS, model="cut", generation=2, key=key))
    manager.start().ready()
    assert "loading cut" in "".join(manager.messages)
    for rank, number in enumerate((3, 2)):
        assert held_by("cut", f"host-{rank}") == slab_of(llama[1], rank, 2)
        assert shards(manager, rank) == [("cut", number)]
    manager.wait_stored(4)
    manager.restart().ready()
    assert not loaded(manager)
    assert manager.model("cut")["ranks_cached"] == 2
    manager.stop()


def test_an_engine_publishes_one_of_two_ranks(manage: StartManager, llama: tuple[Path, dict[str, Tensor]]) -> None:
    """Of other weights, under a configured name: they are no model. By name no rank is given out, until the model is
    loaded for somebody who waits."""
    manager = manage(BOTH + model("cut", llama[0], "tensor_parallel = 2")).start().ready()
    key = {"content": "an engine's", "tensor_parallel_size": 2}
    publish(make_shard(TENSORS, model="cut", generation=2, key=key))
    assert (manager.model("cut")["state"], manager.model("cut")["ranks_cached"]) == ("absent", 1)
    for device in ("host-0", "host-1"):
        with pytest.raises(ModelNotLoaded):
            held_by("cut", device)
    worker, fds = attach("cut", 20, device="host-1")
    with worker, fds:
        assert slab_bytes(fds) == slab_of(llama[1], 1, 2)
    assert held_by("cut", "host-0") == slab_of(llama[1], 0, 2)
    manager.stop()


def test_one_of_two_ranks_is_evicted(
    manage: StartManager, llama: tuple[Path, dict[str, Tensor]], make_checkpoint: MakeCheckpoint
) -> None:
    """The files are others by now: an engine whose ranks wait for the model gets both of the new load."""
    manager = manage(BOTH + model("cut", llama[0], "tensor_parallel = 2")).start().ready()
    manager.ctl("evict", "cut", "--device", "host-0")
    with pytest.raises(ModelNotLoaded):
        held_by("cut", "host-1")
    tensors = write_llama(llama[0], make_checkpoint)
    for rank in (1, 0):
        worker, fds = attach("cut", 20, device=f"host-{rank}")
        with worker, fds:
            assert slab_bytes(fds) == slab_of(tensors, rank, 2)
    manager.stop()


def test_a_store_without_room(manage: StartManager, checkpoint: Path) -> None:
    """The model is served; the log, the status and its text say that it will not survive, and it does not."""
    manager = manage(HOST + model("small", checkpoint), store_max=1).start().ready()
    (refused,) = manager.status()["store"]["refused"]
    assert (refused["device"], refused["model"], refused["generation"]) == ("host-0", "small", 1)
    assert "not kept by the service manager: small on host-0, generation 1 (" in manager.ctl("status")
    assert "small on host-0, generation 1 will not survive the end of this process" in manager.log
    assert manager.stored == {}
    assert held_by("small", "host-0")
    manager.kill()
    manager.start().ready()
    assert loaded(manager)
    manager.stop()


def test_what_cannot_be_adopted_is_dropped(manage: StartManager) -> None:
    """Another schema, a slab that is missing or not as listed, no manifest, another's name, a device not served, a
    foreign name: each is said with its reason and freed; the good one beside them is adopted."""
    manager = manage(HOST)
    put(manager, make_shard(TENSORS, generation=2, change_head={"schema": 99}))
    put(manager, make_shard(TENSORS, generation=3, slabs=2), without=(2,))
    put(manager, make_shard(TENSORS, generation=4), without=(0,))
    unsealed = make_shard(TENSORS, generation=5)
    put(manager, with_slab(unsealed, memfd(unsealed.head.nbytes)))
    put(manager, with_slab(make_shard(TENSORS, generation=6), sealed_memfd("slab", b"short")))
    named = make_shard(TENSORS, generation=7)
    put(manager, named, name=ShardName.of(replace(named.head, generation=8)))
    put(manager, make_shard(TENSORS, generation=9, device="host-7"))
    with open(os.devnull) as file:
        manager.put("stored", file.fileno())
        manager.put("sentinel", file.fileno())
    put(manager, make_shard(TENSORS, model="good"))
    manager.start().ready()
    manager.wait_stored(2)
    assert shards(manager) == [("good", 1)]
    assert "the service manager kept what is none of ours, it is removed: sentinel, stored" in manager.log
    dropped = re.findall("host-[07], generation (.), was kept by the service manager and is dropped: (.*)", manager.log)
    reasons = {
        "2": "schema 99, this version reads",
        "3": "slab 2 of 2 is missing",
        "4": "the manifest is not among the 1 parts",
        "5": "the slab 0 is not sealed",
        "6": "slab 0 has 5 bytes",
        "8": "the manifest is that of tiny on host-0, generation 7",
        "9": "host-7: is not served any more",
    }
    assert [number for number, _ in dropped] == list(reasons)
    for number, text in dropped:
        assert reasons[number] in text
    manager.stop()


def with_slab(shard: HandMade, slab: OwnedFd) -> HandMade:
    """The shard with another first slab than the one that its manifest lists."""
    shard.slabs[0].close()
    shard.slabs[0] = slab
    return shard


def memfd(nbytes: int) -> OwnedFd:
    """One without seals."""
    item = OwnedFd(os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.truncate(item.fileno(), nbytes)
    return item


def test_the_newer_of_two_generations_is_served(manage: StartManager) -> None:
    """Killed between a publish and the end of the one before: the newer stays, the older one is removed."""
    manager = manage(HOST)
    data = [replace(raw, data=os.urandom(len(raw.data))) for raw in TENSORS]
    put(manager, make_shard(data, model="m", generation=2))  # the newer one first, as it is handed back last
    put(manager, make_shard(TENSORS, model="m", generation=1))
    manager.start().ready()
    manager.wait_stored(2)
    assert generations(manager) == {2}
    assert held_by("m", "host-0").startswith(data[0].data)
    publish(make_shard(TENSORS, model="m", generation=3))  # numbers go on from there
    manager.wait_stored(2)
    manager.stop()


def test_what_the_config_means_now(manage: StartManager, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """After a restart with another config: what it lists no more stays, idle; what it reads from elsewhere, or whose
    files have changed, is loaded again; what is as it was is not."""
    paths = {}
    for name in ("same", "moved", "changed", "left"):
        paths[name] = make_checkpoint(tmp_path / f"{name}.safetensors", {"a": ("U8", (100,), os.urandom(100))})
    manager = manage(HOST + "".join(model(name, path) for name, path in paths.items())).start().ready()
    manager.wait_stored(8)
    elsewhere = make_checkpoint(tmp_path / "elsewhere.safetensors", {"a": ("U8", (100,), os.urandom(100))})
    make_checkpoint(paths["changed"], {"a": ("U8", (100,), os.urandom(100))})
    paths["moved"] = elsewhere
    del paths["left"]
    manager.configure(HOST + "".join(model(name, path) for name, path in paths.items()))
    manager.restart().ready()
    assert held_by("moved", "host-0") == elsewhere.read_bytes()[-100:], "ready before the config was served"
    manager.wait_for("loading changed")
    manager.ctl("wait", "changed")
    assert held_by("changed", "host-0") == paths["changed"].read_bytes()[-100:]
    assert sorted(shards(manager)) == [("changed", 2), ("left", 1), ("moved", 2), ("same", 1)]
    manager.wait_stored(8)
    manager.ctl("evict", "left")
    manager.wait_stored(6)
    manager.restart().ready()
    assert not loaded(manager)
    assert sorted(shards(manager)) == [("changed", 2), ("moved", 2), ("same", 1)]
    manager.stop()


def test_a_config_that_cannot_be_loaded_does_not_lose_what_is_there(manage: StartManager, checkpoint: Path) -> None:
    """The model's new files are not there: the service starts, says so, and serves what it has."""
    manager = manage(HOST + model("small", checkpoint)).start().ready()
    manager.wait_stored(2)
    before = held_by("small", "host-0")
    manager.configure(HOST + model("small", checkpoint.with_name("nowhere")))
    manager.restart().ready()
    assert held_by("small", "host-0") == before
    found = manager.model("small")
    assert found["state"] == "cached"
    assert "nowhere" in found["error"]["message"]
    manager.stop()


@pytest.mark.parametrize("cause", ["room", "files"])
def test_one_model_that_cannot_come_back_costs_no_other(
    manage: StartManager, tmp_path: Path, make_checkpoint: MakeCheckpoint, cause: str
) -> None:
    """A preloaded model made room for one that is in use, or was evicted and its files are gone, when the main process
    is killed: the next one is ready, says what failed, and has all the others."""
    paths = {
        name: make_checkpoint(tmp_path / f"{name}.safetensors", {"a": ("U8", (1000,), os.urandom(1000))})
        for name in ("other", "first", "second")
    }
    config = "memory_limit = 2000\n" + HOST + model("other", paths["other"], "pin = true")
    config += model("first", paths["first"]) + model("second", paths["second"], "preload = false", "pin = true")
    manager = manage(config).start().ready()
    if cause == "room":
        worker, fds = attach("second", 20)
        worker.close()
        fds.close()
    else:
        manager.ctl("evict", "first")
        paths["first"].unlink()
    manager.wait_stored(4 if cause == "room" else 2)
    manager.kill()
    manager.start().ready()
    assert (manager.model("first")["state"], manager.model("first")["error"] is not None) == ("failed", True)
    assert held_by("other", "host-0") == paths["other"].read_bytes()[-1000:]
    assert len(manager.stored) == (4 if cause == "room" else 2)
    manager.stop()


def test_another_version_adopts_it(manage: StartManager, checkpoint: Path, tmp_path: Path) -> None:
    """An upgrade of the package between two starts: the new version finds what the old one has loaded."""
    manager = manage(HOST + model("small", checkpoint)).start().ready()
    manager.wait_stored(2)
    before = held_by("small", "host-0")
    package = tmp_path / "site" / "weightcached"
    shutil.copytree(ROOT / "weightcached", package, ignore=shutil.ignore_patterns("__pycache__"))
    init = package / "__init__.py"
    text, count = re.subn(r'__version__ = "(\d+\.\d+)\.\d+"', r'__version__ = "\1.999"', init.read_text())
    assert count == 1
    init.write_text(text)
    manager.environ["PYTHONPATH"] = str(package.parent)
    manager.restart().ready()
    assert manager.status()["version"].endswith(".999")
    assert not loaded(manager)
    assert held_by("small", "host-0") == before
    manager.stop()


def test_each_device_gets_its_own_back(manage: StartManager, checkpoint: Path, tmp_path: Path) -> None:
    """Two devices, one of which is not served after the restart: its shard is dropped, the other one stays."""
    where = 'devices = ["host-1"]'
    manager = manage(BOTH + model("a", checkpoint) + model("b", checkpoint, where)).start().ready()
    manager.wait_stored(4)
    manager.kill()
    manager.start().ready()
    assert (shards(manager, 0), shards(manager, 1)) == ([("a", 1)], [("b", 1)])
    manager.configure(HOST + model("a", checkpoint))
    manager.restart().ready()
    manager.wait_stored(2)
    assert "host-1, generation 1, was kept by the service manager and is dropped: host-1: is not served" in manager.log
    assert shards(manager) == [("a", 1)]
    manager.stop()


def test_a_worker_and_then_the_main_process(manage: StartManager, checkpoint: Path) -> None:
    """One death after the other: what the second finds is what the first one left."""
    manager = manage(HOST + model("small", checkpoint)).start().ready()
    manager.wait_stored(2)
    before = held_by("small", "host-0")
    os.kill(manager.process_of_role("worker"), signal.SIGKILL)
    manager.kill()
    manager.start().ready()
    assert held_by("small", "host-0") == before
    manager.stop()


def test_published_while_the_manager_is_busy(manage: StartManager, checkpoint: Path) -> None:
    """A publish is confirmed when its descriptors are on their way to the manager; one that reads nothing delays that
    by some seconds at most. A restart waits until the manager has what was published last."""
    manager = manage(HOSTS).start().ready()
    with manager.frozen():
        began = time.monotonic()
        publish(make_shard(TENSORS, model="m0"))
        assert time.monotonic() - began < ANSWER_SECONDS - 1, "it fits into the socket's queue"
        publish(make_shard(TENSORS, model="m1"))
        assert ANSWER_SECONDS - 1 < time.monotonic() - began < 2 * ANSWER_SECONDS + 5
        assert "m1 on host-0, generation 1: the service manager takes nothing; it is served all the same" in manager.log
        worker = manager.process_of_role("host-0")
        assert manager.process is not None
        manager.process.send_signal(signal.SIGTERM)
        wait_for_end(worker)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the manager
            manager.process.wait(0.3)
    assert manager.ended() == 0
    manager.start().ready()
    assert sorted(shards(manager)) == [("m0", 1), ("m1", 1)]
    manager.stop()
