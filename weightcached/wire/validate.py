"""Requests and manifests from outside, checked by pydantic against the dataclasses of `wire.messages` and `shard`."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ..errors import ManifestError, ProtocolError
from ..shard import manifest
from ..shard.key import KEY_FIELDS, ShardKey
from ..text import MODEL_NAME, printable
from . import messages

_KEY_PARTS = (ShardKey, manifest.SourceFile, manifest.SlabEntry, manifest.ManifestHead)
_TABLE_PARTS = (manifest.TensorTable,)
for _cls in (*get_args(messages.Request), *_KEY_PARTS, *_TABLE_PARTS):
    # The attribute that pydantic.with_config sets; the classes themselves stay free of pydantic.
    _cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# A hello of any later protocol must be readable enough to be answered with both version numbers.
setattr(messages.Hello, "__pydantic_config__", ConfigDict(extra="ignore", strict=True))  # noqa: B010

MAX_SHOWN = 1000  # characters of what a peer has named; more is no use to a reader

_REQUEST: TypeAdapter[messages.Request] = TypeAdapter(Annotated[messages.Request, Field(discriminator="op")])
_HEAD = TypeAdapter(manifest.ManifestHead)
_TABLE = TypeAdapter(manifest.TensorTable)


def parse_request(data: bytes) -> messages.Request:
    """One request from a message's JSON bytes. `ProtocolError` names each field that is wrong."""
    try:
        request = _REQUEST.validate_json(data)
    except ValidationError as error:
        raise ProtocolError(problem=_sentence(error)) from None
    if isinstance(request, messages.Attach):
        if unknown := sorted(set(request.key) - KEY_FIELDS):
            raise ProtocolError(problem=_shown(f"unknown key fields {', '.join(unknown)}"))
        if wrong := [name for name, value in request.key.items() if not _may_be_wanted(value)]:
            raise ProtocolError(problem=f"attach.key.{wrong[0]}: neither text, whole numbers nor null")
    if isinstance(request, messages.Reserve | messages.Renew) and not MODEL_NAME.fullmatch(request.model):
        raise ProtocolError(problem=f"{request.op}.model: {_shown(request.model)!r} is no name for a model")
    return request


def parse_manifest(fd: int) -> tuple[manifest.ManifestHead, manifest.TensorTable]:
    """Head and table of a publisher's manifest, every field and every range checked, and its checksums' form.

    `ManifestError` otherwise.
    """
    head_json, table_json = manifest.read_documents(fd)
    try:
        head = _HEAD.validate_json(head_json)
        manifest.check_versions(head.schema, head.key.format_version)
        table = _TABLE.validate_json(bytes(table_json))
    except ValidationError as error:
        raise ManifestError(problem=_sentence(error)) from None
    _check_key(head.key)
    if len(head.slabs) > manifest.MAX_SLABS:
        raise ManifestError(problem=f"{len(head.slabs)} slabs, at most {manifest.MAX_SLABS} fit into one message")
    if any(slab.nbytes < 0 for slab in head.slabs):
        raise ManifestError(problem="a slab of negative length")
    manifest.check_table(head, table)
    manifest.check_overlaps(table)
    checksums = manifest.read_checksums(fd)
    if checksums is not None:
        manifest.check_checksums(table, checksums)
    return head, table


def _may_be_wanted(value: object) -> bool:
    """Whether a field of `ShardKey` could have that value; NaN, for one, could never be compared."""
    if isinstance(value, list):
        return all(type(item) is int for item in value)
    return value is None or type(value) in (str, int)


def _check_key(key: ShardKey) -> None:
    """`ManifestError` for a key that no client can mean: a rank outside its size, layers that are none, no content."""
    for kind in ("tensor", "pipeline", "expert", "data"):
        size, rank = getattr(key, f"{kind}_parallel_size"), getattr(key, f"{kind}_parallel_rank")
        if not 0 <= rank < size:
            raise ManifestError(problem=f"key: {kind} parallel rank {rank} of {size}")
    if key.layers is not None and not 0 <= key.layers[0] <= key.layers[1]:
        raise ManifestError(problem=f"key: layers from {key.layers[0]} to {key.layers[1]}")
    if not key.content:
        raise ManifestError(problem="key: no content digest")


def parse_manifest_head(fd: int) -> manifest.ManifestHead:
    """The head alone of a manifest that was kept, every field checked. `ManifestError` otherwise.

    A manifest of another schema is called that, whatever its fields are.
    """
    document, _ = manifest.read_documents(fd)
    manifest.parse_head(document)
    try:
        return _HEAD.validate_json(document)
    except ValidationError as error:
        raise ManifestError(problem=_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    problems: list[Any] = error.errors(include_url=False, include_input=False)
    parts = [_shown(f"{'.'.join(map(str, item['loc'])) or 'message'}: {item['msg']}") for item in problems[:5]]
    if len(problems) > len(parts):
        parts.append(f"and {len(problems) - len(parts)} more")
    return "; ".join(parts)


def _shown(text: str) -> str:
    """What a peer has named, in one line of bounded length."""
    text = printable(text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
