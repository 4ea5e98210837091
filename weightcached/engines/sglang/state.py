"""What a load does to a model beside its parameters and buffers.

A model that is built on meta and filled with cached tensors has not run SGLang's `load_weights` and post-processing. So
whatever else those have changed must be carried, or the weights must not be published. A `Snapshot` is taken between
the model's construction and its load; `changes` compares it with the loaded model:

    scalars of a module              carried in the manifest, by dotted name; so is a parameter that became None
    tensors of a module              published as its attributes: MLA's w_kc and w_vc, views of other parameters
    look-up tables of the model's    left out: they are made again when they are needed
    own tensors
    everything else                  a problem, which keeps the weights from being published
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...client.modules import NamedTensor, held_tensors, named_tensors
from ...client.publish import SMALL_BUFFER
from ...shard.manifest import Scalar

if TYPE_CHECKING:
    import torch

# Made by `load_weights` where they are absent, and read by it and for rebalancing experts only, which is refused.
_MADE_AGAIN = frozenset({"_cached_params_dict", "routed_experts_weights_of_layer", "_routed_experts_weights_of_layer"})
# torch's own, and `training`, which every loader ends with setting.
_OF_TORCH = frozenset({"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_KV_SCALES = ("k_scale", "v_scale")  # set after loading, by --quantization-param-path
_DEEP = 6  # containers in containers
_TENSOR = "a tensor"


@dataclass
class Changes:
    """`attributes` and `tensor_attributes` as `weightcached.publish` takes them, by dotted names.

    `scratch` are those tensor attributes that were there before the load and are of no parameter: an engine may write
    them. `problems` say why the weights cannot be published.
    """

    attributes: dict[str, Scalar] = field(default_factory=dict)
    tensor_attributes: list[str] = field(default_factory=list)
    scratch: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def private(self, named: NamedTensor) -> bool:
        """Whether an engine that attaches needs a copy of its own, since it may write the tensor."""
        if named.role == "attribute":
            return named.name in self.scratch
        if named.role == "buffer":
            return bool(named.tensor.nbytes < SMALL_BUFFER)
        return named.name.rpartition(".")[2] in _KV_SCALES


@dataclass
class Snapshot:
    """A model as its constructor has left it. Holds no tensor itself: what the load replaces must be freed."""

    _plain: dict[str, dict[str, Any]]  # module -> attribute -> its form
    _parameters: dict[str, dict[str, Any]]  # parameter -> attribute -> scalar
    _kept: list[Any]  # objects whose identity counts, so that no other one gets their address
    _tensors: dict[str, weakref.ref[torch.Tensor]]  # tensor attributes, by dotted name

    @classmethod
    def of(cls, model: torch.nn.Module) -> Snapshot:
        """Of a model that is built and not loaded yet."""
        import torch

        kept: list[Any] = []
        plain: dict[str, dict[str, Any]] = {}
        tensors: dict[str, weakref.ref[torch.Tensor]] = {}
        for path, module in model.named_modules():
            plain[path] = {}
            for name, value in _members(module):
                plain[path][name] = _form(value, kept)
                if isinstance(value, torch.Tensor):
                    tensors[_dotted(path, name)] = weakref.ref(value)
        return cls(plain, _scalars_of_parameters(model), kept, tensors)

    def changes(self, model: torch.nn.Module) -> Changes:
        """What is to be carried beside parameters and buffers, of the same model after its load."""
        import torch

        found = Changes()
        named = {id(item.tensor) for item in named_tensors(model)}
        storages = {item.tensor.untyped_storage().data_ptr() for item in named_tensors(model)}
        for path, module in model.named_modules():
            before = self._plain.get(path)
            if before is None:
                found.problems.append(f"{path or 'the model'} is a module that the load has added")
                continue
            for name, value in _members(module):
                dotted = _dotted(path, name)
                if isinstance(value, torch.Tensor):
                    found.tensor_attributes.append(dotted)
                    before_it = self._tensors.get(dotted)
                    same = before_it is not None and before_it() is value
                    if same and value.untyped_storage().data_ptr() not in storages:
                        found.scratch.add(dotted)
                elif name not in before or before[name] != _form(value, []):
                    _changed(found, dotted, name, value, named)
            gone = before.keys() - vars(module).keys() - module._parameters.keys() - module._buffers.keys()
            found.problems += [f"{_dotted(path, name)} is gone after the load" for name in sorted(gone)]
            for name, parameter in module._parameters.items():
                if parameter is None and _dotted(path, name) in self._parameters:
                    found.attributes[_dotted(path, name)] = None
        found.problems += self._marked(model)
        found.problems += _out_of_reach(model, found.tensor_attributes, named)
        return found

    def _marked(self, model: torch.nn.Module) -> list[str]:
        """Parameters that the load has marked: kernels read such marks (format_ue8m0), and the copy would lack them."""
        problems = []
        for name, marks in _scalars_of_parameters(model).items():
            before = self._parameters.get(name, {})
            problems += [
                f"{name}.{mark} is {value!r} after the load, before it {before.get(mark)!r}"
                for mark, value in marks.items()
                if before.get(mark) != value and (value or mark in before)
            ]
        return problems


def _changed(found: Changes, dotted: str, name: str, value: Any, named: set[int]) -> None:
    """Puts an attribute that is new or has changed where it belongs."""
    if isinstance(value, bool | int | float | str | None):
        found.attributes[dotted] = value
    elif name not in _MADE_AGAIN and not _is_lookup(value, named):
        found.problems.append(f"{dotted} is another {type(value).__name__} after the load")


def _is_lookup(value: Any, named: set[int]) -> bool:
    """Whether a container holds the model's own tensors and nothing else that matters, such as dict(parameters)."""
    import torch

    if not isinstance(value, dict | list | tuple):
        return False
    parts = list(value.values()) if isinstance(value, dict) else list(value)
    return bool(parts) and all(
        id(part) in named if isinstance(part, torch.Tensor) else _is_lookup(part, named) for part in parts
    )


def _out_of_reach(model: torch.nn.Module, carried: list[str], named: set[int]) -> list[str]:
    """Tensors in objects and containers that are none of the model's own: nothing would fill them again."""
    known = set(carried)
    return [
        f"{item.path} is a tensor that no module has"
        for item in held_tensors(model)
        if id(item.tensor) not in named and item.path not in known and _MADE_AGAIN.isdisjoint(item.path.split("."))
    ]


def _members(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Names and values of a module's plain attributes: no parameters, buffers or modules."""
    return [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _scalars_of_parameters(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What parameters are marked with, by dotted name: attributes of theirs that are numbers or text."""
    return {
        name: {mark: value for mark, value in vars(parameter).items() if isinstance(value, bool | int | float | str)}
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _form(value: Any, kept: list[Any], left: int = _DEEP) -> Any:
    """Something to compare: scalars and containers by what they hold, other objects by identity and their scalars.

    Objects that are told by identity go into `kept`. `left`: how many containers are looked into, one in the other.
    """
    import torch

    if isinstance(value, bool | int | float | str | None):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if isinstance(value, dict) and left:
        return "dict", tuple((repr(key), _form(item, kept, left - 1)) for key, item in value.items())
    if isinstance(value, list | tuple) and left:
        return type(value).__name__, tuple(_form(item, kept, left - 1) for item in value)
    kept.append(value)
    if isinstance(value, type | torch.nn.Module) or callable(value):
        return type(value).__name__, id(value)
    inside = vars(value) if hasattr(value, "__dict__") else {}
    scalars = tuple((name, item) for name, item in inside.items() if isinstance(item, bool | int | float | str | None))
    return type(value).__name__, id(value), scalars
