"""main: a worker process from its start to its end, with the test as the service at the other end of its channel."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.wire.serving import SECONDS
from tests.worker.process import WorkerProcess, shard
from weightcached.fds import FdSet
from weightcached.memfd import sealed_memfd
from weightcached.wire import framing

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(descriptors: NoDescriptorLeaks) -> Iterator[Start]:
    """Starts workers; what is left of them is freed at the end."""
    started: list[WorkerProcess] = []

    def start(**options: Any) -> WorkerProcess:
        worker = WorkerProcess(**options)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.close()


def adopt(worker: WorkerProcess, model: str, generation: int, fds: FdSet) -> None:
    worker.tell({"adopt": {"model": model, "generation": generation}}, list(fds))


def slab_of(worker: WorkerProcess, model: str) -> bytes:
    """What a client that attaches finds in the first slab."""
    with worker.client() as client:
        client.send({"op": "attach", "model": model})
        received = framing.receive(client.sock)
        assert received is not None
        with received[1] as fds:
            assert "ok" in framing.decode(received[0]), received[0]
            return os.pread(list(fds)[1].fileno(), 1 << 16, 0)


def test_it_begins_with_what_is_held(start: Start) -> None:
    """Shards that a service hands to a new worker are served as before, the newest generation of each model; what is
    older is dropped, and numbers go on from there. The process says in its command line what it is, and its exit is
    clean."""
    worker = start()
    for model, generation, data in (("a", 1, b"old"), ("a", 3, b"new"), ("b", 1, b"other")):
        with shard(model, generation, data) as fds:
            adopt(worker, model, generation, fds)
    worker.tell({"serve": {"generations": {"a": 5}}})
    assert worker.dropped() == ("a", 1)
    assert worker.heard() == {"serving": {}}
    assert (slab_of(worker, "a"), slab_of(worker, "b")) == (b"new", b"other")
    with worker.client() as client:
        assert client.ask({"op": "reserve", "model": "a", "nbytes": 0})["generation"] == 6
    arguments = Path(f"/proc/{worker.process.pid}/cmdline").read_bytes().split(b"\0")
    assert b"worker" in arguments and b"host-0" in arguments
    status = worker.status()
    assert (status["pid"], status["instance"], status["limit"]) == (worker.process.pid, "test", 1 << 20)
    assert worker.end() == 0
    assert worker.log() == ""


def test_nobody_is_served_before_everything_is_adopted(start: Start) -> None:
    """A client that connects too early waits in the queue and then gets what was adopted: it is never told that a
    cached model is absent."""
    worker = start()
    clients = []
    for _ in range(3):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(SECONDS)
        client.connect(os.fspath(worker.path))
        client.send(b'{"op":"hello","client":"early","version":"1","device":"host-0"}')
        clients.append(client)
    with shard("m", 1, b"data") as fds:
        adopt(worker, "m", 1, fds)
    worker.serve()
    for client in clients:
        with client:
            assert b'"ok"' in client.recv(1000)
            client.send(b'{"op":"attach","model":"m"}')
            received = framing.receive(client)
            assert received is not None and b'"generation":1' in received[0]
            received[1].close()


def test_a_worker_that_is_killed_is_followed_by_another(start: Start) -> None:
    """After SIGKILL the listening socket and the copies are still with the service: the next worker serves them, to
    clients that connected in between too."""
    first = start()
    with shard("m", 1, b"data") as fds:
        adopt(first, "m", 1, fds)
        first.serve()
        with first.client() as client:
            client.send({"op": "attach", "model": "m"})
            received = framing.receive(client.sock)
            assert received is not None
            received[1].close()
            first.process.send_signal(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
            assert client.receive() is None  # the lease ends with the worker
        second = start(share=first)
        adopt(second, "m", 1, fds)
    second.serve()
    assert slab_of(second, "m") == b"data"


def test_it_ends_with_its_service(start: Start) -> None:
    """When the channel closes, every client is disconnected and the process exits with 0, in mid publish as well."""
    worker = start().serve()
    client, publisher = worker.client(), worker.client()
    client.send({"op": "attach", "model": "m", "wait": 30})
    assert (client.receive() or {})["event"]["model"] == "m"  # it waits
    generation = publisher.ask({"op": "reserve", "model": "p", "nbytes": 4})["generation"]
    with shard("p", generation, b"data") as fds:
        publisher.send({"op": "publish"}, [fd.fileno() for fd in fds])
    worker.hear()[1].close()
    assert worker.end() == 0
    assert client.receive() is None
    assert publisher.receive() is None
    client.close()
    publisher.close()
    assert worker.log() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_worker_alone(start: Start, number: signal.Signals) -> None:
    """A worker has no signal handling of its own: a signal ends it at once, whatever it holds is held by its service as
    well, and its successor goes on. It writes no traceback."""
    worker = start()
    with shard("m", 1, b"data") as fds:
        adopt(worker, "m", 1, fds)
        worker.serve()
        worker.process.send_signal(number)
        assert worker.wait() in (-number, 128 + number)
        assert worker.log() == ""
        second = start(share=worker)
        adopt(second, "m", 1, fds)
    second.serve()
    assert slab_of(second, "m") == b"data"


@pytest.mark.parametrize(
    "message",
    [{"unheard": {}}, {"held": {"model": "m", "generation": 7}}, {"adopt": {"model": "m", "generation": 1}}],
    ids=["unknown", "held but never published", "nothing to adopt"],
)
def test_a_channel_that_makes_no_sense_ends_the_worker(start: Start, message: dict[str, Any]) -> None:
    """Service and worker are of one version, so such a message is a defect: it is reported with a traceback, and the
    worker ends with 1 instead of going on in a state that nobody knows."""
    worker = start().serve()
    worker.tell(message)
    assert worker.wait() == 1
    assert "Traceback" in worker.log()


def test_a_manifest_that_cannot_be_read_is_not_adopted(start: Start) -> None:
    """A shard of another version is dropped, with a line in the log, and the others are served."""
    worker = start()
    with sealed_memfd("test", b'{"schema":99}\n{}') as manifest:
        worker.tell({"adopt": {"model": "strange", "generation": 4}}, [manifest])
    with shard("m", 1, b"data") as fds:
        adopt(worker, "m", 1, fds)
    assert worker.dropped() == ("strange", 4)
    worker.serve()
    assert slab_of(worker, "m") == b"data"
    assert "strange generation 4 cannot be adopted and is dropped" in worker.log()


def test_more_models_and_shards_than_one_message_or_queue_holds(start: Start) -> None:
    """A thousand models in one message (by memfd) and three hundred shards to adopt are no problem."""
    worker = start()
    with shard("m", 1, b"data") as fds:
        adopt(worker, "m", 1, fds)
    for number in range(300):
        with shard(f"m{number}", 1, b"x") as fds:
            adopt(worker, f"m{number}", 1, fds)
    worker.serve()
    models = {f"model-{number}": {"state": "failed", "progress": 0.0, "reason": "x" * 100} for number in range(1000)}
    worker.tell({"models": models})
    with worker.client() as client:
        assert client.refused({"op": "attach", "model": "model-999"})["code"] == "model-failed"
    assert len(worker.status()["shards"]) == 301


def test_memory_at_rest(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """An idle worker that serves one shard stays within 40 MB of resident memory."""
    worker = start().serve()
    worker.publish("m")
    assert slab_of(worker, "m") == b"x" * 256
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    with capsys.disabled():
        print(f"\nresident memory of an idle worker: {resident / 1e6:.1f} MB")
    assert resident <= 40e6
