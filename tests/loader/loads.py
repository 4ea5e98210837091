"""What the loader's tests share: loads through host slabs and CUDA slabs, and what must come out of them, by hand."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.loader.in_threads import thread_readers
from tests.loader.whole import whole
from weightcached.checkpoint.digest import BLOCK_BYTES, FileDigest, block_digest
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.fds import OwnedFd
from weightcached.loader.cuda_sink import CudaSink
from weightcached.loader.pipeline import LoadResult, run
from weightcached.loader.plan import LoadPlan, plan_load
from weightcached.loader.readers import Readers, reader_count
from weightcached.loader.sink import STAGING_BYTES, HostSink
from weightcached.parallel.slices import Slice
from weightcached.shard.cuda import CudaSlab
from weightcached.shard.host import HostSlab

MakeCheckpoint = Callable[..., Path]
Raw = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> dtype, shape, bytes
Shards = Sequence[Sequence[Slice]]
ReadSlab = Callable[[OwnedFd, int, int], bytes]  # of a sealed slab: descriptor, bytes, the device's ordinal
Progress = Callable[[int], None]


class Loaded(NamedTuple):
    """The plan, what was read, and the bytes of each sealed slab."""

    plan: LoadPlan
    result: LoadResult
    slabs: tuple[bytes, ...]


def load_host(
    path: Path,
    shards: Shards | None = None,
    *,
    staging: int = STAGING_BYTES,
    readers: int | None = None,
    threads: int | None = None,
    progress: Progress = lambda done: None,
) -> Loaded:
    """The slices of each rank (default: all tensors to one) through host slabs, and what the sealed ones hold.

    By `readers` processes, or by as many `threads` in place of them; default: as many processes as suit the load.
    """
    with open_checkpoint(path) as checkpoint:
        plan = plan_load(checkpoint, [whole(checkpoint)] if shards is None else shards)
        slabs = [HostSlab(slab.nbytes) for slab in plan.slabs]
        try:
            with readers_of(readers, threads, plan) as some, closing(HostSink(slabs, staging)) as sink:
                result = run(plan, checkpoint, sink, some, progress)
            return Loaded(plan, result, tuple(read_fake(slab.seal(), slab.nbytes) for slab in slabs))
        finally:
            for slab in slabs:
                slab.close()


def load_cuda(
    path: Path,
    shards: Shards | None = None,
    *,
    read: ReadSlab | None = None,
    ordinals: Sequence[int] | None = None,
    staging: int = STAGING_BYTES,
    readers: int | None = None,
    threads: int | None = None,
    progress: Progress = lambda done: None,
    replicas: dict[int, int] | None = None,
) -> Loaded:
    """The same through CUDA slabs on devices `ordinals`, default: all on the first."""
    read = read or read_fake
    with open_checkpoint(path) as checkpoint:
        plan = plan_load(checkpoint, [whole(checkpoint)] if shards is None else shards)
        devices = ordinals or [0] * len(plan.slabs)
        slabs: list[CudaSlab] = []
        try:
            for device, slab in zip(devices, plan.slabs, strict=True):
                slabs.append(CudaSlab.create(device, slab.nbytes))
            with readers_of(readers, threads, plan) as some, closing(CudaSink(slabs, staging, replicas)) as sink:
                result = run(plan, checkpoint, sink, some, progress)
            sealed = zip(slabs, devices, strict=True)
            return Loaded(plan, result, tuple(read(slab.seal(), slab.nbytes, device) for slab, device in sealed))
        finally:
            for slab in slabs:
                slab.close()


def readers_of(processes: int | None, threads: int | None, plan: LoadPlan) -> AbstractContextManager[Readers]:
    if threads is not None:
        return thread_readers(threads)
    return Readers(processes or reader_count(plan.task_count))


def read_fake(fd: OwnedFd, nbytes: int, ordinal: int = 0) -> bytes:
    """A host slab, or one of the fake driver: both are memfds. Closes it."""
    with fd:
        return os.pread(fd.fileno(), nbytes, 0)


def tensors_of(path: Path) -> Raw:
    """The tensors of one file in the order of their bytes, by the format's definition."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: (item["dtype"], tuple(item["shape"]), body[slice(*item["data_offsets"])])
        for name, item in sorted(header.items(), key=lambda named: named[1]["data_offsets"])
    }


def cut(piece: Slice, data: bytes, nbytes: int) -> bytes:
    """The slice's bytes by plain slicing of the whole tensor's, without a cast; `nbytes` of them, zeros first."""
    out = bytearray(nbytes)
    for part in piece.parts:
        for row in range(part.rows):
            start, target = part.start + row * part.pitch, part.target + row * part.target_pitch
            out[target : target + part.width] = data[start : start + part.width]
    return bytes(out)


def slab_of(raw: Raw, plan: LoadPlan, shards: Shards, number: int) -> bytes:
    """A whole slab as it must be: each slice at its entry's place, zeros everywhere else. For loads without casts."""
    slab = plan.slabs[number]
    out = bytearray(slab.nbytes)
    for entry, piece in zip(slab.entries, shards[number], strict=True):
        assert (entry.name, entry.dtype, entry.shape) == piece[:3]
        out[entry.offset : entry.offset + entry.nbytes] = cut(piece, raw[piece.name][2], entry.nbytes)
    return bytes(out)


@contextmanager
def small_blocks(nbytes: int) -> Iterator[None]:
    """Blocks of another size, so that a few bytes are many of them. CUDA buffers take multiples of a page only."""
    modules = ("checkpoint.digest", "loader.plan", "loader.ring", "loader.sink", "loader.cuda_sink")
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(f"weightcached.{module}.BLOCK_BYTES", nbytes)
        for module in ("loader.sink", "loader.cuda_sink"):
            patch.setattr(f"weightcached.{module}.MIN_STAGING_BYTES", 2 * nbytes)
        yield


def digest_of(path: Path) -> str:
    """The file's digest, computed block by block in one thread."""
    data = path.read_bytes()
    digest = FileDigest(len(data))
    for index in range(0, len(data), BLOCK_BYTES):
        digest.put(index // BLOCK_BYTES, block_digest([data[index : index + BLOCK_BYTES]]))
    return digest.value()


def noise(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def cached_bytes(path: Path) -> int:
    """How many bytes of a file are in the page cache, in whole pages."""
    return sum(cached_pages(path)) * mmap.PAGESIZE


def cached_pages(path: Path) -> list[bool]:
    """For each page of a file whether it is in the page cache, by mincore(2): not the way in which the loader asks."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as memory:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        if libc.mincore(address, ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
    return [bool(page & 1) for page in pages]


def drop(path: Path) -> None:
    """Writes the file to its disk and drops it from the page cache; the test is skipped where that does not work."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip(f"the file system of {path} keeps its files in the page cache")
