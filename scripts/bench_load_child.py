"""One measurement of `scripts/bench load`: a fresh process that makes everything ready, waits, loads once, and ends.

    -> {"ready": {"torch", "version", "device"}}     imports are done, CUDA has a context
    <- a line                                        go; end of file instead: not needed
    -> {"done": {"seconds", ...}}                    `check` in the job: the tensors are what the files hold
    or {"missing": reason} for a package that is not there

The argument is one JSON object. What goes wrong is a traceback on standard error.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bench_load_peers import PEERS, SLICERS, Job, Peer, Shards, cut

SPAN = 64 << 20  # bytes that the check brings to the device at once
CHECK_THREADS = 4
DTYPES = {"F32": "torch.float32", "BF16": "torch.bfloat16", "F8_E4M3": "torch.float8_e4m3fn"}


def main() -> int:
    with os.fdopen(os.dup(1), "w", buffering=1) as channel, ExitStack() as held:
        os.dup2(2, 1)  # what a loader prints is not to get among results
        job = json.loads(sys.argv[1])
        peer: Peer = (SLICERS if job["slices"] else PEERS)[job["peer"]]
        what = Job(**job["what"])
        try:
            ready = _start_device(what)
            load = peer.prepare(what, held)
        except ImportError as error:
            print(json.dumps({"missing": str(error)}), file=channel)
            return 0
        ready["version"] = _version(peer.package)
        print(json.dumps({"ready": ready}), file=channel)
        if not sys.stdin.readline():
            return 0
        counters = Counters(what.device)
        started = time.perf_counter()
        tensors = load()
        _synchronize(what.device)
        seconds = time.perf_counter() - started
        done = {"seconds": seconds, **counters.since()}
        if job["check"]:
            done["checked"] = check(tensors(), what)
        print(json.dumps({"done": done}), file=channel)
    return 0


def _start_device(job: Job) -> dict[str, Any]:
    """torch, and on a GPU its context and a first copy from pinned memory."""
    import torch

    if job.device == "cpu":
        return {"torch": torch.__version__, "device": "host memory"}
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).to(job.device, non_blocking=True)
    torch.cuda.synchronize()
    return {"torch": torch.__version__, "device": torch.cuda.get_device_name(job.device)}


def _synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Counters:
    """What this process and its children used from construction on."""

    def __init__(self, device: str) -> None:
        self._device = device
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here (proc(5))
            self._peaks = True
        except OSError:
            self._peaks = False
        self._before = self._now()

    def since(self) -> dict[str, int | float | None]:
        """`rchar`: bytes that read calls gave, whatever their source; mappings and io_uring do not count there.
        `read_bytes`: bytes from the disk. `host_peak`: how much this process's own resident memory grew, at its
        highest; pinned memory that the CUDA driver allocates is not in it. `device_bytes`: device memory that it keeps.
        """
        now = self._now()
        peak = _status("self", "VmHWM") * 1024 - self._before["resident"] if self._peaks else None
        used = {key: now[key] - self._before[key] for key in ("rchar", "read_bytes", "cpu_seconds", "device_bytes")}
        return {**used, "host_peak": peak}

    def _now(self) -> dict[str, Any]:
        now: dict[str, Any] = {"rchar": 0, "read_bytes": 0, "resident": _status("self", "VmRSS") * 1024}
        # What has ended and was waited for is in the sums of its parent.
        now["cpu_seconds"] = sum(os.times()[:4])
        for process in ["self", *_children()]:
            lines = Path("/proc", process, "io").read_text().splitlines()
            counts = {key: int(value) for key, value in (line.split(": ") for line in lines)}
            now["rchar"] += counts["rchar"]
            now["read_bytes"] += counts["read_bytes"]
            if process != "self":
                user, system = Path("/proc", process, "stat").read_text().rpartition(") ")[2].split()[11:13]
                now["cpu_seconds"] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        now["device_bytes"] = 0
        if self._device != "cpu":
            import torch

            free, _ = torch.cuda.mem_get_info(self._device)
            now["device_bytes"] = -free
        return now


def _children() -> list[str]:
    """Process numbers of the children that live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if _status(folder.name, "PPid") == os.getpid():
                found.append(folder.name)
        except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
            continue
    return found


