"""client/sleeping.py: memory that is given up, and found again at the same addresses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.client.handmade import DEVICE, Raw, RunningWorker, make_shard
from weightcached import EngineError, ModelReplaced, NoSuchModel, TimedOut, Weights, attach
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Evict

VALUES = torch.arange(8, dtype=torch.float32)
DATA = VALUES.numpy().tobytes()


def raws() -> list[Raw]:
    return [Raw("a", "F32", (8,), DATA), Raw("b", "F32", (2, 4), DATA), Raw("p", "F32", (8,), DATA, {"private": True})]


def attached(worker: RunningWorker, generation: int = 1) -> Weights:
    worker.publish(make_shard(raws(), slabs=2, generation=generation, aliases={"tied": "a"}))
    return attach("tiny", device=DEVICE)


def evict(worker: RunningWorker) -> None:
    with Connection.open(worker.path, device=DEVICE) as connection:
        connection.request(Evict("tiny"))[1].close()


def test_the_same_bytes_at_the_same_addresses(worker: RunningWorker) -> None:
    """Unmapped, the worker counts no lease and no slab is mapped; remapped, every tensor is as before."""
    weights = attached(worker)
    tensors = {name: weights[name] for name in weights}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    worker.wait_released(weights.unmap)

    assert worker.leases() == [] and weights.unmapped
    assert "memfd:weightcached-slab" not in [line.split()[-1] for line in maps() if f"{places['a']:x}-" in line]
    assert torch.equal(tensors["p"], VALUES), "a private copy stays"
    weights.unmap()

    weights.remap()
    weights.remap()

    assert len(worker.leases()) == 1 and not weights.unmapped
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == places
    assert all(torch.equal(tensor.flatten(), VALUES) for tensor in tensors.values())
    del tensors
    worker.wait_released(weights.close)


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def test_the_memory_is_really_given_up(worker: RunningWorker) -> None:
    """Neither a mapping nor a descriptor of the slabs is left in an engine that sleeps."""
    worker.publish(make_shard(raws()))
    script = (
        "import os, weightcached\n"
        "weights = weightcached.attach('tiny', device='host-0'); kept = weights['a']\n"
        "held = lambda: 'weightcached-slab' in open('/proc/self/maps').read() or any(\n"
        "    'weightcached-slab' in os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')\n"
        "    if os.path.lexists(f'/proc/self/fd/{n}'))\n"
        "print(held()); weights.unmap(); print(held()); weights.remap(); print(held(), kept.sum().item(), flush=True)\n"
        "weights.unmap(); kept.sum()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert run.stdout == "True\nFalse\nTrue 28.0\n", run.stderr
    assert run.returncode == -signal.SIGSEGV, "using a tensor without memory ends the process"


def test_an_evicted_model_is_not_there(worker: RunningWorker) -> None:
    """The service may evict what sleeps; the weights stay unmapped, and may be tried again."""
    weights = attached(worker)
    worker.wait_released(weights.unmap)
    evict(worker)
    for _ in range(2):
        with pytest.raises(NoSuchModel):
            weights.remap()
        assert weights.unmapped
    with pytest.raises(EngineError, match="unmapped"):
        weights["a"]
    weights.close()
    assert weights.closed
    with pytest.raises(ValueError, match="closed"):
        weights.unmap()


def test_another_generation_is_refused(worker: RunningWorker) -> None:
    """A model that was loaded anew meanwhile is not mapped under the tensors of the old one, and no lease stays."""
    weights = attached(worker)
    worker.wait_released(weights.unmap)
    worker.publish(make_shard(raws(), slabs=2, generation=2))
    with pytest.raises(ModelReplaced, match=r"generation 2 of .*generation 1 of"):
        weights.remap()
    assert weights.unmapped and worker.leases() == []


def test_a_service_that_is_gone_is_waited_for(worker: RunningWorker) -> None:
    """Until the timeout; then the weights are still unmapped."""
    weights = attached(worker)
    weights.unmap()
    worker.stop()
    with pytest.raises(TimedOut):
        weights.remap(timeout=0.2)
    assert weights.unmapped


def test_copies_cannot_be_unmapped(worker: RunningWorker) -> None:
    """What is the engine's own memory is not given up silently not at all."""
    attached(worker).close()
    with pytest.raises(EngineError, match="private copies"):
        attach("tiny", device=DEVICE, mode="copy").unmap()
