"""The leak checker itself: a checker that finds nothing proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks

ROOT = Path(__file__).parents[1]


def test_a_planted_leak_is_found_and_named() -> None:
    """A descriptor left open fails the test, and the message says what it refers to."""
    fd = -1
    try:
        expected = rf"descriptors left open: \d+ -> {os.devnull}"
        with pytest.raises(pytest.fail.Exception, match=expected), NoDescriptorLeaks():
            fd = os.open(os.devnull, os.O_RDONLY)
    finally:
        os.close(fd)


def test_a_replaced_descriptor_is_found() -> None:
    """A number that refers to another file than before counts as a leak."""
    fd = os.open(os.devnull, os.O_RDONLY)
    other = os.open("/proc/self/status", os.O_RDONLY)
    try:
        with pytest.raises(pytest.fail.Exception, match="status"), NoDescriptorLeaks():
            os.dup2(other, fd)
    finally:
        os.close(fd)
        os.close(other)


def test_what_is_closed_again_is_no_leak() -> None:
    """Descriptors opened and closed inside the block pass."""
    with NoDescriptorLeaks():
        os.close(os.open(os.devnull, os.O_RDONLY))


def test_an_error_inside_is_not_masked() -> None:
    """The block's own exception comes out, whatever it left open."""
    fd = -1
    try:
        with pytest.raises(KeyError), NoDescriptorLeaks():
            fd = os.open(os.devnull, os.O_RDONLY)
            raise KeyError
    finally:
        os.close(fd)


def test_the_fixture_fails_a_leaking_test(tmp_path: Path) -> None:
    """A whole pytest run: of two tests with the fixture, the one that leaks ends as an error."""
    (tmp_path / "test_planted.py").write_text(
        "import os\n"
        "def test_leaking(descriptors): os.open(os.devnull, os.O_RDONLY)\n"
        "def test_tidy(descriptors): os.close(os.open(os.devnull, os.O_RDONLY))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.leaks", "-p", "no:cacheprovider", str(tmp_path)]

    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )

    assert run.returncode == 1, run.stdout + run.stderr
    assert "2 passed, 1 error" in run.stdout
    assert "ERROR test_planted.py::test_leaking" in run.stdout
