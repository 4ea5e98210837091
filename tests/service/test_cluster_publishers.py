"""A publisher whose ranks are on two nodes: real services, which meet over loopback."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu import becomes_true
from tests.running import ROOT, children_of, import_path, process_of_role, wait_for_end
from tests.service.commands import PUBLISHING, publisher
from tests.service.conftest import HOST, model
from tests.service.nodes import Node, free_port, table

GATHERING = str(ROOT / "tests" / "service" / "gathering.py")
LAZY = 'ready = "listening"\n'
MakeNodes = Callable[..., list[Node]]


def has_ipv6() -> bool:
    try:
        free_port("::1")
    except OSError:
        return False
    return True


@pytest.fixture
def make_nodes(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNodes]:
    """``make_nodes(command, *lines, ...)``: two nodes that are not started, each with one rank of the model "cut" by
    that command. `lines` are more of the model's, `top` goes in front, `then` is a line of another model, "next"."""
    monkeypatch.setenv("PYTHONPATH", import_path())
    made: list[Node] = []

    def make(
        command: list[str],
        *lines: str,
        address: str = "127.0.0.1",
        top: str = "",
        then: str | None = None,
        timeout: int = 60,
    ) -> list[Node]:
        port = free_port(address)
        # The models with a publisher have one port each, from this one on.
        while (publisher_port := free_port(address)) in (port, port - 1):
            pass
        more = ("keep_alive = 0.3", f"timeout = {timeout}", f"publisher_port = {publisher_port}")
        at = f"[{address}]" if ":" in address else address
        of_model = ("tensor_parallel = 2", f"publisher = {json.dumps(command)}", *lines)
        text = top + HOST + model("cut", checkpoint, *of_model)
        if then is not None:
            text += model("next", checkpoint, "tensor_parallel = 2", "preload = false", then)
        made.extend(Node(rank, text + table(2, rank, port, *more, address=at)) for rank in range(2))
        return made

    yield make
    for node in made:
        node.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Where a rank of PUBLISHING that holds reads its exit status."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def holding(fifo: Path) -> list[str]:
    """The command whose ranks meet, and rank 1 waits at the FIFO once it has published."""
    return ["python", PUBLISHING, f"meet={fifo}.sock", f"hold=1:{fifo}"]


def state(node: Node) -> tuple[str, int]:
    """Of the model, and how many ranks of it are there."""
    found = node.service.model("cut")
    return found["state"], found["ranks_cached"]


