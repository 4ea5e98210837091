"""The way into a CUDA slab: a ring of pinned buffers per thread, and asynchronous copies on the thread's own stream.

    file --preadv--> pinned buffer, laid out as in the slab --cuMemcpyHtoDAsync--> slab

A buffer is used again when the event behind its last copy has completed. Small buffers win: 4 x 4 MiB per thread gave
29-31 GB/s from page cache on an H200, 16 MiB buffers 22.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..shard import cuda
from ..shard.manifest import ALIGNMENT
from .plan import READ_BYTES, Read

BUFFERS = 4  # per thread, at most
_ZEROS = bytes(ALIGNMENT)


class CudaSink:
    """Fills a `CudaSlab` (see `sink.Sink`). Pins `threads` x 4 buffers of about 4 MiB from `start` to `close`."""

    def __init__(self, slab: cuda.CudaSlab) -> None:
        self._slab = slab
        self._undo = ExitStack()
        # Each writer takes one ring; SimpleQueue, since writers start in their own threads.
        self._rings: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

    def start(self, threads: int, reads: int) -> None:
        driver = cuda.driver()
        buffers = max(1, min(BUFFERS, -(-reads // threads)))
        nbytes = threads * buffers * READ_BYTES
        with self._slab.context.current():
            base = int(cuda.check(driver.cuMemHostAlloc(nbytes, 0), f"cuMemHostAlloc of {nbytes} bytes"))
        self._undo.callback(self._free, base)
        for thread in range(threads):
            first = base + thread * buffers * READ_BYTES
            self._rings.put([first + index * READ_BYTES for index in range(buffers)])

    @contextmanager
    def writer(self) -> Iterator[_CudaWriter]:
        ring = self._rings.get_nowait()
        with self._slab.context.current(), ExitStack() as undo:
            yield _CudaWriter(self._slab.address, ring, undo)

    def finish(self) -> None:
        self._slab.context.synchronize()

    def close(self) -> None:
        self._undo.close()

    def _free(self, base: int) -> None:
        driver = cuda.driver()
        with self._slab.context.current(), ExitStack() as after:  # freed even if the device reports failed work
            after.callback(lambda: cuda.check(driver.cuMemFreeHost(base), "cuMemFreeHost"))
            cuda.check(driver.cuCtxSynchronize(), "cuCtxSynchronize")


class _CudaWriter:
    """One thread's stream and buffers; used with the slab's context current. What it makes, `undo` destroys.

    Stream and events may be destroyed before their work is done: the driver finishes it (cuStreamDestroy).
    """

    def __init__(self, slab: int, ring: Sequence[int], undo: ExitStack) -> None:
        driver = cuda.driver()
        self._driver = driver
        self._slab = slab
        self._ring = ring
        self._views = [memoryview((ctypes.c_ubyte * READ_BYTES).from_address(address)).cast("B") for address in ring]
        self._stream = cuda.check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
        undo.callback(self._destroy, driver.cuStreamDestroy, self._stream, "cuStreamDestroy")
        # A thread that waits for a blocking event sleeps; by default it would spin.
        flags = driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._events: list[Any] = []
        for _ in ring:
            event = cuda.check(driver.cuEventCreate(flags), "cuEventCreate")
            undo.callback(self._destroy, driver.cuEventDestroy, event, "cuEventDestroy")
            self._events.append(event)
        self._next = 0

    @staticmethod
    def _destroy(function: Any, what: Any, name: str) -> None:
        cuda.check(function(what), name)

    def place(self, read: Read, unlisted: memoryview) -> list[memoryview]:
        """Waits until the next buffer's last copy is done. Zeroes the gaps, so that nothing stale reaches the slab."""
        # An event that was never recorded counts as completed (cuEventRecord).
        cuda.check(self._driver.cuEventSynchronize(self._events[self._next]), "cuEventSynchronize")
        buffer = self._views[self._next]
        views = []
        used = filled = 0
        for offset, nbytes in read.pieces:
            if offset is None:
                views.append(unlisted[used : used + nbytes])
                used += nbytes
                continue
            start = offset - read.slab_begin
            if start > filled:
                buffer[filled:start] = _ZEROS[: start - filled]
            filled = start + nbytes
            views.append(buffer[start:filled])
        length = read.slab_end - read.slab_begin
        if length > filled:
            buffer[filled:length] = _ZEROS[: length - filled]
        return views

    def write(self, read: Read) -> None:
        """Starts the copy; the buffer stays untouched until it is done."""
        length = read.slab_end - read.slab_begin
        if not length:
            return
        driver, index = self._driver, self._next
        address = self._slab + read.slab_begin
        cuda.check(driver.cuMemcpyHtoDAsync(address, self._ring[index], length, self._stream), "cuMemcpyHtoDAsync")
        cuda.check(driver.cuEventRecord(self._events[index], self._stream), "cuEventRecord")
        self._next = (index + 1) % len(self._ring)
