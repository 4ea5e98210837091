"""One safetensors header, read strictly from an open descriptor.

    bytes 0..8       n, u64 little endian: the length of the header
    bytes 8..8+n     the header: one JSON object in UTF-8, tensor name -> dtype, shape, data_offsets
    rest             the tensors' bytes; offsets count from here

Everything is read with pread: a mapped file that shrinks kills its reader with SIGBUS, a pread of one is an error.

Stricter than the reference library (safetensors 0.8), on purpose:

- a key that occurs twice is refused, the identical entry and ``__metadata__`` included: the format forbids it, readers
  differ in which one they keep, and a file with two answers is a damaged one
- an entry written as an array (``["F32",[2],[0,8]]``) is refused: no writer makes it and the format does not have it
- F4 with an odd last dimension is refused, in an empty tensor too: two elements share a byte, and torch's
  float4_e2m1fn_x2 has no shape for half a pair
- a size or a product of sizes that torch's 64-bit sizes cannot count is refused, even where another size is 0

F6 types are taken when they fill whole bytes; torch has no such type, so they are raw bytes to the client. Unknown
fields of an entry are logged and ignored, as the reference does: a newer writer may add some. Alignment is not asked
for: the format allows an F32 at an odd offset.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, TypeGuard

from ..errors import CheckpointChanged, CheckpointError
from ..shard.dtypes import DTYPES
from .reference import reference_refusal
from .resources import read_failure

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8
_SHORTEST = len("{}")
LFS_POINTER = b"version https://git-lfs"
LFS_PROBLEM = "a Git LFS pointer, not weights: run `git lfs pull`"
_METADATA = "__metadata__"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_MAX_BITS = 2**63 - 1
_SHOWN = 120  # characters of a value in a sentence


class TensorRange(NamedTuple):
    """One tensor in a file: `begin` and `end` are absolute offsets in bytes; `shape` counts elements of `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself: `tensors`, sorted by (begin, end), cover it from `data_start` to its end exactly."""

    tensors: tuple[TensorRange, ...]
    metadata: dict[str, str]
    data_start: int


def read_header(fd: int, size: int, file: str) -> Header:
    """The header of the file of `size` bytes behind `fd`, which stays the caller's; `file` is its name for errors.

    Raises `CheckpointError` for whatever breaks the format, `CheckpointChanged` when the file ends before `size`,
    and `ResourceError` when this process lacks what it takes to check it.
    """
    raw = _read_raw(fd, size, file)
    data_start = _LENGTH_BYTES + len(raw)
    try:
        root = _parse(raw)
        metadata = _metadata(root)
        tensors = _tensors(root, data_start, file)
        _check_layout(tensors, data_start, size)
    except _Refused as refused:
        raise CheckpointError(file=file, problem=str(refused)) from None
    reason = reference_refusal(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw, size, file)
    if reason is not None:
        raise CheckpointError(file=file, problem=f"refused by the safetensors library: {reason}")
    return Header(tuple(tensors), metadata, data_start)


class _Refused(Exception):
    """A broken rule, in words; `read_header` adds the file."""


class _Object(dict[str, Any]):
    """A JSON object, with the first key that occurs twice in it."""

    repeated: str | None = None


def _read_raw(fd: int, size: int, file: str) -> bytes:
    """The n bytes of the header, once n is known to be sane: nothing large is read for a file that cannot be right."""
    start = read_exactly(fd, min(size, len(LFS_POINTER)), 0, file)
    if start == LFS_POINTER:
        raise CheckpointError(file=file, problem=LFS_PROBLEM)
    if size < _LENGTH_BYTES:
        raise CheckpointError(
            file=file, problem=f"not a safetensors file: at least {_LENGTH_BYTES} bytes expected, {size} found"
        )
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length < _SHORTEST:
        raise CheckpointError(file=file, problem=f"header of {length} bytes, at least {_SHORTEST} are needed: {{}}")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            file=file,
            problem=f"header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed: "
            "a writer broke the limit, or this is not a safetensors file",
        )
    if _LENGTH_BYTES + length > size:
        raise CheckpointError(
            file=file,
            problem=f"truncated inside the header: at least {_LENGTH_BYTES + length} bytes expected, {size} found; "
            "fetch the file again",
        )
    return read_exactly(fd, length, _LENGTH_BYTES, file)


def read_exactly(fd: int, count: int, offset: int, file: str) -> bytes:
    """`count` bytes at `offset`. `CheckpointChanged` when the file ends before, `read_failure` when a read fails."""
    parts, position = [], offset
    while position < offset + count:  # a pread may return less than was asked for
        try:
            part = os.pread(fd, offset + count - position, position)
        except OSError as error:
            raise read_failure(file, f"cannot read at byte {position}", error) from error
        if not part:
            found = os.fstat(fd).st_size
            raise CheckpointChanged(
                file=file, problem=f"shrank while it was read: {offset + count} bytes expected, {found} found"
            )
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def _parse(raw: bytes) -> _Object:
    """The JSON object. JSON's white space around it is allowed, as the reference does; anything else is not."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Refused(f"header is not UTF-8: byte {error.start} of it is {raw[error.start]:#04x}") from None
    if text.startswith("\ufeff"):
        raise _Refused("header begins with a byte order mark, expected {")
    try:
        root = json.loads(text, object_pairs_hook=_collect, parse_constant=_refuse_constant)
    except RecursionError:
        raise _Refused("header is not valid: nested too deeply") from None
    except ValueError as error:
        raise _Refused(f"header is not valid JSON: {error}") from None
    if not isinstance(root, _Object):
        raise _Refused(f"header must be a JSON object, found {_kind(root)}")
    if root.repeated is not None:
        raise _Refused(f"key {short(root.repeated)} occurs twice in the header, expected once")
    return root


def _collect(pairs: list[tuple[str, Any]]) -> _Object:
    """An object with its first repeated key noted. An error from here could not name the tensor around the object."""
    found = _Object(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found.repeated = key
                break
            seen.add(key)
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _metadata(root: _Object) -> dict[str, str]:
    """The string map, empty when it is absent or null."""
    found = root.get(_METADATA)
    if found is None:
        return {}
    if not isinstance(found, _Object):
        raise _Refused(f"{_METADATA} must be an object of strings, found {_kind(found)}")
    if found.repeated is not None:
        raise _Refused(f"{_METADATA}: key {short(found.repeated)} occurs twice, expected once")
    if found.keys() >= _FIELDS and not isinstance(found["data_offsets"], str):
        raise _Refused(f"a tensor is named {_METADATA}; that name is reserved for strings about the file")
    for key, value in found.items():
        if not isinstance(value, str):
            raise _Refused(f"{_METADATA}: value of {short(key)} must be a string, found {_kind(value)}")
        _require_unicode(key, f"{_METADATA}: key")
        _require_unicode(value, f"{_METADATA}: value of {short(key)}")
    return dict(found)


def _tensors(root: _Object, data_start: int, file: str) -> list[TensorRange]:
    """Every entry, judged by itself; sorted by (begin, end)."""
    tensors: list[TensorRange] = []
    unknown: set[str] = set()
    for name, entry in root.items():
        if name == _METADATA:
            continue
        _require_unicode(name, "tensor name")
        tensors.append(_tensor(name, entry, data_start))
        if len(entry) > len(_FIELDS):
            unknown.update(entry.keys() - _FIELDS)
    if unknown:
        logger.warning("%s: unknown fields of tensors ignored: %s", file, short(sorted(unknown)))
    # By begin alone an empty tensor could land after the tensor that shares its start, and look like an overlap.
    return sorted(tensors, key=attrgetter("begin", "end"))


def _tensor(name: str, entry: object, data_start: int) -> TensorRange:
    if not isinstance(entry, _Object):
        raise _refused(name, f"its entry must be an object with dtype, shape and data_offsets, found {_kind(entry)}")
    if entry.repeated is not None:
        raise _refused(name, f"field {short(entry.repeated)} occurs twice, expected once")
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError:
        missing = ", ".join(sorted(_FIELDS - entry.keys()))
        raise _refused(name, f"dtype, shape and data_offsets expected, missing {missing}") from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _refused(name, f"unknown dtype {short(dtype)}, expected one of {', '.join(DTYPES)}")
    if not _are_counts(shape):
        raise _refused(name, f"shape must be a list of non-negative integers, found {short(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _refused(name, f"data_offsets must be two non-negative integers, found {short(offsets)}")
    begin, end = offsets
    if begin > end:
        raise _refused(name, f"data_offsets must not decrease, found {short(offsets)}")
    sizes = tuple(shape)
    expected = _expected_bytes(dtype, sizes)
    if isinstance(expected, str):
        raise _refused(name, expected)
    if end - begin != expected:
        raise _refused(name, f"{dtype} {short(shape)} takes {expected} bytes, data_offsets hold {short(end - begin)}")
    return TensorRange(name, dtype, sizes, begin + data_start, end + data_start)


def _refused(name: str, problem: str) -> _Refused:
    return _Refused(f"tensor {short(name)}: {problem}")


def _expected_bytes(dtype: str, shape: tuple[int, ...]) -> int | str:
    """Bytes of a tensor, or the rule that its shape breaks."""
    bits = countable = DTYPES[dtype].bits
    for length in shape:
        bits *= length
        countable *= max(length, 1)
        if countable > _MAX_BITS:  # at once: a product of many large sizes would be slow to compute
            return f"shape {short(list(shape))} of {dtype} overflows: at most {_MAX_BITS} bits can be counted"
    if bits % 8:
        return f"{dtype} {short(list(shape))} has {bits} bits, whole bytes expected"
    packed = DTYPES[dtype].packed
    if shape and shape[-1] % packed:
        return f"{dtype} with last dimension {shape[-1]}: torch cannot hold it, a multiple of {packed} expected"
    return bits // 8


def _check_layout(tensors: list[TensorRange], data_start: int, size: int) -> None:
    """The tensors follow each other without hole or overlap from the first data byte to the last.

    The sentences count from the first data byte, as data_offsets do.
    """
    cursor, before = data_start, None
    for tensor in tensors:
        if tensor.begin != cursor:
            neighbour = "the header" if before is None else f"tensor {short(before.name)}"
            why = f", where {neighbour} ends; the bytes between belong to no tensor"
            if tensor.begin < cursor:
                why = f": it overlaps {neighbour}"
            raise _Refused(
                f"tensor {short(tensor.name)}: data_offsets begin at {short(tensor.begin - data_start)}, "
                f"expected {cursor - data_start}{why}"
            )
        cursor, before = tensor.end, tensor
    expected, found = cursor - data_start, size - data_start
    if expected > found:
        cut = next(tensor for tensor in tensors if tensor.end > size)
        raise _Refused(
            f"truncated: {short(expected)} bytes of tensors expected after the header, {found} found, "
            f"which ends before tensor {short(cut.name)} does; fetch the file again"
        )
    if expected < found:
        raise _Refused(
            f"{found - expected} trailing bytes: {expected} bytes of tensors expected after the header, {found} found"
        )


def _are_counts(value: object) -> TypeGuard[list[int]]:
    """Whether it is a list of non-negative integers."""
    if type(value) is not list:
        return False
    for number in value:  # noqa: SIM110 - a generator would take twice as long, and there are 100,000 calls
        if type(number) is not int or number < 0:  # `true` is an int to Python, and no size
            return False
    return True


def is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can spell and UTF-8 cannot carry."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _require_unicode(text: str, what: str) -> None:
    if not is_unicode(text):
        raise _Refused(f"{what} {short(text)} holds half a surrogate pair, valid Unicode expected")


def _kind(value: object) -> str:
    """What JSON calls the type of a parsed value."""
    if isinstance(value, bool):
        return "a boolean"
    for types, name in ((dict, "an object"), (list, "an array"), (str, "a string"), ((int, float), "a number")):
        if isinstance(value, types):
            return name
    return "null"


def short(value: object) -> str:
    """A value for a sentence, cut where a hostile file would fill the log. An int of over 4300 digits cannot be here:
    Python's JSON reader refuses it."""
    if isinstance(value, list | str):  # which may have millions of elements; each takes a character at least
        value = value[: _SHOWN + 1]
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
