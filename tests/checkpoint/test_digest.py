"""The content digest: its definition computed a second way, its order independence, and what it tells apart."""

from __future__ import annotations

import itertools
import os
import random
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.files import wait_for_tick, write_sharded
from tests.checkpoint.strict_cases import entry, file_of
from weightcached.checkpoint.digest import (
    BLOCK_BYTES,
    FileDigest,
    OpenFile,
    block_count,
    block_digest,
    checkpoint_digest,
    digest_checkpoint,
    digest_files,
)
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointChanged, CheckpointError

SIZES = [0, 1, 8, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5]


def naive(content: bytes) -> str:
    """The definition, word by word, on bytes in memory."""
    blocks = [content[begin : begin + (4 << 20)] for begin in range(0, len(content), 4 << 20)]
    joined = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    return "xxh3-128-4m:" + xxhash.xxh3_128_hexdigest(joined + len(content).to_bytes(8, "little"))


def digest_path(path: Path, threads: int = 4) -> str:
    with path.open("rb") as file:
        return digest_files([OpenFile(file.fileno(), path.stat().st_size, str(path))], threads)[0]


@pytest.fixture(scope="module")
def noise() -> bytes:
    return random.Random(1).randbytes(max(SIZES))


def test_definition_stands_still() -> None:
    """Digests are kept in keys and caches: these values may never change under the same prefix."""
    empty = FileDigest(0)
    assert empty.value() == "xxh3-128-4m:2c0a8a99dc147d5445c3b49d035665b2"
    short = FileDigest(3)
    short.put(0, block_digest([b"abc"]))
    assert short.value() == "xxh3-128-4m:00bb8f5bbcc6694e541b81f687d45e2f"
    assert checkpoint_digest([empty.value(), short.value()]) == "xxh3-128-4m-set:16cf5ce8d708180e2130b8f4e880a265"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_equals_the_naive_computation(size: int, threads: int, noise: bytes, tmp_path: Path) -> None:
    """At and around the block's edges, with any number of threads, the digest is that of the definition."""
    path = tmp_path / "file"
    path.write_bytes(noise[:size])
    assert digest_path(path, threads) == naive(noise[:size])
    assert block_count(size) == len(range(0, size, BLOCK_BYTES))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_parts_of_a_block_do_not_matter(content: bytes, cuts: list[int]) -> None:
    """A block's digest is the same however it is cut into parts, memoryviews and bytes alike."""
    edges = sorted({0, len(content), *(min(cut, len(content)) for cut in cuts)})
    parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(edges)]
    assert block_digest(parts) == block_digest([content]) == xxhash.xxh3_128_digest(content)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(7)))
def test_order_of_blocks_does_not_matter(order: list[int]) -> None:
    """Blocks may be put in any order; the digest is that of their order in the file."""
    digests = [block_digest([bytes([index])]) for index in range(7)]
    shuffled, straight = (FileDigest(6 * BLOCK_BYTES + 1) for _ in range(2))
    for index in order:
        shuffled.put(index, digests[index])
    for index in range(7):
        straight.put(index, digests[index])
    assert shuffled.value() == straight.value()


def test_blocks_are_told_apart_by_their_place() -> None:
    """Two blocks that change places are another file."""
    one, other = (FileDigest(2 * BLOCK_BYTES) for _ in range(2))
    for index in range(2):
        one.put(index, block_digest([bytes([index])]))
        other.put(1 - index, block_digest([bytes([index])]))
    assert one.value() != other.value()


