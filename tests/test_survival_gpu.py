"""What survives on a GPU: weights outlive the worker, the main process and a restart; a stop gives the memory back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.manager import Manager
from tests.running import wait_for_end
from weightcached.devices import device_memory, gpu_devices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
NBYTES = 2 << 30

# Answers each line on its standard input with a sum over all bytes that it has mapped.
ENGINE = """
import sys, torch, weightcached
weights = weightcached.attach("m")
for line in sys.stdin:
    print(weights["w"].view(torch.int64).sum().item(), flush=True)
"""


class Engine:
    """A process that has the model attached."""

    def __init__(self, runtime_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE],
            env={**os.environ, "WEIGHTCACHED_RUNTIME_DIR": str(runtime_dir)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def total(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def manager(runtime_dir: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Iterator[Manager]:
    """A service with a model "m" of 2 GiB on the first GPU, ready; the model's file is gone by then."""
    gpu = gpu_devices()[0].name
    path = make_checkpoint(tmp_path / "m.safetensors", {"w": ("U8", (NBYTES,), os.urandom(MIB) * (NBYTES // MIB))})
    config = f'ready = "loaded"\ndevices = ["{gpu}"]\n[[model]]\nname = "m"\ncheckpoint = "{path}"\n'
    running = Manager(runtime_dir, config)
    try:
        running.start().ready()
        path.unlink()
        yield running
    finally:
        running.abandon()


def leases(manager: Manager) -> list[int]:
    """The pids that have the model attached, as the status shows them."""
    (shard,) = manager.status()["devices"][0]["shards"]
    assert shard["state"] == "cached"
    return sorted(lease["pid"] for lease in shard["leases"])


def wait_for_leases(manager: Manager, wanted: list[int], seconds: float = 20.0) -> None:
    """Clients come back by themselves, in their own time; nothing tells a third party when."""
    end = time.monotonic() + seconds
    while leases(manager) != wanted:
        assert time.monotonic() < end, f"{leases(manager)} hold it, {wanted} expected:\n{manager.log}"


def test_weights_survive_every_process(manager: Manager, runtime_dir: Path) -> None:
    """SIGKILL of the worker and of the main process and a restart lose nothing: an engine goes on with the same bytes
    and its lease is back, a new one finds them, and nothing is read again, since the file is gone."""
    gpu = gpu_devices()[0]
    with_weights = device_memory(gpu.name).free
    generation = manager.model("m")["generations"]
    holder = Engine(runtime_dir)
    total = holder.total()
    wait_for_leases(manager, [holder.process.pid])

    def check(event: str, began: float) -> None:
        manager.ready()
        took = time.monotonic() - began
        assert manager.model("m")["generations"] == generation and manager.model("m")["state"] == "cached"
        other = Engine(runtime_dir)
        assert other.total() == holder.total() == total
        other.end()
        wait_for_leases(manager, [holder.process.pid])
        assert "loader" not in str(manager.processes().values())
        print(f"{event}: ready again after {took:.2f} s, {NBYTES >> 30} GiB the same, the lease is back")

    began = time.monotonic()
    worker = manager.process_of_role("worker")
    os.kill(worker, signal.SIGKILL)
    wait_for_end(worker)
    check("SIGKILL of the worker", began)

    began = time.monotonic()
    manager.kill()
    manager.start()
    check("SIGKILL of the main process", began)

    began = time.monotonic()
    manager.restart()
    check("restart", began)

    holder.end()
    assert abs(device_memory(gpu.name).free - with_weights) <= 16 * MIB, "no memory was taken twice"
    manager.stop()
    end = time.monotonic() + 20
    while (freed := device_memory(gpu.name).free - with_weights) < NBYTES:
        assert time.monotonic() < end, f"{freed} bytes came back after the stop"
    print(f"stop: {freed / MIB:.0f} MiB came back")


def test_a_loader_that_is_killed_leaves_no_memory(manager: Manager, tmp_path: Path) -> None:
    """A load of the second generation that is killed half-way gives its memory back, and the first one stays."""
    gpu = gpu_devices()[0].name
    before = device_memory(gpu).free
    source = json.loads(manager.ctl("status", "--json"))["services"][0]["models"][0]["checkpoint"]
    with open(source, "wb") as file:
        header = json.dumps({"w": {"dtype": "U8", "shape": [NBYTES], "data_offsets": [0, NBYTES]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + NBYTES)
    manager.ctl("reload")
    loader = manager.process_of_role("loader")
    os.kill(loader, signal.SIGKILL)
    wait_for_end(loader)
    manager.ctl("status")
    assert manager.model("m")["nbytes"] == NBYTES
    end = time.monotonic() + 20
    while device_memory(gpu).free < before - 16 * MIB:
        assert time.monotonic() < end, f"{before - device_memory(gpu).free} bytes are missing"
    manager.stop()
