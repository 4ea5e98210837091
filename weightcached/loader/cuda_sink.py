"""The way into CUDA slabs: pinned buffers, filled by the readers, and asynchronous copies on one stream per device.

    block in the ring, bytes as in the file --cuMemcpyHtoDAsync, cuMemcpy2DAsync--> slabs of all ranks

A slab that is to be the same as one of another device is filled last, by a copy from that one (`replicas`): on two H200
393 GB/s, where all devices together get 55 GB/s each from the host.

A buffer is used again when the events behind its copies have completed. Rows go straight from the ring: the copy
engine of an H200 moved 42 GB/s of rows of 512 bytes, each an eighth of its pitch, so to gather them first would only
cost.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from ..checkpoint.digest import BLOCK_BYTES
from ..shard import cuda
from ..shard.cuda_peers import can_reach, let_read
from ..shard.manifest import ALIGNMENT
from .cast import cast_rows
from .plan import Copy
from .readers import Place, Region
from .ring import Ring
from .sink import BUFFERS, MIN_STAGING_BYTES, STAGING_BYTES, Placed

_EXTRA = 2  # buffers for what is packed or cast, so that one is filled while the other is copied from
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all devices
_TINY = 8192  # bytes; smaller copies side by side are packed into one, since each call costs 2 us
_PACK_FROM = 8  # copies; fewer are not worth the packing
_ZEROS = bytes(ALIGNMENT)
_log = logging.getLogger(__name__)
_FAULT_AROUND = 64 << 10  # bytes that one fault maps of pages that are there (fault_around_bytes of the kernel)


class _Busy(NamedTuple):
    """A buffer that devices may still be copying from, and the context and event of each."""

    buffer: int
    events: tuple[tuple[cuda.PrimaryContext, Any], ...]


class CudaSink:
    """Fills `CudaSlab`s, of one device or several (see `sink.Sink`).

    Shares `staging` bytes of host memory with the readers, `MIN_STAGING_BYTES` at least, and pins what of it is used.
    """

    def __init__(
        self,
        slabs: Sequence[cuda.CudaSlab],
        staging: int = STAGING_BYTES,
        replicas: Mapping[int, int] | None = None,
    ) -> None:
        """`replicas`: number of a slab -> that of an earlier one, no replica itself, whose bytes it is to have. Those
        whose device cannot reach the other one's memory are filled from the host."""
        self._slabs = list(slabs)
        # One context object for each device: slabs of the same one share its stream.
        by_handle = {slab.context.handle: slab.context for slab in reversed(self._slabs)}
        self._contexts = [by_handle[slab.context.handle] for slab in self._slabs]
        self._current = self._contexts[0]
        self._driver = cuda.driver()
        self._rows = self._driver.CUDA_MEMCPY2D()  # of all copies of rows: the driver reads it in the call
        self._rows.srcMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_HOST
        self._rows.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        self._undo = ExitStack()
        self._ring = Ring(max(staging, MIN_STAGING_BYTES) // BLOCK_BYTES)
        self._undo.callback(self._ring.close)
        # The smallest ring has two buffers, one of each kind.
        extra = min(_EXTRA, self._ring.count - 1)
        self._extra = deque(_Busy(self._ring.count - 1 - number, ()) for number in range(extra))
        self._ready: deque[int] = deque()
        self._pinned: set[int] = set()  # buffers
        self._streams: dict[int, tuple[cuda.PrimaryContext, Any]] = {}  # by the context's handle
        self._events: dict[tuple[int, int], Any] = {}  # by buffer and context's handle
        self._busy: deque[_Busy] = deque()  # the oldest first
        self._replicas = {slab: source for slab, source in (replicas or {}).items() if self._may_copy(slab, source)}

    def regions(self) -> list[Region]:
        return [Region(self._ring.fd.fileno(), self._ring.nbytes)]

    def start(self, readers: int) -> None:
        """Zeroes the slabs: the content of new device memory is undefined."""
        self._ready.extend(range(min(BUFFERS * readers, self._ring.count - len(self._extra))))
        self._undo.enter_context(self._contexts[0].current())
        for number, (slab, context) in enumerate(zip(self._slabs, self._contexts, strict=True)):
            if slab.nbytes and number not in self._replicas:
                self._use(context)
                stream = self._stream(context)  # that of the copies, which come behind it
                cuda.check(self._driver.cuMemsetD8Async(slab.address, 0, slab.nbytes, stream), "cuMemsetD8Async")

    def place(self, nbytes: int, copies: Sequence[Copy], *, wait: bool) -> Placed | None:
        while self._busy and self._is_done(self._busy[0]):
            self._ready.append(self._busy.popleft().buffer)
        if not self._ready and wait and self._busy:
            self._wait(self._busy[0])
            self._ready.append(self._busy.popleft().buffer)
        if not self._ready:
            return None
        buffer = self._ready.popleft()
        return Placed(buffer, (Place(0, buffer * BLOCK_BYTES, nbytes),), tuple(copies))

    def write(self, placed: Placed) -> None:
        """Starts the copies."""
        used = {}
        for slab, group in groupby(placed.left, attrgetter("slab")):
            if slab in self._replicas:
                continue
            context = self._contexts[slab]
            copies = list(group)
            for pack in _packs(copies) if len(copies) >= _PACK_FROM else ([copy] for copy in copies):
                if len(pack) > 1:
                    self._send_packed(placed.buffer, pack)
                elif pack[0].cast is not None:
                    self._send_cast(placed.buffer, pack[0])
                else:
                    self._send(placed.buffer, pack[0], pack[0].start, pack[0].pitch)
                    used[context.handle] = context
        if used:
            self._busy.append(self._record(placed.buffer, used.values()))
        else:
            self._ready.append(placed.buffer)

    def finish(self) -> None:
        self._synchronize()
        self._replicate()

    def _replicate(self) -> None:
        """Copies what is complete to the devices that are to have the same; all of them at once."""
        started = time.monotonic()
        for slab, source in self._replicas.items():
            target, complete = self._slabs[slab], self._slabs[source]
            if target.nbytes:
                self._use(self._contexts[slab])
                stream = self._stream(self._contexts[slab])
                result = self._driver.cuMemcpyDtoDAsync(target.address, complete.address, target.nbytes, stream)
                cuda.check(result, "cuMemcpyDtoDAsync")
        if self._replicas:
            self._synchronize()
            nbytes, seconds = sum(self._slabs[slab].nbytes for slab in self._replicas), time.monotonic() - started
            rate = nbytes / seconds / 1e9 if seconds else 0.0
            _log.info("device to device: %d bytes in %.3f s, %.0f GB/s", nbytes, seconds, rate)

    def _may_copy(self, slab: int, source: int) -> bool:
        """Whether the slab's device can copy from the other slab, which it is let read then."""
        here, there = (int(self._contexts[number].device) for number in (slab, source))
        if not can_reach(here, there):
            _log.warning(
                "%s cannot reach the memory of %s: the same bytes are copied to both from the host",
                cuda.device_name(here), cuda.device_name(there),
            )  # fmt: skip
            return False
        if here != there and self._slabs[source].nbytes:
            let_read(self._slabs[source], here)
        return True

    def _synchronize(self) -> None:
        for context in {context.handle: context for context in self._contexts}.values():
            context.synchronize()

    def close(self) -> None:
        """Waits for the devices first: they may be copying from what is freed then."""
        with self._undo:
            self._busy.clear()
            self._undo.callback(self._drain)

    def _use(self, context: cuda.PrimaryContext) -> None:
        """Makes the context current. Between two calls from outside it stays the last one that was used."""
        if context is not self._current:
            context.set_current()
            self._current = context

    def _drain(self) -> None:
        with ExitStack() as each:  # of them, also when one has failed
            while self._streams:
                context, stream = self._streams.popitem()[1]
                each.callback(self._free, context, self._driver.cuStreamSynchronize, stream, "cuStreamSynchronize")

    def _send_packed(self, block: int, copies: list[Copy]) -> None:
        """One copy for many that lie side by side in the slab, the gaps between them included."""
        buffer = self._take_extra()
        first = copies[0]
        filled = 0
        with self._ring.view(block) as source, self._ring.view(buffer) as target:
            for copy in copies:
                begin = copy.offset - first.offset
                if begin > filled:  # what the buffer held before must not reach the gaps
                    target[filled:begin] = _ZEROS[: begin - filled]
                filled = begin + copy.width
                target[begin:filled] = source[copy.start : copy.start + copy.width]
        self._send_extra(buffer, Copy(first.slab, first.offset, 0, filled), 0)

    def _send_cast(self, block: int, copy: Copy) -> None:
        """Casts from the block's buffer into others, as much at a time as one holds, and copies from there."""
        assert copy.cast is not None
        step = BLOCK_BYTES * copy.cast.source_bytes // max(copy.cast.source_bytes, copy.cast.target_bytes)
        end = copy.start + (copy.rows - 1) * copy.pitch + copy.width
        for begin in range(copy.start, end, step):
            for part in copy.within(begin, min(begin + step, end)):
                buffer = self._take_extra()
                pitch = part.in_slab(part.width)
                with self._ring.view(block) as source, self._ring.view(buffer) as target:
                    cast_rows(part._replace(start=begin + part.start), source, target, pitch)
                self._send_extra(buffer, part._replace(width=pitch, cast=None), pitch)

    def _take_extra(self) -> int:
        oldest = self._extra.popleft()
        self._wait(oldest)
        return oldest.buffer

    def _send_extra(self, buffer: int, copy: Copy, pitch: int) -> None:
        self._send(buffer, copy, 0, pitch)
        self._extra.append(self._record(buffer, [self._contexts[copy.slab]]))

    def _send(self, buffer: int, copy: Copy, start: int, pitch: int) -> None:
        """Starts one copy from byte `start` of the buffer, its rows `pitch` apart."""
        driver = self._driver
        context = self._contexts[copy.slab]
        self._use(context)
        source = self._pin(buffer) + start
        target = self._slabs[copy.slab].address + copy.offset
        stream = self._stream(context)
        if copy.rows == 1:
            cuda.check(driver.cuMemcpyHtoDAsync(target, source, copy.width, stream), "cuMemcpyHtoDAsync")
            return
        rows = self._rows
        rows.srcHost, rows.srcPitch = source, pitch
        rows.dstDevice, rows.dstPitch = target, copy.slab_pitch
        rows.WidthInBytes, rows.Height = copy.width, copy.rows
        cuda.check(driver.cuMemcpy2DAsync(rows, stream), "cuMemcpy2DAsync")

    def _pin(self, buffer: int) -> int:
        """Where the buffer lies, pinned from its first copy on.

        By then a reader has filled it, so that its pages are there: to pin 4 MiB of those took 0.3 to 0.9 ms on an H200
        host, and 3 ms of pages that the driver had to fetch, one thread at a time and with every other call waiting.
        """
        address = self._ring.address + buffer * BLOCK_BYTES
        if buffer not in self._pinned:
            with self._ring.view(buffer) as pages:
                bytes(pages[::_FAULT_AROUND])  # maps them here: half a millisecond less for the driver, per buffer
            result = self._driver.cuMemHostRegister(address, BLOCK_BYTES, _PORTABLE)
            cuda.check(result, f"cuMemHostRegister of {BLOCK_BYTES} bytes")
            self._pinned.add(buffer)
            unpin = self._driver.cuMemHostUnregister
            self._undo.callback(self._free, self._contexts[0], unpin, address, "cuMemHostUnregister")
        return address

    def _record(self, buffer: int, contexts: Iterable[cuda.PrimaryContext]) -> _Busy:
        """The buffer as it is in use until what is on the streams now is done."""
        events = []
        for context in contexts:
            self._use(context)
            event = self._event(buffer, context)
            cuda.check(self._driver.cuEventRecord(event, self._stream(context)), "cuEventRecord")
            events.append((context, event))
        return _Busy(buffer, tuple(events))

    def _is_done(self, busy: _Busy) -> bool:
        for context, event in busy.events:
            self._use(context)
            result = self._driver.cuEventQuery(event)
            if result[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                return False
            cuda.check(result, "cuEventQuery")
        return True

    def _wait(self, busy: _Busy) -> None:
        for context, event in busy.events:
            self._use(context)
            cuda.check(self._driver.cuEventSynchronize(event), "cuEventSynchronize")

    def _event(self, buffer: int, context: cuda.PrimaryContext) -> Any:
        key = (buffer, context.handle)
        if key not in self._events:
            # A thread that waits for a blocking event sleeps; by default it would spin.
            kinds = self._driver.CUevent_flags
            flags = kinds.CU_EVENT_BLOCKING_SYNC | kinds.CU_EVENT_DISABLE_TIMING
            event = cuda.check(self._driver.cuEventCreate(flags), "cuEventCreate")
            self._undo.callback(self._free, context, self._driver.cuEventDestroy, event, "cuEventDestroy")
            self._events[key] = event
        return self._events[key]

    def _stream(self, context: cuda.PrimaryContext) -> Any:
        if context.handle not in self._streams:
            flag = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = cuda.check(self._driver.cuStreamCreate(flag), "cuStreamCreate")
            self._undo.callback(self._free, context, self._driver.cuStreamDestroy, stream, "cuStreamDestroy")
            self._streams[context.handle] = (context, stream)
        return self._streams[context.handle][1]

    def _free(self, context: cuda.PrimaryContext, function: Any, what: Any, name: str) -> None:
        self._use(context)
        cuda.check(function(what), name)


def _packs(copies: list[Copy]) -> Iterator[list[Copy]]:
    """The copies one by one, except for many tiny ones side by side in the slab, which come together."""
    pack: list[Copy] = []
    for copy in copies:
        tiny = copy.rows == 1 and copy.cast is None and copy.width <= _TINY
        if pack and not (tiny and _is_next(pack, copy)):
            yield from _enough(pack)
            pack = []
        if tiny:
            pack.append(copy)
        else:
            yield [copy]
    yield from _enough(pack)


def _is_next(pack: list[Copy], copy: Copy) -> bool:
    gap = copy.offset - (pack[-1].offset + pack[-1].width)
    # Only over what no tensor has: the bytes between two pieces of one tensor may come from elsewhere.
    return 0 <= gap <= pack[-1].gap and copy.offset + copy.width - pack[0].offset <= BLOCK_BYTES


def _enough(pack: list[Copy]) -> Iterator[list[Copy]]:
    if len(pack) >= _PACK_FROM:
        yield pack
    else:
        yield from ([copy] for copy in pack)
