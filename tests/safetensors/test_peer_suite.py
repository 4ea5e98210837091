"""The safetensors library's own tests pass against this package's `safe_open`, with what they write in the cache.

The source distribution of the installed version is fetched by pip, and the tests in it are kept in
``$XDG_CACHE_HOME/weightcached/peer-tests`` (~/.cache).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import safetensors

from tests.client.handmade import RunningWorker
from tests.running import import_path

OPENING = ["test_pt_comparison.py", "test_pt_model.py", "test_simple.py", "test_pread_backend.py"]  # files, with torch
SUITES = [*OPENING, "test_threadable.py"]
# Not the environment of a test, which has a cache folder of its own.
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightcached" / "peer-tests"
FETCH_SECONDS = 120
RUN_SECONDS = 240

# A plugin for the suites' pytest: whatever file is opened is in the cache, so that every opening is a hit. The bytes
# are those on disk, so it is counted in which file's tests there were hits.
PLUGIN = """
import os
from collections import Counter
from tests.client.handmade import make_shard, publish, read_file
from tests.safetensors.conftest import source
from pathlib import Path
from weightcached.safetensors import files, hook

hook.install()
found, seen, count = files.find, set(), Counter()

def find(path, stat, device):
    if stat not in seen and device in (None, "cpu"):
        seen.add(stat)
        try:
            shard = make_shard(read_file(Path(path)), model=str(len(seen)), key={"content": str(len(seen))},
                               files=(source(Path(path)),))
        except (ValueError, KeyError):
            return None
        publish(shard)
    hit = found(path, stat, device)
    if hit is not None:
        count[os.environ["PYTEST_CURRENT_TEST"].split("::")[0].split("/")[-1]] += 1
    return hit

files.find = find

def pytest_unconfigure():
    for name, times in count.items():
        print("openings from the cache:", name, times)
"""


def fetched() -> Path:
    """The folder of the library's tests; the test is skipped where it cannot be had."""
    kept = KEPT / f"safetensors-{safetensors.__version__}"
    if kept.exists():
        return kept
    with tempfile.TemporaryDirectory(prefix="wc-peer-") as scratch:
        # pip wants to build the metadata, which takes Rust: it fails at that, and leaves what it has unpacked.
        options = ["--no-deps", "--no-binary", "safetensors", "--no-build-isolation", "--no-clean", "-d", scratch]
        command = [sys.executable, "-m", "pip", "download", *options, f"safetensors=={safetensors.__version__}"]
        environment = {**os.environ, "TMPDIR": scratch, "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "15"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FETCH_SECONDS)
            said = done.stderr.strip()[-200:]
        except subprocess.TimeoutExpired:
            said = f"pip has not ended within {FETCH_SECONDS} s"
        for tests in Path(scratch).glob("pip-*/safetensors_*/bindings/python/tests"):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(dir=kept.parent))
            shutil.copytree(tests, part / "tests")
            try:
                (part / "tests").rename(kept)  # whole or not at all
            except OSError:  # another process was faster
                assert kept.exists()
            shutil.rmtree(part)
            return kept
    pytest.skip(f"the source of safetensors {safetensors.__version__} cannot be had: {said}")


def start(suite: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    """The library's tests on their way in a folder of their own: they write there, by the same names each time."""
    shutil.copytree(suite, folder / "tests")  # the tests name their data from beside it
    (folder / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(folder.parent), import_path()])
    names = [f"tests/{name}" for name in SUITES if (suite / name).exists()]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", *options, *names],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(FETCH_SECONDS + RUN_SECONDS + 60)
def test_the_librarys_tests_pass(worker: RunningWorker, tmp_path: Path) -> None:
    """As they do against the library alone: the same tests pass, and none fails that does not fail there too."""
    suite = fetched()
    (tmp_path / "everything_is_cached.py").write_text(PLUGIN)
    started = [start(suite, tmp_path / "alone"), start(suite, tmp_path / "cached", "-p", "everything_is_cached")]
    try:
        printed = [process.communicate(timeout=RUN_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    words = ("PASSED", "FAILED", "ERROR", "SKIPPED")
    alone, cached = (
        sorted(line.split(" - ")[0] for line in text.splitlines() if line.startswith(words)) for text in printed
    )

    assert cached == alone, printed[1][-5000:]
    for name in OPENING:
        if (suite / name).exists():
            assert any(line.startswith("PASSED") and name in line for line in cached), printed[1][-3000:]
            assert f"openings from the cache: {name}" in printed[1], printed[1][-1000:]
