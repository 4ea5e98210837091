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
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ..config import Config
from ..config_cluster import ClusterConfig
from ..errors import ConfigError, MissingDependency, TimedOut, WeightCacheError
from ..meeting import DESCRIPTION_BYTES, Job
from ..text import cut_middle, printable
from .agreement import (
    Description,
    Difference,
    describe,
    describe_differences,
    describe_model,
    differences,
    digest_of,
    not_agreed,
    not_cached,
    parse,
    to_text,
)
from .joint import JointLoad, failure
from .links import Link, open_link
from .membership import PROBLEM_CHARS, PROBLEM_HEAD, Beat, Reported, Seen
from .models import HeldBack, Model
from .nodes import changes, describe_nodes, missing_nodes
from .pace import Pace, PacedLines
from .rounds import Round

NOT_DONE = HeldBack("its load is not over on all nodes", final=False)
MEET_SECONDS = 60.0  # at least, for a rendezvous, in which all nodes that were there take part
STEP_SECONDS = 0.02  # at least between two steps, since others decide how many datagrams come
PACE_SECONDS = 5.0  # or keep_alive, if that is less: between lines, and between processes, after the first ones
LINES = 20  # of the log at once, for each node of the cluster
ROUNDS = 4  # processes one after the other without a pause
_FOR_GOOD = (MissingDependency, ConfigError)  # ends of a rendezvous that the next one would have as well
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
        self._loaded = self._leaving = False
        self._end: str | None = None  # why, as the others are told
        self._boot = secrets.token_hex(8)
        self._attempt = 0
        self._nodes: tuple[Seen, ...] = ()
        self._problem: str | None = None  # what keeps the nodes from agreeing
        self._failure: WeightCacheError | None = None  # of a rendezvous, if another one would fail as well
        self._refusal: str | None = None  # why a node is not counted among them
        self._differences: list[Difference] = []
        self._meeting: float | None = None  # since when a round is under way
        self._agreed: dict[str, Description] = {}  # what each model was when the nodes agreed last
        self._not_cached: list[list[str]] = []  # by node, models that were not cached there then; here: that are not
        self._is_agreed = False
        self._mine: Description = {}
        self._wake = asyncio.Event()
        self._news = asyncio.Event()  # for a start that waits
        self._link: Link | None = None
        self._rounds: set[asyncio.Task[None]] = set()  # the one under way, and those that are being ended
        self._round_name = self._digest = ""
        me, timeout = (self._config.node_rank, self._config.timeout) if self._config is not None else (0, 0.0)
        self.joint = JointLoad(me, timeout, self._wake.set)
        if self._config is not None:
            self._nodes = (Seen(),) * self._config.nodes
            self._not_cached = [[] for _ in self._nodes]
            seconds = min(self._config.keep_alive, PACE_SECONDS)
            self._lines = PacedLines(_log, "cluster", Pace(LINES * self._config.nodes, seconds))
            self._round_pace = Pace(ROUNDS, seconds)

    def models_changed(self) -> None:
        """To be called at each change of a model, or of what is known of the nodes, before workers are told of it."""
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
            meet_first = self._meeting is not None and self._problem is None
            if meet_first or ("loading" in states and not {"unknown", "gone"} & set(states)):
                # They are all there, and one has more to read; or their first meeting is on, which has its own limit.
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
        self._end = cut_middle(printable(f"it failed: {error}"), PROBLEM_CHARS, PROBLEM_HEAD)

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
                        await asyncio.sleep(STEP_SECONDS)  # what comes meanwhile is looked at together
        finally:
            await self._end_rounds()
            if self._link is not None:
                self._leaving, self._end = True, self._end or "it was stopped"
                self._link.say()
                self._link.close()

    def describe(self) -> dict[str, Any] | None:
        """The cluster in a status reply, None without one."""
        if (config := self._config) is None:
            return None
        return {
            "node": config.node_rank,
            "master": config.meets_at,
            "agreed": self._is_agreed,
            "problem": self._shown_problem(),
            "meeting": None if self._meeting is None else round(time.monotonic() - self._meeting, 1),
            "round": self._round_name or None,
            "dropped": dict(self._link.datagrams.dropped) if self._link is not None else {},
            "nodes": describe_nodes(self._nodes, self._ranks_on, self._not_cached),
        }

    def sentence(self) -> str | None:
        """For systemctl status: what is not as it should be among the nodes, None if nothing is."""
        if self._config is None:
            return None
        missing = [
            f"node {node} {item.state}" for node, item in enumerate(self._nodes)
            if node != self._config.node_rank and item.state != "loaded"
        ]  # fmt: skip
        if problem := self._shown_problem():
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
        self._not_cached[config.node_rank] = not_cached(self._mine, among=models)
        not_yet = HeldBack(not_agreed(self._nodes, config.node_rank, self._refusal, self._problem), final=False)
        for model in models.values():
            agreed = self._agreed.get(model.name) == describe_model(model)
            if different := [item for item in self._differences if item.concerns(model.name)]:
                model.held_back = HeldBack(describe_differences(different[:1]), final=True)
            elif model.is_ending and model.config.meeting is not None:
                model.held_back = NOT_DONE
            elif agreed or config.ready == "local":
                model.held_back = None
            else:
                model.held_back = not_yet

    def _beat(self) -> Beat:
        assert self._config is not None
        busy = not self._loaded or any(model.state in ("queued", "loading") for model in self._models().values())
        state: Reported = "loading" if busy else "loaded"
        if self._leaving:
            state = "leaving"
        return Beat(
            self._config.node_rank,
            self._config.nodes,
            self._boot,
            state,
            self._digest or "-",
            attempt=self._attempt,
            problem=self._end or failure(self._models().values(), self.joint.model),
            publisher_port=self._config.publisher_port or 0,
            load=self.joint.load,
        )

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
                here = Seen("loaded" if self._loaded else "loading")
                self._nodes = tuple(here if node == config.node_rank else Seen() for node in range(config.nodes))
                self.joint.look(self._nodes, None, time.monotonic())
                self._tell()
            await asyncio.sleep(config.keep_alive)

    def _step(self, link: Link) -> None:
        assert self._config is not None
        found = link.step(time.monotonic())
        for bad, news in changes(self._nodes, found.nodes, self._config.node_rank):
            self._lines.say(logging.WARNING if bad else logging.INFO, news)
        before, after = ([(item.state, item.problem) for item in nodes] for nodes in (self._nodes, found.nodes))
        different = before != after
        self._nodes = found.nodes
        if found.refusal != self._refusal:
            if found.refusal is not None:
                self._lines.say(logging.ERROR, found.refusal)
            self._refusal, different = found.refusal, True
        if found.round != self._round_name:
            self._begin_round(link, found.round)
        waiting = self.joint.sentence()
        self.joint.look(found.nodes, found.refusal, time.monotonic())
        different = different or waiting != self.joint.sentence()
        if different:
            self._tell()

    def _begin_round(self, link: Link, name: str) -> None:
        if self._meeting is not None:
            self._lines.say(logging.INFO, "a rendezvous is called off, the nodes have changed")
        self._call_off_rounds()
        self._round_name, self._meeting = name, time.monotonic() if name else None
        if name:
            self._run_beside(self._meet(link, name))

    def _call_off_rounds(self) -> None:
        for task in self._rounds:
            if not task.cancelling():  # a second time it would not wait for its process any more
                task.cancel()

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as a task, which is cancelled when another round begins."""
        task = asyncio.create_task(work, name="rendezvous")
        self._rounds.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._rounds.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("cluster: a defect in the rendezvous", exc_info=error)
            self._failed(f"unexpected {type(error).__name__} in the rendezvous; the log has more")

    async def _meet(self, link: Link, name: str) -> None:
        """One rendezvous. One that fails is shown, and another one is asked for."""
        assert self._config is not None
        try:
            if before := self._rounds - {asyncio.current_task()}:
                await asyncio.wait(before)  # their processes have the port
            if (left := self._round_pace.take(time.monotonic())) > 0:
                await asyncio.sleep(left)
                self._round_pace.take(time.monotonic())
            await self._rendezvous(self._config, link, name)
        except (WeightCacheError, OSError) as error:
            if name != self._round_name:
                return
            if str(error) != self._problem:
                _log.error("cluster: the rendezvous failed: %s", error)
            self._failure = error if isinstance(error, _FOR_GOOD) else None
            self._failed(str(error))

    def _failed(self, problem: str) -> None:
        self._problem, self._meeting = problem, None
        self._run_beside(self._ask_again())
        self._tell()

    async def _ask_again(self) -> None:
        assert self._config is not None
        await asyncio.sleep(self._config.keep_alive)
        self._attempt += 1
        self._wake.set()

    async def _rendezvous(self, config: ClusterConfig, link: Link, name: str) -> None:
        said = self._mine
        description = to_text(said)
        if len(description) > DESCRIPTION_BYTES:
            problem = f"{len(description)} bytes to tell the other nodes, at most {DESCRIPTION_BYTES} are sent"
            raise ConfigError(file=str(self._file), problem=f"[cluster]: {problem}; give it fewer models")
        job = Job(
            host=link.host,
            port=link.port,
            node=config.node_rank,
            nodes=config.nodes,
            round=name,
            seconds=max(config.timeout, MEET_SECONDS),
            description=description,
        )
        await Round().run(job, lambda found: self._met(found, said))

    def _met(self, texts: list[str], said: Description) -> None:
        """Compares what the nodes have said, `said` of this one among it."""
        found = [parse(text, node) for node, text in enumerate(texts)]
        self._meeting = None
        self._not_cached = [not_cached(item, among=said["models"]) for item in found]
        self._differences = differences(found)
        agreed = {**self._agreed, **said["models"]}
        unequal = {name for name in agreed if any(item.concerns(name) for item in self._differences)}
        self._agreed = {name: item for name, item in agreed.items() if name not in unequal}
        self._is_agreed = not self._differences and self._digest == digest_of(said)
        if self._differences:
            self._problem = describe_differences(self._differences)
            _log.error("cluster: %s", self._problem)
        else:
            self._problem = self._failure = None
            _log.info("cluster: %d nodes agree on %d models", len(found), len(said["models"]))
        self._tell()

    async def _end_rounds(self) -> None:
        while self._rounds:
            self._call_off_rounds()
            await asyncio.wait(self._rounds)

    def _shown_problem(self) -> str | None:
        """What is wrong among the nodes, for people; None if nothing is."""
        return self._refusal or self._problem or self.joint.sentence()

    def _ranks_on(self, node: int) -> dict[str, list[int]]:
        """The first and the last rank of each model there."""
        assert self._config is not None
        shares = {item.name: self._config.share(item.config.parallel.world, node) for item in self._models().values()}
        return {name: [share.start, share.stop - 1] for name, share in shares.items()}

    def _tell(self) -> None:
        self.models_changed()
        self._news.set()
        self._changed()

    def _late(self, config: ClusterConfig) -> TimedOut:
        """The error with the nodes that did not come."""
        problem = self._refusal or self._problem or "no reason is known"
        who = missing_nodes(self._nodes, config.node_rank, self._refusal) if self._link is not None else ""
        waited_for = who or f"the nodes to agree ({problem})"
        return TimedOut(path=config.meets_at, seconds=config.timeout, waited_for=waited_for)
