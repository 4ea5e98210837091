"""Text for people: what comes from elsewhere made fit for a line of a log or a cell of a table, numbers as words."""

from __future__ import annotations

import re
import signal

MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def printable(text: str) -> str:
    """The text with every character that could break or forge a line, or steer a terminal, written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def cut_middle(text: str, most: int, head: int) -> str:
    """At most `most` characters of it: of a longer one the first `head` and the end, since the last line of a traceback
    says what is wrong. Where the end has several lines, joined by " | ", it begins with a whole one."""
    if len(text) <= most:
        return text
    end = text[len(text) - (most - head - len(" ... ")) :]
    return f"{text[:head]} ... {end.partition(' | ')[2] or end}"


def describe_exit(code: int) -> str:
    """An exit status as a person says it."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"signal {-code}"


def holder(pid: int, command: str, ended: bool) -> str:
    """A process that has something attached, as logs and errors name it."""
    return f"pid {pid} ({command}{', ended; a child of it holds on' if ended else ''})"
