"""What weightcachectl asks of a real service: evict, load, status."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.llama import Tensor, slab_of
from tests.running import children_of
from tests.service.conftest import HOST, HOSTS, StartService, attach, held_by, model
from weightcached.errors import ConnectionLost, KeyMismatch, ModelInUse, ModelNotLoaded
from weightcached.paths import socket_path
from weightcached.shard.manifest import parse_head, read_documents
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Evict, Renew

Llama = tuple[Path, dict[str, Tensor]]


def test_eviction_respects_leases(start_service: StartService, checkpoint: Path) -> None:
    """A model in use is refused with exit code 5 and its holder; --force drops it; its memory counts until released,
    and who asks for it then is told how to load it."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    worker, fds = attach("small")
    assert f"pid {os.getpid()}" in service.ctl("evict", "small", code=5)
    assert service.model("small")["state"] == "cached"
    assert "holders end" in service.ctl("evict", "small", "--force")
    shard = service.status()["devices"][0]["shards"][0]
    assert shard["state"] == "draining"
    assert service.status()["devices"][0]["held"] == shard["nbytes"]
    fds.close()
    worker.close()
    device = service.status()["devices"][0]
    assert (device["shards"], device["held"]) == ([], 0)
    assert service.model("small")["state"] == "absent"
    for command in ("evict", "verify"):
        assert "weightcachectl load small" in service.ctl(command, "small", code=4)
    service.stop()


def test_a_model_goes_from_all_its_devices(start_service: StartService, llama: Llama) -> None:
    """One eviction drops every rank, each is named; nothing of it is left on any device."""
    service = start_service(
        HOSTS + model("cut", llama[0], "tensor_parallel = 2", 'devices = ["host-3", "host-1"]')
    ).ready()
    assert sorted(line.split()[3] for line in service.ctl("evict", "cut").splitlines()) == ["host-1:", "host-3:"]
    status = service.status()
    assert [device["held"] for device in status["devices"]] == [0, 0, 0, 0]
    assert (status["models"][0]["state"], status["models"][0]["ranks_cached"]) == ("absent", 0)
    service.stop()


def test_a_worker_that_hangs_is_not_asked_for_what_it_has_not(start_service: StartService, checkpoint: Path) -> None:
    """A model goes although the worker of a device that it is not on does not answer."""
    service = start_service(HOSTS + model("small", checkpoint)).ready()
    (used,) = service.model("small")["devices"]
    pid = next(device["pid"] for device in service.status()["devices"] if device["device"] != used)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert f"evicted small from {used}" in service.ctl("evict", "small")
        assert "not loaded" in service.ctl("evict", "small", code=4)
    finally:
        os.kill(pid, signal.SIGCONT)
    service.stop()


def test_a_rank_in_use_keeps_the_others(start_service: StartService, llama: Llama) -> None:
    """A model that is attached on one device is refused as a whole, before another rank is dropped."""
    service = start_service(HOSTS + model("cut", llama[0], "tensor_parallel = 2")).ready()
    worker, fds = attach("cut", device="host-1")
    with worker, fds:
        assert "cut on host-1 is in use by pid" in service.ctl("evict", "cut", code=5)
        assert service.model("cut")["ranks_cached"] == 2
        assert "holders end" in service.ctl("evict", "cut", "--force")
        assert service.model("cut")["ranks_cached"] == 0
    service.stop()


def test_a_rank_whose_holder_is_on_its_way_keeps_the_others(start_service: StartService, llama: Llama) -> None:
    """On one device the worker has just died and been replaced, and its holder has not said yet that it holds on: no
    rank is dropped before it is known, and then the model is refused as a whole."""
    service = start_service(HOSTS + model("cut", llama[0], "tensor_parallel = 2")).ready()
    old, fds = attach("cut", device="host-1")
    with fds:
        head = parse_head(read_documents(next(iter(fds)).fileno())[0])
    pid = next(device["pid"] for device in service.status()["devices"] if device["device"] == "host-1")
    os.kill(pid, signal.SIGKILL)
    with old, pytest.raises(ConnectionLost):
        old.next_event(10)
    with (
        Connection.open(socket_path("host-1"), device="host-1", timeout=10) as back,  # when the next worker serves
        Connection.open(service.control) as operator,
    ):
        operator.send(Evict(model="cut"))
        assert not select.select([operator], [], [], 0.3)[0]
        _, fds = back.request(Renew("cut", head.generation, head.created, head.nbytes, head.created))
        fds.close()
        with pytest.raises(ModelInUse, match=f"cut on host-1 is in use by pid {os.getpid()}"):
            operator.answer("evict", 10)
    assert service.model("cut")["ranks_cached"] == 2
    service.stop()


def test_one_rank_may_go(start_service: StartService, llama: Llama) -> None:
    """Evicted on one device, the model is absent with what is left of it, until a load makes it whole again. The other
    rank is for those who name its content."""
    service = start_service(HOSTS + model("cut", llama[0], "tensor_parallel = 2")).ready()
    service.ctl("evict", "cut", "--device", "host-0")
    found = service.model("cut")
    assert (found["state"], found["ranks"], found["ranks_cached"]) == ("absent", 2, 1)
    assert found["generations"] == [None, 1]
    with pytest.raises(ModelNotLoaded):
        held_by("cut", "host-1", tensor_parallel_rank=1)
    (left,) = service.status()["devices"][1]["shards"]
    assert held_by("cut", "host-1", content=left["key"]["content"]) == slab_of(llama[1], 1, 2)
    service.ctl("load", "cut")
    service.ctl("wait", "cut", "--timeout", "30")
    assert (service.model("cut")["ranks_cached"], service.model("cut")["generations"]) == (2, [2, 2])
    service.stop()


def test_eviction_frees_the_memory(
    start_service: StartService, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """After `evict` returns, no process of the service holds a descriptor of the slab any more."""
    path = make_checkpoint(tmp_path / "one.safetensors", {"a": ("U8", (8 << 20,), os.urandom(8 << 20))})
    service = start_service(HOST + model("one", path)).ready()
    pids = [service.process.pid, *children_of(service.process.pid)]
    assert _slabs_held(pids) == 2  # the worker's and the vault's
    service.ctl("evict", "one")
    assert _slabs_held(pids) == 0
    service.stop()


def _slabs_held(pids: list[int]) -> int:
    count = 0
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += "weightcached-slab" in os.readlink(link)
            except FileNotFoundError:
                continue
    return count


def test_an_evicted_model_loads_again_as_the_next_generation(start_service: StartService, checkpoint: Path) -> None:
    """`load` brings it back, `wait` returns when it is there, and its generation number is new."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    service.ctl("evict", "small")
    service.ctl("load", "small")
    service.ctl("wait", "small", "--timeout", "30")
    assert service.model("small")["generations"] == [2]
    assert "already" in service.ctl("load", "small")
    service.stop()


def test_a_key_that_differs_is_refused_with_both_values(start_service: StartService, checkpoint: Path) -> None:
    """A client that wants another dtype gets the cached one named beside its own."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    with pytest.raises(KeyMismatch) as caught:
        attach("small", dtype="float16", tensor_parallel_size=2)
    assert caught.value.differences == {"dtype": ["float16", "float32"], "tensor_parallel_size": [2, 1]}
    service.stop()
