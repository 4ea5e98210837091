"""client/duplicates.py: engines that publish the same end with one copy. On host memory."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.client.engine import KEY, Engine, addresses, contents, same
from tests.client.handmade import DEVICE, RunningWorker
from weightcached.client import duplicates
from weightcached.client import publish as publishing
from weightcached.client.duplicates import is_reserved, wait_for_publisher
from weightcached.client.publish import publish
from weightcached.client.weights import Weights
from weightcached.errors import DeviceFull, ModelError, TimedOut
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Reserve

SHARE: dict[str, Any] = {"key": KEY, "device": DEVICE, "if_cached": "share"}


@pytest.fixture(autouse=True)
def _let_go(worker: RunningWorker) -> Iterator[None]:
    """Leases end before their worker does, so that the keeper does not wait for another one."""
    yield
    gc.collect()


def engine() -> Engine:
    """One of several that are the same."""
    torch.manual_seed(1)
    return Engine()


@contextmanager
def reserved(worker: RunningWorker, name: str = "engine", nbytes: int = 64) -> Iterator[Connection]:
    """Another publisher that has room for `name`."""
    with Connection.open(worker.path, device=DEVICE) as connection:
        connection.request(Reserve(name, nbytes))[1].close()
        yield connection


def generations(worker: RunningWorker) -> list[int]:
    return [shard["generation"] for shard in worker.status()["shards"]]


def test_the_second_engine_runs_from_the_first_ones_copy(worker: RunningWorker) -> None:
    """Its tensors are the same objects with the same values, on the slabs of generation 1, where no other name and
    nothing of its own is; a tensor that it writes stays its own."""
    first = engine()
    values = contents(first)
    one = publish("engine", first, **SHARE)
    second = engine()
    objects = dict(second.named_parameters(remove_duplicate=False))
    old, storage = addresses(second), second.fused.untyped_storage()._weak_ref()

    two = publish("engine", second, **SHARE)

    assert (one.generation, two.generation, generations(worker)) == (1, 1, [1])
    assert same(contents(second), values)
    assert all(second.get_parameter(name) is objects[name] for name in objects)
    assert not set(addresses(second).values()) & set(old.values())
    assert second.embed.weight.data_ptr() == two["embed.weight"].data_ptr()
    assert second.column.data_ptr() == second.fused.data_ptr() + 16 and second.column.stride() == (16, 1)
    assert second.router.bias is second.bias and second.router.part.data_ptr() == second.bias.data_ptr() + 16
    second.seen.add_(1)
    assert not torch.equal(second.seen, first.seen) and torch.equal(two["seen"], first.seen)
    del objects
    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def test_the_shared_weights_are_whole(worker: RunningWorker) -> None:
    """They sleep, wake and are copied as those of `publish` and `attach` are."""
    publish("engine", engine(), **SHARE)
    second = engine()
    values = contents(second)
    weights = publish("engine", second, **SHARE)
    at = addresses(second)
    worker.wait_released(weights.unmap)
    weights.remap()
    assert addresses(second) == at and same(contents(second), values)
    worker.wait_released(weights.private_copy)
    assert same(contents(second), values) and not set(addresses(second).values()) & set(at.values())


def test_the_default_is_the_next_generation(worker: RunningWorker) -> None:
    """Who does not ask for it gets no other copy; nor does another key, another name is no matter."""
    publish("engine", engine(), key=KEY, device=DEVICE)
    assert publish("engine", engine(), key=KEY, device=DEVICE).generation == 2
    assert publish("engine", engine(), **{**SHARE, "key": {**KEY, "layers": [0, 2]}}).generation == 3
    other = publish("other", engine(), **{**SHARE, "key": {**KEY, "layers": (0, 2)}})
    assert (other.manifest.model, other.generation) == ("engine", 3)


def test_engines_at_the_same_time(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them reserve before any has looked who else has: one publishes, three take its copy."""
    engines = [engine() for _ in range(4)]
    values = contents(engines[0])
    together, reserve = threading.Barrier(4), publishing._reserve
    first: set[int] = set()

    def reserve_together(*arguments: Any) -> Any:
        if threading.get_ident() in first:
            return reserve(*arguments)
        first.add(threading.get_ident())
        together.wait(20)  # all have looked, and nobody has reserved
        try:
            return reserve(*arguments)
        finally:
            together.wait(20)

    monkeypatch.setattr(publishing, "_reserve", reserve_together)
    found: list[Weights] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(publish("engine", one, **SHARE))) for one in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({weights.generation for weights in found}) == 1 and len(found) == 4
    assert len(generations(worker)) == 1 and len(worker.leases()) == 4
    assert all(same(contents(one), values) for one in engines)


