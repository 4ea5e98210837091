"""`attach`: from a model's name to its tensors, mapped from what the device's worker holds."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import (
    ConnectionFailed,
    ConnectionLost,
    ManifestError,
    ModelError,
    ServiceNotRunning,
    TimedOut,
    TooManyConnections,
    WrongDevice,
)
from ..fds import FdSet
from ..shard.key import ShardKey
from ..shard.manifest import (
    ManifestHead,
    TensorEntry,
    TensorTable,
    check_table,
    parse_head,
    parse_table,
    read_documents,
)
from ..trace import point
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Attach
from .keeper import Grant
from .leases import Lease
from .mapping import copy_slabs, map_slabs
from .target import Target, import_torch, resolve, worker_socket
from .tensors import SlabViews

if TYPE_CHECKING:
    import torch

    from .progress import WaitLog

Mode = Literal["zero_copy", "copy"]
Document = bytes | memoryview
OnMiss = Literal["fail", "wait"]

_log = logging.getLogger(__name__)
_SPLITS = ("tensor", "pipeline", "expert", "data")
LONGEST_SECONDS = 1e6  # eleven days; sockets and poll take no more than some 2e6
_ANSWER_SECONDS = 5.0  # beyond the wait that the worker itself was asked for
_RETRY_SECONDS = 0.1  # a bound socket that does not listen yet gives no event when it does


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
            `OtherContent`, a `NoSuchModel` that names the file.
        device: "host-0", "cpu" (host-0), "GPU-<uuid>", "MIG-<uuid>", "cuda:1" or a torch.device; None is torch's
            current CUDA device.
        mode: "zero_copy" maps the cached memory: read-only on a GPU, copy-on-write on the host. "copy" gives private
            writable tensors and lets go of the cached memory at once.
        on_miss: "fail" raises `NoSuchModel`, `ModelLoading`, `ModelFailed` or `ServiceNotRunning` at once; "wait" waits
            for the service, for a connection and for the model, which is loaded if it is in the config and absent. With
            `checkpoint` it only waits: a model is loaded by its name. Logged at INFO: why it waits and how far the load
            is, or why nothing is attached.
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
    if not timeout >= 0:  # NaN too
        raise ValueError(f"timeout={timeout!r}; it must be seconds, 0 or more")
    timeout = min(timeout, LONGEST_SECONDS)
    import_torch("attach")
    wanted = {**_rank_fields(tensor_parallel), **(key or {})}
    if dtype is not None:
        wanted["dtype"] = str(dtype).removeprefix("torch.")
    target = resolve(device)
    request = _Request(model, None if checkpoint is None else Path(checkpoint), wanted, target, mode)
    end = time.monotonic() + timeout
    try:
        return _attach_waiting(request, end, timeout) if on_miss == "wait" else _attach_now(request, end)
    except (ConnectionFailed, ModelError) as error:
        _log.info("%s is not attached: %s", request.what, error)
        raise


class Weights(Mapping[str, "torch.Tensor"]):
    """Cached weights by name, in the manifest's order, tied names after it. Each tensor is made when first asked for.

    Mapping and lease end when this object and every tensor made from it are gone. `close` gives up this object's part
    early: tensors already made stay valid. Also a context manager.
    """

    def __init__(self, head: ManifestHead, table: Document, slabs: list[torch.Tensor], lease: Lease | None) -> None:
        """`slabs` as `map_slabs` gives them; `table` is the manifest's second document. `attach` is the way in."""
        self._head = head
        self._document: Document | None = table
        self._table: TensorTable | None = None
        self._entries: dict[str, TensorEntry] = {}
        self._slabs: SlabViews | None = SlabViews(slabs)
        self._lease = lease
        self._made: dict[str, torch.Tensor] = {}

    @property
    def manifest(self) -> ManifestHead:
        return self._head

    @property
    def table(self) -> TensorTable:
        """Every tensor's place and shape; parsed and checked at the first use. `ManifestError` if it is wrong."""
        if self._table is None:
            if self._document is None:
                raise self._is_closed()
            table = parse_table(self._document)
            check_table(self._head, table)
            self._entries = {entry.name: entry for entry in table.tensors}
            self._table, self._document = table, None
        return self._table

    @property
    def key(self) -> ShardKey:
        return self._head.key

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, padding included."""
        return self._head.nbytes

    @property
    def device(self) -> str:
        """The device's name, as in "GPU-<uuid>" or "host-0"."""
        return self._head.device

    @property
    def generation(self) -> int:
        return self._head.generation

    @property
    def lost(self) -> str | None:
        """Why the device has lost the memory, as the service reports it; None while it is good, for copies, and after
        `close`. What is read from the tensors then is undefined: end the engine and attach again."""
        return None if self._lease is None else self._lease.lost

    @property
    def closed(self) -> bool:
        return self._slabs is None

    def close(self) -> None:
        """Gives up memory and lease as far as no tensor still uses them. Idempotent."""
        self._slabs = None
        self._document = None
        self._lease = None
        self._made.clear()

    def __getitem__(self, name: str) -> torch.Tensor:
        made = self._made.get(name)
        if made is not None:
            return made
        table = self.table
        if name in table.aliases:
            return self[table.aliases[name]]
        entry = self._entries[name]
        if self._slabs is None:
            raise self._is_closed()
        return self._made.setdefault(name, self._slabs.view(entry))

    def _is_closed(self) -> ValueError:
        return ValueError(f"the weights of {self._head.model} are closed")

    def __contains__(self, name: object) -> bool:
        return name in self.table.aliases or name in self._entries

    def __iter__(self) -> Iterator[str]:
        yield from (entry.name for entry in self.table.tensors)
        yield from self.table.aliases

    def __len__(self) -> int:
        return len(self.table.tensors) + len(self.table.aliases)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        head = self._head
        state = ", closed" if self.closed else ""
        return (
            f"<Weights of {head.model}, generation {head.generation}, on {head.device}: "
            f"{head.tensor_count} tensors, {head.nbytes} bytes{state}>"
        )


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


