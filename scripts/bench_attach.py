"""How long an engine waits for its weights: attach and all views, beside what it would do without weightcached.

`scripts/bench attach` runs it. Every sample is a fresh process (`bench_attach_roles`); all kinds take turns. It prints
medians, then every goal of the design that is missed. Exit status 0: all was measured, whatever the goals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_attach_roles import Layout
from bench_common import (
    MB,
    MIB,
    RATIO,
    BenchError,
    Goal,
    LiveChild,
    PrivateService,
    Report,
    Row,
    run_child,
    versions,
)

from weightcached import client
from weightcached.cli.output import human_bytes
from weightcached.devices import device_memory, find_devices, is_host
from weightcached.errors import WeightCacheError
from weightcached.paths import socket_path
from weightcached.shard.manifest import ALIGNMENT, MAX_SLABS
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Evict

ROLES = str(Path(__file__).with_name("bench_attach_roles.py"))
UNITS = {"KiB": 10, "MiB": 20, "GiB": 30}
BIG_BYTES = 64 << 30
ATTACH_GOAL = Goal(10)  # ms
VIEW_GOALS = {1_000: Goal(20), 20_000: Goal(250)}  # ms, by number of tensors
IPC_GOAL = Goal(20, least=True)
IMPORT_GOAL = Goal(60)  # ms
STATUS_GOAL = Goal(150)  # ms
SERVICE_GOAL, WORKER_GOAL = Goal(60), Goal(40)  # MB
DEVICE_GOAL = Goal(8)  # MiB
PEER = "torch CUDA IPC"
FILE = "load_file"


class Interrupted(BaseException):
    """SIGTERM or SIGINT: clean up, then print what there is."""


def main() -> int:
    args = _arguments()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    report = Report()
    bench = AttachBench(args, report)
    interrupted = False
    try:
        bench.run()
    except Interrupted:
        interrupted = True
        report.notes.append("interrupted; these are the samples taken until then")
    except (BenchError, WeightCacheError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        report.failed["set-up"] = str(error)
    rows = bench.rows()
    if rows:
        report.print(rows)
    if args.json:
        args.json.write_text(json.dumps(bench.as_json(rows), indent=1) + "\n")
    return 0 if report.complete and not interrupted else 1


def _interrupt(number: int, frame: object) -> None:
    raise Interrupted


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench attach", description="Attach and all views, in fresh processes.")
    parser.add_argument(
        "--device", default="host-0", help='"host-0" (default), or "cuda": the first GPU that is visible'
    )
    parser.add_argument("--slabs", type=int, metavar="N", help="slabs of a model (default: 16)")
    parser.add_argument("--slab-bytes", type=_size, metavar="SIZE", help="of one slab (default: 1GiB; host 64MiB)")
    parser.add_argument("--tensors", type=_counts, metavar="N,N", help="tensors of a model (default: 1000,20000)")
    parser.add_argument(
        "--big", type=_size, nargs="?", const=BIG_BYTES, metavar="SIZE", help="also one slab of this size (64GiB)"
    )
    parser.add_argument("--runs", type=int, metavar="N", help="samples of each kind (default: 7)")
    parser.add_argument("--quick", action="store_true", help="2 slabs of 64MiB and 3 runs, where nothing else is said")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to FILE")
    args = parser.parse_args()
    host = is_host(args.device)
    if not host and args.device != "cuda":
        parser.error('--device is "cuda" or a host device such as "host-0"')
    args.slabs = args.slabs or (2 if args.quick else 16)
    args.slab_bytes = args.slab_bytes or (64 << 20 if args.quick or host else 1 << 30)
    args.tensors = args.tensors or [1_000, 20_000]
    args.runs = args.runs or (3 if args.quick else 7)
    if not 1 <= args.slabs <= MAX_SLABS:
        parser.error(f"--slabs: 1 to {MAX_SLABS}")
    for count in args.tensors:
        if count < args.slabs or Layout(args.slabs, args.slab_bytes, count).smallest < ALIGNMENT:
            parser.error(f"--tensors: {count} tensors do not fit; each takes {ALIGNMENT} bytes, each slab has one")
    return args


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(KiB|MiB|GiB)", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: write a size such as 64MiB")
    return int(match[1]) << UNITS[match[2]]


def _counts(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers such as 1000,20000")
    return [int(part) for part in text.split(",")]


def model_name(layout: Layout) -> str:
    return f"bench-{layout.slabs}x{layout.slab_bytes}-{layout.tensors}"


def title(layout: Layout) -> str:
    """ "16 x 1.0 GiB, 1,000 tensors"."""
    return f"{layout.slabs} x {human_bytes(layout.slab_bytes)}, {layout.tensors:,} tensors"


class AttachBench:
    """One run of the benchmark. Sample names are "<kind>: <value>", see `Report.rounds`."""

    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self.args = args
        self.report = report
        self.host = is_host(args.device)
        slabs, slab_bytes = args.slabs, args.slab_bytes
        self.parts = [Layout(slabs, slab_bytes, count) for count in args.tensors]
        self.whole = [Layout(1, slabs * slab_bytes, count) for count in args.tensors] if slabs > 1 else []
        big = [Layout(1, args.big, args.tensors[0])] if args.big else []
        self.big = [layout for layout in big if layout not in self.parts + self.whole]
        # The peers do what the first layout does.
        self.peer = self.parts[0]
        self.device: dict[str, str] = {}
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.load = os.getloadavg()[0]

    def run(self) -> None:
        """Measures everything. What fails is noted in the report; `BenchError` if nothing can be measured."""
        self.device = self._find_device()
        name = self.device["name"]
        with tempfile.TemporaryDirectory(prefix="wcb-") as folder, contextlib.ExitStack() as stack:
            runtime = Path(folder) / "run"
            runtime.mkdir(mode=0o700)
            os.environ["WEIGHTCACHED_RUNTIME_DIR"] = str(runtime)
            os.environ.pop("WEIGHTCACHED_SOCKET_TEMPLATE", None)
            used = _used(name)
            service = PrivateService(Path(folder), name)
            stack.callback(self._close, "service end", service)
            self.report.add("service start", service.start_seconds)
            self._at_rest(service, "empty", name, used, 0)
            weights = self._publish(self.parts) + self._publish(self.whole)
            self._at_rest(service, "full", name, used, weights)
            measurements: dict[str, Callable[[], dict[str, float]]] = {
                title(layout): self._engine(layout) for layout in self.parts + self.whole
            }
            measurements["client"] = _imports
            measurements["weightcachectl"] = _status_process
            with contextlib.ExitStack() as peer:
                self._start_peer(peer, Path(folder), measurements)
                self.report.rounds(self.args.runs, measurements)
            if self.big:
                self._measure_big(name)

    def rows(self) -> list[Row]:
        """The result's lines, of what was measured."""
        rows = []
        for layout in self.parts + self.whole + self.big:
            name = title(layout)
            rows += self._row(f"{name}: attach", f"{name}: attach", goal=ATTACH_GOAL)
            rows += self._row(f"{name}: all views", f"{name}: views", goal=VIEW_GOALS.get(layout.tensors))
            rows += self._row(f"{name}: a byte of every page", f"{name}: touch")
        rows += self._row("load_file of the first: call", f"{FILE}: load_file")
        rows += self._row("load_file of the first: a byte of every page", f"{FILE}: touch")
        rows += self._row(f"torch CUDA IPC: open {self._allocations()}", f"{PEER}: open")
        rows += self._ratios()
        rows += self._row("import of the client, without torch", "client: import", goal=IMPORT_GOAL)
        rows += self._row("import of what attach by name needs", "client: import for attach")
        rows += self._row("import of the client, after torch", f"{title(self.peer)}: import client")
        rows += self._row("weightcachectl status, whole process", "weightcachectl: status", goal=STATUS_GOAL)
        rows += self._row("service start to ready, no model", "service start")
        for value in ("import torch", "CUDA initialisation", "import cuda.bindings.driver"):
            rows += self._row(f"before the clock: {value}", f"{title(self.peer)}: {value}")
        for state, text in (("empty", "no model"), ("full", f"{len(self.parts + self.whole)} models")):
            rows += self._row(f"resident memory, service, {text}", f"{state}: service", unit=MB, goal=SERVICE_GOAL)
            rows += self._row(f"resident memory, worker, {text}", f"{state}: worker", unit=MB, goal=WORKER_GOAL)
            rows += self._row(f"GPU memory beyond weights, {text}", f"{state}: device", unit=MIB, goal=DEVICE_GOAL)
        return rows

    def as_json(self, rows: list[Row]) -> dict[str, Any]:
        """Everything, with every sample in seconds or bytes."""
        return {
            "schema": 1,
            "benchmark": "attach",
            "date": self.started,
            "device": self.device,
            "cpus": os.cpu_count(),
            "load_average_before": self.load,
            "versions": versions("torch", "safetensors", "cuda-bindings", "pydantic"),
            "settings": {
                "layouts": [asdict(layout) for layout in self.parts + self.whole + self.big],
                "runs": self.args.runs,
            },
            "results": [row.as_json() for row in rows],
            "samples": self.report.samples,
            "failed": self.report.failed,
            "notes": self.report.notes,
        }

    # Set-up.

    def _find_device(self) -> dict[str, str]:
        name = self.args.device
        if not self.host:
            from weightcached.shard.cuda import device_name

            name = device_name(0)
        (device,) = find_devices([name])
        return {"name": device.name, "model": device.model, "memory": human_bytes(device.memory.total)}

    def _publish(self, layouts: list[Layout]) -> int:
        """Fills one set of slabs, which all the layouts share, in a process that ends. Returns its bytes."""
        if not layouts:
            return 0
        job = {
            "device": self.device["name"],
            "slabs": layouts[0].slabs,
            "slab_bytes": layouts[0].slab_bytes,
            "models": {model_name(layout): layout.tensors for layout in layouts},
        }
        what = f"publishing {layouts[0].slabs} x {human_bytes(layouts[0].slab_bytes)}"
        seconds = _role("publish", job)["seconds"]
        print(f"bench: {what} took {seconds:.1f} s", file=sys.stderr)
        return layouts[0].nbytes

    def _engine(self, layout: Layout) -> Callable[[], dict[str, float]]:
        device = self.device["name"] if self.host else "cuda:0"
        job = {"model": model_name(layout), "device": device, "layout": asdict(layout)}
        return lambda: _role("engine", job)

    def _start_peer(
        self, stack: contextlib.ExitStack, folder: Path, measurements: dict[str, Callable[[], dict[str, float]]]
    ) -> None:
        """Adds what an engine does without weightcached; `stack` ends it."""
        job: dict[str, Any] = {"layout": asdict(self.peer)}
        with self.report.part(FILE if self.host else PEER, peer=True):
            if self.host:
                path = folder / "model.safetensors"
                _role("write-file", {**job, "path": str(path)})
                measurements[FILE] = lambda: _role("load-file", {**job, "path": str(path)})
                return
            job["device"] = "cuda:0"
            # Exported segments must be cudaMalloc's; expandable ones would be another kind of handle.
            env = {key: value for key, value in os.environ.items() if not key.endswith("_ALLOC_CONF")}
            exporter = LiveChild([ROLES, "ipc-export", json.dumps(job)], env)
            stack.callback(exporter.close)
            measurements[PEER] = lambda: _role("ipc-open", job, feed=exporter.result)

    def _measure_big(self, name: str) -> None:
        """One slab alone on the device, after all others were evicted."""
        with self.report.part("big"):
            with Connection.open(socket_path(name), device=name, client="bench") as worker:
                for layout in self.parts + self.whole:
                    _, fds = worker.request(Evict(model=model_name(layout)))
                    fds.close()
            needed, free = self.big[0].nbytes, device_memory(name).free
            if needed > free:
                self.report.notes.append(f"--big left out: needs {human_bytes(needed)}, {human_bytes(free)} free")
                self.big = []
                return
            self._publish(self.big)
            self.report.rounds(self.args.runs, {title(layout): self._engine(layout) for layout in self.big})

    def _at_rest(self, service: PrivateService, state: str, name: str, before: int, weights: int) -> None:
        with self.report.part(f"memory, {state}"):
            for process, nbytes in service.resident().items():
                self.report.add(f"{state}: {process}", nbytes)
            if not self.host:
                self.report.add(f"{state}: device", _used(name) - before - weights)

    def _close(self, what: str, service: PrivateService) -> None:
        with self.report.part(what):
            service.close()

    # Results.

    def _row(self, what: str, name: str, **options: Any) -> list[Row]:
        samples = self.report.samples.get(name)
        return [Row(what, samples, **options)] if samples else []

    def _ratios(self) -> list[Row]:
        """The peer's median over ours, of the first layout."""
        rows = []
        median = self.report.median
        ours = title(self.peer)
        attach, views, touch = (median(f"{ours}: {value}") for value in ("attach", "views", "touch"))
        opened, loaded, read = median(f"{PEER}: open"), median(f"{FILE}: load_file"), median(f"{FILE}: touch")
        if attach is None or views is None:
            return []
        if opened is not None:
            rows.append(Row("CUDA IPC / attach", [opened / attach], RATIO, IPC_GOAL))
            rows.append(Row("CUDA IPC / (attach + all views)", [opened / (attach + views)], RATIO))
        if loaded is not None and read is not None and touch is not None:
            rows.append(Row("load_file / (attach + all views)", [loaded / (attach + views)], RATIO))
            rows.append(
                Row(
                    "load_file / (attach + all views), every page read",
                    [(loaded + read) / (attach + views + touch)],
                    RATIO,
                )
            )
        return rows

    def _allocations(self) -> str:
        count = self.report.median(f"{PEER}: allocations") or 0
        return f"{self.peer.tensors:,} tensors in {count:,.0f} allocations"