def test_who_publishes_is_waited_for(worker: RunningWorker) -> None:
    """One that reserved before is waited for; when it gives up, the next one publishes."""
    with reserved(worker) as other:
        timer = threading.Timer(0.2, other.close)
        timer.start()
        weights = publish("engine", engine(), **SHARE)
        timer.join()
    assert weights.generation == 2 and generations(worker) == [2]


def test_the_wait_for_a_publisher_ends(worker: RunningWorker) -> None:
    """At the timeout it is given up, with nothing moved and no room taken."""
    one = engine()
    before = addresses(one)
    with reserved(worker), pytest.raises(TimedOut, match="the publisher of engine, which has reserved room"):
        publish("engine", one, **SHARE, timeout=0.2)
    assert addresses(one) == before
    wait_for_publisher(DEVICE, ["engine"], time.monotonic() + 10)
    assert generations(worker) == []


def test_no_room_beside_who_publishes(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other one's room is what is missing it is waited for, and its copy needs none."""
    first, take = publish("engine", engine(), **SHARE), duplicates.take_duplicate
    looked: list[bool] = []

    def nothing_yet(*arguments: Any) -> Weights | None:
        looked.append(True)
        return take(*arguments) if len(looked) > 1 else None  # not published when it has looked first

    def full(*arguments: Any) -> Any:
        raise DeviceFull(device=DEVICE, needed=1, free=0, evictable=0, limit=0, others=0, holders=[], advice="")

    monkeypatch.setattr(publishing, "take_duplicate", nothing_yet)
    monkeypatch.setattr(publishing, "_reserve", full)
    assert publish("engine", engine(), **SHARE).generation == first.generation
    with pytest.raises(DeviceFull):
        looked.clear()
        publish("engine", engine(), **{**SHARE, "key": {**KEY, "layers": [0, 2]}})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda one: one.fused.data[0, 1].zero_(), "query has other bytes"),
        (lambda one: setattr(one, "bias", None), "only one of the two has bias"),
        (lambda one: setattr(one.bias, "data", torch.zeros(9)), r"bias is F32 \[8\] there, F32 \[9\] here"),
        (lambda one: setattr(one.query, "data", one.fused.data[4:]), "what shares bytes with .* lies in another way"),
    ],
    ids=["bytes", "names", "shape", "elsewhere"],
)
def test_other_weights_are_not_taken(worker: RunningWorker, change: Callable[[Engine], object], problem: str) -> None:
    """Whatever is not the same is an error that names it: nothing has moved, and there is no lease."""
    first = publish("engine", engine(), **SHARE)
    one = engine()
    change(one)
    values, before = contents(one), addresses(one)

    def refused() -> None:
        with pytest.raises(ModelError, match=problem):
            publish("engine", one, **SHARE)

    worker.wait_released(refused)
    assert addresses(one) == before and same(contents(one), values)
    assert generations(worker) == [first.generation]


def test_views_without_a_place(worker: RunningWorker) -> None:
    """A part that is laid out a second time, since no entry may begin there, is a part again; what has no name but lies
    in the same storage gets memory of its own, so that the storage goes."""

    def made() -> torch.nn.Module:
        torch.manual_seed(2)
        flat, module = torch.randn(256), torch.nn.Module()
        for name, part in {"whole": flat[:64], "part": flat[1:9]}.items():
            module.register_parameter(name, torch.nn.Parameter(part.data))
        module.beside = flat.data[128:130]
        return module

    publish("model", made(), key=KEY, device=DEVICE)
    module = made()
    values, beside = contents(module), module.beside.clone()
    storage = module.whole.untyped_storage()._weak_ref()
    weights = publish("model", module, **SHARE)
    assert same(contents(module), values) and torch.equal(module.beside, beside)
    assert module.whole.data_ptr() == weights["whole"].data_ptr()
    assert module.part.data_ptr() == module.whole.data_ptr() + 4
    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def test_a_publisher_that_takes_too_long(worker: RunningWorker) -> None:
    """The wait for who has reserved room ends, and says for whom it was; other names are not waited for."""
    with reserved(worker, "slow"):
        status = wait_for_publisher(DEVICE, ["other"], time.monotonic() + 10)
        assert is_reserved(status, ["slow"]) and not is_reserved(status, ["slow"], before=1)
        assert is_reserved(status, ["slow"], before=2)
        with pytest.raises(TimedOut, match="the publisher of slow, which has reserved room"):
            wait_for_publisher(DEVICE, ["slow"], time.monotonic() + 0.2)


def test_a_worker_that_does_not_number(worker: RunningWorker) -> None:
    """Of an older version: nobody is known to have come first, and each publishes."""
    assert not is_reserved({"reservations": [{"model": "engine"}]}, ["engine"], before=5)
