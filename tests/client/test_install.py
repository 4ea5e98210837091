"""client/install.py: cached tensors in a module, seen by everyone who holds them."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.client.handmade import DEVICE, Raw, RunningWorker, make_shard
from weightcached import EngineError, Weights, attach

ENGINE = {"layout": "engine-1"}


class Weight(torch.nn.Parameter):
    """A parameter class of an engine's own."""


class Router:
    """A plain object that captured a parameter when it was made, as vLLM's GroupedTopKRouter does."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.listed = [bias]


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(4, 4), requires_grad=False)
        self.weight.weight_loader = "loader"
        self.bias = torch.nn.Parameter(torch.empty(4))
        self.register_buffer("scale", torch.empty(4), persistent=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.router = Router(self.gate.bias)
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.gate.weight


def floats(name: str, *shape: int, value: float = 1, **extra: Any) -> Raw:
    return Raw(name, "F32", shape, torch.full(shape, value, dtype=torch.float32).numpy().tobytes(), extra)


GATE = [
    floats("gate.weight", 4, 4, value=2),
    floats("gate.bias", 4, value=3),
    floats("gate.scale", 4, value=4, role="buffer", persistent=False, private=True),
]


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def attached(worker: RunningWorker, raws: list[Raw], scalars: dict[str, Any] | None = None, **changes: Any) -> Weights:
    worker.publish(make_shard(raws, **{"key": ENGINE, **changes}))
    weights = attach("tiny", device=DEVICE)
    weights.table.attributes.update(scalars or {})
    return weights


def test_everyone_who_holds_a_parameter_sees_it(worker: RunningWorker) -> None:
    """Module, tied module, plain object and list have one object with the cached bytes, its class and attributes."""
    model = on_meta()
    bias, weight = model.gate.bias, model.gate.weight

    done = attached(worker, GATE, aliases={"head.weight": "gate.weight"}).install(model)

    assert (done.tensors, done.aliases, done.private_bytes) == (3, 1, 16)
    assert model.router.bias is model.router.listed[0] is model.gate.bias is bias
    assert model.head.weight is model.gate.weight is weight
    assert type(weight) is Weight and weight.weight_loader == "loader" and not weight.requires_grad
    assert torch.equal(bias, torch.full((4,), 3.0)) and not bias.requires_grad
    assert list(model.gate.state_dict()) == ["weight", "bias"]
    assert model.gate.scale.unique().tolist() == [4.0]


@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
@pytest.mark.parametrize("built", [False, True])
def test_in_inference_mode(worker: RunningWorker, mode: Any, built: bool) -> None:
    """Attached, installed and copied in that mode, the tensors are what they are without it: they can be written,
    loaded into and used on either side of it; of a module that was built in that mode too."""
    with torch.inference_mode(built):
        model = on_meta()
    weight = model.gate.weight
    with torch.inference_mode():
        worker.publish(make_shard(GATE, key=ENGINE, aliases={"head.weight": "gate.weight"}))
        weights = attach("tiny", device=DEVICE, mode=mode)
        weights.install(model)
        expected = model.head(torch.ones(4))
        weights.private_copy()
    assert model.gate.weight is model.head.weight is weight and type(weight) is Weight
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())
    assert torch.equal(model.head(torch.ones(4)), expected)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    model.gate.scale.add_(1)
    assert model.gate.weight.unique().tolist() == [3.0] and model.gate.scale.unique().tolist() == [5.0]


def test_private_tensors_are_copies_and_the_others_are_not(worker: RunningWorker) -> None:
    """The parameters lie in the slab, the private buffer does not."""
    model = on_meta()
    weights = attached(worker, GATE, aliases={"head.weight": "gate.weight"})
    weights.install(model)
    slab = weights["gate.bias"].untyped_storage().data_ptr()
    assert model.gate.weight.untyped_storage().data_ptr() == slab
    assert model.gate.scale.untyped_storage().data_ptr() != slab


def test_plain_parameters(worker: RunningWorker) -> None:
    """With `plain` the class is torch's own, the attributes are kept."""
    model = on_meta()
    attached(worker, GATE, aliases={"head.weight": "gate.weight"}).install(model, plain=True)
    assert type(model.gate.weight) is torch.nn.Parameter
    assert model.gate.weight.weight_loader == "loader"


