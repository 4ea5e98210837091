"""Several nodes: real services that meet over loopback, each with the ranks that are its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.llama import Tensor, slab_of
from tests.manager import Manager
from tests.running import process_of_role, wait_for_end
from tests.service.conftest import model
from tests.service.nodes import KEEP_ALIVE, SECONDS, LossyPath, Node, free_port, table
from weightcached.errors import ConfigError, ModelFailed, ModelHeldBack, ModelLoading, TimedOut
from weightcached.fds import FdSet
from weightcached.service.membership import cluster_id
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach

Llama = tuple[Path, dict[str, Tensor]]
MakeNode = Callable[..., Node]
HEARD_SECONDS = 10.0  # for a service's word to reach its worker


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """``make_node(rank, config)`` is a node that is not started yet; all are ended at the end."""
    made: list[Node] = []

    def make(rank: int, config: str, within: tuple[str, ...] = ()) -> Node:
        made.append(Node(rank, config, within))
        return made[-1]

    yield make
    for node in made:
        node.close()


def host_names(number: int) -> str:
    names = ", ".join(f'"host-{device}"' for device in range(number))
    return f"devices = [{names}]\n"


def of_llama(folder: Path, rank: int, port: int, *more: str, nodes: int = 2, address: str = "127.0.0.1") -> str:
    """The config of a node that has its part of a Llama of four ranks, two on each of two nodes."""
    sizes = ("tensor_parallel = 2", "data_parallel = 2")
    return host_names(2) + model("llama", folder, *sizes) + table(nodes, rank, port, *more, address=address)


def attach(node: Node, device: str, wait: float = 0.0, **key: object) -> tuple[Connection, FdSet]:
    """A lease on a node's rank of the Llama; the caller closes both."""
    worker = Connection.open(node.runtime_dir / f"{device}.sock", device=device, client="test")
    try:
        return worker, worker.request(Attach(model="llama", key=key, wait=wait), timeout=wait + 10)[1]
    except BaseException:
        worker.close()
        raise


def held(node: Node, device: str, **key: object) -> bytes:
    """What a client gets of the Llama. A worker hears of an agreement a moment after the service's status says it."""
    end = time.monotonic() + HEARD_SECONDS
    while True:
        try:
            worker, fds = attach(node, device, **key)
            break
        except (ModelFailed, ModelLoading):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
    with worker, fds:
        slab = list(fds)[1].fileno()
        return os.pread(slab, os.fstat(slab).st_size, 0)


def held_back(node: Node, device: str) -> str:
    """What a client is told that does not wait for a model which the nodes have not agreed on."""
    end = time.monotonic() + HEARD_SECONDS
    while time.monotonic() < end:
        try:
            attach(node, device)
        except ModelHeldBack as error:
            return str(error)
        except ModelLoading:  # the worker hears a moment later that it is cached
            time.sleep(0.02)
    raise AssertionError(f"{device} of node {node.rank} does not say that the model is held back")


def refused(node: Node, device: str) -> str:
    """Why a client gets nothing of the Llama by its name; the worker hears of that a moment later, too."""
    end = time.monotonic() + HEARD_SECONDS
    while time.monotonic() < end:
        try:
            worker, fds = attach(node, device, wait=5)
        except ModelFailed as error:
            return str(error)
        fds.close()
        worker.close()
        time.sleep(0.02)
    raise AssertionError(f"{device} of node {node.rank} gives the model to anyone")


def loads(node: Node) -> int:
    """How often a checkpoint was read since the node was started."""
    return node.service.log.count("bytes read in")


