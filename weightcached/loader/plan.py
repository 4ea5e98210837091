"""The load plan: where each tensor lies in the slab, and which bytes of which file are read in which piece. Pure.

    file     | header | tensor a | tensor b | not listed | tensor c |       blocks of 4 MiB, each hashed as a whole
    slab     | tensor a |..| tensor b |..| tensor c |                       aligned to 256 bytes, gaps (..) of zeros

The slab keeps the order of the files, so the part of the slab that one read fills is contiguous, gaps included. Every
byte of every file is read exactly once; bytes that no tensor needs are read for the digest only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoint.digest import BLOCK_BYTES
from ..errors import CheckpointError
from ..shard.manifest import ALIGNMENT, TensorEntry

if TYPE_CHECKING:
    from ..checkpoint.fileset import Checkpoint, CheckpointFile

IOV_MAX = 1024  # buffers that one preadv takes (limits.h of Linux)
# What one read may fill of the slab. A block with few tensors in it grows by a gap at each tensor, so a buffer of just
# a block would cut nearly every block in two.
READ_BYTES = BLOCK_BYTES + 256 * ALIGNMENT


class Piece(NamedTuple):
    """`nbytes` consecutive bytes of a file and where in the slab they go; None: nowhere, they are only hashed."""

    slab_offset: int | None
    nbytes: int


class Read(NamedTuple):
    """One preadv at `file_offset` into `pieces`, which fills the slab from `slab_begin` up to `slab_end`.

    The gaps between the pieces and the one after the last are part of that range; the ranges of all reads together are
    the whole slab. A read that is only hashed has an empty range. At most `IOV_MAX` pieces and `READ_BYTES` bytes.
    """

    file_offset: int
    pieces: tuple[Piece, ...]
    slab_begin: int
    slab_end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return sum(piece.nbytes for piece in self.pieces)


class Task(NamedTuple):
    """What one thread does in one go: the reads of one digest block of one file, in order."""

    file_index: int
    block_index: int
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One slab of `nbytes` bytes, its tensors, and the tasks that fill it from `file_bytes` bytes of files."""

    entries: tuple[TensorEntry, ...]
    nbytes: int
    tasks: tuple[Task, ...]
    file_bytes: int


def plan_load(checkpoint: Checkpoint) -> LoadPlan:
    """The whole plan. `CheckpointError` when the tensors of a file overlap or leave it, which its reader excludes."""
    entries: list[TensorEntry] = []
    spans: list[list[Piece]] = []
    end = 0
    for file in checkpoint.files:
        end = _lay_out(file, end, entries, spans)
    tasks: list[Task] = []
    following = end
    for index in reversed(range(len(spans))):
        # Backwards, since the slab range of a read ends where the next bytes of the slab begin.
        blocks = list(_cut_blocks(spans[index]))
        for block_index in reversed(range(len(blocks))):
            reads, following = _cut_reads(block_index * BLOCK_BYTES, blocks[block_index], following)
            tasks.append(Task(index, block_index, reads))
    tasks.reverse()
    return LoadPlan(tuple(entries), end, tuple(tasks), sum(file.source.size for file in checkpoint.files))


def _lay_out(file: CheckpointFile, end: int, entries: list[TensorEntry], spans: list[list[Piece]]) -> int:
    """Gives each tensor of the file its place after slab offset `end`; returns the new end."""
    found: list[Piece] = []
    position = 0
    for tensor in file.tensors:
        nbytes = tensor.end - tensor.begin
        if tensor.begin < position or nbytes < 0 or tensor.end > file.source.size:
            raise CheckpointError(
                file=file.name,
                problem=f"tensor {tensor.name!r} at bytes {tensor.begin} to {tensor.end} overlaps another or the end",
            )
        if tensor.begin > position:
            found.append(Piece(None, tensor.begin - position))
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if nbytes:
            found.append(Piece(offset, nbytes))
        entries.append(TensorEntry(tensor.name, 0, offset, nbytes, tensor.dtype, tuple(tensor.shape)))
        position, end = tensor.end, offset + nbytes
    if file.source.size > position:
        found.append(Piece(None, file.source.size - position))
    spans.append(found)
    return end


def _cut_blocks(spans: list[Piece]) -> Iterator[list[Piece]]:
    """The pieces of each block: `spans` cut at every multiple of `BLOCK_BYTES` of the file."""
    block: list[Piece] = []
    room = BLOCK_BYTES
    for offset, nbytes in spans:
        while nbytes:
            part = min(nbytes, room)
            block.append(Piece(offset, part))
            offset = None if offset is None else offset + part
            nbytes -= part
            room -= part
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _cut_reads(file_offset: int, pieces: list[Piece], following: int) -> tuple[tuple[Read, ...], int]:
    """The reads of one block at `file_offset`, and the slab offset it starts at; `following` is the one after it."""
    ends = []  # of each piece, the slab offset where the next one starts
    for piece in reversed(pieces):
        ends.append(following)
        if piece.slab_offset is not None:
            following = piece.slab_offset
    ends.reverse()
    reads = []
    taken: list[Piece] = []
    begin: int | None = None
    end = file_end = 0
    for piece, piece_end in zip(pieces, ends, strict=True):
        start = begin if begin is not None else piece.slab_offset
        if taken and (len(taken) == IOV_MAX or (start is not None and piece_end - start > READ_BYTES)):
            reads.append(Read(file_offset, tuple(taken), begin or 0, end))
            file_offset, taken, begin, end, file_end = file_offset + file_end, [], None, 0, 0
        if piece.slab_offset is not None:
            begin = piece.slab_offset if begin is None else begin
            end = piece_end
        taken.append(piece)
        file_end += piece.nbytes
    reads.append(Read(file_offset, tuple(taken), begin or 0, end))
    return tuple(reads), following
