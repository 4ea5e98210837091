"""What people are told of the nodes of a cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weightcached.service.membership import Seen
from weightcached.service.nodes import changes, describe_nodes, missing_nodes


def test_a_status_has_each_node() -> None:
    """With its ranks, and with what is not cached there, where that is known."""
    first, second = describe_nodes([Seen("gone", "h", 2.0, "why"), Seen()], lambda node: {"m": [node, 7]}, [["m"]])
    seen = {"state": "gone", "address": "h", "seen": 2.0, "problem": "why"}
    assert first == {"node": 0, **seen, "ranks": {"m": [0, 7]}, "absent": ["m"]}
    assert (second["ranks"], second["absent"]) == ({"m": [1, 7]}, [])


def test_the_journal_says_what_has_become_of_the_others() -> None:
    """Each change once, with whether it is bad news; nothing of the node itself."""
    unknown, loading, loaded = Seen(), Seen("loading"), Seen("loaded")
    gone = Seen("gone", age=15.5)
    assert changes([unknown, unknown], [loaded, loading], 0) == [(False, "node 1 is there, loading")]
    assert changes([loaded, loading], [loaded, loaded], 0) == [(False, "node 1 is loaded")]
    assert changes([loaded, loaded], [loaded, gone], 0) == [
        (True, "node 1 is gone: nothing heard of it for 15.5 s; what is here stays")
    ]
    assert changes([gone, loaded], [loaded, loaded], 1) == [(False, "node 0 is back, loaded")]
    stopped = Seen("gone", problem="it was stopped")
    assert changes([loaded], [stopped], 1) == [(True, "node 0 is gone: it was stopped; what is here stays")]
    assert changes([gone], [replace(gone, age=20.0)], 1) == []


@pytest.mark.parametrize(
    ("states", "me", "refusal", "said"),
    [
        (["loaded", "loaded", "loading"], 0, None, ""),
        (["loaded", "unknown", "gone"], 0, None, "node 1 (never heard of), node 2 (gone, last heard of at h2: why)"),
        (["loaded", "unknown", "loaded"], 0, "nodes = 4", "node 1 (never heard of); nodes = 4"),
        (["loaded", "loaded", "loaded"], 0, "nodes = 4", ""),
        (["unknown", "loaded", "unknown"], 1, None, "node 0, which does not answer there; do all nodes have its"),
        (["gone", "loaded", "unknown"], 1, None, "node 0 (gone, last heard of at h0: why)"),
        (["loaded", "loaded", "unknown"], 1, None, "node 2 (never heard of)"),
        (["gone", "loaded", "unknown"], 1, "node 0 refuses this one", ""),
    ],
)
def test_a_start_says_who_is_not_there(states: list[Any], me: int, refusal: str | None, said: str) -> None:
    """With the reason where one is known: that of the node itself, or why node 0 does not count it."""
    nodes = [
        Seen(state, f"h{node}", 1.0, "why") if state == "gone" else Seen(state) for node, state in enumerate(states)
    ]
    found = missing_nodes(nodes, me, refusal)
    assert found == said or (found.startswith(said) and said.endswith("its"))
