"""Checksums of host slabs, against xxHash's own published values and against each piece hashed alone."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import pytest
import xxhash

from tests.leaks import NoDescriptorLeaks
from weightcached.shard import checksum
from weightcached.shard.checksum import checksum_host
from weightcached.shard.host import HostSlab
from weightcached.shard.manifest import ALIGNMENT, Checksums, TensorEntry

SIZES = [0, 1, 7, 8, 9, 255, 256, 257, (1 << 20) - 1, 1 << 20, (5 << 20) + 3]


def layout(sizes: list[int]) -> list[TensorEntry]:
    """Tensors of these sizes one after the other, aligned as in a slab."""
    entries: list[TensorEntry] = []
    end = 0
    for number, nbytes in enumerate(sizes):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        entries.append(TensorEntry(f"w{number}", 0, offset, nbytes, "U8", (nbytes,)))
        end = offset + nbytes
    return entries


def slab_of(entries: list[TensorEntry]) -> HostSlab:
    """A slab of random bytes, gaps included."""
    slab = HostSlab(max(entry.offset + entry.nbytes for entry in entries))
    slab.view[:] = random.Random(5).randbytes(slab.nbytes)
    return slab


@pytest.mark.parametrize("threads", [1, 2, 7, 100])
def test_each_tensor_has_the_checksum_of_its_bytes(threads: int, descriptors: NoDescriptorLeaks) -> None:
    """In the entries' order, whatever the number of threads; neither gaps nor neighbours count."""
    entries = layout(SIZES)
    slab = slab_of(entries)
    found = checksum_host(slab.view, entries, threads)
    wanted = tuple(xxhash.xxh3_64_hexdigest(bytes(slab.view[e.offset : e.offset + e.nbytes])) for e in entries)
    assert found == Checksums("xxh3-64", wanted)
    slab.seal().close()  # which is refused while a piece of the view is still held


def test_the_algorithm_is_xxh3_with_64_bits_and_seed_0() -> None:
    """The value of no bytes is the one that xxHash documents: other tools can check a manifest."""
    empty = [TensorEntry("w", 0, 0, 0, "U8", (0,))]
    assert checksum_host(memoryview(b""), empty, 1).values == ("2d06800538d394c2",)


def test_no_tensors_are_no_checksums() -> None:
    """A shard of nothing can be published with checksums as well."""
    assert checksum_host(memoryview(b""), [], 4) == Checksums("xxh3-64", ())


def test_every_flipped_bit_changes_its_tensor_alone() -> None:
    """One bit anywhere, in the first byte, the last or one between, is seen in that tensor and no other."""
    entries = layout([1, 8, 100, 4096])
    slab = slab_of(entries)
    before = checksum_host(slab.view, entries, 2).values
    for number, entry in enumerate(entries):
        for at in {0, entry.nbytes // 2, entry.nbytes - 1}:
            for bit in range(8):
                slab.view[entry.offset + at] ^= 1 << bit
                after = checksum_host(slab.view, entries, 2).values
                slab.view[entry.offset + at] ^= 1 << bit
                assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [number]
    slab.close()


def test_an_error_of_a_thread_is_raised() -> None:
    """A tensor that cannot be read is not passed over."""
    slab = HostSlab(100)
    view = slab.view
    slab.close()
    with pytest.raises(ValueError, match="released"):
        checksum_host(view, layout([100]), 2)


def test_several_threads_hash_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large tensors are in two threads' hands at the same time: each waits for the other before it goes on."""
    both = threading.Barrier(2)
    real = xxhash.xxh3_64

    class Meeting:
        def __init__(self) -> None:
            self._state = real()

        def update(self, piece: Any) -> None:
            both.wait(20)
            self._state.update(piece)

        def hexdigest(self) -> str:
            return self._state.hexdigest()

    monkeypatch.setattr(checksum.xxhash, "xxh3_64", Meeting)
    data = os.urandom(2 * ALIGNMENT)
    found = checksum_host(memoryview(data), layout([ALIGNMENT, ALIGNMENT]), 2)
    assert found.values == tuple(xxhash.xxh3_64_hexdigest(part) for part in (data[:ALIGNMENT], data[ALIGNMENT:]))
