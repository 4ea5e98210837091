"""engines/room.py: a load from disk that does not fit beside what is cached is refused before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.client.handmade import DEVICE, Raw, RunningWorker, make_shard
from tests.engines.tiny import wanted
from weightcached import attach
from weightcached.devices import Memory
from weightcached.engines import room
from weightcached.engines.policy import refuse_beside
from weightcached.errors import DeviceFull

FREE = 1000


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has 10000 bytes, of which 1000 are free."""
    monkeypatch.setattr(room, "device_memory", lambda name: Memory(total=10_000, free=FREE))


def hold(worker: RunningWorker, model: str, nbytes: int) -> None:
    worker.publish(make_shard([Raw("w", "U8", (nbytes,), bytes(nbytes))], model=model))


def test_what_fits_is_not_refused(worker: RunningWorker, tmp_path: Path) -> None:
    """As many bytes as are free, and an unknown number."""
    hold(worker, "a", 2048)
    for nbytes in (0, FREE):
        refuse_beside(wanted(tmp_path, nbytes=nbytes))


def test_which_shards_to_evict(worker: RunningWorker, tmp_path: Path) -> None:
    """The fewest idle shards that make the room are named, with needed, free and evictable bytes."""
    for name, nbytes in (("small", 512), ("large", 4096), ("middle", 2048)):
        hold(worker, name, nbytes)
    with pytest.raises(DeviceFull) as caught:
        refuse_beside(wanted(tmp_path, nbytes=FREE + 4097))
    error = caught.value
    assert (error.device, error.needed, error.free, error.limit) == (DEVICE, FREE + 4097, FREE, 10_000)
    assert error.evictable == 512 + 4096 + 2048
    assert set(error.holders) == {"small 512 bytes", "large 4096 bytes", "middle 2048 bytes"}
    assert str(error).endswith("evict what nobody uses: weightcachectl evict large && weightcachectl evict middle")


def test_who_uses_the_others(worker: RunningWorker, tmp_path: Path) -> None:
    """What is in use is named with its users; it does not count as evictable."""
    hold(worker, "idle", 512)
    hold(worker, "used", 4096)
    with attach("used", device=DEVICE), pytest.raises(DeviceFull) as caught:
        refuse_beside(wanted(tmp_path, nbytes=FREE + 4000))
    assert caught.value.evictable == 512
    (used,) = [text for text in caught.value.holders if text.startswith("used")]
    assert used.startswith(f"used 4096 bytes (in use by pid {os.getpid()} (")
    assert "evict what nobody uses: weightcachectl evict idle; that is not enough, end those who use" in str(
        caught.value
    )


def test_no_fault_of_the_cache(worker: RunningWorker, tmp_path: Path) -> None:
    """A device that is too small without the cache too is the engine's own affair."""
    hold(worker, "a", 512)
    refuse_beside(wanted(tmp_path, nbytes=FREE + 513))


def test_no_service(runtime_dir: Path, tmp_path: Path) -> None:
    """Nothing is cached where nobody answers, so nothing is refused."""
    refuse_beside(wanted(tmp_path, nbytes=FREE + 1))
