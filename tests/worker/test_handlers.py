"""handlers: every operation on a real worker process, with the test as its service, its publisher and its clients."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest

from tests.wire.serving import HELLO, Client
from tests.worker.process import LIMIT, WorkerProcess, shard
from weightcached.fds import FdSet, OwnedFd
from weightcached.shard.host import HostSlab
from weightcached.shard.manifest import SCHEMA, SlabEntry
from weightcached.wire import framing
from weightcached.wire.validate import parse_manifest


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """One worker for all tests of this module; each test uses models of its own names."""
    process = WorkerProcess().serve()
    yield process
    process.close()


@pytest.fixture(autouse=True)
def tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the worker has said nothing that the test did not expect, and logged no defect."""
    yield
    if "worker" in request.fixturenames:
        worker = request.getfixturevalue("worker")
        assert not select.select([worker.channel], [], [], 0)[0], worker.hear()
        assert "Traceback" not in worker.log()


def attach(client: Client, model: str, **fields: Any) -> tuple[dict[str, Any], FdSet]:
    """Asks, and takes the answer with its descriptors."""
    client.send({"op": "attach", "model": model, **fields})
    return answer(client)


def answer(client: Client) -> tuple[dict[str, Any], FdSet]:
    """The next message that is no event."""
    while True:
        received = framing.receive(client.sock)
        assert received is not None
        message = framing.decode(received[0])
        if "event" not in message:
            return message, received[1]


def wait_begins(client: Client) -> dict[str, Any]:
    """What a client is told when the wait of its attach begins."""
    message = client.receive()
    assert message is not None
    event: dict[str, Any] = message["event"]
    return event


def bytes_of(fds: FdSet) -> bytes:
    """What a client finds in the slabs of an attach, by the manifest that came with them."""
    with fds:
        manifest, *slabs = fds
        head, _ = parse_manifest(manifest.fileno())
        return b"".join(os.pread(slab.fileno(), entry.nbytes, 0) for slab, entry in zip(slabs, head.slabs, strict=True))


def wait_until(worker: WorkerProcess, model: str, leases: int) -> None:
    """Returns when the worker has that many leases on a model. A lease ends when the loop has seen its end."""
    end = time.monotonic() + 10
    while sum(len(item["leases"]) for item in worker.shards(model)) != leases:
        assert time.monotonic() < end


class TestAttach:
    """What a client gets."""

    def test_the_same_bytes_come_back(self, worker: WorkerProcess) -> None:
        """A published shard is attached with the bytes that its publisher wrote; the reply names it and the lease."""
        data = os.urandom(5000)
        generation = worker.publish("same", data)
        with worker.client() as client:
            reply, fds = attach(client, "same")
            assert bytes_of(fds) == data
            assert reply["ok"]["model"] == "same"
            assert reply["ok"]["generation"] == generation
            (found,) = worker.shards("same")
            assert found["leases"][0]["id"] == reply["ok"]["lease"]
            assert found["leases"][0]["pid"] == os.getpid()
            assert (found["nbytes"], found["state"]) == (5000, "cached")
        wait_until(worker, "same", 0)

    def test_many_clients_have_a_lease_each(self, worker: WorkerProcess) -> None:
        """Leases end one by one, each with its own connection; one connection may hold several."""
        worker.publish("many")
        clients = [worker.client() for _ in range(5)]
        for client in clients:
            attach(client, "many")[1].close()
        attach(clients[0], "many")[1].close()
        wait_until(worker, "many", 6)
        clients[0].close()
        wait_until(worker, "many", 4)
        for client in clients:
            client.close()
        wait_until(worker, "many", 0)

    def test_an_absent_model_is_refused_with_what_there_is(self, worker: WorkerProcess) -> None:
        """Without a wait the answer is at once `no-such-model`, with the names that the worker knows."""
        worker.publish("present")
        with worker.client() as client:
            error = client.refused({"op": "attach", "model": "absent"})
            assert error["code"] == "no-such-model"
            assert "present" in error["fields"]["known"]
            assert client.ask({"op": "status"})  # the connection goes on

    def test_another_key_is_refused_with_both_values(self, worker: WorkerProcess) -> None:
        """Each field that differs is listed; a key that matches is granted."""
        worker.publish("keyed")
        with worker.client() as client:
            error = client.refused({"op": "attach", "model": "keyed", "key": {"dtype": "float32", "content": "c0ffee"}})
            assert error["code"] == "key-mismatch"
            assert error["fields"]["differences"] == {"dtype": ["float32", "uint8"]}
            assert worker.shards("keyed")[0]["leases"] == []
            reply, fds = attach(client, "keyed", key={"dtype": "uint8"})
            fds.close()
            assert "ok" in reply


