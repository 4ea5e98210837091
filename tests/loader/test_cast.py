"""loader.cast: what torch's `Tensor.to` gives, wherever the elements lie, through host slabs and through CUDA slabs."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_cuda import FakeDriver
from tests.loader.loads import Loaded, MakeCheckpoint, Raw, cut, digest_of, load_cuda, load_host, noise, tensors_of
from weightcached.checkpoint.digest import BLOCK_BYTES, checkpoint_digest
from weightcached.errors import MissingDependency
from weightcached.loader.cast import cast_rows, require_torch
from weightcached.loader.plan import Cast, Copy
from weightcached.parallel.slices import Part, Slice
from weightcached.shard.dtypes import DTYPES

torch = pytest.importorskip("torch")

PAIRS = [(a, b) for a, b in product(("F64", "F32", "F16", "BF16"), ("F16", "BF16", "F32")) if a != b]
BYTES = {name: DTYPES[name].bits // 8 for name in ("F64", "F32", "F16", "BF16")}


def tensor(data: bytes | bytearray, dtype: str) -> Any:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, str(DTYPES[dtype].torch_name)))


def converted(data: bytes, source: str, target: str) -> bytes:
    """The whole of `data` by `Tensor.to`, as bytes."""
    if source == target or not data:
        return data
    result = tensor(data, source).to(getattr(torch, str(DTYPES[target].torch_name)))
    return bytes(result.view(torch.uint8).numpy())


def same_numbers(found: bytes, expected: bytes, dtype: str) -> bool:
    """Bit by bit, except that one NaN is as good as another: torch's own vector and scalar code write other ones."""
    if found == expected:
        return True
    if len(found) != len(expected):
        return False
    one, other = tensor(found, dtype), tensor(expected, dtype)
    integers = {2: torch.int16, 4: torch.int32}[BYTES[dtype]]
    return bool(((one.view(integers) == other.view(integers)) | (one.isnan() & other.isnan())).all())


# The cast alone.


@settings(max_examples=200, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    rows=st.integers(1, 9),
    elements=st.integers(1, 70),
    gap=st.integers(0, 5),
    out_gap=st.integers(0, 5),
    before=st.integers(0, 5),
    seed=st.integers(0, 1 << 32),
)
def test_rows_of_any_shape(
    pair: tuple[str, str], rows: int, elements: int, gap: int, out_gap: int, before: int, seed: int
) -> None:
    """Each row is cast to its place and the bytes between rows stay as they were; no hold on the memory is left."""
    source, target = pair
    read, written = BYTES[source], BYTES[target]
    pitch, out_pitch = (elements + gap) * read, (elements + out_gap) * written
    block = bytearray(random.Random(seed).randbytes(before * read + rows * pitch))
    out = bytearray(b"\x5a" * (rows * out_pitch + 7))
    copy = Copy(0, 0, before * read, elements * read, rows, pitch, 0, Cast.between(source, target))
    with memoryview(block) as block_view, memoryview(out) as out_view:
        cast_rows(copy, block_view, out_view, out_pitch)
    for row in range(rows):
        start = before * read + row * pitch
        expected = converted(bytes(block[start : start + elements * read]), source, target)
        begin = row * out_pitch
        assert same_numbers(bytes(out[begin : begin + elements * written]), expected, target)
        end = begin + out_pitch if row < rows - 1 else len(out)
        assert not out[begin + elements * written : end].strip(b"\x5a")
    block.clear()  # BufferError while torch, or anything else, still holds them
    out.clear()


def test_halves_go_to_the_even_neighbour() -> None:
    """Values just between two bfloat16 numbers are rounded to the even one, and those past the largest to infinity."""
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.4e38, -3.4e38, 2.0**-149], dtype=torch.float32)
    block = bytearray(values.view(torch.uint8).numpy())
    out = bytearray(12)
    copy = Copy(0, 0, 0, 24, cast=Cast.between("F32", "BF16"))
    cast_rows(copy, memoryview(block), memoryview(out), 12)
    assert tensor(out, "BF16").tolist() == [1.0, 1 + 2**-6, -1.0, float("inf"), float("-inf"), 0.0]


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without torch says what to install, before anything is read, and torch is not imported to find out."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    with pytest.raises(MissingDependency, match="needs torch: pip install 'weightcached\\[torch\\]'"):
        require_torch()


