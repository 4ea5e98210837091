"""adopt: GPU shards, whose slabs another process looks at. What is found on the host is in `test_survival`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.client.handmade import HandMade, Raw, make_shard
from tests.leaks import NoDescriptorLeaks
from tests.manager import Manager
from weightcached.errors import DeviceError, ManifestError, WeightCacheError
from weightcached.fds import OwnedFd
from weightcached.service import adopt as adopt_module
from weightcached.service.adopt import Inspect, adopt
from weightcached.service.store import ShardName, Store
from weightcached.service.vault import Vault
from weightcached.service.verify import inspect
from weightcached.worker import slabs

GPUS = ["GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-10010203-0405-0607-0809-0a0b0c0d0e0f"]
TENSORS = [Raw("w", "U8", (64,), os.urandom(64))]


@pytest.fixture
def manager(runtime_dir: Path, descriptors: NoDescriptorLeaks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """A service manager that takes this process for its service. At the end nothing is left open."""
    null = os.stat(os.devnull).st_rdev
    monkeypatch.setattr(slabs, "NVIDIA_CONTROL", (os.major(null), os.minor(null)))
    manager = Manager(runtime_dir, "")
    manager.hears_tests = True
    yield manager
    manager.abandon()


def on_gpu(model: str, generation: int = 1, device: str = GPUS[0]) -> HandMade:
    """A shard whose slab is a character device, /dev/null in the place of the driver's."""
    shard = make_shard(TENSORS, model=model, generation=generation, device=device)
    shard.slabs[0].close()
    shard.slabs[0] = OwnedFd(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    return shard


def handed(manager: Manager, *shards: HandMade) -> list[tuple[str, OwnedFd]]:
    """Puts shards into the store and gives what a start would be handed, newest first. Closes the shards."""
    found = []
    for shard in shards:
        for part, item in enumerate((shard.manifest, *shard.slabs)):
            name = ShardName.of(shard.head).part(part)
            manager.put(name, item.fileno())
            found.insert(0, (name, item.dup()))
        shard.close()
    return found


def adopted(manager: Manager, given: list[tuple[str, OwnedFd]], inspector: Inspect) -> list[tuple[str, str, int]]:
    """Device, model and generation of all that is in the vault afterwards."""

    async def main() -> list[tuple[str, str, int]]:
        store = Store(manager.address)
        working = asyncio.create_task(store.run())
        vault = Vault(store)
        try:
            await adopt(given, GPUS, vault, store, inspector)
            await vault.settled()
            return sorted((held.device, held.model, held.generation) for gpu in GPUS for held in vault.of_device(gpu))
        finally:
            vault.close()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            store.close()

    return asyncio.run(main())


class Inspector:
    """Answers for the other process: by the model's name what is wrong with a shard, after some failures."""

    def __init__(self, wrong: dict[str, WeightCacheError] | None = None, failures: int = 0) -> None:
        self.wrong = wrong or {}
        self.failures = failures
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, device: str, shards: Sequence[tuple[str, list[OwnedFd]]]) -> list[WeightCacheError | None]:
        self.asked.append((device, len(shards)))
        if self.failures:
            self.failures -= 1
            raise DeviceError(device=device, problem="its driver does not work")
        assert all(len(descriptors) == 2 for _, descriptors in shards)
        return [self.wrong.get(label.split()[0]) for label, _ in shards]


def test_one_process_looks_at_each_device(manager: Manager) -> None:
    """All shards of a GPU are looked at together; what is good is adopted and stays in the store."""
    given = handed(manager, on_gpu("a"), on_gpu("b"), on_gpu("c", device=GPUS[1]))
    inspector = Inspector()
    assert adopted(manager, given, inspector) == [(GPUS[0], "a", 1), (GPUS[0], "b", 1), (GPUS[1], "c", 1)]
    assert inspector.asked == [(GPUS[0], 2), (GPUS[1], 1)]
    assert len(manager.stored) == 6


def test_what_it_finds_wrong_is_dropped(manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    """A slab of another size, or of another device: the reason is logged, the others stay."""
    given = handed(manager, on_gpu("a"), on_gpu("b"), on_gpu("c"))
    wrong = {"b": ManifestError(problem="slab 0 is not of the 64 bytes listed")}
    assert [model for _, model, _ in adopted(manager, given, Inspector(wrong))] == ["a", "c"]
    assert len(manager.stored) == 4
    assert f"b on {GPUS[0]}, generation 1, was kept by the service manager and is dropped" in caplog.text
    assert "slab 0 is not of the 64 bytes listed" in caplog.text


def test_a_slab_that_is_no_export_needs_no_driver(manager: Manager) -> None:
    """A memfd in the place of a GPU's slab is dropped before any process is started."""
    inspector = Inspector()
    given = handed(manager, make_shard(TENSORS, device=GPUS[0]))
    assert adopted(manager, given, inspector) == []
    assert inspector.asked == []
    assert manager.stored == {}


def test_a_driver_that_hesitates_is_asked_again(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost and nothing is given out unseen meanwhile."""
    monkeypatch.setattr(adopt_module, "INSPECT_PAUSES", (0.0, 0.0))
    inspector = Inspector(failures=2)
    assert adopted(manager, handed(manager, on_gpu("a")), inspector) == [(GPUS[0], "a", 1)]
    assert len(inspector.asked) == 3


def test_a_driver_that_does_not_work_costs_nothing(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be looked at is adopted with an error in the log: clients check it, and the other devices go on."""
    monkeypatch.setattr(adopt_module, "INSPECT_PAUSES", (0.0, 0.0))
    given = handed(manager, on_gpu("a"))
    assert adopted(manager, given, Inspector(failures=3)) == [(GPUS[0], "a", 1)]
    assert len(manager.stored) == 2
    assert "its driver does not work; its shards are adopted unchecked" in caplog.text


def test_a_name_that_came_twice(manager: Manager) -> None:
    """The newest descriptor counts, the other one is closed."""
    shard = on_gpu("a")
    given = handed(manager, shard)
    name = ShardName.of(shard.head).part(1)
    second = OwnedFd(os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC))
    given.append((name, second))
    assert adopted(manager, given, Inspector()) == [(GPUS[0], "a", 1)]
    assert second.closed


def test_the_real_process_without_a_driver(descriptors: NoDescriptorLeaks) -> None:
    """It says that it cannot tell, which is an error of the device and not of the shard; on a GPU's host as well."""

    async def main() -> None:
        shards = [on_gpu("a"), on_gpu("b")]
        given = [(shard.head.model, [shard.manifest, *shard.slabs]) for shard in shards]
        with pytest.raises(WeightCacheError) as caught:
            await inspect(GPUS[0], given)
        assert re.search("no driver|cuda|no device|CUDA", str(caught.value)), caught.value
        for shard in shards:
            shard.close()

    asyncio.run(main())


def test_a_process_that_cannot_be_started(descriptors: NoDescriptorLeaks, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process to be had: an error of the device, nothing left open."""

    async def no_process(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("weightcached.service.verify.spawn_role", no_process)
    shard = on_gpu("a")
    with contextlib.closing(shard), pytest.raises(DeviceError, match="cannot be started: Resource temporarily"):
        asyncio.run(inspect(GPUS[0], [("a", [shard.manifest, *shard.slabs])]))
