"""models: what has become of a configured model, through every order of events."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from weightcached.config import Config, ModelConfig
from weightcached.errors import CheckpointChanged, CheckpointError, ConfigError, DeviceError, DeviceFull, LoadFailed
from weightcached.service import models
from weightcached.service.models import HeldBack, Model, start_failure, summary
from weightcached.service.spec import spec_of

ERROR = CheckpointError(file="/models/m/model.safetensors", problem="is not there")


def config(**options: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "checkpoint": "/models/m", **options})


def new(**options: object) -> Model:
    return Model(config(**options), ("host-0",))


def pair() -> Model:
    """A model of two ranks."""
    return Model(config(tensor_parallel=2), ("host-0", "host-1"))


def load(model: Model) -> None:
    model.queue()
    model.begin()


def cached(model: Model) -> None:
    load(model)
    model.published("host-0", 1, 100)


def failed(model: Model) -> None:
    load(model)
    model.fail(ERROR)


Steps = tuple[Callable[[Model], object], ...]
PUBLISH_2: Callable[[Model], object] = lambda model: model.published("host-0", 2, 200)  # noqa: E731
GONE: Callable[[Model], object] = lambda model: model.gone("host-0")  # noqa: E731
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
        ((cached, GONE), "absent", None, False),
        ((failed,), "failed", None, True),
        ((failed, GONE), "absent", None, False),
        ((failed, Model.queue), "queued", None, False),
        ((failed, cached), "cached", 1, False),
        ((cached, Model.queue), "queued", 1, False),
        ((cached, load), "loading", 1, False),
        ((cached, load, PUBLISH_2), "cached", 2, False),
        ((cached, load, FAIL), "cached", 1, True),
        ((cached, load, FAIL, GONE), "absent", None, False),
        ((cached, load, Model.called_off), "cached", 1, False),
        ((cached, load, GONE), "loading", None, False),
        ((cached, load, GONE, FAIL), "failed", None, True),
        ((cached, load, GONE, PUBLISH_2), "cached", 2, False),
        ((cached, load, GONE, Model.called_off), "absent", None, False),
        ((cached, Model.queue, GONE), "queued", None, False),
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
    assert (model.state, model.generation_on("host-0"), model.error is not None) == (state, generation, error)
    assert (model.nbytes > 0) == model.complete == (generation is not None)


def begin(model: Model) -> None:
    model.queue()
    model.begin()


def rank(number: int, generation: int, weights: str = "a") -> Callable[[Model], object]:
    """That rank of a pair is published, of these weights."""
    return lambda model: model.published(f"host-{number}", generation, 100, weights)


def drop(number: int) -> Callable[[Model], object]:
    """That rank of a pair is evicted."""
    return lambda model: model.gone(f"host-{number}")


BOTH = (begin, rank(0, 1), rank(1, 1))


@pytest.mark.parametrize(
    ("steps", "state", "ranks_cached", "generations"),
    [
        pytest.param((begin, rank(0, 1)), "loading", 1, [1, None], id="one of two"),
        pytest.param(BOTH, "cached", 2, [1, 1], id="both"),
        pytest.param((begin, rank(1, 4), rank(0, 1)), "cached", 2, [1, 4], id="each device counts for itself"),
        pytest.param((begin, FAIL), "failed", 0, [None, None], id="none"),
        pytest.param((begin, rank(0, 1), FAIL), "failed", 0, [None, None], id="the second rank fails"),
        pytest.param((begin, rank(0, 1), FAIL, drop(0)), "absent", 0, [None, None], id="what was left is evicted"),
        pytest.param((begin, rank(0, 1), FAIL, *BOTH), "cached", 2, [1, 1], id="loaded again after that"),
        pytest.param((*BOTH, begin), "loading", 2, [1, 1], id="again, nothing published yet"),
        pytest.param((*BOTH, begin, rank(0, 2)), "loading", 1, [2, 1], id="again, one replaced"),
        pytest.param((*BOTH, begin, rank(0, 2), rank(1, 2)), "cached", 2, [2, 2], id="again, both replaced"),
        pytest.param((*BOTH, begin, FAIL), "cached", 2, [1, 1], id="again, and failed before it published"),
        pytest.param((*BOTH, begin, rank(0, 2), FAIL), "failed", 0, [None, 1], id="again, and failed half-way"),
        pytest.param((*BOTH, begin, Model.called_off), "cached", 2, [1, 1], id="again, and called off"),
        pytest.param((*BOTH, begin, rank(0, 2), Model.called_off), "absent", 1, [2, 1], id="called off half-way"),
        pytest.param(
            (begin, rank(0, 1), Model.begin, rank(0, 2)), "loading", 1, [2, None], id="tried again after half of it"
        ),
        pytest.param(
            (begin, rank(0, 1), Model.begin, rank(0, 2), rank(1, 1)), "cached", 2, [2, 1], id="the second try succeeds"
        ),
        pytest.param((*BOTH, drop(1)), "absent", 1, [1, None], id="one is evicted"),
        pytest.param((*BOTH, drop(1), rank(1, 2)), "cached", 2, [1, 2], id="and published again"),
        pytest.param((*BOTH, drop(0), drop(1)), "absent", 0, [None, None], id="both are evicted"),
        pytest.param((*BOTH, rank(0, 2)), "cached", 2, [2, 1], id="an engine publishes the same weights"),
        pytest.param((*BOTH, rank(0, 2, "b")), "absent", 1, [2, 1], id="an engine publishes a rank of others"),
        pytest.param((*BOTH, rank(0, 2, "b"), rank(1, 2, "b")), "cached", 2, [2, 2], id="and the other one as well"),
        pytest.param(
            (begin, rank(0, 1), rank(0, 2, "b"), rank(1, 1)), "loading", 1, [2, 1], id="an engine publishes in mid load"
        ),
    ],
)
def test_a_group_is_there_when_every_rank_of_one_load_is(
    steps: Steps, state: str, ranks_cached: int, generations: list[int | None]
) -> None:
    """Ranks of two loads never make a whole model; what was whole before a load stays so until the load publishes."""
    model = pair()
    for step in steps:
        step(model)
    described = model.describe()
    assert (described["state"], described["ranks_cached"], described["generations"]) == (
        state,
        ranks_cached,
        generations,
    )
    assert described["ranks"] == 2
    assert described["nbytes"] == (100 * sum(number is not None for number in generations) or None)


def test_a_failure_half_way_names_the_rank() -> None:
    """The sentence says how many ranks were published, which one was not, where, and why; they do not count any more,
    and are named to who evicts them. A failure before that names the rank of its device, if it has one."""
    model = pair()
    for step in (begin, rank(0, 7)):
        step(model)
    assert model.fail(ERROR) == [("host-0", 7)]
    assert (model.ranks_cached, model.nbytes, model.state) == (0, 0, "failed")
    assert isinstance(model.error, LoadFailed)
    assert str(model.error) == (
        "loading m to host-0, host-1 failed: 1 of 2 ranks were published and are evicted again, "
        "rank 1 on host-1 was not: /models/m/model.safetensors: is not there"
    )
    model.gone("host-0")  # the eviction says what is known
    for step in (begin, FAIL):
        step(model)
    assert model.error is ERROR
    full = DeviceFull(device="host-1", needed=2, free=1, evictable=0, limit=1, others=0, holders=[], advice="wait")
    begin(model)
    assert model.fail(full) == []
    assert str(model.error).startswith("loading m to host-0, host-1 failed: rank 1 on host-1: host-1 has no room")
    assert model.may_be_tried_again


@pytest.mark.parametrize("devices", [("host-0",), ("host-0", "host-1")])
def test_a_publisher_that_fails_after_all_is_published(devices: tuple[str, ...]) -> None:
    """What it has published counts no more, and is named to who evicts it, whoever uses it; what others have published
    stays, and so does what was there before it published. Several ranks are not whole until the next load."""
    model = Model(config(tensor_parallel=len(devices), publisher=["engine"]), devices)
    load(model)
    for place, device in enumerate(devices):
        model.published(device, 5 + place, 100, "a")
    model.called_off()
    for own in ((), devices):  # nothing was published this time
        load(model)
        assert model.fail(ERROR, own=own) == []
        assert (model.state, model.whole) == ("cached", True)
    load(model)
    for place, device in enumerate(devices):
        model.published(device, 7 + place, 100, "b")
    assert model.state == "loading"
    late = model.load_failed("the publisher of rank 0 ended by exit status 1")
    assert model.fail(late, own=set(devices)) == [(device, 7 + place) for place, device in enumerate(devices)]
    assert (model.state, model.ranks_cached, model.nbytes) == ("failed", 0, 0)
    assert model.whole == (len(devices) == 1)
    assert "generation 7 on host-0" in str(model.error)
    assert str(model.error).endswith(", is evicted again: the publisher of rank 0 ended by exit status 1")
    load(model)
    for device in devices:
        model.published(device, 9, 100, "c")
    model.called_off()
    assert (model.state, model.whole, model.error) == ("cached", True, None)


def test_other_devices_have_nothing_of_the_model() -> None:
    """Moved, swapped or widened, a model is absent until it is loaded again: rank n is not what lies on its device."""
    for devices, sizes in ((("host-1", "host-0"), 2), (("host-0", "host-2"), 2), (("host-0",), 1)):
        model = pair()
        for step in BOTH:
            step(model)
        model.configure(config(tensor_parallel=sizes), devices)
        assert (model.state, model.ranks_cached, model.nbytes) == ("absent", 0, 0)
        assert model.generation_on("host-0") is None
        model.published(devices[0], 2, 100)
        assert model.complete == (len(devices) == 1)


def test_the_same_devices_keep_what_was_there() -> None:
    """Another checkpoint, dtype or cut for the same devices: the generation before stays until the load publishes."""
    for changed in ({"checkpoint": "/models/other"}, {"dtype": "float16"}, {"tensor_parallel": 1, "data_parallel": 2}):
        model = pair()
        for step in BOTH:
            step(model)
        before = model.spec
        model.configure(config(**{"tensor_parallel": 2, **changed}), ("host-0", "host-1"))
        assert model.spec != before
        assert (model.state, model.ranks_cached) == ("cached", 2)
        begin(model)
        model.fail(ERROR)
        assert (model.state, model.ranks_cached, model.error) == ("cached", 2, ERROR)


def test_a_failure_ends_with_what_failed() -> None:
    """With another checkpoint in the config a failed model is absent, to be asked for; else the failure stands."""
    model = new()
    failed(model)
    model.configure(config(preload=False), ("host-0",))
    assert (model.state, model.error) == ("failed", ERROR)
    model.configure(config(checkpoint="/models/other"), ("host-0",))
    assert (model.state, model.error) == ("absent", None)


def test_the_summary_is_one_line_for_all() -> None:
    """What loads comes first, then what is served and how much, then what is cached but not given out, or failed."""
    loading, there, broken = new(name="big"), new(), new(name="broken")
    load(loading)
    cached(there)
    failed(broken)
    text = "loading big, reading its headers; serving m (1 of 3 models, 0.0 GB); failed: broken"
    assert summary([loading, there, broken]) == text
    there.held_back = HeldBack("the nodes have not agreed", final=False)
    text = "loading big, reading its headers; serving nothing yet (0 of 3 models, 0.0 GB); held back: m; failed: broken"
    assert summary([loading, there, broken]) == text
    for model in (loading, broken):  # they have nothing to hold back
        model.held_back = there.held_back
    assert summary([loading, there, broken]) == text
    assert summary([]) == "serving nothing yet (0 of 0 models, 0.0 GB)"


def test_a_start_fails_for_good_or_for_now() -> None:
    """What another start would find again is the config's fault (78); a file that changed meanwhile is not (1)."""
    good_for = Config()
    failure = start_failure(new(), ERROR, good_for)
    assert (type(failure), failure.exit_code) == (ConfigError, 78)
    assert "model m: " in str(failure)
    changed = CheckpointChanged(file="/models/m/model.safetensors", problem="changed while it was read")
    assert start_failure(new(), changed, good_for).exit_code == 1


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
    model.published("host-0", 1, 100)
    assert model.sentence() == "m cached"
    model = new(publisher=["x"])
    load(model)
    assert model.sentence() == "loading m by its publisher"


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        ((load, PUBLISH_2), "loading"),
        ((load, PUBLISH_2, Model.called_off), "cached"),
        ((load, Model.called_off), "absent"),
        ((load, PUBLISH_2, FAIL), "cached"),
        ((load, PUBLISH_2, GONE, Model.called_off), "absent"),
        ((PUBLISH_2,), "cached"),
        ((load, PUBLISH_2, Model.called_off, load, Model.called_off), "cached"),
    ],
)
def test_a_publisher_is_loading_until_it_has_ended(steps: Steps, state: str) -> None:
    """Its memory is its own until then, and its exit status decides. What an engine publishes by itself is there at
    once, and its shard counts while the command is still to end."""
    model = new(publisher=["x"])
    for step in steps:
        step(model)
    assert model.state == state
    assert (model.nbytes == 200) == (state in ("cached", "loading"))


