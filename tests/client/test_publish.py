"""client/publish.py: an engine's own tensors become the shared copy, whole or not at all. On host memory."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch

import weightcached
from tests.client.engine import KEY, Engine, addresses, contents, same
from tests.client.handmade import RunningWorker
from weightcached.client import storages
from weightcached.client.publish import publish
from weightcached.shard.manifest import Scalar
from weightcached.verifier import verify
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(1)
    return Engine()


def test_the_engine_runs_from_the_shared_copy(worker: RunningWorker, engine: Engine) -> None:
    """Values, objects, classes, shapes and strides stay; shared memory is the slab's, and another client sees it."""
    before, objects = contents(engine), dict(engine.named_parameters(remove_duplicate=False))
    old = addresses(engine)

    with publish("engine", engine, key=KEY, device="host-0") as weights:
        assert same(contents(engine), before)
        assert all(engine.get_parameter(name) is objects[name] for name in objects)
        assert not set(addresses(engine).values()) & set(old.values())
        assert engine.head.weight is engine.embed.weight and engine.embed.weight.requires_grad
        assert engine.fused.data_ptr() == engine.query.data_ptr() == weights["fused"].data_ptr()
        assert engine.column.stride() == weights["column"].stride() == (16, 1)
        assert same(weights, before)
        assert engine.seen.data_ptr() != weights["seen"].data_ptr()  # private: the engine writes to its own
        with weightcached.attach("engine", device="host-0", key=KEY) as other:
            assert same(other, before)
            assert other.table.aliases == {"head.weight": "embed.weight"}
            assert other["table"].stride() == engine.table.stride()
            assert other.generation == weights.generation == 1


def test_what_plain_objects_hold_moves_along(worker: RunningWorker, engine: Engine) -> None:
    """A captured parameter and a view of it are on the slab as well, so that nothing keeps the old memory."""
    publish("engine", engine, key=KEY, device="host-0")

    assert engine.router.bias is engine.bias
    assert engine.router.part.data_ptr() == engine.bias.data_ptr() + 16
    assert torch.equal(engine.router.part, engine.bias[4:8])


def test_old_memory_is_freed(worker: RunningWorker) -> None:
    """The storages that the tensors lay in have no owner left; that of a private view is copied out of the rest."""
    flat = torch.randn(1024)
    large, small = flat[:1000], flat[1016:1020]
    tensors = {"large": torch.nn.Parameter(large), "small": torch.nn.Parameter(small)}
    del large, small
    storage = flat.untyped_storage()._weak_ref()
    del flat
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    weights = publish("flat", tensors, key=KEY, device="host-0", private=lambda item: item.name == "small")

    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    assert same(tensors, values) and same(weights, values)
    assert tensors["large"].data_ptr() == weights["large"].data_ptr()
    tensors["small"].data.zero_()
    assert same(weights, values)


def test_a_view_whose_base_nobody_has(worker: RunningWorker) -> None:
    """What autograd remembers a view to be a view of moves along, so that the old storage goes."""
    flat = torch.randn(1024)
    storage = flat.untyped_storage()._weak_ref()
    tensors = {"part": flat[4:1000]}
    del flat

    weights = publish("flat", tensors, key=KEY, device="host-0")

    gc.collect()
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    assert torch.equal(weights["part"], tensors["part"])


def test_status_names_the_engine_until_its_tensors_go(worker: RunningWorker) -> None:
    """The publisher holds a lease, which ends with the last tensor on the slabs."""
    held: list[Any] = [Engine()]
    held.append(publish("engine", held[0], key=KEY, device="host-0"))
    assert worker.leases() == [os.getpid()]

    held.pop()
    gc.collect()
    assert worker.leases() == [os.getpid()]

    def drop() -> None:
        held.clear()
        gc.collect()

    worker.wait_released(drop)
    assert worker.leases() == []


