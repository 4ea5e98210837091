"""client/publish.py: an engine's own tensors become the shared copy, whole or not at all. On host memory."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weightcached
from tests.client.handmade import RunningWorker
from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from weightcached.client import moving, storages
from weightcached.client import publish as publishing
from weightcached.client.modules import NamedTensor
from weightcached.client.publish import checkpoint_files, publish
from weightcached.errors import (
    CheckpointChanged,
    ConnectionLost,
    DeviceFull,
    EngineError,
    NoSuchModel,
    ProtocolError,
    ServiceNotRunning,
)
from weightcached.shard.manifest import Scalar
from weightcached.verifier import verify
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach, Evict

KEY = {"layout": "test-1", "content": "c1"}


class Router:
    """A plain object that captured a parameter when it was made."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.part = bias[4:8]


class Engine(torch.nn.Module):  # type: ignore[misc]
    """Tied, fused, strided and private tensors, and plain objects that hold some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.randn(8, 16), requires_grad=False)
        self.query = torch.nn.Parameter(self.fused.data[:4], requires_grad=False)
        self.column = torch.nn.Parameter(self.fused.data[:, 4:8], requires_grad=False)
        self.embed = torch.nn.Linear(16, 32, bias=False)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.bias = torch.nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.randn(5, 2).T, persistent=False)
        self.register_buffer("none", torch.empty(0, 4))
        self.extra = torch.randn(6, dtype=torch.float64).to(torch.bfloat16)
        self.router = Router(self.bias)


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(1)
    return Engine()


def contents(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def same(found: Any, wanted: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def addresses(module: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.named_parameters(remove_duplicate=False)}


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1], b"x", torch.float16], ids=str)
def test_attributes_that_are_no_scalars(value: Any, engine: Engine) -> None:
    """Nothing is converted: such an attribute is an error that names it."""
    with pytest.raises(EngineError, match=r"attribute layer\.scale is"):
        publish("engine", engine, key=KEY, device="host-0", attributes={"layer.scale": value})


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.empty(3, device="meta"), "a meta tensor"),
        (torch.eye(3).to_sparse(), "not elements in one storage"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "not elements in one storage"),
        (torch.ones(2, dtype=torch.complex128), "has no torch.complex128"),
        (torch.nn.parameter.UninitializedParameter(), "not elements in one storage"),
    ],
    ids=["meta", "sparse", "quantised", "complex128", "lazy"],
)
def test_tensors_that_cannot_be_carried(worker: RunningWorker, tensor: torch.Tensor, says: str) -> None:
    """Such a tensor is named, and nothing has moved or been reserved."""
    other = torch.ones(4)
    before = other.data_ptr()
    with pytest.raises(EngineError, match=says) as caught:
        publish("model", {"good": other, "bad": tensor}, key=KEY, device="host-0")
    assert "bad" in str(caught.value)
    assert other.data_ptr() == before
    assert worker.status()["shards"] == worker.status()["reservations"] == []


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ({"content": "c"}, "layout is None"),
        ({"content": "c", "layout": "checkpoint"}, "a tag of its own"),
        ({"layout": "x"}, "no content"),
        ({**KEY, "colour": 1}, "no field colour"),
        ({**KEY, "tensor_parallel_rank": 1}, "tensor parallel rank 1 of 1"),
        ({**KEY, "dtype": torch.float16}, "dtype is"),
    ],
)
def test_keys_that_are_none(key: dict[str, Any], says: str, engine: Engine) -> None:
    """A key that no client could ask for is refused before anything else."""
    with pytest.raises(EngineError, match=says):
        publish("engine", engine, key=key, device="host-0")


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


def test_refused_before_anything_moves(worker: RunningWorker, engine: Engine) -> None:
    """No room, or a bad name: the engine is as it was, and no descriptor is left."""
    before = addresses(engine)
    large = {"large": torch.empty(2 << 30, dtype=torch.uint8)}
    with NoDescriptorLeaks():
        with pytest.raises(DeviceFull):
            publish("large", large, key=KEY, device="host-0")
        with pytest.raises(ProtocolError, match="no name for a model"):
            publish("a/b", engine, key=KEY, device="host-0")
    assert addresses(engine) == before


def test_no_service(runtime_dir: Path, engine: Engine) -> None:
    """Without a service it fails at once, with nothing changed."""
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    before = addresses(engine)
    with pytest.raises(ServiceNotRunning):
        publish("engine", engine, key=KEY, device="host-0")
    assert addresses(engine) == before


def test_a_service_that_ends_meanwhile(
    start_worker: Callable[[], RunningWorker], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the move it is an error, the engine's tensors are valid, and nothing but their memory is left."""
    worker, before = start_worker(), contents(engine)
    monkeypatch.setattr(publishing, "point", lambda name: worker.stop() if name == "client.publish" else None)

    with NoDescriptorLeaks(), pytest.raises(ConnectionLost):
        publish("engine", engine, key=KEY, device="host-0")

    assert same(contents(engine), before)
    assert "memfd:weightcached-slab" in Path("/proc/self/maps").read_text()
    engine.fused.data = torch.zeros(1)
    del engine
    gc.collect()


