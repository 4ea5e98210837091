"""`Weights.install`: the cached tensors become those of a torch module, in place.

Everything is looked at before anything is changed; then each tensor of the module is swapped for the cached one by
`torch.utils.swap_tensors`, so that whoever holds the object sees the new memory: another module, a list, a plain Python
object that captured the parameter when it was made. Only where torch refuses (somebody has a weak reference to it) is
the new one registered as another object, and put where the old one is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import EngineError
from ..shard.manifest import Role, TensorEntry
from .modules import HeldTensor, held_tensors, slot_names
from .storages import is_plain, overlapping

if TYPE_CHECKING:
    import torch

    from .weights import Weights

_SHOWN = 12  # names or problems in one message


@dataclass(frozen=True, slots=True)
class Installed:
    """What was done: tensors put into the module, alias names beside, and how many bytes of them are private copies.

    `added` and `removed` are names that the module lacked or had too many; `rebound` are the places in plain objects
    that were given the new tensor because the old one could not be swapped.
    """

    tensors: int
    aliases: int
    private_bytes: int
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()


class _Place(NamedTuple):
    """Where a tensor of the manifest goes; `old` is what the module has under the name."""

    name: str
    entry: TensorEntry
    parent: torch.nn.Module
    leaf: str
    role: Role
    old: torch.Tensor | None


def install(
    weights: Weights, module: torch.nn.Module, *, consumed: Iterable[str] = (), plain: bool = False
) -> Installed:
    """Puts every tensor of `weights` into `module` under its dotted name, and sets the manifest's scalar attributes.

    A parameter becomes one of the class of the module's own, with its attributes (``weight_loader`` and the like),
    without gradient; `plain` makes it a `torch.nn.Parameter` with these attributes. Names that are aliases get the same
    object. Views of one memory stay views of it, those apart that begin at no multiple of 16 bytes in it. A buffer is
    as persistent as the manifest says. What exists only after an engine's processing is added; what the manifest lacks
    is removed, unless the layout is "checkpoint", whose names must be the module's and have its shapes, and whose
    buffers are copied, since a module may write them. Tensors that the manifest says an engine writes are private
    copies.

    `consumed` are patterns (fnmatch) of names that may stay on meta, or as they are: the engine does not use them any
    more.

    `EngineError` with all problems, and nothing changed: a submodule that is missing, a shape that differs, a name that
    the module's class has for something else, a tensor that would stay on meta, be it a parameter, a buffer, or held by
    a plain object of the engine, or a view in such an object, of memory with other values that the module would not use
    any more. The module holds the cached memory from now on; `weights` may be dropped, but `private_copy` and `unmap`
    need it.
    """
    import torch

    weights.require_mapped("they are installed")
    with torch.inference_mode(False):  # else parameters would be inference tensors, which only that mode may write
        installation = _Installation(torch, weights, module, plain)
        installation.check(tuple(consumed))
        return installation.carry_out()


class _Installation:
    """One call of `install`: first `check`, which finds all problems, then `carry_out`."""

    def __init__(self, torch: Any, weights: Weights, module: torch.nn.Module, plain: bool) -> None:
        self.torch = torch
        self.weights = weights
        self.module = module
        self.plain = plain
        self.checkpoint = weights.key.layout == "checkpoint"
        self.modules: dict[str, torch.nn.Module] = dict(module.named_modules(remove_duplicate=False))
        self.problems: list[str] = []
        self.places = self._places()
        self.kept = {(id(place.parent), place.leaf) for place in self.places}
        self.leftover = _own_tensors(self.modules, self.kept)
        self.held = list(held_tensors(module))

    def check(self, consumed: tuple[str, ...]) -> None:
        """`EngineError` with what stands in the way."""
        _check_scalars(self.weights, self.modules, self.kept, self.problems)
        for name, why in self._staying().items():
            if not any(fnmatchcase(name, pattern) for pattern in consumed):
                self.problems.append(f"{name} {why}")
        fixed = {id(item.tensor) for item in self.held if item.replace is None}
        self.problems += [
            f"{place.name} is held in a tuple or a set and has weak references, so that it cannot be replaced"
            for place in self.places
            if place.old is not None and id(place.old) in fixed and weakref.getweakrefs(place.old)
        ]
        if self.problems:
            shown = "; ".join(self.problems[:_SHOWN])
            more = f"; and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
            what = f"{self.weights.manifest.model} cannot be installed in {type(self.module).__name__}"
            raise EngineError(problem=f"{what}: {shown}{more}")

    def carry_out(self) -> Installed:
        """Puts the tensors into the module. Before this nothing in it has changed."""
        own = [place for place in self.places if place.name == place.entry.name]  # the others are aliases
        made = {place.name: self._make(place) for place in own}
        removed = [] if self.checkpoint else self.leftover
        for _, parent, table, leaf in removed:
            del getattr(parent, table)[leaf]
            parent._non_persistent_buffers_set.discard(leaf)
        rebound = self._put(made)
        for name, value in self.weights.table.attributes.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.modules[path], leaf, value)
        return Installed(
            tensors=len(own),
            aliases=len(self.places) - len(own),
            private_bytes=sum(place.entry.nbytes for place in own if place.entry.private or self._is_written(place)),
            added=tuple(place.name for place in self.places if place.old is None),
            removed=tuple(name for name, *_ in removed),
            rebound=tuple(rebound),
        )

    def _places(self) -> list[_Place]:
        table = self.weights.table
        entries = {entry.name: entry for entry in table.tensors}
        named = [*entries.items(), *((alias, entries[target]) for alias, target in table.aliases.items())]
        places = []
        for name, entry in named:
            path, _, leaf = name.rpartition(".")
            parent = self.modules.get(path)
            if parent is None:
                self.problems.append(f"{name} is of a submodule {path} that there is not")
                continue
            role = entry.role
            old = parent._parameters.get(leaf)
            if old is None and (old := parent._buffers.get(leaf)) is not None and self.checkpoint:
                role = "buffer"  # the files do not say it
            if old is None and isinstance(vars(parent).get(leaf), self.torch.Tensor):
                old = vars(parent)[leaf]
            place = _Place(name, entry, parent, leaf, role, old)
            if (reason := self._misfit(place)) is not None:
                self.problems.append(f"{name} {reason}")
            places.append(place)
        return places

    def _misfit(self, place: _Place) -> str | None:
        """Why a tensor cannot go to its place; None if it can."""
        if (reason := _no_place(place.parent, place.leaf, place.role)) is not None:
            return reason
        old, shape = place.old, place.entry.shape
        if old is None:
            return "is not in the module" if self.checkpoint else None
        if self.torch.nn.parameter.is_lazy(old):
            return "is of a module that gets its shapes at its first use"
        if not (old.is_meta or is_plain(old) or self.plain):
            return f"is {type(old).__name__} in the module, not elements in one storage of its own"
        if self.checkpoint and tuple(old.shape) != shape:
            return f"is {list(shape)}, the module's is {list(old.shape)}"
        return None

    def _staying(self) -> dict[str, str]:
        """What would stay as it is and must not, by name or path: without a value, or with another one."""
        swapped = {id(place.old) for place in self.places if place.old is not None}
        on_meta = [
            name
            for name, parent, table, leaf in self.leftover
            if self.checkpoint and getattr(parent, table)[leaf].is_meta
        ]
        on_meta += [item.path for item in self.held if item.tensor.is_meta and id(item.tensor) not in swapped]
        return dict.fromkeys(on_meta, "would stay on meta, without a value") | _stale(
            self.weights, self.places, self.held, swapped
        )

    def _is_written(self, place: _Place) -> bool:
        """Whether it is a buffer as the files have it, which any module may write."""
        return self.checkpoint and place.role == "buffer"

    def _make(self, place: _Place) -> torch.Tensor:
        """A tensor object of its own over the cached memory: the one in `weights` must not be swapped away."""
        source = self.weights[place.entry.name]
        if self._is_written(place) and not place.entry.private:  # a private one is a copy already
            source = source.clone()
        old = place.old
        is_parameter = isinstance(old, self.torch.nn.Parameter)
        if place.role != "parameter" and not (place.role == "attribute" and is_parameter):
            return source.detach()
        cls = type(old) if is_parameter and not self.plain else self.torch.nn.Parameter
        made: torch.Tensor = self.torch.Tensor._make_subclass(cls, source, False)
        if is_parameter:
            made.__dict__.update(old.__dict__)
            for slot in slot_names(type(made)):
                if hasattr(old, slot):
                    setattr(made, slot, getattr(old, slot))
        return made

    def _put(self, made: dict[str, torch.Tensor]) -> list[str]:
        """Swaps and registers; gives the paths in plain objects where another object had to be put."""
        final: dict[str, torch.Tensor] = {}  # the manifest's name -> the object that is registered under all its names
        waiting: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        taken: set[int] = set()
        for place in self.places:
            name, old = place.entry.name, place.old
            new = made[name] if name not in final else None
            if old is not None and id(old) not in taken:
                taken.add(id(old))
                # A second object for an alias: it is swapped too, for those who hold it, but not registered.
                waiting.append((old, self._make(place) if new is None else new, name))
                if final.setdefault(name, old) is not old:
                    self.weights.hand_out(name, old)
            elif new is not None:
                final[name] = new
        # A tensor of which another one is a view cannot be swapped before that one is: what is refused comes again.
        for _ in range(2):
            waiting = [item for item in waiting if not _swap(self.torch, *item[:2])]
        for old, new, name in waiting:
            if final[name] is old:
                final[name] = new
        for place in self.places:
            _register(place, final[place.entry.name])
        for name, tensor in final.items():
            self.weights.hand_out(name, tensor)
        return self._rebind({id(old): new for old, new, _ in waiting})

    def _rebind(self, refused: dict[int, torch.Tensor]) -> list[str]:
        """Puts the successors of objects that could not be swapped, by identity, where plain objects hold these."""
        rebound = []
        for item in self.held:
            if (new := refused.get(id(item.tensor))) is None:
                continue
            if item.replace is None:
                raise EngineError(problem=f"{item.path} holds a tensor that torch cannot swap, where none can be put")
            item.replace(new)
            rebound.append(item.path)
        return rebound


def _no_place(parent: torch.nn.Module, leaf: str, role: Role) -> str | None:
    """Why a tensor of this name would not be found as `parent.leaf`; None if it will be."""
    cls = type(parent)
    if not leaf:
        return "is no name for a tensor of a module"
    if leaf in parent._modules:
        return f"is a submodule of {cls.__name__}"
    if role == "attribute":
        return f"is a property of {cls.__name__}" if isinstance(getattr(cls, leaf, None), property) else None
    known = leaf in parent._parameters or leaf in parent._buffers
    return f"is something else in {cls.__name__}, a property or a method" if hasattr(cls, leaf) and not known else None


def _stale(weights: Weights, places: list[_Place], held: list[HeldTensor], swapped: set[int]) -> dict[str, str]:
    """Views in plain objects, by path, of memory that the module uses no more, and in which something else is."""
    old = {place.name: place.old for place in places if place.old is not None and is_plain(place.old)}
    views = {item.path: item.tensor for item in held if id(item.tensor) not in swapped and is_plain(item.tensor)}
    found: dict[str, str] = {}
    for path, name in overlapping(views, old):
        if path not in found and not _equal(old[name], weights[name]):
            found[path] = f"is a view of the memory that {name} has had"
    return found


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and bool(a.equal(b))


def _own_tensors(
    modules: dict[str, torch.nn.Module], kept: set[tuple[int, str]]
) -> list[tuple[str, torch.nn.Module, str, str]]:
    """Name, module, its table and the name there, of every parameter and buffer that is not among `kept`."""
    found, seen = [], set()
    for path, part in modules.items():
        if id(part) in seen:
            continue
        seen.add(id(part))
        for table in ("_parameters", "_buffers"):
            for leaf, tensor in getattr(part, table).items():
                if tensor is not None and (id(part), leaf) not in kept:
                    found.append((f"{path}.{leaf}".removeprefix("."), part, table, leaf))
    return found


def _check_scalars(
    weights: Weights, modules: dict[str, torch.nn.Module], kept: set[tuple[int, str]], problems: list[str]
) -> None:
    for name in weights.table.attributes:
        path, _, leaf = name.rpartition(".")
        part = modules.get(path)
        if part is None:
            problems.append(f"the attribute {name} is of a submodule {path} that there is not")
            continue
        member = getattr(type(part), leaf, None)
        read_only = isinstance(member, property) and member.fset is None
        if (id(part), leaf) in kept or leaf in part._modules or read_only:
            problems.append(f"the attribute {name} cannot be set")


def _swap(torch: Any, old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `old` is now what `new` was: its memory, its class and its attributes."""
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # weak references, or a view of it elsewhere
        return False
    return True


def _register(place: _Place, tensor: torch.Tensor) -> None:
    parent, leaf, role = place.parent, place.leaf, place.role
    tables = {"parameter": parent._parameters, "buffer": parent._buffers}
    for other, table in tables.items():
        if other != role:
            table.pop(leaf, None)
    parent._non_persistent_buffers_set.discard(leaf)
    if role == "attribute":
        vars(parent)[leaf] = tensor
        return
    vars(parent).pop(leaf, None)
    # Past register_parameter: its hooks and checks cost more than the rest, and the tensor has the right class.
    tables[role][leaf] = tensor
    if role == "buffer" and not place.entry.persistent:
        parent._non_persistent_buffers_set.add(leaf)