def _role(role: str, job: dict[str, Any], *, feed: str | None = None) -> Any:
    return run_child([ROLES, role, json.dumps(job)], feed=feed)


def _used(device: str) -> int:
    memory = device_memory(device)
    return memory.total - memory.free


def _imports() -> dict[str, float]:
    """Every module of the client, as the goal says; and what an attach by name imports, which is less."""
    names = sorted(path.stem for path in Path(client.__path__[0]).glob("[!_]*.py"))
    every = ["weightcached.shard.cuda", *(f"weightcached.client.{name}" for name in names)]
    needed = ["weightcached.shard.cuda", "weightcached.client.attach"]
    return {"import": _import_seconds(every), "import for attach": _import_seconds(needed)}


def _import_seconds(modules: list[str]) -> float:
    code = (
        f"import sys, time; start = time.perf_counter(); import weightcached, {', '.join(modules)}; "
        "seconds = time.perf_counter() - start; "
        "sys.exit('the client imports torch') if 'torch' in sys.modules else print(seconds)"
    )
    return float(run_child(["-c", code]))


def _status_process() -> dict[str, float]:
    """The whole command, from its start to its end."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "weightcached.cli.ctl", "status"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise BenchError(f"weightcachectl status: exit status {done.returncode}: {done.stderr.strip()}")
    return {"status": seconds}


if __name__ == "__main__":
    sys.exit(main())