def test_the_worker_is_told_state_progress_and_reason() -> None:
    """What a client hears while the model is not there, and what may be evicted for others."""
    model = new()
    said = {"state": "absent", "progress": 0.0, "reason": None, "whole": True, "spec": None}
    evictable = {"retry": False, "pin": False, "keep": False, "replace": "beside"}
    assert model.for_worker() == {**said, **evictable}
    failed(model)
    said["spec"] = model.load_spec  # until its process has ended
    assert model.for_worker() == {
        **said, "state": "failed", "reason": "/models/m/model.safetensors: is not there", **evictable,
    }  # fmt: skip
    model.configure(config(pin=True, replace="evict-first"), ("host-0",))
    model.keep = True
    assert model.for_worker() == {
        **model.for_worker(), "retry": False, "pin": True, "keep": True, "replace": "evict-first",
    }  # fmt: skip


def test_what_is_loaded_together_is_kept_until_all_of_it_is_done() -> None:
    """Preloads, and what is loaded with them; others may go meanwhile. The last one's end, however it ends, ends it."""
    preloaded, first, second, other = (new(preload=number == 0) for number in range(4))
    together = [preloaded, first, second, other]
    cached(preloaded)
    models.keep_together(together, [first, second])
    assert [model.keep for model in together] == [True, True, True, False]
    for model in (first, second):
        model.queue()
    assert not models.release_kept(together)
    cached(first)
    second.begin()
    other.queue()
    assert not models.release_kept(together)
    second.fail(ERROR)
    assert models.release_kept(together)
    assert not any(model.keep for model in together)
    assert not models.release_kept(together)


