"""Who is there by their datagrams, and when the nodes must agree anew. Times are numbers: no clock is read."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from weightcached.config_cluster import MAX_NODES
from weightcached.service import membership
from weightcached.service.membership import (
    BEAT_BYTES,
    LOADS_KEPT,
    MISSED,
    PROBLEM_CHARS,
    VIEW_BYTES,
    Beat,
    Datagrams,
    Load,
    Members,
    Seen,
    View,
    cluster_id,
    encode,
)

ID = cluster_id(29650)
BEAT = Beat(node=1, nodes=2, boot="b1", state="loaded", digest="d", load=Load.after(None, "m"))
LOAD = asdict(Load.after(None, "m"))
OWN = replace(BEAT, node=0, boot="b0")
VIEW = View("b0", 3, (Seen("loaded", "10.0.0.1", 0.0), Seen("gone", "10.0.0.2", 1.5, "it was stopped")), number=9)
KEEP = 5.0


def changed(message: bytes, what: str, **fields: Any) -> bytes:
    data = json.loads(message)
    data[what].update(fields)
    return json.dumps(data).encode()


def test_a_datagram_is_read_as_it_was_written() -> None:
    """Beats and views come through with every field."""
    datagrams = Datagrams(ID, 2)
    assert datagrams.beat(encode(ID, BEAT)) == BEAT
    assert datagrams.view(encode(ID, VIEW)) == VIEW
    assert datagrams.view(encode(ID, View("b0", 0, (), refused="no"))) == View("b0", 0, (), refused="no")
    assert not datagrams.dropped


def test_what_is_too_large_is_said_shorter() -> None:
    """A view of as many nodes as there may be, each with its problem, is one datagram; so is a beat in any language."""
    load = replace(Load.after(None, "m" * 128), state="called off", over=("0" * 8,) * LOADS_KEPT)
    where = "2001:db8:1111:2222:3333:4444:5555:6666"
    many = (Seen("gone", where, 12345.6, "x" * PROBLEM_CHARS, load),) * MAX_NODES
    data = encode(ID, View("b0" * 8, 1 << 40, many))
    assert len(data) <= VIEW_BYTES
    found = Datagrams(ID, MAX_NODES).view(data)
    assert found is not None and found.nodes == tuple(replace(item, problem=None) for item in many)
    beat = replace(BEAT, problem="\U0001f600" * (PROBLEM_CHARS - 1) + "\udcff", load=load)
    found_beat = Datagrams(ID, 2).beat(encode(ID, beat))
    assert found_beat is not None and found_beat.problem == "\U0001f600" * (PROBLEM_CHARS - 1) + "?"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[" * 3000,
        b"[]",
        b'{"beat": 1}',
        b'{"cluster": "x"}',
        changed(encode(ID, BEAT), "beat", node=0),
        changed(encode(ID, BEAT), "beat", node=2),
        changed(encode(ID, BEAT), "beat", node=True),
        changed(encode(ID, BEAT), "beat", number=-1),
        changed(encode(ID, BEAT), "beat", attempt=1e300),
        changed(encode(ID, BEAT), "beat", state="gone"),
        changed(encode(ID, BEAT), "beat", boot=""),
        changed(encode(ID, BEAT), "beat", digest="x" * 65),
        changed(encode(ID, BEAT), "beat", problem=7),
        changed(encode(ID, BEAT), "beat", more=1),
        changed(encode(ID, BEAT), "beat", boot="b\n"),
        changed(encode(ID, BEAT), "beat", digest="\ud800"),
        changed(encode(ID, BEAT), "beat", problem="x" * (PROBLEM_CHARS + 1)),
        changed(encode(ID, BEAT), "beat", problem="x" * BEAT_BYTES),
        json.dumps({"cluster": ID, "beat": {"node": 1}}).encode(),
        changed(encode(ID, BEAT), "beat", load="m"),
        changed(encode(ID, BEAT), "beat", load={**LOAD, "model": "x" * 65}),
        changed(encode(ID, BEAT), "beat", load={**LOAD, "id": "\n"}),
        changed(encode(ID, BEAT), "beat", load={**LOAD, "state": "lost"}),
        changed(encode(ID, BEAT), "beat", load={"model": "m"}),
        changed(encode(ID, BEAT), "beat", load={**LOAD, "over": 1}),
        changed(encode(ID, BEAT), "beat", load={**LOAD, "over": ["1"] * (LOADS_KEPT + 1)}),
        changed(encode(ID, BEAT), "beat", load={**LOAD, "over": [1]}),
    ],
    ids=range(29),
)
def test_a_beat_that_is_none_is_dropped_and_counted(data: bytes) -> None:
    """Whatever is in it: nothing raises, and nothing of it is used."""
    datagrams = Datagrams(ID, 2)
    assert datagrams.beat(data) is None
    assert datagrams.dropped == {"malformed": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"nodes": []},
        {"nodes": [1, 2]},
        {"nodes": [{"state": "loaded"}] * 2},
        {"nodes": [{**asdict(Seen()), "age": -1}] * 2},
        {"nodes": [{**asdict(Seen()), "age": "1"}] * 2},
        {"nodes": [{**asdict(Seen()), "state": "dead"}] * 2},
        {"nodes": 2},
        {"round": 1.5},
        {"boot": None},
        {"boot": "\x1b[2J"},
        {"refused": 1},
        {"refused": "x" * (PROBLEM_CHARS + 1)},
        {"nodes": [{**asdict(Seen()), "address": "1" * 1000}] * 2},
        {"nodes": [{**asdict(Seen()), "address": "a\nb"}] * 2},
        {"nodes": [{**asdict(Seen()), "problem": "x" * (PROBLEM_CHARS + 1)}] * 2},
        {"nodes": [{**asdict(Seen()), "load": {**LOAD, "state": 1}}] * 2},
    ],
    ids=range(16),
)
def test_a_view_that_is_none_is_dropped_and_counted(fields: dict[str, Any]) -> None:
    """As with beats; a view of another number of nodes is none."""
    datagrams = Datagrams(ID, 2)
    assert datagrams.view(changed(encode(ID, VIEW), "view", **fields)) is None
    assert datagrams.dropped == {"malformed": 1}


def test_what_others_say_is_fit_for_a_line() -> None:
    """Line ends, terminal controls and lone surrogates are escapes in what is kept of it, which has a length."""
    said, shown = "it failed:\n\x1b[2J\ud800", "it failed:\\n\\x1b[2J\\ud800"
    datagrams = Datagrams(ID, 2)
    beat = datagrams.beat(changed(encode(ID, BEAT), "beat", problem=said))
    assert beat is not None and beat.problem == shown
    nodes = [{**asdict(Seen()), "problem": said}] * 2
    view = datagrams.view(changed(encode(ID, VIEW), "view", nodes=nodes, refused="\x00" * PROBLEM_CHARS))
    assert view is not None and [item.problem for item in view.nodes] == [shown] * 2
    assert view.refused is not None and len(view.refused) == PROBLEM_CHARS


def test_another_clusters_datagram_is_foreign() -> None:
    """It is counted apart from what is malformed."""
    datagrams = Datagrams(ID, 2)
    assert datagrams.beat(encode(cluster_id(1), BEAT)) is None
    assert datagrams.view(encode(cluster_id(1), VIEW)) is None
    assert datagrams.dropped == {"foreign": 2}


@pytest.fixture
def members() -> Members:
    """Of two nodes, which are there and loaded at second 0."""
    made = Members(2, KEEP)
    assert made.heard(OWN, ("10.0.0.1", 1), 0.0) is None
    assert made.heard(BEAT, ("10.0.0.2", 2), 0.0) is None
    return made


def test_a_node_is_gone_after_three_missed_signs_of_life(members: Members) -> None:
    """Until then it is what it said, with its age; heard again it is back."""
    last = MISSED * KEEP
    assert members.seen(last)[1] == Seen("loaded", "10.0.0.2", last, load=BEAT.load)
    assert members.seen(last + 0.1)[1].state == "gone"
    members.heard(replace(BEAT, number=1, problem="m: no room"), ("10.0.0.2", 2), last + 1)
    assert members.seen(last + 1)[1] == Seen("loaded", "10.0.0.2", 0.0, "m: no room", BEAT.load)
    silent = members.seen(2 * last + 2)[1]
    assert (silent.state, silent.problem) == ("gone", None)  # which is not why


def test_a_node_that_says_that_it_leaves_is_gone_at_once(members: Members) -> None:
    """With the reason that it gives."""
    members.heard(replace(BEAT, state="leaving", problem="it was stopped"), ("10.0.0.2", 2), 1.0)
    assert members.seen(1.0)[1] == Seen("gone", "10.0.0.2", 0.0, "it was stopped", BEAT.load)


def test_a_round_begins_when_all_are_loaded(members: Members) -> None:
    """And not before; it stays the same while nothing changes, even if a node is silent for a while."""
    waiting = Members(2, KEEP)
    waiting.heard(OWN, None, 0.0)
    assert waiting.next_round(0.0) == 0
    waiting.heard(replace(BEAT, state="loading"), None, 0.0)
    assert waiting.next_round(0.0) == 0
    assert members.next_round(0.0) == members.next_round(1.0) == members.next_round(1000.0) == 1


@pytest.mark.parametrize("field", [{"boot": "b2"}, {"digest": "e"}, {"attempt": 1}], ids=str)
def test_another_round_begins_when_something_is_new(members: Members, field: dict[str, Any]) -> None:
    """A node that has started again, that has something else, or for which a round failed; once it is loaded."""
    assert members.next_round(0.0) == 1
    members.heard(replace(BEAT, state="loading", number=1, **field), None, 1.0)
    assert members.next_round(1.0) == members.current() == 0
    members.heard(replace(BEAT, number=2, **field), None, 2.0)
    assert members.next_round(2.0) == 2


def test_the_process_that_counts_is_known(members: Members) -> None:
    """By its boot, as soon as it was heard, and whether it is still there."""
    assert (members.boot_of(1), members.boot_of(7)) == ("b1", None)
    assert [members.is_there(1, now) for now in (0.0, 1000.0)] == [True, False]
    assert not members.is_there(7, 0.0)


def test_what_was_overtaken_is_not_taken_in(members: Members) -> None:
    """An older datagram of the same process that comes later changes nothing."""
    members.heard(replace(BEAT, number=5), ("10.0.0.2", 2), 1.0)
    members.heard(replace(BEAT, number=4, digest="old"), ("10.0.0.2", 2), 2.0)
    assert members.next_round(2.0) == 1
    assert members.seen(2.0)[1].age == 1.0


def test_a_process_that_goes_on_keeps_its_number(members: Members) -> None:
    """Of two that say that they are one node the first one counts, once it is seen that its beats go on; the other one
    is told so, with both addresses, until the first one leaves. Each change is agreed on anew."""
    one, two = ("10.0.0.2", 40002), ("2001:db8::3", 40003, 0, 0)
    rival = replace(BEAT, boot="b2")
    said = (
        "two services say that they are node 1: the one at 10.0.0.2:40002 counts, the one at [2001:db8::3]:40003 does "
        "not; stop one of them, or correct its node_rank"
    )
    assert members.next_round(0.5) == 1
    assert members.heard(rival, two, 1.0) is None
    assert (members.boot_of(1), members.seen(1.0)[1].address, members.next_round(1.0)) == ("b2", "2001:db8::3", 2)
    assert members.heard(replace(BEAT, number=7), one, 2.0) is None
    assert members.boot_of(1) == "b2"
    assert members.heard(replace(BEAT, number=8), one, 1.0 + KEEP) is None
    assert (members.boot_of(1), members.seen(6.0)[1].address, members.next_round(6.0)) == ("b1", "10.0.0.2", 3)
    assert members.heard(replace(rival, number=1), two, 7.0) == said
    assert members.heard(replace(rival, number=2), two, 8.0) == said
    assert (members.boot_of(1), members.next_round(8.0)) == ("b1", 3)
    members.heard(replace(BEAT, number=9, state="leaving", problem="it was stopped"), one, 9.0)
    assert members.seen(9.0)[1].problem == "it was stopped"
    assert members.heard(replace(rival, number=3), two, 10.0) is None
    assert (members.boot_of(1), members.addresses(), members.next_round(10.0)) == ("b2", [(1, two)], 4)


def test_a_late_datagram_changes_nothing(members: Members) -> None:
    """One of a process that has ended, which comes after its successor was heard, is not even a reason to refuse."""
    members.heard(replace(BEAT, boot="b2"), ("10.0.0.2", 3), 1.0)
    before = members.seen(2.0), members.next_round(2.0)
    late = replace(BEAT, number=7, digest="old", state="leaving", problem="it was stopped")
    assert members.heard(late, ("10.0.0.2", 2), 2.0) is None
    assert (members.seen(2.0), members.next_round(2.0)) == before
    assert members.addresses() == [(1, ("10.0.0.2", 3))]


def test_what_the_refused_are_told_fits_into_a_view() -> None:
    """With the longest addresses and the largest node."""
    many = Members(MAX_NODES, KEEP)
    beat = replace(BEAT, node=MAX_NODES - 1, nodes=MAX_NODES)
    one, two = [(f"2001:db8:1111:2222:3333:4444:5555:{end}%{'x' * 15}", 65535, 0, 0) for end in (6666, 7777)]
    many.heard(beat, one, 0.0)
    many.heard(replace(beat, boot="b2"), two, 1.0)
    many.heard(replace(beat, number=1), one, 1.0 + KEEP)
    refused = many.heard(replace(beat, boot="b2", number=1), two, 7.0)
    assert refused is not None and refused.endswith("correct its node_rank")
    assert Datagrams(ID, MAX_NODES).view(encode(ID, View("b0", 0, (), refused=refused))) is not None


def test_it_is_known_who_was_heard(members: Members) -> None:
    """By node and boot, whether or not it counts."""
    members.heard(replace(BEAT, boot="b2"), ("10.0.0.3", 2), 1.0)
    assert [members.has_heard(1, boot) for boot in ("b1", "b2", "b3")] == [True, True, False]
    assert not members.has_heard(7, "b1")


def test_another_number_of_nodes_is_refused(members: Members) -> None:
    """With both numbers, before any agreement."""
    refused = members.heard(replace(BEAT, nodes=3), ("10.0.0.2", 2), 1.0)
    assert refused == "nodes = 3 in the config of node 1, 2 in that of node 0"


def test_another_place_for_publishers_is_refused(members: Members) -> None:
    """They would wait for one another before the nodes could compare anything else."""
    refused = members.heard(replace(BEAT, publisher_port=29700), ("10.0.0.2", 2), 1.0)
    assert refused == "publisher_port = 29700 in the config of node 1, none in that of node 0"


def test_views_go_to_the_others(members: Members) -> None:
    """To the addresses that they were last heard from, and not to node 0 itself."""
    assert members.addresses() == [(1, ("10.0.0.2", 2))]


@pytest.mark.parametrize("module", ["membership", "place", "nodes", "joint", "links", "cluster", "rounds", "agreement"])
def test_no_clock_is_compared_with_another_nodes(module: str) -> None:
    """Skewed and stepped clocks have no effect: none but the monotonic one is read, and what is sent are ages."""
    text = (Path(membership.__file__).with_name(f"{module}.py")).read_text()
    assert set(re.findall(r"\btime\.(\w+)", text)) <= {"monotonic"}
    assert "datetime" not in text
