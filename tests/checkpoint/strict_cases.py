"""Safetensors files at and beyond the edge of the format, with the verdict that this reader gives and why.

`refusal` None means accepted; else it is a part of the sentence that refuses. `library_accepts` is what the safetensors
library (0.8) says of the same bytes: `test_header` holds both, so the places where we are stricter are all listed here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One file: its bytes, the words of our refusal (None: accepted), and whether the library takes it."""

    name: str
    content: bytes
    refusal: str | None
    library_accepts: bool


def file_of(header: bytes | dict[str, Any], data: int = 0, length: int | None = None) -> bytes:
    """A file's bytes: the header's length (or the one given), the header (JSON, or bytes as they are), `data` zeros."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def entry(dtype: str, shape: Any, begin: Any, end: Any, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


PAIR = '"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'  # eight bytes of data, as text for odd JSON


def accepted(name: str, header: bytes | dict[str, Any], data: int = 0) -> Case:
    return Case(name, file_of(header, data), None, True)


def refused(name: str, content: bytes, words: str) -> Case:
    """Refused by us and by the library."""
    return Case(name, content, words, False)


def stricter(name: str, content: bytes, words: str) -> Case:
    """Refused by us alone."""
    return Case(name, content, words, True)


_LENGTHS = (
    refused("empty file", b"", "at least 8 bytes expected, 0 found"),
    refused("seven bytes", bytes(7), "at least 8 bytes expected, 7 found"),
    refused("header of no bytes", file_of(b""), "header of 0 bytes, at least 2 are needed: {}"),
    refused(
        "header over the limit", file_of(b"{" + b" " * 10, length=100_000_001), "header of 100000001 bytes, at most"
    ),
    refused("header longer than the file", file_of(b"{}", length=1000), "at least 1008 bytes expected, 10 found"),
    refused(
        "largest header length", file_of(b"{}", length=2**64 - 1), f"header of {2**64 - 1} bytes, at most 100000000"
    ),
    refused(
        "git lfs pointer",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 90868376\n",
        "a Git LFS pointer, not weights: run `git lfs pull`",
    ),
    refused("trailing byte", file_of({"w": entry("F32", [2], 0, 8)}, 9), "1 trailing bytes: 8 bytes of tensors"),
    refused(
        "truncated data",
        file_of({"v": entry("U8", [1], 0, 1), "w": entry("F32", [2], 1, 9), "x": entry("U8", [1], 9, 10)}, 8),
        "truncated: 10 bytes of tensors expected after the header, 8 found, which ends before tensor 'w' does; fetch",
    ),
    refused("data after an empty header", file_of({}, 4), "4 trailing bytes: 0 bytes of tensors expected"),
    accepted("no tensors", {}),
    accepted("one tensor", {"w": entry("F32", [2], 0, 8)}, 8),
)

_OFFSETS = (
    refused(
        "hole between tensors",
        file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 12, 16)}, 16),
        "tensor 'b': data_offsets begin at 12, expected 8, where tensor 'a' ends",
    ),
    refused("first tensor not at zero", file_of({"a": entry("F32", [2], 4, 12)}, 12), "begin at 4, expected 0"),
    refused(
        "overlapping tensors",
        file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12),
        "tensor 'b': data_offsets begin at 4, expected 8: it overlaps tensor 'a'",
    ),
    refused(
        "one range under two names",
        file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, 8),
        "tensor 'b': data_offsets begin at 0, expected 8: it overlaps tensor 'a'",
    ),
    refused("end before begin", file_of({"a": entry("F32", [2], 8, 0)}, 8), "must not decrease, found [8, 0]"),
    refused(
        "offset of 2^64", file_of({"a": entry("F32", [2], 0, 2**64)}, 8), "takes 8 bytes, data_offsets hold 18446744"
    ),
    refused("negative offset", file_of({"a": entry("F32", [2], -8, 0)}, 8), "two non-negative integers, found [-8, 0]"),
    refused("float offset", file_of({"a": entry("F32", [2], 0, 8.0)}, 8), "two non-negative integers, found [0, 8.0]"),
    refused(
        "boolean offset", file_of({"a": entry("U8", [1], False, True)}, 1), "non-negative integers, found [False, True]"
    ),
    refused(
        "three offsets",
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, 1),
        "two non-negative integers, found [0, 1, 2]",
    ),
    refused(
        "offsets of another type",
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": "0,1"}}, 1),
        "two non-negative integers, found '0,1'",
    ),
    refused(
        "empty tensor inside another",
        file_of({"a": entry("U8", [8], 0, 8), "z": entry("U8", [0], 4, 4)}, 8),
        "tensor 'z': data_offsets begin at 4, expected 8",
    ),
    accepted("empty tensor", {"a": entry("F32", [0, 5], 0, 0)}),
    accepted(
        "empty tensor between two",
        {"a": entry("F32", [2], 0, 8), "z": entry("F32", [0], 8, 8), "b": entry("F32", [1], 8, 12)},
        12,
    ),
    accepted(
        "empty tensor after the one at its start", {"b": entry("F32", [1], 0, 4), "z": entry("F32", [0], 0, 0)}, 4
    ),
    accepted("two empty tensors at one place", {"y": entry("F32", [0], 0, 0), "z": entry("F32", [0], 0, 0)}),
    accepted("odd alignment", {"u": entry("U8", [1], 0, 1), "a": entry("F32", [1], 1, 5)}, 5),
)

_SHAPES = (
    refused("size does not fit the shape", file_of({"a": entry("F32", [3], 0, 8)}, 8), "F32 [3] takes 12 bytes"),
    refused("negative size", file_of({"a": entry("F32", [-2], 0, 8)}, 8), "non-negative integers, found [-2]"),
    refused("float size", file_of({"a": entry("F32", [2.0], 0, 8)}, 8), "non-negative integers, found [2.0]"),
    refused("boolean size", file_of({"a": entry("F32", [True], 0, 4)}, 4), "non-negative integers, found [True]"),
    refused("shape is a number", file_of({"a": entry("F32", 2, 0, 8)}, 8), "a list of non-negative integers, found 2"),
    refused(
        "shape is null", file_of({"a": entry("F32", None, 0, 4)}, 4), "a list of non-negative integers, found None"
    ),
    refused("NaN as a size", file_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', 4), "NaN is no JSON"),
    refused("overflowing shape", file_of({"a": entry("F32", [2**40, 2**40], 0, 8)}, 8), "overflows: at most"),
    refused("overflow before a zero", file_of({"a": entry("U8", [2**40, 2**40, 0], 0, 0)}), "overflows: at most"),
    stricter("overflow after a zero", file_of({"a": entry("U8", [0, 2**40, 2**40], 0, 0)}), "overflows: at most"),
    refused(
        "size of too many digits",
        file_of(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}', 1),
        "not valid JSON",
    ),
    refused(
        "minus zero as an offset",  # Python's JSON reads 0; the library's verdict decides
        file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', 1),
        "refused by the safetensors library: ",
    ),
    accepted("scalar", {"a": entry("F32", [], 0, 4)}, 4),
)

_DTYPES = (
    refused("unknown dtype", file_of({"a": entry("F128", [1], 0, 16)}, 16), "tensor 'a': unknown dtype 'F128'"),
    refused("dtype in lower case", file_of({"a": entry("f32", [2], 0, 8)}, 8), "tensor 'a': unknown dtype 'f32'"),
    refused("dtype is a number", file_of({"a": entry(32, [2], 0, 8)}, 8), "tensor 'a': unknown dtype 32"),  # type: ignore[arg-type]
    accepted("F8_E4M3", {"a": entry("F8_E4M3", [4], 0, 4)}, 4),
    accepted("F8_E5M2", {"a": entry("F8_E5M2", [4], 0, 4)}, 4),
    accepted("F8_E8M0", {"a": entry("F8_E8M0", [4], 0, 4)}, 4),
    accepted("F4 in whole pairs", {"a": entry("F4", [2, 4], 0, 4)}, 4),
    refused("F4 of odd total", file_of({"a": entry("F4", [3], 0, 2)}, 2), "F4 [3] has 12 bits, whole bytes expected"),
    refused("F4 scalar", file_of({"a": entry("F4", [], 0, 1)}, 1), "F4 [] has 4 bits, whole bytes expected"),
    stricter(
        "F4 with odd rows", file_of({"a": entry("F4", [2, 3], 0, 3)}, 3), "F4 with last dimension 3: torch cannot"
    ),
    stricter(
        "empty F4 with odd rows", file_of({"a": entry("F4", [0, 3], 0, 0)}), "F4 with last dimension 3: torch cannot"
    ),
    accepted("empty F4", {"a": entry("F4", [3, 0], 0, 0)}),
    accepted("F6 in whole bytes", {"a": entry("F6_E2M3", [4], 0, 3)}, 3),
    refused("F6 in broken bytes", file_of({"a": entry("F6_E3M2", [3], 0, 3)}, 3), "has 18 bits, whole bytes expected"),
)

_KEYS = (
    stricter("same entry twice", file_of(f"{{{PAIR},{PAIR}}}".encode(), 8), "key 'w' occurs twice in the header"),
    refused(
        "two entries of one name",
        file_of(f'{{{PAIR},"w":{{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}}}'.encode(), 16),
        "key 'w' occurs twice in the header",
    ),
    refused(
        "metadata twice",
        file_of(f'{{"__metadata__":{{"a":"b"}},"__metadata__":{{"c":"d"}},{PAIR}}}'.encode(), 8),
        "key '__metadata__' occurs twice in the header",
    ),
    refused(
        "field twice",
        file_of(b'{"w":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', 8),
        "tensor 'w': field 'dtype' occurs twice",
    ),
    stricter(
        "unknown field twice",
        file_of(b'{"w":{"dtype":"F32","x":1,"x":2,"shape":[2],"data_offsets":[0,8]}}', 8),
        "tensor 'w': field 'x' occurs twice",
    ),
    stricter(
        "metadata key twice",
        file_of(f'{{"__metadata__":{{"a":"b","a":"b"}},{PAIR}}}'.encode(), 8),
        "__metadata__: key 'a' occurs twice",
    ),
    accepted("unknown field", {"w": entry("F32", [2], 0, 8, made_by="a newer writer")}, 8),
    refused("missing field", file_of({"w": {"dtype": "F32", "shape": [2]}}, 8), "expected, missing data_offsets"),
    stricter("entry as an array", file_of(b'{"w":["F32",[2],[0,8]]}', 8), "must be an object with dtype, shape and"),
    refused("entry is null", file_of({"w": None}), "must be an object with dtype, shape and data_offsets, found null"),
)

_METADATA = (
    refused(
        "metadata value is a number",
        file_of({"__metadata__": {"a": 1}, "w": entry("F32", [2], 0, 8)}, 8),
        "__metadata__: value of 'a' must be a string, found a number",
    ),
    refused("metadata is an array", file_of({"__metadata__": ["a"]}), "must be an object of strings, found an array"),
    accepted("metadata is empty", {"__metadata__": {}, "w": entry("F32", [2], 0, 8)}, 8),
    accepted("metadata is null", {"__metadata__": None, "w": entry("F32", [2], 0, 8)}, 8),
    accepted("metadata of strings", {"__metadata__": {"format": "pt"}, "w": entry("F32", [2], 0, 8)}, 8),
    accepted("metadata with the names of fields", {"__metadata__": {"dtype": "", "shape": "", "data_offsets": ""}}),
    refused("tensor named metadata", file_of({"__metadata__": entry("F32", [2], 0, 8)}, 8), "that name is reserved"),
)

_TEXT = (
    accepted("white space before", f" \n{{{PAIR}}}".encode(), 8),
    accepted("white space after", f"{{{PAIR}}}   \n".encode(), 8),
    refused("NUL after", file_of(f"{{{PAIR}}}\0\0".encode(), 8), "not valid JSON"),
    refused("second document after", file_of(f"{{{PAIR}}}{{}}".encode(), 8), "not valid JSON"),
    refused("byte order mark", file_of(b"\xef\xbb\xbf" + f"{{{PAIR}}}".encode(), 8), "begins with a byte order mark"),
    refused(
        "name in bad UTF-8",
        file_of(f"{{{PAIR}}}".encode().replace(b"w", b"\xff"), 8),
        "not UTF-8: byte 2 of it is 0xff",
    ),
    refused(
        "half a surrogate pair", file_of(f"{{{PAIR}}}".replace('"w"', '"\\ud800"').encode(), 8), "half a surrogate pair"
    ),
    refused(
        "half a surrogate pair in metadata",
        file_of(b'{"__metadata__":{"a":"\\udc00"}}'),
        "__metadata__: value of 'a' '\\udc00' holds half a surrogate pair",
    ),
    accepted("whole surrogate pair", f"{{{PAIR}}}".replace('"w"', '"\\ud83d\\ude00"').encode(), 8),
    accepted("empty name", f"{{{PAIR}}}".replace('"w"', '""').encode(), 8),
    refused("header is an array", file_of(b"[]"), "must be a JSON object, found an array"),
    refused("header is a string", file_of(b'"{}"'), "must be a JSON object, found a string"),
    refused("nested too deeply", file_of(b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
    *(
        refused(f"unknown field of {what}", file_of(f'{{{PAIR[:-1]},"x":{value}}}}}'.encode(), 8), words)
        for what, value, words in (
            ("NaN", "NaN", "not valid JSON: NaN is no JSON number"),
            ("too many digits", "9" * 5000, "not valid JSON: Exceeds the limit"),
            ("a number too large", "1e999", "refused by the safetensors library: "),
            ("half a surrogate pair", '"\\ud800"', "refused by the safetensors library: "),
            ("a control character", '"\1"', "not valid JSON: Invalid control character"),
        )
    ),
    refused(
        "unknown field nested too deeply for the library",
        file_of(f'{{{PAIR[:-1]},"x":{"[" * 200}{"]" * 200}}}}}'.encode(), 8),
        "refused by the safetensors library: ",
    ),
)

CASES: tuple[Case, ...] = (*_LENGTHS, *_OFFSETS, *_SHAPES, *_DTYPES, *_KEYS, *_METADATA, *_TEXT)
