"""`publish`: an engine hands over the weights that it has processed, and goes on from the shared copy."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointChanged, ConnectionFailed, EngineError
from ..fds import OwnedFd
from ..shard.key import KEY_FIELDS, STAT_CONTENT, ShardKey
from ..shard.manifest import (
    ManifestHead,
    Scalar,
    SlabEntry,
    SourceFile,
    TensorTable,
    changed_files,
    check_overlaps,
    check_table,
    read_documents,
    write_manifest,
)
from ..trace import point
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Publish, Renew, Reserve
from .keeper import Grant
from .leases import Lease
from .modules import NamedTensor, held_tensors, named_tensors
from .moving import move, settle
from .storages import Plan, Private, is_plain, is_text, plan_storages
from .target import Target, import_torch, resolve, worker_socket
from .weights import Weights

if TYPE_CHECKING:
    import torch

SMALL_BUFFER = 1 << 20  # bytes; engines count and scale in smaller ones, and write to them
PUBLISH_SECONDS = 60.0  # for the worker to check a manifest and the service to hold the shard
_LONGEST_SECONDS = 1e6
_log = logging.getLogger(__name__)


def publish(
    name: str,
    tensors: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    key: Mapping[str, Any],
    device: str | torch.device | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    files: Sequence[SourceFile] | None = None,
    private: Private | None = None,
    tensor_attributes: Iterable[str] = (),
    attributes: Mapping[str, Scalar] | None = None,
    timeout: float = 30.0,
) -> Weights:
    """Publishes a module's tensors, or those of a mapping, as model `name`, and lets the engine run from that copy.

    Storage by storage the weights go into slabs of some 1 GiB, and the very same tensor objects, as well as others over
    the same storages that the module's plain objects hold, get that memory: peak use is the weights and one slab. From
    then on a write to a shared tensor is a CUDA error on a GPU, and stays with this process on the host. So publish
    after all processing, and before anything captures addresses: CUDA graphs, profiling, other threads.

    Args:
        name: the model's; a later `publish` of the same name is its next generation.
        tensors: every parameter and buffer of a module, persistent or not; of a mapping, every tensor.
        key: fields of `ShardKey`. "layout" is needed, the engine's own tag; "content" without files.
        device: as for `attach`; None is where the tensors are. CPU tensors of an engine on a GPU go by value.
        checkpoint: what the engine has loaded; recorded, and `files` are compared with what is there now.
        files: `checkpoint_files` from before the load; None takes the present ones of `checkpoint`.
        private: which tensors the engine goes on writing to. It keeps its own, others get copies. None: buffers under
            1 MiB. Tensors that share bytes with one are private too.
        tensor_attributes: dotted names of tensors in plain attributes that belong to the weights.
        attributes: scalars by dotted name, for modules that are given these weights.
        timeout: seconds to connect and to get room.

    Returns the `Weights` that the engine now runs from, with their lease.

    Errors before anything has moved change nothing: `EngineError` for tensors, keys or attributes that cannot be
    carried, `CheckpointChanged`, `DeviceFull`, what connecting raises. After that the tensors stay valid, in memory
    that is freed when they go: `ConnectionLost`, `DeviceError`, `DeviceFull`, `ManifestError`.
    """
    if not timeout >= 0:  # NaN too
        raise ValueError(f"timeout={timeout!r}; it must be seconds, 0 or more")
    end = time.monotonic() + min(timeout, _LONGEST_SECONDS)
    torch = import_torch("publish")
    scalars = _checked(attributes or {})
    module = tensors if isinstance(tensors, torch.nn.Module) else None
    named = _named(torch, tensors, tensor_attributes)
    read = _files(checkpoint, files)
    shard_key = _key(key, read)
    target = resolve(_device_of(named) if device is None else device)
    held = [] if module is None else [item.tensor for item in held_tensors(module)]
    plan = plan_storages(named, held, target, private or _is_small_buffer)
    table = TensorTable(tuple(plan.entries), plan.aliases, scalars)
    settle(target)  # before the worker asks what the device has left
    with ExitStack() as undo:
        worker = Connection.open(worker_socket(target.name), device=target.name, timeout=seconds_left(end))
        undo.callback(worker.close)
        room = Reserve(name, plan.nbytes, max(plan.sizes))
        granted, fds = worker.request(room, timeout=seconds_left(end))
        fds.close()
        head = ManifestHead(
            model=name,
            generation=granted["generation"],
            device=target.name,
            key=shard_key,
            slabs=tuple(SlabEntry(size) for size in plan.sizes),
            tensor_count=len(plan.entries),
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            files=read,
            attributes=_head_attributes(name, checkpoint),
        )
        check_table(head, table)
        check_overlaps(table)
        write_manifest(head, table).close()  # too large a one is refused here, with nothing moved
        point("client.reserved")
        weights = _publish(worker, plan, head, table, target, checkpoint)
        undo.pop_all()  # the connection is the lease's now
    # Only what lies in the slabs now: the engine's own scratch memory is freed when the engine lets it go.
    slabs = {slab.untyped_storage().data_ptr() for slab in weights.require_mapped("they are handed out").slabs}
    others = [("", tensor) for tensor in held if is_plain(tensor)]  # by no name of the manifest's
    for given, tensor in [*((item.name, item.tensor) for item in named), *others]:
        if tensor.numel() and tensor.untyped_storage().data_ptr() in slabs:
            weights.hand_out(given, tensor)
    return weights


def _head_attributes(name: str, checkpoint: str | os.PathLike[str] | None) -> dict[str, Scalar]:
    """What the head says beside the key. Of the model that a service has this process publish (`publisher` of its
    config), also what the config asks for: by that a restarted service knows the shard for its own."""
    found: dict[str, Scalar] = {}
    if checkpoint is not None:
        found["checkpoint"] = str(Path(checkpoint).absolute())
    if (spec := os.environ.get("WEIGHTCACHED_SPEC")) and os.environ.get("WEIGHTCACHED_PUBLISH_NAME") == name:
        found["spec"] = spec
    return found


def checkpoint_files(path: str | os.PathLike[str]) -> tuple[SourceFile, ...]:
    """A checkpoint's files as they are now, by name. Take them before an engine loads, for `publish`.

    Without digests, but for files of a Hugging Face cache, whose blobs have them for names.

    `CheckpointError` for what is no complete set of safetensors files.
    """
    from ..checkpoint.fileset import open_checkpoint

    with open_checkpoint(os.fspath(path)) as found:
        blobs = zip(found.files, found.blob_digests(), strict=True)
        return tuple(dataclasses.replace(file.source, digest=digest) for file, digest in blobs)


def _publish(
    worker: Connection,
    plan: Plan,
    head: ManifestHead,
    table: TensorTable,
    target: Target,
    checkpoint: str | os.PathLike[str] | None,
) -> Weights:
    """Moves, hands over, and takes a lease on the connection of the publish, which is freed for it."""
    lease = Lease(_Nothing())  # every mapping holds it; it gets a life once the shard is published
    slabs: list[OwnedFd] = []
    with ExitStack() as stack:
        stack.callback(_close, slabs)
        mapped, checksums = move(plan, head, lease, target, slabs)
        _files(checkpoint, head.files)  # again: tensors may have been a mapping of the files until they were moved
        manifest = stack.enter_context(write_manifest(head, table, checksums))
        point("client.publish")
        _, fds = worker.request(Publish(), [fd.fileno() for fd in (manifest, *slabs)], timeout=PUBLISH_SECONDS)
        fds.close()
        point("client.published")
        _, document = read_documents(manifest.fileno())
    _hold(worker, lease, head)
    return Weights(head, document, mapped, lease)


def _hold(worker: Connection, lease: Lease, head: ManifestHead) -> None:
    """A lease on exactly this shard, also where another generation or an eviction was faster than this message."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    line = worker
    try:
        line.request(Renew(head.model, head.generation, head.created, head.nbytes, since))[1].close()
    except ConnectionFailed as error:
        # Published all the same. The keeper finds the connection ended, and renews the lease when the service is back.
        _log.debug("no lease yet: %s", error)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.close()
        line = Connection(ours, worker.path)
    lease.give_up()
    lasting = Lease(line)
    lasting.keep(Grant(head.device, head.model, head.generation, head.created, head.nbytes, since))
    lease.take_over(lasting)


