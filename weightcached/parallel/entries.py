"""A tensor's slices but for its name: the rule of its module, applied to its shape for every rank of a stage.

Modules that are alike (a layer and the next, an expert and the next) share one answer, which is what makes 92,000
tensors a matter of seconds.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UnknownArchitecture
from ..shard.dtypes import DTYPES
from .cuts import Misfit, Part, Piece, cut, whole
from .model import Leaves, Model, architecture
from .pieces import Group, piece_of, require_heads
from .ranks import Parallel
from .rules import REPLICATE, Kind, last_number
from .scales import KV_SCALES, Module, scaled

if TYPE_CHECKING:
    from ..checkpoint.header import TensorRange


class Template(NamedTuple):
    """A slice without its name."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Entry(NamedTuple):
    """What the ranks of a stage get of a tensor. Place p in the stage gets templates[p % len(templates)].

    So there is one template when all get the same, one for each tensor rank (the data ranks repeat them), or one for
    each place. `owned`: it belongs to an expert, and only the place that holds the expert gets it.
    """

    templates: tuple[Template, ...]
    owned: bool = False


class Refused(Exception):
    """A parameter and why it cannot be cut for these sizes."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem


class Entries:
    """The entries of `model` for the ranks of one stage; the stages do not differ in this."""

    def __init__(self, model: Model, parallel: Parallel) -> None:
        self._model = model
        self._parallel = parallel
        self._spread = parallel.expert and parallel.moe_size > 1  # experts are whole, on one rank each
        self._by_module: dict[str, dict[str, Entry]] = {}
        self._by_signature: dict[tuple[object, ...], dict[str, Entry]] = {}

    def of(self, module: str, leaf: str) -> Entry:
        """Raises `Refused` when its sizes do not fit, `UnknownArchitecture` when no rule matches its name."""
        found = self._by_module.get(module)
        if found is None:
            signature = self._model.signature(module)
            if signature not in self._by_signature:
                leaves = self._model.modules[module]
                self._by_signature[signature] = {
                    leaf: self._entry(tensor, module, leaf, leaves) for leaf, tensor in leaves.items()
                }
            found = self._by_module[module] = self._by_signature[signature]
        return found[leaf]

    def owner(self, name: str) -> int:
        """The place in its stage of the rank that holds the expert whose number is the last one in `name`."""
        found = last_number(name)
        expert = found[1] if found is not None else None
        try:
            total = self._experts
            self._require_enough(total)
            if expert is None or expert >= total:
                raise Misfit(f"expert number {expert}, and config.json says that there are {total}")
        except Misfit as misfit:
            raise Refused(name, str(misfit)) from None
        return self._parallel.owner_of(expert, total)

    def _entry(self, tensor: TensorRange, module: str, leaf: str, leaves: Leaves) -> Entry:
        dtype = self._model.dtype(module, leaf)
        kind, is_parameter = self._rule(tensor, leaf)
        try:
            if kind.experts == "named" and self._spread:
                # Scales of one element stay on every rank, for kernels that take the largest of all experts.
                owned = prod(tensor.shape) != 1 or leaf in ("weight", "bias")
                return Entry((_whole(tensor, dtype),), owned)
            if not is_parameter and (kind.experts == "stacked" or kind.axis is not None):
                raise Misfit("a rule with an axis must name the parameter, not its module")
            return Entry(self._templates(tensor, dtype, kind, None if is_parameter else leaf, leaves))
        except Misfit as misfit:
            raise Refused(tensor.name, str(misfit)) from None

    def _rule(self, tensor: TensorRange, leaf: str) -> tuple[Kind, bool]:
        """The kind of the first rule that matches, and whether that names the parameter itself."""
        found = self._model.rules.find(tensor.name)
        if found is not None:
            return self._model.family.rules[found[0]].kind, found[1]
        if leaf in KV_SCALES and prod(tensor.shape) == 1:
            return REPLICATE, True
        raise UnknownArchitecture(
            architecture=architecture(self._model.config), problem=f"no rule says how {tensor.name} is cut"
        )

    def _templates(
        self, tensor: TensorRange, dtype: str, kind: Kind, leaf: str | None, leaves: Leaves
    ) -> tuple[Template, ...]:
        """`leaf` is None when the rule names the parameter, so that `kind` is about its own axes."""
        size = self._parallel.tensor if kind.experts == "no" else self._parallel.moe_size
        if kind.experts == "stacked" and self._spread:
            if not tensor.shape or not tensor.nbytes:
                raise Misfit(f"shape {list(tensor.shape)} holds no experts")
            total = tensor.shape[0]
            self._require_enough(total)
            pieces = [_numbers(self._parallel.experts_of(total, place)) for place in range(size)]
            return tuple(_cut(tensor, dtype, 0, piece) for piece in pieces)
        if size == 1 or kind.cut == "whole":
            return (_whole(tensor, dtype),)
        if leaf is None:
            index, per = kind.axis if kind.axis is not None else int(kind.side == "in"), 1
            if index >= len(tensor.shape):
                raise Misfit(f"its axis {index} should be cut, and its shape is {list(tensor.shape)}")
            length, matrix = tensor.shape[index], len(tensor.shape) > 1
        else:
            module = Module(leaves, self._model.quantization)
            axis = module.axis(leaf, tensor, kind.side)
            length, matrix = module.length(kind.side), module.inner is not None
            if axis is None:
                return (_whole(tensor, dtype),)
            index, per = axis
        require_heads(kind, length, self._model.sizes, matrix=matrix)
        pieces = [piece_of(kind, length, Group(size, rank), self._model.sizes) for rank in range(size)]
        return tuple(_cut(tensor, dtype, index, scaled(piece, per, length)) for piece in pieces)

    @cached_property
    def _experts(self) -> int:
        """Of a layer. Asked for only when a name belongs to one: not every config.json says it."""
        return self._model.sizes.experts

    def _require_enough(self, experts: int) -> None:
        if experts < self._parallel.moe_size:
            raise Misfit(f"{experts} experts leave nothing for some of {self._parallel.moe_size} ranks")


def _numbers(experts: range) -> Piece:
    return Piece(tuple((expert, expert + 1) for expert in experts))


def _whole(tensor: TensorRange, dtype: str) -> Template:
    return Template(dtype, tensor.shape, whole(tensor.nbytes))


def _cut(tensor: TensorRange, dtype: str, axis: int, piece: Piece) -> Template:
    return Template(dtype, *cut(tensor.shape, DTYPES[tensor.dtype].bits, axis, piece))
