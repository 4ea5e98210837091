"""Which nodes of a cluster are there, by their datagrams, and when they must agree anew. No sockets, no clock.

    node n ─ beat ─► node 0      every keep_alive seconds, and when something has changed
    node n ◄─ view ─ node 0      in answer to each, and when something has changed

Times are seconds of the receiver's monotonic clock, and what is sent are ages: no node ever compares its clock with
another one's. Datagrams are JSON of bounded size; what is malformed or of another cluster is dropped and counted.

    round    a number that node 0 gives out when every node is there, has its shards in place, and something of that is
             not what was agreed on last. Each node then takes part in one rendezvous (`rounds`). A node that falls
             silent in the middle does not end it, since datagrams are lost: its successor does, or the time-out.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from ..checkpoint.digest import json_digest
from ..meeting import host_and_port
from ..text import printable
from .place import Place

FORMAT = 1  # of the datagrams; another number is another cluster's
BEAT_BYTES = 2048
VIEW_BYTES = 60_000  # a datagram may have 65,507
MISSED = 3  # signs of life; then a node is gone
PROBLEM_CHARS = 300  # 1,200 bytes at most, which fit into a beat
PROBLEM_HEAD = 100  # of those of one that is too long; the others are its end
LOADS_KEPT = 4  # of those that were good
NAME_CHARS = 64  # of a boot, a digest and an address

Fields = dict[str, Callable[[Any], bool]]
Reported = Literal["loading", "loaded", "leaving"]
State = Literal["unknown", "loading", "loaded", "gone"]
LoadState = Literal["running", "done", "failed", "called off"]


@dataclass(frozen=True, slots=True)
class Load:
    """A node's part of the last load there whose publisher has ranks on several nodes.

    `model` is a digest of its name, which may be too long for a view of many nodes. `id` is random for each load.
    "running" while its ranks run, "done" when all of them have published and ended; "failed", and "called off" by an
    operator, a reload or the end of the service, may follow either. `over` has the ids of the last ones before it that
    were good: the next one may begin before any datagram has said so, or the contrary.
    """

    model: str
    id: str
    state: LoadState
    over: tuple[str, ...] = ()

    @classmethod
    def after(cls, last: Load | None, model: str) -> Load:
        """One of that model which begins, `last` being the one before."""
        over = () if last is None else last.over if last.state != "done" else (*last.over, last.id)
        return cls(json_digest(model)[:16], secrets.token_hex(4), "running", over[-LOADS_KEPT:])

    def become(self, state: LoadState) -> Load:
        return replace(self, state=state)


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's sign of life. `boot` is random for each process, `digest` that of its description, `attempt` counts
    rounds that failed here alone; with any of the three changed the nodes must agree anew. `number` grows with each
    one sent, since datagrams overtake one another. `publisher_port`, 0 for none, is in every beat since publishers meet
    before the nodes agree; `load` is what became of their last meeting here."""

    node: int
    nodes: int
    boot: str
    state: Reported
    digest: str
    number: int = 0
    attempt: int = 0
    problem: str | None = None
    publisher_port: int = 0
    load: Load | None = None

    @property
    def claim(self) -> tuple[str, str, int]:
        return self.boot, self.digest, self.attempt


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a node: `age` in seconds since it was last heard of, None if never."""

    state: State = "unknown"
    address: str | None = None
    age: float | None = None
    problem: str | None = None
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What node 0 tells the others. `round` 0: there is none now. `refused`: why it does not count the receiver."""

    boot: str
    round: int
    nodes: tuple[Seen, ...]
    number: int = 0
    refused: str | None = None


def cluster_id(master_port: int) -> str:
    """What all datagrams of a cluster carry, so that another one's are told apart. No secret."""
    return json_digest(["weightcached cluster", FORMAT, master_port])[:16]