def load_until_rank_1_holds(nodes: list[Node]) -> None:
    """Both nodes load; rank 0 is done, rank 1 has published."""
    for node in nodes:
        node.start().ready()
        node.service.ctl("load", "cut")
    assert becomes_true(lambda: "cut: rank 1: holds" in nodes[1].service.log)
    assert becomes_true(lambda: state(nodes[0])[1] == 1)
    for pid in children_of(nodes[0].service.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if PUBLISHING.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                wait_for_end(pid)


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback interface")
def test_ranks_of_two_nodes_meet(make_nodes: MakeNodes, tmp_path: Path) -> None:
    """Each service starts its own rank, with the number, the world and the place to meet of the whole cluster. They
    meet, publish, and the nodes agree."""
    nodes = make_nodes(["python", GATHERING, f"port={tmp_path / 'port'}"], address="::1")
    for node in nodes:
        node.start()
    for node in nodes:
        node.ready()
        assert f"cut: rank {node.rank}: met [10, 11]\n" in node.service.log
        assert node.service.model("cut")["ranks_cached"] == 1
        assert "meets at [::1]:" in node.service.ctl("status")
    assert f"publisher_port = {(tmp_path / 'port').read_text().strip()}" in nodes[0].config
    for node in nodes:
        node.agreed()
    for node in nodes:
        node.stop()


def test_a_load_is_over_when_the_ranks_of_all_nodes_are(make_nodes: MakeNodes, fifo: Path) -> None:
    """Those here have ended and published: the model still loads, until the other node's have ended too."""
    nodes = make_nodes(holding(fifo), "preload = false", top=LAZY)
    load_until_rank_1_holds(nodes)
    assert state(nodes[0]) == ("loading", 1)
    assert nodes[0].service.model("cut")["held_back"] == "its load is not over on all nodes"
    fifo.write_text("0")
    for node in nodes:
        node.agreed()
        assert becomes_true(lambda node=node: state(node) == ("cached", 1))
        node.stop()


def test_a_rank_that_fails_late_takes_those_of_other_nodes_with_it(make_nodes: MakeNodes, fifo: Path) -> None:
    """It has published, as have all others: nothing of that load stays on any node, and each says which one failed."""
    nodes = make_nodes(holding(fifo), "preload = false", top=LAZY)
    load_until_rank_1_holds(nodes)
    fifo.write_text("3")
    for node in nodes:
        assert becomes_true(lambda node=node: state(node) == ("failed", 0))
        assert becomes_true(lambda node=node: node.service.status()["devices"][0]["shards"] == [])
        said = node.service.model("cut")["error"]["message"]
        assert "what it had published, generation 1 on host-0, is evicted again" in said
        assert "the publisher of rank 1 on host-0 ended by exit status 3" in said
    assert "node 1, which has ranks of it, loads it no more: cut: " in nodes[0].service.model("cut")["error"]["message"]
    for node in nodes:
        node.stop()


def test_a_failure_is_heard_of_though_the_next_load_has_begun(make_nodes: MakeNodes, fifo: Path) -> None:
    """Node 1 has another model to load as soon as the first one has failed there: no datagram has said that before."""
    nodes = make_nodes(holding(fifo), "preload = false", top=LAZY, then=publisher("hang=1"))
    load_until_rank_1_holds(nodes)
    nodes[1].service.ctl("load", "next")
    fifo.write_text("3")
    for node in nodes:
        assert becomes_true(lambda node=node: state(node) == ("failed", 0))
    assert "node 1, which has ranks of it, loads it no more: " in nodes[0].service.model("cut")["error"]["message"]
    assert nodes[1].service.model("next")["state"] == "loading"
    for node in nodes:
        node.stop()


def test_two_models_in_another_order_on_each_node(make_nodes: MakeNodes, tmp_path: Path) -> None:
    """Each waits for the other's ranks: after `timeout` the one at "next" gives that up, and has "cut" loaded."""
    first = ["python", PUBLISHING, f"meet={tmp_path / 'cut'}"]
    then = publisher(f"meet={tmp_path / 'next'}")
    nodes = make_nodes(first, "preload = false", top=LAZY, then=then, timeout=8)
    for node in nodes:
        node.start().ready()
    for node, names in zip(nodes, (("cut", "next"), ("next", "cut")), strict=True):
        for name in names:
            node.service.ctl("load", name)
    said = nodes[1].service.ctl("wait", "next", "--timeout", "40", code=1)
    assert "waited 8 s for its ranks on node 0 (loading another model)" in said
    nodes[1].service.ctl("load", "next")
    for node in nodes:
        for name in ("cut", "next"):
            node.service.ctl("wait", name, "--timeout", "40")
    for node in nodes:
        node.stop()


def test_a_node_that_is_stopped_while_it_waits_ends_the_load(make_nodes: MakeNodes, fifo: Path) -> None:
    """Its own rank was done; it is gone before the other node's is, and nothing of that load stays."""
    nodes = make_nodes(holding(fifo), "preload = false", top=LAZY)
    load_until_rank_1_holds(nodes)
    nodes[0].stop()
    assert becomes_true(lambda: state(nodes[1]) == ("failed", 0))
    said = nodes[1].service.model("cut")["error"]["message"]
    assert "node 0, which has ranks of it, loads it no more: it was stopped" in said
    nodes[1].stop()


def test_a_node_that_is_killed_takes_its_ranks_with_it(make_nodes: MakeNodes, fifo: Path) -> None:
    """They end with their service, though no systemd ends them; when it is back the other node's load has failed."""
    nodes = make_nodes(holding(fifo), "preload = false", top=LAZY)
    load_until_rank_1_holds(nodes)
    pid = process_of_role(nodes[1].service, PUBLISHING)
    nodes[1].kill()
    wait_for_end(pid)
    nodes[1].start().ready()
    assert becomes_true(lambda: state(nodes[0]) == ("failed", 0))
    said = nodes[0].service.model("cut")["error"]["message"]
    assert "node 1, which has ranks of it, loads it no more: it has started anew" in said
    for node in nodes:
        node.stop()


def test_a_port_in_use_is_an_error_on_all_nodes(make_nodes: MakeNodes) -> None:
    """Of node 0 before any process is started; node 1, whose rank would wait for it, has that reason."""
    nodes = make_nodes([sys.executable, PUBLISHING, "hang=1"], "preload = false", top=LAZY)
    port = int(nodes[0].config.rpartition("publisher_port = ")[2])
    for node in nodes:
        node.start().ready()
    for node in nodes:
        node.sees(1 - node.rank, "loaded")
    with socket.create_server(("127.0.0.1", port)):
        nodes[1].service.ctl("load", "cut")
        nodes[1].service.wait_for("loading cut")
        nodes[0].service.ctl("load", "cut")
        for node in nodes:
            assert becomes_true(lambda node=node: state(node) == ("failed", 0))
            said = node.service.model("cut")["error"]["message"]
            assert f"127.0.0.1:{port}: is in use by another program on this node" in said
            assert "give all nodes another publisher_port" in said
    for node in nodes:
        node.stop()