def test_a_failure_between_two_slabs(worker: RunningWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slab moved and the next refused, every tensor is valid, and the room is given back."""
    monkeypatch.setattr(storages, "SLAB_BYTES", 600)
    before, fill = contents(engine), moving._fill
    done: list[Any] = []

    def fails_second(*args: Any) -> Any:
        if done:
            raise DeviceFull(device="host-0", needed=1, free=0, evictable=0, limit=0, others=0, holders=[], advice="")
        done.append(fill(*args))
        return done[0]

    monkeypatch.setattr(moving, "_fill", fails_second)
    with NoDescriptorLeaks(), pytest.raises(DeviceFull):
        publish("engine", engine, key=KEY, device="host-0")
    assert same(contents(engine), before)
    assert worker.status()["shards"] == []
    with pytest.raises(NoSuchModel):
        weightcached.attach("engine", device="host-0")


def test_files_and_provisional_content(worker: RunningWorker, engine: Engine, tmp_path: Path) -> None:
    """Without a digest the content stands for the files' stat tuples; changed files are not published."""
    from safetensors.torch import save_file

    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    files = checkpoint_files(tmp_path)
    weights = publish("engine", engine, key={"layout": "x"}, device="host-0", checkpoint=tmp_path, files=files)

    assert weights.key.content.startswith("stat:")
    assert weights.manifest.files == files
    assert weights.manifest.attributes == {"checkpoint": str(tmp_path)}

    os.utime(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointChanged, match=r"model\.safetensors changed"):
        publish("engine", engine, key={"layout": "x"}, device="host-0", checkpoint=tmp_path, files=files)
    assert [shard["generation"] for shard in worker.status()["shards"]] == [1]


def test_unmap_and_remap(worker: RunningWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of several slabs sleep and wake at the same addresses."""
    monkeypatch.setattr(storages, "SLAB_BYTES", 600)
    weights, before = publish("engine", engine, key=KEY, device="host-0"), contents(engine)
    old = addresses(engine)

    worker.wait_released(weights.unmap)
    assert worker.leases() == []
    weights.remap()

    assert addresses(engine) == old and same(contents(engine), before)


def test_default_privacy(engine: Engine) -> None:
    """Small buffers are private, large ones and parameters are not."""
    small, large = torch.zeros(4), torch.zeros(1 << 18)
    assert publishing._is_small_buffer(NamedTensor("b", small, "buffer"))
    assert not publishing._is_small_buffer(NamedTensor("b", large, "buffer"))
    assert not publishing._is_small_buffer(NamedTensor("p", small))


def test_a_service_that_ends_right_after(
    start_worker: Callable[[], RunningWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once published it is no failure: the lease is taken as soon as a service is there again."""
    first = start_worker()
    monkeypatch.setattr(publishing, "point", lambda name: first.stop() if name == "client.published" else None)
    engine = Engine()

    weights = publish("engine", engine, key=KEY, device="host-0")
    second = start_worker()

    end = time.monotonic() + 20
    while second.leases() != [os.getpid()]:
        assert time.monotonic() < end
        time.sleep(0.05)  # nobody announces a renewal
    assert not weights.closed


def test_an_eviction_before_the_lease(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody evicts the shard in that moment: the engine still counts as the holder of its memory."""

    def evict(name: str) -> None:
        if name == "client.published":
            with Connection.open(worker.path, device="host-0") as connection:
                connection.request(Evict("engine"))[1].close()

    monkeypatch.setattr(publishing, "point", evict)
    engine = Engine()
    weights = publish("engine", engine, key=KEY, device="host-0")

    (shard,) = worker.status()["shards"]
    assert (shard["state"], shard["generation"]) == ("draining", weights.generation)
    assert worker.leases() == [os.getpid()]


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


def test_files_that_change_while_the_tensors_are_moved(
    worker: RunningWorker, tmp_path: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors may be a mapping of the files: what was copied is no version of them, and is not published."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"w": ("F32", (1,), b"abcd")})
    monkeypatch.setattr(moving, "point", lambda name: os.utime(path))
    tensors = {"w": torch.ones(4)}
    with pytest.raises(CheckpointChanged, match="model"):
        publish("engine", tensors, key={"layout": "test-1"}, device="host-0", checkpoint=tmp_path)
    assert torch.equal(tensors["w"], torch.ones(4))
    assert worker.status()["shards"] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"key": dict([*KEY.items(), (5, 1)])}, "no field 5"),
        ({"key": {**KEY, "layers": (1.5, 2)}}, r"layers is \(1.5, 2\)"),
        ({"attributes": {"a": "\ud800"}}, "attribute 'a'"),
        ({"attributes": {5: 1}}, "attribute 5"),
    ],
)
def test_what_json_cannot_carry_moves_nothing(worker: RunningWorker, arguments: dict[str, Any], problem: str) -> None:
    """It is refused before the first tensor is touched."""
    tensor = torch.ones(4)
    before = tensor.data_ptr()
    with pytest.raises(EngineError, match=problem):
        publish("engine", {"w": tensor}, **{"key": KEY, "device": "host-0", **arguments})
    assert tensor.data_ptr() == before