def test_many_slabs(worker: RunningWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small slabs each holds some tensors, one larger than a slab has its own; private ones are in the last."""
    monkeypatch.setattr(storages, "SLAB_BYTES", 600)
    before = contents(engine)

    weights = publish("engine", engine, key=KEY, device="host-0")

    assert len(weights.manifest.slabs) >= 3  # by their addresses some lie together
    last = len(weights.manifest.slabs) - 1
    assert {entry.name for entry in weights.table.tensors if entry.slab == last} == {"seen", "table"}
    assert same(contents(engine), before) and same(weights, before)
    with weightcached.attach("engine", device="host-0", key=KEY) as other:
        assert same(other, before)


def test_inference_tensors(worker: RunningWorker) -> None:
    """Tensors made in inference mode move too, and stay such tensors, whatever mode `publish` runs in."""
    with torch.inference_mode():
        tensors = {"a": torch.randn(8)}
    tensors["b"] = torch.randn(8)
    values = {name: tensor.clone() for name, tensor in tensors.items()}

    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            weights = publish("model", tensors, key=KEY, device="host-0")
            assert same(tensors, values)
        assert tensors["a"].is_inference() and not tensors["b"].is_inference()
        assert tensors["a"].data_ptr() == weights["a"].data_ptr()
        repr(tensors)


def test_published_bytes_can_be_verified(worker: RunningWorker, engine: Engine) -> None:
    """Checksums are recorded for every tensor, views included, and the slabs' bytes agree."""
    publish("engine", engine, key=KEY, device="host-0")
    with Connection.open(worker.path, device="host-0") as connection:
        _, fds = connection.request(Attach("engine"))
        with fds:
            manifest, *slabs = fds
            report = verify("engine", "host-0", manifest, slabs)
    assert report["differ"] == [] and report["tensors"] == 8


def test_tensor_attributes_and_scalars(worker: RunningWorker, engine: Engine) -> None:
    """A named plain attribute is carried as one; scalars come with their types."""
    scalars: dict[str, Scalar] = {"scale": 0.5, "layers": 3, "fast": True, "kind": "x", "nothing": None}

    weights = publish("engine", engine, key=KEY, device="host-0", tensor_attributes=["extra"], attributes=scalars)

    with weightcached.attach("engine", device="host-0", key=KEY) as other:
        assert torch.equal(other["extra"], engine.extra)
        assert other.table.attributes == scalars
        assert [type(value) for value in other.table.attributes.values()] == [float, int, bool, str, type(None)]
        assert next(entry.role for entry in other.table.tensors if entry.name == "extra") == "attribute"
    assert engine.extra.data_ptr() == weights["extra"].data_ptr()


def test_a_misaligned_view_is_laid_out_on_its_own(worker: RunningWorker) -> None:
    """A part that begins where no entry may is there twice; the engine's own stays a view."""
    whole = torch.randn(64)
    tensors = {"whole": whole, "part": whole[1:9]}
    values = {name: tensor.clone() for name, tensor in tensors.items()}

    weights = publish("model", tensors, key=KEY, device="host-0")

    assert same(weights, values) and same(tensors, values)
    assert tensors["part"].data_ptr() == tensors["whole"].data_ptr() + 4


def test_the_next_publish_is_the_next_generation(worker: RunningWorker, engine: Engine) -> None:
    """Of one name the later one is current; the first engine goes on from its own mapping."""
    first = Engine()
    values = contents(first)
    one = publish("engine", first, key=KEY, device="host-0")
    two = publish("engine", engine, key=KEY, device="host-0")

    assert (one.generation, two.generation) == (1, 2)
    assert same(contents(first), values)
    states = {shard["generation"]: shard["state"] for shard in worker.status()["shards"]}
    assert states == {1: "draining", 2: "cached"}


def test_unmap_and_remap(worker: RunningWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of several slabs sleep and wake at the same addresses."""
    monkeypatch.setattr(storages, "SLAB_BYTES", 600)
    weights, before = publish("engine", engine, key=KEY, device="host-0"), contents(engine)
    old = addresses(engine)

    worker.wait_released(weights.unmap)
    assert worker.leases() == []
    weights.remap()

    assert addresses(engine) == old and same(contents(engine), before)


def test_the_publisher_takes_its_weights_back(worker: RunningWorker) -> None:
    """`private_copy` of what `publish` returned reaches the engine's own tensors, and ends the lease."""
    engine = Engine()
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    weights = publish("engine", engine, key=KEY, device="host-0")
    assert worker.leases() == [os.getpid()]

    worker.wait_released(weights.private_copy)

    assert worker.leases() == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())


def test_scratch_memory_is_not_kept(worker: RunningWorker, engine: Engine) -> None:
    """What the engine holds beside its weights is freed when it lets it go, and may be of any kind."""
    engine.scratch = torch.zeros(1000)
    engine.sparse = torch.eye(3).to_sparse()
    scratch = weakref.ref(engine.scratch)
    weights = publish("engine", engine, key=KEY, device="host-0")

    del engine.scratch
    assert scratch() is None
    weights.private_copy()
