"""Slices for the loader's tests: whole tensors, or any cut of them that a test makes up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from weightcached.parallel.slices import Part, Slice


def whole(checkpoint: Any) -> list[Slice]:
    """Every tensor of a checkpoint, as it is on disk."""
    return [as_it_is(tensor) for file in checkpoint.files for tensor in file.tensors]


def as_it_is(tensor: Any) -> Slice:
    nbytes = tensor.end - tensor.begin
    return Slice(tensor.name, tensor.dtype, tuple(tensor.shape), (Part(0, nbytes, 1, nbytes, 0, nbytes),))


def columns(name: str, rows: int, pitch: int, start: int, width: int, tail: int = 0) -> Slice:
    """`width` bytes from byte `start` on of each of the rows, with `tail` bytes of zeros behind each."""
    return Slice(name, "U8", (rows, width + tail), (Part(start, width, rows, pitch, 0, width + tail),))


def any_cut(data: st.DataObject, sizes: Mapping[str, int], ranks: int) -> list[list[Slice]]:
    """Slices of U8 tensors (name -> bytes) for some ranks: rows and runs from anywhere, zeros between, none at all."""
    shards: list[list[Slice]] = []
    for _ in range(ranks):
        shard = []
        for name, nbytes in sizes.items():
            if data.draw(st.booleans()):
                continue
            parts: list[Part] = []
            end = 0
            for _ in range(data.draw(st.integers(0, 2)) if nbytes else 0):
                # Runs that share their rows lie side by side in each row of the slice, as a cut of several ranges does.
                widths = data.draw(st.lists(st.integers(1, nbytes), min_size=1, max_size=3))
                target_pitch = sum(widths) + data.draw(st.integers(0, 5))
                most = 4 if len(widths) > 1 else nbytes
                target = end
                for width in widths:
                    start = data.draw(st.integers(0, nbytes - width))
                    pitch = data.draw(st.integers(width, width + 100))
                    rows = data.draw(st.integers(1, min(most, 1 + (nbytes - start - width) // pitch)))
                    parts.append(Part(start, width, rows, pitch, target, target_pitch))
                    end = max(end, target + (rows - 1) * target_pitch + width)
                    target += width
            shard.append(Slice(name, "U8", (end + data.draw(st.integers(0, 9)),), tuple(parts)))
        shards.append(shard)
    return shards
