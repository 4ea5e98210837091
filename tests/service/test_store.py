"""store: what the service manager is given, how the service learns that it took it, and what is handed back."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.manager import HAND_OVER, Manager
from tests.running import ROOT
from tests.worker.process import shard
from weightcached.errors import ConnectionFailed
from weightcached.fds import OwnedFd
from weightcached.service import store as store_module
from weightcached.service.store import KeptShard, ShardName, Store, parse_name
from weightcached.shard.manifest import parse_head, read_documents

ID = "0123456789abcdef"
NO_ROOM = "the service manager has no room for it: raise FileDescriptorStoreMax= of the unit (0 is off)"


@pytest.fixture
def manager(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> Iterator[Manager]:
    """A service manager that takes this process for its service. At the end nothing is left open."""
    manager = Manager(runtime_dir, "", store_max=6)
    manager.hears_tests = True
    yield manager
    manager.abandon()


def run(manager: Manager, body: Callable[[Store], Awaitable[None]]) -> None:
    """The body with a store that works meanwhile."""

    async def main() -> None:
        store = Store(manager.address)
        working = asyncio.create_task(store.run())
        try:
            await body(store)
            assert not working.done(), await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            store.close()

    asyncio.run(main())


def files(count: int) -> list[OwnedFd]:
    return [OwnedFd(os.memfd_create("test")) for _ in range(count)]


def close(*shards: KeptShard) -> None:
    for kept in shards:
        for item in kept.descriptors:
            item.close()


def keep(store: Store, generation: int, parts: int) -> KeptShard:
    """A shard of so many descriptors, which the caller closes."""
    return store.keep("m", ShardName("host-0", ID, generation), files(parts))


def names(generation: int, parts: int) -> set[str]:
    return {f"host-0.{ID}.{generation}.{part}" for part in range(parts)}


def stores(manager: Manager) -> set[str]:
    return set(manager.stored)


def same_file(fd: int, item: OwnedFd) -> bool:
    return os.path.sameopenfile(fd, item.fileno())


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop go on until the condition holds; for at most ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.001)


def test_a_shard_is_stored_under_its_names(manager: Manager) -> None:
    """Every descriptor by itself, of the same file, not to be polled; nothing of what asked for it is left."""

    async def body(store: Store) -> None:
        kept = keep(store, 7, 3)
        assert store.describe() == {"active": True, "stored": 0, "shards": 0, "pending": 1, "refused": []}
        await store.settled()
        assert kept.state == "stored"
        assert store.describe() == {"active": True, "stored": 3, "shards": 1, "pending": 0, "refused": []}
        assert stores(manager) == names(7, 3)
        for name, item in zip(kept.names, kept.descriptors, strict=True):
            assert same_file(manager.stored[name], item)
        close(kept)

    run(manager, body)
    stored = [message for message in manager.messages if "FDSTORE=1" in message]
    assert len(stored) == 4  # and the sentinel
    assert all("FDPOLL=0" in message for message in stored)


def test_what_is_forgotten_is_removed(manager: Manager) -> None:
    """One shard goes, the other stays; its descriptors may be closed at once."""

    async def body(store: Store) -> None:
        first, second = keep(store, 1, 2), keep(store, 2, 2)
        await store.settled()
        store.forget(first)
        close(first)
        await store.settled()
        assert stores(manager) == names(2, 2)
        assert store.describe()["shards"] == 1
        store.forget(second)
        close(second)
        await store.settled()
        assert stores(manager) == set()

    run(manager, body)


def test_what_does_not_fit_is_not_stored_at_all(manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    """Half a shard is of no use: nothing of it stays, it is said once, and a smaller one after it is stored."""

    async def body(store: Store) -> None:
        first, large, small = keep(store, 1, 2), keep(store, 2, 5), keep(store, 3, 3)
        await store.settled()
        assert [kept.state for kept in (first, large, small)] == ["stored", "refused", "stored"]
        assert stores(manager) == names(1, 2) | names(3, 3)
        assert store.describe()["refused"] == [
            {"device": "host-0", "model": "m", "generation": 2, "reason": NO_ROOM},
        ]
        close(first, large, small)

    run(manager, body)
    assert [record.getMessage() for record in caplog.records] == [
        f"m on host-0, generation 2 will not survive the end of this process: {NO_ROOM}"
    ]


def test_the_last_place_is_the_sentinels(manager: Manager) -> None:
    """A shard that would fill the store to the brim is refused: nothing could say that it was taken."""

    async def body(store: Store) -> None:
        brim, below = keep(store, 1, 6), keep(store, 2, 5)
        await store.settled()
        assert [brim.state, below.state] == ["refused", "stored"]
        close(brim, below)

    run(manager, body)


def test_room_that_is_made_is_used(manager: Manager, caplog: pytest.LogCaptureFixture) -> None:
    """After another shard's end a refused one is stored; the one that still does not fit is not mentioned again."""

    async def body(store: Store) -> None:
        first, second, huge = keep(store, 1, 4), keep(store, 2, 3), keep(store, 3, 7)
        await store.settled()
        assert [second.state, huge.state] == ["refused", "refused"]
        store.forget(first)
        await until(lambda: second.state == "stored" and huge.state == "refused")
        assert stores(manager) == names(2, 3)
        assert [item["generation"] for item in store.describe()["refused"]] == [3]
        close(first, second, huge)

    run(manager, body)
    assert sum("will not survive" in record.getMessage() for record in caplog.records) == 2