def test_what_passes_by_itself_may_be_tried_again() -> None:
    """No room, or a killed loader, comes and goes, unlike what is wrong with a checkpoint: a client that waits has such
    a load begun anew. A failure that left an older generation cached is an operator's business."""
    full = DeviceFull(
        device="host-0", needed=2, free=1, evictable=0, limit=2, others=0, holders=[], advice="evict a model"
    )
    model = new()
    load(model)
    model.fail(full)
    assert (model.state, model.may_be_tried_again, model.for_worker()["retry"]) == ("failed", True, True)
    model.queue()
    assert not model.may_be_tried_again
    failed(model)
    assert not model.may_be_tried_again
    load(model)
    model.fail(model.load_failed("killed"), killed=True)
    assert (model.state, model.may_be_tried_again) == ("failed", True)
    model.lost("host-0", ERROR)
    assert (model.state, model.may_be_tried_again) == ("failed", False)
    cached(model)
    load(model)
    model.fail(full)
    assert (model.state, model.may_be_tried_again) == ("cached", False)


def moved(*devices: str) -> Callable[[Model], object]:
    """The config names these devices now, one rank each."""
    return lambda model: model.configure(config(tensor_parallel=len(devices)), devices)


@pytest.mark.parametrize(
    ("steps", "whole"),
    [
        pytest.param((), False, id="new"),
        pytest.param((begin, rank(0, 1)), False, id="one of two"),
        pytest.param(BOTH, True, id="both"),
        pytest.param((*BOTH, begin), True, id="again, nothing published yet"),
        pytest.param((*BOTH, begin, FAIL), True, id="again, and failed before it published"),
        pytest.param((*BOTH, begin, Model.called_off), True, id="again, and called off"),
        pytest.param((*BOTH, begin, rank(0, 2)), False, id="again, one replaced"),
        pytest.param((*BOTH, begin, rank(0, 2), FAIL), False, id="again, and failed half-way"),
        pytest.param((*BOTH, rank(0, 2, "b")), False, id="one is of other weights"),
        pytest.param((*BOTH, begin, rank(0, 2), FAIL, Model.queue), False, id="queued after that"),
        pytest.param((*BOTH, begin, rank(0, 2), FAIL, begin, rank(1, 2)), False, id="other halves of two loads"),
        pytest.param((*BOTH, begin, rank(0, 2), FAIL, begin, rank(0, 3), rank(1, 2)), True, id="loaded after that"),
        pytest.param((*BOTH, begin, rank(0, 2), Model.called_off), False, id="called off half-way"),
        pytest.param((*BOTH, begin, rank(0, 2), rank(1, 2)), True, id="again, both replaced"),
        pytest.param((*BOTH, drop(1)), False, id="one is evicted"),
        pytest.param((*BOTH, drop(1), Model.queue), False, id="one is evicted, a load to come"),
        pytest.param((*BOTH, begin, drop(1)), False, id="one is evicted in mid load"),
        pytest.param((*BOTH, begin, drop(1), FAIL), False, id="one is evicted in mid load, which fails"),
        pytest.param((*BOTH, begin, drop(1), rank(0, 2), rank(1, 2), begin), True, id="loaded after that, and again"),
        pytest.param((*BOTH, drop(1), begin, rank(1, 2)), False, id="one is evicted and loaded again"),
        pytest.param((*BOTH, begin, rank(0, 2), FAIL, drop(0)), False, id="one of a mixture is evicted"),
        pytest.param((*BOTH, moved("host-1", "host-0"), begin), True, id="moved, nothing published yet"),
        pytest.param((*BOTH, moved("host-1", "host-0"), begin, rank(0, 2)), False, id="moved, one published"),
        pytest.param((*BOTH, moved("host-1", "host-0"), begin, rank(0, 2), rank(1, 2)), True, id="moved, and loaded"),
        pytest.param((begin, rank(0, 1), FAIL, moved("host-0", "host-2")), False, id="half of it moved"),
        pytest.param((begin, rank(0, 1), FAIL, moved("host-0")), True, id="one rank has no other"),
    ],
)
def test_a_model_is_whole_when_its_workers_hold_the_ranks_of_one_load(steps: Steps, whole: bool) -> None:
    """From the first rank that a load publishes to its last one the model is not whole, however the load ends; an old
    set stays whole until then, and a model of one rank always is."""
    model = pair()
    for step in steps:
        step(model)
    assert model.for_worker()["whole"] == model.whole == whole
    assert model.for_worker()["replace"] == ("beside" if whole else "evict-first")


