"""Checksums of tensors in host memory: the algorithm "xxh3-64", xxHash's XXH3 with 64 bits over each tensor's bytes.

They tell whether resident weights still are what was loaded; they are no proof against someone who wants to deceive.
GPU slabs have an algorithm of their own, see `cuda_checksum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from .manifest import XXH3_64, Checksums, TensorEntry


def checksum_host(view: memoryview, entries: Sequence[TensorEntry], threads: int = 4) -> Checksums:
    """One checksum for each entry, in order, of its `nbytes` bytes at its `offset` of `view`.

    `view` is one slab's memory; for a shard of several slabs, call it with each one's entries. The slab may be sealed
    when it returns: no piece of the view is kept. Each of `threads` threads takes one tensor after the other, the
    largest first, and drops the GIL while it reads a large one.
    """
    values = [""] * len(entries)
    # Shared by the threads: the next number of a list's iterator is taken under the GIL.
    numbers = iter(sorted(range(len(entries)), key=lambda number: -entries[number].nbytes))

    def work() -> None:
        for number in numbers:
            entry = entries[number]
            state = xxhash.xxh3_64()
            with view[entry.offset : entry.offset + entry.nbytes] as piece:
                state.update(piece)
            values[number] = state.hexdigest()

    with ThreadPoolExecutor(max(1, min(threads, len(entries)))) as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    return Checksums(XXH3_64, tuple(values))
