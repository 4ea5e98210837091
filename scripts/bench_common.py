"""What every benchmark needs: a service of its own, processes that report in JSON, samples with their goals."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from weightcached import __version__
from weightcached.cli.output import emit, print_table
from weightcached.errors import WeightCacheError
from weightcached.paths import control_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Status

START_SECONDS = 60.0
CHILD_SECONDS = 300.0


class BenchError(Exception):
    """A part that could not be measured; the text is the whole reason."""


# Units: (name, how many of the base unit, digits after the point). Times are kept in seconds, memory in bytes.
MS = ("ms", 1e-3, 2)
MB = ("MB", 1e6, 1)
MIB = ("MiB", float(1 << 20), 1)
RATIO = ("x", 1.0, 1)
Unit = tuple[str, float, int]


@dataclass(frozen=True)
class Goal:
    """What the median is to be, in the row's own unit: at most `value`, or with `least` at least that."""

    value: float
    least: bool = False

    def text(self, unit: Unit) -> str:
        return f"{'>=' if self.least else '<='} {self.value:g} {unit[0]}"

    def met(self, value: float) -> bool:
        return value >= self.value if self.least else value <= self.value


@dataclass
class Row:
    """One line of the result: samples in the base unit, in the order in which they were taken."""

    what: str
    samples: list[float]
    unit: Unit = MS
    goal: Goal | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.goal.met(self.median / self.unit[1])

    def shown(self, value: float) -> str:
        name, size, digits = self.unit
        return f"{value / size:,.{digits}f} {name}"

    def cells(self) -> list[str]:
        goal = "-" if self.goal is None else self.goal.text(self.unit)
        met = {None: "-", True: "yes", False: "NO"}[self.met]
        several = len(self.samples) > 1
        low, high = (self.shown(min(self.samples)), self.shown(max(self.samples))) if several else ("-", "-")
        return [self.what, self.shown(self.median), low, high, str(len(self.samples)), goal, met]

    def as_json(self) -> dict[str, Any]:
        name, size, _ = self.unit
        return {
            "what": self.what,
            "unit": name,
            "median": self.median / size,
            "min": min(self.samples) / size,
            "max": max(self.samples) / size,
            "runs": len(self.samples),
            "goal": None if self.goal is None else self.goal.text(self.unit),
            "met": self.met,
        }


