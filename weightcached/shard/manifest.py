"""The manifest: what a shard's slabs hold, as a sealed memfd of two or three JSON documents, one a line.

    head        key, model, generation, device, slabs, source files; small, read by everyone
    table       one entry per tensor, aliases; parsed only when a tensor is first asked for
    checksums   one per tensor; read by who verifies the slabs, and left out by publishers that computed none

Plain dataclasses, so that an engine which attaches pays for neither pydantic nor a table it does not read yet. The
worker validates a publisher's manifest with pydantic over the same classes (`wire.validate`); both sides apply
`check_table`, so no tensor ever reaches past its slab.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from ..errors import ManifestError
from ..fds import OwnedFd
from ..memfd import require_seals, sealed_memfd
from .dtypes import DTYPES
from .key import FORMAT_VERSION, ShardKey

SCHEMA = 2
ALIGNMENT = 256  # bytes, of what is laid out; a device allocator's usual alignment, enough for view(dtype) and TMA
VIEW_ALIGNMENT = 16  # bytes, of every tensor, a view into another one's memory included; checksums read 16 at once
MAX_SLABS = 252  # one message carries 253 descriptors (SCM_MAX_FD of the kernel), one of them the manifest
MAX_MANIFEST_BYTES = 32 << 20
MAX_HEAD_BYTES = 1 << 20  # some 4,000 source files; a status reply carries the heads of all shards
MAX_TENSORS = 300_000  # aliases included; a worker takes over a second to check so many
XXH3_64 = "xxh3-64"  # of host slabs, see `checksum`
MIX64_SUM = "mix64-sum"  # of GPU slabs, see `cuda_checksum`
CHECKSUM_ALGORITHMS = (XXH3_64, MIX64_SUM)
Role = Literal["parameter", "buffer", "attribute"]
Scalar = bool | int | float | str | None  # what a module's plain attribute may be, to be carried
_SCALARS = (bool, int, float, str, type(None))
_CHECKSUM = re.compile("[0-9a-f]{16}")
_WINDOW = 256 << 10  # bytes of the manifest that are searched for a line end at once


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was read: its name in the checkpoint, its stat tuple, and the digest of its bytes."""

    name: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    digest: str | None = None

    @property
    def stat(self) -> tuple[int, int, int, int, int]:
        """(device, inode, size, mtime_ns, ctime_ns): equal tuples mean the same bytes."""
        return (self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns)


def is_scalar(value: object) -> bool:
    """Whether a value is a `Scalar` as JSON has it: of just these types, a number finite."""
    return type(value) in _SCALARS and not (isinstance(value, float) and not math.isfinite(value))


def source_files(listed: Iterable[dict[str, Any]]) -> tuple[SourceFile, ...]:
    """Files as a manifest, or a worker's status, lists them."""
    return tuple(SourceFile(**known_fields(SourceFile, file)) for file in listed)


def changed_files(before: Iterable[SourceFile], now: Iterable[SourceFile]) -> list[str]:
    """Names of files that are not in both with the same stat tuple, in order."""
    was, found = ({file.name: file.stat for file in listed} for listed in (before, now))
    return sorted(name for name in was.keys() | found.keys() if was.get(name) != found.get(name))


def read_key(listed: dict[str, Any]) -> ShardKey:
    """A shard's key as a worker's status lists it; to be compared, its tuples are lists."""
    return ShardKey(**known_fields(ShardKey, listed))


@dataclass(frozen=True, slots=True)
class SlabEntry:
    """One slab: its length in bytes and, where it was computed, the digest of its content."""

    nbytes: int
    digest: str | None = None


class TensorEntry(NamedTuple):
    """One tensor: `nbytes` at `offset` of slab number `slab`; `shape` and `stride` in elements of `dtype`.

    `dtype` is a name of the safetensors format. `stride` None is contiguous. An "attribute" is a tensor that a module
    holds as a plain Python attribute. `private` tensors are written by the engine and must be copied at attach,
    `on_host` ones are CPU tensors of an engine on a GPU, and are copied to the host at attach. In the table an entry is
    a list in this order, defaults at its end left out: a model has up to some 20,000, and a tuple is made several times
    faster than a dataclass.
    """

    name: str
    slab: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    role: Role = "parameter"
    persistent: bool = True
    private: bool = False
    on_host: bool = False


