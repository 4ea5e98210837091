"""room: evictions for a reservation, and the wait until their memory is free; on a real worker process, and in this one
where the device must answer what the test says."""

from __future__ import annotations

import asyncio
import logging
import os
import select
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.wire.serving import Client
from tests.worker.process import WorkerProcess
from tests.worker.test_catalogue import PEER, Device, publish
from weightcached.errors import DeviceFull
from weightcached.worker import room
from weightcached.worker.catalogue import Catalogue, Shard
from weightcached.worker.room import Room
from weightcached.worker.settling import Settling


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    """A worker with room for 1000 bytes, which logs no defect."""
    process = WorkerProcess(limit=1000).serve()
    yield process
    assert "Traceback" not in process.log()
    process.close()


def silent(client: Client) -> bool:
    """Whether the client has got no answer, some time after the worker has had every occasion to give it."""
    return not select.select([client.sock], [], [], 0.05)[0]


def reserve(client: Client, model: str, nbytes: int) -> None:
    client.send({"op": "reserve", "model": model, "nbytes": nbytes})


def made_room(worker: WorkerProcess) -> tuple[str, str]:
    """The next message must be a drop for another model: which one, and for whom. Not confirmed yet."""
    name = worker.heard()["drop"]
    return name["model"], name["room_for"]


def confirm(worker: WorkerProcess, model: str, generation: int = 1) -> None:
    worker.tell({"dropped": {"model": model, "generation": generation}})


class TestReserve:
    """A publisher asks for more than is free."""

    def test_the_least_recently_used_goes_and_is_gone(self, worker: WorkerProcess) -> None:
        """Its descriptors are closed at once; the publisher gets its room when the service has let go of its own."""
        worker.publish("a", b"x" * 400)
        worker.publish("b", b"x" * 400)
        with worker.client() as client, worker.client() as watcher:
            watcher.ask({"op": "subscribe"})
            before = worker.descriptors()
            reserve(client, "new", 500)
            assert made_room(worker) == ("a", "new")
            assert [shard["model"] for shard in worker.status()["shards"]] == ["b"]
            assert (
                worker.descriptors() <= before - 2 + 1
            )  # manifest and slab; the connection for the status may be there
            assert silent(client)
            confirm(worker, "a")
            assert (client.receive() or {})["ok"] == {"model": "new", "nbytes": 500, "generation": 1}
            event = (watcher.receive() or {})["event"]
            assert (event["what"], event["model"], event["reason"]) == ("evicted", "a", "room for new")

    def test_two_at_once_do_not_count_the_same_bytes(self, worker: WorkerProcess) -> None:
        """While one waits for what it has evicted, the other waits its turn; each finds a victim of its own, a third
        finds none."""
        worker.publish("a", b"x" * 400)
        worker.publish("b", b"x" * 400)
        clients = [worker.client() for _ in range(3)]
        for number, client in enumerate(clients):
            reserve(client, f"new-{number}", 500)
            worker.status()
        assert made_room(worker) == ("a", "new-0")
        worker.status()
        assert not select.select([worker.channel], [], [], 0.05)[0]
        confirm(worker, "a")
        assert made_room(worker) == ("b", "new-1")
        confirm(worker, "b")
        replies = [client.receive() or {} for client in clients]
        assert [next(iter(reply)) for reply in replies] == ["ok", "ok", "error"]
        assert replies[2]["error"]["code"] == "device-full"
        assert worker.status()["held"] == 1000
        for client in clients:
            client.close()

    def test_a_publisher_that_leaves_meanwhile(self, worker: WorkerProcess) -> None:
        """Nothing is reserved for it, and whoever is next gets the room that it had made."""
        worker.publish("a", b"x" * 1000)
        with worker.client() as client, worker.client() as following:
            reserve(client, "gone", 600)
            assert made_room(worker) == ("a", "gone")
            client.close()
            reserve(following, "next", 1000)
            worker.status()
            confirm(worker, "a")
            assert "ok" in (following.receive() or {})
        assert [item["model"] for item in worker.status()["reservations"]] in ([], ["next"])

    def test_what_an_operator_evicts_is_waited_for(self, worker: WorkerProcess) -> None:
        """The device is not asked before that memory is free as well: no other model need go."""
        worker.publish("a", b"x" * 400)
        worker.publish("b", b"x" * 400)
        with worker.client() as operator, worker.client() as client:
            operator.send({"op": "evict", "model": "b"})
            assert worker.heard()["drop"]["model"] == "b"
            reserve(client, "new", 600)
            worker.status()
            assert silent(client)
            confirm(worker, "b")
            assert "ok" in (client.receive() or {})
            assert "ok" in (operator.receive() or {})
        assert [shard["model"] for shard in worker.status()["shards"]] == ["a"]

    def test_pinned_and_leased_ones_stay(self, worker: WorkerProcess) -> None:
        """The refusal names each with the reason; unpinned and let go, they make room."""
        worker.publish("pinned", b"x" * 400)
        worker.publish("leased", b"x" * 400)
        worker.tell({"models": {"pinned": {"state": "cached", "pin": True}}})
        with worker.client() as client:
            with worker.client() as holder:
                holder.ask({"op": "attach", "model": "leased"})
                error = client.refused({"op": "reserve", "model": "new", "nbytes": 500})
                assert (error["fields"]["free"], error["fields"]["evictable"]) == (200, 0)
                assert "pinned 400 bytes (pinned)" in error["message"]
                assert f"leased 400 bytes (in use by pid {os.getpid()}" in error["message"]
                assert {shard["model"]: shard["pin"] for shard in worker.status()["shards"]} == {
                    "pinned": True, "leased": False,
                }  # fmt: skip
            while any(shard["leases"] for shard in worker.status()["shards"]):
                pass
            reserve(client, "new", 500)
            assert made_room(worker) == ("leased", "new")
            confirm(worker, "leased")
            assert "ok" in (client.receive() or {})

    def test_evict_first(self, worker: WorkerProcess) -> None:
        """The old generation goes for the next one of its own model, which gets the next number."""
        worker.publish("m", b"x" * 600)
        worker.tell({"models": {"m": {"state": "loading", "replace": "beside"}}})
        with worker.client() as client:
            error = client.refused({"op": "reserve", "model": "m", "nbytes": 600})
            assert 'replace = "evict-first"' in error["message"]
            worker.tell({"models": {"m": {"state": "loading", "replace": "evict-first"}}})
            reserve(client, "m", 600)
            assert made_room(worker) == ("m", "m")
            confirm(worker, "m")
            assert (client.receive() or {})["ok"]["generation"] == 2