def test_threads_may_put_at_once() -> None:
    """Blocks put by several threads all arrive."""
    count = 400
    digest = FileDigest(count * BLOCK_BYTES)

    def put(start: int) -> None:
        for index in range(start, count, 4):
            digest.put(index, block_digest([index.to_bytes(4, "little")]))

    threads = [threading.Thread(target=put, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digest.value().startswith("xxh3-128-4m:")


@pytest.mark.parametrize("at", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 4])
def test_one_flipped_bit_is_another_digest(at: int, noise: bytes, tmp_path: Path) -> None:
    """One bit anywhere, the last byte of the last block included, changes the digest."""
    path = tmp_path / "file"
    path.write_bytes(noise)
    before = digest_path(path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([noise[at] ^ 1]))
    assert digest_path(path) != before


def test_length_counts(tmp_path: Path) -> None:
    """Zeros of different lengths differ, also by whole blocks."""
    digests = set()
    for size in (0, 1, 2, BLOCK_BYTES, 2 * BLOCK_BYTES):
        path = tmp_path / str(size)
        with path.open("wb") as file:
            file.truncate(size)
        digests.add(digest_path(path))
    assert len(digests) == 5


def test_missing_block_gives_no_digest() -> None:
    """A digest that lacks a block is an error that names it, never the digest of less."""
    digest = FileDigest(3 * BLOCK_BYTES)
    digest.put(0, bytes(16))
    digest.put(2, bytes(16))
    with pytest.raises(ValueError, match="block 1 of 3 was not hashed"):
        digest.value()


def test_wrong_blocks_are_refused() -> None:
    """A block that the file does not have, a block hashed twice and a digest of another length are errors."""
    digest = FileDigest(BLOCK_BYTES + 1)
    digest.put(1, bytes(16))
    for index, value, words in (
        (2, bytes(16), "block 2 of a file of 2 blocks"),
        (-1, bytes(16), "block -1 of a file of 2 blocks"),
        (1, bytes(16), "block 1 was hashed twice"),
        (0, bytes(8), "digest of 8 bytes, 16 expected"),
    ):
        with pytest.raises(ValueError, match=words):
            digest.put(index, value)


def test_set_is_bound_to_order_and_files_only() -> None:
    """The set's digest depends on the files' digests and their order, and takes nothing but file digests."""
    one, two = "xxh3-128-4m:" + "1" * 32, "xxh3-128-4m:" + "2" * 32
    assert checkpoint_digest([one, two]) == checkpoint_digest([one, two])
    assert len({checkpoint_digest(files) for files in ([one, two], [two, one], [one], [one, one], [])}) == 5
    with pytest.raises(ValueError, match="not the digest of a file: 'sha256:00'"):
        checkpoint_digest([one, "sha256:00"])


@pytest.mark.parametrize("threads", [1, 4])
def test_file_that_ends_early(threads: int, tmp_path: Path) -> None:
    """A file shorter than it was is a change, with both numbers."""
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK_BYTES + 100))
    with path.open("rb") as file, pytest.raises(CheckpointChanged) as caught:
        digest_files([OpenFile(file.fileno(), 2 * BLOCK_BYTES, "model.safetensors")], threads)
    assert str(caught.value) == (
        f"model.safetensors: shrank while it was read: {2 * BLOCK_BYTES} bytes expected, {BLOCK_BYTES + 100} found"
    )


def test_read_error_stops_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed read no thread begins another block, and the error is the checkpoint's."""
    begun = []
    preadv = os.preadv

    def fail_on_the_second_block(fd: int, views: list[memoryview], offset: int) -> int:
        begun.append(offset // BLOCK_BYTES)
        if offset == BLOCK_BYTES:
            raise OSError(5, "Input/output error")
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", fail_on_the_second_block)
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(100 * BLOCK_BYTES)
    with pytest.raises(CheckpointError, match="file: cannot read at byte 4194304: Input/output error"):
        digest_path(path, 2)
    assert len(begun) < 100


def test_all_files_are_one_queue(noise: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of different files are read at the same time, and each file's digest is its own."""
    threads = 3
    together = threading.Barrier(threads)  # a thread that reads alone would break it
    preadv = os.preadv

    def meet(fd: int, views: list[memoryview], offset: int) -> int:
        together.wait(30)
        return preadv(fd, views, offset)

    sizes = [5, BLOCK_BYTES + 1, 0, 1, 2 * BLOCK_BYTES]  # 6 blocks
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(noise[number : number + size])
    monkeypatch.setattr(os, "preadv", meet)
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(number)).open("rb")) for number in range(len(sizes))]
        found = digest_files([OpenFile(file.fileno(), size, "f") for file, size in zip(files, sizes, strict=True)], 3)
    assert found == [naive(noise[number : number + size]) for number, size in enumerate(sizes)]


