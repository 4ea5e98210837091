"""What an engine offers for publishing: its tensors, checked and laid out, under a key. Nothing is moved here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointChanged, EngineError
from ..shard.key import KEY_FIELDS, STAT_CONTENT, ShardKey
from ..shard.manifest import Scalar, SourceFile, TensorTable, changed_files, is_scalar
from ..text import MODEL_NAME
from .modules import NamedTensor, held_tensors, named_tensors
from .storages import Plan, Private, is_text, plan_storages
from .target import Target, resolve

if TYPE_CHECKING:
    import torch

SMALL_BUFFER = 1 << 20  # bytes; engines count and scale in smaller ones, and write to them


@dataclass(frozen=True)
class Offer:
    """What is to become a shard. `named` go into its slabs by `plan`; `held` are further tensors of the engine."""

    name: str
    key: ShardKey
    target: Target
    checkpoint: str | os.PathLike[str] | None
    files: tuple[SourceFile, ...]
    named: list[NamedTensor]
    held: list[torch.Tensor]
    plan: Plan
    table: TensorTable

    @property
    def head_attributes(self) -> dict[str, Scalar]:
        """What the head says beside the key. Of the model that a service has this process publish (`publisher` of its
        config), also what the config asks for: by that a restarted service knows the shard for its own."""
        found: dict[str, Scalar] = {}
        if self.checkpoint is not None:
            found["checkpoint"] = str(Path(self.checkpoint).absolute())
        if (spec := os.environ.get("WEIGHTCACHED_SPEC")) and os.environ.get("WEIGHTCACHED_PUBLISH_NAME") == self.name:
            found["spec"] = spec
        return found

    def require_unchanged_files(self) -> None:
        """`CheckpointChanged` if the checkpoint's files are not those any more that the head says were loaded."""
        _files(self.checkpoint, self.files)


def make_offer(
    torch: Any,
    name: str,
    tensors: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    key: Mapping[str, Any],
    device: str | torch.device | None,
    checkpoint: str | os.PathLike[str] | None,
    files: Sequence[SourceFile] | None,
    private: Private | None,
    tensor_attributes: Iterable[str],
    attributes: Mapping[str, Scalar] | None,
) -> Offer:
    """The arguments of `publish`, checked. `EngineError` for what cannot be carried, `CheckpointChanged`."""
    _require_name(name)
    scalars = _checked(attributes or {})
    named = _named(torch, tensors, tensor_attributes)
    read = _files(checkpoint, files)
    shard_key = _key(key, read)
    target = resolve(_device_of(named) if device is None else device)
    module = tensors if isinstance(tensors, torch.nn.Module) else None
    held = [] if module is None else [item.tensor for item in held_tensors(module)]
    plan = plan_storages(named, held, target, private or is_small_buffer)
    table = TensorTable(tuple(plan.entries), plan.aliases, scalars)
    return Offer(name, shard_key, target, checkpoint, read, named, held, plan, table)


def checkpoint_files(path: str | os.PathLike[str]) -> tuple[SourceFile, ...]:
    """A checkpoint's files as they are now, by name. Take them before an engine loads, for `publish`.

    Without digests, but for files of a Hugging Face cache, whose blobs have them for names.

    `CheckpointError` for what is no complete set of safetensors files.
    """
    from ..checkpoint.fileset import open_checkpoint

    with open_checkpoint(os.fspath(path)) as found:
        blobs = zip(found.files, found.blob_digests(), strict=True)
        return tuple(dataclasses.replace(file.source, digest=digest) for file, digest in blobs)


def _require_name(name: object) -> None:
    if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
        allowed = "1 to 128 letters, digits, dots, underscores and dashes, the first no dot or dash"
        raise EngineError(problem=f"{name!r} cannot be the name of a model: {allowed}")


