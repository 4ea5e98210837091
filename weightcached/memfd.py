"""Sealed memfds: memory that travels as a descriptor and that nobody can change any more (memfd_create(2))."""

from __future__ import annotations

import fcntl
import os

from .errors import ManifestError
from .fds import OwnedFd

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed_memfd(name: str, data: bytes) -> OwnedFd:
    """A sealed memfd with `data`; the caller owns it. `name` is what /proc shows."""
    fd = OwnedFd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    try:
        with open(fd.fileno(), "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        fd.close()
        raise
    return fd


def require_seals(fd: int, what: str) -> None:
    """`ManifestError` unless nobody can write, grow or shrink the memfd any more."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ManifestError(problem=f"the {what} is not a memfd ({error.strerror})") from None
    if seals & SEALS != SEALS:
        raise ManifestError(problem=f"the {what} is not sealed: seals {seals:#x}, needed {SEALS:#x}")