class TestUnneeded:
    """Another rank of the model had to go."""

    def test_an_idle_one_goes_too(self, worker: WorkerProcess) -> None:
        """It is dropped like any other, and subscribers hear why."""
        generation = worker.publish("rank")
        with worker.client() as watcher:
            watcher.ask({"op": "subscribe"})
            worker.tell({"unneeded": {"model": "rank", "generation": generation, "reason": "room for new"}})
            assert worker.dropped() == ("rank", generation)
            event = (watcher.receive() or {})["event"]
            assert (event["what"], event["reason"]) == ("evicted", "room for new")

    def test_one_in_use_and_a_newer_one_stay(self, worker: WorkerProcess) -> None:
        """A holder keeps its rank; a generation that came meanwhile is not meant."""
        old = worker.publish("rank")
        new = worker.publish("rank")
        worker.dropped()
        worker.tell({"unneeded": {"model": "rank", "generation": old, "reason": "room for new"}})
        with worker.client() as holder:
            holder.ask({"op": "attach", "model": "rank"})
            worker.tell({"unneeded": {"model": "rank", "generation": new, "reason": "room for new"}})
            assert [shard["generation"] for shard in worker.shards("rank")] == [new]


class TestWithdrawn:
    """The load that published a shard has failed."""

    def test_who_has_it_keeps_it_and_nobody_else_gets_it(self, worker: WorkerProcess) -> None:
        """It drains as with a forced eviction, whatever who asks names; subscribers hear why."""
        generation = worker.publish("failed", b"data")
        with worker.client() as holder, worker.client() as watcher:
            holder.ask({"op": "attach", "model": "failed"})
            watcher.ask({"op": "subscribe"})
            worker.tell({"withdrawn": {"model": "failed", "generation": generation, "reason": "its load failed"}})
            assert worker.dropped() == ("failed", generation)
            event = (watcher.receive() or {})["event"]
            assert (event["what"], event["reason"]) == ("evicted", "its load failed")
            (found,) = worker.shards("failed")
            assert (found["state"], len(found["leases"])) == ("draining", 1)
            for key in ({}, {"content": "c0ffee"}):
                assert watcher.refused({"op": "attach", "model": "failed", "key": key})["code"] == "no-such-model"

    def test_an_idle_one_goes_and_a_newer_one_stays(self, worker: WorkerProcess) -> None:
        """Only the generation of that load is meant."""
        old = worker.publish("failed")
        new = worker.publish("failed")
        worker.dropped()
        worker.tell({"withdrawn": {"model": "failed", "generation": old, "reason": "its load failed"}})
        assert [shard["generation"] for shard in worker.shards("failed")] == [new]
        worker.tell({"withdrawn": {"model": "failed", "generation": new, "reason": "its load failed"}})
        assert worker.dropped() == ("failed", new)
        assert worker.shards("failed") == []


