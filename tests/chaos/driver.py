"""``python -m tests.chaos.driver --rounds 200 --seed 7``: rounds of random work and random kills, checked after each.

    models     three models with two variants each
    plan       what the rounds of a seed do
    world      the service under its manager, engines, files
    rounds     carries out a round
    checks     what must be true after it
    tracing    stops, kills and freezes processes at named points in the code

Equal seeds decide equally; what comes of it also depends on who is faster.
"""

from __future__ import annotations

import argparse
import collections
import secrets
import signal
import sys
import time
from contextlib import ExitStack, closing
from typing import Any

from tests.chaos.checks import Checker, is_tight
from tests.chaos.engine import EngineDied
from tests.chaos.plan import ENGINES, Planner, Round
from tests.chaos.rounds import Rounds
from tests.chaos.world import Violation, World, send
from tests.gpu import becomes_true
from weightcached.devices import device_memory, gpu_devices
from weightcached.wire.messages import Evict, Load, Reload

LOAD_SECONDS = 20.0
THOROUGH_EVERY = 25
TOLERANCE = 16 << 20  # bytes of a GPU that others may take or give back meanwhile; a slab of the models has more


class Chaos:
    """One run. A context manager that ends everything it has started."""

    def __init__(self, seed: int, gpus: list[str] | None = None) -> None:
        self.seed = seed
        self.done = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self._planner = Planner(seed, thorough_every=THOROUGH_EVERY)
        self._stack = ExitStack()
        with ExitStack() as undo:
            self._before = used_bytes(gpus)
            self.world = undo.enter_context(closing(World(seed, ENGINES, gpus)))
            self.rounds = undo.enter_context(closing(Rounds(self.world)))
            self.checker = Checker(self.world)
            self.world.ready()
            self.checker.settled(set())
            self._stack = undo.pop_all()

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def round(self) -> None:
        """The next round of the seed, and its checks. `AssertionError` with all that is known of a failure."""
        planned = self._planner.next()
        outcome: Any = "began"
        try:
            outcome = self.rounds.run(planned)
            self.world.revive()
            self._check(planned, outcome.touched)
        except AssertionError as error:
            raise AssertionError(
                f"seed {self.seed}, round {planned.number}: {error}\n  planned  {planned}\n  happened {outcome}\n"
                f"  settings {self.world.settings}\n  log\n{self.world.manager.log[-6000:]}"
            ) from error
        self.done += 1
        self.counts.update(step.what for step in planned.steps)
        self.counts.update(line.partition(" ")[0] for line in outcome.struck)

    def _check(self, planned: Round, touched: set[str]) -> None:
        checker = self.checker
        status = checker.settled(touched)
        checker.compare_held()
        for model in status["models"]:
            name, state = model["model"], model["state"]
            if state == "cached":
                checker.look(name, 0.0)
            elif state == "failed" or planned.load_absent:
                # Nothing disturbs it now, so it must load.
                if is_tight(status):
                    self._drop_all()
                if state == "failed":
                    self.world.ask(Load(name))
                    status = checker.settled(touched | {name})
                checker.look(name, LOAD_SECONDS)
                status = checker.settled(touched | {name})
        if planned.thorough:
            self._check_thoroughly()

    def _check_thoroughly(self) -> None:
        """Reload brings every model to what its files are; with no engine left all memory is accounted for."""
        world, checker = self.world, self.checker
        self._drop_all()
        world.ask(Reload())
        everything = set(world.models)
        status = checker.settled(everything)
        for model in status["models"]:
            if model["error"] is None and model["state"] == "cached":
                self._require_current(status, model["model"])
            elif model["state"] == "failed" or (model["state"] == "cached" and not is_tight(status)):
                raise Violation(f"{model['model']} is {model['state']} after a reload: {model['error']}")
        draining = [shard for device in status["devices"] for shard in device["shards"] if shard["state"] != "cached"]
        if draining:
            raise Violation(f"draining though nobody holds it: {draining}")
        if world.gpus:
            self._require_freed(status)

    def _drop_all(self) -> None:
        """No engine holds anything."""
        for engine in self.world.engines:
            try:
                engine.ask("drop")
            except EngineDied:
                continue

    def _require_current(self, status: dict[str, Any], name: str) -> None:
        files = self.world.models[name]
        wanted = files.order[files.current]
        for device in status["devices"]:
            for shard in device["shards"]:
                if shard["model"] == name and shard["key"]["content"] != wanted:
                    raise Violation(f"{name} on {device['device']} is not what its file is after a reload")

    def _require_freed(self, status: dict[str, Any]) -> None:
        """With everything evicted and no engine left, the GPUs have as much free memory as at the beginning."""
        world = self.world
        for engine in [*world.engines, world.judge]:
            send(engine.pid, signal.SIGKILL)
        for name in {shard["model"] for device in status["devices"] for shard in device["shards"]}:
            world.ask(Evict(name, force=True))
        limit = self._before + TOLERANCE
        if not becomes_true(lambda: used_bytes(world.gpus) <= limit, LOAD_SECONDS):
            raise Violation(f"{used_bytes(world.gpus)} bytes in use with nothing cached, {self._before} at first")
        world.revive()
        for model in status["models"]:
            world.ask(Load(model["model"]))
        self.checker.settled(set(world.models))


def used_bytes(gpus: list[str] | None) -> int:
    """Bytes in use on GPUs, by anyone."""
    memories = [device_memory(name) for name in gpus or []]
    return sum(memory.total - memory.free for memory in memories)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.driver", description=__doc__.partition(":")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="decides what happens; random by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    gpus = [gpu.name for gpu in gpu_devices()][:2] if args.device == "cuda" else None
    if gpus == []:
        parser.error("--device cuda: NVML finds no GPU")
    print(f"chaos: seed {seed}, {args.rounds} rounds on {gpus or 'host devices'}", flush=True)
    started = time.monotonic()
    with Chaos(seed, gpus) as chaos:
        try:
            while chaos.done < args.rounds and time.monotonic() - started < args.seconds:
                chaos.round()
        except AssertionError as error:
            print(f"chaos: FAILED after {chaos.done} rounds\n{error}", flush=True)
            return 1
        finally:
            took = time.monotonic() - started
            print(f"chaos: seed {seed}, {chaos.done} rounds in {took:.1f} s; {dict(chaos.counts)}")
            print(f"chaos: points passed {dict(chaos.world.tracer.hits)}, struck {dict(chaos.world.tracer.struck)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
