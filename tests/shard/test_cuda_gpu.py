"""shard.cuda on a real GPU: what the fake driver of test_cuda.py cannot show."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from tests import gpu
from tests.leaks import NoDescriptorLeaks
from weightcached.devices import device_memory, gpu_devices
from weightcached.errors import DeviceFull, ManifestError, NoSuchDevice, WeightCacheError
from weightcached.fds import OwnedFd
from weightcached.shard import cuda
from weightcached.shard.cuda import CudaMapping, CudaSlab, PrimaryContext

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SLACK = 8 * MIB  # what the driver itself may take for an allocation


@pytest.fixture(scope="module", autouse=True)
def context() -> Iterator[PrimaryContext]:
    """This process keeps its context between the tests: making one takes longer than most of them."""
    context = PrimaryContext(0)
    with sealed(bytes(100)) as fd:  # what the driver opens and keeps at a first use is no leak of a later test
        mapping = CudaMapping.open(0, [(fd.fileno(), 100)])
        gpu.read(0, mapping.address, 100)
        mapping.close()
    yield context
    context.close()


def sealed(data: bytes) -> OwnedFd:
    slab = CudaSlab.create(0, len(data))
    gpu.fill(slab, data)
    return slab.seal()


def child(*arguments: object, fds: tuple[int, ...] = (), **environment: str) -> str:
    """Runs a role of cuda_child.py to its end and returns what it printed."""
    command = [sys.executable, "-m", "tests.shard.cuda_child", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, pass_fds=fds, stdout=subprocess.PIPE, timeout=50, text=True
    )
    return done.stdout.strip()


def test_the_device_is_the_one_that_nvml_names() -> None:
    """The UUID that CUDA gives for an ordinal is a device of NVML, and leads back to the ordinal."""
    name = cuda.device_name(0)
    assert name in [device.name for device in gpu_devices()]
    assert cuda.ordinal_of(name) == 0
    with pytest.raises(NoSuchDevice, match=name):
        cuda.ordinal_of("GPU-00000000-0000-0000-0000-000000000000")


@pytest.mark.parametrize("nbytes", [0, 1, 2 * MIB, 5 * MIB + 3])
def test_another_process_reads_what_was_written(nbytes: int, descriptors: NoDescriptorLeaks) -> None:
    """A sealed slab is close-on-exec and holds what was written; a process that gets the descriptor reads it."""
    data = os.urandom(nbytes)
    with sealed(data) as fd:
        assert fcntl.fcntl(fd.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        found = child("read", 0, f"{fd.fileno()}:{nbytes}", fds=(fd.fileno(),))
    assert found == xxhash.xxh3_128_hexdigest(data)


def test_the_descriptor_keeps_the_memory_of_a_killed_owner() -> None:
    """The owner is SIGKILLed: the memory stays, another process reads every byte; closing the descriptor frees it."""
    nbytes = 256 * MIB
    before = gpu.used_bytes(0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(50)
        command = [sys.executable, "-m", "tests.shard.cuda_child", "own", "0", str(theirs.fileno()), str(nbytes)]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()]) as owner:
            try:
                digest, (number,), _, _ = socket.recv_fds(ours, 100, 1)
            finally:
                owner.kill()
        with OwnedFd(number) as fd:
            os.set_inheritable(number, False)
            expected = before + nbytes
            assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= expected + SLACK), "the owner's context is gone"
            assert gpu.used_bytes(0) >= expected
            assert child("read", 0, f"{number}:{nbytes}", fds=(number,)) == digest.decode()
            assert fd.fileno() == number
    assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= before + SLACK)


def test_a_forbidden_write_fails_in_the_writer_only() -> None:
    """A process that writes through a read-only mapping gets an error; the bytes stay, and other readers go on."""
    data = os.urandom(3 * MIB)
    with sealed(data) as fd:
        mapping = CudaMapping.open(0, [(fd.fileno(), len(data))])
        outcome = child("write", 0, f"{fd.fileno()}:{len(data)}", fds=(fd.fileno(),))
        assert outcome.startswith("CUDA_ERROR_"), outcome
        assert gpu.read(0, mapping.address, len(data)) == data
        mapping.close()


def test_memory_is_counted_once_and_given_back(descriptors: NoDescriptorLeaks) -> None:
    """Slab, descriptor and mapping are the same memory; when the last of them is gone, the device has it back."""
    nbytes = 512 * MIB
    before = gpu.used_bytes(0)
    slab = CudaSlab.create(0, nbytes)
    assert before + nbytes <= gpu.used_bytes(0) <= before + nbytes + SLACK
    fd = slab.seal()
    assert before + nbytes <= gpu.used_bytes(0) <= before + nbytes + SLACK
    mapping = CudaMapping.open(0, [(fd.fileno(), nbytes)])
    fd.close()
    assert before + nbytes <= gpu.used_bytes(0) <= before + nbytes + SLACK
    mapping.close()
    assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= before + SLACK)
    CudaSlab.create(0, nbytes).close()
    assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= before + SLACK)


@pytest.mark.parametrize("listed", [1, 2 * MIB, 6 * MIB, 1 << 34])
def test_a_wrong_size_is_refused(listed: int, descriptors: NoDescriptorLeaks) -> None:
    """A slab of 4 MiB listed as smaller or as larger is refused by its number, beside a right one."""
    problem = rf"slab 1 is not of the {listed} bytes listed \(cuMemMap: CUDA_ERROR_"
    with sealed(bytes(100)) as right, sealed(bytes(4 * MIB)) as wrong, pytest.raises(ManifestError, match=problem):
        CudaMapping.open(0, [(right.fileno(), 100), (wrong.fileno(), listed)])


def test_what_is_no_device_memory_is_refused(descriptors: NoDescriptorLeaks) -> None:
    """An ordinary descriptor in place of a slab is an error, in this process that goes on."""
    with OwnedFd(os.memfd_create("no slab", os.MFD_CLOEXEC)) as fd, pytest.raises(WeightCacheError):
        CudaMapping.open(0, [(fd.fileno(), 100)])


def test_64_slabs_lie_side_by_side(descriptors: NoDescriptorLeaks) -> None:
    """Many slabs of different sizes share one range of addresses, each at its offset."""
    chance = random.Random(7)
    contents = [chance.randbytes(chance.randint(1, 3 * MIB)) for _ in range(64)]
    fds = [sealed(content) for content in contents]
    mapping = CudaMapping.open(0, [(fd.fileno(), len(c)) for fd, c in zip(fds, contents, strict=True)])
    for offset, content in zip(mapping.offsets, contents, strict=True):
        assert gpu.read(0, mapping.address + offset, len(content)) == content
    slabs = [f"{fd.fileno()}:{len(content)}" for fd, content in zip(fds, contents, strict=True)]
    digest = child("read", 0, *slabs, fds=tuple(fd.fileno() for fd in fds))
    assert digest == xxhash.xxh3_128_hexdigest(b"".join(contents))
    mapping.close()
    for fd in fds:
        fd.close()


def test_a_full_device_says_the_numbers(descriptors: NoDescriptorLeaks) -> None:
    """More bytes than the device has: the error has device, needed, free and in all; nothing is taken."""
    name = cuda.device_name(0)
    memory = device_memory(name)
    before = gpu.used_bytes(0)
    needed = memory.total + (1 << 30)
    with pytest.raises(DeviceFull) as caught:
        CudaSlab.create(0, needed)
    error = caught.value
    assert error.device == name
    assert needed <= error.needed < needed + 2 * MIB + 1
    assert 0 < error.free <= error.limit <= memory.total
    assert gpu.used_bytes(0) <= before + SLACK


def test_nothing_leaks_over_200_attaches(descriptors: NoDescriptorLeaks) -> None:
    """Opening and closing a mapping 200 times, and a slab 50 times, leaves descriptors and memory as they were."""
    with sealed(bytes(8 * MIB)) as fd:
        CudaMapping.open(0, [(fd.fileno(), 8 * MIB)]).close()
        before = gpu.used_bytes(0)
        checker = NoDescriptorLeaks()
        with checker:
            for _ in range(200):
                CudaMapping.open(0, [(fd.fileno(), 8 * MIB)]).close()
            for _ in range(50):
                CudaSlab.create(0, 8 * MIB).close()
                CudaSlab.create(0, 8 * MIB).seal().close()
        assert gpu.becomes_true(lambda: gpu.used_bytes(0) <= before + SLACK)


def test_a_slab_of_another_gpu_is_refused() -> None:
    """A process that sees only GPU 1 refuses a slab of GPU 0, although the driver would map it."""
    if cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with sealed(bytes(100)) as fd:
        found = child("read", 0, f"{fd.fileno()}:100", fds=(fd.fileno(),), CUDA_VISIBLE_DEVICES=cuda.device_name(1))
        assert found.startswith("WrongDevice"), found
        found = child("read", 1, f"{fd.fileno()}:100", fds=(fd.fileno(),))
        assert found.startswith("WrongDevice"), found
