"""The content digest: one name for every byte of a checkpoint, computed by any number of threads in any order.

    block        4 MiB of a file at a multiple of 4 MiB, the last one shorter; the header's bytes count too
    block digest xxh3-128 of its bytes, 16 bytes, big endian (xxHash's canonical form)
    file digest  "xxh3-128-4m:" + hex xxh3-128 of all block digests in order, then the file's size as u64 little endian
    set digest   "xxh3-128-4m-set:" + hex xxh3-128 of the file digests' text, in the order of the files' names, and,
                 where the index leaves out tensors that a file has, of their list as JSON: [[file number, name], ...]

A block can be hashed while it is hot from the read, by whichever thread read it. Names are not part of a digest, so the
same bytes under other names, in the same order, are the same content. xxh3 is no cryptographic hash: it tells
checkpoints apart, it does not prove who made one (docs/decisions/002-content-digest.md).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from .reading import read_fully

if TYPE_CHECKING:
    from .fileset import Checkpoint

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 16
FILE_PREFIX = "xxh3-128-4m:"
SET_PREFIX = "xxh3-128-4m-set:"
MAX_THREADS = 16  # each with a buffer of one block


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


def checkpoint_digest(file_digests: Sequence[str], left_out: Sequence[tuple[int, str]] = ()) -> str:
    """The digest of a set from those of its files, in the order of their names.

    `left_out`: number of the file and name of each tensor that the index gives to another file (`Checkpoint.left_out`).
    """
    if bad := [digest for digest in file_digests if not digest.startswith(FILE_PREFIX)]:
        raise ValueError(f"not the digest of a file: {bad[0]!r}")
    text = "".join(file_digests) + (json.dumps(left_out) if left_out else "")
    return SET_PREFIX + xxhash.xxh3_128(text.encode()).hexdigest()


def json_digest(value: Any) -> str:
    """A digest of a JSON value's content, whatever the order of an object's keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


class OpenFile(NamedTuple):
    """A file to digest: its descriptor, which stays the caller's, its size in bytes, and its name for errors."""

    fd: int
    size: int
    path: str


def digest_files(files: Sequence[OpenFile], threads: int | None = None) -> list[str]:
    """The digest of each file, in order, by `threads` threads of one 4 MiB buffer each; None: as fits this host.

    The blocks of all files are one queue, so many small files keep the threads as busy as one large file does. Raises
    `CheckpointChanged` when a file ends early and `CheckpointError` when a read fails; then no thread begins another
    block.
    """
    digests = [FileDigest(file.size) for file in files]
    counts = [block_count(file.size) for file in files]
    blocks = ((number, index) for number, count in enumerate(counts) for index in range(count))
    lock, stop = threading.Lock(), threading.Event()

    def next_block() -> tuple[int, int] | None:
        with lock:
            return None if stop.is_set() else next(blocks, None)

    def work() -> None:
        buffer = memoryview(bytearray(min(BLOCK_BYTES, max(file.size for file in files))))
        while (block := next_block()) is not None:
            number, index = block
            fd, size, path = files[number]
            offset = index * BLOCK_BYTES
            view = buffer[: min(BLOCK_BYTES, size - offset)]
            read_fully(fd, path, [view], offset)
            digests[number].put(index, block_digest([view]))

    workers = min(threads or _usual_threads(), sum(counts))
    if workers > 1:
        with ThreadPoolExecutor(workers, thread_name_prefix="digest") as pool:
            try:
                running = [pool.submit(work) for _ in range(workers)]
                ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            finally:  # also for what a signal handler raises in this thread while it waits
                stop.set()
        for worker in [*ended, *running]:
            worker.result()
    elif workers:
        work()
    return [digest.value() for digest in digests]


def digest_checkpoint(
    checkpoint: Checkpoint, threads: int | None = None, known: Sequence[str | None] | None = None
) -> tuple[str, list[str]]:
    """The digest of the set and of each file in order; only files whose digest in `known` is None are read.

    `CheckpointChanged` when a file changed since it was opened.
    """
    given = list(known) if known is not None else [None] * len(checkpoint.files)
    to_read = [
        OpenFile(file.fd.fileno(), file.source.size, str(checkpoint.folder / file.name))
        for file, digest in zip(checkpoint.files, given, strict=True)
        if digest is None
    ]
    read = iter(digest_files(to_read, threads))
    digests = [next(read) if digest is None else digest for digest in given]
    checkpoint.recheck()
    return checkpoint_digest(digests, checkpoint.left_out), digests


def _usual_threads() -> int:
    """One per usable core, and 4 at least: a thread that waits for a disk uses no core."""
    return min(MAX_THREADS, max(4, len(os.sched_getaffinity(0))))
