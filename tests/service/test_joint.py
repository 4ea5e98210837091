"""When a load whose ranks are on several nodes is in vain, and when it is done. Times are numbers: no clock is read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from weightcached.config import load_config
from weightcached.service.joint import JointLoad, failure
from weightcached.service.membership import LOADS_KEPT, Load, Seen
from weightcached.service.models import Model

HERE = Seen("loading")
M = Load.after(None, "m").model
EARLIER, RUNNING, DONE = (Load(M, id, state) for id, state in (("0", "failed"), ("1", "running"), ("1", "done")))
LOADING = Seen("loading", load=RUNNING)
WITHOUT = Seen("loaded")
CLUSTER = '[cluster]\nnodes = 3\nnode_rank = 0\nmaster_addr = "h"\nmaster_port = 1\npublisher_port = 2\ntimeout = 10\n'


class Here:
    """Node 0 of three, which loads m from the start, and why it gave that up."""

    def __init__(self, *before: Seen) -> None:
        """`before`: what the other nodes were seen to do before."""
        self.told = 0
        self.why: list[str] = []
        self.joint = JointLoad(0, 10.0, self.tell)
        if before:
            self.joint.look([HERE, *before], None, 0.0)
        self.joint.begin("m", self.why.append)

    def tell(self) -> None:
        self.told += 1

    def sees(self, *others: Seen, now: float = 0.0, refusal: str | None = None) -> str | None:
        """The reason that looking at the other nodes gives, if it is one to give the load up."""
        self.why.clear()
        self.joint.look([HERE, *others], refusal, now)
        return self.why[0] if self.why else None


async def is_done(here: Here, *others: Seen) -> bool:
    """Whether the load is over, its own ranks being done, when the other nodes are seen like this."""
    waiting = asyncio.create_task(here.joint.others_done())
    await asyncio.sleep(0)
    assert here.sees(*others) is None
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return not waiting.cancelled()


def test_all_that_load_are_waited_for() -> None:
    """As long as it takes; nothing is to be said."""
    here = Here()
    for now in (0.0, 5.0, 1000.0):
        assert here.sees(LOADING, LOADING, now=now) is None
        assert here.joint.sentence() is None


def test_one_that_does_nothing_has_its_time() -> None:
    """From when it was first seen idle; one that loads another model has it again. What is waited for is said."""
    here = Here()
    for now, third in ((0.0, Seen()), (9.0, Seen()), (9.5, HERE), (10.0, Seen("gone")), (19.9, Seen("gone"))):
        assert here.sees(LOADING, third, now=now) is None
    said = "the publisher of m waits for its ranks on node 2 (gone); have m loaded there too"
    assert here.joint.sentence() == said
    assert here.sees(LOADING, Seen("gone"), now=20.0) == "waited 10 s for its ranks on node 2 (gone)"
    here = Here()
    here.sees(LOADING, Seen(), now=0.0)
    why = "waited 10 s for its ranks on node 2 (loaded); m: no room; nodes = 4"
    assert here.sees(LOADING, Seen("loaded", problem="m: no room"), refusal="nodes = 4", now=10.0) == why


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (Seen("gone", problem="it was stopped", load=RUNNING), "it was stopped"),
        (Seen("loaded", problem="m: no room", load=Load(M, "1", "failed")), "m: no room"),
        (Seen("loaded", problem="n: no room", load=Load(M, "1", "failed")), "its load has failed there"),
        (Seen("loaded", load=Load(M, "1", "called off")), "its load was called off there"),
        (Seen("loading", load=Load(M, "2", "running")), "it has begun to load it anew"),
        (HERE, "it has started anew"),
        (Seen("loaded", load=DONE), None),
        (Seen("gone", problem="it was stopped", load=DONE), "it was stopped"),
        (Seen("gone", load=DONE), None),
        (Seen("loading", problem="m: no room", load=Load("n", "2", "running")), "m: no room"),
        (Seen("loading", load=Load("n", "2", "running", ("0",))), "its load has failed there"),
        (Seen("gone", load=Load("n", "2", "running")), "its load has failed there"),
        (Seen("loading", problem="m: of another one", load=Load("n", "2", "running", ("0", "1"))), None),
        (Seen("gone", load=RUNNING), None),
        (Seen(), None),
    ],
)
def test_one_that_has_given_up_is_not_waited_for(then: Seen, said: str | None) -> None:
    """If its ranks ran, and are known not to have ended well; of one that is silent that is not known."""
    here = Here()
    assert here.sees(LOADING, LOADING, now=1.0) is None
    why = None if said is None else f"node 1, which has ranks of it, loads it no more: {said}"
    assert here.sees(then, LOADING, now=2.0) == why
    assert here.sees(then, LOADING, now=3.0) is None  # said once


def test_an_earlier_load_there_is_no_matter() -> None:
    """One which failed, or ended, before the load here began. One that fails after that counts, however fast."""
    failed = Seen("loaded", problem="m: no room", load=EARLIER)
    gone = Seen("gone", problem="it was stopped", load=RUNNING)
    for before in ((failed, gone), ()):
        here = Here(*before)
        assert here.sees(failed, gone) is None
    assert here.sees(Seen("loaded", problem="m: port", load=Load(M, "1", "failed")), gone) is not None
    here = Here(WITHOUT, WITHOUT)
    assert here.sees(Seen("loaded", load=Load(M, "1", "failed")), WITHOUT) is not None


def test_the_other_half_of_a_former_load_is_no_matter() -> None:
    """What failed here is tried again before the other node has given its part up: that it does so then is not of the
    load that has begun, in which it takes part with another one."""
    here = Here()
    assert here.sees(LOADING, LOADING) is None
    here.joint.end("failed")
    here.joint.begin("m", here.why.append)
    for then in (LOADING, Seen("loaded", problem="m: why", load=Load(M, "1", "failed"))):
        assert here.sees(then, LOADING) is None
    assert here.sees(Seen("loading", load=Load(M, "2", "running")), LOADING) is None
    assert here.sees(Seen("loaded", load=Load(M, "2", "failed")), LOADING) is not None


@pytest.mark.parametrize(
    ("others", "done"),
    [
        ((Seen("loaded", load=DONE), Seen("gone", problem="it was stopped", load=DONE)), True),
        ((Seen("loading", load=Load("n", "2", "running", ("1",))), Seen("loaded", load=DONE)), True),
        ((Seen("loaded", load=DONE), LOADING), False),
        ((Seen("loaded", load=DONE), Seen("gone", load=RUNNING)), False),
        ((Seen("loaded", load=DONE), Seen()), False),
    ],
)
def test_a_load_is_over_when_all_that_took_part_are_done(others: tuple[Seen, Seen], done: bool) -> None:
    """However long that of another node takes; one that has gone in the middle may have failed."""

    async def scene() -> None:
        here = Here()
        here.sees(LOADING, LOADING)
        assert await is_done(here, *others) == done

    asyncio.run(scene())


@pytest.mark.parametrize("then", [Seen("gone", problem="it was stopped", load=DONE), HERE])
def test_what_becomes_of_a_node_that_was_done_is_no_matter(then: Seen) -> None:
    """To one that is done as well; to one that is not, its ranks may not be there any more."""

    async def scene() -> None:
        here = Here()
        here.sees(LOADING, LOADING)
        here.sees(Seen("loaded", load=DONE), LOADING)
        assert await is_done(here, then, Seen("loaded", load=DONE))

    asyncio.run(scene())
    here = Here()
    here.sees(LOADING, LOADING)
    here.sees(Seen("loaded", load=DONE), LOADING)
    assert here.sees(then, LOADING) is not None


def test_a_load_of_which_nothing_is_known_any_more_has_failed() -> None:
    """The other node is at another one, and does not name it among those that were good."""
    here = Here()
    here.sees(LOADING, LOADING)
    here.sees(Seen("loaded", load=DONE), LOADING)
    at_another = Seen("loading", load=Load("n", "9", "running", ("5", "6", "7", "8")))
    assert here.sees(at_another, LOADING) is not None


def test_a_node_that_failed_after_it_was_done_has_failed() -> None:
    """Since another one had, of which nothing was heard here."""
    here = Here()
    here.sees(LOADING, LOADING)
    here.sees(Seen("loaded", load=DONE), LOADING)
    assert here.sees(Seen("loaded", problem="m: x", load=Load(M, "1", "failed")), LOADING) is not None


def test_without_node_0_nothing_is_known_of_the_others() -> None:
    """What it has said of them is of then: they have the time of who is silent."""
    joint = JointLoad(1, 10.0, lambda: None)
    why: list[str] = []
    joint.begin("m", why.append)
    joint.look([LOADING, HERE, LOADING], None, 0.0)
    for now in (1.0, 10.9):
        joint.look([Seen("gone", load=RUNNING), HERE, LOADING], None, now)
    assert not why
    said = "the publisher of m waits for its ranks on node 0 (gone), node 2 (gone); have m loaded there too"
    assert joint.sentence() == said
    joint.look([Seen("gone", load=RUNNING), HERE, LOADING], None, 11.0)
    assert why == ["waited 10 s for its ranks on node 0 (gone)"]


def test_of_two_loads_that_wait_for_each_other_one_ends() -> None:
    """A node that is at another model waits for the ranks here, as those here for its own: after its time one of them,
    the same on both, is given up. The other one goes on, and has its full time when that node does nothing."""
    for other, ends in (("0", True), ("zz", False)):
        here = Here()
        busy = Seen("loading", load=Load(other, "2", "running"))
        assert here.sees(busy, LOADING) is None
        said = "the publisher of m waits for its ranks on node 1 (loading another model); have m loaded there too"
        assert here.joint.sentence() == said
        why = "waited 10 s for its ranks on node 1 (loading another model)"
        assert here.sees(busy, LOADING, now=10.0) == (why if ends else None)
        assert here.sees(WITHOUT, LOADING, now=10.0) is None
        assert (here.sees(WITHOUT, LOADING, now=20.0) is None) == ends


def test_a_load_that_is_over_elsewhere_stays_good() -> None:
    """Whatever that node does then, the same model once more among it."""

    async def scene() -> None:
        for after in (Load(M, "2", "running", ("1",)), Load("n", "2", "failed", ("1",))):
            here = Here()
            here.sees(LOADING, LOADING)
            here.sees(Seen("loading", load=after), LOADING)
            here.sees(Seen("loading", load=Load("x", "9", "running", ("3", "4", "5", "6"))), LOADING)
            assert await is_done(here, HERE, Seen("loaded", load=DONE))

    asyncio.run(scene())


def test_a_node_that_is_refused_knows_nothing_of_the_others() -> None:
    """Nor of node 0: what it has heard is of before."""
    joint = JointLoad(1, 10.0, lambda: None)
    why: list[str] = []
    joint.begin("m", why.append)
    joint.look([LOADING, HERE, LOADING], None, 0.0)
    joint.look([LOADING, HERE, LOADING], "node 0 refuses this one", 1.0)
    joint.look([LOADING, HERE, LOADING], "node 0 refuses this one", 11.0)
    assert why == ["waited 10 s for its ranks on node 0 (gone); node 0 refuses this one"]


def test_who_does_not_take_part_is_not_waited_for_at_the_end() -> None:
    """The ranks here have done without it."""

    async def scene() -> None:
        assert await is_done(Here(), HERE, WITHOUT)
        assert await is_done(Here(), Seen(), Seen("gone", load=RUNNING))

    asyncio.run(scene())


def test_the_others_are_told_what_becomes_of_the_load() -> None:
    """At each change; one that fails after it was done, too. Another one has another name."""

    async def scene() -> None:
        here = Here()
        first = here.joint.load
        assert first is not None and (first.model, first.state, here.told) == (M, "running", 1)
        assert first.over == ()
        assert await is_done(here, WITHOUT, WITHOUT)
        assert here.joint.load == Load(M, first.id, "done") and here.told == 2
        here.joint.end("done")
        assert here.told == 2
        here.joint.begin("m", here.why.append)
        here.joint.stop_waiting()
        await here.joint.others_done()
        here.joint.end("failed")
        last = here.joint.load
        assert last is not None and last.state == "failed" and last.id != first.id and here.told == 4
        assert last.over == (first.id,)
        for number in range(2 * LOADS_KEPT):  # those that were good are named, so many of them
            here.joint.begin("n", here.why.append)
            assert here.joint.load.over[0] == first.id or number >= LOADS_KEPT
            assert last.id not in here.joint.load.over
            here.joint.end("done")
        assert len(here.joint.load.over) == LOADS_KEPT

    asyncio.run(scene())


def test_without_a_load_nothing_is_given_up() -> None:
    """Nor said."""
    here = Here()
    here.sees(LOADING, Seen())
    here.joint.end("called off")
    assert here.sees(Seen("loaded", problem="m: no room", load=EARLIER), Seen(), now=100.0) is None
    assert here.joint.sentence() is None


def test_what_failed_is_said_in_one_line(tmp_path: Path) -> None:
    """Of several models that one first which was loaded together with other nodes last."""
    made = []
    for name, text in (
        ("m", 'tensor_parallel = 3\npublisher = ["engine"]\n' + CLUSTER),
        ("alone", ""),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(f'[[model]]\nname = "{name}"\ncheckpoint = "/m"\n{text}')
        made.append(Model(load_config(path).models[0], ("host-0",)))
    model, alone = made
    assert failure([alone, model], "m") is None
    alone.fail(alone.load_failed("x" * 1000))
    said = failure([alone, model], "m")
    assert said is not None and said.startswith("alone: loading alone to host-0 failed: xxx") and len(said) == 300
    alone.fail(alone.load_failed("exit status 1; it said last: Traceback | " + "x" * 300 + " | Error: no head"))
    said = failure([alone, model], "m")
    assert said is not None and said.startswith("alone: ") and said.endswith(" ... Error: no head")
    model.fail(model.load_failed("no\nroom"))
    assert failure([alone, model], "m") == "m: loading m to host-0 failed: no\\nroom"
