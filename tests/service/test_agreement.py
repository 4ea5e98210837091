"""What nodes tell one another, and the sentence for each field in which they differ."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightcached.config import load_config
from weightcached.errors import ProtocolError
from weightcached.service.agreement import (
    REASON_CHARS,
    SHOWN_DIFFERENCES,
    SHOWN_VALUES,
    Description,
    describe,
    describe_differences,
    differences,
    digest_of,
    not_agreed,
    parse,
    to_text,
)
from weightcached.service.membership import Seen
from weightcached.service.models import Model

NO_MODEL = {"ranks": [0, 1], "bytes": [], "settings": {}, "key": None}
KEY = {"content": "c0ffee", "layout": "checkpoint", "tensor_parallel_size": 2}


@pytest.fixture
def described(tmp_path: Path) -> Callable[[int], Description]:
    """``described(node)``: one of two nodes, which has its rank of two cached."""

    def made(node: int) -> Description:
        path = tmp_path / f"node{node}.toml"
        path.write_text(
            f'[[model]]\nname = "m"\ncheckpoint = "/models/{node}"\ntensor_parallel = 2\n'
            f'[cluster]\nnodes = 2\nnode_rank = {node}\nmaster_addr = "h{node}"\nmaster_port = 1\n'
        )
        config = load_config(path)
        model = Model(config.models[0], (f"host-{node}",))
        model.begin()
        model.published(f"host-{node}", 1, 100 + node, dict(KEY))
        assert config.cluster is not None
        return describe(config.cluster, [model])

    return made


def test_equal_nodes_do_not_differ(described: Callable[[int], Description]) -> None:
    """Though each has its own devices, paths, address of node 0, ranks and bytes."""
    nodes = [described(0), described(1)]
    assert nodes[0]["models"]["m"]["ranks"] == [0, 1]
    assert nodes[1]["models"]["m"]["ranks"] == [1, 1]
    assert (nodes[0]["models"]["m"]["bytes"], nodes[1]["models"]["m"]["bytes"]) == ([100], [101])
    assert differences(nodes) == []
    assert digest_of(nodes[0]) == digest_of(described(0)) != digest_of(nodes[1])


def changed(path: str, value: Any) -> Callable[[Description], None]:
    def change(description: Description) -> None:
        *folders, name = path.split("/")
        for folder in folders:
            description = description[folder]
        description[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (changed("models/m/key/content", "dead"), 'm: content is "c0ffee" on nodes 0, 2 and "dead" on node 1'),
        (changed("models/m/key/layout", "x"), 'm: layout is "checkpoint" on nodes 0, 2 and "x" on node 1'),
        (
            changed("models/m/settings/tensor_parallel", 4),
            "m: tensor_parallel is 2 on nodes 0, 2 and 4 on node 1",
        ),
        (changed("models/m/settings/new", 1), "m: new is null on nodes 0, 2 and 1 on node 1"),
        (changed("models/m/ranks", [0, 1]), 'm: which ranks a node has is "0-0" on nodes 0, 1 and "2-2" on node 2'),
        (
            changed("models/m/ranks", [1, 0]),
            'm: which ranks a node has is "0-0" on node 0 and "1-0" on node 1 and "2-2"',
        ),
        (changed("models", {}), 'm: the model is "configured" on nodes 0, 2 and "not configured" on node 1'),
        (changed("software/protocol", 9), "protocol is 1 on nodes 0, 2 and 9 on node 1"),
        (changed("cluster/keep_alive", 1.5), "keep_alive is 5.0 on nodes 0, 2 and 1.5 on node 1"),
        (changed("cluster/local_ranks", [1] * 40), "local_ranks is null on nodes 0, 2 and [1, 1, 1, 1, 1, 1, 1, 1,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_difference_names_model_field_values_and_nodes(
    described: Callable[[int], Description], change: Callable[[Description], None], expected: str
) -> None:
    """One sentence for each, the same on every node."""
    nodes = [described(0), described(1), copy.deepcopy(described(1))]
    nodes[2]["models"]["m"]["ranks"] = [2, 1]
    change(nodes[1])
    found = differences(nodes)
    assert len(found) == 1
    assert str(found[0]).startswith(expected)
    assert len(str(found[0])) < 250


def test_what_is_not_cached_everywhere_is_compared_where_it_is(described: Callable[[int], Description]) -> None:
    """A model that is loaded on demand differs from none; nor does a digest that is still being computed."""
    nodes = [described(0), described(1)]
    nodes[1]["models"]["m"]["key"] = None
    assert differences(nodes) == []
    nodes[1]["models"]["m"]["key"] = {**KEY, "content": "stat:1"}
    assert differences(nodes) == []
    nodes[1]["models"]["m"]["key"]["layout"] = "other"
    assert [item.field for item in differences(nodes)] == ["layout"]


def test_many_differences_are_one_line(described: Callable[[int], Description]) -> None:
    """Whatever some of many nodes send: each sentence is short, and so is all of them."""
    nodes = [described(0), *(copy.deepcopy(described(1)) for _ in range(99))]
    for number, item in enumerate(nodes):
        model = item["models"]["m"]
        item["models"] = {f"m{name}": {**model, "ranks": [number, 1]} for name in range(50)}
        item["models"]["m0"]["settings"] = {f"setting{name}": "x" * 1000 + str(number) for name in range(50)}
        item["software"]["weightcached"] = "9" if number % 2 else "8"
    found = differences([parse(to_text(item), number) for number, item in enumerate(nodes)])
    assert len(found) == 51
    assert max(len(str(item)) for item in found) < 2500
    said = describe_differences(found)
    assert said.startswith('the nodes differ: weightcached is "8" on nodes 0, 2, 4')
    assert "; and 34 more and " not in said and "30 and 34 more and" in said
    assert f"; and {51 - SHOWN_DIFFERENCES} more; install the same version on the nodes that differ, and " in said
    assert len(said) < 2500 * (SHOWN_DIFFERENCES + 1)
    assert f"and {100 - SHOWN_VALUES + 1} other values elsewhere; m0: setting1 is " in said


@pytest.mark.parametrize(
    ("change", "next_step"),
    [
        (changed("software/weightcached", "9"), "install the same version on the nodes that differ, and restart the"),
        (changed("cluster/keep_alive", 9.0), "make [cluster] the same in the configs of the nodes that differ, and "),
        (changed("models/m/ranks", [0, 1]), "make [cluster] the same in the configs of the nodes that differ, and "),
        (changed("models/m/settings/dtype", "x"), "make [[model]] the same in the configs of the nodes that differ, "),
        (changed("models", {}), "make [[model]] the same in the configs of the nodes that differ, then `weightc"),
        (changed("models/m/key/content", "x"), "put the same files on the nodes that differ, then `weightcachectl re"),
        (changed("models/m/key/layout", "x"), "have it made in the same way on the nodes that differ: `weightcach"),
    ],
    ids=lambda value: value.split(" the nodes")[0] if isinstance(value, str) else "",
)
def test_what_to_do_is_said_once_for_each_kind(
    described: Callable[[int], Description], change: Callable[[Description], None], next_step: str
) -> None:
    """Behind all differences: what makes the nodes the same again depends on where a field comes from."""
    nodes = [described(0), described(1), copy.deepcopy(described(1))]
    nodes[2]["models"]["m"]["ranks"] = [2, 1]
    change(nodes[1])
    said = describe_differences(differences(nodes))
    assert f"; {next_step}" in said and said.count("the nodes that differ") == 1
    twice = describe_differences(differences(nodes) * 2)
    assert twice.count(next_step) == 1 and twice.endswith(said[said.index(next_step) :])


NOT_AGREED = "the nodes of the cluster have not agreed on it yet"


@pytest.mark.parametrize(
    ("nodes", "refusal", "problem", "said"),
    [
        ([Seen("loaded"), Seen("loaded")], None, None, NOT_AGREED),
        ([Seen("loaded"), Seen()], None, "late", f"{NOT_AGREED}; missing: node 1 (never heard of)"),
        (
            [Seen("loaded"), Seen("gone", "10.0.0.2", 9.1, "stopped"), Seen("loading"), Seen("loading")],
            None,
            None,
            f"{NOT_AGREED}; missing: node 1 (gone, last heard of at 10.0.0.2: stopped); still loading: nodes 2, 3",
        ),
        ([Seen("loading"), Seen("loaded")], None, None, f"{NOT_AGREED}; still loading: node 0"),
        ([Seen("loaded"), Seen("loaded")], None, "the rendezvous failed", f"{NOT_AGREED}; the rendezvous failed"),
        ([Seen("loaded"), Seen("loaded")], "nodes = 3 there", "late", f"{NOT_AGREED}; nodes = 3 there"),
    ],
)
def test_why_the_nodes_have_not_agreed(nodes: list[Seen], refusal: str | None, problem: str | None, said: str) -> None:
    """The nodes that are missing or loading are named; with all of them there, what kept them from agreeing."""
    assert not_agreed(nodes, 0, refusal, problem) == said
    older = [Seen(item.state, item.address, None if item.age is None else item.age + 3, item.problem) for item in nodes]
    assert not_agreed(older, 0, refusal, problem) == said  # time alone is no news for those who are told


def test_why_the_nodes_have_not_agreed_is_short() -> None:
    """However many are missing, and whatever they said."""
    said = not_agreed([Seen("gone", "10.0.0.1", 1.0, "x" * 300)] * 500, 0, None, None)
    assert said.startswith(NOT_AGREED) and len(said) <= REASON_CHARS


def test_another_version_concerns_every_model(described: Callable[[int], Description]) -> None:
    """As it may cut otherwise; a setting of the cluster concerns none, and what differs in a model that one alone."""
    nodes = [described(0), described(1)]
    nodes[1]["software"]["weightcached"] = "9.9"
    nodes[1]["cluster"]["keep_alive"] = 9.0
    nodes[1]["models"]["m"]["settings"]["dtype"] = "float16"
    concerned = {item.field: (item.concerns("m"), item.concerns("n")) for item in differences(nodes)}
    assert concerned == {"weightcached": (True, True), "keep_alive": (False, False), "dtype": (True, False)}


def test_a_description_comes_through(described: Callable[[int], Description]) -> None:
    """As it was written."""
    assert parse(to_text(described(0)), 0) == described(0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "1",
        "{}",
        json.dumps({"software": {}, "cluster": [], "models": {}}),
        json.dumps({"software": {}, "cluster": {}, "models": []}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m": {}}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m": {"ranks": [1], "bytes": []}}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m": {"ranks": [0, "1"], "bytes": []}}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m": {"ranks": [0, 1], "bytes": [], "settings": 1}}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m": {**NO_MODEL, "ranks": [-1, 1]}}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m": {**NO_MODEL, "ranks": [1 << 60, 1]}}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m": {**NO_MODEL, "key": {"a b": 1}}}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"\ud800": NO_MODEL}}),
        json.dumps({"software": {}, "cluster": {}, "models": {"m" * 1000: NO_MODEL}}),
        json.dumps({"software": {"x" * 100: 1}, "cluster": {}, "models": {}}),
        json.dumps({"software": {}, "cluster": {"x\n": 1}, "models": {}}),
        '{"software": {"x": ' + "[" * 20 + "]" * 20 + '}, "cluster": {}, "models": {}}',
        "[" * 100_000,
    ],
    ids=range(19),
)
def test_what_is_no_description_is_refused_by_its_node(text: str) -> None:
    """Whatever a node writes into the store, nobody fails on it in another way."""
    with pytest.raises(ProtocolError, match="node 3 sent a description that is not readable") as caught:
        parse(text, 3)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300
