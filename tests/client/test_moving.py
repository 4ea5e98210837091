"""client/moving.py: bytes into slabs and tensors onto them. A GPU's memory is the fake driver's."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from tests.client.handmade import RunningWorker
from tests.fake_cuda import FakeDriver
from weightcached.client import mapping, moving
from weightcached.client.modules import NamedTensor
from weightcached.client.publish import publish
from weightcached.client.storages import plan_storages
from weightcached.client.target import Target
from weightcached.errors import ManifestError
from weightcached.shard import cuda


def test_a_gpu_slab_is_zeroed_filled_checksummed_and_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the slab are the tensors' bytes and zeros between them, and nothing of the driver's is left over."""
    fake = FakeDriver()
    fake.cuInit(0)
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: contextlib.nullcontext())

    def on_host(owner: object, address: int, nbytes: int, device: str) -> torch.Tensor:
        memory: Any = mmap.mmap(fake.mappings[address].fd, nbytes)
        return torch.frombuffer(memory, dtype=torch.uint8)

    monkeypatch.setattr(mapping, "device_tensor", on_host)
    tensors = {"a": torch.arange(5.0), "b": torch.arange(7, dtype=torch.int64)}
    named = [NamedTensor(name, tensor) for name, tensor in tensors.items()]
    plan = plan_storages(named, (), Target("host-0"), lambda item: False)

    fd, checksums = moving._fill(Target("GPU-0", 0), plan.sizes[0], plan.blocks, plan.entries)

    with fd, contextlib.closing(cuda.CudaMapping.open(0, [(fd.fileno(), plan.sizes[0])])) as opened:
        content = fake.peek(opened.address, plan.sizes[0])
        for entry in plan.entries:
            data = content[entry.offset : entry.offset + entry.nbytes]
            assert data == tensors[entry.name].numpy().tobytes()
        assert sum(content) == sum(sum(tensor.numpy().tobytes()) for tensor in tensors.values())
        context = cuda.PrimaryContext(0)
        from weightcached.shard.cuda_checksum import checksum_slab

        assert checksum_slab(context, opened.address, plan.entries) == checksums
        context.close()
    assert fake.live() == {}


def test_several_slabs_come_back_all_or_none() -> None:
    """Where one slab cannot be mapped again those before it are given up; another number of them is refused."""
    calls: list[str] = []

    class Memory:
        def __init__(self, name: str, *, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def unmap(self) -> None:
            calls.append(f"unmap {self.name}")

        def remap(self, slabs: Any) -> None:
            if self.fails:
                raise ManifestError(problem="no")
            calls.append(f"remap {self.name} {slabs}")

    several = moving.SeveralSlabs([Memory("a"), Memory("b", fails=True)])
    with pytest.raises(ManifestError):
        several.remap([(3, 1), (4, 1)])
    assert calls == ["remap a [(3, 1)]", "unmap a"]
    with pytest.raises(ManifestError, match="2 slabs were mapped, 1 came"):
        several.remap([(3, 1)])


def test_a_tensor_is_put_onto_other_memory() -> None:
    """The object, its class, shape, stride and gradient flag stay; only where it lies changes."""
    memory = torch.arange(64, dtype=torch.uint8)
    tensor = torch.nn.Parameter(torch.zeros(2, 3).T)
    moving.put_onto(tensor, memory.untyped_storage(), 16)

    assert tensor.data_ptr() == memory.data_ptr() + 16
    assert tensor.stride() == (1, 3) and tensor.requires_grad and isinstance(tensor, torch.nn.Parameter)


def test_storages_of_one_address_and_several_lengths(worker: RunningWorker) -> None:
    """numpy's arrays are such: each tensor has a storage of its own, and the longest has all bytes."""
    values = np.arange(100, dtype=np.float32)
    tensors = {"all": torch.from_numpy(values), "part": torch.from_numpy(values[:20])[10:15]}

    with publish("arrays", tensors, key={"layout": "test-1", "content": "c"}, device="host-0") as weights:
        assert torch.equal(weights["all"], torch.arange(100.0)) and torch.equal(tensors["all"], weights["all"])
        assert torch.equal(tensors["part"], torch.arange(10.0, 15.0))
        assert tensors["part"].data_ptr() == tensors["all"].data_ptr() + 40