class Book:
    """A `Room` in this process, on a device whose memory the test sets; what was evicted, and for whom."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.catalogue = Catalogue("host-0", 1000)
        self.evicted: list[tuple[str, str]] = []
        self.probes = 0
        self.at_probe: Callable[[int], None] = lambda number: None
        self.at_eviction: Callable[[Shard], None] = lambda shard: self.room.left(shard.model, shard.generation)
        monkeypatch.setattr(room, "probe_memory", self._probe)

    def run(self, body: Callable[[Room], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            self.room = Room(self.catalogue, Settling(self.catalogue), self._evicted)
            async with asyncio.timeout(20):
                return await body(self.room)

        return asyncio.run(main())

    def publish(self, name: str, nbytes: int) -> None:
        """Cached without any question."""
        memory, self.catalogue.limit = self.catalogue.limit, 1 << 40
        publish(OnPlenty(self.catalogue), name, nbytes)
        self.catalogue.limit = memory

    def _probe(self, name: str) -> Any:
        self.probes += 1
        found = self.device()
        self.at_probe(self.probes)
        return found

    def _evicted(self, shard: Shard, room_for: str) -> None:
        self.evicted.append((shard.model, room_for))
        self.room.leaving(shard.model, shard.generation)
        asyncio.get_running_loop().call_soon(self.at_eviction, shard)


class OnPlenty:
    """A catalogue as `publish` uses it, on a device that has more than enough."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def reserve(self, model: str, nbytes: int, peer: Any) -> Any:
        return self._catalogue.reserve(model, nbytes, peer, Device()())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalogue, name)


@pytest.fixture
def book(descriptors: NoDescriptorLeaks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Book]:
    made = Book(Device(), monkeypatch)
    yield made
    made.catalogue.close()


class TestDevice:
    """What the device says counts, and when it is asked."""

    def test_it_is_asked_again_after_an_eviction(self, book: Book) -> None:
        """Memory of others makes it smaller than the limit; what was evicted is free when it is asked again."""
        book.device.total, book.device.free = 1000, 100
        for name in ("a", "b"):
            book.publish(name, 200)

        def free(shard: Shard) -> None:
            book.device.free += shard.head.nbytes
            book.room.left(shard.model, shard.generation)

        book.at_eviction = free
        reservation = book.run(lambda room: room.reserve("new", 250, PEER))
        assert (reservation.nbytes, book.evicted, book.probes) == (250, [("a", "new")], 2)

    def test_less_comes_back_than_expected(self, book: Book) -> None:
        """Somebody else still has what was evicted mapped, or took the room: the next one goes, and when none is left
        the refusal says how much others use."""
        book.device.total, book.device.free = 1000, 100
        for name in ("a", "b"):
            book.publish(name, 200)
        with pytest.raises(DeviceFull) as caught:
            book.run(lambda room: room.reserve("new", 300, PEER))
        assert book.evicted == [("a", "new"), ("b", "new")]
        assert (caught.value.free, caught.value.others) == (100, 900)
        assert "900 bytes of the device are used by others" in str(caught.value)

    def test_an_answer_is_of_no_use_when_the_books_have_changed(self, book: Book) -> None:
        """A shard whose last holder ends while the device is asked: it is asked again, and nobody is evicted."""
        book.device.total, book.device.free = 1000, 100
        book.publish("idle", 200)
        book.publish("old", 300)
        held = book.catalogue.find("old")
        assert held is not None
        lease = book.catalogue.lease(held, PEER, "")
        book.catalogue.evict("old", force=True)

        def holder_ends(number: int) -> None:
            if number == 1:
                book.catalogue.end_lease(lease)
                book.device.free += 300

        book.at_probe = holder_ends
        reservation = book.run(lambda room: room.reserve("new", 400, PEER))
        assert (reservation.nbytes, book.evicted, book.probes) == (400, [], 2)

    def test_books_that_never_rest(self, book: Book) -> None:
        """The device is asked some times, not for ever."""
        book.at_probe = lambda number: book.publish(f"m-{number}", 1)
        book.run(lambda room: room.reserve("new", 400, PEER))
        assert book.probes == room.MEASURES

    def test_a_service_that_does_not_answer(
        self, book: Book, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """After its time the log says so, and the device decides; the next reservation does not wait for it again."""
        monkeypatch.setattr(room, "DROP_SECONDS", 0.01)
        book.at_eviction = lambda shard: None
        book.publish("a", 1000)
        with caplog.at_level(logging.WARNING):
            book.run(lambda room: room.reserve("new", 500, PEER))
            monkeypatch.setattr(room, "DROP_SECONDS", 60.0)
            book.run(lambda room: room.reserve("more", 500, PEER))
        assert [record.getMessage() for record in caplog.records] == [
            "a generation 1: the service has not let go of it within 0 s"
        ]
