"""The measuring of `scripts/bench load`: fresh processes by turns, page cache hot or cold, within a budget."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_common import BenchError
from bench_load_cache import make_cold, make_hot
from bench_load_peers import OURS, OURS_STARTING, PEERS, SLICERS, Peer
from bench_load_processes import Child, Missing, uninterrupted

CHECKERS = 3  # processes that load and compare at once, in the round that is not timed


@dataclass(frozen=True)
class Case:
    """One comparison: a checkpoint, page cache "hot" or "cold", and with `ranks` a tensor parallel slice.

    `rank` None with `ranks` over 1: every rank's slice, side by side on one device.
    """

    checkpoint: str
    cache: str
    ranks: int = 1
    rank: int | None = None

    @property
    def what(self) -> str:
        """ "dense" or "dense, rank 0 of 8"."""
        if self.ranks == 1:
            return self.checkpoint
        part = f"all {self.ranks} ranks" if self.rank is None else f"rank {self.rank} of {self.ranks}"
        return f"{self.checkpoint}, {part}"

    @property
    def name(self) -> str:
        """ "dense, hot" or "dense, rank 0 of 8, hot"."""
        return f"{self.what}, {self.cache}"

    @property
    def peers(self) -> dict[str, Peer]:
        return PEERS if self.ranks == 1 else SLICERS


@dataclass
class Record:
    """What came out, by case and loader."""

    samples: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    checked: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes compared, by `Case.what` and loader
    failed: dict[str, str] = field(default_factory=dict)  # by "case: loader"
    missing: dict[str, str] = field(default_factory=dict)  # by loader
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)  # by loader
    torch: str = ""
    device: str = ""

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"bench: {text}", file=sys.stderr)


class Rounds:
    """Measures cases; `deadline` is when no measurement is started any more (time.monotonic), None for never."""

    def __init__(
        self, record: Record, folder: Path, device: str, *, site: str | None, slow: float, deadline: float | None
    ) -> None:
        self.record = record
        self._folder = folder
        self._device = device
        self._site = site
        self._slow = slow
        self._deadline = deadline
        self._last: dict[tuple[str, str], float] = {}  # seconds of a measurement with all around it, as seen last

    def files(self, checkpoint: str) -> list[Path]:
        return sorted((self._folder / checkpoint).glob("*.safetensors"))

    def measure(self, case: Case, names: list[str], repeats: int, *, check: bool) -> None:
        """A round that only warms up and compares all bytes; then `repeats` rounds that are timed.

        `check`: with the first round, for loaders that it was not done for with this checkpoint and these ranks.
        """
        try:
            self._prepare(case)
        except BenchError as error:
            self.record.note(f"{case.name}: not measured: {error}")
            return
        names = [name for name in names if self._usable(case, name)]
        done = self.record.checked.get(case.what, {})
        if check and (unchecked := [name for name in names if name not in done]):
            self._round(case, unchecked, timed=False, text="warm-up and check")
        for number in range(1, repeats + 1):
            names = [name for name in names if self._wanted(case, name)]
            if not names:
                return
            # Every loader comes after every other one in some round.
            turn = (number - 1) % len(names)
            self._round(case, names[turn:] + names[:turn], timed=True, text=f"round {number} of {repeats}")

    def _usable(self, case: Case, name: str) -> bool:
        peer = case.peers[name]
        if self._device == "cpu" and peer.gpu_only:
            self.record.missing[name] = "loads to a GPU only"
        elif find_spec(peer.module) is None:
            self.record.missing[name] = f"not installed: no module {peer.module}"
        return name not in self.record.missing

    def _wanted(self, case: Case, name: str) -> bool:
        """Not what failed or is missing, nor again what is slow."""
        if f"{case.name}: {name}" in self.record.failed or name in self.record.missing:
            return False
        taken = self.record.samples.get(case.name, {}).get(name, [])
        if name not in (OURS, OURS_STARTING) and taken and taken[-1]["seconds"] > self._slow:
            text = f"{case.name}: {name} was measured once: it took more than {self._slow:g} s"
            if text not in self.record.notes:
                self.record.note(text)
            return False
        return True

    def _round(self, case: Case, names: list[str], *, timed: bool, text: str) -> None:
        """All processes start together, since imports take longer than loading; then they load one after the other."""
        started = time.monotonic()
        if self._late(0.0):
            self.record.left_out.append(f"{case.name}: {text}: {', '.join(names)}")
            return
        with ExitStack() as stack:
            children = self._start(stack, case, names, check=not timed)
            if timed:
                for name, child in children.items():
                    self._timed(case, name, child, text)
            else:
                with ThreadPoolExecutor(CHECKERS if (os.cpu_count() or 1) > 4 else 1) as pool:
                    list(pool.map(lambda item: self._checked(case, *item), children.items()))
        print(f"bench: {case.name}: {text}: {time.monotonic() - started:.1f} s", file=sys.stderr)

    def _start(self, stack: ExitStack, case: Case, names: list[str], *, check: bool) -> dict[str, Child]:
        what = {
            "folder": str(self._folder / case.checkpoint),
            "files": [str(path) for path in self.files(case.checkpoint)],
            "device": self._device,
            "ranks": case.ranks,
            "rank": case.rank,
            "site": self._site,
        }
        children = {}
        for name in names:
            job = {"peer": name, "slices": case.ranks > 1, "check": check, "what": what}
            with uninterrupted():
                children[name] = stack.enter_context(closing(Child(job, case.peers[name].environ)))
        ready = {}
        for name, child in children.items():
            with self._part(case, name):
                found = child.ready()
                ready[name] = child
                self.record.versions[name] = found["version"]
                self.record.torch = found["torch"]
                self.record.device = found["device"]
        return ready

    def _timed(self, case: Case, name: str, child: Child, text: str) -> None:
        if self._late(self._last.get((case.name, name), 0.0)):
            self.record.left_out.append(f"{case.name}: {text}: {name}")
            return
        started = time.monotonic()
        with self._part(case, name):
            share = self._prepare(case)
            sample = {**child.load(), "resident_before": share}
            self.record.samples.setdefault(case.name, {}).setdefault(name, []).append(sample)
        self._last[case.name, name] = time.monotonic() - started

    def _checked(self, case: Case, name: str, child: Child) -> None:
        if self._late(0.0):
            self.record.left_out.append(f"{case.name}: check of {name}")
            return
        with self._part(case, name):
            self.record.checked.setdefault(case.what, {})[name] = child.load()["checked"]

    def _prepare(self, case: Case) -> float:
        """Page cache as the case wants it; returns the share of the files that is in it."""
        return (make_cold if case.cache == "cold" else make_hot)(self.files(case.checkpoint))

    def _late(self, seconds: float) -> bool:
        return self._deadline is not None and time.monotonic() + seconds > self._deadline

    @contextmanager
    def _part(self, case: Case, name: str) -> Iterator[None]:
        """What goes wrong with one loader touches no other."""
        try:
            yield
        except Missing as missing:
            self.record.missing[name] = f"not installed: {missing}"
        except (BenchError, OSError) as error:
            self.record.failed[f"{case.name}: {name}"] = str(error)
            print(f"bench: {case.name}: {name}: failed: {error}", file=sys.stderr)
