"""client/publish.py on a real GPU: the engine runs from read-only device memory that other processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu
from tests.running import RunningService
from weightcached.client import moving, storages
from weightcached.client.publish import publish
from weightcached.shard.cuda import device_name

pytestmark = pytest.mark.gpu
MIB = 1 << 20
KEY = {"layout": "test-1", "content": "c1"}
ATTACH = """
import sys, torch, weightcached
weights = weightcached.attach("engine", device="cuda:0", key={"layout": "test-1", "content": "c1"})
print(*[f"{name}={tensor.double().sum().item():.17g}" for name, tensor in weights.items()])
if len(sys.argv) > 1:
    weights["0"].zero_()
    torch.cuda.synchronize()
    print("written")
"""


def attach_in_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, "-c", ATTACH, *arguments], cwd=root, capture_output=True, text=True)


def test_an_engine_on_a_gpu(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors keep their values, peak use is the weights and a slab, a child reads the same and cannot write;
    another engine with the same weights ends with the same memory."""
    device = device_name(0)
    monkeypatch.setattr(storages, "SLAB_BYTES", 64 * MIB)
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(runtime_dir))
    service = RunningService(runtime_dir, f'devices = ["{device}"]\n').ready()
    try:
        torch.manual_seed(1)
        torch.cuda.empty_cache()  # tensors in a segment that others have left come free with the last of them only
        # 16 parameters of 32 MiB, and one that the engine has on the CPU.
        engine = {str(number): torch.randn(8 * MIB, device="cuda:0") for number in range(16)}
        engine["cpu"] = torch.randn(10)
        before = {name: tensor.cpu() for name, tensor in engine.items()}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used = gpu.used_bytes(0)
        peaks = []
        monkeypatch.setattr(moving, "point", lambda name: peaks.append(gpu.used_bytes(0)))  # a slab is there twice

        weights = publish("engine", engine, key=KEY, device="cuda:0")

        assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in engine.items())
        assert len(peaks) >= 8 and max(peaks) - used <= 64 * MIB + 32 * MIB  # kernels of checksums are loaded, too
        assert gpu.becomes_true(lambda: gpu.used_bytes(0) - used < 128 * MIB)
        assert engine["3"].data_ptr() == weights["3"].data_ptr()
        assert engine["cpu"].device.type == "cpu"
        child = attach_in_child()
        assert child.returncode == 0, child.stderr
        sums = dict(item.split("=") for item in child.stdout.split())
        assert all(float(sums[name]) == engine[name].double().sum().item() for name in engine if name != "cpu")
        writer = attach_in_child("write")
        assert writer.returncode != 0 and "written" not in writer.stdout
        assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in engine.items())
        second = {name: tensor.clone() for name, tensor in engine.items()}  # as another engine has loaded them
        shared = publish("engine", second, key=KEY, device="cuda:0", if_cached="share")
        assert shared.generation == weights.generation
        assert second["3"].data_ptr() == shared["3"].data_ptr() != engine["3"].data_ptr()
        assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in second.items())
        assert gpu.becomes_true(lambda: gpu.used_bytes(0) - used < 128 * MIB)
        for tensors, held in ((engine, weights), (second, shared)):
            tensors.clear()
            held.close()
    finally:
        service.stop()
