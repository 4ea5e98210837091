"""What must be true between two rounds. Each check gives sentences; an empty list is a clean bill.

Nothing announces that the last effect of a kill has passed (a lease that a dead engine held, a descriptor that a
closing process still has), so `settled` looks again until all is well, and fails with what is left after a while.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import select
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.engine import EngineDied, EngineFailed
from tests.chaos.world import Violation, World, alive, arguments_of, below
from weightcached.devices import is_host
from weightcached.errors import WeightCacheError
from weightcached.shard.manifest import SourceFile
from weightcached.wire import messages

SETTLE_SECONDS = 20.0
LOOK_AGAIN_SECONDS = 0.01
LEARN_LOOKS = 50  # of which the least is what a process has open at rest
RENEWS = hasattr(messages, "Renew")  # clients say again what they hold when their worker has died
_COMING = ("queued", "loading")
_MEMFD = "/memfd:weightcached-"


class Shard(NamedTuple):
    """A cached shard by name."""

    device: str
    model: str
    generation: int


class Descriptors(NamedTuple):
    """What one process has open: inodes of the service's memfds, and how many of each other kind."""

    memfds: frozenset[int]
    kinds: collections.Counter[str]


class Checker:
    """Knows what was cached when the last round ended, and what a process has open when it serves nobody."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._usual: dict[str, collections.Counter[str]] = {}
        self.tight = False
        self._leased: set[Shard] = set()  # by engines, when the last round ended
        self._seen: dict[str, collections.Counter[str]] = {}
        self.cached: set[Shard] = set()
        self.steady: set[str] = set()  # models that were whole, of the files that are there, without an error

    def settled(self, touched: set[str], seconds: float = SETTLE_SECONDS) -> dict[str, Any]:
        """The status, once every check is content. `Violation` with what is left otherwise.

        `touched`: models that somebody meant to change; what was cached of the others must still be.
        """
        end = time.monotonic() + seconds
        while True:
            problems, status = self.problems(touched)
            if not problems and status is not None:
                if not self._usual:
                    self._learn(status)
                self._remember(status)
                return status
            if time.monotonic() > end:
                raise Violation("; ".join(problems))
            self._wait()

    def problems(self, touched: set[str]) -> tuple[list[str], dict[str, Any] | None]:
        """Everything that is not as it must be now, and the status that was looked at."""
        world = self._world
        world.check()
        world.ready()
        try:
            status = world.status()
        except WeightCacheError as error:
            return [f"status: {error}"], None
        unsettled = _unsettled(status)
        if unsettled:
            return unsettled, status
        found = [
            *self._lost(status, touched),
            *self._processes(status),
            *self._descriptors(status),
            *self._leases(status),
            *self._locks(),
        ]
        return found, status

    # Checks.

    def _lost(self, status: dict[str, Any], touched: set[str]) -> list[str]:
        kept = {shard for shard in self.cached if shard.model in self.steady and shard.model not in touched}
        if self.tight or is_tight(status):  # what is idle makes room; what is in use never does
            kept &= self._leased & self._held()
        return [f"lost: {shard}" for shard in sorted(kept - set(_shards(status, "cached")))]

    def _held(self) -> set[Shard]:
        return {
            Shard(what["device"], what["model"], what["generation"])
            for engine in self._world.engines
            for what in engine.held.values()
        }

    def _processes(self, status: dict[str, Any]) -> list[str]:
        """Orphans, and workers that are missing: what runs below this process, and why it may."""
        world = self._world
        main = world.manager.pid
        known = {main, world.nursery.process.pid, world.judge.pid, *(engine.pid for engine in world.engines)}
        known |= {device["pid"] for device in status["devices"]} | world.others
        return [
            f"orphan or left over: {pid} {' '.join(arguments_of(pid))}"
            for pid in below(os.getpid())
            if pid not in known and not _reaped(pid) and not (world.gpus and "watch-devices" in arguments_of(pid))
        ] + [
            f"the worker of {device['device']} is no process: {device['pid']}"
            for device in status["devices"]
            if device["device"] not in arguments_of(device["pid"])
        ]

    def _descriptors(self, status: dict[str, Any]) -> list[str]:
        world = self._world
        found = []
        listed = collections.Counter(shard.device for shard in _shards(status, "cached"))
        main = descriptors_of(world.manager.pid)
        stored_fds = world.manager.stored
        stored = {os.fstat(fd).st_ino for fd in stored_fds.values()}
        workers = {device["device"]: descriptors_of(device["pid"]) for device in status["devices"]}
        of_workers = frozenset[int]().union(*(worker.memfds for worker in workers.values()))
        for device, worker in workers.items():
            memfds = listed[device] * (2 if is_host(device) else 1)  # the manifest, and on the host the slab
            if len(worker.memfds) != memfds:
                found.append(f"worker {device}: {len(worker.memfds)} memfds for {listed[device]} shards")
        if main.memfds != of_workers:
            found.append(f"main: {len(main.memfds)} memfds, the workers have {len(of_workers)}")
        if stored & main.memfds != main.memfds or len(stored_fds) != 2 * listed.total():
            found.append(f"store: {sorted(stored_fds)} for {listed.total()} shards")
        for engine in world.engines:
            mapped = sum(is_host(what["device"]) for what in engine.held.values())
            memfds = len(descriptors_of(engine.pid).memfds)
            if memfds > mapped:
                found.append(f"engine {engine.pid}: {memfds} memfds for {mapped} attached shards")
        found += self._unusual("main", main.kinds, 0)
        for device in status["devices"]:
            leases = sum(len(shard["leases"]) for shard in device["shards"])
            found += self._unusual("worker", workers[device["device"]].kinds, leases)
        return found

    def _unusual(self, role: str, kinds: collections.Counter[str], leases: int) -> list[str]:
        """More descriptors of a kind than there ever were at rest. A lease is a connection, and may be a pidfd."""
        kinds = kinds.copy()
        kinds["socket"] -= leases
        self._seen[role] = kinds
        usual = self._usual.get(role, kinds)
        more = {kind: number - usual[kind] for kind, number in kinds.items() if number > usual[kind]}
        if more.get("pidfd") == leases:
            del more["pidfd"]
        return [f"{role}: more descriptors than at rest: {more} with {leases} leases"] if more else []

    def _leases(self, status: dict[str, Any]) -> list[str]:
        shown = collections.Counter(
            (lease["pid"], device["device"], shard["model"], shard["generation"])
            for device in status["devices"]
            for shard in device["shards"]
            for lease in shard["leases"]
        )
        held = collections.Counter(
            (engine.pid, what["device"], what["model"], what["generation"])
            for engine in self._world.engines
            for what in engine.held.values()
        )
        found = []
        if shown - held:
            found.append(f"leases shown that nobody has: {dict(shown - held)}")
        if RENEWS and held - shown:
            found.append(f"leases not shown: {dict(held - shown)}")
        return found

    def _locks(self) -> list[str]:
        """Each lock is held, and names the main process that lives."""
        world = self._world
        main = world.manager.pid
        found = []
        names = [*(f"{device}.lock" for device in world.devices), f"{world.manager.instance}.control.lock"]
        for name in names:
            try:
                with open(world.runtime_dir / name, "rb") as file:
                    owner = json.loads(file.read())
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        found.append(f"{name} is not locked")
                    except BlockingIOError:
                        pass
            except (FileNotFoundError, ValueError) as error:
                found.append(f"{name}: {error}")
                continue
            if owner["pid"] != main:
                found.append(f"{name} names {owner}, the main process is {main}")
        return found

    # Bytes.

    def look(self, model: str, wait: float) -> None:
        """Attaches every rank through the public API, and compares. `Violation` for what is not right."""
        world = self._world
        files = world.models[model]
        contents = set()
        for rank, device in enumerate(files.devices):
            try:
                reply = world.judge.ask("look", model=model, device=device, wait=wait, rank=[rank, len(files.devices)])
            except EngineFailed as error:
                raise Violation(f"{model} rank {rank} on {device} cannot be attached: {error}") from error
            world.require_right(model, rank, reply)
            contents.add(reply["content"])
        if len(contents) != 1:
            raise Violation(f"the ranks of {model} are of {len(contents)} contents: {contents}")

    def compare_held(self) -> None:
        """What engines hold, of whatever generation, still has the bytes that it had when it was attached."""
        for engine in self._world.engines:
            try:
                digests = engine.ask("check")["digests"]
            except EngineDied:
                continue
            for number, held in engine.held.items():
                if digests[number] != held["digest"]:
                    raise Violation(f"engine {engine.pid}: the bytes of {held} have changed to {digests[number]}")

    def _learn(self, status: dict[str, Any]) -> None:
        """What main and the workers have open while nobody asks them.

        A look that follows a status may still see the connection by which main asked the worker for it; learned from
        such looks alone, one socket too many would be the usual.
        """
        for _ in range(LEARN_LOOKS):
            self._wait()
            self._descriptors(status)
            self._keep_least()

    def _keep_least(self) -> None:
        for role, kinds in self._seen.items():
            usual = self._usual.setdefault(role, kinds)
            self._usual[role] = collections.Counter({kind: min(usual[kind], kinds[kind]) for kind in usual | kinds})

    def _remember(self, status: dict[str, Any]) -> None:
        self._keep_least()
        self.cached = set(_shards(status, "cached"))
        self.tight, self._leased = is_tight(status), self._held()
        whole = {item["model"] for item in status["models"] if item["state"] == "cached" and item["error"] is None}
        self.steady = whole - _outdated(status, self._world)

    def _wait(self) -> None:
        """Until a process that is about to go has gone, or for a moment."""
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            for pid in below(self._world.manager.pid):
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(pid)
                    stack.callback(os.close, pidfd)
                    poll.register(pidfd, select.POLLIN)
            poll.poll(LOOK_AGAIN_SECONDS * 1000)


def _unsettled(status: dict[str, Any]) -> list[str]:
    """What is still on its way."""
    found = [
        f"{item['model']} is {item['state']}" for item in status["models"] if item["state"] in ("queued", "loading")
    ]
    if not status["ready"]:
        found.append("not ready")
    for device in status["devices"]:
        if "error" in device:
            found.append(f"{device['device']}: {device['error']}")
            continue
        if device["reservations"]:
            found.append(f"{device['device']} has reservations: {device['reservations']}")
        held = sum(shard["nbytes"] for shard in device["shards"])
        if device["held"] != held and not device["reservations"]:
            found.append(f"{device['device']} counts {device['held']} bytes, its shards have {held}")
    return found


def _outdated(status: dict[str, Any], world: World) -> set[str]:
    """Models of which something cached was read from other files than there are now: the next start or reload loads."""
    stats = {name: model.stat for name, model in world.models.items()}
    return {
        shard["model"]
        for device in status["devices"]
        for shard in device["shards"]
        for file in shard["files"]
        if SourceFile(**file).stat != stats[shard["model"]]
    }


def is_tight(status: dict[str, Any]) -> bool:
    """Whether a device takes less than all models in two generations, so that room must be made."""
    return any(device["limit"] < 1 << 20 for device in status["devices"])


def _shards(status: dict[str, Any], state: str) -> list[Shard]:
    return [
        Shard(device["device"], shard["model"], shard["generation"])
        for device in status["devices"]
        for shard in device["shards"]
        if shard["state"] == state
    ]


def _reaped(pid: int) -> bool:
    """Whether it has ended; an orphan that has become this process's child is waited for."""
    if alive(pid):
        return False
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # another process's, which must do it
        return not Path(f"/proc/{pid}").exists()
    return True


def descriptors_of(pid: int) -> Descriptors:
    """What the process has open now; nothing if it has ended."""
    memfds, kinds = set(), collections.Counter[str]()
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith(_MEMFD):
                    memfds.add(os.stat(f"{folder}/{name}").st_ino)
                elif not target.startswith("/dev/nvidia"):  # slabs, and what NVML and the driver keep
                    kinds[_kind(target)] += 1
    return Descriptors(frozenset(memfds), kinds)


def _kind(target: str) -> str:
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    return target.partition(":")[0] if ":[" in target else "file"
