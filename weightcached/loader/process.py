"""The loader process: one model from disk to the devices of all its ranks, published, done.

Whatever ends it early leaves nothing behind. The service hands it one socket. The first message on it is the job,
everything after that goes the other way:

    {"job": {"model", "checkpoint", "targets": [{"device", "socket"}],    what to load, and the workers' sockets, in the
             "parallel": {...}, "rules", "dtype", "staging", "spec",      order of the ranks; see `Job`
             "first"}}
    {"plan": {"nbytes": [], "bytes_to_read", "tensors": []}}              the checkpoint is valid, the ranks' sizes
    {"progress": {"bytes_done"}}                                          bytes read so far
    {"done": {"shards": [{"device", "generation", "nbytes"}], "bytes_read", "seconds"}}
    {"failed": {"error": {...}}}                                          an error as on every socket of weightcached
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.fileset import Checkpoint, open_checkpoint
from ..errors import ConnectionLost, ProtocolError, WeightCacheError, to_wire
from ..fds import raise_descriptor_limit
from ..parallel.ranks import Parallel
from ..parallel.slices import ShardSlices, plan_slices
from ..probe import PROBE_SECONDS
from ..shard.manifest import ManifestHead, SlabEntry, TensorTable, write_manifest
from ..trace import point
from ..wire import framing
from ..wire.connection import Connection
from ..wire.messages import Publish, Reserve
from .cast import require_torch
from .keys import keys_of
from .pipeline import LoadResult
from .plan import SlabPlan, plan_load
from .readers import Readers, reader_count
from .sink import STAGING_BYTES
from .slabs import Devices, Filled, fill_slabs, replicas_of

PROGRESS_SECONDS = 0.25
RESERVE_SECONDS = 4 * PROBE_SECONDS  # a worker asks a probe what its device has left, again after it has made room
PUBLISH_SECONDS = 60.0
_log = logging.getLogger(__name__)


class Target(NamedTuple):
    """Where one rank goes: its device, and the path of that device's worker's socket."""

    device: str
    socket: str


@dataclass(frozen=True, slots=True)
class Job:
    """What the service asks for. `targets` are in the order of `parallel`'s ranks, all GPUs or all host devices.

    They are those of rank `first` and the ones after it; the ranks beyond them are on other nodes.

    `rules` and `dtype` as `plan_slices` takes them. `staging`: bytes of host memory to read into. `spec`: a digest of
    what the config asks for, which the manifests carry on to whoever adopts the shards.
    """

    model: str
    checkpoint: str
    targets: tuple[Target, ...]
    parallel: Parallel = field(default_factory=Parallel)
    rules: tuple[str, ...] = ()
    dtype: str | None = None
    staging: int = STAGING_BYTES
    spec: str | None = None
    first: int = 0

    @property
    def ranks(self) -> slice:
        """Which of all ranks are loaded."""
        return slice(self.first, self.first + len(self.targets))

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Job:
        """`ProtocolError` for a job that this version does not understand."""
        try:
            job = dict(message["job"])
            job["targets"] = tuple(Target(**target) for target in job["targets"])
            if "parallel" in job:
                parallel = dict(job["parallel"])
                if isinstance(parallel.get("layers"), list):
                    parallel["layers"] = tuple(parallel["layers"])
                job["parallel"] = Parallel(**parallel)
            job["rules"] = tuple(job.get("rules", ()))
            made = cls(**job)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(problem=f"the service sent a job that is not readable: {error!r}") from error
        if not made.targets or not 0 <= made.first <= made.parallel.world - len(made.targets):
            problem = f"a job of {made.parallel.world} ranks with {len(made.targets)} targets from rank {made.first} on"
            raise ProtocolError(problem=problem)
        return made


def run(device: str, model: str, channel_fd: int) -> int:
    """Does the job that comes on the channel, which it takes over. Returns the exit code.

    `device` and `model` are in the job too; as arguments they make the process readable in a process list.

    SIGTERM and SIGKILL simply end the process: everything it holds are descriptors and CUDA contexts.
    """
    raise_descriptor_limit()
    gc.disable()  # a load makes hundreds of thousands of objects and no garbage to speak of, and the process is short
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
        return Job.from_message(framing.decode(received[0]))

    def send(self, what: str, content: dict[str, Any]) -> None:
        try:
            framing.Frame({what: content}).send(self._channel)
        except OSError as error:
            raise ConnectionLost(path="the service", problem=f"no longer there: {error.strerror}") from error

    def progress(self, bytes_done: int) -> None:
        """Passes one on every `PROGRESS_SECONDS`, drops the others."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS:
            self._last = now
            self.send("progress", {"bytes_done": bytes_done})