@dataclass
class Report:
    """Collects samples by name while the benchmark runs; rows are made of them at the end."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peers: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        values = self.samples.get(name)
        return statistics.median(values) if values else None

    @contextmanager
    def part(self, name: str, *, peer: bool = False) -> Iterator[None]:
        """An error inside the block is noted under `name` and loses nothing that was measured elsewhere."""
        if peer:
            self.peers.add(name)
        try:
            yield
        except (BenchError, WeightCacheError, OSError, subprocess.SubprocessError) as error:
            self.failed[name] = str(error)
            print(f"bench: {name}: failed: {error}", file=sys.stderr)

    @property
    def complete(self) -> bool:
        """Whether all of our own parts were measured; a peer may have failed."""
        return not set(self.failed) - self.peers

    def rounds(self, runs: int, measurements: dict[str, Callable[[], dict[str, float]]]) -> None:
        """Takes `runs` samples of each, in turns, so that a drift of the machine meets all alike.

        A measurement gives values by name; they are kept as "<its name>: <value's name>". One that fails is left out
        from then on.
        """
        for number in range(1, runs + 1):
            started = time.monotonic()
            for name, measure in measurements.items():
                if name in self.failed:
                    continue
                with self.part(name, peer=name in self.peers):
                    for key, value in measure().items():
                        self.add(f"{name}: {key}", value)
            print(f"bench: round {number} of {runs}: {time.monotonic() - started:.1f} s", file=sys.stderr)

    def print(self, rows: list[Row]) -> None:
        """The table, then what failed and what is missed."""
        columns = ["WHAT", "MEDIAN", "MIN", "MAX", "RUNS", "GOAL", "MET"]
        print_table(columns, [row.cells() for row in rows], right=("MEDIAN", "MIN", "MAX", "RUNS"))
        for note in self.notes:
            emit(f"note: {note}")
        for name, reason in self.failed.items():
            emit(f"{name}: failed: {reason}")
        for row in rows:
            if row.met is False and row.goal is not None:
                emit(f"missed: {row.what}: {row.shown(row.median)}, goal {row.goal.text(row.unit)}")


class PrivateService:
    """``weightcached serve`` on one device, in the runtime directory that the environment names; ended by `close`."""

    def __init__(self, folder: Path, device: str, *, instance: str = "bench") -> None:
        """Starts it and returns when it reports READY=1 (sd_notify(3)). `BenchError` if it ends or takes too long."""
        self.instance = instance
        self.device = device
        self._log = folder / "service.log"
        config = folder / f"{instance}.toml"
        config.write_text(f"devices = [{json.dumps(device)}]\n")
        address = str(folder / "notify")
        started = time.monotonic()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, self._log.open("wb") as log:
            notify.bind(address)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightcached", "serve", "--config", str(config)],
                env={**os.environ, "NOTIFY_SOCKET": address},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
            try:
                self._wait_ready(notify)
            except BaseException:
                self._kill()
                raise
        self.start_seconds = time.monotonic() - started

    def status(self) -> dict[str, Any]:
        with Connection.open(control_path(self.instance), client="bench") as connection:
            status, fds = connection.request(Status(), timeout=30.0)
            fds.close()
            return status

    def resident(self) -> dict[str, int]:
        """Resident bytes of the service's main process and of its worker (VmRSS, proc(5))."""
        (device,) = self.status()["devices"]
        return {"service": _resident(self._process.pid), "worker": _resident(device["pid"])}

    def close(self) -> None:
        """SIGTERM, and waits. `BenchError` unless it ends well, now, and leaves nothing in the runtime directory."""
        if (code := self._process.poll()) is not None:
            raise BenchError(f"the service had ended by itself with exit status {code}\n{self._tail()}")
        self._process.terminate()
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._kill()
            raise BenchError(f"the service did not end within 30 s of SIGTERM\n{self._tail()}") from None
        if code:
            raise BenchError(f"the service ended with exit status {code}\n{self._tail()}")
        if left := sorted(path.name for path in control_path(self.instance).parent.iterdir()):
            raise BenchError(f"left in the runtime directory: {', '.join(left)}")

    def _wait_ready(self, notify: socket.socket) -> None:
        notify.settimeout(0.5)  # a service that dies sends nothing
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            try:
                message = notify.recv(8192)
            except TimeoutError:
                if (code := self._process.poll()) is not None:
                    raise BenchError(
                        f"the service ended with exit status {code} before it was ready\n{self._tail()}"
                    ) from None
                continue
            if b"READY=1" in message.split(b"\n"):
                return
        raise BenchError(f"the service was not ready within {START_SECONDS:g} s\n{self._tail()}")

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"process {pid} has no VmRSS")


def run_child(command: list[str], *, feed: str | None = None) -> Any:
    """A fresh process that prints one JSON document last; `feed` goes to its stdin. `BenchError` with its stderr."""
    done = subprocess.run(
        [sys.executable, *command],
        input=feed,
        stdin=subprocess.DEVNULL if feed is None else None,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
    )
    if done.returncode:
        raise BenchError(f"exit status {done.returncode}: {last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def last_line(text: str) -> str:
    """Where a traceback or a message says what went wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


class LiveChild:
    """A process that prints one JSON document and then lives until its stdin ends; `result` is the document's text."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        """Returns when the document is there. `BenchError` if the process ends first."""
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert self._process.stdout is not None
            self.result = self._process.stdout.readline()
            if not self.result:
                _, errors = self._process.communicate(timeout=30)
                raise BenchError(f"exit status {self._process.returncode}: {last_line(errors)}")
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def close(self) -> None:
        """Lets it end, by force after 60 s."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def versions(*packages: str) -> dict[str, str | None]:
    """What ran: Python, kernel, weightcached, and each package's version (None where it is not installed)."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "weightcached": __version__,
    }
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
