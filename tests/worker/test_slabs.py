"""slabs: a publisher's descriptors are what its manifest says, as far as a worker without CUDA can tell."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import ManifestError
from weightcached.fds import OwnedFd
from weightcached.memfd import SEALS, sealed_memfd
from weightcached.shard.host import HostSlab
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ManifestHead, SlabEntry
from weightcached.worker import slabs
from weightcached.worker.slabs import check_slabs

F_SEAL_FUTURE_WRITE = 0x10  # fcntl.h; mappings made before it can still be written


def head(*sizes: int, device: str = "host-0") -> ManifestHead:
    slabs = tuple(SlabEntry(size) for size in sizes)
    return ManifestHead("m", 1, device, ShardKey(content="c"), slabs, 0, "2026-01-01T00:00:00+00:00")


def host_slab(nbytes: int) -> OwnedFd:
    return HostSlab(nbytes).seal()


def memfd(seals: int) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd.fileno(), 256)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def opened(path: str) -> OwnedFd:
    return OwnedFd(os.open(path, os.O_RDONLY))


def refused(manifest: ManifestHead, *slabs: OwnedFd) -> str:
    """The problem of slabs that must be refused. They stay the caller's, as with good ones; closed here."""
    try:
        with pytest.raises(ManifestError) as caught:
            check_slabs(manifest, list(slabs))
    finally:
        for slab in slabs:
            slab.close()
    return str(caught.value.problem)


@pytest.mark.parametrize("sizes", [(), (256,), (0,), (4096, 0, 256)])
def test_sealed_memfds_of_the_listed_sizes_pass(descriptors: NoDescriptorLeaks, sizes: tuple[int, ...]) -> None:
    """Any number of host slabs is taken, empty ones too; the descriptors stay open and the caller's."""
    slabs = [host_slab(size) for size in sizes]
    check_slabs(head(*sizes), slabs)
    for slab in slabs:
        assert not slab.closed
        slab.close()


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_their_number_must_be_right(descriptors: NoDescriptorLeaks, sent: int) -> None:
    """A slab too few or too many is refused with both numbers."""
    assert refused(head(256, 256), *[host_slab(256) for _ in range(sent)]) == f"{sent} slabs sent, 2 listed"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: host_slab(255), "slab 1 has 255 bytes, 256 listed"),
        (lambda: host_slab(512), "slab 1 has 512 bytes, 256 listed"),
        (lambda: memfd(0), "the slab 1 is not sealed"),
        (lambda: memfd(SEALS & ~fcntl.F_SEAL_SHRINK), "the slab 1 is not sealed"),
        (lambda: memfd(SEALS & ~fcntl.F_SEAL_GROW), "the slab 1 is not sealed"),
        (lambda: memfd(SEALS & ~fcntl.F_SEAL_WRITE), "the slab 1 is not sealed"),
        (lambda: memfd(SEALS & ~fcntl.F_SEAL_SEAL), "the slab 1 is not sealed"),
        (lambda: memfd(SEALS & ~fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE), "the slab 1 is not sealed"),
        (lambda: opened(os.devnull), "the slab 1 is not a memfd"),
        (lambda: opened(__file__), "the slab 1 is not a memfd"),
    ],
    ids=[
        "short",
        "long",
        "unsealed",
        "may shrink",
        "may grow",
        "writable",
        "may be unsealed",
        "writable where mapped",
        "device",
        "file",
    ],
)
def test_a_host_slab_must_be_final_and_of_its_size(
    descriptors: NoDescriptorLeaks, make: Callable[[], OwnedFd], problem: str
) -> None:
    """The second of two slabs is wrong in one way; the error says which and how."""
    assert refused(head(256, 256), host_slab(256), make()).startswith(problem)


def pipe_end(descriptors: NoDescriptorLeaks | None = None) -> OwnedFd:
    reader, writer = os.pipe()
    os.close(writer)
    return OwnedFd(reader)


GPU = "GPU-2f1d0c5e-6a7b-4c3d-9e8f-001122334455"


@pytest.mark.parametrize(
    "make",
    [lambda: sealed_memfd("test", bytes(256)), lambda: opened(__file__), lambda: opened(os.devnull), pipe_end],
    ids=["memfd", "file", "another device", "pipe"],
)
def test_a_gpu_slab_must_look_like_the_drivers(descriptors: NoDescriptorLeaks, make: Callable[[], OwnedFd]) -> None:
    """An export of the driver is an open /dev/nvidiactl; what is none is refused before any client imports it."""
    assert refused(head(256, device=GPU), make()) == "slab 0 is not an export of the GPU driver"


def test_what_looks_like_the_drivers_passes(descriptors: NoDescriptorLeaks, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open device of the driver's number passes, whatever size is listed: only an import would tell."""
    null = os.stat(os.devnull).st_rdev
    monkeypatch.setattr(slabs, "NVIDIA_CONTROL", (os.major(null), os.minor(null)))
    with opened(os.devnull) as device:
        check_slabs(head(256, device=GPU), [device])