_SHAPE = TensorEntry._fields.index("shape")
_STRIDE = TensorEntry._fields.index("stride")
_DEFAULTS = TensorEntry._field_defaults


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """The small part. `created` is UTC in RFC 3339; `attributes` are an engine's scalars; `nbytes` sums the slabs."""

    model: str
    generation: int
    device: str
    key: ShardKey
    slabs: tuple[SlabEntry, ...]
    tensor_count: int
    created: str
    files: tuple[SourceFile, ...] = ()
    attributes: dict[str, Scalar] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The large part. `aliases` maps a tied name to the tensor that it is another name of.

    `attributes` are scalars that an engine's modules have got while it processed its weights, by dotted name
    ("model.layers.0.attn._k_scale_float").
    """

    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checksums:
    """Of each tensor's bytes, in the table's order, as 16 hexadecimal digits. `algorithm` is a CHECKSUM_ALGORITHMS."""

    algorithm: str
    values: tuple[str, ...]


def write_manifest(head: ManifestHead, table: TensorTable, checksums: Checksums | None = None) -> OwnedFd:
    """A sealed memfd with the documents; the caller owns it. `ManifestError` if nobody would read one so large."""
    rows = [_without_defaults(entry) for entry in table.tensors]
    body: dict[str, Any] = {"tensors": rows, "aliases": table.aliases}
    if table.attributes:
        body["attributes"] = table.attributes
    documents: list[dict[str, Any]] = [asdict(head), body]
    lines = [json.dumps(document, separators=(",", ":")) + "\n" for document in documents]
    if len(lines[0]) > MAX_HEAD_BYTES:
        raise _head_too_long(len(lines[0]))
    text = "".join(lines)
    if checksums is not None:
        text += json.dumps(asdict(checksums), separators=(",", ":"))
    if len(text) > MAX_MANIFEST_BYTES:  # ASCII: json escapes the rest
        raise ManifestError(problem=f"{len(text)} bytes, at most {MAX_MANIFEST_BYTES} are read")
    return sealed_memfd("weightcached-manifest", text.encode())


def read_documents(fd: int) -> tuple[bytes, memoryview]:
    """Head and table as JSON; the table stays in the memfd, mapped, until it is parsed. The descriptor may be closed.

    `ManifestError` for a memfd that can still change (it could shrink under the mapping) or is too large.
    """
    mapped, head_end, table_end = _map_documents(fd)
    return mapped[:head_end], memoryview(mapped)[head_end + 1 : table_end]


def read_checksums(fd: int) -> Checksums | None:
    """The checksums, None where none are recorded; still to be checked with `check_checksums`.

    `ManifestError` as from `read_documents`, and for a third document of another form.
    """
    mapped, _, table_end = _map_documents(fd)
    document = mapped[table_end + 1 :]
    if not document:
        return None
    try:
        data = json.loads(document)
        checksums = Checksums(data["algorithm"], tuple(data["values"]))
        if checksums.algorithm not in CHECKSUM_ALGORITHMS:
            raise ValueError(f"algorithm {checksums.algorithm!r}, this version knows {', '.join(CHECKSUM_ALGORITHMS)}")
        if wrong := [value for value in checksums.values if not _CHECKSUM.fullmatch(value)]:
            raise ValueError(f"{wrong[0]!r} is no checksum of 16 hexadecimal digits")
        return checksums
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ManifestError(problem=f"checksums are not readable: {error!r}") from error


def check_checksums(table: TensorTable, checksums: Checksums) -> None:
    """`ManifestError` unless there is one checksum for each tensor."""
    if len(checksums.values) != len(table.tensors):
        raise ManifestError(problem=f"{len(checksums.values)} checksums of {len(table.tensors)} tensors")


def _map_documents(fd: int) -> tuple[mmap.mmap, int, int]:
    """The whole memfd, and where the lines of head and table end."""
    require_seals(fd, "manifest")
    size = os.fstat(fd).st_size
    if size > MAX_MANIFEST_BYTES:
        raise ManifestError(problem=f"{size} bytes, at most {MAX_MANIFEST_BYTES} are read")
    # Private: older kernels, such as 5.15, refuse even a read-only shared mapping of a memfd sealed against writing.
    try:
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) if size else None
    except OSError as error:  # no room for mappings, or none of the huge pages that it is made of
        raise ManifestError(problem=f"cannot be mapped: {error.strerror}") from error
    head_end = mapped.find(b"\n") if mapped is not None else -1
    if mapped is None or head_end < 0:
        raise ManifestError(problem="no line end after the head")
    if head_end >= MAX_HEAD_BYTES:
        raise _head_too_long(head_end + 1)
    # From the end, since who attaches must not pay for a search through the table.
    end = size
    while end > head_end + 1:
        start = max(head_end + 1, end - _WINDOW)
        if (found := mapped[start:end].rfind(b"\n")) >= 0:
            return mapped, head_end, start + found
        end = start
    return mapped, head_end, size  # as schema 1 ended, which the head will say


def _head_too_long(nbytes: int) -> ManifestError:
    return ManifestError(problem=f"a head of {nbytes} bytes, at most {MAX_HEAD_BYTES} are read")


def parse_head(document: bytes) -> ManifestHead:
    """The head from JSON, by the client's own cheap rules. Fields that a newer minor version added are ignored."""
    try:
        data = json.loads(document)
        key = known_fields(ShardKey, data["key"])
        check_versions(data["schema"], key.get("format_version", FORMAT_VERSION))
        if key.get("layers") is not None:
            key["layers"] = tuple(key["layers"])
        head = known_fields(ManifestHead, data)
        head["key"] = ShardKey(**key)
        head["slabs"] = tuple(SlabEntry(**known_fields(SlabEntry, slab)) for slab in data["slabs"])
        head["files"] = source_files(data.get("files", ()))
        return ManifestHead(**head)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ManifestError(problem=f"head is not readable: {error!r}") from error


