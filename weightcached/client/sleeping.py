"""`Weights.unmap` and `remap`: an engine that sleeps gives the memory up, and finds it at the same addresses again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import EngineError, ManifestError, ModelReplaced, WrongDevice
from ..shard.manifest import ManifestHead, parse_head, read_documents
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Attach
from .attach import require_seconds
from .keeper import Grant
from .leases import Lease
from .mapping import MappedSlabs
from .progress import WaitLog
from .retrying import keep_trying
from .target import resolve, worker_socket

if TYPE_CHECKING:
    from .weights import Weights


def unmap(weights: Weights) -> None:
    """Lets go of memory and lease; every tensor keeps its address, shape and type. Idempotent.

    The service may evict the shard from now on. Until `remap`, using a tensor is a SIGSEGV on the host and an illegal
    access on a GPU, which ends its CUDA context: the caller sees to it that no thread, kernel or captured CUDA graph
    does. Work that was submitted before is waited for. Private copies stay as they are; what the engine wrote into
    host memory, which is copy-on-write, is lost. `close` after it works as ever.

    `EngineError` for weights that are private copies altogether; `ValueError` after `close`; `DeviceError` if work on
    the device had failed: unmapped all the same.
    """
    with weights._changing:
        slabs, lease = _shared(weights)
        if weights._unmapped:
            return
        weights.table  # noqa: B018 - parsed now: its own mapping is not the service's to take back, but costs memory
        weights._unmapped = True
        try:
            slabs.unmap()
        finally:
            lease.give_up()


def remap(weights: Weights, timeout: float = 30.0) -> None:
    """Attaches again and maps the same bytes at the same addresses; tensors and captured graphs are valid again.

    For `timeout` seconds it waits for a service that is not there, as while it restarts. Idempotent. After any error
    the weights are still unmapped, and `remap` may be tried again.

    `ModelReplaced` if another generation, or a shard made at another time, has the name now: its bytes may differ, and
    graphs were captured with the old ones. `NoSuchModel` or one of its kind after an eviction; all that `attach`
    raises.
    """
    timeout = require_seconds("timeout", timeout)
    with weights._changing:
        slabs, lease = _shared(weights)
        if not weights._unmapped:
            return
        end = time.monotonic() + timeout
        head = weights.manifest
        what = f"{head.model} on {head.device}"
        keep_trying(lambda log: _remap_now(weights, slabs, lease, end, log), what, head.device, end, timeout)


def _shared(weights: Weights) -> tuple[MappedSlabs, Lease]:
    weights_of = f"the weights of {weights.manifest.model}"
    if weights.closed:
        raise ValueError(f"{weights_of} are closed")
    if weights._mapped is None or weights._lease is None:
        raise EngineError(problem=f"{weights_of} are private copies, which nobody but this engine can give up")
    return weights._mapped, weights._lease


def _remap_now(weights: Weights, slabs: MappedSlabs, lease: Lease, end: float, log: WaitLog) -> None:
    head = weights.manifest
    target = resolve(head.device)
    connection = Connection.open(worker_socket(target.name), device=target.name, timeout=seconds_left(end))
    fresh: Lease | None = None
    try:
        granted, fds = connection.request(Attach(model=head.model), timeout=max(seconds_left(end), 1.0))
        with fds:
            if not len(fds):
                raise ManifestError(problem="the reply carries no manifest")
            manifest, *descriptors = fds
            _require_generation(head, parse_head(read_documents(manifest.fileno())[0]))
            slabs.remap(head, descriptors)
            fresh = Lease(connection)
    finally:
        if fresh is None:
            connection.close()
    lease.take_over(fresh)
    lease.keep(
        Grant(head.device, head.model, head.generation, head.created, head.nbytes, str(granted.get("since", "")))
    )
    weights._unmapped = False


def _require_generation(wanted: ManifestHead, found: ManifestHead) -> None:
    """`ModelReplaced` unless the two heads are of one publish, `WrongDevice` if they are of two devices."""
    if found.device != wanted.device:
        raise WrongDevice(wanted=wanted.device, found=found.device)
    if (found.generation, found.created, found.slabs) != (wanted.generation, wanted.created, wanted.slabs):
        raise ModelReplaced(
            model=wanted.model,
            device=wanted.device,
            wanted=f"generation {wanted.generation} of {wanted.created}",
            found=f"generation {found.generation} of {found.created}",
        )
