"""text: what comes from elsewhere stays one harmless line."""

from __future__ import annotations

import os

import pytest

from weightcached.text import printable


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
