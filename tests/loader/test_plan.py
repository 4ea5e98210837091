"""loader.plan: every byte of every file is read once and lands in one place of the slab."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcached.checkpoint.digest import BLOCK_BYTES
from weightcached.errors import CheckpointError
from weightcached.loader.plan import IOV_MAX, READ_BYTES, LoadPlan, plan_load
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ALIGNMENT, ManifestHead, SlabEntry, TensorTable, check_table

# A file as (bytes before, bytes of the tensor) pairs and the bytes after the last tensor.
Layout = tuple[list[tuple[int, int]], int]


def make(*layouts: Layout) -> Any:
    """A checkpoint as far as the plan looks at it: the layouts turned into absolute ranges."""
    files = []
    for number, (parts, tail) in enumerate(layouts):
        position = 0
        tensors = []
        for index, (before, nbytes) in enumerate(parts):
            begin = position + before
            position = begin + nbytes
            tensors.append(
                SimpleNamespace(name=f"{number}.{index}", dtype="U8", shape=(nbytes,), begin=begin, end=position)
            )
        name = f"model-{number}.safetensors"
        source = SimpleNamespace(size=position + tail)
        files.append(SimpleNamespace(name=name, source=source, tensors=tuple(tensors)))
    return SimpleNamespace(files=tuple(files))


def check(plan: LoadPlan, checkpoint: Any) -> None:
    """Everything that a plan promises."""
    covered: list[dict[int, int]] = [{} for _ in checkpoint.files]  # per file: start of a piece -> its bytes
    placed: list[dict[int, int]] = [{} for _ in checkpoint.files]  # per file: file offset -> slab offset
    filled = 0
    for task in plan.tasks:
        position = task.block_index * BLOCK_BYTES
        for read in task.reads:
            assert read.file_offset == position
            assert 1 <= len(read.pieces) <= IOV_MAX
            assert read.slab_end - read.slab_begin <= READ_BYTES
            if read.slab_end > read.slab_begin:
                assert read.slab_begin == filled, "the reads' slab ranges leave nothing out"
                filled = read.slab_end
            end = read.slab_begin
            for piece in read.pieces:
                assert piece.nbytes > 0
                covered[task.file_index][position] = piece.nbytes
                if piece.slab_offset is not None:
                    assert end <= piece.slab_offset < end + ALIGNMENT, "a gap is smaller than the alignment"
                    placed[task.file_index][position] = piece.slab_offset
                    end = piece.slab_offset + piece.nbytes
                    assert end <= read.slab_end
                position += piece.nbytes
            assert read.slab_end - end < ALIGNMENT
        size = checkpoint.files[task.file_index].source.size
        assert position == min(size, (task.block_index + 1) * BLOCK_BYTES), "a task is a whole block"
    assert filled == plan.nbytes
    for file, pieces in zip(checkpoint.files, covered, strict=True):
        position = 0
        for start in sorted(pieces):
            assert start == position, "every byte is read exactly once"
            position += pieces[start]
        assert position == file.source.size
    expected = {entry.name: entry.offset for entry in plan.entries}
    for file, pieces, places in zip(checkpoint.files, covered, placed, strict=True):
        for tensor in file.tensors:
            offset = expected.pop(tensor.name)
            position = tensor.begin
            while position < tensor.end:
                assert places.pop(position) == offset + position - tensor.begin, "a tensor is where its entry says"
                position += pieces[position]
            assert position == tensor.end
        assert not places, "only listed tensors reach the slab"
    assert not expected
    assert plan.file_bytes == sum(file.source.size for file in checkpoint.files)
    head = ManifestHead("m", 1, "host-0", ShardKey("c"), (SlabEntry(plan.nbytes),), len(plan.entries), "2026")
    check_table(head, TensorTable(plan.entries))


lengths = st.one_of(
    st.integers(0, 5),
    st.integers(0, 3000),
    st.sampled_from([255, 256, 257, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, READ_BYTES]),
    st.integers(0, 3 * BLOCK_BYTES),
)
gaps = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 2 * BLOCK_BYTES))
layouts = st.tuples(st.lists(st.tuples(gaps, lengths), max_size=12), st.integers(0, 20)).filter(
    lambda layout: sum(a + b for a, b in layout[0]) + layout[1] > 0
)


@settings(max_examples=300, deadline=None)
@given(st.lists(layouts, min_size=1, max_size=3))
def test_any_layout_is_covered_once(files: list[Layout]) -> None:
    """Whatever lies where in the files: each byte is read once, each tensor is whole, the slab has no hole."""
    checkpoint = make(*files)
    check(plan_load(checkpoint), checkpoint)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 32), count=st.integers(1, 9000), largest=st.integers(1, 600), header=st.integers(8, 9000)
)
def test_any_run_of_tiny_tensors_fits_the_buffers(seed: int, count: int, largest: int, header: int) -> None:
    """Thousands of tensors in a block never exceed a buffer or the number of buffers that preadv takes."""
    sizes = random.Random(seed).choices(range(1, largest + 1), k=count)
    checkpoint = make(([(header, sizes[0]), *((0, size) for size in sizes[1:])], 0))
    check(plan_load(checkpoint), checkpoint)


def test_scalars_grow_64_times_and_still_fit() -> None:
    """50,000 scalars of 4 bytes take 256 bytes each of the slab: one block of the file becomes several reads."""
    checkpoint = make(([(4_000_000, 4)] + [(0, 4)] * 49_999, 0))
    plan = plan_load(checkpoint)
    check(plan, checkpoint)
    assert plan.nbytes == 49_999 * 256 + 4
    assert len(plan.tasks) == 2
    assert len(plan.tasks[0].reads) >= plan.nbytes // READ_BYTES


def test_a_block_with_a_few_tensors_is_one_read() -> None:
    """The gaps that a few tensors add do not cut a block in two: the buffers have room for 256 gaps."""
    checkpoint = make(([(1000, 1 << 20)] + [(0, (1 << 20) + 2)] * 40, 0))
    plan = plan_load(checkpoint)
    check(plan, checkpoint)
    assert all(len(task.reads) == 1 for task in plan.tasks)


def test_tensors_keep_the_order_of_the_files() -> None:
    """Entries come in file order, each aligned to 256 bytes; an empty tensor has a place and no bytes."""
    plan = plan_load(make(([(8, 10), (0, 0), (0, 300)], 0), ([(8, 1)], 0)))
    assert [(entry.name, entry.offset, entry.nbytes) for entry in plan.entries] == [
        ("0.0", 0, 10),
        ("0.1", 256, 0),
        ("0.2", 256, 300),
        ("1.0", 768, 1),
    ]
    assert plan.nbytes == 769
    assert {entry.slab for entry in plan.entries} == {0}
    assert {entry.role for entry in plan.entries} == {"parameter"}


def test_bytes_that_no_tensor_needs_are_only_hashed() -> None:
    """The header and tensors that are not listed are read, but have no place in the slab."""
    plan = plan_load(make(([(100, 50), (70, 30)], 9)))
    (task,) = plan.tasks
    (read,) = task.reads
    assert [tuple(piece) for piece in read.pieces] == [(None, 100), (0, 50), (None, 70), (256, 30), (None, 9)]
    assert (read.slab_begin, read.slab_end, plan.nbytes) == (0, 286, 286)


def test_a_checkpoint_without_tensors_is_read_all_the_same() -> None:
    """Nothing to load is a plan of zero bytes that still hashes the file."""
    plan = plan_load(make(([], 10)))
    assert plan.nbytes == 0
    assert plan.entries == ()
    assert plan.file_bytes == 10
    assert [tuple(piece) for task in plan.tasks for read in task.reads for piece in read.pieces] == [(None, 10)]


@pytest.mark.parametrize(("begin", "end"), [(5, 20), (10, 9), (90, 101)], ids=["overlap", "negative", "past the end"])
def test_a_range_that_its_reader_should_have_refused_is_refused(begin: int, end: int) -> None:
    """Ranges that overlap or leave the file never reach the slab."""
    checkpoint = make(([(0, 10)], 90))
    bad = SimpleNamespace(name="bad", dtype="U8", shape=(end - begin,), begin=begin, end=end)
    checkpoint.files[0].tensors += (bad,)
    with pytest.raises(CheckpointError, match=r"model-0.safetensors: tensor 'bad'"):
        plan_load(checkpoint)


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
        count = 0

        def counting(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counting)
        try:
            plan = plan_load(checkpoint)
        finally:
            sys.setprofile(None)
        check(plan, checkpoint)
        calls.append(count)
    assert calls[1] <= 9 * calls[0]
