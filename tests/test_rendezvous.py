"""The rendezvous of the nodes: real processes that meet in a real store."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.service.nodes import free_port
from weightcached import rendezvous
from weightcached.errors import (
    ConnectionFailed,
    MissingDependency,
    ProtocolError,
    TimedOut,
    from_wire,
)
from weightcached.fds import FdSet
from weightcached.meeting import DESCRIPTION_BYTES, listen
from weightcached.wire import framing

ROOT = Path(__file__).parents[1]


class Process:
    """One rendezvous process, as the service starts it."""

    def __init__(self, job: dict[str, object], *, isolated: bool = False) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        option = f"--channel-fd={theirs.fileno()}"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *(["-S"] if isolated else []), "-m", "weightcached", "rendezvous", "x", "0/2", option],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stderr=subprocess.PIPE,
            )
        frame = framing.Frame(job)
        frame.send(self.channel)
        frame.close()

    def answer(self) -> list[str]:
        """The descriptions, or the error that it answers with; and it has ended then."""
        self.channel.settimeout(40)
        received = framing.receive(self.channel, large=True)
        assert received is not None, self.end()
        data, fds = received
        assert isinstance(fds, FdSet)
        fds.close()
        self.end()
        answer = framing.decode(data)
        if "failed" in answer:
            raise from_wire(answer["failed"]["error"])
        return list(answer["met"]["descriptions"])

    def end(self) -> str:
        self.channel.close()
        return self.process.communicate(timeout=40)[1].decode()


def job(node: int, port: int, nodes: int = 2, seconds: float = 30.0, **more: object) -> dict[str, object]:
    fields = {"host": "127.0.0.1", "port": port, "node": node, "nodes": nodes, "round": "r/1", "seconds": seconds}
    return {"job": {**fields, "description": json.dumps({"node": node}), **more}}


def test_every_node_gets_all_descriptions() -> None:
    """In the order of the nodes, whoever comes first, large ones too; then nobody listens any more."""
    port = free_port()
    large = "x" * 200_000
    processes = [Process(job(node, port, description=f"{node}{large}")) for node in (1, 0)]
    for process in processes:
        assert process.answer() == [f"{node}{large}" for node in range(2)]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_who_does_not_come_is_named() -> None:
    """By node 0, with its address, after the time that was given."""
    port = free_port()
    with pytest.raises(TimedOut, match=f"127.0.0.1:{port}: waited 0.3 s for node 1, node 2 to come to the rendezvous"):
        Process(job(0, port, nodes=3, seconds=0.3)).answer()


def test_a_node_0_that_does_not_come_is_named() -> None:
    """By the others, with the address at which it should be."""
    port = free_port()
    with pytest.raises(TimedOut, match=rf"127.0.0.1:{port}: waited 0.3 s for node 0, which does not listen there"):
        Process(job(1, port, seconds=0.3)).answer()


def test_two_that_are_one_node() -> None:
    """Whichever comes second is refused by its number, while the others wait on."""
    port = free_port()
    processes = [Process(job(node, port, nodes=3)) for node in (0, 1, 1)]
    by_channel = {process.channel: process for process in processes}
    (first_answer, *others), _, _ = select.select(list(by_channel), [], [], 40)
    assert not others
    with pytest.raises(ProtocolError, match="two services say that they are node 1 of 3; see node_rank"):
        by_channel[first_answer].answer()
    for process in processes:
        process.end()


def test_a_port_that_is_in_use() -> None:
    """Node 0 says so at once."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port}: is in use by another program on this node"):
            Process(job(0, port)).answer()


def test_its_service_ends_and_so_does_it() -> None:
    """However deep it waits in the store: the end of the channel ends it, and frees the port."""
    torch = pytest.importorskip("torch")
    port = free_port()
    process = Process(job(0, port))
    other = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    assert other.get("weightcached/r/1/node/0")  # it waits for node 1 from here on
    process.end()
    assert process.process.returncode == -signal.SIGTERM
    listen("127.0.0.1", port).close()


def test_without_torch_it_says_what_to_install() -> None:
    """torch is needed for this alone on the service's side."""
    process = Process(job(0, free_port()), isolated=True)
    with pytest.raises(MissingDependency, match=r"agreeing with other nodes needs torch: pip install"):
        process.answer()


def test_a_description_that_is_too_large_is_refused() -> None:
    """By its size and its node, before it is taken apart."""
    with pytest.raises(ProtocolError, match=f"node 0 sent {DESCRIPTION_BYTES + 1} bytes"):
        Process(job(0, free_port(), nodes=1, description="x" * (DESCRIPTION_BYTES + 1))).answer()


def test_an_answer_that_is_too_large_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many descriptions, each of which is allowed, may be more than one message holds: the service is told so."""
    monkeypatch.setattr(rendezvous, "meet", lambda _: ["x" * DESCRIPTION_BYTES] * 64)
    service, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with service, theirs:
        frame = framing.Frame(job(0, 1))
        frame.send(service)
        frame.close()
        assert rendezvous.run(theirs.detach()) == 1
        received = framing.receive(service, large=True)
        assert received is not None
        received[1].close()
    error = from_wire(framing.decode(received[0])["failed"]["error"])
    assert "at most" in str(error)


def test_a_job_that_is_none() -> None:
    """It is refused like any message that is not understood."""
    with pytest.raises(ProtocolError, match="not readable"):
        Process({"job": {"host": "x"}}).answer()
