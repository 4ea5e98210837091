"""validate: what a peer may send is exactly what the message classes say."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import ManifestError, ProtocolError
from weightcached.fds import OwnedFd
from weightcached.memfd import SEALS
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import (
    MAX_MANIFEST_BYTES,
    Checksums,
    ManifestHead,
    SlabEntry,
    SourceFile,
    TensorEntry,
    TensorTable,
    write_manifest,
)
from weightcached.wire import messages
from weightcached.wire.validate import parse_manifest, parse_request

EVERY_REQUEST = [
    messages.Hello(client="python", version="1.0", device="host-0"),
    messages.Hello(client="ctl", version="1.0"),
    messages.Attach(model="minilm", key={"dtype": "float32", "layers": [0, 4]}, wait=1.5),
    messages.Attach(model="minilm"),
    messages.Renew(
        model="minilm", generation=1, created="2026-01-01T00:00:00Z", nbytes=1, since="2026-01-01T00:00:00Z"
    ),
    messages.Reserve(model="minilm", nbytes=1 << 40),
    messages.Publish(),
    messages.Status(),
    messages.Evict(model="minilm", device="host-0", force=True),
    messages.Load(model="minilm"),
    messages.Verify(model="minilm"),
    messages.Verify(model="minilm", device="host-0"),
    messages.Reload(),
    messages.Subscribe(),
    messages.Stop(),
]


@pytest.mark.parametrize("request_", EVERY_REQUEST, ids=lambda item: item.op)
def test_every_request_survives_the_wire(request_: messages.Request) -> None:
    """What the client builds is what the other side parses, for every operation."""
    assert parse_request(json.dumps(messages.request_to_json(request_)).encode()) == request_


def test_every_operation_is_known_to_a_side() -> None:
    """The list above holds every operation that a worker or a service takes."""
    assert {item.op for item in EVERY_REQUEST} == messages.WORKER_OPS | messages.SERVICE_OPS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "message: Invalid JSON"),
        (b"{", "message: Invalid JSON"),
        (b"\xff\xfe\x00", "message: Invalid JSON"),
        (b"[]", "message: Input should be"),
        (b"null", "message: Input should be"),
        (b"{}", "Unable to extract tag using discriminator 'op'"),
        (b'{"op":"load_pickle"}', "Input tag 'load_pickle' found"),
        (b'{"op":["hello"]}', "message: "),
        (b'{"op":"status","color":1}', "status.color: Unexpected keyword argument"),
        (b'{"op":"attach"}', "attach.model: Field required"),
        (b'{"op":"attach","model":7}', "attach.model: Input should be a valid string"),
        (b'{"op":"attach","model":null}', "attach.model: Input should be a valid string"),
        (b'{"op":"attach","model":"m","wait":"5"}', "attach.wait: Input should be a valid number"),
        (b'{"op":"attach","model":"m","wait":NaN}', "attach.wait: Input should be a finite number"),
        (b'{"op":"attach","model":"m","wait":Infinity}', "attach.wait: Input should be a finite number"),
        (b'{"op":"attach","model":"m","wait":1e999}', "attach.wait: Input should be a finite number"),
        (b'{"op":"attach","model":"m","wait":true}', "attach.wait: Input should be a valid number"),
        (b'{"op":"attach","model":"m","key":[]}', "attach.key: Input should be"),
        (b'{"op":"attach","model":"m","key":{"dtyp":"x","a":1}}', "unknown key fields a, dtyp"),
        (b'{"op":"attach","model":"m","key":{"dtype":NaN}}', "attach.key.dtype: neither text, whole numbers nor null"),
        (b'{"op":"attach","model":"m","key":{"layers":[0,1.0]}}', "attach.key.layers: neither text"),
        (b'{"op":"attach","model":"m","key":{"dtype":{"a":1}}}', "attach.key.dtype: neither text"),
        (b'{"op":"reserve","model":"a/b","nbytes":1}', "reserve.model: 'a/b' is no name for a model"),
        (b'{"op":"reserve","model":"' + b"m" * 129 + b'","nbytes":1}', "' is no name for a model"),
        (b'{"op":"reserve","model":"m","nbytes":true}', "reserve.nbytes: Input should be a valid integer"),
        (b'{"op":"reserve","model":"m","nbytes":1.0}', "reserve.nbytes: Input should be a valid integer"),
        (b'{"op":"reserve","model":"m","nbytes":"1"}', "reserve.nbytes: Input should be a valid integer"),
        (b'{"op":"evict","model":"m","force":1}', "evict.force: Input should be a valid boolean"),
        (b'{"op":"hello","client":"c","version":1}', "hello.version: Input should be a valid string"),
        (b'{"op":"hello","client":"c","version":"1","protocol":"1"}', "hello.protocol: Input should be a valid int"),
        (b'{"op":"attach","model":"m","key":{"dtype":' + b"[" * 30_000 + b"]" * 30_000 + b"}}", "recursion limit"),
        (b'{"op":"reserve","model":"m","nbytes":' + b"9" * 60_000 + b"}", "message: "),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, bytes) else "",
)
def test_a_request_of_another_form_is_refused(text: bytes, problem: str) -> None:
    """Unknown operations and fields, other types, numbers that are none: each is an error that names the field."""
    with pytest.raises(ProtocolError) as caught:
        parse_request(text)
    assert problem in caught.value.problem


def test_the_error_lists_every_field_that_is_wrong() -> None:
    """Up to five problems are named; more are counted, so that an answer never grows with the request."""
    with pytest.raises(ProtocolError, match=r"evict.model: .*; evict.force: "):
        parse_request(b'{"op":"evict","model":1,"force":2}')
    fields = ",".join(f'"f{number}":0' for number in range(50))
    with pytest.raises(ProtocolError, match="and 45 more"):
        parse_request(b'{"op":"status",' + fields.encode() + b"}")


def test_the_error_is_one_line_of_bounded_length() -> None:
    """Names that the peer made up neither break the line nor fill the log."""
    for text in (b'{"op":"status","a\\nb":1}', b'{"op":"a\\nb"}', b'{"op":"attach","model":"m","key":{"a\\nb":1}}'):
        with pytest.raises(ProtocolError, match=r"a\\nb"):
            parse_request(text)
    long = b"x" * 60_000
    for text in (
        b'{"op":"status","' + long + b'":1}',
        b'{"op":"' + long + b'"}',
        b'{"op":"attach","model":"m","key":{"' + long + b'":1}}',
        b'{"op":"reserve","nbytes":1,"model":"' + long + b'"}',
    ):
        with pytest.raises(ProtocolError) as caught:
            parse_request(text)
        assert len(str(caught.value)) < 2000


def test_a_hello_of_a_later_protocol_can_be_answered() -> None:
    """A hello may have fields that this version does not know: it must be readable to be refused with both versions."""
    hello = parse_request(
        b'{"op":"hello","client":"python","version":"9.1","device":"host-0","protocol":7,"token":{"a":[1]},"lang":"de"}'
    )
    assert hello == messages.Hello(client="python", version="9.1", device="host-0", protocol=7)


# Manifests.

HEAD = ManifestHead(
    model="m",
    generation=1,
    device="host-0",
    key=ShardKey(content="c", layers=(0, 4)),
    slabs=(SlabEntry(1024), SlabEntry(0, "d")),
    tensor_count=2,
    created="2026-01-01T00:00:00+00:00",
    files=(SourceFile("model.safetensors", 1, 2, 3, 4, 5, "d"),),
    attributes={"a": 1, "b": 1.5, "c": "x", "d": None, "e": True},
)
TABLE = TensorTable(
    (
        TensorEntry("w", 0, 256, 512, "F32", (8, 16)),
        TensorEntry("t", 0, 256, 512, "F32", (16, 8), stride=(1, 16), role="buffer", persistent=False, private=True),
    ),
    {"tied": "w"},
)
Change = Callable[[dict[str, Any], dict[str, Any]], object]


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """Head and table as a peer would write them."""
    with write_manifest(HEAD, TABLE) as fd:
        head, _, table = os.pread(fd.fileno(), 1 << 16, 0).partition(b"\n")
    return json.loads(head), json.loads(table)


def tensor(table: dict[str, Any], index: int, **changes: object) -> None:
    """Changes fields of one entry, which is a list in the order of the class, defaults at its end left out."""
    row = table["tensors"][index]
    row += list(TABLE.tensors[index])[len(row) :]
    for name, value in changes.items():
        row[TensorEntry._fields.index(name)] = value


def memfd(data: bytes, seals: int = SEALS, size: int | None = None) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.pwrite(fd.fileno(), data, 0)
    if size is not None:
        os.ftruncate(fd.fileno(), size)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def refused(fd: OwnedFd) -> str:
    """The problem of a manifest that must be refused."""
    with fd, pytest.raises(ManifestError) as caught:
        parse_manifest(fd.fileno())
    return str(caught.value.problem)


def test_a_publishers_manifest_is_read_back(descriptors: NoDescriptorLeaks) -> None:
    """Head and table come out as they were written, tuples and all."""
    with write_manifest(HEAD, TABLE) as fd:
        assert parse_manifest(fd.fileno()) == (HEAD, TABLE)


def test_a_publishers_checksums_are_checked() -> None:
    """There may be none; those that are there are one for each tensor, in their form."""
    values = ("0123456789abcdef", "fedcba9876543210")
    with write_manifest(HEAD, TABLE, Checksums("mix64-sum", values)) as fd:
        assert parse_manifest(fd.fileno()) == (HEAD, TABLE)
    assert "1 checksums of 2 tensors" in refused(write_manifest(HEAD, TABLE, Checksums("mix64-sum", values[:1])))
    assert "algorithm 'md5'" in refused(write_manifest(HEAD, TABLE, Checksums("md5", values)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda head, table: head.update(extra=1), "extra: Unexpected keyword argument"),
        (lambda head, table: head.update(generation=True), "generation: Input should be a valid integer"),
        (lambda head, table: head.update(generation="1"), "generation: Input should be a valid integer"),
        (lambda head, table: head.pop("device"), "device: Field required"),
        (lambda head, table: head.update(schema=1), "schema 1, this version reads 2"),
        (lambda head, table: head.update(tensor_count=3), "2 tensors listed, 3 announced"),
        (lambda head, table: head.update(tensor_count=-1), "2 tensors listed, -1 announced"),
        (lambda head, table: head["slabs"][0].update(nbytes=-1), "slab of negative length"),
        (lambda head, table: head["slabs"].extend([{"nbytes": 1}] * 251), "253 slabs, at most 252"),
        (lambda head, table: head["slabs"][1].update(offset=0), "slabs.1.offset: Unexpected keyword"),
        (lambda head, table: head["key"].update(format_version=2), "slab format 2, this version reads 1"),
        (lambda head, table: head["key"].update(color="red"), "key.color: Unexpected keyword"),
        (lambda head, table: head["key"].update(tensor_parallel_size="2"), "key.tensor_parallel_size: "),
        (lambda head, table: head["key"].update(layers=[1]), "key.layers.1: Field required"),
        (lambda head, table: head["key"].update(layers=[4, 3]), "key: layers from 4 to 3"),
        (lambda head, table: head["key"].update(layers=[-1, 3]), "key: layers from -1 to 3"),
        (lambda head, table: head["key"].update(tensor_parallel_rank=1), "key: tensor parallel rank 1 of 1"),
        (lambda head, table: head["key"].update(data_parallel_rank=-1), "key: data parallel rank -1 of 1"),
        (lambda head, table: head["key"].update(pipeline_parallel_size=0), "key: pipeline parallel rank 0 of 0"),
        (lambda head, table: head["key"].update(content=""), "key: no content digest"),
        (lambda head, table: head["files"][0].update(mtime_ns=1.5), "files.0.mtime_ns: "),
        (lambda head, table: head["attributes"].update(x=float("nan")), "attributes.x"),
        (lambda head, table: head["attributes"].update(x=[1]), "attributes.x"),
        (lambda head, table: table.update(more=1), "more: Unexpected keyword"),
        (lambda head, table: table["tensors"][1].extend((False, 1)), "at most 11 items"),
        (lambda head, table: table["tensors"].append({"name": "x"}), "tensors.2"),
        (lambda head, table: table["tensors"].append(["x", 0, 0]), "tensors.2"),
        (lambda head, table: table["tensors"].append("x"), "tensors.2"),
        (lambda head, table: tensor(table, 0, slab="0"), "tensors.0.1: "),
        (lambda head, table: tensor(table, 0, offset=True), "tensors.0.2: "),
        (lambda head, table: tensor(table, 0, nbytes=512.0), "tensors.0.3: "),
        (lambda head, table: tensor(table, 1, stride=[1, "16"]), "tensors.1.6.1: "),
        (lambda head, table: tensor(table, 0, name=["w"]), "tensors.0.0: "),
        (lambda head, table: tensor(table, 0, role="weight"), "tensors.0.7: "),
        (lambda head, table: tensor(table, 0, private=1), "tensors.0.9: "),
        (lambda head, table: tensor(table, 0, shape=[8, True]), "tensors.0.5.1: "),
        (lambda head, table: tensor(table, 0, offset=768), "ends at byte 1280 of a slab of 1024"),
        (lambda head, table: tensor(table, 0, offset=120), "offset 120 is no multiple of 16"),
        (lambda head, table: tensor(table, 0, offset=-256), "is negative"),
        (lambda head, table: tensor(table, 0, nbytes=-512), "is negative"),
        (lambda head, table: tensor(table, 0, slab=2), "slab 2 of 2"),
        (lambda head, table: tensor(table, 0, slab=-1), "slab -1 of 2"),
        (lambda head, table: tensor(table, 0, shape=[8, -16]), "negative size"),
        (lambda head, table: tensor(table, 0, shape=[8, 17]), "spans 544 bytes, 512 listed"),
        (lambda head, table: tensor(table, 0, shape=[10**18] * 1000), "is not readable: Exceeds the limit"),
        (lambda head, table: tensor(table, 0, dtype="F31"), "unknown dtype 'F31'"),
        (lambda head, table: tensor(table, 1, stride=[1, 17]), "spans"),
        (lambda head, table: tensor(table, 1, name="w"), "'w' is listed twice"),
        (lambda head, table: tensor(table, 1, offset=512, stride=None), "share 256 bytes of slab 0"),
        (lambda head, table: table["aliases"].update(w="t"), "alias 'w'"),
        (lambda head, table: table["aliases"].update(tied="absent"), "alias 'tied' of 'absent'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_of_another_form_is_refused(change: Change, problem: str) -> None:
    """A field too many, a wrong type, a tensor that is not inside its slab: refused with the place and the problem."""
    head, table = documents()
    change(head, table)
    fd = memfd(json.dumps(head).encode() + b"\n" + json.dumps(table).encode())
    assert problem in refused(fd)


@pytest.mark.parametrize("seals", [0, SEALS & ~fcntl.F_SEAL_WRITE, SEALS & ~fcntl.F_SEAL_SEAL])
def test_a_manifest_that_could_still_change_is_refused(seals: int) -> None:
    """What the worker checked must be what clients read: every seal must be set."""
    assert "the manifest is not sealed" in refused(memfd(b"{}\n{}", seals))


def test_other_files_are_no_manifest() -> None:
    """A descriptor that is not a memfd is refused before a byte of it is read: a pipe would block the worker."""
    reader, writer = os.pipe()
    os.close(writer)
    assert "not a memfd" in refused(OwnedFd(reader))
    assert "not a memfd" in refused(OwnedFd(os.open("/proc/self/mem", os.O_RDONLY)))


def test_a_huge_sparse_manifest_is_refused_unread() -> None:
    """A sealed memfd over the limit costs its maker nothing; it is refused by its size."""
    started = time.monotonic()
    assert "at most" in refused(memfd(b"", size=1 << 40))
    assert time.monotonic() - started < 1
    assert MAX_MANIFEST_BYTES < 1 << 40


@pytest.mark.parametrize("data", [b"", b"{}", b"\n", b"{}\n{", b"\xff\n\xff", b"[]\n[]", b"[" * 10_000 + b"\n{}"])
def test_garbage_is_no_manifest(data: bytes) -> None:
    """Bytes that are not two JSON objects are a `ManifestError`, whatever they are."""
    assert refused(memfd(data))
