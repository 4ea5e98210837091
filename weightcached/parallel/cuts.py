"""The geometry of one cut: ranges of one axis of a row-major tensor, joined, as runs of bytes. Pure.

axis 0 of [4, 6]                axis 1 of [4, 6]
rows [1, 3): one run            columns [2, 4): one run in each of the 4 rows, `pitch` bytes apart
. . . . . .                     . . x x . .
x x x x x x                     . . x x . .
x x x x x x                     . . x x . .
. . . . . .                     . . x x . .
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

Range = tuple[int, int]


class Misfit(Exception):
    """Sizes that cannot be cut as asked, in words; whoever knows the parameter's name adds it."""


class Part(NamedTuple):
    """`rows` runs of `width` bytes of a tensor, `pitch` bytes apart, and where they go in the rank's tensor.

    `start` and `target` are bytes from the first byte of either tensor; `target_pitch` is the distance of the runs
    there. With one row both pitches are the width. All are counted in the element type on disk, cast or not.
    """

    start: int
    width: int
    rows: int
    pitch: int
    target: int
    target_pitch: int


class Piece(NamedTuple):
    """What a rank gets of an axis: [start, stop) ranges in elements, joined in this order, then `zeros` zeros."""

    ranges: tuple[Range, ...]
    zeros: int = 0

    @property
    def length(self) -> int:
        """Elements of the rank's axis."""
        return sum(stop - start for start, stop in self.ranges) + self.zeros


def whole(nbytes: int) -> tuple[Part, ...]:
    """All bytes of a tensor."""
    return (Part(0, nbytes, 1, nbytes, 0, nbytes),) if nbytes else ()


def cut(shape: tuple[int, ...], bits: int, axis: int, piece: Piece) -> tuple[tuple[int, ...], tuple[Part, ...]]:
    """The shape of the rank's tensor and the parts that fill it; what they do not cover is zeros.

    `bits` is the width of an element. `Misfit` when a run does not begin and end on whole bytes.
    """
    rows = prod(shape[:axis])
    element = prod(shape[axis + 1 :]) * bits  # of the axis; sizes are in bits until they are known to be whole bytes
    pitch, target_pitch = shape[axis] * element, piece.length * element
    parts = []
    target = 0
    for start, stop in _joined(piece.ranges):
        width = (stop - start) * element
        if rows == 1 or width == pitch == target_pitch:
            run = (start * element, width * rows, width * rows, target, width * rows)
        else:
            run = (start * element, width, pitch, target, target_pitch)
        if any(size % 8 for size in run):
            raise Misfit(f"[{start}, {stop}) of axis {axis} of {list(shape)} is not whole bytes at {bits} bits each")
        if width * rows:
            begin, run_width, run_pitch, place, run_target = (size // 8 for size in run)
            parts.append(Part(begin, run_width, width * rows // (8 * run_width), run_pitch, place, run_target))
        target += width
    if rows * target_pitch % 8:
        raise Misfit(f"{piece.length} of axis {axis} of {list(shape)} are not whole bytes at {bits} bits each")
    return (*shape[:axis], piece.length, *shape[axis + 1 :]), tuple(parts)


def _joined(ranges: Iterable[Range]) -> Iterator[Range]:
    """Without empty ranges, and with those that follow each other as one."""
    last: Range | None = None
    for start, stop in ranges:
        if start == stop:
            continue
        if last is not None and last[1] == start:
            last = (last[0], stop)
            continue
        if last is not None:
            yield last
        last = (start, stop)
    if last is not None:
        yield last
