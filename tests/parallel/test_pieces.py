"""Kinds in numbers: the worked examples of engines' rules."""

from __future__ import annotations

import pytest

from weightcached.parallel.cuts import Misfit, Piece
from weightcached.parallel.pieces import Group, piece_of, require_heads
from weightcached.parallel.rules import (
    COL,
    FIRST_ONLY,
    KV_HEADS,
    Q_HEADS,
    REPLICATE,
    ROW,
    VOCAB,
    Kind,
    even,
    interleaved2,
    merged,
)
from weightcached.parallel.sizes import Sizes

LLAMA = Sizes({"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096})
GPT_OSS = Sizes({"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64})


def pieces(kind: Kind, length: int, ranks: int, sizes: Sizes = LLAMA) -> list[Piece]:
    return [piece_of(kind, length, Group(ranks, rank), sizes) for rank in range(ranks)]


def lengths(kind: Kind, length: int, ranks: int, sizes: Sizes = LLAMA) -> list[int]:
    return [piece.length for piece in pieces(kind, length, ranks, sizes)]


def covered(found: list[Piece]) -> list[int]:
    return [element for piece in found for start, stop in piece.ranges for element in range(start, stop)]


@pytest.mark.parametrize("kind", [COL, ROW, Q_HEADS, KV_HEADS, even(4), interleaved2(), VOCAB])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_pieces_in_order_are_the_axis(kind: Kind, ranks: int) -> None:
    """Every element once, in order, on equal shares."""
    found = pieces(kind, 1024, ranks)

    assert covered(found) == list(range(1024))
    assert len({piece.length for piece in found}) == 1


def test_a_group_of_one_has_everything() -> None:
    """No kind changes what a single rank holds: no padding, no zeros, and no number is asked for."""
    for kind in (COL, Q_HEADS, VOCAB, FIRST_ONLY, merged(COL, COL), interleaved2(7)):
        assert piece_of(kind, 1001, Group(1, 0), Sizes({})) == Piece(((0, 1001),))
    assert pieces(REPLICATE, 5, 3) == [Piece(((0, 5),))] * 3


def test_heads_are_whole() -> None:
    """A side is as many heads of the model's size, of values' size, or for a vector as many numbers; else refused."""
    both = Sizes({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16})

    require_heads(KV_HEADS, 48, both, matrix=True)
    require_heads(KV_HEADS, 32, both, matrix=True)
    require_heads(Q_HEADS, 8, both, matrix=False)
    require_heads(COL, 8, both, matrix=True)
    require_heads(Q_HEADS, 8, Sizes({"num_attention_heads": 4}), matrix=True)
    with pytest.raises(Misfit, match="8 is not 8 attention heads of 24 or 16"):
        require_heads(Q_HEADS, 8, both, matrix=True)
    with pytest.raises(Misfit, match="16 is not 2 key/value heads of 24 or 16"):
        require_heads(KV_HEADS, 16, both, matrix=False)


def test_more_ranks_than_key_value_heads_share_them() -> None:
    """8 heads of 128 on 16 ranks: ranks 2i and 2i+1 hold head i."""
    assert [piece.ranges for piece in pieces(KV_HEADS, 1024, 16)] == [
        ((head * 128, head * 128 + 128),) for head in range(8) for _ in range(2)
    ]


def test_a_vocabulary_is_padded_to_sixty_fours() -> None:
    """32001 on 8 ranks: 4008 rows each of 32064; the last has 3945 of them and 63 of zeros."""
    found = pieces(VOCAB, 32001, 8)

    assert [piece.length for piece in found] == [4008] * 8
    assert [piece.zeros for piece in found] == [0] * 7 + [63]
    assert found[7].ranges == ((28056, 32001),)
    assert covered(found) == list(range(32001))
    assert [lengths(VOCAB, size, 8)[0] for size in (128256, 151936, 129280, 201088)] == [16032, 18992, 16160, 25136]


def test_a_rank_may_hold_padding_alone() -> None:
    """65 rows on 4 ranks: 32 each, the last rank's are all padding."""
    assert pieces(VOCAB, 65, 4)[2:] == [Piece(((64, 65),), 31), Piece(((65, 65),), 32)]


def test_merged_segments_are_cut_apart_and_joined() -> None:
    """Each rank has its query, key and value heads, in this order; with few key/value heads neighbours share them."""
    qkv = merged(Q_HEADS, KV_HEADS, KV_HEADS)

    assert pieces(qkv, 6144, 8)[1] == Piece(((512, 1024), (4224, 4352), (5248, 5376)))
    assert pieces(qkv, 6144, 16)[3] == Piece(((768, 1024), (4224, 4352), (5248, 5376)))
    assert pieces(merged(COL, COL), 20, 2) == [Piece(((0, 5), (10, 15))), Piece(((5, 10), (15, 20)))]


def test_uneven_units_leave_the_last_rank_short() -> None:
    """GPT-OSS in mxfp4, 2880 in units of 32: 736, 736, 736, 672 on 4 ranks, and alternating gate and up rows alike."""
    assert lengths(even(32, uneven=True), 2880, 4) == [736, 736, 736, 672]
    assert lengths(even(32, uneven=True), 2880, 8) == [384] * 7 + [192]
    assert lengths(interleaved2(32, uneven=True), 5760, 4) == [1472, 1472, 1472, 1344]
    assert pieces(interleaved2(), 5760, 4)[1].ranges == ((1440, 2880),)


def test_a_bias_of_the_first_rank_is_zeros_on_the_others() -> None:
    """What is added on every rank and then summed counts once."""
    assert pieces(FIRST_ONLY, 9, 3) == [Piece(((0, 9),)), Piece((), 9), Piece((), 9)]


@pytest.mark.parametrize(
    ("kind", "length", "ranks", "sentence"),
    [
        (COL, 10, 4, "10 is no multiple of 4 ranks"),
        (even(4), 10, 2, "10 is no multiple of 4"),
        (even(4), 12, 2, "3 units of 4 is no multiple of 2 ranks"),
        (even(32, uneven=True), 2880, 64, "90 units of 32 leave nothing for the last of 64 ranks"),
        (interleaved2(), 6, 2, "3 units of 2 is no multiple of 2 ranks"),
        (Q_HEADS, 4096, 12, "32 attention heads are no multiple of 12 ranks"),
        (Q_HEADS, 4100, 4, "4100 is no multiple of 32 attention heads"),
        (KV_HEADS, 1024, 6, "8 key/value heads are no multiple of 6 ranks"),
        (KV_HEADS, 1024, 12, "12 ranks are no multiple of 8 key/value heads"),
        (KV_HEADS, 1023, 2, "1023 is no multiple of 8 key/value heads"),
        (VOCAB, 32001, 7, "vocabulary of 32001, padded to 32064, is no multiple of 7 ranks"),
        (merged(COL, COL), 7, 2, "7 is no multiple of 2 equal segments"),
        (merged(Q_HEADS, KV_HEADS, KV_HEADS), 6145, 2, r"6145 is not 32 \+ 8 \+ 8 heads of 128"),
    ],
)
def test_sizes_that_do_not_fit(kind: Kind, length: int, ranks: int, sentence: str) -> None:
    """Both numbers are in the refusal."""
    with pytest.raises(Misfit, match=sentence):
        pieces(kind, length, ranks)
