"""A load by a publisher whose ranks are on several nodes: what is done here, and what of it on the other nodes. No
sockets, no clock.

    begin ──► running ──► done ──► end         what the other nodes are told of the ranks here (`membership.Load`)
                 │          │
                 └──────────┴────► failed, called off

Ranks of several nodes load together or not at all. So a load here is given up when that of another node fails, and it
is over when those of all nodes that took part are done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..text import cut_middle, printable
from .membership import PROBLEM_CHARS, PROBLEM_HEAD, Load, LoadState, Seen
from .models import Model

FORMER = 1024  # loads of other nodes that are remembered


def failure(models: Iterable[Model], first: str) -> str | None:
    """What the other nodes are told of a failed load here, of the model `first` if it is one; None without one."""
    failed = sorted((item for item in models if item.state == "failed"), key=lambda item: item.name != first)
    if not failed:
        return None
    said = printable(f"{failed[0].name}: {failed[0].error}")
    return cut_middle(said, PROBLEM_CHARS, max(len(failed[0].name) + len(": "), PROBLEM_HEAD))


class JointLoad:
    """The load of this node that is under way, if its ranks are on several nodes, and what the others do meanwhile."""

    def __init__(self, me: int, timeout: float, changed: Callable[[], None]) -> None:
        """`me`: the number of this node. `timeout`: seconds that another node may go without loading. `changed()` is
        called when the other nodes are to be told something."""
        self.model = ""  # of the last one
        self.load: Load | None = None  # the last one
        self._me = me
        self._timeout = timeout
        self._changed = changed
        self._give_up: Callable[[str], None] | None = None  # while a load is under way
        self._seen: dict[int, Load | None] = {}  # of each node, its last load
        self._before: dict[int, Load | None] = {}  # the same when the load here began
        self._taking_part: dict[int, Load] = {}  # of nodes whose ranks have been running since, as last heard
        self._good: set[int] = set()  # nodes where this load is over, and was good
        self._former: deque[str] = deque(maxlen=FORMER)  # loads of other nodes that took part in earlier ones here
        self._idle_since: dict[int, float] = {}
        self._unfinished: dict[int, str] = {}  # nodes that the ranks here need, and what they do in place of loading
        self._all_done = asyncio.Event()

    def begin(self, model: str, give_up: Callable[[str], None]) -> None:
        """The ranks here are about to start. To be followed by `end`. `give_up(why)` is called if that is in vain."""
        self.model = model
        self._give_up = give_up
        self._before = dict(self._seen)
        self._former.extend(load.id for load in self._taking_part.values())
        self._taking_part.clear()
        self._good.clear()
        self._idle_since.clear()
        self._unfinished.clear()
        self._all_done.clear()
        self._say(Load.after(self.load, model))

    async def others_done(self) -> None:
        """Those here are done. Returns when those of the other nodes that took part are, or after `stop_waiting`."""
        if not self._all_done.is_set():
            self._become("done")
            await self._all_done.wait()

    def stop_waiting(self) -> None:
        """The load is called off, or given up: `others_done` returns."""
        self._all_done.set()

    def end(self, state: LoadState) -> None:
        """Nothing is left of the load here but, if it is done, what it has published."""
        self._give_up = None
        self._unfinished.clear()
        self._become(state)

    def look(self, nodes: Sequence[Seen], refusal: str | None, now: float) -> None:
        """Gives the load here up if the ranks of another node do not come, or ends the wait for them if all are done.

        `refusal`: why a node is not counted. `now`: seconds, monotonic.

        A node that has failed, or ends and says why, will not come again. One that says nothing may not have begun, or
        may be cut off for a moment: it has `timeout` seconds.
        """
        if self._me and (nodes[0].state == "gone" or refusal is not None):
            # It alone tells of the others, and what it has said is of then.
            silent = [replace(item, state="gone", problem=None) for item in nodes]
            silent[self._me] = nodes[self._me]
            nodes = silent if refusal is not None else [nodes[0], *silent[1:]]
        self._seen = {node: item.load for node, item in enumerate(nodes) if item.state != "unknown"}
        if self._give_up is None or (mine := self.load) is None:
            return
        self._unfinished = {}
        running = False
        for node, item in enumerate(nodes):
            if node == self._me or self._is_good(node, item):
                continue
            if item.state != "unknown":
                self._before.setdefault(node, item.load)
            theirs = self._theirs(mine, node, item)
            if (why := self._given_up(mine, node, item, theirs)) is not None:
                self._end_in_vain(f"node {node}, which has ranks of it, loads it no more: {why}")
                return
            if theirs is not None:
                self._taking_part[node] = theirs
            if self._is_done(mine, node):
                continue
            another = _another(mine, item)
            if theirs is not None and item.state != "gone":
                running = True
            elif item.state != "loading" or another is not None:
                state = "loading another model" if another is not None else item.state
                self._unfinished[node] = state
                # Each of two nodes may wait for the other's ranks: the same one gives up on both.
                if another is None or mine.model > another.model:
                    waited = now - self._idle_since.setdefault(node, now)
                    if waited >= self._timeout:
                        why = f"waited {waited:.0f} s for its ranks on node {node} ({state})"
                        self._end_in_vain("; ".join(filter(None, [why, item.problem, refusal])))
                        return
                    continue
            self._idle_since.pop(node, None)
        if mine.state == "done" and not running and not self._unfinished:
            self._all_done.set()

    def sentence(self) -> str | None:
        """What was seen last, for people: which publisher waits, and for whom."""
        if not self._unfinished or self.load is None:
            return None
        idle = ", ".join(f"node {node} ({state})" for node, state in self._unfinished.items())
        if self.load.state == "done":
            return f"the publisher of {self.model} is done here, and its ranks on {idle} are not"
        return f"the publisher of {self.model} waits for its ranks on {idle}; have {self.model} loaded there too"

    # Internals. `theirs` is the load of a node of the model that is loaded here, if it is not of before.

    def _theirs(self, mine: Load, node: int, item: Seen) -> Load | None:
        load = item.load
        if load is None or load.model != mine.model or load.id in self._former:
            return None
        if load.state == "running":  # what a node was at when it went is no matter, unless it was this
            return load if item.state != "gone" or node in self._taking_part else None
        return load if load != self._before.get(node) else None

    def _given_up(self, mine: Load, node: int, item: Seen, theirs: Load | None) -> str | None:
        """Why the ranks of a node do not come, or do not come again; None if that is not known.

        A node whose ranks are done has done its part: what becomes of it then is no matter to one that is done too.
        """
        about_it = item.state == "gone" or (item.problem or "").startswith(f"{self.model}: ")
        said = item.problem if about_it else None
        if theirs is not None and theirs.state in ("failed", "called off"):
            return said or f"its load {'has failed' if theirs.state == 'failed' else 'was called off'} there"
        if (took_part := self._taking_part.get(node)) is None:
            return None
        if theirs is not None and theirs.id != took_part.id:
            return "it has begun to load it anew"
        if item.load is not None and item.load.id != took_part.id:
            return said or "its load has failed there"  # and it is at another one already
        if mine.state == (theirs or took_part).state == "done":
            return None
        if item.state == "gone":
            return said  # one that is silent may be cut off for a moment
        return "it has started anew" if item.load is None and item.state != "unknown" else None

    def _is_done(self, mine: Load, node: int) -> bool:
        """Whether the node's ranks have ended well, or are not needed: those here are done, and they never came."""
        took_part = self._taking_part.get(node)
        return mine.state == "done" if took_part is None else took_part.state == "done"

    def _is_good(self, node: int, item: Seen) -> bool:
        """Whether the node says, or has said, that its load was good: it was over there, with all ranks done."""
        took_part = self._taking_part.get(node)
        if took_part is not None and item.load is not None and took_part.id in item.load.over:
            self._good.add(node)
        return node in self._good

    def _end_in_vain(self, why: str) -> None:
        give_up, self._give_up = self._give_up, None
        if give_up is not None:
            give_up(why)

    def _become(self, state: LoadState) -> None:
        if self.load is not None and self.load.state != state:
            self._say(self.load.become(state))

    def _say(self, load: Load) -> None:
        self.load = load
        self._changed()


def _another(mine: Load, item: Seen) -> Load | None:
    """The load of another model that a node is at together with others, which needs the ranks here."""
    load = item.load
    is_one = item.state == "loading" and load is not None and load.state == "running" and load.model != mine.model
    return load if is_one else None
