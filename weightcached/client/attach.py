"""`attach`: from a model's name to its tensors, mapped from what the device's worker holds."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import ConnectionFailed, ManifestError, ModelError, WrongDevice
from ..fds import FdSet
from ..shard.manifest import ManifestHead, parse_head, read_documents
from ..trace import point
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Attach
from .keeper import Grant
from .leases import Lease
from .mapping import MappedSlabs, copy_slabs, map_slabs
from .retrying import keep_trying
from .target import Target, import_torch, resolve, worker_socket
from .weights import Document, Weights

if TYPE_CHECKING:
    import torch

    from .progress import WaitLog

__all__ = ["LONGEST_SECONDS", "Mode", "OnMiss", "Weights", "attach", "require_one_of", "require_seconds"]

Mode = Literal["zero_copy", "copy"]
OnMiss = Literal["fail", "wait"]

_log = logging.getLogger(__name__)
_SPLITS = ("tensor", "pipeline", "expert", "data")
LONGEST_SECONDS = 1e6  # eleven days; sockets and poll take no more than some 2e6
_ANSWER_SECONDS = 5.0  # beyond the wait that the worker itself was asked for


def attach(
    model: str | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    mode: Mode = "zero_copy",
    on_miss: OnMiss = "fail",
    timeout: float = 30.0,
    dtype: str | torch.dtype | None = None,
    tensor_parallel: tuple[int, int] = (0, 1),
    key: dict[str, Any] | None = None,
) -> Weights:
    """The cached weights of `model`, or of whichever cached model holds the bytes of `checkpoint`.

    Args:
        model: the name in the service's config.
        checkpoint: a folder with ``*.safetensors`` or one such file. It is the same when every file's device, inode,
            size and times are what the loader saw; else, at equal sizes, its whole content is digested and compared,
            and the digest is remembered in ``$XDG_CACHE_HOME/weightcached``. Equal sizes with other bytes are
            `OtherContent`, a `NoSuchModel` that names the file; `DigestPending`, another one, while the digest of what
            an engine has published is still being computed; `ModelFailed` where that was given up.
        device: "host-0", "cpu" (host-0), "GPU-<uuid>", "MIG-<uuid>", "cuda:1" or a torch.device; None is torch's
            current CUDA device.
        mode: "zero_copy" maps the cached memory: read-only on a GPU, copy-on-write on the host. "copy" gives private
            writable tensors and lets go of the cached memory at once.
        on_miss: "fail" raises `NoSuchModel`, `ModelLoading`, `ModelFailed` or `ServiceNotRunning` at once; "wait" waits
            for the service, for a connection and for the model, which is loaded if it is in the config and absent. With
            `checkpoint` it only waits: a model is loaded by its name. Logged at INFO: why it waits and how far the load
            is, or why nothing is attached. `ModelElsewhere`, another `NoSuchModel`, comes at once: all ranks of the
            model belong on other devices. `ModelHeldBack`, a `ModelLoading`: the nodes of a cluster have not agreed.
        timeout: seconds for everything, connecting and waiting included, a digest excepted.
        dtype: the element type the model must have, such as torch.bfloat16 or "bfloat16". Without it, with
            `checkpoint`, a model that was cast while loading does not match; one that was cut by rules of a config, or
            by another config.json, never does.
        tensor_parallel: (rank, size); the default is the whole model, so nobody gets a slice unasked.
        key: fields of `ShardKey` that must match; `KeyMismatch` lists those that do not. Without them a shard must be
            the whole of pipeline, expert and data parallel too: size 1, rank 0. A pipeline stage is told by `layers`.

    Raises every error above, `TimedOut`, `NoSuchDevice`, `WrongDevice`, `ManifestError`, and `MissingDependency`
    without torch. The tensors must not be used in a forked child: CUDA forbids it, and a lease belongs to one process;
    start children with the "spawn" method and attach there.
    """
    if model is None and checkpoint is None:
        raise TypeError("attach needs a model's name or a checkpoint")
    require_one_of("mode", mode, ("zero_copy", "copy"))
    require_one_of("on_miss", on_miss, ("fail", "wait"))
    timeout = require_seconds("timeout", timeout)
    import_torch("attach")
    wanted = {**_rank_fields(tensor_parallel), **(key or {})}
    if dtype is not None:
        wanted["dtype"] = str(dtype).removeprefix("torch.")
    target = resolve(device)
    request = _Request(model, None if checkpoint is None else Path(checkpoint), wanted, target, mode)
    end = time.monotonic() + timeout
    try:
        if on_miss == "fail":
            return _attach_now(request, end)
        return keep_trying(lambda log: _attach_now(request, end, log), request.what, target.name, end, timeout)
    except (ConnectionFailed, ModelError) as error:
        _log.info("%s is not attached: %s", request.what, error)
        raise


class _Request(NamedTuple):
    """What one call of `attach` asks for, whichever attempt serves it."""

    model: str | None
    checkpoint: Path | None
    key: dict[str, Any]
    target: Target
    mode: Mode

    @property
    def what(self) -> str:
        """What is asked for, as the log names it."""
        return f"{self.model or self.checkpoint} on {self.target.name}"


def _attach_now(request: _Request, end: float, log: WaitLog | None = None) -> Weights:
    """One attempt. With a `log` it waits: the worker may take until `end` to answer."""
    wait = log is not None
    target, model, key = request.target, request.model, request.key
    socket = worker_socket(target.name)
    if request.checkpoint is not None:
        from .identity import Wanted, find_checkpoint

        wanted = Wanted(request.checkpoint, model, key)
        waiting = str if log is None else log.because
        found = find_checkpoint(wanted, socket, target.name, end, wait=wait, waiting=waiting)
        model, key, end = found.model, found.key, end + found.digesting
    assert model is not None
    with ExitStack() as undo:
        connection = Connection.open(socket, device=target.name, timeout=seconds_left(end))
        undo.callback(connection.close)
        connection.on_event = None if log is None else log.event
        left = seconds_left(end)
        message = Attach(model=model, key=key, wait=left if wait else 0.0)
        granted, fds = connection.request(message, timeout=left + (_ANSWER_SECONDS if wait else 0.0))
        with fds:
            point("client.received")
            head, table, mapped, lease = _map(fds, connection, target)
            point("client.mapped")
            undo.pop_all()  # the connection is the lease's now
    if request.mode == "copy":  # the lease is for a moment: it is not renewed
        return Weights(head, table, copy_slabs(mapped), None)
    since = str(granted.get("since", ""))
    lease.keep(Grant(head.device, head.model, head.generation, head.created, head.nbytes, since))
    return Weights(head, table, mapped, lease)


def _map(fds: FdSet, connection: Connection, target: Target) -> tuple[ManifestHead, Document, MappedSlabs, Lease]:
    """Head, table, mapped slabs and the lease from a reply's descriptors, which stay the caller's."""
    if not len(fds):
        raise ManifestError(problem="the reply carries no manifest")
    manifest, *slabs = fds
    head_json, table = read_documents(manifest.fileno())
    head = parse_head(head_json)
    if head.device != target.name:
        raise WrongDevice(wanted=target.name, found=head.device)
    lease = Lease(connection)
    return head, table, map_slabs(head, slabs, lease, target), lease


def _rank_fields(tensor_parallel: tuple[int, int]) -> dict[str, Any]:
    """The key fields of one tensor parallel rank of an otherwise whole model. `ValueError` for what is no rank."""
    match tensor_parallel:
        case (int(rank), int(size)) if 0 <= rank < size and not isinstance(rank, bool) and not isinstance(size, bool):
            whole = {f"{kind}_parallel_{part}": n for kind in _SPLITS for part, n in (("size", 1), ("rank", 0))}
            return {**whole, "tensor_parallel_size": size, "tensor_parallel_rank": rank}
    raise ValueError(f"tensor_parallel={tensor_parallel!r}; it must be (rank, size), rank from 0 to size - 1")


def require_seconds(name: str, value: float) -> float:
    """The seconds of a parameter, at most LONGEST_SECONDS. `ValueError` for what is no time to wait."""
    if not value >= 0:  # NaN too
        raise ValueError(f"{name}={value!r}; it must be seconds, 0 or more")
    return min(value, LONGEST_SECONDS)


def require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """`ValueError` for a word that a parameter does not offer."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; it must be one of {', '.join(allowed)}")
