"""The loader process: one model from disk to one device, published, done. Whatever ends it early leaves nothing behind.

The service hands it one socket. The first message on it is the job, everything after that goes the other way:

    {"job": {"model", "checkpoint", "device", "socket"}}     what to load, and the worker's socket
    {"plan": {"nbytes", "bytes_to_read", "tensors"}}         the checkpoint is valid and its size is known
    {"progress": {"bytes_done"}}                             bytes read so far
    {"done": {"generation", "nbytes", "bytes_read", "seconds"}}
    {"failed": {"error": {...}}}                             an error as on every socket of weightcached
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ..checkpoint.fileset import Checkpoint, open_checkpoint
from ..devices import is_host
from ..errors import ConnectionLost, ProtocolError, WeightCacheError, to_wire
from ..fds import OwnedFd, raise_descriptor_limit
from ..probe import PROBE_SECONDS
from ..shard.host import HostSlab
from ..shard.key import ShardKey
from ..shard.manifest import ManifestHead, SlabEntry, TensorTable, write_manifest
from ..wire import framing
from ..wire.connection import Connection
from ..wire.messages import Publish, Reserve
from .pipeline import LoadResult
from .pipeline import run as run_pipeline
from .plan import LoadPlan, plan_load
from .sink import HostSink, Sink

if TYPE_CHECKING:
    from ..shard.cuda import CudaSlab

PROGRESS_SECONDS = 0.25
PUBLISH_TIMEOUT = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What the service asks for. `socket` is the path of the worker's socket."""

    model: str
    checkpoint: str
    device: str
    socket: str


def run(device: str, model: str, channel_fd: int) -> int:
    """Does the job that comes on the channel, which it takes over. Returns the exit code.

    `device` and `model` are in the job too; as arguments they make the process readable in a process list.

    SIGTERM and SIGKILL simply end the process: everything it holds are descriptors and a CUDA context.
    """
    raise_descriptor_limit()
    with socket.socket(fileno=channel_fd) as channel:
        report = Report(channel)
        try:
            load(report.job(), report)
        except WeightCacheError as error:
            _log.debug("failed: %s", error)
            with contextlib.suppress(ConnectionLost):  # the service itself may be what is gone
                report.send("failed", {"error": to_wire(error)})
            return 1
    return 0


class Report:
    """The channel to the service. `ConnectionLost` when the service is gone, which ends the load."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._last = 0.0

    def job(self) -> Job:
        received = framing.receive(self._channel)
        if received is None:
            raise ProtocolError(problem="the service closed the channel before it sent a job")
        received[1].close()
        return Job(**framing.decode(received[0])["job"])

    def send(self, what: str, content: dict[str, Any]) -> None:
        try:
            framing.Frame({what: content}).send(self._channel)
        except OSError as error:
            raise ConnectionLost(path="the service", problem=f"no longer there: {error.strerror}") from error

    def progress(self, bytes_done: int) -> None:
        """Passes on four a second. The pipeline calls it from one thread at a time."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS:
            self._last = now
            self.send("progress", {"bytes_done": bytes_done})


def load(job: Job, report: Report) -> None:
    """Validates, reserves, reads, publishes. Every error leaves the device as it was."""
    with open_checkpoint(job.checkpoint) as checkpoint:
        for name in checkpoint.ignored:
            _log.info("%s: %s is not part of the checkpoint and is ignored", job.model, name)
        plan = plan_load(checkpoint)
        report.send("plan", {"nbytes": plan.nbytes, "bytes_to_read": checkpoint.nbytes, "tensors": len(plan.entries)})
        with Connection.open(Path(job.socket), device=job.device, client="loader") as worker:
            reply, fds = worker.request(Reserve(model=job.model, nbytes=plan.nbytes), timeout=PROBE_SECONDS + 10)
            fds.close()
            slab, result = _fill(job, plan, checkpoint, report)
            with slab:
                head = _head(job, reply["generation"], plan, checkpoint, result)
                with write_manifest(head, TensorTable(plan.entries)) as manifest:
                    _, fds = worker.request(Publish(), [manifest.fileno(), slab.fileno()], timeout=PUBLISH_TIMEOUT)
                    fds.close()
        report.send(
            "done",
            {
                "generation": head.generation,
                "nbytes": head.nbytes,
                "bytes_read": result.bytes_read,
                "seconds": result.seconds,
            },
        )


def _fill(job: Job, plan: LoadPlan, checkpoint: Checkpoint, report: Report) -> tuple[OwnedFd, LoadResult]:
    """A sealed slab with the checkpoint's bytes, which the caller owns, and what was read."""
    slab: HostSlab | CudaSlab
    sink: Sink
    if is_host(job.device):
        slab = HostSlab(plan.nbytes)
        sink = HostSink(slab)
    else:
        from ..shard.cuda import CudaSlab, ordinal_of
        from .cuda_sink import CudaSink

        slab = CudaSlab.create(ordinal_of(job.device), plan.nbytes)
        sink = CudaSink(slab)
    with contextlib.closing(slab):
        result = run_pipeline(plan, checkpoint, sink, progress=report.progress)
        return slab.seal(), result


def _head(job: Job, generation: int, plan: LoadPlan, checkpoint: Checkpoint, result: LoadResult) -> ManifestHead:
    quantization = checkpoint.quantization
    key = ShardKey(
        content=result.content,
        architecture=checkpoint.architecture,
        dtype=checkpoint.dtype,
        quantization=str(quantization.get("quant_method", "unnamed")) if quantization else None,
        quantization_digest=_digest_of(quantization) if quantization else None,
    )
    return ManifestHead(
        model=job.model,
        generation=generation,
        device=job.device,
        key=key,
        slabs=(SlabEntry(plan.nbytes),),
        tensor_count=len(plan.entries),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files=result.files,
        attributes={"checkpoint": str(checkpoint.path)},
    )


def _digest_of(config: dict[str, Any]) -> str:
    """A digest of a JSON object's content, whatever the order of its keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(config, sort_keys=True).encode())
