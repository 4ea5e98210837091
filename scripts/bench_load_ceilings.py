"""What the hardware can do, measured beside the loaders: a fresh process, started by `scripts/bench load`.

    hot      preadv from page cache by number of threads, into buffers of 4 MiB (pinned on a GPU)
    copy     pinned memory to the device, by number of streams
    both     each thread reads a buffer and has it copied while it reads the next; and that with xxh3-128 of each buffer
    cold     preadv with O_DIRECT, and through an empty page cache, by number of threads
    set-up   seconds to take the device memory and 256 MiB of pinned memory, which a loader's time includes

Memory is taken before the clock starts. The argument is one JSON object; prints one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from bench_common import BenchError
from bench_load_cache import make_cold, make_hot

BUFFER = 4 << 20
RING = 4  # buffers of a thread
HOT_BYTES = 8 << 30  # at most, of one measurement of reading alone
COLD_BYTES = 2 << 30
STAGING = 256 << 20


class Host:
    """Reading alone: buffers are ordinary memory, at page boundaries as O_DIRECT wants it."""

    def lanes(self, count: int, copy: bool) -> list[Lane]:
        return [Lane([memoryview(mmap.mmap(-1, BUFFER)) for _ in range(RING)]) for _ in range(count)]


class Lane:
    """The ring of buffers of one thread. `send` starts the copy of one to the device, `wait` is until it is done."""

    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers

    def wait(self, slot: int) -> None:
        """The buffer is free at once: nothing is copied."""

    def send(self, slot: int, offset: int) -> None:
        """Nothing is copied."""


class Gpu:
    """Pinned buffers and a destination on the first GPU."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self.torch = torch
        torch.empty(1, device="cuda:0")
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.destination = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        self.take_device = time.perf_counter() - started
        started = time.perf_counter()
        self.parts = torch.empty(STAGING, dtype=torch.uint8, pin_memory=True).split(BUFFER)
        self.take_pinned = time.perf_counter() - started

    def lanes(self, count: int, copy: bool) -> list[Lane]:
        rings = [self.parts[number * RING : (number + 1) * RING] for number in range(count)]
        return [GpuLane(self, ring) if copy else Lane([_view(part) for part in ring]) for ring in rings]

    def copy_seconds(self, streams: int, nbytes: int) -> float:
        """Seconds to copy `nbytes` from the pinned buffers, in turn on each stream."""
        torch, made = self.torch, [self.torch.cuda.Stream() for _ in range(streams)]
        torch.cuda.synchronize()
        started = time.perf_counter()
        for number, offset in enumerate(range(0, nbytes - BUFFER + 1, BUFFER)):
            with torch.cuda.stream(made[number % streams]):
                source = self.parts[number % len(self.parts)]
                self.destination[offset : offset + BUFFER].copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


class GpuLane(Lane):
    """Copies on a stream of its own."""

    def __init__(self, gpu: Gpu, ring: Any) -> None:
        super().__init__([_view(part) for part in ring])
        self._gpu = gpu
        self._ring = ring
        self._stream = gpu.torch.cuda.Stream()
        self._events = [gpu.torch.cuda.Event(blocking=True) for _ in ring]

    def wait(self, slot: int) -> None:
        self._events[slot].synchronize()  # at once if it was never recorded

    def send(self, slot: int, offset: int) -> None:
        with self._gpu.torch.cuda.stream(self._stream):
            self._gpu.destination[offset : offset + BUFFER].copy_(self._ring[slot], non_blocking=True)
            self._events[slot].record()


def _view(part: Any) -> memoryview:
    return memoryview((ctypes.c_ubyte * BUFFER).from_address(part.data_ptr())).cast("B")


