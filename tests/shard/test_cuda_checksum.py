"""cuda_checksum without a GPU: its kernel run from its PTX, its table, its undoing. See also test_cuda_checksum_gpu."""

from __future__ import annotations

import random
import re

import pytest

from tests import ptx
from tests.fake_cuda import FakeDriver, Status
from tests.leaks import NoDescriptorLeaks
from tests.shard.mix64 import mix64_sum, sum_of
from tests.shard.test_checksum import layout
from weightcached.errors import DeviceError
from weightcached.shard import cuda, cuda_checksum
from weightcached.shard.cuda import CudaMapping, CudaSlab
from weightcached.shard.cuda_checksum import CHUNK_BYTES, PTX, THREADS, checksum_slab, mix64
from weightcached.shard.manifest import Checksums, TensorEntry

LOAD = 16 * THREADS  # bytes that a block reads at once
# Around a word, a pair of words, a block's load and its four loads in one.
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 255, 256, LOAD - 1, LOAD, LOAD + 1, 4 * LOAD - 16, 4 * LOAD, 9 * LOAD + 24]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks) -> FakeDriver:
    """A process with one GPU, whose driver is initialised."""
    driver = FakeDriver()
    driver.initialised = True
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    return driver


def filled(fake: FakeDriver, entries: list[TensorEntry]) -> tuple[CudaSlab, list[bytes]]:
    """A slab of random bytes, gaps included, and each tensor's own."""
    data = random.Random(3).randbytes(max(entry.offset + entry.nbytes for entry in entries) or 1)
    slab = CudaSlab.create(0, len(data))
    fake.poke(slab.address, data)
    return slab, [data[entry.offset : entry.offset + entry.nbytes] for entry in entries]


def test_splitmix64_has_its_known_values() -> None:
    """The first numbers of splitmix64 with seed 0, which is mix64 of 1, 2 and 3 times GOLDEN."""
    found = [mix64(step * cuda_checksum.GOLDEN % 2**64) for step in (1, 2, 3)]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("chunk", [CHUNK_BYTES, 5 * LOAD, 16])