def test_a_status_describes_the_whole_model() -> None:
    """Bytes as integers, the checkpoint as text, an error as on the wire."""
    model = new(preload=False)
    assert model.describe() == {
        "model": "m", "devices": ["host-0"], "ranks": 1, "ranks_cached": 0, "state": "absent",
        "checkpoint": str(Path("/models/m")), "preload": False, "pin": False, "publisher": [], "generations": [None],
        "nbytes": None, "bytes_done": 0, "bytes_to_read": None, "load_seconds": None, "error": None,
        "held_back": None, "held_back_for_good": False,
    }  # fmt: skip
    cached(model)
    model.load_seconds = 1.5
    load(model)
    model.fail(ERROR)
    described = model.describe()
    assert (described["state"], described["generations"], described["nbytes"]) == ("cached", [1], 100)
    assert described["error"]["code"] == "bad-checkpoint"
    assert described["load_seconds"] == 1.5


LOST = DeviceError(device="host-0", problem="the device is lost: Xid 79")


@pytest.mark.parametrize(
    ("steps", "state", "concerned"),
    [
        ((), "absent", False),
        ((cached,), "failed", True),
        ((load,), "failed", True),
        ((Model.queue,), "failed", True),
        ((cached, load), "failed", True),
        ((cached, load, FAIL), "failed", True),
        ((failed,), "failed", False),
        ((cached, GONE), "absent", False),
    ],
)
def test_a_lost_device_fails_what_is_there_or_on_its_way(steps: Steps, state: str, concerned: bool) -> None:
    """Its shard is gone and its load in vain; a model that nobody has loaded stays absent, another failure stays."""
    model = new()
    for step in steps:
        step(model)
    assert model.device_lost("host-0", LOST) == concerned
    assert (model.state, model.generation_on("host-0"), model.error is LOST) == (state, None, concerned)


