"""What the hardware can do, measured beside the loaders: a fresh process, started by `scripts/bench load`.

    hot      preadv from page cache by number of threads, into buffers of 4 MiB (pinned on a GPU)
    copy     pinned memory to the device, by number of streams
    both     preadv from page cache by number of processes, and copies to the device at the same time: each one's rate;
             and the same with xxh3-128 of each buffer
    cold     preadv with O_DIRECT, and through an empty page cache, by number of threads
    set-up   seconds to take the device memory and 256 MiB of pinned memory, which a loader's time includes

Processes and not threads read while something is copied, as our loader does it: threads of one Python would wait for
each other. Memory is taken before the clock starts. The argument is one JSON object; prints one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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

    def rings(self, count: int) -> list[list[memoryview]]:
        return [_ring() for _ in range(count)]


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

    def rings(self, count: int) -> list[list[memoryview]]:
        return [[_view(part) for part in self.parts[number * RING : (number + 1) * RING]] for number in range(count)]

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

    def copy_while(self, going_on: Callable[[], bool]) -> float:
        """Bytes a second copied from the pinned buffers as long as `going_on`, a GiB at a time."""
        copied, started = 0, time.perf_counter()
        while going_on():
            nbytes = min(len(self.destination), 1 << 30)
            self.copy_seconds(1, nbytes)
            copied += nbytes // BUFFER * BUFFER
        return copied / (time.perf_counter() - started)


def _ring() -> list[memoryview]:
    return [memoryview(mmap.mmap(-1, BUFFER)) for _ in range(RING)]


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
) -> float:
    """Bytes a second of `threads` threads that read the files' whole buffers, from byte `skip`, `limit` at most."""
    with ExitStack() as stack:
        places = _places(files, stack, direct)[skip // BUFFER :][: None if limit is None else limit // BUFFER]
        if not places:
            raise BenchError("the files are too small to measure a ceiling with them")
        work = iter(places)  # of a list, so its next is taken by one thread at a time
        rings = memory.rings(threads)
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda ring: _read(work, ring, digest=False), rings))
        return len(places) * BUFFER / (time.perf_counter() - started)


def _places(files: list[Path], stack: ExitStack, direct: bool = False) -> list[tuple[int, int]]:
    """Descriptor, closed with the stack, and offset of every whole buffer."""
    places = []
    for path in files:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        stack.callback(os.close, fd)
        places += [(fd, at) for at in range(0, os.fstat(fd).st_size - BUFFER + 1, BUFFER)]
    return places


def _read(work: Iterator[tuple[int, int]], ring: list[memoryview], *, digest: bool) -> int:
    """Reads buffer after buffer; returns the bytes."""
    done = 0
    for fd, offset in work:
        buffer = ring[done // BUFFER % RING]
        if os.preadv(fd, [buffer], offset) != BUFFER:
            raise BenchError(f"a read at byte {offset} was short")
        if digest:
            xxhash.xxh3_128_digest(buffer)
        done += BUFFER
    return done


def read_by_processes(files: list[Path], count: int, gpu: Gpu, *, digest: bool) -> tuple[float, float]:
    """Bytes a second that `count` processes read, and that are copied to the device meanwhile."""
    with ExitStack() as stack:
        children = []
        for number in range(count):
            job = {"read": [str(path) for path in files], "number": number, "count": count, "digest": digest}
            command = [sys.executable, __file__, json.dumps(job)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            children.append(stack.enter_context(child))
        for child in children:
            _line(child)
        started = time.perf_counter()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(lambda: [int(_line(child)) for child in children])
            copied = gpu.copy_while(lambda: not answers.done())
            nbytes = sum(answers.result())
        seconds = time.perf_counter() - started
        if nbytes != len(_places(files, stack)) * BUFFER:
            raise BenchError(f"{count} processes read {nbytes} bytes, another part of the files than was asked for")
        return nbytes / seconds, copied


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise BenchError("a reading process ended before it was done")
    return line


def _read_share(job: dict[str, Any]) -> None:
    """A reading process: says that it is ready, waits for a line, reads its share, prints the bytes."""
    ring = _ring()
    with ExitStack() as stack:
        places = _places([Path(path) for path in job["read"]], stack)[job["number"] :: job["count"]]
        print("ready", flush=True)
        sys.stdin.readline()
        print(_read(iter(places), ring, digest=job["digest"]), flush=True)


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
        for count in sorted({max(1, cores * 3 // 4), counts[-1]}):
            for digest in (False, True):
                read, copied = read_by_processes(files, count, memory, digest=digest)
                what = "preadv and xxh3-128" if digest else "preadv"
                add("both", f"{what} by processes, while copying", count, read)
                add("both copy", "pinned memory to the device, meanwhile", 1, copied)
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
    if "read" in job:
        _read_share(job)
        return 0
    try:
        rows, notes = measure([Path(path) for path in job["files"]], job["device"], job["cold"])
    except (BenchError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps({"rows": rows, "notes": notes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
