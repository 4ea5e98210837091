"""How a node meets the others: its rounds, with links and rendezvous processes that are stood in for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weightcached.config import load_config
from weightcached.errors import ConnectionFailed, TimedOut, WeightCacheError
from weightcached.meeting import Job
from weightcached.service import cluster as cluster_module
from weightcached.service.agreement import describe, to_text
from weightcached.service.cluster import Cluster
from weightcached.service.links import Step
from weightcached.service.membership import Beat, Datagrams, Load, Seen
from weightcached.service.models import Model

LOADED = Seen("loaded", "127.0.0.1", 0.0)
KEEP_ALIVE = 0.1
KEY = {"content": "c0ffee", "layout": "checkpoint"}


class StandIn:
    """A link that is told what it knows, and rounds of which a test decides how they end."""

    host = "127.0.0.1"
    port = 29650

    def __init__(self) -> None:
        self.datagrams = Datagrams("x", 2)
        self.known = Step((LOADED, LOADED), "", None)
        self.wake: Callable[[], None] = lambda: None
        self.beat: Callable[[], Beat]
        self.running = 0
        self.most_running = 0
        self.jobs: list[Job] = []
        self.ends: asyncio.Queue[Any] = asyncio.Queue()  # of rounds, in order: an error to raise, or descriptions
        self.started = asyncio.Event()
        self.stepped = asyncio.Event()
        self.let_end = asyncio.Event()  # whether a round that is called off ends
        self.let_end.set()

    def step(self, now: float) -> Step:
        self.stepped.set()
        return self.known

    def due_in(self, now: float) -> float:
        return 30.0

    def say(self) -> None: ...

    def close(self) -> None: ...

    def knows(self, **fields: Any) -> None:
        self.known = self.known._replace(**fields)
        self.wake()

    async def run(self, job: Job, met: Callable[[list[str]], None]) -> None:
        """In the place of `Round.run`."""
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.jobs.append(job)
        self.started.set()
        try:
            end = await self.ends.get()
            if isinstance(end, Exception):
                raise end
            met(end)
        finally:
            while not self.let_end.is_set():  # as a process that is being killed, whoever loses patience
                await self.let_end.wait()
            self.running -= 1


Status = dict[str, Any]


class Running:
    """A cluster that runs: its status, as soon as something holds of it."""

    def __init__(self, made: Cluster, link: StandIn, news: asyncio.Event, models: dict[str, Model]) -> None:
        self.cluster = made
        self.link = link
        self.models = models
        self._news = news

    async def asks_again(self, beyond: int) -> None:
        """Returns when its beat says that it has failed once more."""
        async with asyncio.timeout(10):
            while self.link.beat().attempt == beyond:
                self.link.stepped.clear()
                await self.link.stepped.wait()

    def status(self) -> Status:
        found = self.cluster.describe()
        assert found is not None
        return found

    async def until(self, holds: Callable[[Status], object]) -> Status:
        async with asyncio.timeout(10):
            while not holds(found := self.status()):
                self._news.clear()
                await self._news.wait()
        return found


@pytest.fixture
def make_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``async with make_running() as running``: node 0 of two, whose model is cached."""

    @asynccontextmanager
    async def made(*more: str, opens: Any = None) -> AsyncIterator[Running]:
        path = tmp_path / "node.toml"
        lines = ["[[model]]", 'name = "m"', 'checkpoint = "/m"', "tensor_parallel = 2"]
        lines += [line for line in more if "timeout" not in line]
        lines += ["[cluster]", "nodes = 2", "node_rank = 0", 'master_addr = "127.0.0.1"', "master_port = 29650"]
        lines += [line for line in more if "timeout" in line]
        path.write_text("\n".join([*lines, f"keep_alive = {KEEP_ALIVE}", "publisher_port = 29700", ""]))
        config = load_config(path)
        models = {"m": Model(config.models[0], ("host-0",))}
        models["m"].published("host-0", 1, 100, dict(KEY))
        link, news = StandIn(), asyncio.Event()

        async def open_link(_: Any, beat: Callable[[], Beat], wake: Callable[[], None]) -> StandIn:
            link.beat, link.wake = beat, wake
            return link

        monkeypatch.setattr(cluster_module, "open_link", opens or open_link)
        monkeypatch.setattr(cluster_module, "Round", lambda: link)
        cluster = Cluster(config, lambda: models, news.set, to_lose=opens is not None)
        running = Running(cluster, link, news, models)
        running.cluster.models_changed()
        task = asyncio.create_task(running.cluster.run())
        await asyncio.sleep(0)
        try:
            yield running
        finally:
            link.let_end.set()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert link.running == 0  # nothing is left when it has ended

    return made


