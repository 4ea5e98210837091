"""The place of one node of a cluster: which of the processes that say that they are that node counts. No clock.

    never heard of      counts at once: it is the node, started anew, whose process before it has ended
    before the one      late datagrams of it are ignored; one that is still heard `keep_alive` later gets its place
    that counts         back
    behind it           is refused, until the one that counts is gone

Who was there first comes first. One that was gone meanwhile, or says that it leaves, is behind all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PROCESSES = 16  # of a node that are remembered

Verdict = Literal["counts", "ignored", "refused"]


@dataclass(slots=True, eq=False)
class _Process:
    boot: str
    number: int
    heard: float
    leaving: bool
    lost: float = math.inf  # when the place went last from it, or from one before it, to another one


class Place:
    """Times are seconds of one monotonic clock."""

    def __init__(self, keep_alive: float, silence: float) -> None:
        """`keep_alive`: seconds between two beats of a process. `silence`: after so many it is gone."""
        self._keep_alive = keep_alive
        self._silence = silence
        self._line: list[_Process] = []  # who was there first comes first
        self._holder: _Process | None = None  # the one that counts

    def __contains__(self, boot: str) -> bool:
        """Whether this process has said before that it is the node."""
        return any(item.boot == boot for item in self._line)

    def hear(self, boot: str, number: int, now: float, *, leaving: bool = False) -> Verdict:
        """What to do with a beat: its process "counts", it is "ignored", or its process is to be told that it is
        "refused". `number` grows with each beat of a process."""
        process = next((item for item in self._line if item.boot == boot), None)
        if process is None:
            process = _Process(boot, number, now, leaving)
            self._line.append(process)
            self._give_to(process, now)
            return "counts"
        counts = process is self._holder
        if number < process.number or (number == process.number and not counts):
            return "ignored"  # overtaken by a later one, or sent again by the network
        was_gone = self._is_gone(process, now)
        process.number, process.heard, process.leaving = number, now, leaving
        if counts:
            return "counts"
        if leaving:
            return "ignored"
        if was_gone:
            self._move(process, len(self._line))
        if self._is_gone(self._holder, now):
            self._give_to(process, now)
            return "counts"
        if self._holder in self._line[: self._line.index(process)]:
            return "refused"
        # What a process sent before it ended comes late by no more than the delays of a network, which are far below
        # `keep_alive`; and one that goes on is heard that often. So what comes later than that is a sign of life.
        if now - process.lost < self._keep_alive:
            return "ignored"
        self._give_to(process, now)
        return "counts"

    def _give_to(self, process: _Process, now: float) -> None:
        if self._is_gone(self._holder, now):
            self._move(process, 0)
        else:
            assert self._holder is not None
            for item in self._line[self._line.index(self._holder) :]:
                item.lost = now
        self._holder = process
        if len(self._line) > PROCESSES:
            self._line.remove(min((item for item in self._line if item is not process), key=lambda item: item.heard))

    def _move(self, process: _Process, where: int) -> None:
        self._line.remove(process)
        self._line.insert(where, process)

    def _is_gone(self, process: _Process | None, now: float) -> bool:
        return process is None or process.leaving or now - process.heard > self._silence