def _attach_waiting(request: _Request, end: float, timeout: float) -> Weights:
    """Tries until `end` (monotonic seconds): a service that is not there may come, one that goes may come back."""
    from .progress import WaitLog
    from .waiting import PathWatch

    log = WaitLog(request.what, timeout)
    path: Path | None = None
    missing: Path | None
    while True:
        # The watch is made before the attempt, so that nothing that happens in between is missed.
        with ExitStack() as stack:
            watch = None
            if path is not None:
                try:
                    watch = stack.enter_context(PathWatch(path))
                except ConnectionFailed as error:
                    _log.debug("%s; looked for by the clock", error)
            try:
                return _attach_now(request, end, log)
            except TooManyConnections as error:  # of this user: it may have fewer in a moment, which nobody announces
                missing, waited_for = None, f"a connection: {error}"
                log.because(str(error))
            except (ServiceNotRunning, ConnectionLost) as error:
                missing, waited_for = Path(error.path), "the service"
                log.because(str(error))
            left = end - time.monotonic()
            if left <= 0:
                where = missing or worker_socket(request.target.name)
                raise TimedOut(path=str(where), seconds=timeout, waited_for=waited_for)
            if missing is None or (missing == path and watch is None):
                time.sleep(min(left, _RETRY_SECONDS))
            elif missing == path and watch is not None:
                watch.wait(min(left, _RETRY_SECONDS) if missing.exists() else left)
            path = missing


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


def _map(
    fds: FdSet, connection: Connection, target: Target
) -> tuple[ManifestHead, Document, list[torch.Tensor], Lease]:
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


def require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """`ValueError` for a word that a parameter does not offer."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; it must be one of {', '.join(allowed)}")
