"""The tensors of a torch module: those that it names, and those that plain Python objects hold beside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import EngineError
from ..shard.manifest import Role

if TYPE_CHECKING:
    import torch

_SCALARS = frozenset({str, bytes, int, float, bool, type(None)})  # a vocabulary, say, has very many
_CONTAINERS = (dict, list, tuple, set, frozenset)
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})  # of torch.nn.Module


class NamedTensor(NamedTuple):
    """A tensor by its dotted name. `persistent` False is a buffer that `state_dict` leaves out."""

    name: str
    tensor: torch.Tensor
    role: Role = "parameter"
    persistent: bool = True


class HeldTensor(NamedTuple):
    """A tensor in a plain Python object; `replace` puts another one in its place, None where nothing can be put."""

    path: str
    tensor: torch.Tensor
    replace: Callable[[torch.Tensor], None] | None


def named_tensors(module: torch.nn.Module, attributes: Iterable[str] = ()) -> list[NamedTensor]:
    """Every parameter, then every buffer, tied ones under each of their names, then these plain tensor attributes.

    `attributes` are dotted names. `EngineError` for one that is no tensor.
    """
    import torch

    found = [NamedTensor(name, tensor) for name, tensor in module.named_parameters(remove_duplicate=False)]
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, tensor in module.named_buffers(remove_duplicate=False):
        parent, _, leaf = name.rpartition(".")
        persistent = leaf not in modules[parent]._non_persistent_buffers_set
        found.append(NamedTensor(name, tensor, "buffer", persistent))
    for name in attributes:
        parent, _, leaf = name.rpartition(".")
        held = vars(modules[parent]).get(leaf) if parent in modules else None
        if not isinstance(held, torch.Tensor):
            raise EngineError(problem=f"{name} is no tensor attribute of {type(module).__name__}")
        found.append(NamedTensor(name, held, "attribute", persistent=False))
    return found


def held_tensors(module: torch.nn.Module) -> Iterator[HeldTensor]:
    """Tensors that are neither parameter nor buffer of `module`, nor of a module in it.

    They are in plain attributes of the modules, and in objects, lists, tuples, sets and dicts that are reached from
    there. Objects are looked into if their class comes from a package of one of the modules' classes (torch excepted):
    a router or kernel object of an engine, say, that captured a parameter when it was made. A tensor that is held in
    several places comes once for each.
    """
    import torch

    modules = dict(module.named_modules())
    packages = {type(part).__module__.partition(".")[0] for part in modules.values()} - {"torch", "builtins"}
    by_class: dict[type, bool] = {}  # whether objects of a class are looked into
    seen = {id(part) for part in modules.values()}
    left: list[tuple[str, Any]] = list(modules.items())
    while left:
        path, owner = left.pop()
        for name, value in _members(owner):
            cls = type(value)
            if cls in _SCALARS:
                continue
            if isinstance(value, torch.Tensor):
                yield HeldTensor(_where(path, owner, name), value, _replacer(owner, name))
                continue
            if isinstance(value, _CONTAINERS):
                inside = bool(value)
            elif (known := by_class.get(cls)) is not None:
                inside = known
            else:
                inside = by_class[cls] = _looked_into(value, packages)
            if inside and id(value) not in seen:
                seen.add(id(value))
                left.append((_where(path, owner, name), value))


def _members(owner: Any) -> list[tuple[Any, Any]]:
    """Key, index or attribute name, and value, of everything directly in a container or an object."""
    if isinstance(owner, dict):
        return list(owner.items())
    if isinstance(owner, _CONTAINERS):
        return list(enumerate(owner))
    # Not by getattr: a property or a __getattribute__ of the class would run the engine's code.
    found = list(getattr(owner, "__dict__", {}).items())
    if "_parameters" in getattr(owner, "__dict__", {}):  # a torch.nn.Module
        found = [item for item in found if item[0] not in _OF_TORCH]
    for name in slot_names(type(owner)):
        with contextlib.suppress(AttributeError):  # a slot that was never filled
            found.append((name, object.__getattribute__(owner, name)))
    return found


def _where(path: str, owner: Any, name: Any) -> str:
    """The path of a member: ``a.b`` for an attribute, ``a.[0]`` in a container."""
    return f"{path}.{f'[{name!r}]' if isinstance(owner, _CONTAINERS) else name}".removeprefix(".")


def _replacer(owner: Any, name: Any) -> Callable[[torch.Tensor], None] | None:
    """What puts another value there; None where nothing can be put, as in a tuple.

    Past any __setattr__ of the class: a module's would register a parameter, a frozen dataclass would refuse.
    """
    if isinstance(owner, dict | list):
        return functools.partial(owner.__setitem__, name)
    if isinstance(owner, _CONTAINERS):
        return None
    return functools.partial(object.__setattr__, owner, name)


def slot_names(cls: type) -> tuple[str, ...]:
    """Attributes that objects of a class have beside their `__dict__`, as Python declares them in `__slots__`."""
    return _cached_slot_names(cls)


def _slot_names(cls: type) -> tuple[str, ...]:
    return tuple(sorted({name for base in cls.__mro__ for name in _slots(base)} - {"__weakref__"}))


# The type is written out because mypy does not take a class for hashable, as lru_cache wants its arguments.
_cached_slot_names: Callable[[type], tuple[str, ...]] = functools.lru_cache(maxsize=1024)(_slot_names)


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [f"_{cls.__name__.lstrip('_')}{name}" if _mangled(name) else name for name in names if name != "__dict__"]


def _mangled(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _looked_into(value: Any, packages: set[str]) -> bool:
    if isinstance(value, type) or type(value).__module__.partition(".")[0] not in packages:
        return False
    return hasattr(value, "__dict__") or bool(slot_names(type(value)))