def test_a_store_of_no_size_refuses_everything(manager: Manager) -> None:
    """FileDescriptorStoreMax=0, or a NotifyAccess= that does not let this process speak, look the same."""
    manager.store_max = 0

    async def body(store: Store) -> None:
        kept = keep(store, 1, 2)
        await store.settled()
        assert kept.state == "refused"
        manager.store_max, manager.hears_tests = 6, False
        other = keep(store, 2, 2)
        await store.settled()
        assert other.state == "refused"
        assert manager.refused > 0
        close(kept, other)

    run(manager, body)


def test_a_busy_manager_holds_up_nothing(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it reads nothing the loop goes on and `settled` gives up; a shard is unknown until the answer comes."""
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 0.05)

    async def body(store: Store) -> None:
        with manager.frozen():
            kept, later = keep(store, 1, 2), keep(store, 2, 2)
            await store.settled()
            await until(lambda: kept.state == "unknown")
            refused = store.describe()["refused"]
            assert [item["reason"] for item in refused] == ["the service manager does not answer"]
            assert store.describe()["pending"] == 1
        await until(lambda: later.state == "stored")
        assert kept.state == "stored"
        assert store.describe()["refused"] == []
        close(kept, later)

    run(manager, body)
    assert "m on host-0, generation 1: the service manager does not answer, it may not keep it" in caplog.text
    assert "the service manager has not answered within" in caplog.text


def test_what_is_forgotten_meanwhile_is_not_stored(manager: Manager) -> None:
    """Before it is sent nothing is; in the middle of it, what was sent is removed again and the rest left out."""
    manager.store_max = 100

    async def body(store: Store) -> None:
        with manager.frozen():
            long, waiting = keep(store, 1, 50), keep(store, 2, 2)  # more than a socket's queue takes
            await until(lambda: long.state == "sending")
            for kept in (long, waiting):
                store.forget(kept)
                close(kept)
        await store.settled()
        assert stores(manager) == set()
        assert store.describe()["refused"] == []
        again = keep(store, 1, 2)
        await store.settled()
        assert stores(manager) == names(1, 2)
        close(again)

    run(manager, body)
    assert sum("FDNAME=host-0" in message and "FDSTORE=1" in message for message in manager.messages) < 50


def test_a_name_that_is_given_again_is_of_the_later_shard(manager: Manager) -> None:
    """Forgotten and kept again under the same names: what is stored are the new descriptors."""

    async def body(store: Store) -> None:
        first = keep(store, 1, 2)
        await store.settled()
        store.forget(first)
        second = keep(store, 1, 2)
        await store.settled()
        assert same_file(manager.stored[second.names[0]], second.descriptors[0])
        close(first, second)

    run(manager, body)


def test_a_manager_that_is_gone(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> None:
    """Refused, with the reason; the service goes on."""
    path = runtime_dir / "notify"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(os.fspath(path))

    async def main() -> None:
        store = Store(os.fspath(path))
        working = asyncio.create_task(store.run())
        listener.close()
        kept = keep(store, 1, 2)
        await store.settled()
        assert (kept.state, kept.reason) == ("refused", "it cannot be sent: Connection refused")
        close(kept)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        store.close()

    asyncio.run(main())


def test_without_a_manager_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NOTIFY_SOCKET: nothing is stored, nothing is waited for, and the status says so."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)

    async def main() -> None:
        store = Store.from_environ()
        kept = keep(store, 1, 2)
        store.forget(kept)
        await store.settled()
        assert store.describe() == {"active": False}
        close(kept)
        store.close()

    asyncio.run(main())


def test_a_manager_that_does_not_listen(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> None:
    """A path where nobody is, and an abstract name: refused with the name at the start."""
    for address in (f"{runtime_dir}/nobody", "@weightcached-test-nobody"):
        with pytest.raises(ConnectionFailed, match=f"{address}.*NOTIFY_SOCKET names it"):
            Store(address)


def test_an_abstract_address(descriptors: NoDescriptorLeaks) -> None:
    """As a manager in a container may have."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0weightcached-test-{os.getpid()}")
        Store(f"@weightcached-test-{os.getpid()}").close()