def load(job: Job, report: Report) -> None:
    """Validates, reserves, reads, publishes. Every error before the first publish leaves the devices as they were."""
    if job.dtype is not None:
        require_torch()  # before anything is read
    with contextlib.ExitStack() as stack:
        devices = stack.enter_context(Devices([target.device for target in job.targets]))
        checkpoint = stack.enter_context(open_checkpoint(job.checkpoint))
        for name in checkpoint.ignored:
            _log.info("%s: %s is not part of the checkpoint and is ignored", job.model, name)
        tensors = list(checkpoint.tensors())
        all_shards = plan_slices(tensors, checkpoint.config, job.parallel, rules=job.rules, dtype=job.dtype)
        shards = all_shards[job.ranks]
        plan = plan_load(checkpoint, [shard.slices for shard in shards])
        report.send(
            "plan",
            {
                "nbytes": [slab.nbytes for slab in plan.slabs],
                "bytes_to_read": plan.file_bytes,
                "tensors": [len(slab.entries) for slab in plan.slabs],
            },
        )
        point("loader.planned")
        # Started now, so that they are ready when the workers have answered and the devices are set up.
        readers = stack.enter_context(Readers(reader_count(plan.task_count)))
        workers = []
        generations = []
        for target, slab in zip(job.targets, plan.slabs, strict=True):
            worker = stack.enter_context(Connection.open(Path(target.socket), device=target.device, client="loader"))
            reply = worker.ask(Reserve(model=job.model, nbytes=slab.nbytes), timeout=RESERVE_SECONDS)
            workers.append(worker)
            generations.append(reply["generation"])
        point("loader.reserved")
        replicas = replicas_of([shard.slices for shard in shards])
        filled, result = fill_slabs(plan, checkpoint, devices, job.staging, readers, report.progress, replicas)
        for part in filled:
            stack.enter_context(part.fd)
        point("loader.filled")
        heads = _heads(job, generations, plan.slabs, checkpoint, all_shards, result)
        for worker, head, shard, slab, part in zip(workers, heads, shards, plan.slabs, filled, strict=True):
            _publish(worker, head, TensorTable(slab.entries, shard.aliases), part)
        report.send(
            "done",
            {
                "shards": [
                    {"device": head.device, "generation": head.generation, "nbytes": head.nbytes} for head in heads
                ],
                "bytes_read": result.bytes_read,
                "seconds": result.seconds,
            },
        )


def _publish(worker: Connection, head: ManifestHead, table: TensorTable, part: Filled) -> None:
    with write_manifest(head, table, part.checksums) as manifest:
        point("loader.publish")
        worker.ask(Publish(), [manifest.fileno(), part.fd.fileno()], timeout=PUBLISH_SECONDS)
    point("loader.published")


def _heads(
    job: Job,
    generations: list[int],
    slabs: tuple[SlabPlan, ...],
    checkpoint: Checkpoint,
    all_shards: tuple[ShardSlices, ...],
    result: LoadResult,
) -> list[ManifestHead]:
    created = datetime.now(UTC).isoformat(timespec="microseconds")  # tells loads of one number apart
    keys = keys_of(checkpoint, job.parallel, all_shards, result.content, dtype=job.dtype)[job.ranks]
    return [
        ManifestHead(
            model=job.model,
            generation=generation,
            device=target.device,
            key=key,
            slabs=(SlabEntry(slab.nbytes),),
            tensor_count=len(slab.entries),
            created=created,
            files=result.files,
            attributes={"checkpoint": str(checkpoint.path), "spec": job.spec},
        )
        for target, generation, key, slab in zip(job.targets, generations, keys, slabs, strict=True)
    ]
