"""Which elements of an axis each rank gets: the kinds of rules.py in numbers. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .cuts import Misfit, Piece
from .rules import Kind
from .sizes import Sizes

VOCAB_MULTIPLE = 64  # vLLM pads a vocabulary to this many rows before it is cut


class Group(NamedTuple):
    """The ranks that share a tensor, and the place of one of them."""

    size: int
    rank: int


def piece_of(kind: Kind, length: int, group: Group, sizes: Sizes) -> Piece:
    """The part of an axis of `length` elements that `kind` gives to one rank. `Misfit` when it does not fit.

    A group of one gets the whole axis, without padding.
    """
    if group.size == 1 or kind.cut == "whole":
        return Piece(((0, length),))
    return _CUTS[kind.cut](kind, length, group, sizes)


def require_heads(kind: Kind, length: int, sizes: Sizes, *, matrix: bool) -> None:
    """`Misfit` when `kind` cuts by heads and a side of `length` elements is not so many heads of the model's size.

    Else a wrong number of heads would cut inside of one. A vector (not `matrix`) may have one number for each head.
    """
    if kind.cut not in ("q_heads", "kv_heads"):
        return
    heads, what = (sizes.heads, "attention") if kind.cut == "q_heads" else (sizes.kv_heads, "key/value")
    of_each = sizes.head_sizes if matrix or length != heads else ()
    if of_each and length not in [heads * size for size in of_each]:
        shown = " or ".join(map(str, of_each))
        raise Misfit(f"{length} is not {heads} {what} heads of {shown}, the numbers of config.json or its defaults")


def _even(kind: Kind, length: int, group: Group, _: Sizes) -> Piece:
    units, rest = divmod(length, kind.unit)
    if rest:
        raise Misfit(f"{length} is no multiple of {kind.unit}")
    if kind.uneven:
        share = -(-units // group.size)
        first, last = group.rank * share, min((group.rank + 1) * share, units)
        if share * (group.size - 1) >= units:
            raise Misfit(f"{units} units of {kind.unit} leave nothing for the last of {group.size} ranks")
        return Piece(((first * kind.unit, last * kind.unit),))
    if units % group.size:
        what = f"{length}" if kind.unit == 1 else f"{units} units of {kind.unit}"
        raise Misfit(f"{what} is no multiple of {group.size} ranks")
    return _share(length, group)


def _q_heads(_: Kind, length: int, group: Group, sizes: Sizes) -> Piece:
    return _by_heads(length, group, sizes.heads, "attention")


def _kv_heads(_: Kind, length: int, group: Group, sizes: Sizes) -> Piece:
    heads = sizes.kv_heads
    if heads < group.size and length % heads == 0:
        if group.size % heads:
            raise Misfit(f"{group.size} ranks are no multiple of {heads} key/value heads")
        # Neighbours hold the same head.
        group = Group(heads, group.rank // (group.size // heads))
    return _by_heads(length, group, heads, "key/value")


def _by_heads(length: int, group: Group, heads: int, what: str) -> Piece:
    if length % heads:
        raise Misfit(f"{length} is no multiple of {heads} {what} heads")
    if heads % group.size:
        raise Misfit(f"{heads} {what} heads are no multiple of {group.size} ranks")
    return _share(length, group)


def _vocab(_: Kind, length: int, group: Group, __: Sizes) -> Piece:
    padded = -(-length // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % group.size:
        raise Misfit(f"vocabulary of {length}, padded to {padded}, is no multiple of {group.size} ranks")
    rows = padded // group.size
    first, last = (min(edge * rows, length) for edge in (group.rank, group.rank + 1))
    return Piece(((first, last),), zeros=rows - (last - first))


def _merged(kind: Kind, length: int, group: Group, sizes: Sizes) -> Piece:
    lengths = _segment_lengths(kind, length, sizes)
    ranges = []
    begin = 0
    for segment, segment_length in zip(kind.segments, lengths, strict=True):
        piece = piece_of(segment, segment_length, group, sizes)
        ranges += [(begin + start, begin + stop) for start, stop in piece.ranges]
        begin += segment_length
    return Piece(tuple(ranges))


def _segment_lengths(kind: Kind, length: int, sizes: Sizes) -> list[int]:
    count = len(kind.segments)
    if kind.segments[0].cut == "even":
        if length % count:
            raise Misfit(f"{length} is no multiple of {count} equal segments")
        return [length // count] * count
    heads = [sizes.heads if segment.cut == "q_heads" else sizes.kv_heads for segment in kind.segments]
    if sum(heads) * sizes.head_dim != length:
        shown = " + ".join(map(str, heads))
        raise Misfit(f"{length} is not {shown} heads of {sizes.head_dim}")
    return [count * sizes.head_dim for count in heads]


def _first_only(_: Kind, length: int, group: Group, __: Sizes) -> Piece:
    return Piece((), zeros=length) if group.rank else Piece(((0, length),))


def _share(length: int, group: Group) -> Piece:
    share = length // group.size
    return Piece(((group.rank * share, (group.rank + 1) * share),))


_CUTS: dict[str, Callable[[Kind, int, Group, Sizes], Piece]] = {
    "even": _even,
    "q_heads": _q_heads,
    "kv_heads": _kv_heads,
    "vocab": _vocab,
    "merged": _merged,
    "first_only": _first_only,
}