def test_names_can_be_read_back() -> None:
    """Device, shard, generation and part, for every kind of device; the name is one that systemd takes."""
    uuid = "00010203-0405-0607-0809-0a0b0c0d0e0f"
    for device in ("host-0", f"GPU-{uuid}", f"MIG-{uuid}", f"MIG-GPU-{uuid}/3/0"):
        name = ShardName(device, ID, 12).part(252)
        assert parse_name(name) == (ShardName(device, ID, 12), 252)
        assert len(name) <= 255
        assert ":" not in name
    for other in ("", "stored", "sentinel", "host-0.x.1.0", f"host-0.{ID}.1", f"host-0.{ID}.-1.0", f".{ID}.1.0"):
        assert parse_name(other) is None
    for written_otherwise in (f"host-0.{ID}.01.0", f"host-0.{ID}.1.00"):  # it would never be removed
        assert parse_name(written_otherwise) is None


def test_a_name_tells_shards_apart() -> None:
    """Another model, or other weights under the same name, is another shard; the same one is the same."""

    def name(model: str, **head: Any) -> ShardName:
        with shard(model, 1, b"data", **head) as fds:
            return ShardName.of(parse_head(read_documents(next(iter(fds)).fileno())[0]))

    same = name("m")
    assert same == name("m", created="2026-02-02T00:00:00+00:00")
    assert len({same, name("n"), name("m", device="host-1"), name("m", key=_other_key())}) == 4


def _other_key() -> Any:
    from weightcached.shard.key import ShardKey

    return ShardKey(content="another", dtype="uint8")


TAKE = """
import json, os, sys
from weightcached.errors import WeightCacheError
from weightcached.service.store import take_listen_fds
try:
    taken = take_listen_fds()
except WeightCacheError as error:
    sys.exit(str(error))
print(json.dumps([
    [[name, os.fstat(item.fileno()).st_size, os.get_inheritable(item.fileno())] for name, item in taken],
    sorted(name for name in os.environ if name.startswith("LISTEN_")),
]))
for _, item in taken:
    item.close()
"""


def take(fds: list[int], **env: str) -> subprocess.CompletedProcess[str]:
    """What a process that is handed descriptors takes for its own."""
    return subprocess.run(
        [sys.executable, "-IS", "-c", HAND_OVER, str(len(fds)), *map(str, fds), "-W", "error", "-c", TAKE],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.fixture
def two(descriptors: NoDescriptorLeaks) -> Iterator[list[int]]:
    """Memfds of one and of two bytes."""
    opened = files(2)
    for size, item in enumerate(opened, 1):
        os.write(item.fileno(), b"x" * size)
    yield [item.fileno() for item in opened]
    for item in opened:
        item.close()


def test_what_is_handed_over_is_taken_once(two: list[int]) -> None:
    """With its names, closed in children from then on; the variables are gone: no child takes it for its own."""
    done = take(two, LISTEN_FDS="2", LISTEN_FDNAMES="b:a")
    assert done.stdout == '[[["b", 1, false], ["a", 2, false]], []]\n', done.stderr


def test_names_that_are_missing_are_empty(two: list[int]) -> None:
    """More descriptors than names: none is left open without an owner."""
    done = take(two, LISTEN_FDS="2", LISTEN_FDNAMES="b")
    assert done.stdout == '[[["b", 1, false], ["", 2, false]], []]\n', done.stderr


def test_what_is_meant_for_another_process_is_left_alone() -> None:
    """LISTEN_PID of a parent: nothing is taken, and the variables go no further."""
    done = take([], LISTEN_PID="1", LISTEN_FDS="2", LISTEN_FDNAMES="b:a")
    assert done.stdout == "[[], []]\n", done.stderr
    assert take([]).stdout == "[[], []]\n"


@pytest.mark.parametrize("count", ["3", "many", "-1"])
def test_descriptors_that_are_not_there(two: list[int], count: str) -> None:
    """Fewer than announced, or no number at all: an error that says so, and what was there is closed."""
    done = take(two, LISTEN_FDS=count, LISTEN_FDNAMES="b:a:c")
    if count == "-1":
        assert done.stdout == "[[], []]\n", done.stderr
    else:
        assert f"LISTEN_FDS={count}, but descriptor" in done.stderr
        assert "ResourceWarning" not in done.stderr


def test_a_shard_is_sent_before_the_manager_answers(manager: Manager) -> None:
    """While the manager reads nothing, a shard that fits into its socket's queue is on its way, so it outlives this
    process; one that does not fit is not, until the manager reads again. A forgotten one keeps nobody waiting."""

    async def body(store: Store) -> None:
        with manager.frozen():
            first = keep(store, 1, 2)
            await asyncio.wait_for(first.sent.wait(), 10)
            assert first.state == "sending"
            second, third = keep(store, 2, 2), keep(store, 3, 2)  # they come after the first one's barrier
            assert not second.sent.is_set() and not third.sent.is_set()
            store.forget(third)
            assert third.sent.is_set()
        await asyncio.wait_for(second.sent.wait(), 10)
        await store.settled()
        assert stores(manager) == names(1, 2) | names(2, 2)
        close(first, second, third)

    run(manager, body)
