"""The load plan: where each tensor lies in which slab, and where each byte of each file goes. Pure.

    file      | header | tensor a | tensor b | tensor c |        read in blocks of 4 MiB, each hashed as a whole
    spans     | none   | to slab 0 and 1     | rows     |        what goes the same way is one span
    slab 0    | tensor a |..| tensor b |..| rows of c |          aligned to 256 bytes, gaps (..) of zeros
    slab 1    | tensor a |..| tensor b |..| others of c |

A slab is one rank's; it keeps the order of the files, so that neighbours in a file mostly stay neighbours. Every byte
of every file is read exactly once, however many ranks need it; what no rank needs is read for the digest only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoint.digest import BLOCK_BYTES, block_count
from ..errors import CheckpointError
from ..shard.dtypes import DTYPES, tensor_bytes
from ..shard.manifest import ALIGNMENT, TensorEntry

if TYPE_CHECKING:
    from ..checkpoint.fileset import Checkpoint, CheckpointFile
    from ..checkpoint.header import TensorRange
    from ..parallel.slices import Slice


class Cast(NamedTuple):
    """A change of element type on the way: names of the safetensors format, and the bytes of an element of each."""

    source: str
    target: str
    source_bytes: int
    target_bytes: int

    @classmethod
    def between(cls, source: str, target: str) -> Cast | None:
        """None where both are the same."""
        if source == target:
            return None
        return cls(source, target, DTYPES[source].bits // 8, DTYPES[target].bits // 8)

    def scaled(self, nbytes: int) -> int:
        """Bytes that `nbytes` bytes become."""
        return nbytes // self.source_bytes * self.target_bytes


class Copy(NamedTuple):
    """`rows` runs of `width` bytes, `pitch` apart from `start` on, go to slab `slab`, from `offset` on.

    `start`, `width` and `pitch` count bytes as read: of the file in a plan, of the block in what `LoadPlan.copies`
    gives. `offset` and `slab_pitch`, which is how far apart the rows are there, count bytes of the slab. With one row
    neither pitch means anything. `gap`: bytes of the slab behind a single row, up to the next tensor's place, that no
    tensor has; they may be written as zeros.
    """

    slab: int
    offset: int
    start: int
    width: int
    rows: int = 1
    pitch: int = 0
    slab_pitch: int = 0
    cast: Cast | None = None
    gap: int = 0

    def within(self, begin: int, end: int) -> list[Copy]:
        """The parts of it that lie in bytes [begin, end) of the file, their `start` counted from `begin`."""
        if self.rows == 1:
            low, high = max(self.start, begin), min(self.start + self.width, end)
            if low >= high:
                return []
            offset = self.offset + self.in_slab(low - self.start)
            gap = self.gap if high == self.start + self.width else 0
            return [Copy(self.slab, offset, low - begin, high - low, cast=self.cast, gap=gap)]
        first = max(0, (begin - self.start) // self.pitch)
        last = min(self.rows - 1, (end - 1 - self.start) // self.pitch)
        whole_first = first if begin <= self.start + first * self.pitch else first + 1
        whole_last = last if self.start + last * self.pitch + self.width <= end else last - 1
        parts = []
        if first < whole_first and first <= last:
            parts += self._row(first).within(begin, end)
        if whole_first <= whole_last:
            row, count = self._row(whole_first), whole_last - whole_first + 1
            parts.append(
                row._replace(start=row.start - begin, rows=count, pitch=self.pitch, slab_pitch=self.slab_pitch)
            )
        if whole_last < last and whole_first <= last:
            parts += self._row(last).within(begin, end)
        return parts

    def in_slab(self, nbytes: int) -> int:
        """Bytes of the slab that `nbytes` bytes of the file become."""
        return nbytes if self.cast is None else self.cast.scaled(nbytes)

    def _row(self, number: int) -> Copy:
        offset, start = self.offset + number * self.slab_pitch, self.start + number * self.pitch
        return Copy(self.slab, offset, start, self.width, cast=self.cast)


class Span(NamedTuple):
    """Bytes [begin, end) of a file and the copies made of them; without any they are only hashed."""

    begin: int
    end: int
    copies: tuple[Copy, ...]


class Task(NamedTuple):
    """What a reader does in one go: one digest block of one file."""

    file_index: int
    block_index: int


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """One rank's slab of `nbytes` bytes and its tensors, in the order of the files."""

    entries: tuple[TensorEntry, ...]
    nbytes: int