def check_versions(schema: int, format_version: int) -> None:
    """`ManifestError` for a manifest, or slabs, of a form that this version does not read."""
    if schema != SCHEMA:
        raise ManifestError(problem=f"schema {schema}, this version reads {SCHEMA}")
    if format_version != FORMAT_VERSION:
        raise ManifestError(problem=f"slab format {format_version}, this version reads {FORMAT_VERSION}")


def parse_table(document: bytes | memoryview) -> TensorTable:
    """The table from JSON, by the client's own cheap rules; still to be checked with `check_table`."""
    # Each row makes garbage collection look through all that the process has, torch included, again and again: for
    # 20,000 tensors four fifths of the time. Nothing here makes a cycle.
    collecting = gc.isenabled()
    gc.disable()
    try:
        data = json.loads(bytes(document))
        entries = []
        for row in data["tensors"]:
            row[_SHAPE] = tuple(row[_SHAPE])
            if len(row) > _STRIDE and row[_STRIDE] is not None:
                row[_STRIDE] = tuple(row[_STRIDE])
            entries.append(TensorEntry(*row))
        return TensorTable(tuple(entries), dict(data["aliases"]), dict(data.get("attributes", {})))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ManifestError(problem=f"tensor table is not readable: {error!r}") from error
    finally:
        if collecting:
            gc.enable()


def check_table(head: ManifestHead, table: TensorTable) -> None:
    """`ManifestError` unless every tensor lies inside its slab, aligned, under a name of its own.

    Tensors may overlap, see `check_overlaps`.
    """
    try:
        _check_entries(head, table)
    except (TypeError, ValueError) as error:  # a list for a name, say, or a size of more digits than can be written
        raise ManifestError(problem=f"tensor table is not readable: {error}") from error


