"""text: what comes from elsewhere stays one harmless line."""

from __future__ import annotations

import os

import pytest

from weightcached.text import cut_middle, describe_exit, holder, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Ünïcode ✓", "plain Ünïcode ✓"),
        ("a\tb", r"a\tb"),
        ("\x1b[2J", r"\x1b[2J"),
        (os.fsdecode(b"caf\xe9"), r"caf\udce9"),
        ("\u202egpj", r"\u202egpj"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    """Printable text is left alone; the rest is escaped, undecodable bytes of file names too."""
    assert printable(text) == shown
    shown.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("m: short", "m: short"),
        ("m: " + "x" * 40 + "end", "m: x ... " + "x" * 18 + "end"),
        ("m: " + "x" * 40 + " | File | why it ends", "m: x ... File | why it ends"),
        ("m: " + "x" * 40 + " | why", "m: x ... why"),
    ],
)
def test_a_long_reason_keeps_its_end(text: str, shown: str) -> None:
    """And its beginning, and no part of a line where a whole one fits."""
    assert cut_middle(text, 30, 4) == shown


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit status 0"), (1, "exit status 1"), (-9, "signal SIGKILL"), (-15, "signal SIGTERM"), (-40, "signal 40")],
)
def test_an_exit_as_a_person_says_it(code: int, words: str) -> None:
    """The log names the signal; real-time signals have a number alone."""
    assert describe_exit(code) == words


def test_holder() -> None:
    """Who has ended and left what it holds to a child is named as that."""
    assert holder(42, "python", ended=False) == "pid 42 (python)"
    assert holder(42, "python", ended=True) == "pid 42 (python, ended; a child of it holds on)"
