"""What weightcachectl asks of a real service: evict, load, status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.running import children_of
from tests.service.conftest import HOST, StartService, attach, model
from weightcached.errors import KeyMismatch


def test_eviction_respects_leases(start_service: StartService, checkpoint: Path) -> None:
    """A model in use is refused with exit code 5 and its holder; --force drops it; its memory counts until released."""
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
    service.ctl("evict", "small", code=4)
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
    assert service.model("small")["generation"] == 2
    assert "already" in service.ctl("load", "small")
    service.stop()


def test_a_key_that_differs_is_refused_with_both_values(start_service: StartService, checkpoint: Path) -> None:
    """A client that wants another dtype gets the cached one named beside its own."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    with pytest.raises(KeyMismatch) as caught:
        attach("small", dtype="float16", tensor_parallel_size=2)
    assert caught.value.differences == {"dtype": ["float16", "float32"], "tensor_parallel_size": [2, 1]}
    service.stop()