def check_overlaps(table: TensorTable) -> None:
    """`ManifestError` for two tensors that share bytes without one being a part of the other. After `check_table`.

    A fused tensor and the parts that it is made of share bytes: of two contiguous tensors one lies wholly inside the
    other, or they have no byte in common. A strided one is a view, and may lie between the elements of others. For the
    side that takes a manifest in; who attaches is as safe without it.
    """
    plain = [entry for entry in table.tensors if entry.nbytes and entry.stride is None]
    plain.sort(key=lambda entry: (entry.slab, entry.offset, -entry.nbytes))
    around: list[TensorEntry] = []  # those that the current one may lie in, each inside the one before it
    for entry in plain:
        while around and (around[-1].slab != entry.slab or around[-1].offset + around[-1].nbytes <= entry.offset):
            around.pop()
        if around and entry.offset + entry.nbytes > around[-1].offset + around[-1].nbytes:
            shared = around[-1].offset + around[-1].nbytes - entry.offset
            raise ManifestError(
                problem=f"tensors {around[-1].name!r} and {entry.name!r} share {shared} bytes of slab {entry.slab}, "
                "and neither is a part of the other"
            )
        around.append(entry)


def _check_entries(head: ManifestHead, table: TensorTable) -> None:
    number = len(table.tensors) + len(table.aliases) + len(table.attributes)
    if number > MAX_TENSORS:
        raise ManifestError(problem=f"{number} tensors, aliases and attributes, at most {MAX_TENSORS} are read")
    if len(table.tensors) != head.tensor_count:
        raise ManifestError(problem=f"{len(table.tensors)} tensors listed, {head.tensor_count} announced")
    names = set()
    for entry in table.tensors:
        if entry.name in names:
            raise ManifestError(problem=f"tensor {entry.name!r} is listed twice")
        names.add(entry.name)
        _check_entry(head, entry)
    for alias, target in table.aliases.items():
        if alias in names or target not in names:
            raise ManifestError(problem=f"alias {alias!r} of {target!r} names a listed or an unknown tensor")


def _check_entry(head: ManifestHead, entry: TensorEntry) -> None:
    def refuse(problem: str) -> ManifestError:
        return ManifestError(problem=f"tensor {entry.name!r}: {problem}")

    if entry.dtype not in DTYPES:
        raise refuse(f"unknown dtype {entry.dtype!r}")
    if not 0 <= entry.slab < len(head.slabs):
        raise refuse(f"slab {entry.slab} of {len(head.slabs)}")
    if entry.offset % VIEW_ALIGNMENT or entry.offset < 0 or entry.nbytes < 0:
        problem = f"offset {entry.offset} is no multiple of {VIEW_ALIGNMENT}"
        raise refuse(f"{problem}, or it or nbytes {entry.nbytes} is negative")
    if entry.offset + entry.nbytes > head.slabs[entry.slab].nbytes:
        end = entry.offset + entry.nbytes
        raise refuse(f"ends at byte {end} of a slab of {head.slabs[entry.slab].nbytes}")
    if any(size < 0 for size in entry.shape):
        raise refuse(f"negative size in shape {entry.shape}")
    needed = span_bytes(entry.dtype, entry.shape, entry.stride)
    if needed is None or needed > entry.nbytes or (entry.stride is None and needed != entry.nbytes):
        raise refuse(f"{entry.dtype} {list(entry.shape)} spans {needed} bytes, {entry.nbytes} listed")


def span_bytes(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...] | None) -> int | None:
    """Bytes from the first to past the last element; None when they are not whole bytes or the stride is unfit."""
    elements = 1
    for size in shape:
        elements *= size
    if stride is not None and (len(stride) != len(shape) or any(step < 0 for step in stride)):
        return None
    if stride is not None and elements:
        elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    bits = elements * DTYPES[dtype].bits
    return bits // 8 if bits % 8 == 0 else None


def _without_defaults(entry: TensorEntry) -> list[Any]:
    row = list(entry)
    while len(row) > _STRIDE and row[-1] == _DEFAULTS[TensorEntry._fields[len(row) - 1]]:
        row.pop()
    return row


def known_fields(cls: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """The items of a peer's object that this version's dataclass has: a newer minor version may send more."""
    return {name: data[name] for name in cls.__dataclass_fields__ if name in data}