def test_a_lost_device_leaves_the_other_ranks() -> None:
    """They stay with who has them, and are given out by name no more: the lost rank will be of the next load."""
    model = pair()
    for step in (begin, rank(0, 1), rank(1, 1)):
        step(model)
    assert model.device_lost("host-1", LOST)
    assert (model.state, model.ranks_cached, model.generation_on("host-0"), model.whole) == ("failed", 1, 1, False)
    for step in (begin, rank(0, 2), rank(1, 2)):
        step(model)
    assert (model.state, model.error) == ("cached", None)


def test_a_lost_shard_is_no_eviction() -> None:
    """The model has failed, and says why; but a load of the next generation that is under way goes on."""
    model = new()
    cached(model)
    model.lost("host-0", ERROR)
    assert (model.state, model.error, model.generation_on("host-0")) == ("failed", ERROR, None)
    model.forgive()
    assert (model.state, model.error) == ("absent", None)

    cached(model)
    load(model)
    model.lost("host-0", ERROR)
    assert (model.state, model.error) == ("loading", None)


def test_a_model_that_is_held_back_is_given_out_to_nobody_by_name() -> None:
    """What clients are told is the reason: to wait while it may pass, to give up when it will not. It stays cached."""
    model = new()
    cached(model)
    assert model.given_out
    model.held_back = HeldBack("not agreed on yet", final=False)
    assert not model.given_out and model.whole
    told = model.for_worker()
    assert (told["whole"], told["state"], told["reason"]) == (False, "loading", "not agreed on yet")
    assert told["held_back"] is True
    model.held_back = HeldBack("the nodes differ", final=True)
    told = model.for_worker()
    assert (told["whole"], told["state"], told["reason"], told["retry"]) == (False, "failed", "the nodes differ", False)
    assert told["replace"] == "beside"
    assert (model.describe()["state"], model.describe()["held_back"]) == ("cached", "the nodes differ")