class TestWaiting:
    """An attach that waits is answered by what happens first."""

    def test_by_the_publish(self, worker: WorkerProcess) -> None:
        """A client that waits gets the shard in the moment in which the service holds it, not before."""
        with worker.client() as waiting, worker.client() as publisher:
            waiting.send({"op": "attach", "model": "later", "wait": 30})
            assert wait_begins(waiting) == {"model": "later", "state": None, "progress": 0.0}
            generation = publisher.ask({"op": "reserve", "model": "later", "nbytes": 4})["generation"]
            with shard("later", generation, b"data") as fds:
                publisher.send({"op": "publish"}, [fd.fileno() for fd in fds])
            message, copies = worker.hear()
            copies.close()
            worker.status()  # the worker is alive and has had every occasion
            assert not select.select([waiting.sock, publisher.sock], [], [], 0.05)[0]
            worker.tell({"held": {"model": "later", "generation": generation}})
            _, fds = answer(waiting)
            assert bytes_of(fds) == b"data"
            assert publisher.receive() == {"ok": message["hold"]}
        wait_until(worker, "later", 0)

    def test_by_the_publish_of_another_key(self, worker: WorkerProcess) -> None:
        """What comes is not what the client asked for: it is told so, and others get theirs."""
        with worker.client() as wrong, worker.client() as right:
            wrong.send({"op": "attach", "model": "odd", "wait": 30, "key": {"dtype": "int4"}})
            right.send({"op": "attach", "model": "odd", "wait": 30})
            worker.publish("odd")
            assert answer(wrong)[0]["error"]["code"] == "key-mismatch"
            reply, fds = answer(right)
            fds.close()
            assert "ok" in reply

    def test_by_its_deadline(self, worker: WorkerProcess) -> None:
        """At the end of its own time a client gets `timed-out`, which says what the model is doing."""
        worker.tell({"models": {"slow": {"state": "loading", "progress": 0.41, "reason": None}}})
        with worker.client() as client:
            started = time.monotonic()
            reply, _ = attach(client, "slow", wait=0.2)
            assert 0.2 <= time.monotonic() - started < 5
            assert reply["error"]["code"] == "timed-out"
            assert "slow is still loading on host-0 (41%)" in reply["error"]["message"]
            assert client.ask({"op": "status"})

    def test_by_the_failure_of_the_load(self, worker: WorkerProcess) -> None:
        """A load that fails ends every wait for it, with the reason; who asks afterwards is told at once."""
        with worker.client() as client, worker.client() as other, worker.client() as later:
            client.send({"op": "attach", "model": "doomed", "wait": 30})
            other.send({"op": "attach", "model": "another", "wait": 0.3})
            worker.status()
            worker.tell({"models": {"doomed": {"state": "failed", "progress": 0.5, "reason": "the disk is on fire"}}})
            for asking in (client, later):
                reply, _ = answer(client) if asking is client else attach(later, "doomed", wait=30)
                assert reply["error"]["code"] == "model-failed"
                assert reply["error"]["fields"]["reason"] == "the disk is on fire"
            assert answer(other)[0]["error"]["code"] == "timed-out"

    def test_progress_is_told(self, worker: WorkerProcess) -> None:
        """While it waits a client gets events: what the model is doing now, then each progress."""
        with worker.client() as client:
            client.send({"op": "attach", "model": "coming", "wait": 30})
            assert wait_begins(client) == {"model": "coming", "state": None, "progress": 0.0}
            worker.tell({"models": {"coming": {"state": "loading", "progress": 0.25, "reason": None}}})
            event = client.receive()
            assert event is not None and event["event"]["model"] == "coming"
            assert event["event"]["progress"] == 0.25

    def test_a_loading_model_says_so_without_a_wait(self, worker: WorkerProcess) -> None:
        """Who does not wait gets `model-loading` with the progress, for a queued model as well."""
        for state in ("loading", "queued"):
            worker.tell({"models": {"busy": {"state": state, "progress": 0.5, "reason": None}}})
            with worker.client() as client:
                error = client.refused({"op": "attach", "model": "busy"})
                assert (error["code"], error["fields"]["progress"]) == ("model-loading", 0.5)

    def test_an_absent_configured_model_is_wanted(self, worker: WorkerProcess) -> None:
        """The service hears of a client that waits for a model which it could load; not of one that does not wait."""
        worker.tell({"models": {"lazy": {"state": "absent", "progress": 0.0, "reason": None}}})
        with worker.client() as client:
            assert client.refused({"op": "attach", "model": "lazy"})["code"] == "model-not-loaded"
            client.send({"op": "attach", "model": "lazy", "wait": 30})
            assert worker.heard() == {"wanted": {"model": "lazy"}}

    def test_a_model_that_is_named_later_is_wanted_too(self, worker: WorkerProcess) -> None:
        """A client that asks before the service has named its models does not wait in vain; the service hears of it
        when the name comes, once."""
        worker.tell({"models": {}})
        with worker.client() as client:
            client.send({"op": "attach", "model": "early", "wait": 30})
            worker.status()
            absent = {"early": {"state": "absent", "progress": 0.0, "reason": None}}
            worker.tell({"models": absent})
            assert worker.heard() == {"wanted": {"model": "early"}}
            worker.tell({"models": absent})
            worker.status()

    def test_a_model_that_is_evicted_meanwhile_is_wanted(self, worker: WorkerProcess) -> None:
        """The service has it as cached when the client asks, and as absent a moment later: it hears of the client."""
        worker.tell({"models": {"evicted": {"state": "cached"}}})
        with worker.client() as client:
            client.send({"op": "attach", "model": "evicted", "wait": 30})
            assert wait_begins(client)["state"] == "cached"
            worker.tell({"models": {"evicted": {"state": "absent"}}})
            assert worker.heard() == {"wanted": {"model": "evicted"}}

    def test_a_load_without_room_is_tried_again(self, worker: WorkerProcess) -> None:
        """Who waits for a model whose load found no room has it loaded again; that load's end ends the wait, not what
        was said of the one before. Who does not wait is told what failed."""
        failed = {"state": "failed", "reason": "host-0 has no room", "retry": True}
        worker.tell({"models": {"tight": failed}})
        with worker.client() as client:
            assert client.refused({"op": "attach", "model": "tight"})["fields"]["reason"] == "host-0 has no room"
            client.send({"op": "attach", "model": "tight", "wait": 30})
            assert wait_begins(client)["state"] == "failed"
            assert worker.heard() == {"wanted": {"model": "tight"}}
            worker.tell({"models": {"tight": failed, "another": {"state": "loading"}}})
            worker.status()
            assert not select.select([client.sock], [], [], 0.05)[0]
            worker.tell({"models": {"tight": {"state": "loading", "progress": 0.5}}})
            worker.tell({"models": {"tight": failed}})
            assert answer(client)[0]["error"]["code"] == "model-failed"

    def test_a_client_that_leaves_is_forgotten(self, worker: WorkerProcess) -> None:
        """A waiting client that goes away leaves no lease behind when its model comes."""
        with worker.client() as client:
            client.send({"op": "attach", "model": "forgotten", "wait": 30})
            worker.status()
        worker.publish("forgotten")
        assert worker.shards("forgotten")[0]["leases"] == []


