"""The pipeline: reader processes fill shared memory block by block, the sink brings the blocks to the slabs.

    files --preadv, digest--> memory shared with the readers --copies--> slabs           one thread here looks after all

Reading is never through a mapping of the checkpoint: a file that shrinks under a mapping is a SIGBUS, under `preadv` it
is a short read and an error. Every byte is read exactly once, for however many slabs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..checkpoint.digest import FileDigest, checkpoint_digest
from ..shard.manifest import SourceFile
from .plan import LoadPlan, Task
from .readers import OpenFile, Readers
from .sink import Placed, Sink

if TYPE_CHECKING:
    from ..checkpoint.fileset import Checkpoint


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was read: the files with their digests, the digest of all, the bytes, and the seconds it took."""

    files: tuple[SourceFile, ...]
    content: str
    bytes_read: int
    seconds: float


def run(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    sink: Sink,
    readers: Readers,
    progress: Callable[[int], None] = lambda done: None,
) -> LoadResult:
    """Fills the sink's slabs by the plan; returns when every byte is there and the files are still what they were.

    Sink and readers serve one load and stay the caller's, to be closed; the readers have the sink's memory mapped until
    they have ended. `progress` gets the bytes done so far, after each block; what it raises ends the load. Raises
    `CheckpointChanged` when a file shrank, vanished or was written, `CheckpointError` when it cannot be read,
    `ConnectionLost` when a reader was killed, `DeviceError` from the sink or a host without means for readers.
    """
    started = time.monotonic()
    files = [OpenFile(file.fd.fileno(), str(checkpoint.folder / file.name)) for file in checkpoint.files]
    readers.open(sink.regions(), files)
    sink.start(readers.count)
    digests = _load(plan, sink, readers, progress)
    sink.finish()
    checkpoint.recheck()
    values = [digest.value() for digest in digests]
    return LoadResult(
        files=tuple(replace(file.source, digest=digest) for file, digest in zip(checkpoint.files, values, strict=True)),
        content=checkpoint_digest(values, checkpoint.left_out),
        bytes_read=plan.file_bytes,
        seconds=time.monotonic() - started,
    )


def _load(plan: LoadPlan, sink: Sink, readers: Readers, progress: Callable[[int], None]) -> list[FileDigest]:
    """Carries the plan out, and returns the files' digests."""
    digests = [FileDigest(file.size) for file in plan.files]
    reading: dict[int, tuple[Task, int, Placed]] = {}  # task, its bytes, their places; by a number of its own
    tasks = ((number, task, plan.copies(task)) for number, task in enumerate(plan.tasks()))
    following = next(tasks, None)
    done = 0
    while following is not None or reading:
        while following is not None:
            number, task, copies = following
            begin, end = plan.task_bytes(task)
            # Waits for the device only when a reader has nothing to do: else the next block that is read comes first.
            placed = sink.place(end - begin, copies, wait=readers.has_idle)
            if placed is None:
                break
            readers.submit(placed.buffer % readers.count, number, task.file_index, begin, placed.places)
            reading[number] = (task, end - begin, placed)
            following = next(tasks, None)
        for number, digest in readers.done():
            task, nbytes, placed = reading.pop(number)
            sink.write(placed)
            digests[task.file_index].put(task.block_index, digest)
            done += nbytes
            progress(done)
    return digests
