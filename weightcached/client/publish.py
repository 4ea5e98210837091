"""`publish`: an engine hands over the weights that it has processed, and goes on from the shared copy."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConnectionFailed, DeviceFull, TimedOut
from ..fds import OwnedFd
from ..shard.manifest import (
    ManifestHead,
    Scalar,
    SlabEntry,
    SourceFile,
    check_overlaps,
    check_table,
    read_documents,
    write_manifest,
)
from ..trace import point
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Publish, Renew, Reserve
from .attach import require_one_of, require_seconds
from .duplicates import another_comes_first, take_duplicate
from .keeper import Grant
from .leases import Lease
from .moving import move, settle
from .offer import SMALL_BUFFER, Offer, checkpoint_files, make_offer
from .storages import Private, is_plain
from .target import import_torch, worker_socket
from .weights import Weights

if TYPE_CHECKING:
    import torch

__all__ = ["SMALL_BUFFER", "IfCached", "checkpoint_files", "publish"]

IfCached = Literal["replace", "share"]
ANSWER_SECONDS = 5.0  # at least, for the worker's last answer: a timeout used up earlier must not waste the move
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
    if_cached: IfCached = "replace",
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
        if_cached: "share" takes the copy that somebody else has published with the same key, or is about to publish
            under this name, instead of another generation: the tensors are put onto it if all bytes are the same. So
            engines that start together take the memory once.
        timeout: seconds for all that the service is waited for: to connect, to get room, for another publisher, and to
            take the weights over. For that last step at least 5 s. The time of the move itself is not counted.

    Returns the `Weights` that the engine now runs from, with their lease.

    Errors before anything has moved change nothing: `EngineError` for tensors, keys or attributes that cannot be
    carried, `ModelError` where "share" finds other bytes, `CheckpointChanged`, `DeviceFull`, what connecting raises.
    After that the tensors stay valid, in memory that is freed when they go: `TimedOut` (a service that goes on may
    publish them yet), `ConnectionLost`, `DeviceError`, `DeviceFull`, `ManifestError`.
    """
    require_one_of("if_cached", if_cached, ("replace", "share"))
    end = time.monotonic() + require_seconds("timeout", timeout)
    offer = make_offer(
        import_torch("publish"),
        name,
        tensors,
        key=key,
        device=device,
        checkpoint=checkpoint,
        files=files,
        private=private,
        tensor_attributes=tensor_attributes,
        attributes=attributes,
    )
    settle(offer.target)  # before the worker asks what the device has left
    weights = _share_or_publish(offer, end) if if_cached == "share" else _publish(offer, *_reserve(offer, end), end)
    _hand_out(weights, offer)
    return weights


def _share_or_publish(offer: Offer, end: float) -> Weights:
    while True:
        if (weights := take_duplicate(offer, end)) is not None:
            return weights
        try:
            worker, generation = _reserve(offer, end)
        except DeviceFull:
            if another_comes_first(offer, None, end):  # the room that it takes is what is missing
                continue
            raise
        with ExitStack() as undo:
            undo.callback(worker.close)
            if not another_comes_first(offer, generation, end):
                undo.pop_all()
                return _publish(offer, worker, generation, end)


def _reserve(offer: Offer, end: float) -> tuple[Connection, int]:
    """A connection that has room for the offer's slabs, to be closed by the caller, and the generation of the shard."""
    with ExitStack() as undo:
        device = offer.target.name
        worker = Connection.open(worker_socket(device), device=device, timeout=seconds_left(end))
        undo.callback(worker.close)
        room = Reserve(offer.name, offer.plan.nbytes, max(offer.plan.sizes))
        granted = worker.ask(room, timeout=seconds_left(end))
        undo.pop_all()
        return worker, int(granted["generation"])


def _publish(offer: Offer, worker: Connection, generation: int, end: float) -> Weights:
    """Moves, hands over, and takes a lease on the connection, which is freed for it. `worker` is taken over."""
    with ExitStack() as undo:
        undo.callback(worker.close)
        head = ManifestHead(
            model=offer.name,
            generation=generation,
            device=offer.target.name,
            key=offer.key,
            slabs=tuple(SlabEntry(size) for size in offer.plan.sizes),
            tensor_count=len(offer.plan.entries),
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            files=offer.files,
            attributes=offer.head_attributes,
        )
        check_table(head, offer.table)
        check_overlaps(offer.table)
        write_manifest(head, offer.table).close()  # too large a one is refused here, with nothing moved
        point("client.reserved")
        weights = _move_and_hand_over(offer, worker, head, end)
        undo.pop_all()  # the connection is the lease's now
    return weights


def _move_and_hand_over(offer: Offer, worker: Connection, head: ManifestHead, end: float) -> Weights:
    lease = Lease(_NoConnection())  # every mapping holds it; it gets a life once the shard is published
    slabs: list[OwnedFd] = []
    with ExitStack() as stack:
        stack.callback(_close, slabs)
        began = time.monotonic()
        mapped, checksums = move(offer.plan, head, lease, offer.target, slabs)
        offer.require_unchanged_files()  # again: the tensors may have been a mapping of the files until they were moved
        manifest = stack.enter_context(write_manifest(head, offer.table, checksums))
        now = time.monotonic()
        end = max(end + now - began, now + ANSWER_SECONDS)
        point("client.publish")
        try:
            fds = [fd.fileno() for fd in (manifest, *slabs)]
            worker.ask(Publish(), fds, timeout=seconds_left(end))
        except TimedOut as error:
            waited_for = f"the service to take over {head.model}; this process keeps the weights, as its own memory"
            raise TimedOut(path=error.path, seconds=error.seconds, waited_for=waited_for) from None
        point("client.published")
        _, document = read_documents(manifest.fileno())
    _hold(worker, lease, head, end)
    return Weights(head, document, mapped, lease)


def _hand_out(weights: Weights, offer: Offer) -> None:
    """Tells `weights` which of the engine's tensors lie in its slabs.

    Only those: the engine's own scratch memory is freed when the engine lets it go.
    """
    slabs = {slab.untyped_storage().data_ptr() for slab in weights.require_mapped("they are handed out").slabs}
    others = [("", tensor) for tensor in offer.held if is_plain(tensor)]  # by no name of the manifest's
    for name, tensor in [*((item.name, item.tensor) for item in offer.named), *others]:
        if tensor.numel() and tensor.untyped_storage().data_ptr() in slabs:
            weights.hand_out(name, tensor)


def _hold(worker: Connection, lease: Lease, head: ManifestHead, end: float) -> None:
    """A lease on exactly this shard, also where another generation or an eviction was faster than this message."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    line = worker
    try:
        line.ask(Renew(head.model, head.generation, head.created, head.nbytes, since), timeout=seconds_left(end))
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


class _NoConnection:
    """The connection of a lease that has none yet."""

    def close(self) -> None:
        """There is nothing to close."""