def told(worker: WorkerProcess, model: str, state: str, *, whole: bool, reason: str | None = None) -> None:
    """The service's word on one model, read by the worker when this returns."""
    worker.tell({"models": {model: {"state": state, "progress": 0.5, "reason": reason, "whole": whole}}})
    worker.status()


def cached_in_part(worker: WorkerProcess, model: str) -> None:
    """The old rank is held here, then another worker's is replaced."""
    worker.publish(model, b"old!")
    told(worker, model, "loading", whole=False)


class TestInPart:
    """A model of several ranks, of which another worker holds a rank of another load."""

    def test_it_is_absent_by_its_name(self, worker: WorkerProcess) -> None:
        """Who does not wait hears what the model is doing, whatever the shard here is; a key of a rank changes
        nothing. When the model is whole it is there again."""
        cached_in_part(worker, "part")
        with worker.client() as client:
            for state, code in (
                ("loading", "model-loading"),
                ("absent", "model-not-loaded"),
                ("failed", "model-failed"),
            ):
                told(worker, "part", state, whole=False, reason="1 of 2 ranks are published")
                for key in ({}, {"tensor_parallel_size": 1, "tensor_parallel_rank": 0}):
                    error = client.refused({"op": "attach", "model": "part", "key": key})
                    assert error["code"] == code
            assert error["fields"]["reason"] == "1 of 2 ranks are published"
            assert worker.shards("part")[0]["leases"] == []
            told(worker, "part", "cached", whole=True)
            assert bytes_of(attach(client, "part")[1]) == b"old!"

    def test_who_names_the_content_gets_it(self, worker: WorkerProcess) -> None:
        """With the content in its key nobody can get a mixture: granted, or a mismatch as ever."""
        cached_in_part(worker, "exact")
        with worker.client() as client:
            assert bytes_of(attach(client, "exact", key={"content": "c0ffee"})[1]) == b"old!"
            error = client.refused({"op": "attach", "model": "exact", "key": {"content": "7ea"}})
            assert error["code"] == "key-mismatch"

    def test_other_models_are_given_out(self, worker: WorkerProcess) -> None:
        """A model that the service does not name, or of which it says nothing like it."""
        worker.publish("unnamed", b"data")
        cached_in_part(worker, "named")
        with worker.client() as client:
            assert bytes_of(attach(client, "unnamed")[1]) == b"data"
            worker.tell({"models": {"named": {"state": "failed", "progress": 0.0, "reason": "x"}}})
            worker.status()
            assert bytes_of(attach(client, "named")[1]) == b"old!"

    def test_who_waits_gets_it_when_it_is_whole(self, worker: WorkerProcess) -> None:
        """Not the old rank, and not the new one when it is published, but when every rank is; who waits for the content
        of the new one gets it at once."""
        with worker.client() as waiting, worker.client() as exact:
            told(worker, "whole", "loading", whole=False)
            exact.send({"op": "attach", "model": "whole", "wait": 30, "key": {"content": "c0ffee"}})
            waiting.send({"op": "attach", "model": "whole", "wait": 30})
            assert wait_begins(waiting)["state"] == "loading"
            worker.status()
            worker.publish("whole", b"new!")
            assert bytes_of(answer(exact)[1]) == b"new!"
            worker.status()
            assert not select.select([waiting.sock], [], [], 0.05)[0]
            told(worker, "whole", "cached", whole=True)
            assert bytes_of(answer(waiting)[1]) == b"new!"

    def test_the_last_rank_is_whole_after_its_publish(self, worker: WorkerProcess) -> None:
        """On the device of the last rank the service confirms the publish first: nobody gets the rank before."""
        cached_in_part(worker, "last")
        with worker.client() as waiting:
            waiting.send({"op": "attach", "model": "last", "wait": 30})
            worker.status()
            worker.publish("last", b"new!")
            worker.dropped()
            told(worker, "last", "cached", whole=True)
            assert bytes_of(answer(waiting)[1]) == b"new!"

    def test_who_waits_for_another_key_hears_of_it(self, worker: WorkerProcess) -> None:
        """What is whole now is not what one client asked for; the others get theirs."""
        cached_in_part(worker, "other-key")
        with worker.client() as wrong, worker.client() as right:
            wrong.send({"op": "attach", "model": "other-key", "wait": 30, "key": {"dtype": "int4"}})
            right.send({"op": "attach", "model": "other-key", "wait": 30})
            worker.status()
            told(worker, "other-key", "cached", whole=True)
            assert answer(wrong)[0]["error"]["code"] == "key-mismatch"
            assert bytes_of(answer(right)[1]) == b"old!"

    def test_who_waits_hears_of_the_failure(self, worker: WorkerProcess) -> None:
        """The load that had published some ranks fails: that ends the wait, although a shard is here."""
        cached_in_part(worker, "half")
        with worker.client() as waiting:
            waiting.send({"op": "attach", "model": "half", "wait": 30})
            worker.status()
            told(worker, "half", "failed", whole=False, reason="1 of 2 ranks are published")
            reply, _ = answer(waiting)
            assert (reply["error"]["code"], reply["error"]["fields"]["reason"]) == (
                "model-failed",
                "1 of 2 ranks are published",
            )

    def test_who_waits_has_it_loaded(self, worker: WorkerProcess) -> None:
        """A load that was called off half-way leaves a model that can be asked for."""
        cached_in_part(worker, "again")
        told(worker, "again", "absent", whole=False)
        with worker.client() as client:
            client.send({"op": "attach", "model": "again", "wait": 30})
            assert worker.heard() == {"wanted": {"model": "again"}}


