"""Requests and manifests from outside, checked by pydantic against the dataclasses of `wire.messages` and `shard`."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ..errors import ManifestError, ProtocolError
from ..shard import manifest
from ..shard.key import KEY_FIELDS, ShardKey
from . import messages

_KEY_PARTS = (ShardKey, manifest.SourceFile, manifest.SlabEntry, manifest.ManifestHead)
_TABLE_PARTS = (manifest.TensorTable,)
for _cls in (*get_args(messages.Request), *_KEY_PARTS, *_TABLE_PARTS):
    # The attribute that pydantic.with_config sets; the classes themselves stay free of pydantic.
    _cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# A hello of any later protocol must be readable enough to be answered with both version numbers.
setattr(messages.Hello, "__pydantic_config__", ConfigDict(extra="ignore", strict=True))  # noqa: B010

_REQUEST: TypeAdapter[messages.Request] = TypeAdapter(Annotated[messages.Request, Field(discriminator="op")])
_HEAD = TypeAdapter(manifest.ManifestHead)
_TABLE = TypeAdapter(manifest.TensorTable)


def parse_request(data: bytes) -> messages.Request:
    """One request from a message's JSON bytes. `ProtocolError` names each field that is wrong."""
    try:
        request = _REQUEST.validate_json(data)
    except ValidationError as error:
        raise ProtocolError(problem=_sentence(error)) from None
    if isinstance(request, messages.Attach) and (unknown := sorted(set(request.key) - KEY_FIELDS)):
        raise ProtocolError(problem=f"unknown key fields {', '.join(unknown)}")
    return request


def parse_manifest(fd: int) -> tuple[manifest.ManifestHead, manifest.TensorTable]:
    """Head and table of a publisher's manifest, every field and every range checked, and its checksums' form.

    `ManifestError` otherwise.
    """
    head_json, table_json = manifest.read_documents(fd)
    try:
        head = _HEAD.validate_json(head_json)
        table = _TABLE.validate_json(bytes(table_json))
    except ValidationError as error:
        raise ManifestError(problem=_sentence(error)) from None
    manifest.check_versions(head.schema, head.key.format_version)
    if len(head.slabs) > manifest.MAX_SLABS:
        raise ManifestError(problem=f"{len(head.slabs)} slabs, at most {manifest.MAX_SLABS} fit into one message")
    if any(slab.nbytes < 0 for slab in head.slabs):
        raise ManifestError(problem="a slab of negative length")
    manifest.check_table(head, table)
    checksums = manifest.read_checksums(fd)
    if checksums is not None:
        manifest.check_checksums(table, checksums)
    return head, table


def _sentence(error: ValidationError) -> str:
    problems: list[Any] = error.errors(include_url=False, include_input=False)
    parts = [f"{'.'.join(map(str, item['loc'])) or 'message'}: {item['msg']}" for item in problems[:5]]
    if len(problems) > len(parts):
        parts.append(f"and {len(problems) - len(parts)} more")
    return "; ".join(parts)
