"""The table [cluster]: which ranks a node has, and every setting that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weightcached.config import Config, json_schema, load_config
from weightcached.config_cluster import ClusterConfig
from weightcached.errors import ConfigError

Load = Callable[[str], Config]
MODEL = '[[model]]\nname = "big"\ncheckpoint = "/models/big"\n'
TWO = '[cluster]\nnodes = 2\nnode_rank = 1\nmaster_addr = "10.0.0.1"\nmaster_port = 29650\n'


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load(text)`` is the config with that text."""

    def made(text: str) -> Config:
        path = tmp_path / "c.toml"
        path.write_text(text)
        return load_config(path)

    return made


def test_each_node_has_its_part_of_the_ranks(load: Load) -> None:
    """Global rank = node_rank x local ranks + local rank; the model's devices are those of the local ranks."""
    config = load(MODEL + 'tensor_parallel = 4\ndevices = ["host-0", "host-1"]\n' + TWO)
    assert config.models[0].parallel.world == 4
    assert list(config.models[0].ranks_here) == [2, 3]
    assert config.models[0].devices_for(["host-1", "host-0"]) == ("host-0", "host-1")
    assert config.cluster is not None and not config.cluster.alone


def test_nodes_may_be_of_different_sizes(load: Load) -> None:
    """With local_ranks a node's ranks begin after those of the nodes before it."""
    more = "nodes = 3\nlocal_ranks = [2, 1, 1]\n"
    shares = [
        list(load(MODEL + "tensor_parallel = 4\n" + text.replace("nodes = 2\n", more)).models[0].ranks_here)
        for text in (TWO.replace("node_rank = 1", f"node_rank = {rank}") for rank in range(3))
    ]
    assert shares == [[0, 1], [2], [3]]


def test_one_node_needs_no_port(load: Load) -> None:
    """A cluster of one has all ranks, and nobody to meet."""
    config = load(MODEL + "tensor_parallel = 2\n[cluster]\nnodes = 1\nnode_rank = 0\n")
    assert config.cluster is not None and config.cluster.alone
    assert list(config.models[0].ranks_here) == [0, 1]


def test_without_a_cluster_all_ranks_are_here(load: Load) -> None:
    """A config of one host is as it was."""
    assert list(load(MODEL + "tensor_parallel = 2\n").models[0].ranks_here) == [0, 1]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("master_port = 29650\n", "", "cluster.master_port: missing; with 2 nodes write the port where node 0 listens"),
        ('master_addr = "10.0.0.1"\n', "", "cluster.master_addr: missing; with 2 nodes write the address of node 0"),
        ('"10.0.0.1"', '""', "cluster.master_addr: missing; with 2 nodes"),
        ("29650", "0", "cluster.master_port: 0 is no port; write a number from 1 to 65535"),
        ("29650", "65536", "cluster.master_port: 65536 is no port; write a number from 1 to 65535"),
        ("29650", '"29650"', 'cluster.master_port: "29650" is no port'),
        ("29650", "29650\nengine_port = 29650", "cluster.master_port: 29650 is engine_port too; the engine needs one"),
        ("node_rank = 1", "node_rank = 2", "cluster.node_rank: 2 is none of 2 nodes; write a number from 0 to 1"),
        ("node_rank = 1", "node_rank = -1", "cluster.node_rank: -1 is no rank of a node"),
        ("nodes = 2", "nodes = true", "cluster.nodes: true is no number of nodes"),
        ("nodes = 2\n", "", "cluster.nodes: missing; every [cluster] needs it"),
        ("29650", "29650\nlocal_ranks = [4]", "cluster.local_ranks: [4] for nodes = 2; write one number for each node"),
        ("29650", "29650\nlocal_ranks = [4, 0]", "cluster.local_ranks: 0 is no number of ranks"),
        ("29650", "29650\nlocal_ranks = 4", "cluster.local_ranks: 4 is no list"),
        ("29650", "29650\nkeep_alive = 0", "cluster.keep_alive: 0 is no time; write seconds, from 0.1"),
        ("29650", '29650\ntimeout = "1m"', 'cluster.timeout: "1m" is no time'),
        ("29650", '29650\nready = "loaded"', "cluster.ready: \"loaded\": input should be 'all' or 'local'"),
        ("29650", "29650\nmaster_add = 1", 'cluster.master_add: unknown key; did you mean "master_addr"?'),
        ("29650", "29650\nmemory_limit = 1", "cluster.memory_limit: unknown key in [cluster]; it belongs above it"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(load: Load, old: str, new: str, problem: str) -> None:
    """Each wrong setting is an error when the file is read, not a hang later."""
    assert old in TWO
    with pytest.raises(ConfigError) as caught:
        load(MODEL + "tensor_parallel = 4\n" + TWO.replace(old, new))
    assert caught.value.problem.startswith(problem) or f") {problem}" in caught.value.problem


def test_a_cluster_is_a_table(load: Load) -> None:
    """Written as a value it is refused with what to write."""
    with pytest.raises(ConfigError, match=r"cluster: 3 is not what \[cluster\] makes"):
        load("cluster = 3\n" + MODEL)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("", "model big: 3 ranks cannot be shared equally by 2 nodes; write local_ranks in [cluster]"),
        ("local_ranks = [3, 1]", "model big: local_ranks 3, 1 in [cluster] are 4 ranks, not 3"),
    ],
)
def test_ranks_that_cannot_be_shared_out(load: Load, more: str, problem: str) -> None:
    """A model whose ranks do not fit the nodes is named with both numbers."""
    with pytest.raises(ConfigError) as caught:
        load(MODEL + "tensor_parallel = 3\n" + TWO + more)
    assert caught.value.problem == problem


