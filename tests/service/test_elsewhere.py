"""When a publisher whose ranks are on several nodes waits in vain. Times are numbers: no clock is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcached.config import load_config
from weightcached.service.elsewhere import Elsewhere, failure
from weightcached.service.membership import Seen
from weightcached.service.models import Model

HERE, LOADING, LOADED = Seen("loading"), Seen("loading"), Seen("loaded")
CLUSTER = '[cluster]\nnodes = 3\nnode_rank = 0\nmaster_addr = "h"\nmaster_port = 1\npublisher_port = 2\ntimeout = 10\n'


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Of three ranks on three nodes, which its publisher loads."""
    path = tmp_path / "c.toml"
    text = '[[model]]\nname = "m"\ncheckpoint = "/m"\ntensor_parallel = 3\npublisher = ["engine"]\n'
    path.write_text(text + CLUSTER)
    made = Model(load_config(path).models[0], ("host-0",))
    made.begin()
    return made


def test_all_that_load_are_waited_for(model: Model) -> None:
    """As long as it takes; nothing is to be said."""
    elsewhere = Elsewhere(0, 10.0)
    for now in (0.0, 5.0, 1000.0):
        assert elsewhere.look([model], [HERE, LOADING, LOADING], None, now) is None
        assert elsewhere.sentence() is None


def test_one_that_does_nothing_has_its_time(model: Model) -> None:
    """From when it was first seen idle; one that has begun meanwhile has it again. What is waited for is said."""
    elsewhere = Elsewhere(0, 10.0)
    for now, third in ((0.0, Seen()), (9.0, Seen()), (9.5, LOADING), (10.0, Seen("gone")), (19.9, Seen("gone"))):
        assert elsewhere.look([model], [HERE, LOADING, third], None, now) is None
    assert elsewhere.sentence() == "the publisher of m waits for its ranks on node 2 (gone); have m loaded there too"
    found = elsewhere.look([model], [HERE, LOADING, Seen("gone")], None, 20.0)
    assert found == (model, "waited 10 s for its ranks on node 2 (gone)")
    found = elsewhere.look([model], [HERE, LOADING, Seen("gone")], "nodes = 4", 20.0)
    assert found == (model, "waited 10 s for its ranks on node 2 (gone); nodes = 4")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (Seen("gone", problem="it was stopped"), "it was stopped"),
        (Seen("loaded", problem="m: no room"), "m: no room"),
        (Seen("loaded", problem="n: no room"), None),
        (LOADED, None),
        (Seen("gone"), None),
    ],
)
def test_one_that_has_given_up_is_not_waited_for(model: Model, then: Seen, said: str | None) -> None:
    """If it was loading and says why it does so no more; one that is done, or silent, is no reason yet."""
    elsewhere = Elsewhere(0, 10.0)
    assert elsewhere.look([model], [HERE, then, LOADING], None, 0.0) is None  # of an earlier load
    assert elsewhere.look([model], [HERE, LOADING, LOADING], None, 1.0) is None
    why = f"node 1, which has ranks of it, loads it no more: {said}"
    assert elsewhere.look([model], [HERE, then, LOADING], None, 2.0) == (None if said is None else (model, why))


def test_another_load_begins_anew(model: Model) -> None:
    """What was seen of the nodes while nothing was loaded, or something else, does not count."""
    elsewhere = Elsewhere(0, 10.0)
    assert elsewhere.look([model], [HERE, LOADING, LOADED], None, 0.0) is None
    model.called_off()
    assert elsewhere.look([model], [HERE, LOADED, LOADED], None, 100.0) is None
    assert elsewhere.sentence() is None
    model.begin()
    assert elsewhere.look([model], [HERE, Seen("gone", problem="it was stopped"), LOADED], None, 200.0) is None


def test_what_failed_is_said_in_one_line(model: Model, tmp_path: Path) -> None:
    """Of several models that one first for which other nodes wait."""
    path = tmp_path / "other.toml"
    path.write_text('[[model]]\nname = "alone"\ncheckpoint = "/a"\n')
    alone = Model(load_config(path).models[0], ("host-0",))
    assert failure([alone, model]) is None
    alone.fail(alone.load_failed("x" * 1000))
    said = failure([alone, model])
    assert said is not None and said.startswith("alone: loading alone to host-0 failed: xxx") and len(said) == 300
    alone.fail(alone.load_failed("exit status 1; it said last: Traceback | " + "x" * 300 + " | Error: no head"))
    said = failure([alone, model])
    assert said is not None and said.startswith("alone: ") and said.endswith(" ... Error: no head")
    model.fail(model.load_failed("no\nroom"))
    assert failure([alone, model]) == "m: loading m to host-0 failed: no\\nroom"
