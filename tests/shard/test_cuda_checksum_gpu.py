"""cuda_checksum on a real GPU: what the driver makes of the PTX, against the definition in plain Python."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests import gpu
from tests.leaks import NoDescriptorLeaks
from tests.shard.mix64 import GOLDEN, MASK, mix64, mix64_sum, sum_of
from tests.shard.test_checksum import layout
from tests.shard.test_cuda_checksum import SIZES
from weightcached.devices import device_memory
from weightcached.shard import cuda
from weightcached.shard.cuda import CudaMapping, CudaSlab, PrimaryContext
from weightcached.shard.cuda_checksum import checksum_slab
from weightcached.shard.manifest import MIX64_SUM, TensorEntry

pytestmark = pytest.mark.gpu
MIB = 1 << 20
LARGE = [MIB - 1, MIB, MIB + 1, 5 * MIB + 3]


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[PrimaryContext]:
    """This process keeps its context between the tests; what a first kernel opens and keeps is no leak of a later."""
    context = PrimaryContext(0)
    slab = CudaSlab.create(0, 8)
    checksum_slab(context, slab.address, layout([8]))
    slab.close()
    yield context
    context.close()


def filled(entries: list[TensorEntry]) -> tuple[CudaSlab, list[bytes]]:
    """A slab of random bytes, gaps included, and each tensor's own."""
    data = random.Random(11).randbytes(max(entry.offset + entry.nbytes for entry in entries))
    slab = CudaSlab.create(0, len(data))
    gpu.fill(slab, data)
    return slab, [data[entry.offset : entry.offset + entry.nbytes] for entry in entries]


def write(slab: CudaSlab, offset: int, data: bytes) -> None:
    with slab.context.current():
        cuda.check(cuda.driver().cuMemcpyHtoD(slab.address + offset, data, len(data)), "cuMemcpyHtoD")
    slab.context.synchronize()


def values(slab: CudaSlab, entries: list[TensorEntry]) -> tuple[str, ...]:
    found = checksum_slab(slab.context, slab.address, entries)
    assert found.algorithm == MIX64_SUM
    return found.values


@pytest.mark.timeout(300)  # the definition in Python reads some 2 MB/s
def test_the_kernel_computes_the_definition(descriptors: NoDescriptorLeaks) -> None:
    """Every length around a word, a load, a block's loads and a chunk."""
    entries = layout(SIZES + LARGE)
    slab, contents = filled(entries)
    found = values(slab, entries)
    for entry, value, content in zip(entries, found, contents, strict=True):
        assert value == mix64_sum(content), f"a tensor of {entry.nbytes} bytes"
    slab.close()


def test_20_000_tensors_in_one_launch(descriptors: NoDescriptorLeaks) -> None:
    """As many small tensors as a mixture of experts has, each with its own checksum."""
    chance = random.Random(2)
    entries = layout([chance.randint(0, 400) for _ in range(20_000)])
    slab, contents = filled(entries)
    assert values(slab, entries) == tuple(map(mix64_sum, contents))
    slab.close()