def read_rate(
    files: list[Path],
    threads: int,
    memory: Host | Gpu,
    *,
    direct: bool = False,
    limit: int | None = None,
    skip: int = 0,
    copy: bool = False,
    digest: bool = False,
) -> float:
    """Bytes a second of `threads` threads that read the files' whole buffers, from byte `skip` on and `limit` at most.

    `copy`: each buffer goes to the device too. `digest`: xxh3-128 of each is computed while it is hot.
    """
    lanes = memory.lanes(threads, copy)
    fds = [os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for path in files]
    try:
        places = [(fd, at) for fd in fds for at in range(0, os.fstat(fd).st_size - BUFFER + 1, BUFFER)]
        places = places[skip // BUFFER :][: None if limit is None else limit // BUFFER]
        if not places:
            raise BenchError("the files are too small to measure a ceiling with them")
        work: queue.SimpleQueue[tuple[int, tuple[int, int]] | None] = queue.SimpleQueue()
        for item in [*enumerate(places), *[None] * threads]:
            work.put(item)

        def run(lane: Lane) -> None:
            turn = 0
            while found := work.get():
                index, (fd, offset) = found
                lane.wait(turn)
                if os.preadv(fd, [lane.buffers[turn]], offset) != BUFFER:
                    raise BenchError(f"a read at byte {offset} was short")
                if digest:
                    xxhash.xxh3_128_digest(lane.buffers[turn])
                lane.send(turn, index * BUFFER)
                turn = (turn + 1) % RING

        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, lanes))
        if isinstance(memory, Gpu):
            memory.synchronize()
        return len(places) * BUFFER / (time.perf_counter() - started)
    finally:
        for fd in fds:
            os.close(fd)


def measure(files: list[Path], device: str, cold: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """All ceilings, and notes on what could not be measured."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    whole = sum(path.stat().st_size for path in files)
    memory = Host() if device == "cpu" else Gpu(whole)
    cores = len(os.sched_getaffinity(0))
    # A GPU's staging memory has room for 16 rings.
    counts = [count for count in (1, 2, 4, 8, 16) if count <= cores] or [1]
    make_hot(files)

    def add(kind: str, what: str, threads: int, rate: float) -> None:
        rows.append({"kind": kind, "what": what, "threads": threads, "bytes_per_second": rate})

    for count in counts:
        add("hot", "preadv from page cache", count, read_rate(files, count, memory, limit=HOT_BYTES))
    if isinstance(memory, Gpu):
        nbytes = min(whole, HOT_BYTES) // BUFFER * BUFFER
        for streams in (1, 2):
            memory.copy_seconds(streams, BUFFER)
            add("copy", "pinned memory to the device, streams", streams, nbytes / memory.copy_seconds(streams, nbytes))
        for count in counts[-2:]:
            add("both", "preadv and copy", count, read_rate(files, count, memory, copy=True))
        for count in counts[-2:]:
            rate = read_rate(files, count, memory, copy=True, digest=True)
            add("digest", "preadv, xxh3-128 and copy", count, rate)
        notes.append(
            f"set-up: {memory.take_device * 1e3:.1f} ms for {whole} bytes of device memory, "
            f"{memory.take_pinned * 1e3:.1f} ms for {STAGING} bytes of pinned memory"
        )
    if cold:
        _cold(files[-1:], memory, counts, add, notes)  # one file, since all of it must be read back in
    return rows, notes


def _cold(files: list[Path], memory: Host | Gpu, counts: list[int], add: Callable[..., None], notes: list[str]) -> None:
    """Each measurement reads a part of its own, so that none finds what another one brought into page cache."""
    whole = sum(path.stat().st_size for path in files)
    plans = [(direct, count) for count in counts[-2:] for direct in (True, False)]
    part = min(COLD_BYTES, whole // len(plans) // BUFFER * BUFFER)
    if not part:
        notes.append("cold ceilings left out: the file is too small")
        return
    for number, (direct, count) in enumerate(plans):
        what = "preadv with O_DIRECT" if direct else "preadv through an empty page cache"
        try:
            make_cold(files)
            rate = read_rate(files, count, memory, direct=direct, skip=number * part, limit=part)
        except (BenchError, OSError) as error:
            notes.append(f"{what}, {count} threads: {error}")
            continue
        add("direct" if direct else "cold", what, count, rate)


def main() -> int:
    job = json.loads(sys.argv[1])
    try:
        rows, notes = measure([Path(path) for path in job["files"]], job["device"], job["cold"])
    except (BenchError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps({"rows": rows, "notes": notes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