def test_what_processing_added_and_removed(worker: RunningWorker) -> None:
    """A new parameter and a new attribute are there, a vanished one is gone, scalars are set."""
    model = on_meta()
    del model.router
    raws = [GATE[0], floats("gate.packed", 2, value=5), floats("gate.w_kc", 2, value=6, role="attribute")]
    weights = attached(worker, raws, {"gate.scale_float": 0.5}, aliases={"head.weight": "gate.weight"})

    done = weights.install(model)

    assert (set(done.added), set(done.removed)) == ({"gate.packed", "gate.w_kc"}, {"gate.bias", "gate.scale"})
    assert [name for name, _ in model.gate.named_parameters()] == ["weight", "packed"]
    assert model.gate.w_kc.tolist() == [6.0, 6.0] and not isinstance(model.gate.w_kc, torch.nn.Parameter)
    assert model.gate.scale_float == 0.5
    assert not hasattr(model.gate, "bias")


def test_views_stay_views(worker: RunningWorker) -> None:
    """Two tensors of one memory share it after the installation: a write to one is seen in the other."""
    whole = floats("gate.weight", 4, 4, value=2)
    model = on_meta()
    del model.router
    weights = attached(worker, [whole], aliases={"head.weight": "gate.weight"})
    entry = weights.table.tensors[0]
    part = entry._replace(name="gate.bias", nbytes=16, shape=(4,), offset=entry.offset + 16)
    object.__setattr__(weights.table, "tensors", (entry, part))
    weights._entries["gate.bias"] = part

    weights.install(model)

    model.gate.weight.data[1] = 9
    assert model.gate.bias.tolist() == [9.0] * 4


def test_a_weakly_referenced_tensor_is_bound_anew(worker: RunningWorker) -> None:
    """torch does not swap what has weak references: another object is registered, and put where the old one was."""
    model = on_meta()
    old = model.gate.bias
    watch = weakref.ref(old)

    done = attached(worker, GATE, aliases={"head.weight": "gate.weight"}).install(model)

    assert watch() is old and old.is_meta
    assert model.router.bias is model.router.listed[0] is model.gate.bias is not old
    assert set(done.rebound) == {"router.bias", "router.listed.[0]"}


def test_every_problem_is_named_and_nothing_is_changed(worker: RunningWorker) -> None:
    """A missing submodule and tensors that would stay on meta, in the module or in plain objects, are one error."""
    model = on_meta()
    before = dict(model.named_parameters())
    raws = [GATE[0], floats("nowhere.weight", 2)]
    with pytest.raises(EngineError) as caught:
        attached(worker, raws, aliases={"head.weight": "gate.weight"}).install(model)
    text = str(caught.value)
    assert "nowhere.weight is of a submodule nowhere" in text
    assert "router.bias would stay on meta" in text and "router.listed.[0]" in text
    assert all(model.get_parameter(name) is tensor and tensor.is_meta for name, tensor in before.items())


def test_consumed_names_may_stay_on_meta(worker: RunningWorker) -> None:
    """The adapter's patterns are the only exception."""
    model = on_meta()
    attached(worker, [GATE[0]], aliases={"head.weight": "gate.weight"}).install(model, consumed=["router.*"])
    assert model.router.bias.is_meta and not model.gate.weight.is_meta


def test_a_checkpoint_must_fit(worker: RunningWorker) -> None:
    """In the files' own layout another shape, an unknown name and a parameter without a tensor are refused."""
    raws = [floats("gate.weight", 4, 2), floats("gate.other", 4)]
    with pytest.raises(EngineError) as caught:
        attached(worker, raws, key={}).install(on_meta())
    for part in ("gate.weight is [4, 2], the module's is [4, 4]", "gate.other is not in the module", "gate.bias would"):
        assert part in str(caught.value)


def test_a_checkpoints_buffers_are_copies(worker: RunningWorker) -> None:
    """The files do not say what a buffer is; the module does, and may write it."""
    with torch.device("meta"):
        model = torch.nn.BatchNorm1d(4)
    count = Raw("num_batches_tracked", "I64", (), (7).to_bytes(8, "little"))
    names = ("weight", "bias", "running_mean", "running_var")
    weights = attached(worker, [*(floats(name, 4) for name in names), count], key={})
    weights.install(model)
    assert model.num_batches_tracked.item() == 7
    assert isinstance(model.weight, torch.nn.Parameter) and "running_mean" in dict(model.named_buffers())
    slab = weights["weight"].untyped_storage().data_ptr()
    assert model.running_mean.untyped_storage().data_ptr() != slab
    assert model.weight.untyped_storage().data_ptr() == slab


def test_host_tensors_are_copies_on_the_host(worker: RunningWorker) -> None:
    """An entry that is `on_host` is a CPU tensor of its own memory."""
    weights = attached(worker, [floats("map", 4, on_host=True), floats("w", 4)])
    assert weights["map"].device.type == "cpu"
    assert weights["map"].untyped_storage().data_ptr() != weights["w"].untyped_storage().data_ptr()


