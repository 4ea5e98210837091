"""Several nodes in network namespaces of their own, joined by veth pairs: as hosts on one switch.

Made with iproute2, and removed at the end. Needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.llama import Tensor, slab_of
from tests.service.conftest import model
from tests.service.nodes import Node, table
from tests.service.test_cluster import held, host_names, loads

Llama = tuple[Path, dict[str, Tensor]]
PORT = 29650  # free in a namespace of its own


class Network:
    """A switch in one namespace, and a host in each of some others, with the addresses 10.97.0.1 and so on."""

    def __init__(self) -> None:
        self._prefix = f"wc{os.getpid() % 100_000}"
        self._names: list[str] = []
        self._namespace("sw")
        self._ip("sw", "link", "add", "br0", "type", "bridge")
        self._ip("sw", "link", "set", "br0", "up")

    def add_host(self) -> int:
        """A host that is connected to the others. Its number, from 0."""
        number = len(self._names) - 1
        self._namespace(str(number))
        peer = ["peer", "name", "eth0", "netns", self._name(str(number))]
        self._ip("sw", "link", "add", f"h{number}", "type", "veth", *peer)
        self._ip("sw", "link", "set", f"h{number}", "master", "br0")
        self._ip(str(number), "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip(str(number), "link", "set", device, "up")
        self.plug(number, True)
        return number

    def plug(self, number: int, connected: bool) -> None:
        """Connects a host to the switch, or takes its cable out."""
        self._ip("sw", "link", "set", f"h{number}", "up" if connected else "down")

    def address(self, number: int) -> str:
        return f"10.97.0.{number + 1}"

    def within(self, number: int) -> tuple[str, ...]:
        """The command that runs another one on a host."""
        return ("ip", "netns", "exec", self._name(str(number)))

    def close(self) -> None:
        while self._names:
            subprocess.run(["ip", "netns", "delete", self._names.pop()], check=False, capture_output=True)

    def _namespace(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self._name(name)], check=True, capture_output=True, text=True)
        self._names.append(self._name(name))

    def _name(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _ip(self, name: str, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self._name(name), *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    """A switch without hosts; skips where it cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (Debian package iproute2)")
    made = None
    try:
        made = Network()
        made.add_host()
    except subprocess.CalledProcessError as error:
        if made is not None:
            made.close()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield made
    made.close()


@pytest.fixture
def make_nodes(network: Network) -> Iterator[Callable[..., list[Node]]]:
    """``make_nodes(config, 2)``: started nodes, each in a namespace of its own; `config` makes the part before
    [cluster] of a node."""
    made: list[Node] = []

    def make(config: Callable[[int], str], number: int, *more: str) -> list[Node]:
        for rank in range(number):
            host = 0 if rank == 0 else network.add_host()
            text = config(rank) + table(number, rank, PORT, *more, address=network.address(0))
            made.append(Node(rank, text, network.within(host)).start())
        return made

    yield make
    for node in made:
        node.close()


def test_two_nodes_and_a_cable(make_nodes: Callable[..., list[Node]], network: Network, llama: Llama) -> None:
    """Two hosts of two ranks each agree over the network. With the cable out each goes on serving and says that the
    other is gone; with it in again they know one another, and nobody loads or agrees anew, as nothing has changed."""
    folder, tensors = llama
    sizes = ("tensor_parallel = 2", "data_parallel = 2")
    nodes = make_nodes(lambda _: host_names(2) + model("llama", folder, *sizes), 2)
    rounds = [node.ready().agreed() for node in nodes]
    assert rounds[0] == rounds[1]
    addresses = [node.service.status()["cluster"]["nodes"][1 - node.rank]["address"] for node in nodes]
    assert addresses == [network.address(1), network.address(0)]
    network.plug(1, False)
    for node in nodes:
        node.sees(1 - node.rank, "gone")
        assert held(node, "host-1", data_parallel_rank=node.rank) == slab_of(tensors, 1, 2)
    network.plug(1, True)
    for node in nodes:
        node.sees(1 - node.rank, "loaded")
        assert node.agreed() == rounds[0]
        assert loads(node) == 1
    for node in nodes:
        node.stop()


def test_three_nodes_of_different_sizes(make_nodes: Callable[..., list[Node]], llama: Llama) -> None:
    """Of four ranks the first has two, the others one each; each rank's bytes are on its node alone."""
    folder, tensors = llama
    sizes = ("tensor_parallel = 2", "data_parallel = 2")
    local = [2, 1, 1]
    nodes = make_nodes(
        lambda rank: host_names(local[rank]) + model("llama", folder, *sizes),
        3,
        f"local_ranks = {local}",
        "keep_alive = 0.5",
    )
    for node in nodes:
        node.ready()
    places = [(node, f"host-{device}") for node in nodes for device in range(local[node.rank])]
    for number, (node, device) in enumerate(places):
        data, tensor = divmod(number, 2)
        key = {"data_parallel_rank": data, "tensor_parallel_rank": tensor}
        assert held(node, device, **key) == slab_of(tensors, tensor, 2)
        ranks = [item["ranks"]["llama"] for item in node.service.status()["cluster"]["nodes"]]
        assert ranks == [[0, 1], [2, 2], [3, 3]]
    for node in nodes:
        node.stop()