def _named(torch: Any, tensors: Any, tensor_attributes: Iterable[str]) -> list[NamedTensor]:
    if isinstance(tensors, torch.nn.Module):
        return named_tensors(tensors, tensor_attributes)
    if listed := list(tensor_attributes):
        raise EngineError(problem=f"tensor attributes {', '.join(listed)} of a mapping, which has none")
    if not isinstance(tensors, Mapping):
        raise EngineError(problem=f"{type(tensors).__name__} is neither a module nor a mapping of tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise EngineError(problem=f"{name!r} is {type(tensor).__name__}, and is to be a tensor by its name")
    return [NamedTensor(name, tensor) for name, tensor in tensors.items()]


def is_small_buffer(item: NamedTensor) -> bool:
    """Whether a tensor is private if the caller does not say: a buffer of less than SMALL_BUFFER bytes."""
    return item.role == "buffer" and item.tensor.numel() * item.tensor.element_size() < SMALL_BUFFER


def _device_of(named: Sequence[NamedTensor]) -> str:
    """Where the tensors are, those on the CPU aside where there are others."""
    devices = sorted({str(item.tensor.device) for item in named if item.tensor.device.type not in ("cpu", "meta")})
    if len(devices) > 1:
        raise EngineError(problem=f"the tensors are on {', '.join(devices)}; a shard is on one device")
    return devices[0] if devices else "cpu"


def _checked(attributes: Mapping[Any, Any]) -> dict[str, Scalar]:
    """`EngineError` for what is no scalar that JSON has: nothing is converted."""
    for name, value in attributes.items():
        if not all(isinstance(text, str) and is_text(text) for text in (name, value if isinstance(value, str) else "")):
            raise EngineError(problem=f"attribute {name!r} is {value!r}; name and text must be what JSON has")
        if not is_scalar(value):
            kind = f"{value!r} of {type(value).__name__}"
            raise EngineError(problem=f"attribute {name} is {kind}; only finite numbers, text and None are carried")
    return dict(attributes)


def _files(checkpoint: str | os.PathLike[str] | None, files: Sequence[SourceFile] | None) -> tuple[SourceFile, ...]:
    """What was loaded. `CheckpointChanged` if it is not there any more as it was before the load."""
    if checkpoint is None:
        return tuple(files or ())
    present = checkpoint_files(checkpoint)
    if files is None:
        return present
    if changed := changed_files(files, present):
        raise CheckpointChanged(
            file=str(checkpoint),
            problem=f"{', '.join(changed)} changed while the engine loaded; nothing is published, load it again",
        )
    return tuple(files)


def _key(fields: Mapping[str, Any], files: Sequence[SourceFile]) -> ShardKey:
    """The shard's key, with a provisional content where only files are known. `EngineError` for what is none."""
    if unknown := sorted(str(name) for name in set(fields) - KEY_FIELDS):
        raise EngineError(problem=f"key: there is no field {', '.join(unknown)}")
    layout = fields.get("layout")
    if not layout or layout == "checkpoint":
        raise EngineError(problem=f"key: layout is {layout!r}; an engine's weights have a tag of its own")
    given = {"content": _stat_content(files) if files else None, **fields}
    if not given["content"]:
        raise EngineError(problem="key: no content, and neither checkpoint nor files to tell it from")
    match given.get("layers"):
        case None:
            pass
        case [int(first), int(last)] if 0 <= first <= last:
            given["layers"] = (first, last)
        case layers:
            raise EngineError(problem=f"key: layers is {layers!r}; it must be two numbers, first and one past the last")
    made = ShardKey(**given)
    _check_values(made)
    return made


def _check_values(key: ShardKey) -> None:
    """`EngineError` for a rank or a text that is none."""
    for kind in ("tensor", "pipeline", "expert", "data"):
        size, rank = getattr(key, f"{kind}_parallel_size"), getattr(key, f"{kind}_parallel_rank")
        if not (type(size) is type(rank) is int and 0 <= rank < size):
            raise EngineError(problem=f"key: {kind} parallel rank {rank!r} of {size!r}")
    for field in dataclasses.fields(ShardKey):
        value = getattr(key, field.name)
        if str(field.type).startswith("str") and not isinstance(value, str | None):
            raise EngineError(problem=f"key: {field.name} is {value!r}; it must be text")


def _stat_content(files: Sequence[SourceFile]) -> str:
    """What stands for the content's digest until that is known: equal for the very same files only."""
    from ..checkpoint.digest import json_digest

    ordered = sorted(files, key=lambda file: file.name)
    return STAT_CONTENT + json_digest([[file.name, *file.stat] for file in ordered])
