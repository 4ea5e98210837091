"""The manifest: written, sealed, read back, and every entry that reaches past its slab refused."""

from __future__ import annotations

import enum
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import ManifestError
from weightcached.fds import OwnedFd
from weightcached.memfd import SEALS
from weightcached.shard import manifest
from weightcached.shard.dtypes import DTYPES
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import (
    ALIGNMENT,
    MIX64_SUM,
    XXH3_64,
    Checksums,
    ManifestHead,
    SlabEntry,
    SourceFile,
    TensorEntry,
    TensorTable,
    changed_files,
    check_checksums,
    check_overlaps,
    check_table,
    parse_head,
    parse_table,
    read_checksums,
    read_documents,
    span_bytes,
    write_manifest,
)

SLAB = 1 << 20


@pytest.fixture(autouse=True)
def _no_leaks(descriptors: NoDescriptorLeaks) -> NoDescriptorLeaks:
    return descriptors


def head(**changes: Any) -> ManifestHead:
    whole = ManifestHead(
        model="minilm",
        generation=3,
        device="host-0",
        key=ShardKey("xxh3:12", dtype="float32", pipeline_parallel_size=2, layers=(0, 6), revision=None),
        slabs=(SlabEntry(SLAB, "xxh3:34"), SlabEntry(512)),
        tensor_count=1,
        created="2026-11-29T12:00:00Z",
        files=(SourceFile("model.safetensors", 64512, 7, 90868376, 1, 2, "xxh3:56"), SourceFile("b", 1, 2, 3, 4, 5)),
        attributes={"scale": 0.5, "tied": True, "none": None, "steps": 3, "kind": "bert"},
    )
    return replace(whole, **changes)


def entry(**changes: Any) -> TensorEntry:
    return TensorEntry("w", slab=0, offset=256, nbytes=24, dtype="F32", shape=(2, 3))._replace(**changes)


def check(*entries: TensorEntry, aliases: dict[str, Any] | None = None, **head_changes: Any) -> None:
    check_table(head(**{"tensor_count": len(entries), **head_changes}), TensorTable(entries, aliases or {}))


def read(fd: OwnedFd) -> tuple[ManifestHead, TensorTable]:
    head_json, table_json = read_documents(fd.fileno())
    return parse_head(head_json), parse_table(table_json)


def memfd(data: bytes, seals: int = SEALS) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.write(fd.fileno(), data)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_thousand_tensors_come_back_equal() -> None:
    """Everything that was written is read back the same, types included, and passes the check."""
    names = list(DTYPES)
    entries = tuple(
        TensorEntry(
            name=f'encoder.layer.{number}.wéight\n"{number}"',
            slab=0,
            offset=number * 1024,
            nbytes=DTYPES[names[number % len(names)]].bits,
            dtype=names[number % len(names)],
            shape=(2, 4),
            stride=(4, 1) if number % 3 else None,
            role="buffer" if number % 2 else "parameter",
            persistent=number % 5 != 0,
            private=number % 7 == 0,
        )
        for number in range(1000)
    )
    table = TensorTable(entries, {"tied": entries[0].name, "tied too": entries[0].name})
    written = head(tensor_count=1000)

    with write_manifest(written, table) as fd:
        found_head, found_table = read(fd)

    assert found_head == written
    assert found_table == table
    check_table(found_head, found_table)
    assert found_head.nbytes == SLAB + 512
    assert found_head.files[0].stat == (64512, 7, 90868376, 1, 2)


@pytest.mark.parametrize("value", [True, 0, -1.5, "", "text", None])
def test_what_json_has_is_a_scalar(value: object) -> None:
    """The types of `Scalar`, and these only: what is carried comes back equal."""
    assert manifest.is_scalar(value)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), [], {}, b"", object(), Path("a"), enum.IntEnum("E", "A").A]
)
def test_what_json_has_not_is_no_scalar(value: object) -> None:
    """A subclass would come back as its base."""
    assert not manifest.is_scalar(value)


def test_an_empty_table_comes_back() -> None:
    """A shard of no tensors and no slabs is a manifest too."""
    written = head(tensor_count=0, slabs=(), files=(), attributes={})

    with write_manifest(written, TensorTable(())) as fd:
        assert read(fd) == (written, TensorTable(()))


