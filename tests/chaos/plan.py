"""What a round does, decided by nothing but the seed: steps, and blows at chosen moments."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.models import VARIANTS
from tests.chaos.tracing import POINTS

ENGINES = 3
MODELS = ("plain", "cut", "lazy")
TIGHT = "256KiB"  # all three models once, and not two generations of the largest
RANKS = {"plain": 1, "cut": 2, "lazy": 1}

_STEPS = {
    "attach": 30,
    "drop": 8,
    "load": 4,
    "again": 6,  # evicted by force, and loaded
    "evict": 4,
    "evict-force": 2,
    "renew": 8,  # another variant, and a reload
    "overwrite": 3,
    "reload": 3,
    "config": 5,  # a setting, and a reload
    "restart": 1,
    "verify": 1,
}
_VICTIMS = {"engine": 37, "loader": 27, "worker": 20, "main": 10, "reader": 6}
_LOAD = [
    "loader",
    "worker.publish-checked",
    "worker.hold-told",
    "worker.held",
    "service.hold",
    "service.before-held",
    "store",
]
_EVICT = ["worker.evicted", "service.dropped", "store.removed"]
# What the processes pass while they do a step, as beginnings of points.
_PASSED = {
    "attach": ["client.received", "client.mapped"],
    "load": _LOAD,
    "again": [*_LOAD, *_EVICT],
    "evict": _EVICT,
    "evict-force": _EVICT,
    "renew": [*_LOAD, *_EVICT, "service.reload"],
    "reload": ["service.reload"],
    "config": ["service.reload"],
    "restart": ["service.adopted", "worker.renew", "client.renew"],
}


@dataclass(frozen=True)
class Step:
    """One thing that somebody asks for. `what` is a key of _STEPS."""

    what: str
    model: str = ""
    engine: int = 0
    rank: int = 0
    variant: int = 0
    wait: bool = False
    setting: tuple[str, Any] = ("", None)

    def __str__(self) -> str:
        parts = {
            "attach": f"{self.model}/{self.rank} by engine {self.engine}{' waiting' if self.wait else ''}",
            "drop": f"engine {self.engine}",
            "renew": f"{self.model} to {self.variant}",
            "overwrite": f"{self.model} to {self.variant}",
            "config": f"{self.model} {self.setting[0]}={self.setting[1]}",
        }
        return f"{self.what} {parts.get(self.what, self.model)}".strip()


@dataclass(frozen=True)
class Blow:
    """A signal to a process: while step number `after` is in flight, or when `point` is passed.

    At a point of its own (`own`) the victim is whoever passes it. `kind`: "kill"; "stop", by SIGSTOP until a step has
    ended; "freeze", held at the point as long.
    """

    kind: str
    victim: str
    number: int  # of the worker or engine
    point: str = ""
    occurrence: int = 1
    own: bool = True
    after: int = 0
    delay: float = 0.0  # seconds after the step was begun, for a moment that no point names

    def __str__(self) -> str:
        who = f"{self.victim} {self.number}" if self.victim in ("worker", "engine") else self.victim
        if self.point:
            return f"{self.kind} {'whoever passes' if self.own else who + ' at'} {self.point} ({self.occurrence})"
        return f"{self.kind} {who} {self.delay * 1000:.0f} ms into step {self.after}"


@dataclass
class Round:
    """Steps, begun in order and running side by side, blows, and how much is checked at the end."""

    number: int
    steps: list[Step] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)
    load_absent: bool = False
    thorough: bool = False

    def __str__(self) -> str:
        return f"round {self.number}: " + "; ".join(map(str, [*self.steps, *self.blows]))


class Planner:
    """Makes the rounds of a seed. Knows what the config will say, and never what has come of it."""

    def __init__(self, seed: int, *, thorough_every: int = 25) -> None:
        self._rng = random.Random(f"plan {seed}")
        self._every = thorough_every
        self._number = 0
        self._listed = set(MODELS)

    def next(self) -> Round:
        rng = self._rng
        self._number += 1
        made = Round(self._number, thorough=self._number % self._every == 0)
        made.load_absent = made.thorough or rng.random() < 0.3
        made.steps = [self._step() for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))]
        made.blows = [self._blow(made.steps) for _ in range(rng.choice((1, 1, 1, 1, 2)))]
        if rng.random() < 0.12:
            made.blows.append(self._pause(made.steps))
        return made

    def _step(self) -> Step:
        rng = self._rng
        what = rng.choices(list(_STEPS), list(_STEPS.values()))[0]
        model = rng.choice(sorted(self._listed))
        match what:
            case "attach":
                rank = rng.randrange(RANKS[model])
                return Step(what, model, rng.randrange(ENGINES), rank, wait=rng.random() < 0.6)
            case "drop":
                return Step(what, engine=rng.randrange(ENGINES))
            case "renew" | "overwrite":
                return Step(what, model, variant=rng.randrange(VARIANTS))
            case "reload" | "restart":
                return Step(what)
            case "config":
                return self._config()
        return Step(what, model)

    def _config(self) -> Step:
        rng = self._rng
        model = rng.choice(MODELS)
        name = rng.choice(("listed", "preload", "pin", "replace", "memory_limit", "ready"))
        choices: dict[str, tuple[Any, ...]] = {
            "listed": (model not in self._listed or len(self._listed) == 1,),
            "preload": (True, False),
            "pin": (True, False),
            "replace": ("beside", "evict-first"),
            "memory_limit": ("32MiB", "64MiB", TIGHT),
            "ready": ("loaded", "listening"),
        }
        value = rng.choice(choices[name])
        if name == "listed":
            (self._listed.add if value else self._listed.discard)(model)
        return Step("config", "" if name in ("memory_limit", "ready") else model, setting=(name, value))

    def _blow(self, steps: list[Step]) -> Blow:
        rng = self._rng
        victim = rng.choices(list(_VICTIMS), list(_VICTIMS.values()))[0]
        number = rng.randrange(ENGINES if victim == "engine" else 2)
        passed = _points_of(steps)
        own = rng.random() < 0.6
        points = [point for point in passed if point in POINTS.get(victim, ())] if own else passed
        if not points or rng.random() < 0.3:
            return Blow("kill", victim, number, after=rng.randrange(len(steps)), delay=rng.random() * 0.3)
        return Blow("kill", victim, number, rng.choice(points), rng.choice((1, 1, 1, 2)), own=own)

    def _pause(self, steps: list[Step]) -> Blow:
        rng = self._rng
        points = _points_of(steps)
        if points and rng.random() < 0.6:
            return Blow("freeze", "whoever", 0, rng.choice(points), rng.choice((1, 1, 2)))
        victim = rng.choice(("main", "worker", "engine", "loader"))
        return Blow("stop", victim, rng.randrange(2), after=rng.randrange(len(steps)), delay=rng.random() * 0.1)


def _points_of(steps: list[Step]) -> list[str]:
    """Points that are likely to be passed while these steps are done."""
    beginnings = tuple(one for step in steps for one in _PASSED.get(step.what, ()))
    return (
        [point for points in POINTS.values() for point in points if point.startswith(beginnings)] if beginnings else []
    )