def encode(cluster: str, content: Beat | View) -> bytes:
    """As a datagram. Of a view that is too large for one, the problems of the nodes are left out."""
    if isinstance(content, Beat):
        return _encoded(cluster, "beat", content)
    data = _encoded(cluster, "view", content)
    if len(data) <= VIEW_BYTES:
        return data
    return _encoded(
        cluster, "view", replace(content, nodes=tuple(replace(item, problem=None) for item in content.nodes))
    )


def _encoded(cluster: str, what: str, content: Beat | View) -> bytes:
    message = {"cluster": cluster, what: asdict(content)}
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


class Datagrams:
    """What comes in, checked; what is dropped is counted in `dropped`."""

    def __init__(self, cluster: str, nodes: int) -> None:
        self.dropped: Counter[str] = Counter()
        self._cluster = cluster
        self._nodes = nodes

    def beat(self, data: bytes) -> Beat | None:
        """A node's beat; its number of nodes may be wrong, which `Members.heard` says."""
        content = self._content(data, "beat", BEAT_BYTES)
        if content is None:
            return None
        if not _fits(content, _BEAT) or not 0 < content["node"] < content["nodes"]:
            self._malformed()
            return None
        return Beat(**_read(content))

    def view(self, data: bytes) -> View | None:
        """What node 0 says."""
        content = self._content(data, "view", VIEW_BYTES)
        if content is None:
            return None
        seen = content["nodes"] if _fits(content, _VIEW) else [None]
        if not all(isinstance(item, dict) and _fits(item, _SEEN) for item in seen):
            self._malformed()
            return None
        nodes = tuple(Seen(**_read(item)) for item in content.pop("nodes"))
        if len(nodes) != self._nodes and content["refused"] is None:
            self._malformed()
            return None
        return View(nodes=nodes, **{**content, "refused": _fit_to_show(content["refused"])})

    def _content(self, data: bytes, what: str, most: int) -> dict[str, Any] | None:
        try:
            message = json.loads(data) if len(data) <= most else None
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not isinstance(message.get(what), dict):
            self._malformed()
            return None
        if message.get("cluster") != self._cluster:
            self.dropped["foreign"] += 1
            return None
        return dict(message[what])

    def _malformed(self) -> None:
        self.dropped["malformed"] += 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53


def is_count(value: object) -> bool:
    """Whether it is an int of 0 or more, and below 2**53: larger ones are not exact in every reader of JSON."""
    return _is_number(value) and isinstance(value, int)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= NAME_CHARS and value.isascii() and value.isprintable()


def _is_address(value: object) -> bool:
    return value is None or _is_name(value)


def _is_text(value: object) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= PROBLEM_CHARS)


def _is_load(value: object) -> bool:
    return value is None or (isinstance(value, dict) and _fits(value, _LOAD))


_LOAD: Fields = {
    "model": _is_name,
    "id": _is_name,
    "state": lambda value: value in get_args(LoadState),
    "over": lambda value: isinstance(value, list) and len(value) <= LOADS_KEPT and all(map(_is_name, value)),
}
_BEAT: Fields = {
    "node": is_count,
    "nodes": is_count,
    "boot": _is_name,
    "state": lambda value: value in get_args(Reported),
    "digest": _is_name,
    "number": is_count,
    "attempt": is_count,
    "problem": _is_text,
    "publisher_port": is_count,
    "load": _is_load,
}
_VIEW: Fields = {
    "boot": _is_name,
    "round": is_count,
    "nodes": lambda value: isinstance(value, list),
    "number": is_count,
    "refused": _is_text,
}
_SEEN: Fields = {
    "state": lambda value: value in get_args(State),
    "address": _is_address,
    "age": lambda value: value is None or _is_number(value),
    "problem": _is_text,
    "load": _is_load,
}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    """The fields that a beat and a node in a view have in common, as they are kept here."""
    load = content["load"] and Load(**{**content["load"], "over": tuple(content["load"]["over"])})
    return {**content, "problem": _fit_to_show(content["problem"]), "load": load}


def _fit_to_show(text: str | None) -> str | None:
    """The text of another node, printable and of bounded length: it becomes a part of sentences here."""
    return None if text is None else printable(text)[:PROBLEM_CHARS]