def test_no_files_have_no_digests() -> None:
    """Without a file nothing is read and no thread is started; empty files have the digest of nothing."""
    assert digest_files([]) == []
    assert digest_files([OpenFile(-1, 0, "never read")] * 2) == [naive(b"")] * 2


def test_known_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files without a known digest are read; the set's digest is of all of them, in order."""
    folder = write_sharded(tmp_path, {f"{name}.safetensors": [name] for name in "abc"})
    inodes = []
    preadv = os.preadv

    def note(fd: int, views: list[memoryview], offset: int) -> int:
        inodes.append(os.fstat(fd).st_ino)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", note)
    with open_checkpoint(folder) as checkpoint:
        content, digests = digest_checkpoint(checkpoint)
        assert sorted(inodes) == sorted(file.source.inode for file in checkpoint.files)
        inodes.clear()
        assert digest_checkpoint(checkpoint, known=[digests[0], None, digests[2]]) == (content, digests)
        assert inodes == [checkpoint.files[1].source.inode]
        other = "xxh3-128-4m:" + "0" * 32
        assert digest_checkpoint(checkpoint, known=[other, *digests[1:]])[1] == [other, *digests[1:]]
        with pytest.raises(ValueError):
            digest_checkpoint(checkpoint, known=digests[:2])


def test_checkpoint_is_digested_file_by_file(tmp_path: Path) -> None:
    """The set's digest and those of its files in order, equal to the naive ones; headers are part of it."""
    folder = write_sharded(tmp_path, {"a.safetensors": ["x"], "b.safetensors": ["y", "z"]})
    expected = [naive((folder / name).read_bytes()) for name in ("a.safetensors", "b.safetensors")]
    with open_checkpoint(folder) as checkpoint:
        assert digest_checkpoint(checkpoint) == (checkpoint_digest(expected), expected)


def test_same_bytes_under_other_names(tmp_path: Path) -> None:
    """A copy whose shards have other names, in the same order, is the same content."""
    one = write_sharded(tmp_path / "one", {"a.safetensors": ["x"], "b.safetensors": ["y"]})
    other = write_sharded(tmp_path / "other", {"c.safetensors": ["x"], "d.safetensors": ["y"]})
    with open_checkpoint(one) as first, open_checkpoint(other) as second:
        assert digest_checkpoint(first)[0] == digest_checkpoint(second, threads=1)[0]


def test_equal_headers_with_other_weights_differ(tmp_path: Path) -> None:
    """A fine-tune that differs from its base in one weight and in nothing else has another digest."""
    start = file_of({"w": entry("F32", [4], 0, 16)})
    for name, last in (("base", 0), ("tune", 1)):
        (tmp_path / f"{name}.safetensors").write_bytes(start + bytes(15) + bytes([last]))
    with open_checkpoint(tmp_path / "base.safetensors") as base, open_checkpoint(tmp_path / "tune.safetensors") as tune:
        assert base.files[0].header == tune.files[0].header
        assert digest_checkpoint(base)[0] != digest_checkpoint(tune)[0]


def test_change_while_digesting_is_an_error(tmp_path: Path) -> None:
    """A digest of bytes that changed since the header was read is never given out."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({"w": entry("U8", [4], 0, 4)}, 4))
    wait_for_tick(path)
    with open_checkpoint(path) as checkpoint:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        with pytest.raises(CheckpointChanged, match="was written or altered"):
            digest_checkpoint(checkpoint)


def test_real_model(minilm: Path) -> None:
    """The digest of a real model equals the naive one over its 90 MB."""
    with open_checkpoint(minilm) as checkpoint:
        content, [file] = digest_checkpoint(checkpoint, threads=2)
    assert file == naive((minilm / "model.safetensors").read_bytes())
    assert content == checkpoint_digest([file])