def test_the_kernel_computes_the_definition(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Tensors of all kinds of lengths, in one chunk or in many, have the checksums of the definition in Python."""
    monkeypatch.setattr(cuda_checksum, "CHUNK_BYTES", chunk)
    sizes = SIZES if chunk > 16 else SIZES[:10]
    entries = layout(sizes)
    slab, contents = filled(fake, entries)
    found = checksum_slab(slab.context, slab.address, entries)
    assert found == Checksums("mix64-sum", tuple(map(mix64_sum, contents)))
    assert fake.launches == [(sum(-(-nbytes // chunk) for nbytes in sizes), THREADS)]
    slab.close()
    assert fake.live() == {}


def test_a_read_only_mapping_of_several_slabs_is_read(fake: FakeDriver) -> None:
    """As the verifier does: every slab mapped into one range, a tensor at its slab's offset plus its own."""
    entries = layout([40, 1000])
    slab, contents = filled(fake, entries)
    with slab.seal() as fd:
        size = entries[1].offset + 1000
        mapping = CudaMapping.open(0, [(fd.fileno(), size), (fd.fileno(), size)])
        second = [entry._replace(offset=mapping.offsets[1] + entry.offset) for entry in entries]
        context = cuda.PrimaryContext(0)
        found = checksum_slab(context, mapping.address, [*entries, *second])
        assert found.values == tuple(map(mix64_sum, contents * 2))
        context.close()
        mapping.close()


def test_padding_and_length_count(fake: FakeDriver) -> None:
    """The same words in another length are another tensor: zeros at the end are not lost."""
    slab = CudaSlab.create(0, 4096)
    fake.poke(slab.address, bytes(4096))
    values = checksum_slab(slab.context, slab.address, layout([0, 1, 2, 7, 8, 9, 16, 24])).values
    assert len(set(values)) == len(values)
    slab.close()


def test_one_changed_bit_and_swapped_words_are_found(fake: FakeDriver) -> None:
    """A bit of a word, and two words that changed places, give another checksum; the old bytes give the old one."""
    (entry,) = layout([LOAD + 8])
    slab, (data,) = filled(fake, [entry])
    before = checksum_slab(slab.context, slab.address, [entry]).values
    for bit in (0, 31, 32, 63):
        word = int.from_bytes(data[LOAD:], "little") ^ 1 << bit
        fake.poke(slab.address + LOAD, word.to_bytes(8, "little"))
        assert checksum_slab(slab.context, slab.address, [entry]).values != before
    fake.poke(slab.address, data[LOAD:] + data[8:LOAD] + data[:8])
    assert checksum_slab(slab.context, slab.address, [entry]).values != before
    fake.poke(slab.address, data)
    assert checksum_slab(slab.context, slab.address, [entry]).values == before
    slab.close()


def test_the_definitions_inverse_is_one() -> None:
    """`sum_of`, by which the GPU's tests tell what one word adds, takes a checksum back to its sum."""
    words = [1, 2**63, 12345]
    data = b"".join(word.to_bytes(8, "little") for word in words)
    total = sum(mix64((word + (i + 1) * cuda_checksum.GOLDEN) % 2**64) for i, word in enumerate(words)) % 2**64
    assert sum_of(mix64_sum(data), len(data)) == total


def test_the_table_reaches_beyond_32_bits() -> None:
    """A tensor of 9 GiB and 5 bytes: every byte in exactly one chunk, words and addresses counted in 64 bits."""
    nbytes = (9 << 30) + 5
    entries = [TensorEntry("a", 0, 256, 0, "U8", (0,)), TensorEntry("w", 0, 1 << 40, nbytes, "U8", (nbytes,))]
    table = cuda_checksum._chunks(1 << 46, entries)
    count = len(table) // 4
    rows = list(zip(*(table[at : at + count] for at in range(0, len(table), count)), strict=True))
    assert len(rows) == count == (9 << 10) + 1
    end = (1 << 46) + (1 << 40)
    for address, size, first, number in rows:
        assert (address, first, number) == (end, (address - rows[0][0]) // 8, 1)
        assert 0 < size <= CHUNK_BYTES
        end = address + size
    assert end == (1 << 46) + (1 << 40) + nbytes
    assert rows[-1][1] == 5


def test_nothing_to_read_starts_nothing(fake: FakeDriver) -> None:
    """Tensors without bytes have their checksum without a kernel, which cannot have a grid of 0 blocks."""
    context = cuda.PrimaryContext(0)
    assert checksum_slab(context, 1 << 40, []).values == ()
    assert checksum_slab(context, 1 << 40, layout([0, 0])).values == (mix64_sum(b""),) * 2
    assert fake.launches == []
    context.close()


def test_every_step_undoes_itself(fake: FakeDriver) -> None:
    """Whichever call fails: the error says which, and neither module nor memory nor a current context is left."""
    entries = layout([100])
    slab, _ = filled(fake, entries)
    before = fake.live()
    fake.calls.clear()
    checksum_slab(slab.context, slab.address, entries)
    calls = list(fake.calls)
    assert fake.live() == before
    undoing = {"cuCtxPopCurrent", "cuMemFree", "cuModuleUnload"}
    for number, name in enumerate(calls):
        if name in undoing:
            continue
        fake.calls.clear()
        fake.failures = {number: Status.CUDA_ERROR_UNKNOWN}
        said = "checksum kernel" if name == "cuMemcpyDtoH" else name
        with pytest.raises(DeviceError, match=f"{said}.*: CUDA_ERROR_UNKNOWN"):
            checksum_slab(slab.context, slab.address, entries)
        assert fake.live() == before, f"left behind after {name} failed"
    assert set(calls) - undoing == {
        "cuCtxPushCurrent",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuMemAlloc",
        "cuMemcpyHtoD",
        "cuLaunchKernel",
        "cuMemcpyDtoH",
    }
    slab.close()


def test_memory_that_is_not_there_is_an_error(fake: FakeDriver) -> None:
    """A tensor past what is mapped is a fault of the device, reported and not a checksum of something else."""
    context = cuda.PrimaryContext(0)
    with pytest.raises(DeviceError, match="checksum kernel: CUDA_ERROR_ILLEGAL_ADDRESS"):
        checksum_slab(context, 1 << 40, layout([100]))
    context.close()
    assert fake.live() == {}


def test_the_kernel_is_for_every_gpu_that_has_the_memory() -> None:
    """Virtual memory management needs Volta or later: PTX of that level, which every later driver translates."""
    text = PTX[:-1].decode()
    assert PTX.endswith(b"}\n\0")
    assert re.search(r"^\.version 7\.0$", text, re.MULTILINE)
    assert re.search(r"^\.target sm_70$", text, re.MULTILINE)
    assert ptx.parse(text)["weightcached_mix64_sum"].threads == THREADS
