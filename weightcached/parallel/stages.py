"""Which layer a tensor belongs to and which pipeline stages hold it, by its name. Pure."""

from __future__ import annotations

from bisect import bisect_right

from ..errors import SliceError
from .cuts import Misfit
from .ranks import Parallel
from .rules import Family, Patterns, number
from .sizes import Sizes


def layer_of(name: str, prefix: str) -> int | None:
    """The number after the prefix of layers, None when there is none."""
    return number(name[len(prefix) :].partition(".")[0]) if name.startswith(prefix) else None


class Stages:
    """The stages of one model: `ranges` holds the layers [first, last) of each, None without pipeline.

    `prefix` stands before the number of a layer, None: nothing says it. `layers` is how many there are, then 0.

    A layer is on its stage; what the family says is first or last, on that one; a tied embedding on both, since the
    last stage computes with it; everything else, such as a vision tower, on every stage. Raises `SliceError` when the
    layers cannot be shared out.
    """

    def __init__(self, parallel: Parallel, family: Family, sizes: Sizes, tied: bool) -> None:
        self.prefix = family.layers
        self.layers = 0
        self._first, self._last = Patterns(family.first), Patterns(family.last)
        self._both = family.embedding if tied else None
        self._all = tuple(range(parallel.pipeline))
        self.ranges: tuple[tuple[int, int], ...] | None = None
        self._ends: list[int] = []  # of each stage, the layer after its last one
        if self.prefix is None:
            if parallel.pipeline > 1:
                raise SliceError(
                    problem=f"{family.name}: no rule says where its layers are; "
                    'add one such as "model.layers.*: layers" to rules = [...]'
                )
            return
        try:
            self.layers = sizes.layers
            ranges = parallel.stage_layers(self.layers)
        except (Misfit, ValueError) as problem:
            raise SliceError(problem=f"{family.name}: {problem}") from None
        self._ends = [last for _, last in ranges]
        self.ranges = ranges if parallel.pipeline > 1 else None

    def of(self, name: str) -> tuple[int, ...]:
        """The stages that hold `name`; () for a layer past the model's own, which nobody holds."""
        layer = self.layer(name)
        if layer is not None:
            stage = bisect_right(self._ends, layer)
            return self._all[stage : stage + 1]
        first = name == self._both or self._first.find(name) is not None
        last = name == self._both or self._last.find(name) is not None
        if not first and not last:
            return self._all
        return tuple(sorted({*self._all[:1] * first, *self._all[-1:] * last}))

    def layer(self, name: str) -> int | None:
        """The number of the layer that `name` belongs to, None for anything else."""
        return layer_of(name, self.prefix) if self.prefix is not None else None
