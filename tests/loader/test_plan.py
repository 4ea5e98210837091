"""loader.plan: every byte of every file is read once and lands where its tensor's slices say, in every slab."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loader.whole import any_cut, as_it_is, whole
from weightcached.checkpoint.digest import BLOCK_BYTES
from weightcached.errors import CheckpointError
from weightcached.loader.plan import Cast, Copy, LoadPlan, plan_load
from weightcached.parallel.slices import Part, Slice
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ALIGNMENT, ManifestHead, SlabEntry, TensorTable, check_table

# A file as (bytes before, bytes of the tensor) pairs and the bytes after the last tensor.
Layout = tuple[list[tuple[int, int]], int]


def make(*layouts: Layout, dtype: str = "U8") -> Any:
    """A checkpoint as far as the plan looks at it: the layouts turned into absolute ranges."""
    files = []
    for number, (parts, tail) in enumerate(layouts):
        position = 0
        tensors = []
        for index, (before, nbytes) in enumerate(parts):
            begin = position + before
            position = begin + nbytes
            tensors.append(tensor_at(f"{number}.{index}", begin, position, dtype))
        name = f"model-{number}.safetensors"
        source = SimpleNamespace(size=position + tail)
        files.append(SimpleNamespace(name=name, source=source, tensors=tuple(tensors)))
    return SimpleNamespace(files=tuple(files))


def tensor_at(name: str, begin: int, end: int, dtype: str = "U8") -> Any:
    size = {"U8": 1, "BF16": 2, "F32": 4}[dtype]
    nbytes = end - begin
    return SimpleNamespace(name=name, dtype=dtype, shape=(nbytes // size,), begin=begin, end=end, nbytes=nbytes)


def moved(plan: LoadPlan) -> list[dict[int, tuple[int, int]]]:
    """Carries the plan out byte by byte: per slab, its byte -> (file, byte of the file). No byte comes twice."""
    slabs: list[dict[int, tuple[int, int]]] = [{} for _ in plan.slabs]
    reached = [0] * len(plan.files)
    for task in plan.tasks():
        begin, end = plan.task_bytes(task)
        assert begin == reached[task.file_index], "the blocks of a file follow each other"
        reached[task.file_index] = end
        copies = plan.copies(task)
        assert [copy.slab for copy in copies] == sorted(copy.slab for copy in copies)
        for copy in copies:
            assert copy.width > 0
            assert copy.rows > 0
            for row in range(copy.rows):
                start, offset = copy.start + row * copy.pitch, copy.offset + row * copy.slab_pitch
                assert start >= 0
                assert start + copy.width <= end - begin, "a copy stays in its block"
                for byte in range(copy.width):
                    assert offset + byte not in slabs[copy.slab], "a byte of a slab is written twice"
                    slabs[copy.slab][offset + byte] = (task.file_index, begin + start + byte)
            if copy.gap:
                gap = range(copy.offset + copy.width, copy.offset + copy.width + copy.gap)
                assert copy.rows == 1
                assert gap.stop % ALIGNMENT == 0
                for entry in plan.slabs[copy.slab].entries:
                    assert gap.stop <= entry.offset or entry.offset + entry.nbytes <= gap.start, "a gap is nobody's"
    assert reached == [file.size for file in plan.files], "every byte of every file is in one block"
    return slabs


def check_tables(plan: LoadPlan) -> None:
    for slab in plan.slabs:
        head = ManifestHead("m", 1, "host-0", ShardKey("c"), (SlabEntry(slab.nbytes),), len(slab.entries), "2026")
        check_table(head, TensorTable(slab.entries))


def check_whole(plan: LoadPlan, checkpoint: Any) -> None:
    """What a plan of one slab with every tensor promises, block by block."""
    check_tables(plan)
    (slab,) = plan.slabs
    expected = {entry.name: entry.offset for entry in slab.entries}
    end = 0
    for entry in slab.entries:
        assert end <= entry.offset < end + ALIGNMENT, "a gap is smaller than the alignment"
        end = entry.offset + entry.nbytes
    assert end == slab.nbytes
    placed: list[list[tuple[int, int, int]]] = [[] for _ in checkpoint.files]  # per file: begin, end, slab offset
    for task in plan.tasks():
        begin, _ = plan.task_bytes(task)
        placed[task.file_index] += [
            (begin + copy.start, begin + copy.start + copy.width, copy.offset) for copy in plan.copies(task)
        ]
    for file, ranges in zip(checkpoint.files, placed, strict=True):
        covered = 0
        for tensor in file.tensors:
            for begin, finish, offset in ranges:
                low, high = max(begin, tensor.begin), min(finish, tensor.end)
                if low < high:
                    covered += high - low
                    assert offset + low - begin == expected[tensor.name] + low - tensor.begin
        assert covered == sum(tensor.nbytes for tensor in file.tensors)
        assert covered == sum(finish - begin for begin, finish, _ in ranges), "only listed tensors reach the slab"
    assert plan.file_bytes == sum(file.source.size for file in checkpoint.files)


lengths = st.one_of(
    st.integers(0, 5),
    st.integers(0, 3000),
    st.sampled_from([255, 256, 257, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]),
    st.integers(0, 3 * BLOCK_BYTES),
)
gaps = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 2 * BLOCK_BYTES))
layouts = st.tuples(st.lists(st.tuples(gaps, lengths), max_size=12), st.integers(0, 20)).filter(
    lambda layout: sum(a + b for a, b in layout[0]) + layout[1] > 0
)


@settings(max_examples=200, deadline=None)
@given(st.lists(layouts, min_size=1, max_size=3))
def test_any_layout_is_covered_once(files: list[Layout]) -> None:
    """Whatever lies where in the files: each byte is read once and each tensor is whole."""
    checkpoint = make(*files)
    check_whole(plan_load(checkpoint, [whole(checkpoint)]), checkpoint)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_cut_goes_where_its_parts_say(data: st.DataObject) -> None:
    """Slices with rows, in several slabs, some missing from some: each byte of a slab is the one that its part names.

    The blocks are 64 bytes here, so that rows are cut at every place.
    """
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400)), min_size=1, max_size=5))
    checkpoint = make((sizes, data.draw(st.integers(1, 9))))
    sizes_by_name = {tensor.name: tensor.nbytes for tensor in checkpoint.files[0].tensors}
    shards = any_cut(data, sizes_by_name, data.draw(st.integers(1, 3)))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("weightcached.loader.plan", "weightcached.checkpoint.digest"):
            patch.setattr(f"{module}.BLOCK_BYTES", 64)
        plan = plan_load(checkpoint, shards)
        check_tables(plan)
        begins = {tensor.name: tensor.begin for tensor in checkpoint.files[0].tensors}
        for slab, found, shard in zip(plan.slabs, moved(plan), shards, strict=True):
            expected = {
                entry.offset + part.target + row * part.target_pitch + byte: (
                    0,
                    begins[entry.name] + part.start + row * part.pitch + byte,
                )
                for entry, piece in zip(slab.entries, shard, strict=True)
                for part in piece.parts
                for row in range(part.rows)
                for byte in range(part.width)
            }
            assert found == expected


def test_tensors_keep_the_order_of_the_files() -> None:
    """Entries come in file order, each aligned to 256 bytes; an empty tensor has a place and no bytes."""
    checkpoint = make(([(8, 10), (0, 0), (0, 300)], 0), ([(8, 1)], 0))
    (slab,) = plan_load(checkpoint, [whole(checkpoint)]).slabs
    assert [(entry.name, entry.offset, entry.nbytes) for entry in slab.entries] == [
        ("0.0", 0, 10),
        ("0.1", 256, 0),
        ("0.2", 256, 300),
        ("1.0", 768, 1),
    ]
    assert slab.nbytes == 769
    assert {entry.slab for entry in slab.entries} == {0}
    assert {entry.role for entry in slab.entries} == {"parameter"}


def test_neighbours_in_file_and_slab_are_one_copy() -> None:
    """Tensors of multiples of 256 bytes lie in the slab as in the file, so a block of them is a single copy."""
    checkpoint = make(([(1000, 1 << 20)] + [(0, 256 * n) for n in range(1, 500)], 0))
    plan = plan_load(checkpoint, [whole(checkpoint)])
    assert len(plan.files[0].spans) == 2, "the header, and all tensors"
    assert all(len(plan.copies(task)) == 1 for task in plan.tasks())


def test_bytes_that_no_tensor_needs_are_only_hashed() -> None:
    """The header and tensors that are not listed are read, but have no place in the slab."""
    checkpoint = make(([(100, 50), (70, 30)], 9))
    plan = plan_load(checkpoint, [whole(checkpoint)])
    (task,) = plan.tasks()
    assert plan.copies(task) == [Copy(0, 0, 100, 50, gap=206), Copy(0, 256, 220, 30, gap=226)]
    assert plan.slabs[0].nbytes == 286


def test_a_checkpoint_without_tensors_is_read_all_the_same() -> None:
    """Nothing to load is a plan of zero bytes that still hashes the file."""
    plan = plan_load(make(([], 10)), [[]])
    assert plan.slabs[0].nbytes == 0
    assert plan.slabs[0].entries == ()
    assert plan.file_bytes == 10
    assert [plan.task_bytes(task) for task in plan.tasks()] == [(0, 10)]
    assert [plan.copies(task) for task in plan.tasks()] == [[]]


def test_a_cast_scales_places_and_not_what_is_read() -> None:
    """A slice of another dtype takes its own bytes in the slab; its copies still count bytes of the file."""
    checkpoint = make(([(8, 400)], 0), dtype="F32")
    half = Slice("0.0", "BF16", (50,), (Part(200, 20, 10, 20, 0, 20),))
    plan = plan_load(checkpoint, [[half]])
    (task,) = plan.tasks()
    assert plan.copies(task) == [Copy(0, 0, 208, 20, 10, 20, 10, Cast("F32", "BF16", 4, 2))]
    assert plan.slabs[0].entries[0].nbytes == 100


def test_a_cast_at_an_odd_offset_is_refused() -> None:
    """An element that lies in two blocks cannot be cast; such a file is refused by name when it is planned."""
    checkpoint = make(([(9, 400)], 0), dtype="F32")
    piece = as_it_is(checkpoint.files[0].tensors[0])._replace(dtype="BF16")
    with pytest.raises(CheckpointError, match=r"model-0.safetensors: tensor '0.0' begins at byte 9, .* 4 bytes"):
        plan_load(checkpoint, [[piece]])


@pytest.mark.parametrize(
    "part",
    [Part(0, 401, 1, 401, 0, 401), Part(1, 100, 4, 100, 0, 100), Part(0, 10, 1, 10, 391, 10), Part(-1, 5, 1, 5, 0, 5)],
    ids=["wider than the tensor", "rows past its end", "past the slice", "before the tensor"],
)
def test_a_part_outside_of_its_tensor_is_refused(part: Part) -> None:
    """No slice reaches into a neighbour, on either side."""
    checkpoint = make(([(8, 400)], 0))
    with pytest.raises(ValueError, match=r"'0.0': Part"):
        plan_load(checkpoint, [[Slice("0.0", "U8", (400,), (part,))]])


def test_slices_of_another_checkpoint_are_refused() -> None:
    """A slice that no tensor follows would silently be missing."""
    checkpoint = make(([(8, 400)], 0))
    stray = Slice("other", "U8", (0,), ())
    with pytest.raises(ValueError, match="'other' is not in the checkpoint"):
        plan_load(checkpoint, [[*whole(checkpoint), stray]])


@pytest.mark.parametrize(("begin", "end"), [(5, 20), (10, 9), (90, 101)], ids=["overlap", "negative", "past the end"])
def test_a_range_that_its_reader_should_have_refused_is_refused(begin: int, end: int) -> None:
    """Ranges that overlap or leave the file never reach the slab."""
    checkpoint = make(([(0, 10)], 90))
    bad = tensor_at("bad", begin, end)
    slices = whole(checkpoint)
    checkpoint.files[0].tensors += (bad,)
    with pytest.raises(CheckpointError, match=r"model-0.safetensors: tensor 'bad'"):
        plan_load(checkpoint, [slices])


@pytest.mark.parametrize(
    "layout",
    [
        lambda size: [
            ([(1 << 20, 2500 * size)] + [(0, 700_000 if i % 3 == 0 else 512) for i in range(2500 * size)], 0)
        ],
        lambda size: [([(1 << 16, 8 << 20)] + [(0, 8 << 20)] * 639, 0) for _ in range(3 * size)],
    ],
    ids=["2,500 and 20,000 tensors", "16 and 129 GB"],
)
def test_planning_is_linear(layout: Callable[[int], list[Layout]]) -> None:
    """Planning eight times the tensors or the bytes takes at most nine times the calls: nothing is looked at again."""
    calls = []
    for size in (1, 8):
        checkpoint = make(*layout(size))
        slices = whole(checkpoint)
        count = 0

        def counting(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counting)
        try:
            plan = plan_load(checkpoint, [slices])
            for task in plan.tasks():
                plan.copies(task)
        finally:
            sys.setprofile(None)
        calls.append(count)
    assert calls[1] <= 9 * calls[0]
