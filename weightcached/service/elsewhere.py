"""The ranks on other nodes that a publisher here waits for: whether they still come. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..text import cut_middle, printable
from .membership import PROBLEM_CHARS, PROBLEM_HEAD, Seen
from .models import Model


def failure(models: Iterable[Model]) -> str | None:
    """What the other nodes are told of a failed load here, first of one that they wait for; None without one."""
    failed = sorted((item for item in models if item.state == "failed"), key=lambda item: item.config.meeting is None)
    if not failed:
        return None
    said = printable(f"{failed[0].name}: {failed[0].error}")
    return cut_middle(said, PROBLEM_CHARS, max(len(failed[0].name) + len(": "), PROBLEM_HEAD))


class Elsewhere:
    """What the other nodes do while a publisher here, whose ranks meet theirs, is loading."""

    def __init__(self, me: int, timeout: float) -> None:
        """`me`: the number of this node. `timeout`: seconds that another node may go without loading."""
        self._me = me
        self._timeout = timeout
        self._model: Model | None = None
        self._came: set[int] = set()  # nodes that have been loading since the load here began
        self._idle_since: dict[int, float] = {}
        self._idle: dict[int, Seen] = {}

    def look(
        self, models: Iterable[Model], nodes: Sequence[Seen], refusal: str | None, now: float
    ) -> tuple[Model, str] | None:
        """The model whose load here is in vain, and why. None while there is none, or hope.

        `refusal`: why a node is not counted. `now`: seconds, monotonic.

        A node that was loading, has stopped, and says why, will not come again. One that says nothing may be done
        already, may not have begun, or may be cut off for a moment: it has `timeout` seconds.
        """
        model = next((item for item in models if item.state == "loading" and item.config.meeting is not None), None)
        if model is not self._model:
            self._model = model
            self._came.clear()
            self._idle_since.clear()
        self._idle = {}
        if model is None:
            return None
        for node, item in enumerate(nodes):
            if node == self._me:
                continue
            if item.state == "loading":
                self._came.add(node)
                self._idle_since.pop(node, None)
                continue
            self._idle[node] = item
            waited = now - self._idle_since.setdefault(node, now)
            concerned = item.state == "gone" or (item.problem or "").startswith(f"{model.name}: ")
            if item.problem is not None and concerned and node in self._came:
                return model, f"node {node}, which has ranks of it, loads it no more: {item.problem}"
            if waited >= self._timeout:
                why = f"waited {waited:.0f} s for its ranks on node {node} ({item.state})"
                return model, f"{why}; {refusal}" if refusal else why
        return None

    def sentence(self) -> str | None:
        """What was seen last, for people: which publisher waits, and for whom."""
        if self._model is None or not self._idle:
            return None
        name = self._model.name
        idle = ", ".join(f"node {node} ({item.state})" for node, item in self._idle.items())
        return f"the publisher of {name} waits for its ranks on {idle}; have {name} loaded there too"
