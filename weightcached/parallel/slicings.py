"""Other slicings of a model than the config's: their names, and the device that each rank of one goes to. Pure.

A model "m" that an engine wants for four tensor parallel ranks is cached under "m.tp4", beside "m".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

AXES = ("data", "pipeline", "tensor")  # the order of ranks, slowest first
_LABELS = {"data": "dp", "pipeline": "pp", "tensor": "tp"}
_NAME = re.compile(r"(.+?)\.(?:dp([2-9]|[1-9]\d+))?(?:pp([2-9]|[1-9]\d+))?tp([1-9]\d*)")


class Sizes(NamedTuple):
    """How many parts a model has in each dimension, in the order of its ranks."""

    data: int
    pipeline: int
    tensor: int

    @property
    def world(self) -> int:
        return self.data * self.pipeline * self.tensor

    def name(self, model: str) -> str:
        """What this slicing of `model` is cached under: "m.tp4", "m.pp2tp1", "m.dp2pp2tp4"."""
        parts = [
            f"{_LABELS[axis]}{size}" for axis, size in zip(AXES, self, strict=True) if size > 1 or axis == "tensor"
        ]
        return f"{model}.{''.join(parts)}"


def parse_name(name: str) -> tuple[str, Sizes] | None:
    """The model and the sizes that `Sizes.name` made a name of; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return match[1], Sizes(int(match[2] or 1), int(match[3] or 1), int(match[4]))


def wanted_sizes(key: Mapping[str, Any], own: Sizes) -> Sizes:
    """The sizes that a client's key asks for; one that it leaves out is the model's own."""
    return Sizes(*(_number(key, axis, "size", size) for axis, size in zip(AXES, own, strict=True)))


def wanted_rank(key: Mapping[str, Any], sizes: Sizes) -> int | None:
    """Which of `sizes.world` ranks a client's key asks for; None where it does not say, or says none of them."""
    number = 0
    for axis, size in zip(AXES, sizes, strict=True):
        rank = _number(key, axis, "rank", 0 if size == 1 else -1)
        if not 0 <= rank < size:
            return None
        number = number * size + rank
    return number


def _number(key: Mapping[str, Any], axis: str, part: str, otherwise: int) -> int:
    value = key.get(f"{axis}_parallel_{part}")
    return value if type(value) is int and (value > 0 or part == "rank") else otherwise
