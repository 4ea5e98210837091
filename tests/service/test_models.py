"""models: what has become of a configured model, through every order of events."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from weightcached.config import ModelConfig
from weightcached.errors import CheckpointError
from weightcached.service import models
from weightcached.service.models import Model

ERROR = CheckpointError(file="/models/m/model.safetensors", problem="is not there")


def new(**options: object) -> Model:
    return Model(ModelConfig.model_validate({"name": "m", "checkpoint": "/models/m", **options}), "host-0")


def load(model: Model) -> None:
    model.queue()
    model.begin()


def cached(model: Model) -> None:
    load(model)
    model.published(1, 100)


def failed(model: Model) -> None:
    load(model)
    model.fail(ERROR)


Steps = tuple[Callable[[Model], object], ...]
PUBLISH_2: Callable[[Model], object] = lambda model: model.published(2, 200)  # noqa: E731
FAIL: Callable[[Model], object] = lambda model: model.fail(ERROR)  # noqa: E731


@pytest.mark.parametrize(
    ("steps", "state", "generation", "error"),
    [
        ((), "absent", None, False),
        ((Model.queue,), "queued", None, False),
        ((Model.queue, Model.called_off), "absent", None, False),
        ((load,), "loading", None, False),
        ((load, Model.called_off), "absent", None, False),
        ((cached,), "cached", 1, False),
        ((cached, Model.gone), "absent", None, False),
        ((failed,), "failed", None, True),
        ((failed, Model.gone), "absent", None, False),
        ((failed, Model.queue), "queued", None, False),
        ((failed, cached), "cached", 1, False),
        ((cached, Model.queue), "queued", 1, False),
        ((cached, load), "loading", 1, False),
        ((cached, load, PUBLISH_2), "cached", 2, False),
        ((cached, load, FAIL), "cached", 1, True),
        ((cached, load, FAIL, Model.gone), "absent", None, False),
        ((cached, load, Model.called_off), "cached", 1, False),
        ((cached, load, Model.gone), "loading", None, False),
        ((cached, load, Model.gone, FAIL), "failed", None, True),
        ((cached, load, Model.gone, PUBLISH_2), "cached", 2, False),
        ((cached, load, Model.gone, Model.called_off), "absent", None, False),
        ((cached, Model.queue, Model.gone), "queued", None, False),
        ((PUBLISH_2,), "cached", 2, False),
    ],
    ids=lambda value: (
        " ".join(step.__name__.strip("<>") for step in value) or "new" if isinstance(value, tuple) else ""
    ),
)
def test_every_way_through_the_states(steps: Steps, state: str, generation: int | None, error: bool) -> None:
    """A model that is loaded again while it is cached stays available, whether that load succeeds, fails or is called
    off; an eviction in mid load takes the old shard only, and one after a failure takes the failure along."""
    model = new()
    for step in steps:
        step(model)
    assert (model.state, model.generation, model.error is not None) == (state, generation, error)
    assert (model.nbytes is None) == (generation is None)


def test_progress_is_a_share_and_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress runs from 0 to 1 of the bytes to read, the rate is bytes per second since the load began; both begin
    anew with the next load."""
    now = 100.0
    monkeypatch.setattr(models.time, "monotonic", lambda: now)
    model = new()
    model.begin()
    assert (model.progress, model.rate) == (0.0, 0.0)
    model.bytes_to_read = 4_000_000_000
    model.bytes_done = 1_640_000_000
    now += 2.0
    assert model.progress == 0.41
    assert model.rate == 820_000_000
    assert model.sentence() == "loading m 41 %, 0.8 GB/s"
    model.begin()
    assert (model.progress, model.rate, model.bytes_to_read) == (0.0, 0.0, None)


def test_an_empty_checkpoint_has_a_progress() -> None:
    """Nothing to read divides by nothing."""
    model = new()
    model.begin()
    model.bytes_to_read = 0
    assert model.progress == 0.0


def test_the_sentence_says_what_goes_on() -> None:
    """The line of `systemctl status` in every state."""
    model = new()
    assert model.sentence() == "m absent"
    model.queue()
    assert model.sentence() == "m queued"
    model.begin()
    assert model.sentence() == "loading m, reading its headers"
    model.bytes_to_read = 100
    assert re.fullmatch(r"loading m 0 %, 0\.0 GB/s", model.sentence())
    model.published(1, 100)
    assert model.sentence() == "m cached"


def test_the_worker_is_told_state_progress_and_reason() -> None:
    """What a client hears while the model is not there."""
    model = new()
    assert model.for_worker() == {"state": "absent", "progress": 0.0, "reason": None}
    failed(model)
    assert model.for_worker() == {
        "state": "failed", "progress": 0.0, "reason": "/models/m/model.safetensors: is not there",
    }  # fmt: skip


def test_a_status_describes_the_whole_model() -> None:
    """Bytes as integers, the checkpoint as text, an error as on the wire."""
    model = new(preload=False)
    assert model.describe() == {
        "model": "m", "device": "host-0", "state": "absent", "checkpoint": str(Path("/models/m")), "preload": False,
        "generation": None, "nbytes": None, "bytes_done": 0, "bytes_to_read": None, "load_seconds": None, "error": None,
    }  # fmt: skip
    cached(model)
    model.load_seconds = 1.5
    load(model)
    model.fail(ERROR)
    described = model.describe()
    assert (described["state"], described["generation"], described["nbytes"]) == ("cached", 1, 100)
    assert described["error"]["code"] == "bad-checkpoint"
    assert described["load_seconds"] == 1.5
