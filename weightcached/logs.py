"""Log lines on stderr: one line an event, without a time stamp, since the journal adds its own.

Under systemd each line starts with ``<3>`` (error) to ``<7>`` (debug), which the journal reads as the priority and
strips (sd-daemon(3)). Elsewhere the level is a word. stderr goes to the journal when its device and inode are those in
$JOURNAL_STREAM (systemd.exec(5)).

    <6>worker host-0: minilm published, 90.9 MB        in the journal
    INFO worker host-0: minilm published, 90.9 MB      in a terminal
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import TracebackType

from .text import printable

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO + 1, 5), (logging.INFO, 6))


def setup(level: int = logging.INFO, role: str = "") -> None:
    """Sends this process's log to stderr, from `level` on; `role` ("worker host-0") is put before each message.

    Libraries are heard from WARNING on. Exceptions that nobody catches, in any thread, are logged too, so that their
    tracebacks carry the priority. Calling it again replaces what was set.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(journal=stderr_is_journal(), role=role))
    logging.getLogger().handlers = [handler]
    logging.getLogger("weightcached").setLevel(level)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def stderr_is_journal() -> bool:
    """Whether descriptor 2 is the stream that systemd connected to the journal."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def line_prefix(level: int) -> str:
    """What a line printed to stderr by other means must start with: ``<3>`` in the journal, nothing elsewhere."""
    return _priority(level) if stderr_is_journal() else ""


class LineFormatter(logging.Formatter):
    """One line for the event; a traceback follows line by line, each with the same priority."""

    def __init__(self, *, journal: bool, role: str = "") -> None:
        super().__init__()
        self._journal = journal
        self._role = f"{role}: " if role else ""

    def format(self, record: logging.LogRecord) -> str:
        lines = [self._role + record.getMessage()]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if record.stack_info:
            lines += record.stack_info.splitlines()
        lines = [printable(line) for line in lines]
        if self._journal:
            prefix = _priority(record.levelno)
            return "\n".join(prefix + line for line in lines)
        return "\n".join([f"{record.levelname} {lines[0]}", *lines[1:]])


def _priority(level: int) -> str:
    """A logging level as a syslog priority (syslog(3)); a level between INFO and WARNING is a notice."""
    return f"<{next((priority for floor, priority in _PRIORITIES if level >= floor), 7)}>"


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("weightcached").critical("unexpected error", exc_info=(kind, error, traceback))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:  # as the interpreter's own hook does: a thread that ends itself is no error
        return
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    name = args.thread.name if args.thread is not None else "?"
    logging.getLogger("weightcached").critical(
        "unexpected error in thread %s", name, exc_info=(args.exc_type, error, args.exc_traceback)
    )