def other_bytes(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint, of the same sizes, with one other byte at its end."""
    shutil.copytree(folder, target)
    (file,) = target.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return target


def test_two_nodes_of_two_ranks(make_node: MakeNode, llama: Llama) -> None:
    """Each loads its own half of four ranks and reads each byte once; both are ready when they agree, and say who is
    there. Nobody listens on the port any more. A datagram that is none of theirs is dropped and counted."""
    folder, tensors = llama
    port = free_port()
    nodes = [make_node(rank, of_llama(folder, rank, port)).start() for rank in range(2)]
    for node in nodes:
        node.ready()
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert f"llama: {size} bytes read in" in node.service.log and loads(node) == 1
        for rank in range(2):
            place = {"data_parallel_rank": node.rank, "data_parallel_size": 2, "tensor_parallel_rank": rank}
            assert held(node, f"host-{rank}", **place) == slab_of(tensors, rank, 2)
        cluster = node.service.status()["cluster"]
        assert (cluster["node"], cluster["agreed"], cluster["problem"]) == (node.rank, True, None)
        assert [(item["state"], item["ranks"]) for item in cluster["nodes"]] == [
            ("loaded", {"llama": [0, 1]}),
            ("loaded", {"llama": [2, 3]}),
        ]
    assert "node 1: loaded, 127.0.0.1, seen 0 s ago, ranks llama 2-3" in nodes[0].service.ctl("status")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for data in (b"", b"\xff", b"[]", b'{"cluster": "x", "beat": {}}', b"x" * 5000):
            other.sendto(data, ("127.0.0.1", port))
        beat = b'{"cluster": "%s", "beat": {"node": 1}}' % cluster_id(port).encode()
        other.sendto(beat, ("127.0.0.1", port))
    while nodes[0].service.status()["cluster"]["dropped"] != {"malformed": 5, "foreign": 1}:
        nodes[0].until(lambda cluster: True)
    for node in nodes:
        node.stop()


def test_a_node_that_dies_costs_the_others_nothing(make_node: MakeNode, llama: Llama) -> None:
    """Killed, it is gone for the others, whose shards stay; started again it rejoins, and nobody else loads again.
    The same with node 0, where they meet. One that is stopped in order says so."""
    folder, _ = llama
    port = free_port()
    first, second = [make_node(rank, of_llama(folder, rank, port)).start() for rank in range(2)]
    rounds = [first.ready().agreed(), second.ready().agreed()]
    assert rounds[0] == rounds[1]

    second.kill()
    first.sees(1, "gone")
    assert "node 1 is gone: nothing heard of it" in first.service.log
    assert held(first, "host-0", data_parallel_rank=0)
    second.start().ready()
    again = first.agreed(beyond=rounds[0])
    assert "node 1 is back" in first.service.log

    first.kill()
    second.sees(0, "gone")
    assert held(second, "host-1", data_parallel_rank=1)
    first.start().ready()
    assert second.agreed(beyond=again) == first.agreed()
    assert (loads(first), loads(second)) == (1, 1)
    assert first.generations("llama") == second.generations("llama") == [1, 1]

    first.stop()
    assert second.sees(0, "gone")["problem"] == "it was stopped"
    second.stop()


def test_a_node_that_dies_before_the_agreement(make_node: MakeNode, llama: Llama) -> None:
    """The others wait for it, and say so wherever somebody looks, and nobody gets the model by its name, but who names
    its content. When it is back they agree, and only it has loaded again."""
    folder, _ = llama
    port = free_port()
    first, second = [make_node(rank, of_llama(folder, rank, port)) for rank in range(2)]
    first.start().service.wait_for("serving nothing yet (0 of 1 models, 0.0 GB); held back: llama", SECONDS)
    reason = "the nodes of the cluster have not agreed on it yet; missing: node 1 (never heard of)"
    assert held_back(first, "host-0").startswith(f"llama is cached on host-0 but not given out: {reason}; ")
    said = first.service.ctl("wait", "llama", "--timeout", "0.1", code=TimedOut.exit_code)
    assert f"llama ({reason})" in said
    said = first.service.ctl("load", "llama")
    assert f"llama is cached on host-0, host-1 already, but not given out: {reason}" in said
    status = first.service.ctl("status")
    assert f"llama: cached, but not given out: {reason}" in status.splitlines()
    assert status.count("cached, held back") == 2 and "not cached" not in status
    assert held(first, "host-0", content=first.service.status()["devices"][0]["shards"][0]["key"]["content"])
    second.start()
    loader = process_of_role(second.service, "loader")
    os.kill(loader, signal.SIGSTOP)
    first.sees(1, "loading")
    second.service.process.kill()
    os.kill(loader, signal.SIGKILL)
    second.kill()
    first.sees(1, "gone")
    second.start().ready()
    first.ready()
    assert loads(first) == 1
    first.stop()
    second.stop()


def test_a_node_that_dies_during_the_agreement(make_node: MakeNode, llama: Llama) -> None:
    """Its part of the rendezvous ends with it. That of the others waits, and is called off when the node is back."""
    folder, _ = llama
    port = free_port()
    first, second = [make_node(rank, of_llama(folder, rank, port)).start() for rank in range(2)]
    rendezvous = process_of_role(second.service, "rendezvous")
    os.kill(rendezvous, signal.SIGSTOP)
    process_of_role(first.service, "rendezvous")
    second.service.process.kill()
    os.kill(rendezvous, signal.SIGCONT)
    second.kill()
    wait_for_end(rendezvous)
    first.sees(1, "gone")
    second.start().ready()
    first.ready()
    assert "a rendezvous is called off" in first.service.log
    assert loads(first) == 1
    first.stop()
    second.stop()


def test_a_restart_costs_nothing_while_others_are_away(make_node: MakeNode, runtime_dir: Path, llama: Llama) -> None:
    """A node that finds what the service manager kept is ready after the time-out, with an error in its log, though
    node 0 is gone. When that is back they agree, and the restarted node has read nothing."""
    folder, _ = llama
    port = free_port()
    first = make_node(0, of_llama(folder, 0, port)).start()
    second = Manager(runtime_dir, of_llama(folder, 1, port, f"keep_alive = {KEEP_ALIVE}", "timeout = 1"))
    try:
        second.start().ready()
        second.wait_stored(4)
        first.ready().kill()
        second.restart().ready()
        said = f"127.0.0.1:{port}: waited 1.0 s for node 0, which does not answer there; "
        assert said in second.log and "; what is here is served" in second.log
        assert second.status()["cluster"]["agreed"] is False
        first.start().ready()
        second.ctl("wait", "llama", "--timeout", "30")
        assert second.status()["cluster"]["agreed"] is True
        assert second.log.count("bytes read in") == 1
        assert second.log.count("serving llama on host-0, host-1") == second.log.count("serving no model yet") == 1
        second.stop()
    finally:
        second.abandon()
    first.stop()


def test_other_bytes_on_one_node(make_node: MakeNode, llama: Llama, tmp_path: Path) -> None:
    """A start fails on every node, as with a bad config, and names the model, the field, both values and both nodes."""
    folder, _ = llama
    port = free_port()
    folders = [folder, other_bytes(folder, tmp_path / "other")]
    nodes = [make_node(rank, of_llama(folders[rank], rank, port)).start() for rank in range(2)]
    for node in nodes:
        assert node.service.wait() == ConfigError.exit_code
        (said,) = re.findall(r"error: .*: \[cluster\]: the nodes differ: (.*)", node.service.log)
        differ, next_step = said.split("; ", 1)
        assert re.fullmatch(r'llama: content is "[0-9a-z:-]+" on node 0 and "[0-9a-z:-]+" on node 1', differ)
        assert next_step.startswith("put the same files on the nodes that differ, then `weightcachectl reload` there")
        node.stop(ConfigError.exit_code)


def test_a_node_that_need_not_wait(make_node: MakeNode, llama: Llama, tmp_path: Path) -> None:
    """With ready = "local" a node serves alone. When another one comes that has other bytes, both show it, and give
    the model to nobody by its name; a reload of the right files there ends that, without a load here."""
    folder, _ = llama
    port = free_port()
    other = other_bytes(folder, tmp_path / "other")
    local = ('ready = "local"', f"keep_alive = {KEEP_ALIVE}")
    first = make_node(0, of_llama(folder, 0, port, *local)).start().ready()
    assert held(first, "host-0", data_parallel_rank=0)
    second = make_node(1, of_llama(other, 1, port, *local)).start().ready()
    for node in (first, second):
        problem = node.until(lambda cluster: cluster["problem"])["problem"]
        assert "llama: content is" in problem and "on node 1" in problem
        assert "the nodes differ: llama: content is" in refused(node, "host-0")
        assert problem in node.service.ctl("status")
        assert "the nodes differ: llama: content is" in node.service.ctl("wait", "llama", code=ModelFailed.exit_code)
    for file in folder.glob("*.safetensors"):
        shutil.copy(file, other / file.name)
    second.service.ctl("reload")
    for node in (first, second):
        node.agreed()
        assert held(node, "host-0", data_parallel_rank=node.rank)
    assert (loads(first), loads(second)) == (1, 2)
    first.stop()
    second.stop()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["TCP", "UDP"])
def test_a_port_that_is_in_use(make_node: MakeNode, llama: Llama, kind: socket.SocketKind) -> None:
    """Node 0 fails at once, with the address, whichever of the two protocols it is."""
    port = free_port()
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind(("127.0.0.1", port))
        if kind == socket.SOCK_STREAM:
            other.listen()
        node = make_node(0, of_llama(llama[0], 0, port)).start()
        assert node.service.wait() == 1
    assert f"error: 127.0.0.1:{port}: is in use by another program on this node" in node.service.log
    node.stop(1)


def test_an_address_of_another_node(make_node: MakeNode, llama: Llama) -> None:
    """A node 0 whose master_addr is not its own is told so."""
    node = make_node(0, of_llama(llama[0], 0, free_port(), address="192.0.2.1")).start()
    assert node.service.wait() == 1
    assert "is no address of this node; master_addr is that of node 0, is this node_rank = 0?" in node.service.log
    node.stop(1)


def test_nodes_with_unequal_ports(make_node: MakeNode, llama: Llama) -> None:
    """Each waits for the time-out, and says who did not come, and where it was expected."""
    folder, _ = llama
    ports = [free_port(), free_port()]
    more = (f"keep_alive = {KEEP_ALIVE}", "timeout = 1")
    nodes = [make_node(rank, of_llama(folder, rank, ports[rank], *more)).start() for rank in range(2)]
    waited = [f"127.0.0.1:{port}: waited 1.0 s for node " for port in ports]
    assert nodes[0].service.wait() == nodes[1].service.wait() == 1
    assert f"{waited[0]}1 (never heard of)" in nodes[0].service.log
    assert f"{waited[1]}0, which does not answer there; do all nodes have" in nodes[1].service.log
    for node in nodes:
        node.stop(1)


def test_two_services_with_one_number(make_node: MakeNode, llama: Llama) -> None:
    """The first one that said that it is node 1 goes on as that. The second one is refused, which is said on both sides
    with what to do, and takes part when the first one has ended."""
    folder, _ = llama
    port = free_port()
    local = ('ready = "local"', f"keep_alive = {KEEP_ALIVE}")
    first = make_node(0, of_llama(folder, 0, port, *local)).start().ready()
    one = make_node(1, of_llama(folder, 1, port, *local)).start().ready()
    agreed = first.agreed()
    other = make_node(1, of_llama(folder, 1, port, *local)).start().ready()
    said = (
        r"two services say that they are node 1: the one at 127\.0\.0\.1:(\d+) counts, the one at 127\.0\.0\.1:(\d+) "
    )
    problems = [
        node.until(lambda cluster: "two services" in (cluster["problem"] or ""))["problem"] for node in (first, other)
    ]
    assert problems[1] == f"node 0 refuses this one: {problems[0]}"
    assert re.fullmatch(said + "does not; stop one of them, or correct its node_rank", problems[0])
    assert problems[0] in first.service.log
    agreed = first.agreed(beyond=agreed)
    assert one.until(lambda cluster: cluster["agreed"] and cluster["round"] == agreed)["problem"] is None
    one.stop()
    later = first.agreed(beyond=agreed)
    other.until(lambda cluster: cluster["agreed"] and cluster["round"] == later and cluster["problem"] is None)


def test_datagrams_are_lost(make_node: MakeNode, llama: Llama) -> None:
    """With every second datagram lost, in both directions, the nodes agree all the same."""
    folder, _ = llama
    port = free_port("127.0.0.1")
    path = LossyPath("127.0.0.2", ("127.0.0.1", port), [True, False, True, False, False])
    try:
        nodes = [
            make_node(rank, of_llama(folder, rank, port, address=address)).start()
            for rank, address in enumerate(("127.0.0.1", "127.0.0.2"))
        ]
        for node in nodes:
            node.ready()
        assert path.lost > 2
        for node in nodes:
            node.stop()
    finally:
        path.close()


def test_a_cluster_of_one_needs_nobody(make_node: MakeNode, llama: Llama) -> None:
    """One node opens no port and is ready by itself; its status has no nodes."""
    config = host_names(2) + model("llama", llama[0], "tensor_parallel = 2") + "[cluster]\nnodes = 1\nnode_rank = 0\n"
    node = make_node(0, config).start()
    node.ready()
    assert node.service.status()["cluster"] is None
    node.stop()
