"""The nodes of a cluster as people see them: in the journal, in the errors of a start, and in the status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .membership import Seen


def changes(before: Iterable[Seen], after: Iterable[Seen], me: int) -> list[tuple[bool, str]]:
    """Sentences for the journal on what has become of the other nodes, each with whether it is bad news."""
    found = []
    for node, (was, now) in enumerate(zip(before, after, strict=True)):
        if node == me or (was.state == now.state and was.problem == now.problem):
            continue
        if now.state == "gone":
            why = now.problem or f"nothing heard of it for {now.age or 0.0:.1f} s"
            found.append((True, f"node {node} is gone: {why}; what is here stays"))
        elif was.state in ("unknown", "gone"):
            found.append((False, f"node {node} is {'back' if was.state == 'gone' else 'there'}, {now.state}"))
        elif now.state != was.state:
            found.append((False, f"node {node} is {now.state}"))
    return found


def missing_nodes(nodes: Sequence[Seen], me: int, refusal: str | None) -> str:
    """Which of the others are not there, with what is known of why; "" if all are, or if node 0 refuses this one.

    `refusal`: why a node is not counted. On another node than node 0 it is always about this node itself.
    """
    if me and refusal:
        return ""
    if me and nodes[0].state == "unknown":  # node 0 alone tells of the others
        return "node 0, which does not answer there; do all nodes have its address and the same master_port?"
    found = []
    for node, item in enumerate(nodes[:1] if me and nodes[0].state == "gone" else nodes):
        if node != me and item.state in ("unknown", "gone"):
            said = "gone" if item.state == "gone" else "never heard of"
            where = f", last heard of at {item.address}" if item.address else ""
            found.append(f"node {node} ({said}{where}{f': {item.problem}' if item.problem else ''})")
    return ", ".join(found) + (f"; {refusal}" if found and refusal else "")


def describe_nodes(
    nodes: Iterable[Seen], ranks_on: Callable[[int], dict[str, list[int]]], not_cached: Sequence[list[str]] = ()
) -> list[dict[str, Any]]:
    """The nodes in a status reply, each with the first and the last rank of every model there.

    `not_cached`: of each node, where that is known, the models that were not cached there when the nodes met last.
    """
    return [
        {
            "node": node,
            "state": item.state,
            "address": item.address,
            "seen": item.age,
            "problem": item.problem,
            "ranks": ranks_on(node),
            "absent": not_cached[node] if node < len(not_cached) else [],
        }
        for node, item in enumerate(nodes)
    ]
