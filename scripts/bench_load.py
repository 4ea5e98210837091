"""How fast a checkpoint gets into memory: the loader of weightcached beside others, in one run.

`scripts/bench load` runs it. Every measurement is a fresh process (`bench_load_child`); all loaders take turns. The
clock runs from the loader's call until the last byte is on the device: memory of the device and pinned memory are taken
within it; process start, imports and the CUDA context are before it. GB/s are the bytes of the checkpoint's files over
these seconds. Exit status 0: our own loader was measured and failed nowhere, whatever the goals and the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_common import BenchError, last_line, versions
from bench_load_cache import filesystem
from bench_load_checkpoints import GIB, INDEX, LAYOUTS
from bench_load_peers import OURS, PEERS, SLICERS
from bench_load_processes import Interrupted, catch_signals, run_once
from bench_load_report import goals, print_ceilings, print_rest, print_results, rows
from bench_load_rounds import Case, Record, Rounds

from weightcached.cli.output import human_bytes
from weightcached.devices import gpu_devices

CHECKPOINTS = str(Path(__file__).with_name("bench_load_checkpoints.py"))
CEILINGS = str(Path(__file__).with_name("bench_load_ceilings.py"))
PARTS = (*LAYOUTS, "tp")
GPU_GIB = {"dense": 12.0, "moe": 15.0, "fp8": 9.5}
HOST_GIB = dict.fromkeys(GPU_GIB, 0.25)


def main() -> int:
    args = _arguments()
    catch_signals()
    bench = LoadBench(args)
    try:
        bench.run()
    except Interrupted:
        bench.record.note("interrupted; these are the measurements taken until then")
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        bench.record.failed["set-up"] = str(error)
    bench.print()
    if args.json:
        args.json.write_text(json.dumps(bench.as_json(), indent=1) + "\n")
    return 0 if bench.complete else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench load", description="Loaders of safetensors checkpoints, side by side.")
    parser.add_argument("--device", choices=("host", "cuda"), default="host", help="host memory (default) or first GPU")
    parser.add_argument(
        "--only",
        type=_names(("none", *PARTS)),
        default=list(PARTS),
        metavar="LIST",
        help=f'what to measure with a hot page cache, of {",".join(PARTS)} (default: all), or "none"',
    )
    parser.add_argument(
        "--cold",
        type=_names(("none", *LAYOUTS)),
        metavar="LIST",
        help='the same of checkpoints, page cache cold (default: dense, if it is measured hot), or "none"',
    )
    parser.add_argument(
        "--peers", type=_names(PEERS), metavar="LIST", help=f"of {','.join(PEERS)} (default: by page cache)"
    )
    parser.add_argument(
        "--gib", type=_gib, default={}, metavar="SIZES", help="12, or dense=12,moe=15,fp8=9.5 (default)"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed rounds, page cache hot (3)")
    parser.add_argument("--cold-repeats", type=int, default=2, metavar="N", help="timed rounds, page cache cold (2)")
    parser.add_argument("--tp", type=int, default=8, metavar="N", help="ranks of the tp part (8)")
    parser.add_argument("--slow", type=float, default=4.0, metavar="SECONDS", help="a slower peer is timed once (4)")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no measurement after this; say what is out"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep the checkpoints there, and use them again")
    parser.add_argument(
        "--prefetch-site",
        default=os.environ.get("BENCH_PREFETCH_SITE"),
        metavar="DIR",
        help="folder with safetensors 0.9, if another version is installed ($BENCH_PREFETCH_SITE)",
    )
    parser.add_argument("--no-check", dest="check", action="store_false", help="no warm-up round and no comparison")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE, for `bench plot` too")
    args = parser.parse_args()
    if min(args.repeats, args.cold_repeats) < 1 or args.tp < 2:
        parser.error("--repeats and --cold-repeats: 1 or more; --tp: 2 or more")
    args.only = [part for part in args.only if part != "none"]
    if args.cold is None:
        args.cold = ["dense"] if "dense" in args.only else []
    args.cold = [part for part in args.cold if part != "none"]
    if not args.only and not args.cold:
        parser.error("--only and --cold: both are none")
    if unknown := args.gib.keys() - LAYOUTS.keys() - {"all"}:
        parser.error(f"--gib: no checkpoint {', '.join(sorted(unknown))}")
    return args


def _names(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}: there are {', '.join(known)}")
        return names

    return parse


def _gib(text: str) -> dict[str, float]:
    try:
        found = {name or "all": float(size) for name, _, size in (part.rpartition("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write 12, or dense=12,moe=15") from None
    if min(found.values()) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are above 0")
    return found


class LoadBench:
    """One run: checkpoints, ceilings, cases; `record` fills while it goes on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.record = Record()
        self.device = "cpu" if args.device == "host" else "cuda:0"
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.ceilings: list[dict[str, Any]] = []
        self.cases: list[Case] = []
        self.filesystem: str | None = None
        self.load = os.getloadavg()[0]
        self.started = datetime.now(UTC).isoformat(timespec="seconds")

    def run(self) -> None:
        """Measures everything. What fails is in the record; `BenchError` if nothing can be measured."""
        args = self.args
        if args.device == "cuda" and not gpu_devices():
            raise BenchError("no GPU: NVML finds none")
        deadline = None if args.budget is None else time.monotonic() + args.budget
        with ExitStack() as stack:
            folder = args.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wcb-")))
            rounds = Rounds(
                self.record, folder, self.device, site=args.prefetch_site, slow=args.slow, deadline=deadline
            )
            self._write(folder)
            self.filesystem = filesystem(folder)
            self._measure_ceilings(rounds)
            self.cases = self._cases()
            if args.cold:
                self.record.note("cold is this kernel's page cache alone: a hypervisor below it may keep the file")
            for case in self.cases:
                repeats = args.repeats if case.cache == "hot" else args.cold_repeats
                rounds.measure(case, self._loaders(case), repeats, check=args.check)

    def _write(self, folder: Path) -> None:
        """In a process of its own: a GPU makes the random bytes, and its context must not stay."""
        sizes = HOST_GIB if self.args.device == "host" else GPU_GIB
        parts = {"dense" if part == "tp" else part for part in (*self.args.only, *self.args.cold)}
        wanted = [name for name in LAYOUTS if name in parts]
        gib = {name: self.args.gib.get(name, self.args.gib.get("all", sizes[name])) for name in wanted}
        job = {
            "folder": str(folder),
            "device": self.args.device,
            "layouts": {name: int(size * GIB) for name, size in gib.items()},
        }
        for name, found in run_once([CHECKPOINTS, json.dumps(job)]).items():
            files = sorted((folder / name).glob("*.safetensors"))
            nbytes = sum(path.stat().st_size for path in files)
            tensors = len(json.loads((folder / name / INDEX).read_text())["weight_map"])
            self.checkpoints[name] = {
                "bytes": nbytes,
                "files": len(files),
                "tensors": tensors,
                "write_seconds": found["seconds"],
            }
            text = f"{name}: {tensors:,} tensors, {human_bytes(nbytes)} in {len(files)} files"
            print(f"bench: {text}, written in {found['seconds']:.1f} s", file=sys.stderr)

    def _measure_ceilings(self, rounds: Rounds) -> None:
        name = next(iter(self.checkpoints))
        job = {
            "files": [str(path) for path in rounds.files(name)],
            "device": self.device,
            "cold": bool(self.args.cold),
        }
        try:
            found = run_once([CEILINGS, json.dumps(job)])
        except (BenchError, subprocess.SubprocessError) as error:
            self.record.failed["ceilings"] = last_line(str(error))
            return
        self.ceilings = found["rows"]
        for note in found["notes"]:
            self.record.note(note)
        print_ceilings(self.ceilings)

    def _cases(self) -> list[Case]:
        """Hot ones first: they are short, and a budget cuts the end off."""
        cases = []
        for part in self.args.only:
            if part == "tp":
                cases += [Case("dense", "hot", self.args.tp, 0), Case("dense", "hot", self.args.tp)]
            else:
                cases.append(Case(part, "hot"))
        return cases + [Case(part, "cold") for part in self.args.cold]

    def _loaders(self, case: Case) -> list[str]:
        if case.ranks > 1:
            return list(SLICERS)
        if self.args.peers:
            return [OURS, *(name for name in self.args.peers if name != OURS)]
        return [name for name, peer in PEERS.items() if case.cache in peer.caches]

    @property
    def complete(self) -> bool:
        """Whether our own loader was measured and failed nowhere. Others may fail, and a budget may leave out cases."""
        failed = any(name.endswith(f": {OURS}") for name in self.record.failed)
        measured = any(OURS in found for found in self.record.samples.values())
        return measured and not failed and not self.record.failed.keys() & {"set-up", "ceilings"}

    def as_json(self) -> dict[str, Any]:
        """Everything, each sample in seconds and bytes."""
        args, record, results = self.args, self.record, self.results()
        return {
            "schema": 1,
            "benchmark": "load",
            "date": self.started,
            "device": record.device,
            "cpus": len(os.sched_getaffinity(0)),
            "load_average_before": self.load,
            "io_uring_disabled": _sysctl("kernel/io_uring_disabled"),
            "versions": {**versions("safetensors", "cuda-bindings", "xxhash"), "torch": record.torch},
            "settings": {
                "only": args.only,
                "cold": args.cold,
                "repeats": args.repeats,
                "cold_repeats": args.cold_repeats,
                "slow": args.slow,
                "budget": args.budget,
            },
            "filesystem": self.filesystem,
            "checkpoints": self.checkpoints,
            "ceilings": self.ceilings,
            "results": results,
            "goals": goals(results, self.device),
            "missing": record.missing,
            "failed": record.failed,
            "left_out": record.left_out,
            "notes": record.notes,
        }

    def results(self) -> list[dict[str, Any]]:
        return [row for case in self.cases for row in rows(case, self.record, self.checkpoints, self.ceilings)]

    def print(self) -> None:
        """The table, the goals, then what is missing, failed or left out."""
        results = self.results()
        if results:
            print_results(results)
        print_rest(self.record, goals(results, self.device))


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
