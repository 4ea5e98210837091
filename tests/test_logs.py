"""logs: lines as the journal wants them, and as a person does."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from weightcached.logs import LineFormatter

LOG_ALL = """
import logging
from weightcached import logs
logs.setup(logging.DEBUG, {role!r})
log = logging.getLogger("weightcached.some.module")
log.debug("one"); log.info("two"); log.log(25, "three"); log.warning("four"); log.error("five"); log.critical("six")
"""
RAISE = """
from weightcached import logs
logs.setup()
def inner(): raise RuntimeError("boom\\nsecond line")
inner()
"""
RAISE_IN_THREAD = """
import threading
from weightcached import logs
logs.setup()
def inner(): raise RuntimeError("boom")
thread = threading.Thread(target=inner, name="reader-3")
thread.start(); thread.join()
"""


def stderr_of(code: str, *, journal: bool, exit_code: int = 0) -> list[str]:
    """The lines on stderr of a child; with `journal`, $JOURNAL_STREAM names the pipe that its stderr is."""
    read, write = os.pipe()
    found = os.fstat(write)
    # Without the journal the variable names another stream, as for a service whose stderr was redirected.
    inode = found.st_ino if journal else found.st_ino + 1
    env = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{inode}"}
    with os.fdopen(read) as reader:
        try:
            child = subprocess.Popen([sys.executable, "-c", code], stderr=write, env=env)
        finally:
            os.close(write)
        lines = reader.read().splitlines()
        assert child.wait() == exit_code, lines
    return lines


def test_journal_priorities() -> None:
    """In the journal each level is its syslog priority, and the role comes after it."""
    lines = stderr_of(LOG_ALL.format(role="worker host-0"), journal=True)
    words = ("one", "two", "three", "four", "five", "six")
    assert lines == [f"<{p}>worker host-0: {word}" for p, word in zip((7, 6, 5, 4, 3, 3), words, strict=True)]


def test_plain_lines() -> None:
    """Elsewhere, even below systemd with stderr redirected, the level is a word and there is no time stamp."""
    lines = stderr_of(LOG_ALL.format(role=""), journal=False)
    assert lines == ["DEBUG one", "INFO two", "Level 25 three", "WARNING four", "ERROR five", "CRITICAL six"]


def test_level_is_for_us_and_libraries_are_quiet() -> None:
    """Below the level nothing is printed; other libraries are heard from WARNING on, whatever our level is."""
    code = (
        "import logging\nfrom weightcached import logs\n"
        "logs.setup(logging.ERROR); logging.getLogger('weightcached.x').info('hidden')\n"
        "logs.setup(logging.DEBUG); logging.getLogger('weightcached.x').debug('shown')\n"
        "logging.getLogger('asyncio').info('hidden'); logging.getLogger('asyncio').warning('heard')\n"
    )
    assert stderr_of(code, journal=False) == ["DEBUG shown", "WARNING heard"]


@pytest.mark.parametrize("code", [RAISE, RAISE_IN_THREAD])
def test_uncaught_exception_is_logged_whole(code: str) -> None:
    """Every line of an uncaught exception's traceback carries the priority; the exit code stays Python's own."""
    lines = stderr_of(code, journal=True, exit_code=1 if code is RAISE else 0)
    assert all(line.startswith("<3>") for line in lines), lines
    assert lines[0].startswith("<3>unexpected error")
    assert any("in inner" in line for line in lines)
    assert any("RuntimeError: boom" in line for line in lines)
    assert "reader-3" in lines[0] or code is RAISE


def test_interrupt_of_a_thread_by_system_exit_is_silent() -> None:
    """A thread that ends itself with SystemExit is no error, as in the interpreter's own hook."""
    code = (
        "import sys, threading\nfrom weightcached import logs\nlogs.setup()\nthreading.Thread(target=sys.exit).start()"
    )
    assert stderr_of(code, journal=True) == []


def formatted(message: str, args: Sequence[object] = (), *, journal: bool = True) -> str:
    record = logging.LogRecord("weightcached.x", logging.INFO, __file__, 1, message, tuple(args), None)
    return LineFormatter(journal=journal, role="service").format(record)


@pytest.mark.parametrize("journal", [True, False])
def test_message_cannot_forge_a_line(journal: bool) -> None:
    """What a peer sent is part of one line: line breaks and terminal codes come out as escapes."""
    line = formatted("client %s", ["x\n<0>panic\r\x1b[31m\u2028"], journal=journal)
    assert line.endswith(r"service: client x\n<0>panic\r\x1b[31m\u2028")
    assert "\n" not in line


def test_exception_of_a_caught_error_keeps_its_lines() -> None:
    """A logged traceback stays readable: one prefixed line for each of its lines."""
    try:
        raise ValueError("bad")
    except ValueError:
        record = logging.LogRecord("weightcached.x", logging.WARNING, __file__, 1, "failed", None, sys.exc_info())
    lines = LineFormatter(journal=True).format(record).split("\n")
    assert lines[0] == "<4>failed"
    assert lines[1] == "<4>Traceback (most recent call last):"
    assert lines[-1] == "<4>ValueError: bad"
    assert all(re.match("<4>.", line) for line in lines)