def test_each_flipped_bit_of_a_word_is_found(descriptors: NoDescriptorLeaks) -> None:
    """Of a word somewhere in a tensor, and of the last one, which is none of eight bytes: that tensor alone differs."""
    entries = layout([3 * MIB + 5, 3 * MIB + 5, 1000])
    slab, contents = filled(entries)
    before = values(slab, entries)
    for at in (random.Random(4).randrange(3 * MIB // 8) * 8, 3 * MIB):
        word = contents[1][at : at + 8]
        for bit in range(8 * len(word)):
            flipped = int.from_bytes(word, "little") ^ 1 << bit
            write(slab, entries[1].offset + at, flipped.to_bytes(len(word), "little"))
            after = values(slab, entries)
            assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True], bit
        write(slab, entries[1].offset + at, word)
    assert values(slab, entries) == before
    slab.close()


@pytest.mark.parametrize("distance", [1, 2, 512, 2048, MIB // 8])
def test_swapped_words_are_found(distance: int, descriptors: NoDescriptorLeaks) -> None:
    """Two words that changed places, in one thread's load, between two threads, loads or blocks."""
    entries = layout([3 * MIB])
    slab, (content,) = filled(entries)
    before = values(slab, entries)
    one, other = 800, 800 + 8 * distance
    write(slab, one, content[other : other + 8])
    write(slab, other, content[one : one + 8])
    assert values(slab, entries) != before
    write(slab, one, content[one : one + 8])
    write(slab, other, content[other : other + 8])
    assert values(slab, entries) == before
    slab.close()


def test_a_tensor_of_more_than_4_gib() -> None:
    """Words are counted and addressed in 64 bits.

    Python cannot sum so many, but it can tell what one changed word adds to the sum, by the word's number.
    """
    nbytes = (4 << 30) + 3 * MIB + 7
    if _free_bytes() < nbytes + (1 << 30):
        pytest.skip(f"needs {nbytes} bytes of device memory")
    entries = [TensorEntry("w", 0, 0, nbytes, "U8", (nbytes,))]
    slab = CudaSlab.create(0, nbytes)
    with slab.context.current():
        cuda.check(cuda.driver().cuMemsetD8(slab.address, 0, nbytes), "cuMemsetD8")
    slab.context.synchronize()
    (zeros,) = values(slab, entries)
    for number in (0, 1, (4 << 30) // 8 - 1, (4 << 30) // 8, (4 << 30) // 8 + 1, nbytes // 8):
        write(slab, 8 * number, b"\3")
        (found,) = values(slab, entries)
        write(slab, 8 * number, b"\0")
        place = (number + 1) * GOLDEN & MASK
        added = mix64(place + 3 & MASK) - mix64(place) & MASK
        assert sum_of(found, nbytes) - sum_of(zeros, nbytes) & MASK == added, f"word {number}"
    assert values(slab, entries) == (zeros,)
    slab.close()


def test_a_read_only_mapping_can_be_verified(context: PrimaryContext, descriptors: NoDescriptorLeaks) -> None:
    """As the verifier does: slabs side by side in one range, mapped read-only, one launch for all of them."""
    entries = layout([5000, 2 * MIB + 1, 0])
    slab, contents = filled(entries)
    size = entries[1].offset + entries[1].nbytes
    with slab.seal() as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), size), (fd.fileno(), size)])
        second = [entry._replace(offset=mapping.offsets[1] + entry.offset) for entry in entries]
        found = checksum_slab(context, mapping.address, [*entries, *second]).values
        assert found[:3] == found[3:] == tuple(map(mix64_sum, contents))
        mapping.close()


def test_it_runs_at_the_speed_of_the_memory() -> None:
    """Reading 4 GiB takes no longer than four times what copying them within the device takes.

    Beyond what a tensor of 8 bytes takes: loading the kernel depends on the driver's cache of translated kernels.
    """
    nbytes = 4 << 30
    if _free_bytes() < 2 * nbytes + (1 << 30):
        pytest.skip(f"needs {2 * nbytes} bytes of device memory")
    source, target = CudaSlab.create(0, nbytes), CudaSlab.create(0, nbytes)

    def copy() -> None:
        with source.context.current():
            cuda.check(cuda.driver().cuMemcpyDtoD(target.address, source.address, nbytes), "cuMemcpyDtoD")
        source.context.synchronize()

    copying = _best_seconds(copy)
    fixed = _best_seconds(lambda: values(source, layout([8])))
    whole = _best_seconds(lambda: values(source, layout([nbytes // 8] * 8)))
    print(f"checksums of 4 GiB {whole * 1e3:.1f} ms, of 8 bytes {fixed * 1e3:.1f} ms, a copy {copying * 1e3:.1f} ms")
    source.close()
    target.close()
    assert whole - fixed < 4 * copying


def _best_seconds(function: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def _free_bytes() -> int:
    memory = device_memory(cuda.device_name(0))
    assert memory.free is not None
    return memory.free