def test_the_head_is_one_line() -> None:
    """A reader of the head alone needs no table: the first line is a whole JSON object, whatever the names hold."""
    with write_manifest(head(model="a\nb"), TensorTable((entry(),))) as fd:
        first, second = read_documents(fd.fileno())

    assert json.loads(first)["model"] == "a\nb"
    assert set(json.loads(bytes(second))) == {"tensors", "aliases"}


def test_a_manifest_is_sealed() -> None:
    """Nobody can write, grow or shrink what was read and checked once."""
    with write_manifest(head(), TensorTable((entry(),))) as fd:
        with pytest.raises(PermissionError):
            os.pwrite(fd.fileno(), b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd.fileno(), 10)


def test_a_manifest_is_mapped_privately() -> None:
    """Kernels such as 5.15 refuse any shared mapping of a memfd that is sealed against writing, read-only or not."""
    with write_manifest(head(), TensorTable((entry(),))) as fd:
        document = read_documents(fd.fileno())[1]
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "weightcached-manifest" in line]
        assert [line.split()[1] for line in lines] == ["r--p"]
        document.release()


def test_an_unsealed_memfd_and_an_ordinary_file_are_refused(tmp_path: Path) -> None:
    """What could still change is not read at all."""
    with memfd(b"{}\n{}", 0) as fd, pytest.raises(ManifestError, match="the manifest is not sealed"):
        read_documents(fd.fileno())
    (tmp_path / "file").write_text("{}\n{}")
    with OwnedFd(os.open(tmp_path / "file", os.O_RDONLY)) as fd, pytest.raises(ManifestError, match="not a memfd"):
        read_documents(fd.fileno())


def test_an_oversized_manifest_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length above the limit is an error before a byte of it is read, and none that large is written."""
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 10)
    with memfd(b"x" * 11) as fd, pytest.raises(ManifestError, match="11 bytes, at most 10 are read"):
        read_documents(fd.fileno())
    with pytest.raises(ManifestError, match="bytes, at most 10 are read"):
        write_manifest(head(), TensorTable((entry(),)))


def test_a_head_that_is_too_long_is_refused() -> None:
    """A status carries the heads of all shards, so one is small: read up to the limit, and none longer is written."""
    fits = b"x" * (manifest.MAX_HEAD_BYTES - 1)
    with memfd(fits + b"\n{}\n") as fd:
        assert read_documents(fd.fileno())[0] == fits
    with memfd(fits + b"x\n{}\n") as fd, pytest.raises(ManifestError, match="a head of 1048577 bytes, at most 1048576"):
        read_documents(fd.fileno())
    with pytest.raises(ManifestError, match="at most 1048576 are read"):
        write_manifest(replace(head(), attributes={"x": "y" * (1 << 20)}), TensorTable((entry(),)))


def test_a_manifest_that_cannot_be_mapped_is_refused() -> None:
    """Such as a memfd of huge pages on a host that has none left: an error of the manifest, and no defect."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        huge = os.memfd_create("huge", flags)
    except OSError as error:
        pytest.skip(f"no huge pages in this kernel: {error.strerror}")
    with OwnedFd(huge) as fd:
        os.ftruncate(fd.fileno(), manifest.MAX_MANIFEST_BYTES)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(ManifestError):
            read_documents(fd.fileno())


def test_a_manifest_without_a_line_end_is_refused() -> None:
    """One document is not two."""
    with memfd(b'{"schema":1}') as fd, pytest.raises(ManifestError, match="no line end after the head"):
        read_documents(fd.fileno())


@pytest.mark.parametrize("count", [0, 1, 1000, 40_000])
@pytest.mark.parametrize("algorithm", [XXH3_64, MIX64_SUM])
def test_checksums_are_a_document_of_their_own(count: int, algorithm: str) -> None:
    """They come back as written; head and table are read the same as without them, by who never looks at them."""
    table = TensorTable(tuple(entry(name=f"w{number}") for number in range(count)), {})
    written = Checksums(algorithm, tuple(f"{number:016x}" for number in range(count)))
    with write_manifest(head(), table, written) as fd, write_manifest(head(), table) as plain:
        assert read_checksums(fd.fileno()) == written
        assert [bytes(part) for part in read_documents(fd.fileno())] == [
            bytes(part) for part in read_documents(plain.fileno())
        ]
        check_checksums(table, written)


