"""loader.ring: buffers that are one memory for whoever has its descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import sys

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.loader.loads import noise
from weightcached.checkpoint.digest import BLOCK_BYTES
from weightcached.errors import DeviceError
from weightcached.loader.ring import Ring

pytestmark = pytest.mark.usefixtures("descriptors")


def test_the_same_bytes_by_every_way() -> None:
    """View, address and descriptor lead to the same memory; a buffer begins at a page."""
    ring = Ring(3)
    data = noise(BLOCK_BYTES)
    assert os.fstat(ring.fd.fileno()).st_size == ring.nbytes == 3 * BLOCK_BYTES
    assert ring.count == 3
    os.pwrite(ring.fd.fileno(), data, 2 * BLOCK_BYTES)
    with ring.view(2) as view:
        assert view == data
        view[5:8] = b"abc"
    assert ring.address % mmap.PAGESIZE == BLOCK_BYTES % mmap.PAGESIZE == 0
    assert ctypes.string_at(ring.address + 2 * BLOCK_BYTES, 10) == data[:5] + b"abc" + data[8:10]
    with ring.view(1) as view:
        assert view == bytes(BLOCK_BYTES)
    ring.close()


def test_unused_buffers_take_no_memory() -> None:
    """A ring of 256 MiB is pages only where something was written."""
    ring = Ring(64)
    with ring.view(0) as view:
        view[:4096] = noise(4096)
    assert os.fstat(ring.fd.fileno()).st_blocks * 512 <= 4 << 20, "a huge page at most"
    ring.close()


def test_it_closes_once(descriptors: NoDescriptorLeaks) -> None:
    """Closing unmaps and closes, and a second time does nothing; it is not closed under somebody's view."""
    ring = Ring(1)
    view = ring.view(0)
    with pytest.raises(BufferError):
        ring.close()
    view.release()
    ring.close()
    ring.close()
    descriptors.check()


def test_the_descriptor_stays_in_this_process() -> None:
    """A child that is not given it does not have it."""
    ring = Ring(1)
    program = f"import os; os.fstat({ring.fd.fileno()})"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, close_fds=False)
    assert "Bad file descriptor" in child.stderr
    ring.close()


def test_a_host_without_room(descriptors: NoDescriptorLeaks) -> None:
    """Memory that the host does not give is an error with the bytes, and nothing is left."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
    try:
        with pytest.raises(DeviceError, match=f"host: cannot map {1 << 40} bytes for the load: Cannot allocate memory"):
            Ring((1 << 40) // BLOCK_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    descriptors.check()
