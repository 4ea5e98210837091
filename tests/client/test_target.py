"""client/target.py: which device a caller means. CUDA is played: what the driver and torch say is given."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightcached.client import target
from weightcached.errors import DeviceError, NoSuchDevice


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, a GPU and a MIG instance; the second is torch's current one."""
    names = ["GPU-aaaa", "MIG-bbbb"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setitem(sys.modules, "weightcached.shard.cuda", SimpleNamespace(device_name=names.__getitem__))


@pytest.mark.parametrize("device", ["cpu", "host-0", torch.device("cpu")])
def test_the_host(device: Any) -> None:
    """The name "cpu" means the first NUMA node."""
    assert target.resolve(device) == target.Target("host-0")
    assert target.resolve("host-3") == target.Target("host-3")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "name", "ordinal"),
    [
        (None, "MIG-bbbb", 1),
        ("cuda", "MIG-bbbb", 1),
        ("cuda:0", "GPU-aaaa", 0),
        (torch.device("cuda", 1), "MIG-bbbb", 1),
        ("GPU-aaaa", "GPU-aaaa", 0),
        ("MIG-bbbb", "MIG-bbbb", 1),
    ],
)
def test_a_gpu(device: Any, name: str, ordinal: int) -> None:
    """Ordinals and names find each other; nothing given, or "cuda", is torch's current device."""
    found = target.resolve(device)
    assert (found.name, found.ordinal, found.torch_device) == (name, ordinal, f"cuda:{ordinal}")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["cuda:2", "GPU-cccc", "GPU-bbbb", "xpu", "mps:0", "host-x"])
def test_no_such_gpu(device: str) -> None:
    """A device that this process does not see is an error that lists what it sees."""
    with pytest.raises(NoSuchDevice, match=f"no device {device}; devices here: GPU-aaaa, MIG-bbbb, host-0"):
        target.resolve(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_and_no_device_given() -> None:
    """Host memory is never taken unasked."""
    with pytest.raises(DeviceError, match="name one, such as device='host-0'"):
        target.resolve(None)
    with pytest.raises(NoSuchDevice, match="devices here: host-0"):
        target.resolve("cuda")


def test_a_torch_that_is_broken_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch's own absence is a missing dependency; a module that torch misses is reported as it is."""

    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(target.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        target.import_torch("attach")
