"""The fuzz targets, a few seconds each: no crash, no hang, no wrong answer. And planted bugs, which they find."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 8  # of fuzzing for each target
MIN_RUNS = 1_000  # a tenth of what a slow machine does in that time

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None,
        reason="atheris is not installed: it has wheels for x86-64 Linux and CPython up to 3.14",
    ),
    pytest.mark.timeout(180),
]


def fuzz(target: str, folder: Path, seconds: int, plant: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a target on a new corpus in `folder`, where its findings and temporary files land too."""
    options = [f"-max_total_time={seconds}", "-seed=1", "-print_final_stats=1"]
    if plant == "hang":
        options.append("-timeout=1")  # rather than ten seconds, which no honest input takes on any machine
    return subprocess.run(
        [sys.executable, "-m", f"tests.fuzz.{target}", str(folder / "corpus"), *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "WEIGHTCACHED_FUZZ_PLANT": plant},
        stdout=subprocess.PIPE,  # the traceback of a finding
        stderr=subprocess.STDOUT,  # what libFuzzer says
        text=True,
        errors="replace",
        timeout=seconds + 100,
    )


def findings(folder: Path) -> list[str]:
    """The kinds of the inputs that libFuzzer kept as findings."""
    kinds = ("crash", "timeout", "oom", "leak", "slow-unit")
    return [path.name.rpartition("-")[0] for path in folder.iterdir() if path.name.rpartition("-")[0] in kinds]


def statistic(done: subprocess.CompletedProcess[str], name: str) -> int:
    found = re.search(rf"^stat::{name}: *(\d+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout[-3000:]
    return int(found[1])


@pytest.mark.parametrize("target", ["fuzz_header", "fuzz_index"])
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    """Thousands of inputs, led by coverage: each is accepted as oracle and library do, or a `CheckpointError`."""
    done = fuzz(target, tmp_path, SECONDS)

    assert done.returncode == 0, done.stdout[-5000:]
    assert statistic(done, "number_of_executed_units") >= MIN_RUNS
    assert statistic(done, "new_units_added") > 0, "nothing new was reached: is the reader instrumented?"
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    ("target", "plant", "words"),
    [
        ("fuzz_header", "crash", "KeyError: 'C64'"),
        ("fuzz_header", "hang", "libFuzzer: timeout"),
        ("fuzz_header", "lax", "Violation: "),
        ("fuzz_index", "stray", "Violation: a refusal names its file: "),
        ("fuzz_index", "unlisted", "Violation: what is loaded is what the index says"),
    ],
)
def test_a_planted_bug_is_found(target: str, plant: str, words: str, tmp_path: Path) -> None:
    """A reader that crashes, hangs, takes too much, leaves its folder or loads too much ends the run with a finding."""
    done = fuzz(target, tmp_path, 60, plant)

    assert done.returncode != 0
    assert words in done.stdout, done.stdout[-5000:]
    assert findings(tmp_path) == ["timeout" if plant == "hang" else "crash"]