def test_a_manifest_without_checksums_says_so() -> None:
    """None, not an empty list: nothing was computed."""
    with write_manifest(head(), TensorTable((entry(),))) as fd:
        assert read_checksums(fd.fileno()) is None


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (b"{", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b"3", "TypeError"),
        (b'{"algorithm": "xxh3-64"}', "KeyError"),
        (b'{"algorithm": "crc32", "values": []}', "algorithm 'crc32', this version knows xxh3-64, mix64-sum"),
        (b'{"algorithm": ["xxh3-64"], "values": []}', "this version knows xxh3-64, mix64-sum"),
        (b'{"algorithm": "xxh3-64", "values": 3}', "TypeError"),
        (b'{"algorithm": "xxh3-64", "values": "0123456789abcdef"}', "'0' is no checksum of 16 hexadecimal digits"),
        (b'{"algorithm": "xxh3-64", "values": [1]}', "TypeError"),
        (b'{"algorithm": "xxh3-64", "values": ["0123456789ABCDEF"]}', "'0123456789ABCDEF' is no checksum"),
        (b'{"algorithm": "xxh3-64", "values": ["0123456789abcdef0"]}', "is no checksum"),
        (b"[" * 200_000, "RecursionError"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_checksums_that_are_none_are_refused(document: bytes, problem: str) -> None:
    """Broken documents, unknown algorithms and values of another form are ManifestErrors; the table is still read."""
    with memfd(b'{}\n{"tensors":[],"aliases":{}}\n' + document) as fd:
        with pytest.raises(ManifestError, match=f"checksums are not readable: .*{problem}"):
            read_checksums(fd.fileno())
        assert parse_table(read_documents(fd.fileno())[1]) == TensorTable(())


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_checksums_than_of_tensors_is_refused(count: int) -> None:
    """Which tensor a checksum belongs to is its place alone."""
    with pytest.raises(ManifestError, match=f"{count} checksums of 1 tensors"):
        check_checksums(TensorTable((entry(),)), Checksums(XXH3_64, ("0" * 16,) * count))


def test_a_fourth_document_is_no_table() -> None:
    """Only what stands between the first line end and the last one is read as a table, and it must be one document."""
    with memfd(b'{}\n{"tensors":[],"aliases":{}}\n{}\n{}') as fd, pytest.raises(ManifestError, match="tensor table"):
        parse_table(read_documents(fd.fileno())[1])


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff\xfe",
        b"{}",
        b'{"schema": 2}',
        b'{"schema": 2, "key": [], "slabs": []}',
        b'{"schema": 2, "key": {}, "slabs": []}',
        b'{"schema": 2, "key": {"content": "x", "layers": 3}, "slabs": []}',
        b'{"schema": 2, "key": {"content": "x"}, "slabs": 3}',
        b'{"schema": 2, "key": {"content": "x"}, "slabs": [{}]}',
        b'{"schema": 2, "key": {"content": "x"}, "slabs": []}',
        b"[" * 200_000,
    ],
    ids=lambda document: document[:60].decode("latin-1"),
)
def test_a_head_that_is_none_is_refused(document: bytes) -> None:
    """Broken, foreign or half a document is a ManifestError, never another exception."""
    with pytest.raises(ManifestError, match="head is not readable"):
        parse_head(document)


def test_another_schema_is_refused() -> None:
    """A manifest of another schema number is not guessed at; both numbers are named."""
    document = json.dumps({**asdict(head()), "schema": 3}).encode()

    with pytest.raises(ManifestError, match="schema 3, this version reads 2"):
        parse_head(document)


def test_the_schema_before_is_refused_by_its_number() -> None:
    """A manifest of schema 1 had no line end after its table: what refuses it is its number."""
    document = json.dumps({**asdict(head()), "schema": 1}).encode()
    with memfd(document + b'\n{"tensors":[],"aliases":{}}') as fd:
        first, second = read_documents(fd.fileno())

    assert bytes(second) == b'{"tensors":[],"aliases":{}}'
    with pytest.raises(ManifestError, match="schema 1, this version reads 2"):
        parse_head(first)


