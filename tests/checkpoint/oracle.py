"""The rules of the format a second time, for headers that a machine made up: written apart from the reader, and slowly.

Shared by the property tests and the fuzz targets. Nothing of the reader is used but its answer.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, deserialize, safe_open

if TYPE_CHECKING:
    from weightcached.checkpoint.header import Header

# Bits of one element, by the format's own names.
BITS = {
    "F4": 4,
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8"], 8),
    **dict.fromkeys(["F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
}

# Why the reader may refuse what the library takes; the docstring of `checkpoint.header` says why it does.
STRICTER = (
    "occurs twice",  # the identical entry
    "must be an object with dtype, shape and data_offsets, found an array",
    "torch cannot hold it, a multiple of 2 expected",  # F4 with an odd last dimension
    "bits can be counted",  # an overflow that a 0 hides from the library
)

# The library keeps all bytes of what it judges; beyond this many it judges a sparse file instead.
WHOLE_BYTES = 1 << 20


class Violation(AssertionError):
    """The reader's answer breaks a rule."""


class Pairs(tuple[tuple[str, Any], ...]):
    """A JSON object as the (key, value) pairs that stand in the text, so that a key may stand there twice."""


def require(held: bool, rule: str, *found: object) -> None:
    if not held:
        raise Violation(": ".join([rule, *map(repr, found)]))


def check_accepted(content: bytes, size: int, header: Header) -> None:
    """`Violation` unless `header` is what a file of `size` bytes that begins with `content` says, and may be accepted.

    `content` holds the length and the header at least.
    """
    length = int.from_bytes(content[:8], "little")
    require(length <= 100_000_000 and 8 + length <= size, "the header lies inside the file", length, size)
    entries = dict(without_duplicates(json.loads(content[8 : 8 + length], object_pairs_hook=Pairs)))
    metadata = entries.pop("__metadata__", None)
    if metadata is not None:
        metadata = dict(without_duplicates(metadata))
        require(all(isinstance(value, str) for value in metadata.values()), "metadata is of strings", metadata)
    require(header.metadata == (metadata or {}), "metadata is the file's", header.metadata)
    require(header.data_start == 8 + length, "the data starts after the header", header.data_start)
    require(sorted(entries) == sorted(tensor.name for tensor in header.tensors), "the tensors are the file's")
    for tensor in header.tensors:
        tensor.name.encode()  # UnicodeEncodeError for half a surrogate pair, which no name may hold
        fields = dict(without_duplicates(entries[tensor.name]))
        said = (fields["dtype"], tuple(fields["shape"]), [offset + 8 + length for offset in fields["data_offsets"]])
        require(said == (tensor.dtype, tensor.shape, [tensor.begin, tensor.end]), "an entry is the file's", tensor)
        require(all(type(n) is int and n >= 0 for n in fields["shape"] + fields["data_offsets"]), "counts", fields)
        require(tensor.dtype in BITS, "the dtype is known", tensor)
        countable = math.prod(max(length, 1) for length in tensor.shape) * BITS[tensor.dtype]
        require(countable < 2**63, "sizes can be counted in 64 bits", tensor)
        bits = math.prod(tensor.shape) * BITS[tensor.dtype]
        require(bits == 8 * tensor.nbytes, "the bytes are those of dtype and shape", tensor)
        if tensor.dtype == "F4" and tensor.shape:
            require(tensor.shape[-1] % 2 == 0, "rows of F4 are whole bytes", tensor)
    edges = [8 + length, *(edge for tensor in header.tensors for edge in (tensor.begin, tensor.end)), size]
    require(all(end == begin for end, begin in zip(edges[::2], edges[1::2], strict=True)), "no hole, no overlap", edges)


def without_duplicates(pairs: Any) -> Pairs:
    """The pairs of a JSON object; `Violation` for another JSON value, and when a key stands there twice."""
    if not isinstance(pairs, Pairs):
        raise Violation(f"an object: {pairs!r}")
    keys = [key for key, _ in pairs]
    require(len(set(keys)) == len(keys), "no key twice", keys)
    return pairs


def check_same_as_library(content: bytes, header: Header) -> None:
    """`Violation` unless the library finds the same tensors with the same bytes in a whole file."""
    by_library = {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in deserialize(content)
    }
    ours = {tensor.name: (tensor.dtype, tensor.shape, content[tensor.begin : tensor.end]) for tensor in header.tensors}
    require(ours == by_library, "the library reads the same", ours, by_library)


def library_refusal(content: bytes, size: int) -> str | None:
    """The library's reason to refuse a file of `size` bytes that begins with `content` and goes on with zeros."""
    content = content[:size]
    try:
        if size <= WHOLE_BYTES:
            deserialize(content.ljust(size, b"\0"))
        else:
            _open_sparse(content, size)
    except SafetensorError as error:
        return str(error)
    return None


def _open_sparse(content: bytes, size: int) -> None:
    fd = os.memfd_create("oracle", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        os.ftruncate(fd, size)
        with safe_open(f"/proc/self/fd/{fd}", framework="numpy"):
            pass
    finally:
        os.close(fd)


def check_refused(content: bytes, size: int, problem: str) -> None:
    """`Violation` when the library takes what the reader refused, for no reason of ours to be stricter."""
    if any(words in problem for words in STRICTER):
        return
    require(library_refusal(content, size) is not None, "only refused with a reason", problem, content[:2000])
