"""Sealed memfds: made in one step, and told from everything that could still change."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import ManifestError
from weightcached.fds import OwnedFd
from weightcached.memfd import SEALS, require_seals, sealed_memfd


@pytest.fixture(autouse=True)
def _no_leaks(descriptors: NoDescriptorLeaks) -> NoDescriptorLeaks:
    return descriptors


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000], ids=len)
def test_it_holds_the_data_for_good(data: bytes) -> None:
    """The bytes are there from the start, and nobody can write, grow, shrink, map them writable or change the seals."""
    with sealed_memfd("weightcached-test", data) as fd:
        number = fd.fileno()
        assert os.pread(number, len(data) + 1, 0) == data
        assert "weightcached-test" in os.readlink(f"/proc/self/fd/{number}")
        assert fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        require_seals(number, "memfd")
        for attempt in (
            lambda: os.pwrite(number, b"x", 0),
            lambda: os.ftruncate(number, len(data) + 1),
            lambda: fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                attempt()
        if data:
            with pytest.raises(PermissionError):
                mmap.mmap(number, len(data), flags=mmap.MAP_SHARED)
            with pytest.raises(PermissionError):
                os.ftruncate(number, 0)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_each_missing_seal_is_refused(missing: int) -> None:
    """All four seals are needed; without any one of them the memfd could still change."""
    with OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS & ~missing)
        with pytest.raises(ManifestError, match="the manifest is not sealed"):
            require_seals(fd.fileno(), "manifest")


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    """A file on disk and a pipe, which must not be read for ever either, cannot be sealed."""
    (tmp_path / "file").write_text("{}")
    readable, writable = os.pipe()
    with OwnedFd(readable), OwnedFd(writable), OwnedFd(os.open(tmp_path / "file", os.O_RDONLY)) as file:
        for fd in (readable, file.fileno()):
            with pytest.raises(ManifestError, match="the slab is not a memfd"):
                require_seals(fd, "slab")
