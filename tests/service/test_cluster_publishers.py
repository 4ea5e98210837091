"""A publisher whose ranks are on two nodes: real services, which meet over IPv6."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.running import ROOT, import_path
from tests.service.conftest import HOST, model
from tests.service.nodes import Node, free_port, table

GATHERING = str(ROOT / "tests" / "service" / "gathering.py")


def has_ipv6() -> bool:
    try:
        free_port("::1")
    except OSError:
        return False
    return True


@pytest.fixture
def make_nodes(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], list[Node]]]:
    """``make_nodes("::1")``: two nodes that are not started, each with one rank of a model with a publisher."""
    monkeypatch.setenv("PYTHONPATH", import_path())
    made: list[Node] = []

    def make(address: str) -> list[Node]:
        port = free_port(address)
        command = ["python", GATHERING, f"port={tmp_path / 'port'}"]
        for rank in range(2):
            text = HOST + model("cut", checkpoint, "tensor_parallel = 2", f"publisher = {json.dumps(command)}")
            more = ("keep_alive = 0.3", "timeout = 60", f"publisher_port = {free_port(address)}")
            if made:
                more = (*more[:2], made[0].config.splitlines()[-1])
            made.append(Node(rank, text + table(2, rank, port, *more, address=f"[{address}]")))
        return made

    yield make
    for node in made:
        node.close()


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback interface")
def test_ranks_of_two_nodes_meet(make_nodes: Callable[[str], list[Node]], tmp_path: Path) -> None:
    """Each service starts its own rank, with the number, the world and the place to meet of the whole cluster. They
    meet, publish, and the nodes agree."""
    nodes = [node.start() for node in make_nodes("::1")]
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