def test_fields_of_a_newer_version_are_ignored_in_the_head() -> None:
    """A newer minor version may add fields at every level of the head."""
    data = json.loads(json.dumps(asdict(head())))
    data["later"] = 1
    for part in (data["key"], data["slabs"][0], data["files"][0]):
        part["later"] = {"x": 1}

    assert parse_head(json.dumps(data).encode()) == head()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b'{"tensors": [], "aliases": 3}',
        b'{"tensors": []}',
        b'{"tensors": {"a": 1}, "aliases": {}}',
        b'{"tensors": [[]], "aliases": {}}',
        b'{"tensors": [{"name": "w"}], "aliases": {}}',
        b'{"tensors": [{"name":"w","slab":0,"offset":0,"nbytes":0,"dtype":"U8","shape":3}], "aliases": {}}',
        b'{"tensors": [{"name":"w","slab":0,"offset":0,"nbytes":0,"dtype":"U8","shape":[],"x":1}], "aliases": {}}',
        b"[" * 200_000,
    ],
    ids=lambda document: document[:70].decode("latin-1"),
)
def test_a_table_that_is_none_is_refused(document: bytes) -> None:
    """Broken documents and unknown fields of a tensor, which could change what it means, are ManifestErrors."""
    with pytest.raises(ManifestError, match="tensor table is not readable"):
        parse_table(document)


@pytest.mark.parametrize(
    "good",
    [
        entry(),
        entry(offset=SLAB - 256, nbytes=256, dtype="U8", shape=(256,)),
        entry(offset=16),
        entry(nbytes=4, shape=()),
        entry(nbytes=0, shape=(0, 3)),
        entry(nbytes=0, shape=(0, 3), offset=SLAB),
        entry(nbytes=0, shape=(3, 0), stride=(1, 1)),
        entry(stride=(1, 2)),
        entry(stride=(0, 0), nbytes=4, shape=(1000, 1000)),
        entry(slab=1, offset=0, nbytes=512, dtype="F64", shape=(64,)),
        entry(dtype="F4", shape=(3, 16)),
        entry(nbytes=48, stride=(3, 1)),
    ],
    ids=lambda good: f"{good.dtype}-{good.shape}-{good.stride}-{good.offset}",
)
def test_what_lies_inside_is_accepted(good: TensorEntry) -> None:
    """Scalars, empty tensors, transposed and broadcast strides, the last byte of a slab, room behind strided ones."""
    check(good)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"offset": SLAB}, "ends at byte 1048600 of a slab of 1048576"),
        ({"offset": SLAB - 256, "nbytes": 257, "dtype": "U8", "shape": (257,)}, "ends at byte 1048577"),
        ({"offset": 1 << 70}, "ends at byte"),
        ({"slab": 1, "offset": 512, "nbytes": 1, "dtype": "U8", "shape": (1,)}, "ends at byte 513 of a slab of 512"),
        ({"offset": SLAB + 256, "nbytes": 0, "shape": (0,)}, "ends at byte"),
        ({"offset": 255}, "offset 255 is no multiple of 16"),
        ({"offset": 4}, "offset 4 is no multiple of 16"),
        ({"offset": -256}, "offset -256"),
        ({"nbytes": -24}, "nbytes -24 is negative"),
        ({"slab": 2}, "slab 2 of 2"),
        ({"slab": -1}, "slab -1 of 2"),
        ({"dtype": "F128"}, "unknown dtype 'F128'"),
        ({"dtype": "float32"}, "unknown dtype 'float32'"),
        ({"shape": (-2, -3)}, "negative size"),
        ({"shape": (-2, 3)}, "negative size"),
        ({"shape": (2, 4)}, "spans 32 bytes, 24 listed"),
        ({"shape": (2, 2)}, "spans 16 bytes, 24 listed"),
        ({"shape": (1 << 40, 1 << 40)}, "spans 4835703278458516698824704 bytes, 24 listed"),
        ({"shape": (1 << 32, 1 << 32), "nbytes": 0}, "0 listed"),
        ({"dtype": "F4", "shape": (3,), "nbytes": 2}, "spans None bytes"),
        ({"stride": (3,)}, "spans None bytes"),
        ({"stride": (3, 1, 1)}, "spans None bytes"),
        ({"stride": (-3, 1)}, "spans None bytes"),
        ({"stride": (4, 1)}, "spans 28 bytes, 24 listed"),
        ({"stride": (1 << 62, 1)}, "24 listed"),
        ({"shape": (0,), "nbytes": 0, "stride": (1, 1)}, "spans None bytes"),
        ({"shape": (0,), "nbytes": 0, "stride": (-1,)}, "spans None bytes"),
    ],
)
def test_what_does_not_is_refused(changes: dict[str, Any], problem: str) -> None:
    """Past the end, misaligned, negative, unknown, sizes beyond 64 bits, strides that span more: each is named."""
    with pytest.raises(ManifestError) as caught:
        check(entry(**changes))

    assert "tensor 'w': " in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"offset": "256"}, {"offset": None}, {"slab": [0]}, {"dtype": ["F32"]}, {"shape": ("2", 3)}, {"name": ["w"]}],
)
def test_values_of_another_type_are_refused(changes: dict[str, Any]) -> None:
    """JSON of another form than the classes say is a ManifestError too."""
    with pytest.raises(ManifestError):
        check(entry(**changes))


