"""Carries out a round: its steps side by side, its blows while they are in flight."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from typing import Any

from tests.chaos.engine import EngineDied, EngineFailed
from tests.chaos.plan import Blow, Round, Step
from tests.chaos.tracing import Trap
from tests.chaos.world import Violation, World, send
from weightcached.errors import WeightCacheError
from weightcached.wire.messages import Evict, Load, Reload, Verify

WAIT_SECONDS = 3.0  # of an engine for a model
PAUSE_SECONDS = 0.3  # the longest that a process is stopped while others go on
STEP_SECONDS = 120.0
LOAD_SECONDS = 10.0  # for what the steps have begun
LOOK_AGAIN_SECONDS = 0.02
MAX_HELD = 3  # shards of one engine; before a further one it gives all back

_CHANGES = ("evict", "evict-force", "again", "renew", "overwrite")  # what its model has cached, or is to have

# What a client may be told while processes die around it. Everything else is a defect.
_ALLOWED = {
    "ServiceNotRunning",
    "ConnectionLost",
    "TimedOut",
    "ModelLoading",
    "ModelNotLoaded",
    "ModelFailed",
    "ModelInUse",
    "NoSuchModel",
    "DeviceFull",
}


class Outcome:
    """What a round did: a line for each step, and the models that somebody meant to change."""

    def __init__(self) -> None:
        self.said: dict[int, str] = {}
        self.struck: list[str] = []
        self.touched: set[str] = set()

    def __str__(self) -> str:
        return "; ".join([*(f"{number}: {text}" for number, text in sorted(self.said.items())), *self.struck])


class Rounds:
    """Runs one round after the other on a world. `close` ends its threads."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="step")
        self._engines = [threading.Lock() for _ in world.engines]
        self._files = threading.Lock()

    def run(self, planned: Round) -> Outcome:
        """All steps have ended and every blow has fallen when it returns. `Violation` for an answer that may not be."""
        outcome = Outcome()
        world = self._world
        kills = [blow for blow in planned.blows if blow.point]
        traps = {blow: self._trap(blow, outcome) for blow in kills}
        world.tracer.arm(list(traps.values()))
        futures: list[Future[str]] = []
        try:
            for number, step in enumerate(planned.steps):
                if step.what in _CHANGES:
                    outcome.touched.add(step.model)
                futures.append(self._pool.submit(self._do, step))
                for blow in planned.blows:
                    if not blow.point and blow.after == number:
                        self._strike_now(blow, futures, outcome)
            if any(trap.freeze for trap in traps.values()):
                concurrent.futures.wait(futures, PAUSE_SECONDS)
                world.tracer.release()
            _, late = concurrent.futures.wait(futures, STEP_SECONDS)
            if late:
                raise Violation(f"steps that do not end: {[str(planned.steps[futures.index(one)]) for one in late]}")
            self._wait_for_loads()
            world.tracer.disarm()
            for blow, trap in traps.items():
                if not trap.sprung and not trap.freeze and world.signal(blow.victim, blow.number, signal.SIGKILL):
                    outcome.struck.append(f"point not passed, killed {blow.victim} {blow.number} at the end")
        finally:
            world.tracer.disarm()
        for number, future in enumerate(futures):
            outcome.said[number] = future.result()
        return outcome

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _wait_for_loads(self) -> None:
        """Until every trap has struck, or nothing is on its way any more that could pass a point."""
        end = time.monotonic() + LOAD_SECONDS
        while not self._world.tracer.wait(LOOK_AGAIN_SECONDS) and time.monotonic() < end:
            try:
                status = self._world.status()
            except WeightCacheError:
                continue
            if not any(model["state"] in ("queued", "loading") for model in status["models"]):
                return

    # Blows.

    def _trap(self, blow: Blow, outcome: Outcome) -> Trap:
        world = self._world

        def strike(passing: int) -> None:
            if blow.kind == "freeze":
                outcome.struck.append(f"froze {passing} at {blow.point}")
            elif blow.own:
                send(passing, signal.SIGKILL)
                outcome.struck.append(f"killed {passing} at {blow.point}")
            else:
                pid = world.signal(blow.victim, blow.number, signal.SIGKILL)
                outcome.struck.append(f"killed {blow.victim} {pid} while {passing} was at {blow.point}")

        return Trap(blow.point, blow.occurrence, strike, freeze=blow.kind == "freeze")

    def _strike_now(self, blow: Blow, futures: list[Future[str]], outcome: Outcome) -> None:
        concurrent.futures.wait(futures, blow.delay)
        if blow.kind == "kill":
            pid = self._world.signal(blow.victim, blow.number, signal.SIGKILL)
            outcome.struck.append(f"killed {blow.victim} {pid}")
            return
        pid = self._world.signal(blow.victim, blow.number, signal.SIGSTOP)
        if pid is not None:
            outcome.struck.append(f"stopped {blow.victim} {pid}")
            concurrent.futures.wait(futures, PAUSE_SECONDS, FIRST_COMPLETED)
            send(pid, signal.SIGCONT)

    # Steps.

    def _do(self, step: Step) -> str:
        """One step; what came of it in a few words."""
        action: dict[str, Callable[[Step], Any]] = {
            "attach": self._attach,
            "drop": self._drop,
            "load": lambda step: self._ask(Load(step.model)),
            "evict": lambda step: self._ask(Evict(step.model)),
            "evict-force": lambda step: self._ask(Evict(step.model, force=True)),
            "again": self._again,
            "renew": self._renew,
            "overwrite": self._overwrite,
            "reload": lambda step: self._ask(Reload()),
            "config": self._config,
            "restart": lambda step: self._world.restart(),
            "verify": self._verify,
        }
        try:
            return f"{step}: {action[step.what](step) or 'done'}"
        except EngineDied:
            return f"{step}: the engine died"
        except EngineFailed as error:
            return f"{step}: {_allowed(error.name, step, error)}"
        except WeightCacheError as error:
            return f"{step}: {_allowed(type(error).__name__, step, error)}"

    def _ask(self, request: Any) -> None:
        self._world.ask(request)

    def _attach(self, step: Step) -> str:
        files = self._world.models[step.model]
        with self._engines[step.engine]:
            engine = self._world.engines[step.engine]
            if len(engine.held) >= MAX_HELD:
                engine.ask("drop")
            ranks = len(files.devices)
            reply = engine.ask(
                "attach",
                model=step.model,
                device=files.devices[step.rank],
                rank=[step.rank, ranks],
                wait=WAIT_SECONDS if step.wait else 0.0,
            )
        self._world.require_right(step.model, step.rank, reply)
        return f"generation {reply['generation']}"

    def _drop(self, step: Step) -> None:
        with self._engines[step.engine]:
            self._world.engines[step.engine].ask("drop")

    def _again(self, step: Step) -> None:
        self._ask(Evict(step.model, force=True))
        self._ask(Load(step.model))

    def _renew(self, step: Step) -> None:
        with self._files:
            self._world.models[step.model].replace(step.variant)
        self._ask(Reload())

    def _overwrite(self, step: Step) -> None:
        with self._files:
            self._world.models[step.model].overwrite(step.variant)

    def _config(self, step: Step) -> None:
        name, value = step.setting
        with self._files:
            self._world.configure(step.model, name, value)
        self._ask(Reload())

    def _verify(self, step: Step) -> None:
        answer = self._world.ask(Verify(step.model))
        for result in answer["results"]:
            if result.get("differ"):
                raise Violation(f"verify {step.model}: {result}")


def _allowed(name: str, step: Step, error: Exception) -> str:
    if name not in _ALLOWED:
        raise Violation(f"{step}: {name}: {error}") from error
    return name