def _status(process: str, field: str) -> int:
    """A number in the process's status; of memory, in KiB."""
    for line in Path("/proc", process, "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0  # a zombie has no memory


class Source(NamedTuple):
    """A tensor in a file: its bytes are `begin` to `end`."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


def check(shards: Shards, job: Job) -> int:
    """Compares every byte of every tensor with the files, on the device. Returns the bytes compared.

    Ends the process with a sentence if a tensor is missing, too many, or different.
    """
    import torch

    same: list[tuple[str, Any]] = []
    compared = 0
    names = set()
    for path in job.files:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        sources = _sources(mapped)
        names |= {source.name for source in sources}

        def compare(span: list[Source], whole: Any = whole) -> list[tuple[str, Any, int]]:
            begin = span[0].begin
            there = whole[begin : span[-1].end].to(job.device)
            return [found for source in span for found in _compare(there[source.begin - begin :], source, shards, job)]

        with ThreadPoolExecutor(CHECK_THREADS) as pool:
            for found in pool.map(compare, _spans(sources)):
                same += [(name, equal) for name, equal, _ in found]
                compared += sum(nbytes for _, _, nbytes in found)
    for shard in shards:
        if shard.keys() != names:
            raise SystemExit(f"{len(shard)} tensors came, the files have {len(names)}: {shard.keys() ^ names}"[:300])
    results = torch.stack([equal for _, equal in same]).tolist()
    if wrong := [name for (name, _), equal in zip(same, results, strict=True) if not equal]:
        raise SystemExit(f"{len(wrong)} of {len(same)} tensors are not what the file holds, such as {wrong[0]}")
    return compared


def _compare(there: Any, source: Source, shards: Shards, job: Job) -> Iterator[tuple[str, Any, int]]:
    """Of each rank, whether the tensor is the slice of the source, whose bytes `there` begins with."""
    import torch

    wanted = there[: source.end - source.begin]
    width = len(wanted) // max(1, torch.Size(source.shape).numel())
    wanted = wanted.view(*source.shape, width)  # elements as bytes: their place in the file may be at any offset
    first = 0 if job.rank is None else job.rank
    for rank, shard in enumerate(shards, first):
        name = source.name
        part = wanted[cut(name, source.shape, rank, job.ranks)] if job.ranks > 1 else wanted
        if name not in shard:
            continue  # the caller says so
        tensor = shard[name]
        found = tensor.contiguous().reshape(-1).view(torch.uint8)
        came = (str(tensor.dtype), list(tensor.shape), tensor.device.type)
        expected = (DTYPES[source.dtype], list(part.shape[:-1]), torch.device(job.device).type)
        if came != expected:
            raise SystemExit(f"{name} came as {came}, expected {expected}")
        yield name, (found == part.reshape(-1)).all(), len(found)


def _sources(mapped: mmap.mmap) -> list[Source]:
    length = int.from_bytes(mapped[:8], "little")
    entries = json.loads(mapped[8 : 8 + length])
    entries.pop("__metadata__", None)
    start = 8 + length
    return [
        Source(name, entry["dtype"], entry["shape"], *(start + offset for offset in entry["data_offsets"]))
        for name, entry in entries.items()
    ]


def _spans(sources: list[Source]) -> Iterator[list[Source]]:
    """Consecutive tensors of about `SPAN` bytes together; a larger one alone."""
    span: list[Source] = []
    for source in sources:
        if span and source.end - span[0].begin > SPAN:
            yield span
            span = []
        span.append(source)
    yield span


if __name__ == "__main__":
    sys.exit(main())