@pytest.mark.parametrize(("layers", "seconds"), [(339, 0.5), (20_000, 12.0)])
def test_it_is_fast(worker: RunningWorker, layers: int, seconds: float) -> None:
    """A few hundred tensors take milliseconds and 20,000 no more than seconds of this thread's time."""
    with torch.device("meta"):
        model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(layers))
    weights = attached(worker, [floats(f"{n}.weight", 2, 2) for n in range(layers)])
    weights.table  # noqa: B018
    start = time.thread_time()  # what else the machine does is not counted
    weights.install(model)
    took = time.thread_time() - start
    print(f"{layers} tensors: {took * 1000:.1f} ms")
    assert took < seconds
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["forward", "", "child", "half"])
def test_a_name_that_the_module_has_for_something_else(worker: RunningWorker, name: str) -> None:
    """A method, a submodule: the tensor would hide it, or be hidden. Refused, with nothing changed."""
    weights = attached(worker, [floats(name, 4), floats("weight", 2, 2)])
    module = torch.nn.Linear(2, 2)
    module.child = torch.nn.Linear(1, 1)
    before = module.weight.clone()
    with pytest.raises(EngineError, match=rf"{name} is (a submodule of|something else in|no name)"):
        weights.install(module)
    assert torch.equal(module.weight, before) and isinstance(module.child, torch.nn.Linear)


def test_a_parametrised_weight_is_no_place(worker: RunningWorker) -> None:
    """Its property would go on computing the old one."""
    weights = attached(worker, [floats("weight", 2, 2)])
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2, bias=False))
    with pytest.raises(EngineError, match="weight is something else in ParametrizedLinear"):
        weights.install(module)


def test_parameters_that_are_more_than_their_memory(worker: RunningWorker) -> None:
    """A wrapper of other tensors would go on using those; a lazy one has no shape yet."""
    weights = attached(worker, [floats("weight", 3)])
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    with pytest.raises(EngineError, match="weight is TwoTensor in the module"):
        weights.install(module)
    weights.install(module, plain=True)
    assert type(module.weight) is torch.nn.Parameter and module.weight.tolist() == [1, 1, 1]
    with pytest.raises(EngineError, match="weight is of a module that gets its shapes at its first use"):
        weights.install(torch.nn.LazyLinear(3, bias=False))


def test_a_scalar_does_not_replace_a_submodule(worker: RunningWorker) -> None:
    """torch would refuse it when the tensors are in place already."""
    weights = attached(worker, [floats("weight", 2, 2)], {"child": 3})
    module = torch.nn.Linear(2, 2, bias=False)
    module.child = torch.nn.Linear(1, 1)
    before = module.weight.clone()
    with pytest.raises(EngineError, match="the attribute child cannot be set"):
        weights.install(module)
    assert torch.equal(module.weight, before)


def test_a_view_of_the_old_memory_is_refused(worker: RunningWorker) -> None:
    """A plain object would go on computing with what was there before; `consumed` says that it does not."""
    weights = attached(worker, GATE, aliases={"head.weight": "gate.weight"})
    model = Model()
    model.gate.bias.data.fill_(5)
    vars(model.router).update(part=model.gate.bias.data[1:3], other=torch.zeros(4))
    with pytest.raises(EngineError, match=r"router\.part is a view of the memory that gate\.bias has had"):
        weights.install(model)
    weights.install(model, consumed=["router.part"])
    assert model.gate.bias.tolist() == [3, 3, 3, 3]


class Slotted(torch.nn.Parameter):
    __slots__ = ("mark",)


def test_a_parameters_slots_are_attributes_too(worker: RunningWorker) -> None:
    """They come along with its `__dict__`."""
    weights = attached(worker, [floats("weight", 3)])
    module = torch.nn.Module()
    module.weight = Slotted(torch.empty(3, device="meta"))
    module.weight.mark = "kept"
    weights.install(module)
    assert type(module.weight) is Slotted and module.weight.mark == "kept" and module.weight.tolist() == [1, 1, 1]


def test_a_view_of_the_same_values_may_stay(worker: RunningWorker) -> None:
    """Such as of a table that the module has computed itself: nothing is wrong with it."""
    weights = attached(worker, GATE, aliases={"head.weight": "gate.weight"})
    model = Model()
    model.gate.scale.fill_(4)
    vars(model.router).update(part=model.gate.scale[1:3])
    weights.install(model)
    assert vars(model.router)["part"].tolist() == [4, 4]
