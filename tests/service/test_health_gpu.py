"""health on a real GPU: an engine's stray write is seen, counted and blamed, and touches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import becomes_true
from tests.running import process_of_role
from tests.service.conftest import StartService
from tests.service.test_verify_gpu import attached, device, published

__all__ = ["device"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
ROOT = Path(__file__).parents[2]
STRAY_WRITE = """
import torch, weightcached
weights = weightcached.attach("m", device="cuda:0")
largest = max(weights.values(), key=lambda tensor: tensor.numel() * tensor.element_size())
try:
    largest.view(torch.uint8).add_(1)
    torch.cuda.synchronize()
    print("written")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


def test_a_stray_write_is_an_engines_own_fault(start_service: StartService, device: str) -> None:
    """The watcher says that it watches, and has the device's file open. A write into a read-only mapping ends in an
    illegal address in its own process. Within ten seconds it is counted as Xid 31; the shard is verified, clean, and
    still there with its lease."""
    service = start_service(f'devices = ["{device}"]\n').ready()
    assert becomes_true(lambda: f"watching {device} for errors" in service.log, 30.0)
    assert any(re.fullmatch(r"/dev/nvidia\d+", name) for name in opened(process_of_role(service, "watch-devices")))

    published(device)
    lease, fds = attached(device)
    with lease, fds:
        began = time.monotonic()
        assert "illegal memory access" in stray_write()
        assert becomes_true(lambda: "31" in service.status()["devices"][0]["xids"], 10.0)
        print(f"Xid 31 counted {time.monotonic() - began:.2f} s after the writer was started")
        assert becomes_true(lambda: "bytes verified in" in service.log, 30.0)
        (shard,) = service.status()["devices"][0]["shards"]
        assert (shard["state"], [holder["pid"] for holder in shard["leases"]]) == ("cached", [os.getpid()])
    assert re.search(rf"{device}: Xid 31 \(GPU memory page fault\), by .*; an engine's own fault", service.log)
    assert "are not what was published" not in service.log
    service.stop()


def opened(pid: int) -> list[str]:
    """What a process has open."""
    return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]


def stray_write() -> str:
    """What a process says that has the model attached and adds to one of its tensors. By a kernel: the driver's own
    cuMemsetD8 of a read-only mapping is refused before it reaches the GPU."""
    done = subprocess.run([sys.executable, "-c", STRAY_WRITE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()
