"""The content digest: one name for every byte of a checkpoint, computed by any number of threads in any order.

    block        4 MiB of a file at a multiple of 4 MiB, the last one shorter; the header's bytes count too
    block digest xxh3-128 of its bytes, 16 bytes, big endian (xxHash's canonical form)
    file digest  "xxh3-128-4m:" + hex xxh3-128 of all block digests in order, then the file's size as u64 little endian
    set digest   "xxh3-128-4m-set:" + hex xxh3-128 of the file digests' text, in the order of the files' names

A block can be hashed while it is hot from the read, by whichever thread read it. Names are not part of a digest, so the
same bytes under other names, in the same order, are the same content. xxh3 is no cryptographic hash: it tells
checkpoints apart, it does not prove who made one (docs/decisions/002-content-digest.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from ..errors import CheckpointChanged, CheckpointError

if TYPE_CHECKING:
    from .fileset import Checkpoint

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 16
FILE_PREFIX = "xxh3-128-4m:"
SET_PREFIX = "xxh3-128-4m-set:"


def block_count(size: int) -> int:
    """How many blocks a file of `size` bytes has; an empty file has none."""
    return -(-size // BLOCK_BYTES)


def block_digest(parts: Iterable[memoryview | bytes]) -> bytes:
    """The digest of one block, whose bytes are the `parts` in order. Drops the GIL while it hashes a large part."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


class FileDigest:
    """Collects the block digests of a file of `size` bytes, in any order, from any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._blocks: list[bytes | None] = [None] * block_count(size)

    def put(self, index: int, digest: bytes) -> None:
        """Sets block `index`. `ValueError` for a block that the file does not have, or that was set before."""
        if not 0 <= index < len(self._blocks):
            raise ValueError(f"block {index} of a file of {len(self._blocks)} blocks")
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"digest of {len(digest)} bytes, {DIGEST_BYTES} expected")
        if self._blocks[index] is not None:
            raise ValueError(f"block {index} was hashed twice")
        self._blocks[index] = digest

    def value(self) -> str:
        """The file's digest. `ValueError` while a block is missing: a partial digest would name other bytes."""
        state = xxhash.xxh3_128()
        for index, digest in enumerate(self._blocks):
            if digest is None:
                raise ValueError(f"block {index} of {len(self._blocks)} was not hashed")
            state.update(digest)
        state.update(self.size.to_bytes(8, "little"))
        return FILE_PREFIX + state.hexdigest()


def checkpoint_digest(file_digests: list[str]) -> str:
    """The digest of a set from those of its files, in the order of their names."""
    if bad := [digest for digest in file_digests if not digest.startswith(FILE_PREFIX)]:
        raise ValueError(f"not the digest of a file: {bad[0]!r}")
    return SET_PREFIX + xxhash.xxh3_128("".join(file_digests).encode()).hexdigest()


def digest_file(fd: int, size: int, threads: int = 4, file: str = "the file") -> str:
    """Reads `size` bytes of `fd` with preadv in `threads` threads of one 4 MiB buffer each, and returns their digest.

    `fd` stays the caller's. Raises `CheckpointChanged` when the file ends early, `CheckpointError` when a read fails;
    `file` is the name for the error.
    """
    digest = FileDigest(size)
    blocks = iter(range(block_count(size)))
    lock, stop = threading.Lock(), threading.Event()

    def next_block() -> int | None:
        with lock:
            return None if stop.is_set() else next(blocks, None)

    def work() -> None:
        buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
        try:
            while (index := next_block()) is not None:
                offset = index * BLOCK_BYTES
                view = buffer[: min(BLOCK_BYTES, size - offset)]
                _fill(fd, view, offset, size, file)
                digest.put(index, block_digest([view]))
        except CheckpointError:
            stop.set()  # the others end with their block, not with the file
            raise

    workers = min(max(threads, 1), block_count(size))
    if workers <= 1:
        work()
        return digest.value()
    with ThreadPoolExecutor(workers, thread_name_prefix="digest") as pool:
        try:
            for done in [pool.submit(work) for _ in range(workers)]:
                done.result()
        finally:
            stop.set()  # also when the caller is interrupted
    return digest.value()


def digest_checkpoint(checkpoint: Checkpoint, threads: int = 4) -> tuple[str, list[str]]:
    """The digest of the set and of each file in order. `CheckpointChanged` when a file changed since it was opened."""
    digests = [
        digest_file(file.fd.fileno(), file.source.size, threads, str(checkpoint.folder / file.name))
        for file in checkpoint.files
    ]
    checkpoint.recheck()
    return checkpoint_digest(digests), digests


def _fill(fd: int, view: memoryview, offset: int, size: int, file: str) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(
                file=file, problem=f"cannot read at byte {offset + done}: {error.strerror}"
            ) from error
        if not count:
            found = os.fstat(fd).st_size
            raise CheckpointChanged(
                file=file, problem=f"shrank while it was read: {size} bytes expected, {found} found"
            )
        done += count