def test_overlap_is_allowed() -> None:
    """A fused tensor and the views that it is made of share bytes; each is inside the slab, which is what counts."""
    check(entry(), entry(name="v"), entry(name="u", offset=0, nbytes=512, dtype="U8", shape=(512,)))


def plain(name: str, offset: int, nbytes: int, slab: int = 0) -> TensorEntry:
    return entry(name=name, slab=slab, offset=offset, nbytes=nbytes, dtype="U8", shape=(nbytes,))


def view(name: str, offset: int, nbytes: int) -> TensorEntry:
    return entry(name=name, offset=offset, nbytes=nbytes, dtype="U8", shape=(2,), stride=(nbytes - 1,))


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [plain("a", 0, 256), plain("b", 256, 256)],
        [plain("a", 256, 256), plain("c", 0, 512)],
        [plain("qkv", 0, 768), plain("q", 0, 256), plain("k", 256, 256), plain("v", 512, 256)],
        [
            plain("k", 256, 256),
            plain("all", 0, 1024),
            plain("qkv", 0, 768),
            plain("last", 768, 256),
            plain("k2", 256, 1),
        ],
        [plain("a", 0, 512), plain("same", 0, 512), plain("tail", 256, 256)],
        [plain("a", 0, 512), plain("b", 256, 512, slab=1)],
        [plain("base", 0, 512), view("even", 0, 400), view("odd", 256, 256), view("out", 256, 700)],
        [plain("a", 0, 300), plain("none", 256, 0), plain("b", 512, 1)],
    ],
    ids=["none", "apart", "two", "fused", "nested", "same", "slabs", "views", "empty"],
)
def test_parts_may_share_bytes(entries: list[TensorEntry]) -> None:
    """Apart, one inside the other to any depth, or strided: in whatever order they are listed."""
    for order in (entries, entries[::-1]):
        check_overlaps(TensorTable(tuple(order)))


