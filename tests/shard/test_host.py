"""Host slabs: sealed for good, mapped privately."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import DeviceError, ManifestError
from weightcached.fds import OwnedFd
from weightcached.shard.host import HostSlab, map_host_slab

if TYPE_CHECKING:
    from weightcached.shard.slab import SlabWriter

SIZE = 3 * mmap.PAGESIZE + 100  # no whole number of pages
MEMORY = bytes(range(256)) * (SIZE // 256 + 1)


@pytest.fixture(autouse=True)
def _no_leaks(descriptors: NoDescriptorLeaks) -> NoDescriptorLeaks:
    return descriptors


def sealed_slab(data: bytes = MEMORY[:SIZE]) -> OwnedFd:
    slab = HostSlab(len(data))
    slab.view[:] = data
    return slab.seal()


def test_what_is_written_is_what_is_mapped() -> None:
    """The bytes put into the view before sealing are the bytes of the mapping after it."""
    with sealed_slab() as fd:
        mapping = map_host_slab(fd.fileno(), SIZE)

    assert mapping is not None
    assert bytes(mapping) == MEMORY[:SIZE]


def test_a_host_slab_is_a_slab_writer() -> None:
    """The class has the form that loaders and publishers are written against."""
    writer: SlabWriter = HostSlab(1)
    assert writer.nbytes == 1
    writer.close()
    writer.close()


def test_a_sealed_slab_cannot_be_written() -> None:
    """write(2), pwrite(2) and a shared writable mapping are all refused by the kernel with EPERM."""
    with sealed_slab() as fd:
        with pytest.raises(PermissionError):
            os.write(fd.fileno(), b"x")
        with pytest.raises(PermissionError):
            os.pwrite(fd.fileno(), b"x", 10)
        with pytest.raises(PermissionError):
            mmap.mmap(fd.fileno(), SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        assert os.pread(fd.fileno(), SIZE, 0) == MEMORY[:SIZE]


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_sealed_slab_cannot_change_its_length(size: int) -> None:
    """Neither shrinking, which would be a SIGBUS in every engine, nor growing."""
    with sealed_slab() as fd:
        with pytest.raises(PermissionError):
            os.ftruncate(fd.fileno(), size)
        with pytest.raises(PermissionError):
            os.posix_fallocate(fd.fileno(), SIZE, 1)
        assert os.fstat(fd.fileno()).st_size == SIZE


def test_the_seals_themselves_are_sealed() -> None:
    """Nobody can add another seal, so what a client checked stays so."""
    with sealed_slab() as fd, pytest.raises(PermissionError):
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


def test_a_descriptor_opened_again_for_writing_cannot_write() -> None:
    """The memfd opened anew through /proc with O_RDWR is bound by the same seals."""
    with (
        sealed_slab() as fd,
        OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_RDWR)) as again,
        pytest.raises(PermissionError),
    ):
        os.write(again.fileno(), b"x")


def test_a_stray_write_stays_with_its_writer() -> None:
    """A write to one mapping is not seen by a second mapping, by another process's mapping or in the memfd."""
    child = (
        "import sys\n"
        "from weightcached.shard.host import map_host_slab\n"
        "mapping = map_host_slab(int(sys.argv[1]), int(sys.argv[2]))\n"
        "print(mapping[:4].hex(), flush=True)\n"
        "sys.stdin.readline()\n"  # the parent has written by now
        "print(mapping[:4].hex(), flush=True)\n"
        "mapping[:4] = b'CCCC'\n"
        "print(mapping[:4].hex(), flush=True)\n"
    )
    with sealed_slab() as fd:
        mine, second = map_host_slab(fd.fileno(), SIZE), map_host_slab(fd.fileno(), SIZE)
        assert mine is not None
        assert second is not None
        with subprocess.Popen(
            [sys.executable, "-c", child, str(fd.fileno()), str(SIZE)],
            pass_fds=[fd.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            before = process.stdout.readline().strip()
            mine[:4] = b"PPPP"
            process.stdin.write("\n")
            process.stdin.flush()
            after, own = process.stdout.readline().strip(), process.stdout.readline().strip()

        assert process.returncode == 0
        assert before == after == MEMORY[:4].hex()
        assert own == b"CCCC".hex()
        assert mine[:4] == b"PPPP"
        assert second[:4] == MEMORY[:4]
        assert os.pread(fd.fileno(), 4, 0) == MEMORY[:4]


def test_a_mapping_outlives_the_descriptor() -> None:
    """The memory stays while it is mapped, whoever closed the descriptor."""
    with sealed_slab() as fd:
        mapping = map_host_slab(fd.fileno(), SIZE)

    assert fd.closed
    assert mapping is not None
    assert mapping[SIZE - 1] == MEMORY[SIZE - 1]


def test_a_mapping_carries_a_lease() -> None:
    """The client hangs its lease on the mapping; it is let go with the last reference."""
    ended = []

    class Lease:
        def __del__(self) -> None:
            ended.append(True)

    with sealed_slab() as fd:
        mapping = map_host_slab(fd.fileno(), SIZE)
    assert mapping is not None
    mapping.lease = Lease()
    view = memoryview(mapping)

    del mapping
    assert not ended, "a view of the memory still holds the mapping"
    view.release()
    del view
    assert ended


def test_an_empty_slab() -> None:
    """A shard with only empty tensors has a slab of no bytes: sealed like any other, mapped as None."""
    with sealed_slab(b"") as fd:
        assert os.fstat(fd.fileno()).st_size == 0
        assert map_host_slab(fd.fileno(), 0) is None
        with pytest.raises(PermissionError):
            os.write(fd.fileno(), b"x")


def test_a_slab_that_could_still_change_is_refused() -> None:
    """An unsealed memfd, one without the write seal, and an ordinary file are not mapped."""
    with OwnedFd(os.memfd_create("x", os.MFD_ALLOW_SEALING)) as fd:
        os.ftruncate(fd.fileno(), SIZE)
        with pytest.raises(ManifestError, match="the slab is not sealed"):
            map_host_slab(fd.fileno(), SIZE)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        with pytest.raises(ManifestError, match="the slab is not sealed"):
            map_host_slab(fd.fileno(), SIZE)


def test_an_ordinary_file_is_refused(tmp_path: Path) -> None:
    """A file on disk, which anybody could change, is no slab."""
    (tmp_path / "file").write_bytes(MEMORY[:SIZE])
    with OwnedFd(os.open(tmp_path / "file", os.O_RDWR)) as fd, pytest.raises(ManifestError, match="not a memfd"):
        map_host_slab(fd.fileno(), SIZE)


@pytest.mark.parametrize("listed", [SIZE - 1, SIZE + 1, 0])
def test_another_length_than_listed_is_refused(listed: int) -> None:
    """The manifest's length must be the memfd's: a longer mapping would be a SIGBUS past the end."""
    with sealed_slab() as fd, pytest.raises(ManifestError, match=f"slab of {SIZE} bytes, {listed} listed"):
        map_host_slab(fd.fileno(), listed)


def test_closing_unsealed_frees_everything() -> None:
    """A load that fails closes its slab: no descriptor, no mapping and no memory stay."""
    slab = HostSlab(SIZE)
    assert "weightcached-slab" in Path("/proc/self/maps").read_text()

    slab.close()
    slab.close()

    assert "weightcached-slab" not in Path("/proc/self/maps").read_text()
    with pytest.raises(ValueError, match="released"):
        slab.view[0]


def test_sealing_twice_is_an_error() -> None:
    """The descriptor was handed on; there is no second one."""
    slab = HostSlab(SIZE)
    with slab.seal(), pytest.raises(ValueError, match="handed on"):
        slab.seal()


def test_a_live_view_keeps_a_slab_from_being_sealed() -> None:
    """While a reader thread still holds a piece of the view, sealing is refused and gives nothing out."""
    slab = HostSlab(SIZE)
    piece = slab.view[10:20]

    with pytest.raises(BufferError):
        slab.seal()

    piece.release()
    slab.close()


def test_the_memory_is_taken_at_once() -> None:
    """The pages exist before the first write, so that a full host is an error here and no signal later."""
    slab = HostSlab(1 << 20)
    with sealed_slab(b"x" * 10) as small:
        assert os.fstat(small.fileno()).st_blocks * 512 >= 10
    with slab.seal() as fd:
        assert os.fstat(fd.fileno()).st_blocks * 512 == 1 << 20


def test_memory_that_cannot_be_had_is_a_device_error() -> None:
    """Where the kernel refuses the bytes (here by a limit on the process) the error says so, and nothing leaks."""
    program = (
        "import os, resource\n"
        "from weightcached.errors import DeviceError\n"
        "from weightcached.shard.host import HostSlab\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "before = os.listdir('/proc/self/fd')\n"
        "try: HostSlab((1 << 20) + 1)\n"
        "except DeviceError as error: print(error)\n"
        "print(os.listdir('/proc/self/fd') == before)\n"
    )

    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)

    reason = os.strerror(errno.EFBIG)
    assert run.stdout == f"host: cannot take 1048577 bytes of memory: {reason}\nTrue\n"
    assert run.stderr == ""


def test_address_space_that_cannot_be_had_is_a_device_error() -> None:
    """A client whose address space is limited learns what could not be mapped."""
    program = (
        "import resource, sys\n"
        "from weightcached.errors import DeviceError\n"
        "from weightcached.shard.host import map_host_slab\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))\n"
        "try: map_host_slab(int(sys.argv[1]), 4 << 20)\n"
        "except DeviceError as error: print(error)\n"
    )
    slab = HostSlab(4 << 20)
    with slab.seal() as fd:
        command = [sys.executable, "-c", program, str(fd.fileno())]
        run = subprocess.run(command, pass_fds=[fd.fileno()], capture_output=True, text=True, check=True)

    assert run.stdout == f"host: cannot map {4 << 20} bytes: {os.strerror(errno.ENOMEM)}\n"


def test_a_negative_length_is_a_device_error() -> None:
    """A length that is none is refused like one that cannot be had."""
    with pytest.raises(DeviceError, match="cannot take -1 bytes"):
        HostSlab(-1)
