"""What only a GPU can show of the main job: its memory at rest, its UUID as the default device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.running import RunningService, process_of_role, wait_for_end
from weightcached.devices import device_memory, gpu_devices

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
NBYTES = 1 << 30
ENGINE = """
import torch, weightcached
weights = weightcached.attach("m")
print(weights.device, weights["w"].device, weights["w"].view(torch.int64).sum().item())
"""


@pytest.fixture
def gpu() -> str:
    return gpu_devices()[0].name


@pytest.fixture
def service(runtime_dir: Path, gpu: str, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Iterator[RunningService]:
    """A service on the GPU with a model "m" of 1 GiB that is not loaded yet."""
    path = make_checkpoint(tmp_path / "m.safetensors", {"w": ("U8", (NBYTES,), os.urandom(MIB) * (NBYTES // MIB))})
    config = f'devices = ["{gpu}"]\n[[model]]\nname = "m"\ncheckpoint = "{path}"\npreload = false\n'
    running = RunningService(runtime_dir, config)
    try:
        yield running.ready()
        running.stop()
    finally:
        running.abandon()


def engine(**environment: str) -> list[str]:
    """What a fresh process says that attaches without naming a device: the device twice, and a sum over the bytes."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.timeout(240)
def test_memory_on_the_gpu_is_the_weights_and_nothing_else(service: RunningService, gpu: str) -> None:
    """At most 8 MiB beyond the weights at rest; a worker's death changes nothing; an eviction gives all of it back."""
    device = gpu_devices()[0]

    def used() -> int:
        return device.memory.total - device_memory(gpu).free

    before = used()
    service.ctl("load", "m")
    service.ctl("wait", "m", "--timeout", "60")
    wait_for_no_loader(service)
    at_rest = used()
    print(f"GPU memory beyond {NBYTES} bytes of weights at rest: {(at_rest - before - NBYTES) / MIB:.1f} MiB")
    assert NBYTES <= at_rest - before <= NBYTES + 8 * MIB

    first = engine()
    worker = process_of_role(service, "worker")
    os.kill(worker, signal.SIGKILL)
    wait_for_end(worker)
    assert engine() == first
    assert abs(used() - at_rest) <= 8 * MIB

    service.ctl("evict", "m")
    assert abs(used() - before) <= 8 * MIB


def wait_for_no_loader(service: RunningService) -> None:
    """The loader's CUDA context ends with its process, a moment after the model is served."""
    try:
        loader = process_of_role(service, "loader", seconds=0.2)
    except AssertionError:
        return
    wait_for_end(loader)


@pytest.mark.timeout(120)
def test_the_default_device_is_torchs_current_one_by_uuid(service: RunningService, gpu: str) -> None:
    """Without a device, attach finds the worker of the current GPU, also when CUDA_VISIBLE_DEVICES renumbers them."""
    service.ctl("load", "m")
    service.ctl("wait", "m", "--timeout", "60")
    assert engine()[:2] == [gpu, "cuda:0"]
    assert engine(CUDA_VISIBLE_DEVICES=gpu)[:2] == [gpu, "cuda:0"]
