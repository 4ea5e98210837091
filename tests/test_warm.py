"""What a warm Python runs is what a new one runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import Program, Warm

SHOW = """
import os, sys
print(sys.argv[1:], __name__, os.getcwd(), os.environ.get("WARM"), sys.path[0], "fractions" in sys.modules)
print(sorted(name for name in os.environ if name != "LC_CTYPE"), file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    started = Warm("fractions")
    yield started
    started.close()


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_as_a_new_one(warm: Warm, tmp_path: Path, kind: str) -> None:
    """Arguments, name, folder, environment, path, output and exit status; beside them, what is imported already."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "program_of_warm.py").write_text(SHOW)
    program = {"-c": ["-c", SHOW], "-m": ["-m", "program_of_warm"], "file": ["../program_of_warm.py"]}[kind]
    environ = {**os.environ, "WARM": "yes", "PYTHONPATH": str(tmp_path)}
    cwd = tmp_path / "elsewhere"

    new = subprocess.run([sys.executable, *program, "7"], cwd=cwd, env=environ, capture_output=True, text=True)
    found = warm.start(*program, "7", cwd=cwd, environ=environ).wait(30)

    assert (found.returncode, found.stderr) == (new.returncode, new.stderr) == (7, new.stderr)
    assert found.stdout == new.stdout.replace("False\n", "True\n") != new.stdout


def test_several_at_once(warm: Warm, tmp_path: Path) -> None:
    """Each is a process of its own, whichever ends first; one that fails prints why."""

    def start(code: str) -> Program:
        return warm.start("-c", code, cwd=tmp_path, environ=dict(os.environ))

    first = start("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint(os.getpid())")
    second = start("open('go', 'w').close()\nraise KeyError('gone')")
    failed = second.wait(30)
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "KeyError: 'gone'")
    done = first.wait(30)
    assert (done.returncode, done.stdout) == (0, f"{first.pid}\n")


def test_one_that_hangs(warm: Warm, tmp_path: Path) -> None:
    """It is killed, and what it has printed is shown."""
    program = warm.start(
        "-c", "import signal; print('here', flush=True); signal.pause()", cwd=tmp_path, environ=dict(os.environ)
    )
    with pytest.raises(AssertionError, match=r"has not ended within 0\.5 s:\nhere"):
        program.wait(0.5)
    with pytest.raises(ProcessLookupError):
        os.kill(program.pid, 0)