def texts(running: Running, change: Callable[[dict[str, Any]], None] = lambda _: None) -> list[str]:
    """What both nodes say, node 1 with a change."""
    config = running.cluster._config
    assert config is not None
    said = [describe(config, running.models.values()) for _ in range(2)]
    said[1]["models"]["m"]["ranks"] = [1, 1]
    change(said[1])
    return list(map(to_text, said))


def test_nodes_that_agree(make_running: Any) -> None:
    """The model is given out then, and not before; the status has what is not cached elsewhere."""

    async def scene() -> None:
        async with make_running() as running:
            assert not running.models["m"].given_out
            running.link.ends.put_nowait(texts(running, lambda said: said["models"]["m"].update(key=None, bytes=[])))
            running.link.knows(round="b/1")
            await running.until(lambda status: status["agreed"])
            assert running.models["m"].given_out
            assert running.cluster.sentence() is None
            assert [node["absent"] for node in running.status()["nodes"]] == [[], ["m"]]

    asyncio.run(scene())


@pytest.mark.parametrize("ready", ["all", "local"])
def test_a_load_that_is_not_over_is_held_back(make_running: Any, ready: str) -> None:
    """By a publisher, whose ranks on other nodes may still fail; also if what it has published is what was agreed on.
    What the load before has brought is given out until then."""

    async def scene() -> None:
        async with make_running('publisher = ["engine"]', f'ready = "{ready}"\ntimeout = 60') as running:
            model = running.models["m"]
            running.link.ends.put_nowait(texts(running))
            running.link.knows(round="b/1")
            await running.until(lambda status: status["agreed"])
            model.begin()
            running.cluster.models_changed()
            assert model.given_out
            model.published("host-0", 2, 100, dict(KEY))
            running.cluster.models_changed()
            assert (model.held_back.reason, model.held_back.final) == ("its load is not over on all nodes", False)
            model.called_off()
            running.cluster.models_changed()
            assert model.given_out

    asyncio.run(scene())


def test_a_model_that_is_held_back_says_who_is_missing(make_running: Any) -> None:
    """As the nodes come and go; what changes nothing of that is no news. Once they have agreed it is given out."""

    async def scene() -> None:
        async with make_running() as running:
            model = running.models["m"]

            async def said(nodes: tuple[Seen, ...], reason: str) -> None:
                running.link.knows(nodes=nodes)
                await running.until(lambda _: model.held_back.reason.endswith(reason))

            gone = Seen("gone", "10.0.0.2", 9.0, "it was stopped")
            await said((LOADED, Seen()), "; missing: node 1 (never heard of)")
            await said((LOADED, gone), "; missing: node 1 (gone, last heard of at 10.0.0.2: it was stopped)")
            before = model.held_back
            running.link.knows(nodes=(LOADED, replace(gone, age=12.0)))
            running.cluster.models_changed()
            assert model.held_back == before
            await said((LOADED, Seen("loading")), "; still loading: node 1")
            await said((LOADED, LOADED), "have not agreed on it yet")
            running.link.ends.put_nowait(TimedOut(path="p", seconds=1.0, waited_for="node 1"))
            running.link.knows(round="b/1")
            await said((LOADED, LOADED), "; p: waited 1.0 s for node 1")
            running.link.ends.put_nowait(texts(running))
            running.link.knows(round="b/2")
            await running.until(lambda status: status["agreed"])
            assert model.held_back is None

    asyncio.run(scene())


def test_what_is_not_cached_here_is_what_is_so_at_once(make_running: Any) -> None:
    """Of this node the status does not wait for the next time that all meet."""

    async def scene() -> None:
        async with make_running() as running:
            running.link.ends.put_nowait(texts(running))
            running.link.knows(round="b/1")
            await running.until(lambda status: status["agreed"])
            assert [node["absent"] for node in running.status()["nodes"]] == [[], []]
            running.models["m"].gone("host-0")
            running.cluster.models_changed()
            assert [node["absent"] for node in running.status()["nodes"]] == [["m"], []]
            running.models["m"].published("host-0", 2, 100, dict(KEY))
            running.cluster.models_changed()
            assert [node["absent"] for node in running.status()["nodes"]] == [[], []]

    asyncio.run(scene())


