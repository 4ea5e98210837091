"""Messages to mutate, and a mutator that is fast enough for a million of them: text is cut at tokens once, ahead.

All chance comes from the caller's `random.Random`, so a seed repeats a run.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

HELLO = {"op": "hello", "client": "fuzz", "version": "1", "device": "host-0", "protocol": 1}
VALID: tuple[dict[str, Any], ...] = (
    HELLO,
    {"op": "attach", "model": "m", "key": {"dtype": "float32", "layers": [0, 4]}, "wait": 0.5},
    {"op": "attach", "model": "m"},
    {"op": "renew", "model": "m", "generation": 1, "created": "2026-01-01", "nbytes": 256, "since": "2026-01-01"},
    {"op": "reserve", "model": "m", "nbytes": 256},
    {"op": "publish"},
    {"op": "status"},
    {"op": "evict", "model": "m", "device": "host-0", "force": True},
    {"op": "load", "model": "m"},
    {"op": "verify", "model": "m", "device": None},
    {"op": "reload"},
    {"op": "subscribe"},
    {"op": "stop"},
)

# What readers of JSON differ in, the words of the protocol, and the edges of numbers.
VALUES = (
    b"null", b"true", b"false", b"0", b"-0", b"1", b"-1", b"1.0", b"1e2", b"NaN", b"Infinity", b"1e999", b"01", b"+1",
    b"2147483648", b"9007199254740993", b"9223372036854775808", b"18446744073709551616", b"9" * 400,
    b"[]", b"{}", b"[0,4]", b'[["x"]]', b'{"dtype":"float32"}', b'{"layers":null}', b'{"x":1}', b"[" * 40 + b"]" * 40,
    b'""', b'"m"', b'"n"', b'"host-1"', b'"\\u0000"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"a\\"b"', b'"../m"', b'"\t"',
    b"'m'", b"/**/1", b'"x":1', b"\xff", b'"' + b"m" * 300 + b'"',
    *(json.dumps(message["op"]).encode() for message in VALID),
)  # fmt: skip
MEMBERS = (
    b'"op":"publish",', b'"op":"hello",', b'"op":null,', b'"model":"n",', b'"nbytes":-1,', b'"nbytes":1,', b'"key":{},',
    b'"force":true,', b'"device":null,', b'"protocol":2,', b'"x":1,', b'"":0,', b'"op":"status","op":"stop",',
    b'"wait":1,',
    b'"generation":1,', b",",
)  # fmt: skip
BYTES = (
    b"", b"0", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b" ",
)  # fmt: skip
RARE = (
    b'{"op":"attach","model":"m","key":{"dtype":' + b"[" * 30_000 + b"]" * 30_000 + b"}}",
    b'{"op":"reserve","model":"m","nbytes":' + b"9" * 60_000 + b"}",
    b'{"op":"attach","model":"' + b"m" * 65_000 + b'"}',
    b'{"op":"status",' + b",".join(b'"f%d":0' % number for number in range(4000)) + b"}",
    b"[" * 65_536,
    b"",
)
TEXTS = (b'"m"', b'"n"', b'"host-1"', b'"\\ud83d\\ude00"', b'""', b'"a\\"b"', b'"' + b"m" * 300 + b'"', b'"\\u0000"')
NUMBERS = (b"0", b"1", b"2", b"256", b"-1", b"2147483648", b"9223372036854775808", b"9" * 400, b"1.5", b"1e2")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+0-9.eE]+|true|false|null|[{}\[\],:]')


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Mutator:
    """Makes messages from `VALID`; about four of ten are still requests, mostly other ones."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance.random
        self.valid = [_dump(message) for message in VALID]
        self._cuts = [  # what is before and behind each token
            [(text[: match.start()], text[match.end() :]) for match in _TOKEN.finditer(text)] for text in self.valid
        ]
        self._all = [cut for cuts in self._cuts for cut in cuts]
        self._values = []  # what is before and behind each value, and others of its kind
        for message, text in zip(VALID, self.valid, strict=True):
            for name, value in message.items():
                before, _, behind = text.partition(b'"%s":%s' % (name.encode(), _dump(value)))
                others = TEXTS if isinstance(value, str) else NUMBERS
                if isinstance(value, dict):
                    others = (
                        b"{}",
                        b'{"dtype":null}',
                        b'{"layers":[1,2]}',
                        b'{"tensor_parallel_rank":1}',
                        b'{"role":"x"}',
                    )
                elif isinstance(value, bool):
                    others = (b"false", b"true")
                elif name == "device":
                    others = (*TEXTS, b"null")
                elif name == "op":
                    others = tuple(_dump(other["op"]) for other in VALID)
                self._values.append((before + b'"%s":' % name.encode(), others, behind))

    def message(self) -> bytes:
        """One mutated message."""
        chance = self._chance
        kind = chance()
        if kind < 0.30:  # a value is another of its kind
            before, others, behind = self._values[int(chance() * len(self._values))]
            return before + others[int(chance() * len(others))] + behind
        if kind < 0.50:  # a value, a name or a sign is anything
            before, behind = self._all[int(chance() * len(self._all))]
            return before + VALUES[int(chance() * len(VALUES))] + behind
        if kind < 0.60:  # a member more, in front, so that the honest one of the same name wins
            text = self.valid[int(chance() * len(self.valid))]
            return b"{" + MEMBERS[int(chance() * len(MEMBERS))] + text[1:]
        if kind < 0.65:  # and behind, where it wins itself
            text = self.valid[int(chance() * len(self.valid))]
            return text[:-1] + b"," + MEMBERS[int(chance() * len(MEMBERS))][:-1] + b"}"
        if kind < 0.70:  # the front of one, the back of another
            return self._all[int(chance() * len(self._all))][0] + self._all[int(chance() * len(self._all))][1]
        text = self.valid[int(chance() * len(self.valid))]
        at = int(chance() * (len(text) + 1))
        if kind < 0.80:  # a few bytes
            return text[:at] + BYTES[int(chance() * len(BYTES))] + text[at + int(chance() * 3) :]
        if kind < 0.85:
            return text[:at]
        if kind < 0.9999:  # in any spacing, which changes nothing
            return text.replace(b",", b" ,\n").replace(b":", b"\t: ")
        return RARE[int(chance() * len(RARE))]
