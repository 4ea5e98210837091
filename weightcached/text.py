"""Text from elsewhere, made fit for a line of a log or a cell of a table."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with every character that could break or forge a line, or steer a terminal, written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