@pytest.mark.parametrize("error", [RecursionError("too deep"), TimedOut(path="p", seconds=1.0, waited_for="node 1")])
def test_a_round_that_fails_is_seen_and_tried_again(
    make_running: Any, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Whatever it failed with, a defect of this program too: in the status, in the log, and by another attempt."""

    async def scene() -> None:
        async with make_running() as running:
            running.link.ends.put_nowait(error)
            running.link.knows(round="b/1")
            said = (await running.until(lambda status: status["problem"]))["problem"]
            assert said == str(error) if isinstance(error, WeightCacheError) else "unexpected RecursionError" in said
            attempt = running.link.beat().attempt
            await running.asks_again(beyond=attempt)
            running.link.ends.put_nowait(texts(running))
            running.link.knows(round="b/2")
            assert (await running.until(lambda status: status["agreed"]))["problem"] is None

    asyncio.run(scene())
    assert "the rendezvous failed" in caplog.text or "a defect in the rendezvous" in caplog.text


def test_a_start_does_not_wait_for_rounds_that_fail(make_running: Any) -> None:
    """The first one has its own time. When that has failed, so does the start after its time, with the reason."""

    async def scene() -> None:
        async with make_running("timeout = 0.3") as running:
            running.link.knows(round="b/1")
            await running.link.started.wait()
            start = asyncio.create_task(running.cluster.loaded())
            await asyncio.sleep(0.5)
            assert not start.done()
            running.link.ends.put_nowait(TimedOut(path="p", seconds=1.0, waited_for="node 1"))
            await running.until(lambda status: status["problem"])
            running.link.knows(round="b/2")  # which takes as long
            with pytest.raises(TimedOut, match=r"waited 0.3 s for the nodes to agree \(p: waited 1.0 s for node 1\)"):
                await start

    asyncio.run(scene())


def test_a_description_that_is_hostile_ends_nothing(make_running: Any) -> None:
    """Numbers that cannot be written out, names that are none, nothing but brackets: one sentence each."""

    def ranks(said: dict[str, Any]) -> None:
        said["models"]["m"]["ranks"] = [int("9" * 4300), 2]

    def names(said: dict[str, Any]) -> None:
        said["models"]["\ud800\x1b[2J" + "m" * 100_000] = said["models"]["m"]

    async def scene() -> None:
        async with make_running() as running:
            for number, change in enumerate((ranks, names), 1):
                running.link.ends.put_nowait(texts(running, change))
                running.link.knows(round=f"b/{number}")
                said = (await running.until(lambda status: status["problem"]))["problem"]
                assert said.startswith("protocol: node 1 sent a description that is not readable")
                assert said.isprintable() and len(said) < 500

    asyncio.run(scene())


def test_another_version_is_a_difference_of_every_model(make_running: Any) -> None:
    """It may cut otherwise, so nobody gets a model by name; another keep_alive is an error that holds back nothing."""

    def version(said: dict[str, Any]) -> None:
        said["software"]["weightcached"] = "9.9"

    def setting(said: dict[str, Any]) -> None:
        said["cluster"]["keep_alive"] = 9.0

    async def scene() -> None:
        async with make_running() as running:
            model = running.models["m"]
            for number, (change, field) in enumerate(((version, "weightcached"), (setting, "keep_alive")), 1):
                running.link.ends.put_nowait(texts(running, change))
                running.link.knows(round=f"b/{number}")
                found = await running.until(lambda status, field=field: field in (status["problem"] or ""))
                assert found["problem"].startswith(f"the nodes differ: {field} is ") and not found["agreed"]
                assert model.given_out == (field == "keep_alive")
            assert model.held_back is None

    asyncio.run(scene())


def test_a_round_waits_for_those_that_are_being_ended(make_running: Any) -> None:
    """Their processes have the port until they have ended: also after a moment without a round, and after several."""

    async def scene() -> None:
        async with make_running() as running:
            link = running.link
            link.knows(round="b/1")
            await link.started.wait()
            link.let_end.clear()
            for name in ("", "b/2", "", "b/3"):
                link.knows(round=name)
                await asyncio.sleep(4 * cluster_module.STEP_SECONDS)
            assert [job.round for job in link.jobs] == ["b/1"]
            link.started.clear()
            link.let_end.set()
            await link.started.wait()
            assert [job.round for job in link.jobs] == ["b/1", "b/3"]
            assert link.most_running == 1

    asyncio.run(scene())


def test_rounds_that_others_cause_have_a_pace(make_running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a process: whoever has them begin over and over gets a few at once, and then one now and then."""
    monkeypatch.setattr(cluster_module, "STEP_SECONDS", 0.0)

    async def scene() -> None:
        async with make_running() as running:
            for number in range(40):
                running.link.knows(round=f"b/{number}")
                await asyncio.sleep(0.002)
            assert len(running.link.jobs) <= cluster_module.ROUNDS + 3

    asyncio.run(scene())


def test_lines_that_others_cause_have_a_pace(
    make_running: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forged signs of life fill no journal; how many lines are left out is said."""
    monkeypatch.setattr(cluster_module, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(cluster_module, "LINES", 5)
    gone = Seen("gone", problem="it was stopped")

    async def scene() -> None:
        async with make_running() as running:
            for number in range(100):
                running.link.knows(nodes=(LOADED, gone if number % 2 else LOADED), refusal=f"nodes = {number}")
                await asyncio.sleep(0)
            await asyncio.sleep(2 * KEEP_ALIVE)
            caplog.clear()
            running.link.knows(refusal="at last")
            await running.until(lambda status: status["problem"] == "at last")

    with caplog.at_level(logging.INFO):
        asyncio.run(scene())
    assert "lines that came too fast are left out" in caplog.text
    assert "cluster: at last" in caplog.text


def test_a_port_that_cannot_be_had_is_what_a_start_waited_for(
    make_running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something to lose it is tried again; until then the status says why, and that this node itself is loaded."""

    async def no_link(*_: Any) -> StandIn:
        raise ConnectionFailed(path="127.0.0.1:29650", problem="is in use")

    async def scene() -> None:
        async with make_running("timeout = 0.2", opens=no_link) as running:
            await running.cluster.loaded()
            found = await running.until(lambda status: status["nodes"][0]["state"] == "loaded")
            assert found["problem"] == "127.0.0.1:29650: is in use"
            assert [node["state"] for node in found["nodes"]] == ["loaded", "unknown"]
            late = running.cluster._late(running.cluster._config)
            assert "waited 0.2 s for the nodes to agree (127.0.0.1:29650: is in use)" in str(late)

    asyncio.run(scene())


def test_too_much_to_tell_is_said_here(make_running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description that the others would refuse is not sent; a start ends with that."""
    monkeypatch.setattr(cluster_module, "DESCRIPTION_BYTES", 100)

    async def scene() -> None:
        async with make_running() as running:
            running.link.knows(round="b/1")
            with pytest.raises(WeightCacheError, match=r"\d+ bytes to tell the other nodes, at most 100 are sent"):
                await running.cluster.loaded()

    asyncio.run(scene())


def test_a_publisher_that_waits_for_other_nodes_is_named(make_running: Any) -> None:
    """A node that came back alone loads what the others have: its ranks would wait for theirs without a word. The load
    is given up when those of another node have ended in vain, and what becomes of it is told there."""

    async def scene() -> None:
        async with make_running('publisher = ["engine"]') as running:
            given_up: list[str] = []
            assert running.status()["problem"] is None and running.link.beat().load is None
            running.cluster.joint.begin("m", given_up.append)
            assert running.link.beat().load.state == "running"
            found = (await running.until(lambda status: status["problem"]))["problem"]
            assert found == "the publisher of m waits for its ranks on node 1 (loaded); have m loaded there too"
            running.link.knows(nodes=(LOADED, Seen("loading", load=Load.after(None, "m"))))
            await running.until(lambda status: status["problem"] is None)
            assert given_up == []
            running.link.knows(nodes=(LOADED, Seen("gone", problem="it has started anew")))
            await running.until(lambda status: status["nodes"][1]["state"] == "gone")
            assert given_up == ["node 1, which has ranks of it, loads it no more: it has started anew"]
            running.cluster.joint.end("failed")
            assert running.link.beat().load.state == "failed"

    asyncio.run(scene())


def test_a_load_that_fails_is_told_to_the_others(make_running: Any) -> None:
    """In its signs of life, until it is loaded: who waits for ranks here need not wait on."""

    async def scene() -> None:
        async with make_running('publisher = ["engine"]') as running:
            model = running.models["m"]
            model.gone("host-0")
            model.queue()
            model.fail(model.load_failed("no\nroom"))
            assert running.link.beat().problem == "m: loading m to host-0 failed: no\\nroom"
            model.queue()
            assert running.link.beat().problem is None

    asyncio.run(scene())
