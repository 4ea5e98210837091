"""losses: a device or a shard that is lost, on a real worker process with the test as its service and its clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.wire.serving import Client
from tests.worker.process import WorkerProcess, shard
from tests.worker.test_handlers import answer, attach, bytes_of

WHY = "the device is lost: Xid 79 (GPU has fallen off the bus)"


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess().serve()
    yield process
    assert "Traceback" not in process.log()
    process.close()


def holder(worker: WorkerProcess, model: str) -> Client:
    """A client with a lease on the model."""
    client = worker.client()
    reply, fds = attach(client, model)
    fds.close()
    assert reply["ok"]["model"] == model
    return client


def lost(model: str, generation: int, reason: str = WHY) -> dict[str, Any]:
    event = {"what": "lost", "model": model, "generation": generation, "nbytes": 256, "reason": reason}
    return {"event": event}


def refused(worker: WorkerProcess, **request: object) -> dict[str, Any]:
    with worker.client() as client:
        client.send(request)
        error: dict[str, Any] = client.receive()["error"]
        return error


def confirm_drops(worker: WorkerProcess, *expected: tuple[str, int]) -> None:
    """The worker lets go of exactly these, in any order; the service says that it has as well."""
    dropped = [worker.dropped() for _ in expected]
    assert sorted(dropped) == sorted(expected)
    for model, generation in dropped:
        worker.tell({"dropped": {"model": model, "generation": generation}})


def test_a_lost_device_takes_every_shard_along(worker: WorkerProcess) -> None:
    """Holders are told on their leases, subscribers on their subscription, once for each shard; the service is told to
    let go. Nothing is given out or taken in for the reason that everybody hears."""
    worker.publish("a")
    worker.publish("b")
    with holder(worker, "a") as of_a, holder(worker, "b") as of_b, worker.client() as subscriber:
        subscriber.ask({"op": "subscribe"})
        worker.tell({"lost": {"reason": WHY}})
        assert of_a.receive() == lost("a", 1)
        assert of_b.receive() == lost("b", 1)
        assert [subscriber.receive(), subscriber.receive()] == [lost("a", 1), lost("b", 1)]
        confirm_drops(worker, ("a", 1), ("b", 1))
        assert [item["state"] for item in worker.status()["shards"]] == ["draining", "draining"]
        for model in ("a", "unheard of"):
            error = refused(worker, op="attach", model=model, wait=10)
            assert (error["code"], error["fields"]["reason"]) == ("model-failed", WHY)
        error = refused(worker, op="reserve", model="a", nbytes=256)
        assert (error["code"], error["fields"]["problem"]) == ("device-error", WHY)


def test_what_drains_is_lost_as_well(worker: WorkerProcess) -> None:
    """The holder of an older generation has its memory on the same device."""
    worker.publish("m")
    with holder(worker, "m") as old:
        worker.publish("m")
        confirm_drops(worker, ("m", 1))
        worker.tell({"lost": {"reason": WHY}})
        confirm_drops(worker, ("m", 2))
        assert old.receive() == lost("m", 1)


def test_who_waits_for_a_model_is_told(worker: WorkerProcess) -> None:
    """A wait ends with the reason, at once, and not after its seconds."""
    worker.tell({"models": {"m": {"state": "loading", "progress": 0.5}}})
    with worker.client() as client:
        client.send({"op": "attach", "model": "m", "wait": 60})
        assert "event" in client.receive()
        worker.tell({"lost": {"reason": WHY}})
        reply, fds = answer(client)
        fds.close()
        assert reply["error"]["fields"]["reason"] == WHY


def test_a_device_that_is_back_is_used_again(worker: WorkerProcess) -> None:
    """Empty at first, with numbers that go on: a holder of what was lost never takes the new shard for its own."""
    worker.publish("m")
    with holder(worker, "m") as old:
        worker.tell({"lost": {"reason": WHY}})
        confirm_drops(worker, ("m", 1))
        assert old.receive() == lost("m", 1)
        worker.tell({"back": {}})
        assert worker.publish("m", b"y" * 256) == 2
        with worker.client() as client:
            _, fds = attach(client, "m")
            assert bytes_of(fds) == b"y" * 256


def test_a_publish_in_flight_is_refused(worker: WorkerProcess) -> None:
    """The service is about to hold the shard when the device is lost: its publisher hears that, and it is dropped."""
    with worker.client() as publisher:
        generation = publisher.ask({"op": "reserve", "model": "m", "nbytes": 256})["generation"]
        with shard("m", generation, b"x" * 256) as fds:
            publisher.send({"op": "publish"}, [fd.fileno() for fd in fds])
        message, copies = worker.hear()
        copies.close()
        worker.tell({"lost": {"reason": WHY}})
        worker.tell({"held": {"model": "m", "generation": message["hold"]["generation"]}})
        assert publisher.receive()["error"]["fields"]["problem"] == WHY
    confirm_drops(worker, ("m", 1))
    assert (worker.status()["shards"], worker.status()["held"]) == ([], 0)


def test_a_reservation_on_a_lost_device_is_worth_nothing(worker: WorkerProcess) -> None:
    """A publisher that had room before the loss is refused, and its room is free."""
    with worker.client() as publisher:
        generation = publisher.ask({"op": "reserve", "model": "m", "nbytes": 256})["generation"]
        worker.tell({"lost": {"reason": WHY}})
        with shard("m", generation, b"x" * 256) as fds:
            publisher.send({"op": "publish"}, [fd.fileno() for fd in fds])
        assert publisher.receive()["error"]["code"] == "device-error"
        assert worker.status()["reservations"] == []


def test_one_shard_is_lost_alone(worker: WorkerProcess) -> None:
    """Its holders are told, the other model's are not; another generation of it is not meant."""
    worker.publish("bad")
    worker.publish("good")
    with holder(worker, "bad") as of_bad, holder(worker, "good") as of_good:
        worker.tell({"lost": {"reason": "1 of 1 tensors differ", "model": "bad", "generation": 7}})
        worker.tell({"lost": {"reason": "1 of 1 tensors differ", "model": "bad", "generation": 1}})
        assert of_bad.receive() == lost("bad", 1, "1 of 1 tensors differ")
        confirm_drops(worker, ("bad", 1))
        assert refused(worker, op="attach", model="bad")["code"] == "no-such-model"
        worker.tell({"lost": {"reason": "x", "model": "good", "generation": 1}})
        assert of_good.receive() == lost("good", 1, "x")  # the first that it hears
        confirm_drops(worker, ("good", 1))
