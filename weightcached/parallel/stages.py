"""Which pipeline stages hold a tensor, by its name. Pure."""

from __future__ import annotations

from bisect import bisect_right

from ..errors import SliceError
from .cuts import Misfit
from .ranks import Parallel
from .rules import Family, Patterns, number
from .sizes import Sizes


class Stages:
    """The stages of one model: `ranges` holds the layers [first, last) of each, None without pipeline.

    A layer is on its stage; what the family says is first or last, on that one; a tied embedding on both, since the
    last stage computes with it; everything else, such as a vision tower, on every stage. Raises `SliceError` when the
    layers cannot be shared out.
    """

    def __init__(self, parallel: Parallel, family: Family, sizes: Sizes, tied: bool) -> None:
        self._prefix = family.layers
        self._first, self._last = Patterns(family.first), Patterns(family.last)
        self._both = family.embedding if tied else None
        self._all = tuple(range(parallel.pipeline))
        self.ranges: tuple[tuple[int, int], ...] | None = None
        self._ends: list[int] = []  # of each stage, the layer after its last one
        if self._prefix is None:
            if parallel.pipeline > 1:
                raise SliceError(
                    problem=f"{family.name}: no rule says where its layers are; "
                    'add one such as "model.layers.*: layers" to rules = [...]'
                )
            return
        try:
            ranges = parallel.stage_layers(sizes.layers)
        except (Misfit, ValueError) as problem:
            raise SliceError(problem=f"{family.name}: {problem}") from None
        self._ends = [last for _, last in ranges]
        self.ranges = ranges if parallel.pipeline > 1 else None

    def of(self, name: str) -> tuple[int, ...]:
        """The stages that hold `name`; () for a layer past the model's own, which nobody holds."""
        layer = self._layer(name)
        if layer is not None:
            stage = bisect_right(self._ends, layer)
            return self._all[stage : stage + 1]
        first = name == self._both or self._first.find(name) is not None
        last = name == self._both or self._last.find(name) is not None
        if not first and not last:
            return self._all
        return tuple(sorted({*self._all[:1] * first, *self._all[-1:] * last}))

    def _layer(self, name: str) -> int | None:
        """The number after the prefix of layers."""
        if self._prefix is None or not name.startswith(self._prefix):
            return None
        return number(name[len(self._prefix) :].partition(".")[0])