def _close(fds: list[OwnedFd]) -> None:
    for fd in fds:
        fd.close()


class _Nothing:
    """The connection of a lease that has none yet."""

    def close(self) -> None:
        """There is nothing to close."""


def _named(torch: Any, tensors: Any, tensor_attributes: Iterable[str]) -> list[NamedTensor]:
    if isinstance(tensors, torch.nn.Module):
        return named_tensors(tensors, tensor_attributes)
    if listed := list(tensor_attributes):
        raise EngineError(problem=f"tensor attributes {', '.join(listed)} of a mapping, which has none")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise EngineError(problem=f"{name!r} is {type(tensor).__name__}, and is to be a tensor by its name")
    return [NamedTensor(name, tensor) for name, tensor in tensors.items()]


def _is_small_buffer(item: NamedTensor) -> bool:
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
        finite = not isinstance(value, float) or math.isfinite(value)
        if type(value) not in (bool, int, float, str, type(None)) or not finite:
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
    for kind in ("tensor", "pipeline", "expert", "data"):
        size, rank = getattr(made, f"{kind}_parallel_size"), getattr(made, f"{kind}_parallel_rank")
        if not (type(size) is type(rank) is int and 0 <= rank < size):
            raise EngineError(problem=f"key: {kind} parallel rank {rank!r} of {size!r}")
    for field in dataclasses.fields(ShardKey):
        value = getattr(made, field.name)
        if str(field.type).startswith("str") and not isinstance(value, str | None):
            raise EngineError(problem=f"key: {field.name} is {value!r}; it must be text")
    return made


def _stat_content(files: Sequence[SourceFile]) -> str:
    """What stands for the content's digest until that is known: equal for the very same files only."""
    from ..checkpoint.digest import json_digest

    ordered = sorted(files, key=lambda file: file.name)
    return STAT_CONTENT + json_digest([[file.name, *file.stat] for file in ordered])