def test_torch_is_imported_only_by_a_load_that_casts(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """A process that loads without a cast never imports torch; with one it does, and computes in one thread."""
    path = make_checkpoint(tmp_path / "model.safetensors", {"w": ("F32", (64,), noise(256))})
    program = (
        "import json, sys; from pathlib import Path; from tests.loader.loads import load_host\n"
        "from weightcached.loader.cast import require_torch\n"
        "from weightcached.parallel.slices import Part, Slice\n"
        "require_torch(); load_host(Path(sys.argv[1])); before = 'torch' in sys.modules\n"
        "load_host(Path(sys.argv[1]), [[Slice('w', 'BF16', (64,), (Part(0, 256, 1, 256, 0, 256),))]])\n"
        "print(json.dumps([before, sys.modules['torch'].get_num_threads()]))"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=root, capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == [False, 1]


# Whole loads. `through` is a way to load; each gives the same numbers.


@pytest.fixture(params=["host", "cuda"])
def through(request: pytest.FixtureRequest) -> Any:
    if request.param == "host":
        return load_host
    request.getfixturevalue("fake")
    return load_cuda


def check_cast(loaded: Loaded, raw: Raw, shards: list[list[Slice]]) -> None:
    """Each slice has the numbers of `Tensor.to` on the whole tensor, cut as its parts say; the rest is zeros."""
    for slab, pieces, data in zip(loaded.plan.slabs, shards, loaded.slabs, strict=True):
        position = 0
        for entry, piece in zip(slab.entries, pieces, strict=True):
            source, _, content = raw[piece.name]
            assert (entry.dtype, entry.shape) == (piece.dtype, piece.shape)
            assert not any(data[position : entry.offset]), "a gap that is not zero"
            position = entry.offset + entry.nbytes
            expected = cut(scaled(piece, source), converted(content, source, piece.dtype), entry.nbytes)
            assert same_numbers(data[entry.offset : position], expected, piece.dtype), piece.name
        assert position == len(data)


def scaled(piece: Slice, source: str) -> Slice:
    """Parts in bytes of the type that the slice has in the shard, instead of those on disk."""
    if piece.dtype == source:
        return piece
    parts = []
    for part in piece.parts:
        start, width, pitch, target, target_pitch = (
            size // BYTES[source] * BYTES[piece.dtype]
            for size in (part.start, part.width, part.pitch, part.target, part.target_pitch)
        )
        parts.append(Part(start, width, part.rows, pitch, target, target_pitch))
    return piece._replace(parts=tuple(parts))


def all_of(name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> Slice:
    return Slice(name, dtype, shape, (Part(0, nbytes, 1, nbytes, 0, nbytes),) if nbytes else ())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_whole_and_cut(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, through: Any, source: str, target: str
) -> None:
    """Tensors of odd shapes, whole and by columns, with other tensors that are not cast between them.

    Rank 0 holds everything; rank 1 the middle columns, followed by zeros, and the last rows.
    """
    size = BYTES[source]
    raw: Raw = {}
    shards: list[list[Slice]] = [[], []]
    for number, (rows, columns) in enumerate([(1, 1), (7, 33), (257, 5), (0, 4), (3, 1001), (64, 64)]):
        name, nbytes = f"w{number}", rows * columns * size
        raw[name] = (source, (rows, columns), noise(nbytes, number))
        raw[f"pad{number}"] = ("U8", (8 * number + 8,), noise(8 * number + 8, number))
        shards[0] += [all_of(name, target, (rows, columns), nbytes)]
        shards[0] += [all_of(f"pad{number}", "U8", (8 * number + 8,), 8 * number + 8)]
        first, some = columns // 3, -(-columns // 3)
        part = Part(first * size, some * size, rows, columns * size, 0, (some + 1) * size)
        shards[1].append(Slice(name, target, (rows, some + 1), (part,) if rows else ()))
    path = make_checkpoint(tmp_path / "model.safetensors", raw)
    loaded = through(path, shards, threads=2)
    check_cast(loaded, raw, shards)
    assert loaded.result.content == checkpoint_digest([digest_of(path)]), "of the file, not of what became of it"
    assert loaded.result.bytes_read == path.stat().st_size


@pytest.mark.parametrize(("source", "target"), [("BF16", "F32"), ("F32", "BF16"), ("F64", "F32"), ("F16", "F32")])
def test_over_several_blocks(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, through: Any, source: str, target: str
) -> None:
    """A tensor of several blocks, cast whole and by columns, comes together rightly in whatever order blocks are read.

    BF16 to F32 makes eight blocks of four: more than two buffers, which is all that this `staging` gives, can hold.
    """
    size = BYTES[source]
    rows, columns = 1027, 4 * BLOCK_BYTES // size // 1027
    nbytes = rows * columns * size
    raw: Raw = {"first": ("U8", (1000,), noise(1000)), "w": (source, (rows, columns), noise(nbytes))}
    third = columns // 3
    column_part = Part(third * size, third * size, rows, columns * size, 0, third * size)
    shards = [[all_of("w", target, (rows, columns), nbytes)], [Slice("w", target, (rows, third), (column_part,))]]
    path = make_checkpoint(tmp_path / "model.safetensors", raw)
    for threads, buffers in ((1, 2), (3, 9)):
        loaded = through(path, shards, threads=threads, staging=buffers * BLOCK_BYTES)
        check_cast(loaded, raw, shards)
        assert loaded.result.content == checkpoint_digest([digest_of(path)])


def test_one_tensor_cast_for_one_rank_and_as_it_is_for_another(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, through: Any
) -> None:
    """The bytes of a block serve both: a cast leaves them, and their digest, as they were read."""
    nbytes = 3 << 20
    raw: Raw = {"w": ("F32", (nbytes // 4,), noise(nbytes))}
    shards = [[all_of("w", dtype, (nbytes // 4,), nbytes)] for dtype in ("F32", "BF16", "F16", "F32")]
    path = make_checkpoint(tmp_path / "model.safetensors", raw)
    loaded = through(path, shards, threads=1)
    check_cast(loaded, raw, shards)
    assert loaded.result.content == checkpoint_digest([digest_of(path)])


def test_the_real_model_in_half_the_bytes(minilm: Path, through: Any) -> None:
    """all-MiniLM-L6-v2 as bfloat16: each float tensor is what torch makes of it, its integers stay."""
    raw = tensors_of(minilm / "model.safetensors")
    target = {"F32": "BF16"}
    shard = [all_of(name, target.get(dtype, dtype), shape, len(data)) for name, (dtype, shape, data) in raw.items()]
    loaded = through(minilm, [shard], threads=2)
    check_cast(loaded, raw, [shard])
    assert loaded.plan.slabs[0].nbytes < 0.51 * sum(len(data) for _, _, data in raw.values())


def test_casts_through_the_gpu_leave_nothing(tmp_path: Path, make_checkpoint: MakeCheckpoint, fake: FakeDriver) -> None:
    """The buffers of a load that casts are within its `staging`, and gone at its end."""
    raw: Raw = {"w": ("BF16", (8 << 20,), noise(16 << 20))}
    path = make_checkpoint(tmp_path / "model.safetensors", raw)
    pinned: list[int] = []

    def look(done: int) -> None:
        pinned.append(sum(fake.pinned.values()))

    shards = [[all_of("w", "F32", (8 << 20,), 16 << 20)]]
    load_cuda(path, shards, staging=3 * BLOCK_BYTES, threads=4, progress=look)
    assert 0 < max(pinned) <= 3 * BLOCK_BYTES
    assert fake.live() == {}