@pytest.mark.parametrize(
    "entries",
    [
        [plain("a", 0, 257), plain("b", 256, 256)],
        [plain("all", 0, 1024), plain("a", 0, 512), plain("x", 0, 256), plain("b", 256, 512)],
        [plain("a", 0, 257), plain("x", 0, 1), plain("y", 0, 256), plain("b", 256, 256)],
        [plain("a", 0, 257), view("v", 0, 700), plain("b", 256, 256)],
    ],
    ids=["two", "in a third", "behind parts", "with a view"],
)
def test_tensors_that_are_no_parts_share_no_bytes(entries: list[TensorEntry]) -> None:
    """Two contiguous tensors that share bytes, neither inside the other, are refused with how many, in any order."""
    shared = 256 if entries[0].name == "all" else 1
    for order in (entries, entries[::-1]):
        with pytest.raises(ManifestError, match=f"tensors 'a' and 'b' share {shared} bytes of slab 0, and neither is"):
            check_overlaps(TensorTable(tuple(order)))


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and aliases together have a limit, which is far above any model."""
    monkeypatch.setattr(manifest, "MAX_TENSORS", 3)
    check(entry(), entry(name="v"), aliases={"u": "w"})
    with pytest.raises(ManifestError, match="4 tensors, aliases and attributes, at most 3 are read"):
        check(entry(), entry(name="v"), aliases={"u": "w", "t": "w"})


def test_a_name_listed_twice_is_refused() -> None:
    """Which of the two would be meant is unknown."""
    with pytest.raises(ManifestError, match="tensor 'w' is listed twice"):
        check(entry(), entry(offset=512))


@pytest.mark.parametrize("announced", [0, 2])
def test_another_number_than_announced_is_refused(announced: int) -> None:
    """The head's count, by which the status is answered, is the table's."""
    with pytest.raises(ManifestError, match=f"1 tensors listed, {announced} announced"):
        check(entry(), tensor_count=announced)


@pytest.mark.parametrize(
    "aliases",
    [
        {"tied": "missing"},
        {"tied": "tied"},
        {"a": "b", "b": "a"},
        {"a": "b", "b": "w"},
        {"w": "w"},
        {"tied": None},
        {"tied": ["w"]},
    ],
    ids=str,
)
def test_aliases_lead_to_a_tensor_in_one_step(aliases: dict[str, Any]) -> None:
    """Unknown targets, aliases of aliases, loops, and an alias named like a tensor are refused."""
    with pytest.raises(ManifestError):
        check(entry(), aliases=aliases)


def test_good_aliases_pass() -> None:
    """Any number of tied names for one tensor."""
    check(entry(), aliases={"tied": "w", "tied too": "w"})


@given(
    dtype=st.sampled_from(["U8", "BF16", "F32", "C64"]),
    shape=st.lists(st.integers(0, 5), max_size=4),
    step=st.lists(st.integers(0, 9), max_size=4),
    offset=st.integers(0, 8).map(lambda block: block * ALIGNMENT),
    nbytes=st.integers(0, 3000),
)
def test_no_element_of_an_accepted_tensor_lies_outside(
    dtype: str, shape: list[int], step: list[int], offset: int, nbytes: int
) -> None:
    """Whatever is accepted: the address of every element, counted one by one, is inside the slab."""
    slab = 2048
    stride = tuple(step) if len(step) == len(shape) else None
    one = TensorEntry("w", 0, offset, nbytes, dtype, tuple(shape), stride)
    try:
        check_table(head(slabs=(SlabEntry(slab),)), TensorTable((one,)))
    except ManifestError:
        return

    width = DTYPES[dtype].bits // 8
    for position in element_positions(shape, list(stride) if stride is not None else contiguous(shape)):
        assert offset + (position + 1) * width <= slab
        assert (position + 1) * width <= nbytes


def element_positions(shape: list[int], stride: list[int]) -> list[int]:
    positions = [0]
    for size, step in zip(shape, stride, strict=True):
        positions = [base + index * step for base in positions for index in range(size)]
    return positions


def contiguous(shape: list[int]) -> list[int]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return stride[::-1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("F32", (), None), 4),
        (("F32", (2, 3), (1, 2)), 24),
        (("F32", (2, 3), (10, 2)), 60),
        (("BF16", (5,), (0,)), 2),
        (("F4", (3,), None), None),
        (("F32", (0, 9), (9, 1)), 0),
    ],
)
def test_span(arguments: tuple[str, tuple[int, ...], tuple[int, ...] | None], expected: int | None) -> None:
    """From the first byte to past the last one, for scalars, transposed, spread, broadcast and empty tensors."""
    span: Callable[..., int | None] = span_bytes
    assert span(*arguments) == expected


def test_attributes_and_further_roles_come_back() -> None:
    """Scalars with their types, the attribute role and tensors of the host are read as they were written."""
    entries = (
        TensorEntry("a", 0, 0, 4, "F32", (1,), role="attribute", persistent=False),
        TensorEntry("b", 0, 16, 4, "F32", (1,), private=True),
        TensorEntry("c", 0, 32, 4, "F32", (1,), on_host=True),
    )
    scalars: dict[str, manifest.Scalar] = {"x.scale": 0.5, "x.one": 1.0, "n": 1, "on": True, "kind": "k", "no": None}
    table = TensorTable(entries, {}, scalars)

    with manifest.write_manifest(head(tensor_count=3), table) as fd:
        again = parse_table(manifest.read_documents(fd.fileno())[1])

    assert again == table
    assert [type(value) for value in again.attributes.values()] == [float, float, int, bool, str, type(None)]
    manifest.check_table(head(tensor_count=3), again)


def test_which_files_changed() -> None:
    """Those that came, that went, and those with another stat tuple, by name; a digest says nothing of it."""
    same, old, gone = (SourceFile(name, 1, number, 10, 5, 5) for number, name in enumerate(("same", "old", "gone")))
    new, come = replace(old, mtime_ns=6), replace(gone, name="come")

    assert changed_files([same, old, gone], [come, new, replace(same, digest="d")]) == ["come", "gone", "old"]
    assert changed_files([same, old], [old, same]) == []
