"""The ring: buffers of one block each, in memory that the reader processes share with the loader."""

from __future__ import annotations

import ctypes
import mmap
import os

from ..checkpoint.digest import BLOCK_BYTES
from ..errors import DeviceError
from ..fds import OwnedFd


class Ring:
    """`count` buffers of `BLOCK_BYTES` in a memfd, by number; page-aligned. Untouched ones take no memory.

    `close` unmaps; no view of it may be in use then. `DeviceError` when the host cannot give the memory.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.nbytes = count * BLOCK_BYTES
        self.fd = OwnedFd(os.memfd_create("weightcached-ring", os.MFD_CLOEXEC))
        try:
            os.ftruncate(self.fd.fileno(), self.nbytes)
            self._map = mmap.mmap(self.fd.fileno(), self.nbytes)
        except OSError as error:
            self.fd.close()
            problem = f"cannot map {self.nbytes} bytes for the load: {error.strerror}"
            raise DeviceError(device="host", problem=problem) from error
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))  # of buffer 0, in this process

    def view(self, buffer: int) -> memoryview:
        """The buffer's bytes, writable; the caller releases it."""
        return self._view[buffer * BLOCK_BYTES : (buffer + 1) * BLOCK_BYTES]

    def close(self) -> None:
        """Idempotent."""
        self._view.release()
        self._map.close()
        self.fd.close()
