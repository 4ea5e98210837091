"""Two nodes as two units of one user, with the drop-in that lets them use the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.llama import write_llama

from .test_unit import UNITS, Installation, installation

pytestmark = pytest.mark.systemd
__all__ = ["installation"]

NETWORK = Path("weightcached@.service.d/network.conf.example")
NODE = """
devices = ["host-{node}"]
[[model]]
name = "llama"
checkpoint = "/share/models/llama"
tensor_parallel = 2
[cluster]
nodes = 2
node_rank = {node}
master_addr = "127.0.0.1"
master_port = 29650
keep_alive = 1
"""


def test_two_units_are_two_nodes(installation: Installation, make_checkpoint: MakeCheckpoint) -> None:
    """Both starts return when the nodes agree. One that is stopped is said to be gone by the other, which stays active,
    in its status and in its status line."""
    write_llama(installation.share / "models" / "llama", make_checkpoint)
    for node in range(2):
        (installation.share / "config" / f"node-{node}.toml").write_text(NODE.format(node=node))
    installation.drop_in("network.conf", (UNITS / NETWORK).read_text())
    result = installation.run("""
    systemctl --user start weightcached@node-0.service weightcached@node-1.service
    save both weightcachectl status
    systemctl --user stop weightcached@node-1.service
    save one weightcachectl status
    state node-0 state
    """)
    both, one = installation.text("both"), installation.text("one")
    for node in range(2):
        assert f"cluster: node {node} of 2, meets at 127.0.0.1:29650, agreed\n" in both
    assert re.search(r"node 1: gone, 127.0.0.1, seen \d s ago, ranks llama 1: it was stopped\n", one)
    state = installation.state("state")
    assert (state["ActiveState"], state["NRestarts"]) == ("active", "0")
    assert "cluster: node 1 gone" in state["StatusText"]
    assert result.journal.count("bytes read in") == 2
