"""The geometry of cuts, against torch and by hand."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.tensors import filled
from weightcached.parallel.cuts import Misfit, Part, Piece, cut, whole

SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=4)
WIDTHS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def of_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def random_bytes(draw: st.DrawFn, size: int) -> bytes:
    return Random(draw(st.integers(0, 2**32))).randbytes(size)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, Piece]:
    """A tensor of random bytes, an axis, and ranges on it in any order, overlapping too."""
    shape = tuple(draw(SHAPES))
    bits = draw(st.sampled_from(sorted(WIDTHS)))
    axis = draw(st.integers(0, len(shape) - 1))
    edges = st.integers(0, shape[axis])
    ranges = draw(st.lists(st.tuples(edges, edges).map(lambda pair: (min(pair), max(pair))), max_size=4))
    data = random_bytes(draw, prod(shape) * bits // 8)
    return of_bytes(data, WIDTHS[bits], shape), axis, Piece(tuple(ranges), draw(st.integers(0, 3)))


@given(cases())
def test_the_parts_copy_what_torch_slices(case: tuple[torch.Tensor, int, Piece]) -> None:
    """For any shape, axis, ranges and zeros: the runs of bytes are narrow() of each range, joined, then zeros."""
    tensor, axis, piece = case
    slices = [tensor.narrow(axis, start, stop - start) for start, stop in piece.ranges]
    zeros = torch.zeros((*tensor.shape[:axis], piece.zeros, *tensor.shape[axis + 1 :]), dtype=tensor.dtype)
    expected = torch.cat([*slices, zeros], axis)

    shape, parts = cut(tuple(tensor.shape), tensor.element_size() * 8, axis, piece)

    assert shape == tuple(expected.shape)
    assert filled(parts, as_bytes(tensor), expected.numel() * tensor.element_size()) == as_bytes(expected)
    assert all(part.width > 0 and part.rows > 0 for part in parts)


@given(SHAPES, st.data())
def test_the_pieces_of_all_ranks_are_the_tensor(shape: list[int], data: st.DataObject) -> None:
    """An axis divided at any edges into pieces: joined in order they are the tensor again."""
    axis = data.draw(st.integers(0, len(shape) - 1))
    edges = sorted(data.draw(st.lists(st.integers(0, shape[axis]), max_size=4)))
    source = random_bytes(data.draw, 2 * prod(shape))

    pieces = []
    for start, stop in pairwise([0, *edges, shape[axis]]):
        piece_shape, parts = cut(tuple(shape), 16, axis, Piece(((start, stop),)))
        pieces.append(of_bytes(filled(parts, source, 2 * prod(piece_shape)), torch.int16, piece_shape))

    assert as_bytes(torch.cat(pieces, axis)) == source


def test_rows_are_one_run_and_columns_one_in_each_row() -> None:
    """[6, 4] of 2 bytes: axis 0 is contiguous; of axis 1 each row gives a run, packed in the rank's tensor."""
    assert cut((6, 4), 16, 0, Piece(((2, 4),))) == ((2, 4), (Part(16, 16, 1, 16, 0, 16),))
    assert cut((6, 4), 16, 1, Piece(((1, 3),))) == ((6, 2), (Part(2, 4, 6, 8, 0, 4),))
    assert cut((2, 6, 4), 16, 1, Piece(((2, 4),))) == ((2, 2, 4), (Part(16, 16, 2, 48, 0, 16),))


def test_what_lies_side_by_side_is_one_run() -> None:
    """Ranges that follow each other are one; all of an axis is the whole tensor."""
    assert cut((6, 4), 16, 0, Piece(((0, 2), (2, 3), (4, 6)))) == (
        (5, 4),
        (Part(0, 24, 1, 24, 0, 24), Part(32, 16, 1, 16, 24, 16)),
    )
    assert cut((6, 4), 16, 1, Piece(((0, 1), (1, 4)))) == ((6, 4), whole(48))


def test_zeros_are_what_no_part_covers() -> None:
    """A tail of zeros widens the rank's rows and adds no part; a piece of zeros alone has none."""
    assert cut((3, 4), 8, 1, Piece(((2, 4),), zeros=1)) == ((3, 3), (Part(2, 2, 3, 4, 0, 3),))
    assert cut((3, 4), 8, 0, Piece((), zeros=3)) == ((3, 4), ())


def test_half_bytes_are_cut_on_whole_ones() -> None:
    """Two F4 elements share a byte: an even cut is fine, on any axis where a row is whole bytes; an odd one is not."""
    assert cut((3, 8), 4, 1, Piece(((2, 6),))) == ((3, 4), (Part(1, 2, 3, 4, 0, 2),))
    assert cut((3, 8), 4, 0, Piece(((1, 2),))) == ((1, 8), (Part(4, 4, 1, 4, 0, 4),))
    for piece in (Piece(((1, 3),)), Piece(((0, 3),)), Piece(((0, 2),), zeros=1)):
        with pytest.raises(Misfit, match=r"axis 1 of \[3, 8\] .* whole bytes at 4 bits each"):
            cut((3, 8), 4, 1, piece)
    for piece in (Piece(((0, 2),), zeros=1), Piece((), zeros=3)):
        with pytest.raises(Misfit, match="are not whole bytes at 4 bits each"):
            cut((1, 8), 4, 1, piece)
    with pytest.raises(Misfit, match="whole bytes"):
        cut((4, 3), 6, 0, Piece(((0, 1),)))


def test_a_tensor_without_bytes_has_no_parts() -> None:
    """Whole or cut, nothing is copied, and the shape is still right."""
    assert whole(0) == ()
    assert cut((0, 4), 16, 1, Piece(((0, 2),))) == ((0, 2), ())
    assert cut((4, 0), 16, 0, Piece(((0, 2),))) == ((2, 0), ())
