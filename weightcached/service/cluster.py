"""The other nodes: who is there, whether all have the same, and what that means for the models here.

    node 0      has the UDP port master_port: hears beats, answers with its view, gives out rounds (`membership`)
    others      send beats there, and hear the view
    a round     one rendezvous of all nodes (`rounds`), whose descriptions are then compared (`agreement`)

What is here stays here, whatever becomes of the others. While nodes differ in a model it is not given out by name: the
ranks of an engine that spans the nodes would get a mixture. Who names its content gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config import Config
from ..config_cluster import ClusterConfig
from ..errors import ConfigError, MissingDependency, TimedOut, WeightCacheError
from ..meeting import Job
from .agreement import Description, Difference, describe, describe_model, differences, digest_of, parse, to_text
from .links import Link, open_link
from .membership import PROBLEM_CHARS, Beat, Reported, Seen, changes
from .models import HeldBack, Model
from .rounds import Round

NOT_YET = HeldBack("the nodes of the cluster have not agreed on it yet", final=False)
MEET_SECONDS = 60.0  # at least, for a rendezvous, in which all nodes that were there take part
_FOR_GOOD = (MissingDependency,)  # ends of a rendezvous that the next one would have as well
_log = logging.getLogger(__name__)


class Cluster:
    """This node among the others, from `run` until that is cancelled. Without [cluster], or alone, it does nothing."""

    def __init__(
        self,
        config: Config,
        models: Callable[[], Mapping[str, Model]],
        changed: Callable[[], None],
        *,
        to_lose: bool,
    ) -> None:
        """`models()` are those of the service. `changed()` is called when nodes come and go, or agree, or do not.

        `to_lose`: there is something cached that a start which fails would cost.
        """
        self._file = config.file
        self._config = config.cluster if config.cluster is not None and not config.cluster.alone else None
        self._waits = config.ready == "loaded" and self._config is not None and self._config.ready == "all"
        self._models = models
        self._changed = changed
        self._to_lose = to_lose
        self._loaded = False
        self._leaving = False
        self._end: str | None = None  # why, as the others are told
        self._boot = secrets.token_hex(8)
        self._attempt = 0
        self._nodes: tuple[Seen, ...] = ()
        self._problem: str | None = None  # what keeps the nodes from agreeing
        self._failure: WeightCacheError | None = None  # of a rendezvous, if another one would fail as well
        self._refusal: str | None = None  # why a node is not counted among them
        self._differences: list[Difference] = []
        self._meeting = False  # whether a round is under way
        self._agreed: dict[str, Description] = {}  # what each model was when the nodes agreed last
        self._is_agreed = False
        self._mine: Description = {}
        self._digest = ""
        self._wake = asyncio.Event()
        self._news = asyncio.Event()  # for a start that waits
        self._link: Link | None = None
        self._round: asyncio.Task[None] | None = None
        self._round_name = ""
        if self._config is not None:
            self._nodes = (Seen(),) * self._config.nodes

    def models_changed(self) -> None:
        """To be called at each change of a model, before its workers are told of it."""
        if self._config is None:
            return
        self._look_at_models(self._config)
        self._wake.set()

    async def loaded(self) -> None:
        """This node has its shards. With ready = "all" it returns when all nodes have theirs, and agree; not if the
        service is ready when it listens.

        `ConfigError` with every difference if they do not, `TimedOut` with the nodes that did not come: unless there is
        something to lose, then either is logged and shown, as in a service that runs.
        """
        self._loaded = True
        self.models_changed()
        if self._config is None or not self._waits:
            return
        deadline = time.monotonic() + self._config.timeout
        while not self._is_agreed:
            if self._failure is not None and not self._to_lose:
                raise self._failure
            if self._differences:
                if self._to_lose:
                    return
                raise ConfigError(file=str(self._file), problem=f"[cluster]: {self._problem}")
            states = [item.state for item in self._nodes]
            if self._meeting or ("loading" in states and not {"unknown", "gone"} & set(states)):
                # They are all there, and one has more to read; or they meet, for which there is a time of its own.
                deadline = time.monotonic() + self._config.timeout
            if (left := deadline - time.monotonic()) <= 0:
                error = self._late(self._config)
                if not self._to_lose:
                    raise error
                _log.error("%s; what is here is served", error)
                return
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()

    def fails(self, error: WeightCacheError) -> None:
        """This node ends with an error: what the others are told when `run` ends."""
        self._end = f"it failed: {error}"[:PROBLEM_CHARS]

    async def run(self) -> None:
        """Keeps in touch with the other nodes until cancelled. Returns at once where there are none.

        `ConnectionFailed` for a port or an address that cannot be used; with something to lose it is logged, and tried
        again.
        """
        if self._config is None:
            return
        try:
            link = self._link = await self._open(self._config)
            while True:
                self._wake.clear()
                self._step(link)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(link.due_in(time.monotonic())):
                        await self._wake.wait()
        finally:
            await self._end_round()
            if self._link is not None:
                self._leaving, self._end = True, self._end or "it was stopped"
                self._link.say()
                self._link.close()

    def describe(self) -> dict[str, Any] | None:
        """The cluster in a status reply, None without one."""
        if self._config is None:
            return None
        config, link = self._config, self._link
        return {
            "node": config.node_rank,
            "master": f"{config.master_addr}:{config.master_port}",
            "agreed": self._is_agreed,
            "problem": self._refusal or self._problem,
            "round": self._round_name or None,
            "dropped": dict(link.datagrams.dropped) if link is not None else {},
            "nodes": [
                {
                    "node": node,
                    "state": item.state,
                    "address": item.address,
                    "seen": item.age,
                    "problem": item.problem,
                    "ranks": {model.name: _ranks(config, model, node) for model in self._models().values()},
                }
                for node, item in enumerate(self._nodes)
            ],
        }

    def sentence(self) -> str | None:
        """For systemctl status: what is not as it should be among the nodes, None if nothing is."""
        if self._config is None:
            return None
        missing = [
            f"node {node} {item.state}" for node, item in enumerate(self._nodes)
            if node != self._config.node_rank and item.state != "loaded"
        ]  # fmt: skip
        if problem := self._refusal or self._problem:
            return f"cluster: {problem}"
        if missing:
            return f"cluster: {', '.join(missing)}"
        return None if self._is_agreed else "cluster: the nodes are to agree"

    # Internals.

    def _look_at_models(self, config: ClusterConfig) -> None:
        """Describes what is here now, and holds back what the nodes have not agreed on."""
        models = self._models()
        self._mine = describe(config, models.values())
        digest = digest_of(self._mine)
        if digest != self._digest:
            self._digest, self._is_agreed = digest, False
        different = {item.model: item for item in reversed(self._differences) if item.model is not None}
        for model in models.values():
            agreed = self._agreed.get(model.name) == describe_model(model)
            if model.name in different:
                model.held_back = HeldBack(f"the nodes differ: {different[model.name]}", final=True)
            elif agreed or config.ready == "local":
                model.held_back = None
            else:
                model.held_back = NOT_YET

    def _beat(self) -> Beat:
        assert self._config is not None
        busy = not self._loaded or any(model.state in ("queued", "loading") for model in self._models().values())
        state: Reported = "loading" if busy else "loaded"
        if self._leaving:
            state = "leaving"
        node, nodes = self._config.node_rank, self._config.nodes
        return Beat(node, nodes, self._boot, state, self._digest or "-", attempt=self._attempt, problem=self._end)

    async def _open(self, config: ClusterConfig) -> Link:
        said = False
        while True:
            try:
                link = await open_link(config, self._beat, self._wake.set)
                if said:
                    self._problem = None
                return link
            except WeightCacheError as error:
                if not self._to_lose:
                    raise
                if not said:
                    _log.error("%s; what is here is served, and it is tried again", error)
                    said = True
                self._problem = str(error)
                self._tell()
            await asyncio.sleep(config.keep_alive)

    def _step(self, link: Link) -> None:
        assert self._config is not None
        found = link.step(time.monotonic())
        for bad, sentence in changes(self._nodes, found.nodes, self._config.node_rank):
            _log.log(logging.WARNING if bad else logging.INFO, "cluster: %s", sentence)
        different = [item.state for item in found.nodes] != [item.state for item in self._nodes]
        self._nodes = found.nodes
        if found.refusal != self._refusal:
            if found.refusal is not None:
                _log.error("cluster: %s", found.refusal)
            self._refusal, different = found.refusal, True
        if found.round != self._round_name:
            self._begin_round(link, found.round)
        if different:
            self._tell()

    def _begin_round(self, link: Link, name: str) -> None:
        before, self._round, self._round_name = self._round, None, name
        if before is not None:
            if self._meeting:
                _log.info("cluster: a rendezvous is called off, the nodes have changed")
            before.cancel()
        self._meeting = bool(name)
        if name:
            self._round = asyncio.create_task(self._meet(link, name, before), name="rendezvous")

    async def _meet(self, link: Link, name: str, before: asyncio.Task[None] | None) -> None:
        assert self._config is not None
        config, said = self._config, self._mine
        if before is not None:
            await asyncio.wait([before])  # its process has the port
        job = Job(
            host=link.host,
            port=link.port,
            node=config.node_rank,
            nodes=config.nodes,
            round=name,
            seconds=max(config.timeout, MEET_SECONDS),
            description=to_text(said),
        )
        try:
            await Round().run(job, lambda found: self._met(found, said))
        except (WeightCacheError, OSError) as error:
            if str(error) != self._problem:
                _log.error("cluster: the rendezvous failed: %s", error)
            self._problem, self._meeting = str(error), False
            self._failure = error if isinstance(error, _FOR_GOOD) else None
            self._tell()
            await asyncio.sleep(config.keep_alive)  # before another one, for which this node asks
            self._attempt += 1
            self._wake.set()

    def _met(self, texts: list[str], said: Description) -> None:
        """Compares what the nodes have said, `said` of this one among it."""
        assert self._config is not None
        found = [parse(text, node) for node, text in enumerate(texts)]
        self._meeting = False
        self._differences = differences(found)
        names = {item.model for item in self._differences}
        agreed = {name: item for name, item in said["models"].items() if name not in names}
        self._agreed = {**{name: item for name, item in self._agreed.items() if name not in names}, **agreed}
        self._is_agreed = not self._differences and self._digest == digest_of(said)
        if self._differences:
            self._problem = "the nodes differ: " + "; ".join(map(str, self._differences))
            _log.error("cluster: %s", self._problem)
        else:
            self._problem = self._failure = None
            _log.info("cluster: %d nodes agree on %d models", len(found), len(said["models"]))
        self._look_at_models(self._config)
        self._tell()

    async def _end_round(self) -> None:
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    def _tell(self) -> None:
        self._news.set()
        self._changed()

    def _late(self, config: ClusterConfig) -> TimedOut:
        """The error with the nodes that did not come."""
        address = f"{config.master_addr}:{config.master_port}"
        missing = []
        for node, item in enumerate(self._nodes):
            where = f", last heard of at {item.address}" if item.address and node else ""
            reason = f": {item.problem}" if item.problem else ""
            if node != config.node_rank and item.state in ("unknown", "gone"):
                said = "gone" if item.state == "gone" else "never heard of"
                missing.append(f"node {node} ({said}{where}{reason})")
        if config.node_rank and self._nodes[0].state in ("unknown", "gone"):
            missing = ["node 0, which does not answer there; do all nodes have its address and the same master_port?"]
        waited_for = (
            ", ".join(missing) or f"the nodes to agree ({self._refusal or self._problem or 'no reason is known'})"
        )
        return TimedOut(path=address, seconds=config.timeout, waited_for=waited_for)


def _ranks(config: ClusterConfig, model: Model, node: int) -> list[int]:
    """The first and the last rank of the model on a node."""
    counts = config.counts(model.config.parallel.world)
    first = sum(counts[:node])
    return [first, first + counts[node] - 1]