class TestHeldBack:
    """A model that is cached, and that the nodes of a cluster have not agreed on."""

    STATE: ClassVar[dict[str, Any]] = {"state": "loading", "progress": 1.0, "whole": False, "held_back": True}

    def test_who_does_not_wait_has_the_reason(self, worker: WorkerProcess) -> None:
        """It is cached, not loading: waiting is no way out as long as a node is missing."""
        worker.publish("kept-back")
        worker.tell({"models": {"kept-back": {**self.STATE, "reason": "node 1 is missing"}}})
        with worker.client() as client:
            error = client.refused({"op": "attach", "model": "kept-back"})
            assert (error["code"], error["fields"]["reason"]) == ("model-held-back", "node 1 is missing")
            assert "kept-back is cached on host-0 but not given out: node 1 is missing; " in error["message"]
            assert bytes_of(attach(client, "kept-back", key={"content": "c0ffee"})[1]) == b"x" * 256

    def test_who_waits_hears_of_each_reason(self, worker: WorkerProcess) -> None:
        """At once, when it changes, and with the end of the wait."""
        worker.publish("kept-waiting")
        worker.tell({"models": {"kept-waiting": {**self.STATE, "reason": "node 1 is missing"}}})
        with worker.client() as client:
            client.send({"op": "attach", "model": "kept-waiting", "wait": 0.5})
            begun = wait_begins(client)
            assert (begun["state"], begun["held_back"], begun["reason"]) == ("loading", True, "node 1 is missing")
            worker.tell({"models": {"kept-waiting": {**self.STATE, "reason": "node 1 is loading"}}})
            assert wait_begins(client)["reason"] == "node 1 is loading"
            error = answer(client)[0]["error"]
            assert error["code"] == "timed-out"
            assert "is cached on host-0 but not given out: node 1 is loading; " in error["message"]


class TestElsewhere:
    """A model of the config none of whose ranks is on this device."""

    STATE: ClassVar[dict[str, Any]] = {"belongs": ["host-1"], "spec": None}

    def test_who_asks_is_told_where_it_belongs(self, worker: WorkerProcess) -> None:
        """At once, whether it waits or not; the service need not hear of that."""
        worker.tell({"models": {"away": self.STATE}})
        with worker.client() as client:
            for wait in (0, 30):
                error = client.refused({"op": "attach", "model": "away", "wait": wait})
                assert (error["code"], error["fields"]["devices"]) == ("model-elsewhere", ["host-1"])
                assert error["message"] == (
                    "away belongs on host-1, and is not on host-0; attach it with device='host-1'"
                )
            assert "away" not in client.refused({"op": "attach", "model": "nothing"})["fields"]["known"]

    def test_who_waits_already_is_told_when_the_service_knows(self, worker: WorkerProcess) -> None:
        """It asked before the service had named its models, or the model has moved."""
        worker.tell({"models": {}})
        with worker.client() as client:
            client.send({"op": "attach", "model": "moved", "wait": 30})
            worker.status()
            worker.tell({"models": {"moved": self.STATE}})
            assert answer(client)[0]["error"]["code"] == "model-elsewhere"

    def test_who_waits_for_a_publish_that_comes_to_nothing_is_told(self, worker: WorkerProcess) -> None:
        """As soon as the engine that had begun it has gone."""
        worker.tell({"models": {"given-up": self.STATE}})
        with worker.client() as waiting:
            with worker.client() as publisher:
                publisher.ask({"op": "reserve", "model": "given-up", "nbytes": 4})
                waiting.send({"op": "attach", "model": "given-up", "wait": 30})
                assert wait_begins(waiting)["state"] is None
            assert answer(waiting)[0]["error"]["code"] == "model-elsewhere"

    def test_what_an_engine_has_published_there_is_given_out(self, worker: WorkerProcess) -> None:
        """By its own key, as on any device; who asks while it is on its way gets it too."""
        worker.tell({"models": {"by-an-engine": self.STATE}})
        with worker.client() as waiting, worker.client() as publisher:
            generation = publisher.ask({"op": "reserve", "model": "by-an-engine", "nbytes": 4})["generation"]
            waiting.send({"op": "attach", "model": "by-an-engine", "wait": 30})
            assert wait_begins(waiting)["state"] is None
            with shard("by-an-engine", generation, b"data") as fds:
                publisher.send({"op": "publish"}, [fd.fileno() for fd in fds])
            worker.hold()[1].close()
            assert bytes_of(answer(waiting)[1]) == b"data"
        with worker.client() as client:
            assert bytes_of(attach(client, "by-an-engine", key={"dtype": "uint8"})[1]) == b"data"
        wait_until(worker, "by-an-engine", 0)


CREATED = "2026-01-01T00:00:00+00:00"  # of every shard that the tests publish
SINCE = "2026-02-03T04:05:06+00:00"


def renew(client: Client, model: str, generation: int, nbytes: int, **changes: Any) -> dict[str, Any]:
    """The reply's content."""
    request = {"op": "renew", "model": model, "generation": generation, "created": CREATED, "nbytes": nbytes}
    return client.ask({**request, "since": SINCE, **changes})