PUBLISHER = 'tensor_parallel = 2\npublisher = ["python"]\n'


def test_a_publisher_has_a_place_to_meet(load: Load) -> None:
    """On several nodes each model with one has a port of node 0, by its name, wherever it stands in the file; on one
    node there is nothing to choose."""
    small = MODEL.replace("big", "small") + PUBLISHER
    cluster = TWO.replace("10.0.0.1", "[fd00::1]") + "publisher_port = 29700\n"
    for text in (small + MODEL + PUBLISHER, MODEL + PUBLISHER + small):
        config = load(text + MODEL.replace("big", "read") + "tensor_parallel = 2\n" + cluster)
        meetings = {model.name: model.meeting for model in config.models}
        assert meetings == {"big": ("fd00::1", 29700), "small": ("fd00::1", 29701), "read": None}
    assert load(MODEL + PUBLISHER + "[cluster]\nnodes = 1\nnode_rank = 0\n").models[0].meeting is None
    assert load(MODEL + PUBLISHER).models[0].meeting is None


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("", "model big: its publisher has ranks on other nodes; write publisher_port in [cluster]"),
        ("publisher_port = 29650\n", "model big: its publisher's ranks would meet at port 29650, which is taken"),
        (
            "engine_port = 29600\npublisher_port = 29599\n",
            "model small: its publisher's ranks would meet at port 29600, which is taken",
        ),
        ("publisher_port = 65535\n", "model small: its publisher's ranks would meet at port 65536, which is none"),
    ],
)
def test_a_publisher_without_a_port_of_its_own(load: Load, more: str, problem: str) -> None:
    """It is refused: its ranks would wait for one another for ever, or meet those of another program."""
    models = MODEL + PUBLISHER + MODEL.replace("big", "small") + PUBLISHER
    with pytest.raises(ConfigError) as caught:
        load(models + TWO + more)
    assert caught.value.problem.startswith(problem)


def test_no_other_slicings_on_several_nodes(load: Load) -> None:
    """The nodes would build them at different times, and could have different ones."""
    with pytest.raises(ConfigError, match=r'model big: on_mismatch = "reload" is for one node'):
        load(MODEL + 'tensor_parallel = 2\non_mismatch = "reload"\n' + TWO)


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_an_address_may_be_in_brackets(load: Load, address: str) -> None:
    """As people write one before a port."""
    cluster = load(MODEL + "tensor_parallel = 2\n" + TWO.replace("10.0.0.1", address)).cluster
    assert cluster is not None
    assert (cluster.master_addr, cluster.meets_at) == ("::1", "[::1]:29650")


def test_a_model_has_a_device_for_each_rank_here(load: Load) -> None:
    """Too many names, or too few devices served, are refused with the numbers of this node."""
    with pytest.raises(ConfigError, match=r"1 device for 2 of 4 ranks \(tensor_parallel 4\) on this node; name one"):
        load(MODEL + 'tensor_parallel = 4\ndevices = ["host-0"]\n' + TWO)
    with pytest.raises(ConfigError, match=r"on this node need 2 devices of one kind; 1 served here: host-0"):
        load('devices = ["host-0"]\n' + MODEL + "tensor_parallel = 4\n" + TWO)


def test_the_examples_are_of_one_cluster() -> None:
    """The two files of etc/ differ in node_rank alone, share 16 ranks equally, and show every key."""
    folder = Path(__file__).parents[1] / "etc"
    texts = [(folder / f"node-{node}.toml").read_text().splitlines()[4:] for node in range(2)]
    different = [pair for pair in zip(*texts, strict=True) if pair[0] != pair[1]]
    assert different == [("node_rank = 0", "node_rank = 1")]
    assert set(ClusterConfig.model_fields) <= {line.removeprefix("# ").split(" = ")[0] for line in texts[0]}
    (first,), (second,) = (load_config(folder / f"node-{node}.toml").models for node in range(2))
    assert (list(first.ranks_here), list(second.ranks_here)) == (list(range(8)), list(range(8, 16)))
    assert [rank.pipeline for rank in first.parallel.ranks()] == [0] * 8 + [1] * 8


def test_the_schema_describes_every_key() -> None:
    """For editors, as with the rest of the file."""
    properties = json_schema()["$defs"]["ClusterConfig"]["properties"]
    assert set(properties) == set(ClusterConfig.model_fields)
    assert all("description" in entry for entry in properties.values())
