"""Host slabs: memfds, sealed once filled; clients map them privately, so a stray write stays with its writer."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from ..errors import DeviceError, ManifestError
from ..fds import OwnedFd
from ..memfd import SEALS, require_seals

# <bits/mman-map-flags-generic.h>
_MAP_FIXED = 0x10  # over what is mapped there
_MAP_NORESERVE = 0x4000  # the kernel counts no memory for it
_PLACEHOLDER = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)


class HostSlab:
    """A memfd under construction; `view` is its memory, writable, `nbytes` long (see `slab.SlabWriter`)."""

    def __init__(self, nbytes: int) -> None:
        """Takes `nbytes` bytes of memory at once. `DeviceError` when the host cannot give them."""
        self.nbytes = nbytes
        self._fd = OwnedFd(os.memfd_create("weightcached-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            if nbytes:
                # Reserving the pages now turns a full host into an error here; a later fault would be a SIGBUS.
                os.posix_fallocate(self._fd.fileno(), 0, nbytes)
            self._map = mmap.mmap(self._fd.fileno(), nbytes) if nbytes else None
        except OSError as error:
            self._fd.close()
            problem = f"cannot take {nbytes} bytes of memory: {error.strerror}"
            raise DeviceError(device="host", problem=problem) from error
        self.view = memoryview(self._map) if self._map is not None else memoryview(bytearray())

    def fileno(self) -> int:
        """The memfd's descriptor, the slab's own, for processes that help to fill it; gone before `seal`."""
        return self._fd.fileno()

    def seal(self) -> OwnedFd:
        """Unmaps, seals against every change (memfd_create(2)) and gives the descriptor to the caller."""
        self._unmap()
        fcntl.fcntl(self._fd.fileno(), fcntl.F_ADD_SEALS, SEALS)
        return OwnedFd(self._fd.steal())

    def close(self) -> None:
        self._unmap()
        self._fd.close()

    def _unmap(self) -> None:
        # F_SEAL_WRITE is refused with EBUSY while a shared writable mapping exists.
        self.view.release()
        if self._map is not None:
            self._map.close()
            self._map = None


class HostMapping(mmap.mmap):
    """A private, copy-on-write mapping of a sealed slab; unmapped when the last reference to it is gone.

    A subclass, because `mmap.mmap` itself takes no attributes: the client hangs the lease on it. Never `close` it while
    a tensor may still use the memory: `torch.frombuffer` keeps a reference to the object, not an exported buffer.

    To Python it is an anonymous mapping, which only holds the addresses; the slab is mapped over it. So it has no
    descriptor of its own, and `unmap` leaves nothing behind that keeps the slab's memory.
    """

    lease: object = None

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def map(self, fd: int) -> None:
        """Puts the slab there, in place of whatever is mapped at these addresses. `DeviceError` if it cannot be."""
        self._put(mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd)

    def unmap(self) -> None:
        """Lets the memory go, the process's own changes to it included; the addresses stay taken.

        Until `map`, touching the memory is a SIGSEGV.
        """
        self._put(0, _PLACEHOLDER, -1)

    def _put(self, protection: int, flags: int, fd: int) -> None:
        nbytes = len(self)
        if _libc.mmap(self.address, nbytes, protection, flags | _MAP_FIXED, fd, 0) == _MAP_FAILED:
            raise _cannot_map(nbytes, os.strerror(ctypes.get_errno()))


def map_host_slab(fd: int, nbytes: int) -> HostMapping | None:
    """Maps a slab's memfd; the descriptor stays the caller's, and may be closed. None for an empty slab.

    `ManifestError` if the memory could still change or has another length; `DeviceError` if it cannot be mapped.
    """
    check_host_slab(fd, nbytes)
    if not nbytes:
        return None
    try:
        mapping = HostMapping(-1, nbytes, flags=_PLACEHOLDER, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise _cannot_map(nbytes, str(error.strerror)) from error
    mapping.map(fd)
    return mapping


def check_host_slab(fd: int, nbytes: int) -> None:
    """`ManifestError` unless the memfd is sealed, and of this length."""
    require_seals(fd, "slab")
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise ManifestError(problem=f"slab of {size} bytes, {nbytes} listed")


def _cannot_map(nbytes: int, reason: str) -> DeviceError:
    return DeviceError(device="host", problem=f"cannot map {nbytes} bytes: {reason}")
