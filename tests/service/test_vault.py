"""vault: copies of descriptors, each closed exactly when its shard is dropped."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.manager import Manager
from tests.worker.process import shard
from weightcached.fds import FdSet
from weightcached.service.store import Store
from weightcached.service.vault import Vault


@pytest.fixture
def vault(descriptors: NoDescriptorLeaks) -> Vault:
    return Vault()


def fds(count: int = 2) -> FdSet:
    return FdSet(os.open(os.devnull, os.O_RDONLY) for _ in range(count))


def hold(vault: Vault, device: str, model: str, generation: int, nbytes: int = 10) -> list[int]:
    """Holds a new shard; the numbers of its descriptors."""
    with fds() as given:
        numbers = [fd.fileno() for fd in given]
        vault.hold(device, model, generation, nbytes, given)
        assert len(given) == 0  # they are the vault's now
    return numbers


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def names(vault: Vault, device: str) -> list[tuple[str, int]]:
    return [(shard.model, shard.generation) for shard in vault.of_device(device)]


def test_a_held_shard_keeps_its_descriptors_in_order(vault: Vault) -> None:
    """What was given comes back: the same descriptors in the same order, with the shard's name and bytes."""
    numbers = hold(vault, "host-0", "m", 1, 99)
    (shard,) = vault.of_device("host-0")
    assert [fd.fileno() for fd in shard.descriptors] == numbers
    assert (shard.device, shard.model, shard.generation, shard.nbytes) == ("host-0", "m", 1, 99)
    vault.close()


def test_a_dropped_shard_is_closed_at_once(vault: Vault) -> None:
    """Dropping closes this shard's copies and no other's; dropping again, or what was never there, does nothing."""
    first, second = hold(vault, "host-0", "m", 1), hold(vault, "host-0", "m", 2)
    vault.drop("host-0", "m", 1)
    vault.drop("host-0", "m", 1)
    vault.drop("host-1", "m", 2)
    vault.drop("host-0", "other", 2)
    assert not any(map(is_open, first))
    assert all(map(is_open, second))
    vault.close()


def test_a_shard_of_the_same_name_takes_the_place(vault: Vault) -> None:
    """A generation that is held twice does not leak the copies of the first time."""
    first = hold(vault, "host-0", "m", 1)
    os.close(os.dup(0))
    second = hold(vault, "host-0", "m", 1, 20)
    assert [shard.nbytes for shard in vault.of_device("host-0")] == [20]
    assert not any(is_open(fd) for fd in set(first) - set(second))
    assert all(map(is_open, second))
    vault.close()


def test_devices_are_apart_and_older_generations_first(vault: Vault) -> None:
    """A worker gets the shards of its own device, in the order in which they replaced each other."""
    for device, model, generation in (("host-0", "m", 3), ("host-1", "m", 9), ("host-0", "n", 2), ("host-0", "m", 1)):
        hold(vault, device, model, generation)
    assert names(vault, "host-0") == [("m", 1), ("n", 2), ("m", 3)]
    assert names(vault, "host-1") == [("m", 9)]
    assert names(vault, "host-2") == []
    vault.close()


def test_find_gives_the_newest(vault: Vault) -> None:
    """Of several generations the newest counts, also when an older one is held after it."""
    hold(vault, "host-0", "m", 2)
    hold(vault, "host-0", "m", 1)
    found = vault.find("host-0", "m")
    assert found is not None and found.generation == 2
    assert vault.find("host-0", "other") is None
    assert vault.find("host-1", "m") is None
    vault.close()


def test_generations_outlive_their_shards(vault: Vault) -> None:
    """The highest number ever held is remembered for each device and model, whatever was dropped."""
    for generation in (1, 3, 2):
        hold(vault, "host-0", "m", generation)
        vault.drop("host-0", "m", generation)
    hold(vault, "host-1", "m", 7)
    generations = vault.generations("host-0")
    assert generations == {"m": 3}
    generations["m"] = 0  # a copy
    assert vault.generations("host-0") == {"m": 3}
    assert vault.generations("host-2") == {}
    vault.close()
    assert vault.generations("host-0") == {"m": 3}


def test_close_closes_everything(vault: Vault) -> None:
    """At the end nothing is held; closing again does nothing."""
    numbers = [fd for generation in range(5) for fd in hold(vault, "host-0", "m", generation)]
    vault.close()
    vault.close()
    assert not any(map(is_open, numbers))
    assert vault.of_device("host-0") == []


def test_a_service_manager_keeps_what_is_held(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> None:
    """Held: stored. Dropped, or replaced under its name: removed. Closed: left there for the next process."""
    manager = Manager(runtime_dir, "")
    manager.hears_tests = True

    async def main() -> None:
        store = Store(manager.address)
        working = asyncio.create_task(store.run())
        vault = Vault(store)
        for generation in (1, 2, 2):
            with shard("m", generation, os.urandom(9)) as given:
                vault.hold("host-0", "m", generation, 9, given)
        await vault.settled()
        assert len(manager.stored) == 4
        assert vault.describe_store()["shards"] == 2
        newest = vault.find("host-0", "m")
        assert newest is not None
        assert manager.content(".2.1") == os.pread(newest.descriptors[1].fileno(), 9, 0)
        vault.drop("host-0", "m", 1)
        await vault.settled()
        assert len(manager.stored) == 2
        vault.close()
        await vault.settled()
        assert len(manager.stored) == 2
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        store.close()

    asyncio.run(main())
    manager.abandon()


def test_without_a_service_manager_nothing_is_waited_for(vault: Vault) -> None:
    """Any descriptors are held, and everything is settled at once."""
    hold(vault, "host-0", "m", 1)
    asyncio.run(vault.settled())
    assert vault.describe_store() == {"active": False}
    assert vault.filled.is_set()
    vault.close()