class TestRenew:
    """What clients of a worker before this one say."""

    def test_a_lease_on_the_same_shard(self, worker: WorkerProcess) -> None:
        """The one that is cached: it is in use again, since the time that the client says, until the client ends."""
        generation = worker.publish("back", b"data")
        with worker.client() as client:
            reply = renew(client, "back", generation, 4)
            assert (reply["model"], reply["generation"], reply["since"]) == ("back", generation, SINCE)
            (found,) = worker.shards("back")
            assert found["state"] == "cached"
            assert found["leases"] == [
                {
                    "id": reply["lease"],
                    "pid": os.getpid(),
                    "command": found["leases"][0]["command"],
                    "uid": os.getuid(),
                    "since": SINCE,
                    "nbytes": 4,
                    "ended": False,
                }
            ]
            with worker.client() as other:
                assert other.refused({"op": "evict", "model": "back"})["code"] == "model-in-use"
        wait_until(worker, "back", 0)

    def test_a_lease_on_one_that_drains(self, worker: WorkerProcess) -> None:
        """The generation before is here as long as somebody else holds it: both are on it."""
        old = worker.publish("drains", b"old!")
        with worker.client() as first, worker.client() as second:
            attach(first, "drains")[1].close()
            worker.publish("drains", b"new!")
            worker.dropped()
            renew(second, "drains", old, 4)
            assert [len(item["leases"]) for item in worker.shards("drains")] == [0, 2]
            first.close()
            wait_until(worker, "drains", 1)
            assert len(worker.shards("drains")) == 2
        wait_until(worker, "drains", 0)
        assert len(worker.shards("drains")) == 1

    @pytest.mark.parametrize(
        "changes",
        [{"generation": 7}, {"created": "2025-12-31T00:00:00+00:00"}, {"nbytes": 5}, {"model": "never-heard-of"}],
        ids=lambda changes: next(iter(changes)),
    )
    def test_memory_that_is_not_here(self, worker: WorkerProcess, changes: dict[str, Any]) -> None:
        """Another generation, one made at another time under the same number, or another size is another shard: it
        shows as draining with its holders, its bytes count once, and it goes with the last of them."""
        name = f"not-{next(iter(changes))}"
        generation = worker.publish(name, b"data")
        before = worker.status()["held"]
        said = {"model": name, "generation": generation, "nbytes": 4, **changes}
        model, nbytes = said["model"], said["nbytes"]
        with worker.client() as first, worker.client() as second:
            for client in (first, second):
                renew(client, **said)
            found = [item for item in worker.shards(model) if item["state"] == "draining"]
            assert [(item["generation"], item["nbytes"]) for item in found] == [(said["generation"], nbytes)]
            assert len(found[0]["leases"]) == 2
            assert found[0]["key"]["content"] == "unknown"
            assert worker.status()["held"] == before + nbytes
            first.close()
            wait_until(worker, model, 1)
            assert worker.status()["held"] == before + nbytes
        wait_until(worker, model, 0)
        assert worker.status()["held"] == before

    def test_it_is_never_given_out(self, worker: WorkerProcess) -> None:
        """Memory without descriptors is no model that anybody could attach or evict."""
        with worker.client() as holder, worker.client() as other:
            renew(holder, "ghost", 1, 100)
            assert other.refused({"op": "attach", "model": "ghost"})["code"] == "no-such-model"
            assert other.refused({"op": "evict", "model": "ghost", "force": True})["code"] == "no-such-model"

    @pytest.mark.parametrize(
        "changes",
        [
            {"generation": 0}, {"generation": -1}, {"generation": 1 << 60}, {"nbytes": -1}, {"nbytes": 1 << 49},
            {"created": "x" * 65}, {"nbytes": "many"}, {"since": None}, {"nbytes": 1.5}, {"more": 1}, {"model": "../m"},
        ],
        ids=str,
    )  # fmt: skip
    def test_what_no_shard_can_be(self, worker: WorkerProcess, changes: dict[str, Any]) -> None:
        """Numbers out of range and fields of other types break the protocol: answered, closed, and nothing counts."""
        before = worker.status()
        with worker.client() as client:
            request = {"op": "renew", "model": "m", "generation": 1, "created": CREATED, "nbytes": 1, "since": SINCE}
            assert client.refused({**request, **changes})["code"] == "protocol-error"
            assert client.receive() is None
        assert worker.status()["held"] == before["held"]
        assert len(worker.status()["shards"]) == len(before["shards"])

    def test_one_for_each_connection(self, worker: WorkerProcess) -> None:
        """A connection that holds something renews nothing more: it ends, and its lease with it."""
        with worker.client() as client:
            renew(client, "one", 1, 100)
            again = {"op": "renew", "model": "one", "generation": 2, "created": CREATED, "nbytes": 1, "since": SINCE}
            assert "each lease has one of its own" in client.refused(again)["message"]
        wait_until(worker, "one", 0)
        assert worker.shards("one") == []

    @pytest.mark.parametrize(
        ("since", "shown"),
        [
            ("2026-02-03T06:05:06.789+02:00", "2026-02-03T04:05:06+00:00"),
            ("2026-02-03T04:05:06Z", SINCE),
            ("2026-02-03T04:05:06", None),
            ("9999-12-31T23:59:59-23:00", None),
            ("2226-02-03T04:05:06Z", None),
            ("yesterday", None),
            ("", None),
            ("2026-02-03T04:05:06" + 30 * "0", None),
        ],
    )
    def test_since_when(self, worker: WorkerProcess, since: str, shown: str | None) -> None:
        """A time of any zone is shown in UTC; what is no time with its zone, or is yet to come, is now."""
        now = datetime.now(UTC).replace(microsecond=0)
        with worker.client() as client:
            found = renew(client, "since", 1, 1, since=since)["since"]
        if shown is None:
            assert now <= datetime.fromisoformat(found) <= datetime.now(UTC)
        else:
            assert found == shown
        wait_until(worker, "since", 0)

    def test_a_holder_that_left_a_child(self, worker: WorkerProcess) -> None:
        """The process that attached has ended, and one that it forked still has the connection: the lease lasts, says
        so in status and in the refusal of an eviction, and ends with that one."""
        worker.publish("child")
        program = (
            "import os, socket, sys\n"
            "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "sock.connect(sys.argv[1])\n"
            "for message in sys.argv[2:]:\n"
            "    sock.send(message.encode()); sock.recv(65536)\n"
            "if not os.fork():\n"
            "    print('there', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        messages = [json.dumps(message) for message in (HELLO, {"op": "attach", "model": "child"})]
        with subprocess.Popen(
            [sys.executable, "-c", program, str(worker.path), *messages], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == b"there\n"
            assert process.wait(10) == 0
            (lease,) = worker.shards("child")[0]["leases"]
            assert (lease["pid"], lease["ended"]) == (process.pid, True)
            with worker.client() as client:
                error = client.refused({"op": "evict", "model": "child"})
            assert f"pid {process.pid} ({lease['command']}, ended; a child of it holds on)" in error["message"]
        wait_until(worker, "child", 0)


class TestSettling:
    """A worker that has adopted shards a moment ago."""

    @pytest.fixture
    def fresh(self) -> Iterator[WorkerProcess]:
        """It has adopted "kept" and serves."""
        process = WorkerProcess()
        with shard("kept", 1, b"data") as fds:
            process.tell({"adopt": {"model": "kept", "generation": 1}}, list(fds))
        yield process.serve()
        process.close()

    def test_an_eviction_waits_for_the_holders(self, fresh: WorkerProcess) -> None:
        """One that comes before the holder is back is decided when it is: refused, naming it."""
        with fresh.client() as operator, fresh.client() as holder:
            operator.send({"op": "evict", "model": "kept"})
            assert 0 < fresh.status()["settles_in"] <= 2
            assert not select.select([operator.sock], [], [], 0.2)[0]
            renew(holder, "kept", 1, 4)
            error = operator.receive()
            assert error is not None and error["error"]["code"] == "model-in-use"
            assert f"pid {os.getpid()}" in error["error"]["message"]
            assert fresh.status()["settles_in"] == 0

    def test_an_eviction_of_what_nobody_uses(self, fresh: WorkerProcess) -> None:
        """Nobody comes: it is done when the time is over. What is published meanwhile is evicted at once, and so is
        what does not exist."""
        fresh.publish("new")
        with fresh.client() as operator, fresh.client() as other:
            operator.send({"op": "evict", "model": "kept"})
            other.send({"op": "evict", "model": "new"})
            assert fresh.dropped() == ("new", 1)
            assert (other.receive() or {})["ok"]["model"] == "new"
            assert other.refused({"op": "evict", "model": "nothing"})["code"] == "no-such-model"
            assert fresh.status()["settles_in"] > 0
            assert fresh.dropped() == ("kept", 1)
            assert (operator.receive() or {})["ok"]["model"] == "kept"
            assert fresh.status()["settles_in"] == 0

    def test_force_waits_for_nobody(self, fresh: WorkerProcess) -> None:
        """An eviction with force is done at once; who comes back holds a shard that drains."""
        with fresh.client() as operator, fresh.client() as holder:
            operator.send({"op": "evict", "model": "kept", "force": True})
            assert fresh.dropped() == ("kept", 1)
            assert (operator.receive() or {})["ok"]["draining"] == []
            assert fresh.status()["settles_in"] > 0
            renew(holder, "kept", 1, 4)
            assert [item["state"] for item in fresh.shards("kept")] == ["draining"]

    def test_room_is_made_of_what_is_idle_for_sure(self, fresh: WorkerProcess) -> None:
        """A reservation that needs the room waits as well: the shard whose holder comes back stays, and the
        reservation is refused."""
        with fresh.client() as publisher, fresh.client() as holder:
            publisher.send({"op": "reserve", "model": "big", "nbytes": LIMIT})
            assert not select.select([publisher.sock], [], [], 0.2)[0]
            renew(holder, "kept", 1, 4)
            reply = publisher.receive()
            assert reply is not None and reply["error"]["code"] == "device-full"
            assert [item["state"] for item in fresh.shards("kept")] == ["cached"]

    def test_another_rank_that_goes_waits_too(self, fresh: WorkerProcess) -> None:
        """A rank that is needed no more is dropped only when nobody has come back to it."""
        with fresh.client() as holder:
            fresh.tell({"unneeded": {"model": "kept", "generation": 1, "reason": "room for new"}})
            renew(holder, "kept", 1, 4)
            while fresh.status()["settles_in"]:
                select.select([fresh.channel], [], [], 0.2)
            assert [item["state"] for item in fresh.shards("kept")] == ["cached"]

    def test_who_comes_while_the_device_is_lost_is_told(self, fresh: WorkerProcess) -> None:
        """A holder that was away when the others were told hears of it with its renewal."""
        fresh.tell({"lost": {"reason": "fallen off the bus"}})
        assert fresh.dropped() == ("kept", 1)
        with fresh.client() as holder:
            renew(holder, "kept", 1, 4)
            event = holder.receive()
            assert event is not None
            assert event["event"] == {
                "what": "lost", "model": "kept", "generation": 1, "nbytes": 4, "reason": "fallen off the bus",
            }  # fmt: skip


class TestPublish:
    """All or nothing."""

    def test_the_service_gets_every_descriptor(self, worker: WorkerProcess) -> None:
        """A hold carries the manifest and the slabs: what a service keeps is enough to start from."""
        with worker.client() as client:
            generation = client.ask({"op": "reserve", "model": "kept", "nbytes": 4})["generation"]
            with shard("kept", generation, b"data") as fds:
                client.send({"op": "publish"}, [fd.fileno() for fd in fds])
            what, copies = worker.hold()
            assert what == {"model": "kept", "generation": generation, "nbytes": 4}
            assert bytes_of(copies) == b"data"
            assert client.receive() == {"ok": what}

    def test_the_next_generation_replaces(self, worker: WorkerProcess) -> None:
        """New clients get the new bytes, old ones keep theirs, and the old one drains with its last lease."""
        first = worker.publish("twice", b"first")
        with worker.client() as old, worker.client() as new:
            kept = attach(old, "twice")[1]
            second = worker.publish("twice", b"second")
            assert worker.dropped() == ("twice", first)
            assert bytes_of(kept) == b"first"
            assert bytes_of(attach(new, "twice")[1]) == b"second"
            assert [(item["generation"], item["state"]) for item in worker.shards("twice")] == [
                (second, "cached"), (first, "draining"),
            ]  # fmt: skip
            old.close()
            wait_until(worker, "twice", 1)
            assert [item["generation"] for item in worker.shards("twice")] == [second]

    def test_an_older_one_that_is_late_loses(self, worker: WorkerProcess) -> None:
        """Of two publishers the one that reserved last stays; the other's copies are dropped, and nobody is told that
        it is there."""
        with worker.client() as slow, worker.client() as watcher:
            watcher.ask({"op": "subscribe"})
            older = slow.ask({"op": "reserve", "model": "race", "nbytes": 4})["generation"]
            newer = worker.publish("race", b"new!")
            with shard("race", older, b"old!") as fds:
                slow.send({"op": "publish"}, [fd.fileno() for fd in fds])
            worker.hold()[1].close()
            assert worker.dropped() == ("race", older)
            assert slow.receive() == {"ok": {"model": "race", "generation": older, "nbytes": 4}}
            with worker.client() as client:
                assert bytes_of(attach(client, "race")[1]) == b"new!"
            assert [item["generation"] for item in worker.shards("race")] == [newer]
            told = []
            while "released" not in told:
                event = watcher.receive()
                assert event is not None
                told.append(event["event"]["what"])
            assert told == ["published", "released"]

    def test_a_publisher_that_dies_before_it_is_held(self, worker: WorkerProcess) -> None:
        """From its message on the publish does not need its publisher: the shard is there when the service holds it."""
        with worker.client() as client:
            generation = client.ask({"op": "reserve", "model": "orphan", "nbytes": 4})["generation"]
            with shard("orphan", generation, b"data") as fds:
                client.send({"op": "publish"}, [fd.fileno() for fd in fds])
        worker.hear()[1].close()
        status = worker.status()
        assert [item["model"] for item in status["reservations"]] == ["orphan"]  # its room is still taken
        worker.tell({"held": {"model": "orphan", "generation": generation}})
        with worker.client() as client:
            assert bytes_of(attach(client, "orphan")[1]) == b"data"
        assert worker.status()["reservations"] == []

    def test_a_publisher_that_dies_before_it_publishes(self, worker: WorkerProcess) -> None:
        """A reservation ends with its connection."""
        before = worker.status()["held"]
        with worker.client() as client:
            client.ask({"op": "reserve", "model": "nothing", "nbytes": 1000})
            assert worker.status()["held"] == before + 1000
        end = time.monotonic() + 10
        while worker.status()["held"] != before:
            assert time.monotonic() < end

    def test_room_is_limited(self, worker: WorkerProcess) -> None:
        """More than the limit is `device-full`, with what is needed and what is free, and nothing is evicted for it;
        what is free may be reserved."""
        held = worker.status()["held"]
        with worker.client() as client:
            error = client.refused({"op": "reserve", "model": "huge", "nbytes": LIMIT + 1})
            assert error["code"] == "device-full"
            assert (error["fields"]["needed"], error["fields"]["free"]) == (LIMIT + 1, LIMIT - held)
            client.ask({"op": "reserve", "model": "huge", "nbytes": LIMIT - held})


def unsealed(slab: HostSlab) -> OwnedFd:
    """The slab of a publisher that could still write."""
    copy = slab._fd.dup()
    slab.close()
    return copy


BAD: dict[str, tuple[dict[str, Any], Callable[[list[int]], list[int]] | None, str]] = {
    "another device": ({"device": "host-1"}, None, "device is 'host-1'"),
    "another model": ({"model": "other"}, None, "model is 'other'"),
    "another generation": ({"generation": 99}, None, "generation is 99"),
    "more bytes than reserved": ({"slabs": (SlabEntry(4), SlabEntry(1))}, None, "5 bytes published, 4 were reserved"),
    "a size that is not the slab's": ({"nbytes": 3}, None, "slab 0 has 4 bytes, 3 listed"),
    "an unsealed slab": ({"change_slab": unsealed}, None, "the slab 0 is not sealed"),
    "no slab": ({}, lambda fds: fds[:1], "0 slabs sent, 1 listed"),
    "a slab too many": ({}, lambda fds: [*fds, fds[1]], "2 slabs sent, 1 listed"),
    "the slab in place of the manifest": ({}, lambda fds: fds[::-1], "no line end"),
    "no descriptors": ({}, lambda fds: [], "carries no descriptors"),
    "something else as the manifest": ({}, lambda fds: [0, *fds[1:]], "not a memfd"),
    "a wrong count": ({"tensor_count": 2}, None, "1 tensors listed, 2 announced"),
    "another schema": ({"schema": SCHEMA + 1}, None, f"schema {SCHEMA + 1}"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_publish_changes_nothing(worker: WorkerProcess, name: str) -> None:
    """Whatever is wrong with it: an error that says what, the previous generation stays attachable, the room is free
    again, no descriptor is left, and the publisher may try again on the same connection."""
    changes, order, problem = BAD[name]
    model = "steady"
    if not worker.shards(model):
        worker.publish(model, b"good")
    with worker.client() as client:
        held = client.ask({"op": "status"})["held"]
        before = worker.descriptors()
        generation = client.ask({"op": "reserve", "model": model, "nbytes": 4})["generation"]
        with shard(**{"model": model, "generation": generation, "data": b"bad!", **changes}) as fds:
            numbers = [fd.fileno() for fd in fds]
            error = client.refused({"op": "publish"}, order(numbers) if order else numbers)
        assert error["code"] == "bad-manifest"
        assert problem in error["fields"]["problem"]
        assert client.ask({"op": "status"})["held"] == held
        assert worker.descriptors() == before
        assert client.ask({"op": "reserve", "model": model, "nbytes": 4})["generation"] == generation + 1
    with worker.client() as client:
        assert bytes_of(attach(client, model)[1]) == b"good"
    wait_until(worker, model, 0)


def test_a_publish_of_another_load_changes_nothing(worker: WorkerProcess) -> None:
    """A publisher that has outlived its service, or its load: refused with what to do, what is cached stays, its room
    is free again. The load that is under way, and an engine, may publish."""
    worker.publish("meant", b"good")
    with worker.client() as client:
        held = client.ask({"op": "status"})["held"]
        for state in ({"state": "failed", "spec": None}, {"state": "loading", "spec": "now"}):
            worker.tell({"models": {"meant": state}})
            generation = client.ask({"op": "reserve", "model": "meant", "nbytes": 4})["generation"]
            with shard("meant", generation, b"old!", attributes={"spec": "before"}) as fds:
                error = client.refused({"op": "publish"}, [fd.fileno() for fd in fds])
            assert error["code"] == "load-failed"
            assert "for a load of spec before" in error["message"] and "weightcachectl load meant" in error["message"]
            assert client.ask({"op": "status"})["held"] == held
        assert bytes_of(attach(client, "meant")[1]) == b"good"
    wait_until(worker, "meant", 0)
    worker.publish("meant", b"next", attributes={"spec": "now"})
    worker.dropped()
    worker.publish("meant", b"own!")
    worker.dropped()


class TestEvict:
    """Evicting by a client."""

    def test_an_idle_model_goes(self, worker: WorkerProcess) -> None:
        """The worker's own descriptors are closed, and the reply waits until the service has let go of its copies."""
        before = worker.descriptors()
        generation = worker.publish("idle")
        with worker.client() as client:
            client.send({"op": "evict", "model": "idle"})
            assert worker.heard() == {"drop": {"model": "idle", "generation": generation, "nbytes": 256}}
            worker.status()  # the worker is alive and has had every occasion
            assert not select.select([client.sock], [], [], 0.05)[0]
            worker.tell({"dropped": {"model": "idle", "generation": generation}})
            assert answer(client)[0]["ok"] == {"model": "idle", "generation": generation, "nbytes": 256, "draining": []}
            assert client.refused({"op": "attach", "model": "idle"})["code"] == "no-such-model"
            assert client.refused({"op": "evict", "model": "idle"})["code"] == "no-such-model"
        assert worker.shards("idle") == []
        assert worker.descriptors() <= before + 1  # the connection may not be gone yet

    def test_a_model_in_use_stays_unless_forced(self, worker: WorkerProcess) -> None:
        """Without force its holders are named; with force it drains, and they keep what they have."""
        generation = worker.publish("used", b"data")
        with worker.client() as holder, worker.client() as client:
            fds = attach(holder, "used")[1]
            error = client.refused({"op": "evict", "model": "used"})
            assert error["code"] == "model-in-use"
            assert f"pid {os.getpid()}" in error["fields"]["holders"][0]
            client.send({"op": "evict", "model": "used", "force": True})
            assert worker.dropped() == ("used", generation)
            assert [lease["pid"] for lease in answer(client)[0]["ok"]["draining"]] == [os.getpid()]
            assert bytes_of(fds) == b"data"
            assert worker.shards("used")[0]["state"] == "draining"
        wait_until(worker, "used", 0)
        assert worker.shards("used") == []

    def test_the_device_must_be_this_one(self, worker: WorkerProcess) -> None:
        """An evict that names another device is not done here."""
        worker.publish("elsewhere")
        with worker.client() as client:
            error = client.refused({"op": "evict", "model": "elsewhere", "device": "host-1"})
            assert error["code"] == "wrong-device"
            assert worker.shards("elsewhere")
            client.send({"op": "evict", "model": "elsewhere", "device": "host-0"})
            worker.dropped()
            assert "ok" in answer(client)[0]


def test_subscribers_hear_of_everything(worker: WorkerProcess) -> None:
    """A subscription begins with the status; then every publish, release and eviction comes as an event."""
    with worker.client() as watcher, worker.client() as client:
        status = watcher.ask({"op": "subscribe"})
        assert status["device"] == "host-0"
        generation = worker.publish("seen")
        attach(client, "seen")[1].close()
        client.close()
        with worker.client() as other:
            wait_until(worker, "seen", 0)
            other.send({"op": "evict", "model": "seen"})
            worker.dropped()
            assert "ok" in answer(other)[0]
        events = [watcher.receive() for _ in range(3)]
        name = {"model": "seen", "generation": generation, "nbytes": 256}
        assert events == [{"event": {"what": what, **name}} for what in ("published", "released", "evicted")]


def test_subscribers_hear_of_a_digest(worker: WorkerProcess) -> None:
    """What the service says of the current generation is passed on; of another one, or of no model, nothing is. The
    status has it too, and the reason of one that is given up."""
    with worker.client() as watcher:
        generation = worker.publish("read")
        watcher.ask({"op": "subscribe"})
        assert worker.shards("read")[0]["digest"] == "known"  # its key has it
        for name, number in (("read", generation + 1), ("none", 1), ("read", generation)):
            worker.tell({"digested": {"model": name, "generation": number, "problem": None}})
        expected = {"what": "digested", "model": "read", "generation": generation, "nbytes": 256}
        assert watcher.receive() == {"event": expected}
        worker.tell({"digested": {"model": "read", "generation": generation, "problem": "it is gone"}})
        assert watcher.receive() == {"event": {**expected, "problem": "it is gone"}}
        assert worker.shards("read")[0]["digest"] == "given up: it is gone"


def test_a_connection_may_attach_reserve_and_publish(worker: WorkerProcess) -> None:
    """An engine uses one connection for everything: its lease survives its own publish."""
    worker.publish("both", b"first")
    with worker.client() as client:
        attach(client, "both")[1].close()
        generation = client.ask({"op": "reserve", "model": "both-made", "nbytes": 4})["generation"]
        with shard("both-made", generation, b"data") as fds:
            client.send({"op": "publish"}, [fd.fileno() for fd in fds])
        worker.hold()[1].close()
        assert "ok" in (client.receive() or {})
        assert len(worker.shards("both")[0]["leases"]) == 1
        assert bytes_of(attach(client, "both-made")[1]) == b"data"