class FilePlan:
    """A file's spans in order; they cover it without a hole."""

    def __init__(self, size: int, spans: tuple[Span, ...]) -> None:
        self.size = size
        self.spans = spans
        self._begins = [span.begin for span in spans]

    def copies(self, begin: int, end: int) -> list[Copy]:
        """The copies of bytes [begin, end), grouped by slab, each slab's in the order of the file."""
        found: list[Copy] = []
        index = bisect_right(self._begins, begin) - 1
        while index < len(self.spans) and self.spans[index].begin < end:
            for copy in self.spans[index].copies:
                found += copy.within(begin, end)
            index += 1
        if len(found) > 1:
            found.sort(key=attrgetter("slab"))  # stable
        return found


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One slab per rank, and how `file_bytes` bytes of files fill them."""

    slabs: tuple[SlabPlan, ...]
    files: tuple[FilePlan, ...]

    @property
    def file_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def task_count(self) -> int:
        return sum(block_count(file.size) for file in self.files)

    def tasks(self) -> Iterator[Task]:
        """Every block of every file, in order."""
        for file_index, file in enumerate(self.files):
            for block_index in range(block_count(file.size)):
                yield Task(file_index, block_index)

    def task_bytes(self, task: Task) -> tuple[int, int]:
        """Where the block begins in its file and where it ends."""
        begin = task.block_index * BLOCK_BYTES
        return begin, min(begin + BLOCK_BYTES, self.files[task.file_index].size)

    def copies(self, task: Task) -> list[Copy]:
        """The copies of one block, whose first byte is byte 0 of their `start`."""
        return self.files[task.file_index].copies(*self.task_bytes(task))


def plan_load(checkpoint: Checkpoint, shards: Sequence[Sequence[Slice]]) -> LoadPlan:
    """The whole plan; `shards` are the slices of each rank, in the order of the checkpoint's tensors.

    `CheckpointError` when the tensors of a file overlap or leave it, which its reader excludes, or when a tensor that
    is cast lies at an offset that is no multiple of its elements' size, which no common writer does. `ValueError` for
    slices that are not of this checkpoint or reach outside of their tensor.
    """
    layouts = [_Layout(number, slices) for number, slices in enumerate(shards)]
    files = tuple(_plan_file(file, layouts) for file in checkpoint.files)
    return LoadPlan(tuple(layout.finish() for layout in layouts), files)


class _Layout:
    """One slab as it grows: takes the rank's slices in order and gives each its place."""

    def __init__(self, slab: int, slices: Sequence[Slice]) -> None:
        self._slab = slab
        self._slices = slices
        self._entries: list[TensorEntry] = []
        self._end = 0

    def place(self, tensor: TensorRange) -> list[Copy]:
        """The copies that bring the rank's part of the tensor to its slab; none if it has no part."""
        number = len(self._entries)
        if number == len(self._slices) or self._slices[number].name != tensor.name:
            return []
        name, dtype, shape, parts = self._slices[number]
        nbytes = tensor_bytes(dtype, shape)
        if nbytes is None:
            raise ValueError(f"{name!r}: {dtype} {list(shape)} is not whole bytes")
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._entries.append(TensorEntry(name, 0, offset, nbytes, dtype, shape))
        self._end = offset + nbytes
        gap = -self._end % ALIGNMENT
        cast = Cast.between(tensor.dtype, dtype)
        copies = []
        for part in parts:
            start, width, rows, pitch, target, target_pitch = part
            written = width
            if cast is not None:
                written, target, target_pitch = (cast.scaled(size) for size in (width, target, target_pitch))
            read_end = start + (rows - 1) * pitch + width
            end = target + (rows - 1) * target_pitch + written
            if min(part) < 0 or read_end > tensor.nbytes or end > nbytes:
                raise ValueError(f"{name!r}: {part} of {tensor.nbytes} bytes to {nbytes} bytes")
            if width and rows:
                behind = gap if rows == 1 and end == nbytes else 0
                begin = tensor.begin + start
                copies.append(Copy(self._slab, offset + target, begin, width, rows, pitch, target_pitch, cast, behind))
        return copies

    def finish(self) -> SlabPlan:
        if len(self._entries) < len(self._slices):
            raise ValueError(f"{self._slices[len(self._entries)].name!r} is not in the checkpoint, or not in its order")
        return SlabPlan(tuple(self._entries), self._end)


def _plan_file(file: CheckpointFile, layouts: list[_Layout]) -> FilePlan:
    size = file.source.size
    spans = _Spans()
    position = 0
    for tensor in file.tensors:
        begin, end = tensor.begin, tensor.end
        if begin < position or end < begin or end > size:
            raise CheckpointError(
                file=file.name,
                problem=f"tensor {tensor.name!r} at bytes {begin} to {end} overlaps another or the end",
            )
        copies = [copy for layout in layouts for copy in layout.place(tensor)]
        for copy in copies:
            # A block of the file then ends between two elements.
            if copy.cast is not None and begin % copy.cast.source_bytes:
                raise CheckpointError(
                    file=file.name,
                    problem=f"tensor {tensor.name!r} begins at byte {begin}, no multiple of its elements' "
                    f"{copy.cast.source_bytes} bytes, so it cannot be cast: load it with its own dtype",
                )
        if begin > position:
            spans.add(position, begin, [])
        if end > begin:
            spans.add(begin, end, copies)
        position = end
    if size > position:
        spans.add(position, size, [])
    return FilePlan(size, spans.finish())


class _Spans:
    """The spans of a file as they grow: what goes on where the last one went, side by side, makes it longer."""

    def __init__(self) -> None:
        self._done: list[Span] = []
        self._begin = self._end = 0
        self._first: list[Copy] | None = None  # the copies of the span's first tensor; None before there is one
        self._last: list[Copy] = []  # of its last one
        self._whole = False  # whether each is all of its tensor in one piece, as it is

    def add(self, begin: int, end: int, copies: list[Copy]) -> None:
        whole = True
        for copy in copies:
            if copy.start != begin or copy.width != end - begin or copy.rows != 1 or copy.cast is not None:
                whole = False
        if whole and self._whole and self._goes_on(begin, copies):
            self._end, self._last = end, copies
            return
        self._close()
        self._begin, self._end, self._whole = begin, end, whole
        self._first = self._last = copies

    def finish(self) -> tuple[Span, ...]:
        self._close()
        return tuple(self._done)

    def _goes_on(self, begin: int, copies: list[Copy]) -> bool:
        first = self._first
        if first is None or len(first) != len(copies):
            return False
        length = begin - self._begin
        for one, other in zip(first, copies, strict=True):
            if one.slab != other.slab or one.offset + length != other.offset:
                return False
        return True

    def _close(self) -> None:
        if self._first is None:
            return
        copies = self._first
        if self._last is not copies:
            width = self._end - self._begin
            copies = [one._replace(width=width, gap=other.gap) for one, other in zip(copies, self._last, strict=True)]
        self._done.append(Span(self._begin, self._end, tuple(copies)))
