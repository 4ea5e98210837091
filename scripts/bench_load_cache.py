"""The page cache of files: how much of them is in it, all into it, all out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_common import BenchError

TOLERANCE = 0.01  # of the pages may be on the wrong side
_READ = 4 << 20
_ATTEMPTS = 3
_libc = ctypes.CDLL(None, use_errno=True)


def resident(paths: Iterable[Path]) -> float:
    """The share of the files' pages that is in page cache, 0 to 1, by mincore(2), which reads nothing itself."""
    pages = found = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file:
            # Private and writable only because ctypes takes no address of read-only memory; nothing is written.
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        count = -(-size // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * count)()
        anchor = ctypes.c_ubyte.from_buffer(mapped)
        address, length = ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size)
        failed = _libc.mincore(address, length, states)
        error = ctypes.get_errno()
        del anchor
        mapped.close()
        if failed:
            raise BenchError(f"{path}: mincore: {os.strerror(error)}")
        pages += count
        found += bytes(states).count(1)
    return found / pages if pages else 0.0


def make_hot(paths: list[Path]) -> float:
    """Reads what is not in page cache, with all cores; returns the share that is there now.

    `BenchError` when memory does not hold it all.
    """
    share = resident(paths)
    if share < 1:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_read, (span for path in paths for span in _spans(path))))
        share = resident(paths)
    if share < 1 - TOLERANCE:
        raise BenchError(f"only {share:.1%} of it stay in page cache: memory is too small for it")
    return share


def make_cold(paths: list[Path]) -> float:
    """Writes back and drops all of it from page cache; returns the share that stayed.

    `BenchError` when the kernel keeps more than `TOLERANCE`: files of tmpfs have no other place, for example, and
    pages that a process maps are not dropped. What is below the kernel may cache too: a disk of a virtual machine is
    only as cold as its host.
    """
    share = 1.0
    for _ in range(_ATTEMPTS):
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        share = resident(paths)
        if share <= TOLERANCE:
            return share
    raise BenchError(f"the kernel keeps {share:.1%} of it in page cache after POSIX_FADV_DONTNEED")


def filesystem(path: Path) -> str | None:
    """The type of the file system that the path is on, by proc(5)'s mountinfo; None if it is not listed."""
    device = path.stat().st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return after.split()[0]
    return None


def _spans(path: Path) -> Iterable[tuple[Path, int]]:
    return ((path, offset) for offset in range(0, path.stat().st_size, 16 * _READ))


def _read(span: tuple[Path, int]) -> None:
    path, start = span
    buffer = bytearray(_READ)
    fd = os.open(path, os.O_RDONLY)
    try:
        for offset in range(start, start + 16 * _READ, _READ):
            os.preadv(fd, [buffer], offset)
    finally:
        os.close(fd)
