"""states: what follows from the service's word on a model. With a worker process: test_handlers."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.errors import LoadFailed, WeightCacheError
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ManifestHead, SlabEntry
from weightcached.worker.states import check_spec, may_retry, why_absent


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ({"state": "loading", "progress": 0.41}, "model-loading", "is still loading on host-0 (41%)"),
        ({"state": "queued"}, "model-loading", "is still loading on host-0 (0%)"),
        ({"state": "loading", "progress": 0.1, "reason": "part", "held_back": False}, "model-loading", "(10%)"),
        (
            {"state": "loading", "progress": 1.0, "reason": "node 1 is missing", "held_back": True},
            "model-held-back",
            "m is cached on host-0 but not given out: node 1 is missing; `weightcachectl status` shows the nodes",
        ),
        ({"state": "failed", "reason": "the nodes differ", "held_back": True}, "model-failed", "the nodes differ"),
        ({"state": "absent"}, "model-not-loaded", "configured for host-0 but not loaded"),
        ({"state": "cached"}, "no-such-model", "no model m on host-0; there: n"),
        ({}, "no-such-model", "no model m on host-0; there: n"),
    ],
)
def test_why_a_model_is_absent(state: dict[str, Any], code: str, said: str) -> None:
    """One error for each state; what is held back has its reason, and is not said to be loading."""
    error = why_absent("m", state, "host-0", ["n"])
    assert isinstance(error, WeightCacheError)
    assert error.code == code and said in str(error)


def test_what_may_be_tried_again() -> None:
    """A failure of which the service says so."""
    assert may_retry({"state": "failed", "retry": True})
    assert not any(may_retry(state) for state in ({}, {"state": "failed"}, {"state": "absent", "retry": True}))


def published(**attributes: Any) -> ManifestHead:
    return ManifestHead(
        "m", 1, "host-0", ShardKey(content="c"), (SlabEntry(4),), 1, "2026-01-01T00:00:00+00:00", attributes=attributes
    )


def test_a_shard_of_another_load_is_refused() -> None:
    """With both specs, and what to do; an engine's own publish has none, and of an unknown model nothing is known."""
    for meant, said in (("now", "the one under way is of spec now"), (None, "none is under way")):
        match = f"it publishes for a load of spec old, and {said}; what is cached stays.*weightcachectl load m"
        with pytest.raises(LoadFailed, match=match):
            check_spec(published(spec="old"), {"spec": meant})
    for head, state in (
        (published(spec="now"), {"spec": "now"}),
        (published(checkpoint="/m"), {"spec": "now"}),
        (published(checkpoint="/m"), {"spec": None}),
        (published(spec="old"), {}),
    ):
        check_spec(head, state)
