"""Fuzzes the reader of one header, against the oracle and the safetensors library.

An input is one byte and a text. 255: the text is a whole file. Else the text is a header, its length is put before it,
and the file is as long as the header asks for; 1 to 4: and two bytes shorter to two longer than that.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.checkpoint.strict_cases import CASES
from tests.fuzz.harness import data_bytes, fuzz, judge_header

WHOLE = 255
_DIFFERENCE = {1: -2, 2: -1, 3: 1, 4: 2}


def one_input(data: bytes) -> None:
    """Raises for a wrong answer of the reader."""
    kind, text = data[0] if data else 0, data[1:]
    if kind == WHOLE:
        judge_header(text, len(text))
    else:
        size = 8 + len(text) + data_bytes(text) + _DIFFERENCE.get(kind, 0)
        judge_header(len(text).to_bytes(8, "little") + text, size)


def seeds() -> Iterator[bytes]:
    """Every strict case: as a header, or as a whole file where the length before it is what is wrong."""
    for case in CASES:
        length = int.from_bytes(case.content[:8], "little")
        if 8 + length <= len(case.content):
            yield b"\0" + case.content[8 : 8 + length]
        else:
            yield bytes([WHOLE]) + case.content


if __name__ == "__main__":
    fuzz(one_input, seeds(), mutated_from=1)