def _fits(content: dict[str, Any], wanted: Fields) -> bool:
    """Whether it has exactly these fields, each of its kind."""
    return content.keys() == wanted.keys() and all(fits(content[name]) for name, fits in wanted.items())


@dataclass(slots=True)
class Member:
    """A node as node 0 knows it, by the process that counts."""

    beat: Beat
    address: Any
    heard: float
    place: Place


class Members:
    """Node 0's table of the nodes, itself among them."""

    def __init__(self, nodes: int, keep_alive: float, publisher_port: int = 0) -> None:
        self.round = 0  # the one that was given out last
        self._count = nodes
        self._publisher_port = publisher_port
        self._keep_alive = keep_alive
        self._members: dict[int, Member] = {}
        self._given_out_for: dict[int, tuple[str, str, int]] | None = None

    def heard(self, beat: Beat, address: Any, now: float) -> str | None:
        """Takes in a beat. Returns why its sender is refused; None if it counts as the node, or is ignored."""
        if beat.nodes != self._count:
            return f"nodes = {beat.nodes} in the config of node {beat.node}, {self._count} in that of node 0"
        if beat.publisher_port != self._publisher_port:
            ports = [port or "none" for port in (beat.publisher_port, self._publisher_port)]
            return f"publisher_port = {ports[0]} in the config of node {beat.node}, {ports[1]} in that of node 0"
        known = self._members.get(beat.node)
        if known is None:
            place = Place(self._keep_alive, MISSED * self._keep_alive)
            known = self._members[beat.node] = Member(beat, address, now, place)
        verdict = known.place.hear(beat.boot, beat.number, now, leaving=beat.state == "leaving")
        if verdict == "counts":
            known.beat, known.address, known.heard = beat, address, now
        if verdict != "refused":
            return None
        here, there = host_and_port(*known.address[:2]), host_and_port(*address[:2])
        return (
            f"two services say that they are node {beat.node}: the one at {here} counts, the one at {there} does not; "
            "stop one of them, or correct its node_rank"
        )

    def is_there(self, node: int, now: float) -> bool:
        """Whether it is known, and not gone."""
        return self._seen(node, now).state not in ("unknown", "gone")

    def boot_of(self, node: int) -> str | None:
        """The `boot` of the process that counts as the node now, None if none does."""
        return self._members[node].beat.boot if node in self._members else None

    def has_heard(self, node: int, boot: str) -> bool:
        """Whether this process has said before that it is the node."""
        return node in self._members and boot in self._members[node].place

    def seen(self, now: float) -> tuple[Seen, ...]:
        """Every node as it is now, in their order."""
        return tuple(self._seen(node, now) for node in range(self._count))

    def addresses(self) -> list[tuple[int, Any]]:
        """The nodes that views go to, each with its address."""
        return [(node, member.address) for node, member in self._members.items() if node != 0]

    def current(self) -> int:
        """The round that the nodes are to take part in, or have: 0 if what it was given out for has changed."""
        return self.round if self._given_out_for == self._claims() else 0

    def next_round(self, now: float) -> int:
        """Gives out the next round if there is need for one and all nodes can take part; else `current`."""
        if self.current() == 0:
            self._given_out_for = None
            if all(item.state == "loaded" for item in self.seen(now)):
                self.round += 1
                self._given_out_for = self._claims()
        return self.current()

    def _claims(self) -> dict[int, tuple[str, str, int]]:
        return {node: member.beat.claim for node, member in self._members.items()}

    def _seen(self, node: int, now: float) -> Seen:
        member = self._members.get(node)
        if member is None:
            return Seen()
        age = max(now - member.heard, 0.0)
        said = member.beat.state
        state: State = "gone" if said == "leaving" or age > MISSED * self._keep_alive else said
        problem = member.beat.problem if state != "gone" or said == "leaving" else None  # a silent one has given none
        return Seen(state, _host(member.address), round(age, 1), problem, member.beat.load)


def _host(address: Any) -> str | None:
    return None if address is None else str(address[0])
