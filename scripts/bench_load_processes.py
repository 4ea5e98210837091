"""The processes of `scripts/bench load`, seen from the one that starts them; a signal loses none."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench_common import CHILD_SECONDS, BenchError, last_line

CHILD = str(Path(__file__).with_name("bench_load_child.py"))
READY_SECONDS = 180.0  # for imports and CUDA
LOAD_SECONDS = 300.0
END_SECONDS = 60.0


class Interrupted(BaseException):
    """SIGTERM or SIGINT: clean up, then print what there is."""


class _Interrupt:
    """Whether a signal raises `Interrupted` at once, and whether one came that did not."""

    def __init__(self) -> None:
        self.waits = False
        self.came = False

    def handle(self, number: int, frame: object) -> None:
        self.came = True
        if not self.waits:
            raise Interrupted


_interrupt = _Interrupt()


def catch_signals() -> None:
    """From here on SIGTERM and SIGINT raise `Interrupted` in the main thread."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt.handle)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A signal within the block raises at its end. Around the start of a process and what is to end it: a signal in
    the middle of the one would leave a process that nobody knows of."""
    _interrupt.waits = True
    try:
        yield
    finally:
        _interrupt.waits = False
    if _interrupt.came:
        raise Interrupted


def run_once(command: list[str]) -> Any:
    """A fresh process that prints one JSON document last; returns that. `BenchError` with its last line on stderr."""
    with ExitStack() as stack:
        with uninterrupted():
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            started = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            process = stack.enter_context(started)
            stack.callback(process.kill)  # does nothing to one that has ended
        output, _ = process.communicate(timeout=CHILD_SECONDS)
        errors.seek(0)
        if process.returncode:
            raise BenchError(f"exit status {process.returncode}: {last_line(errors.read())}")
    return json.loads(output.splitlines()[-1])


class Missing(Exception):
    """A loader's package is not there; the text is the reason."""


class Child:
    """A process of `bench_load_child`, which waits when it is ready; `close` ends it, loaded or not."""

    def __init__(self, job: dict[str, Any], environ: dict[str, str]) -> None:
        """Starts it; to be called `uninterrupted`, together with what will close it."""
        with ExitStack() as undo:
            self._errors = undo.enter_context(tempfile.TemporaryFile("w+"))
            self._process = subprocess.Popen(
                [sys.executable, CHILD, json.dumps(job)],
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
            )
            undo.pop_all()

    def ready(self) -> dict[str, Any]:
        """Returns when it could load at once. `Missing` without its package, `BenchError` when it ends."""
        answer = self._answer(READY_SECONDS)
        if "missing" in answer:
            raise Missing(answer["missing"])
        found: dict[str, Any] = answer["ready"]
        return found

    def load(self) -> dict[str, Any]:
        """Lets it load; returns what it measured once its device memory and everything else is given back."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"go\n")
        except BrokenPipeError:
            raise self._ended() from None
        done: dict[str, Any] = self._answer(LOAD_SECONDS)["done"]
        self._end()
        return done

    def close(self) -> None:
        self._end()
        self._errors.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], seconds)[0]:
            self._process.kill()
            raise BenchError(f"no answer within {seconds:g} s")
        line = out.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> BenchError:
        self._end()
        self._errors.seek(0)
        return BenchError(f"exit status {self._process.returncode}: {last_line(self._errors.read())}")

    def _end(self) -> None:
        """End of file on its input is its sign to end, where it still waits."""
        if self._process.returncode is not None:
            return
        try:
            self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
