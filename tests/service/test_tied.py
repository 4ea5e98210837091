"""A command that ends with its parent: by real processes, whose parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import wait_for_end
from weightcached.service import tied

TIED = [sys.executable, "-I", "-S", tied.__file__]
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:-1], str(os.getpid()), "sh", "-c", sys.argv[-1]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), end="", flush=True)
sys.stdin.read()
"""


def run(*command: str, parent: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command tied to this process, or to `parent`."""
    pid = str(os.getpid() if parent is None else parent)
    return subprocess.run([*TIED, pid, *command], capture_output=True, text=True, timeout=60)


def test_it_ends_when_its_parent_is_killed() -> None:
    """SIGKILL to the parent, with which nothing else of it can be told: the command, of the same pid, is gone."""
    words = [sys.executable, "-c", PARENT, *TIED, "echo $$; exec sleep 600"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, said = map(int, parent.stdout.readline().split())
        assert pid == said
        assert Path(f"/proc/{pid}/comm").read_text() in ("sleep\n", "sh\n")
        parent.kill()
        wait_for_end(pid)


def test_it_does_not_begin_without_its_parent() -> None:
    """The parent ended before the kernel was told: the command does not run."""
    done = run("echo", "here", parent=1)
    assert (done.returncode, done.stdout, done.stderr) == (tied.NOT_STARTED, "", "")


def test_the_command_is_as_if_started_directly() -> None:
    """Its words, its exit status, its environment and its signals; the interpreter's own options are not passed on."""
    done = run("sh", "-c", 'echo "$0" "$#" "$WORD"; kill -PIPE $$', "a b")
    assert done.stdout == "a b 0 \n"
    assert done.returncode == -signal.SIGPIPE
    os.environ["WORD"] = "x"
    try:
        assert run("sh", "-c", "echo $WORD; exit 3").stdout == "x\n"
    finally:
        del os.environ["WORD"]


@pytest.mark.parametrize(("mode", "why"), [(None, "No such file or directory"), (0o600, "Permission denied")])
def test_what_cannot_be_started_is_said(tmp_path: Path, mode: int | None, why: str) -> None:
    """On stderr, with the exit status of a shell."""
    program = tmp_path / "program"
    if mode is not None:
        program.write_text("#!/bin/sh\n")
        program.chmod(mode)
    done = run(str(program))
    assert (done.returncode, done.stderr) == (tied.NOT_STARTED, f"{program} cannot be started: {why}\n")