def test_a_failed_load_beside_it_does_not_hide_that_a_model_is_held_back() -> None:
    """The generation before stays cached: that it is not given out is what its clients are to know."""
    model = new()
    cached(model)
    load(model)
    model.fail(ERROR)
    model.held_back = HeldBack("not agreed on yet", final=False)
    told = model.for_worker()
    assert (told["state"], told["reason"], told["held_back"]) == ("loading", "not agreed on yet", True)


def test_a_model_that_is_not_there_is_not_held_back() -> None:
    """It is loading, absent or failed, which comes first."""
    model = new()
    model.held_back = HeldBack("not agreed on yet", final=False)
    for state in ("absent", "loading"):
        told = model.for_worker()
        assert (told["state"], told["reason"], "held_back" in told) == (state, None, False)
        load(model)


def test_other_devices_are_told_where_a_model_belongs() -> None:
    """And that the service publishes nothing of it there; with several ranks also which of them is where."""
    model = new()
    begin(model)
    assert model.for_others() == {"belongs": ["host-0"], "spec": None}
    told = pair().for_others()
    assert told["belongs"] == ["host-0", "host-1"]
    assert told["group"] == pair().for_worker()["group"]


def test_workers_know_by_which_load_the_service_publishes() -> None:
    """The one that was begun last, also when the config has changed meanwhile, or an engine has published the model."""
    model = new()
    begin(model)
    first = model.load_spec
    begin(model)
    spec = model.load_spec
    assert first != spec and spec_of({"spec": first}) == spec_of({"spec": spec}) == model.spec.digest
    model.configure(config(checkpoint="/models/other"), ("host-0",))
    model.published("host-0", 1, 100)
    assert (model.state, model.for_worker()["spec"]) == ("cached", spec)
