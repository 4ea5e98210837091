"""The pipeline: several threads read the checkpoint's blocks, hash them while they are hot, and hand them to the sink.

Reading is buffered `preadv`, never a mapping of the checkpoint: a file that shrinks under a mapping is a SIGBUS, under
`preadv` it is a short read and an error. Every byte is read exactly once.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..checkpoint.digest import BLOCK_BYTES, FileDigest, block_digest, checkpoint_digest
from ..errors import CheckpointChanged, CheckpointError
from ..shard.manifest import SourceFile
from .plan import LoadPlan, Task
from .sink import Sink, Writer

if TYPE_CHECKING:
    from ..checkpoint.fileset import Checkpoint

MAX_THREADS = 16  # page cache to memory: 4.6 GB/s on 1 thread and 38.6 on 16, measured on a 16-core host


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
    *,
    threads: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> LoadResult:
    """Fills the sink's slab by the plan; returns when every byte is there and the files are still what they were.

    `progress` gets the bytes done so far, after each block, from one thread at a time; what it raises ends the load.
    The sink is closed on return, in success and on error; the slab stays the caller's. The first error of any thread
    stops the others and is raised once all have ended: `CheckpointChanged` when a file shrank, vanished or was written,
    `CheckpointError` when it cannot be read, `DeviceError` from the sink.
    """
    started = time.monotonic()
    load = _Load(plan, checkpoint, sink, progress)
    with closing(sink):
        count = thread_count(plan, threads)
        sink.start(count, sum(len(task.reads) for task in plan.tasks))
        load.run(count)
        sink.finish()
    checkpoint.recheck()
    digests = [digest.value() for digest in load.digests]
    return LoadResult(
        files=tuple(
            replace(file.source, digest=digest) for file, digest in zip(checkpoint.files, digests, strict=True)
        ),
        content=checkpoint_digest(digests),
        bytes_read=load.done,
        seconds=time.monotonic() - started,
    )


def thread_count(plan: LoadPlan, threads: int | None = None) -> int:
    """`threads`, by default one per usable core and `MAX_THREADS` at most; never more than there are tasks."""
    wanted = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    return max(1, min(wanted, len(plan.tasks)))


class _Load:
    """The state that the threads of one load share: the queue, the count of bytes, the digests."""

    def __init__(
        self,
        plan: LoadPlan,
        checkpoint: Checkpoint,
        sink: Sink,
        progress: Callable[[int], None],
    ) -> None:
        self.digests = [FileDigest(file.source.size) for file in checkpoint.files]
        self.done = 0
        self._files = [(file.fd.fileno(), str(checkpoint.folder / file.name)) for file in checkpoint.files]
        self._sink = sink
        self._progress = progress
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in plan.tasks:
            self._tasks.put(task)

    def run(self, count: int) -> None:
        """Returns when `count` threads have done all tasks; raises the first error after all of them have ended."""
        with ThreadPoolExecutor(count, thread_name_prefix="loader") as pool:
            try:
                workers = [pool.submit(self._work) for _ in range(count)]
                ended, _ = wait(workers, return_when=FIRST_EXCEPTION)
            finally:  # also for what a signal handler raises in this thread while it waits
                self._stop.set()
        for worker in [*ended, *workers]:
            worker.result()

    def _work(self) -> None:
        unlisted = memoryview(bytearray(BLOCK_BYTES))
        with self._sink.writer() as writer:
            while not self._stop.is_set():
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    return
                self._do(task, writer, unlisted)

    def _do(self, task: Task, writer: Writer, unlisted: memoryview) -> None:
        with closing(self._parts(task, writer, unlisted)) as parts:
            digest = block_digest(parts)
        with self._lock:
            self.digests[task.file_index].put(task.block_index, digest)
            self.done += sum(read.nbytes for read in task.reads)
            self._progress(self.done)

    def _parts(self, task: Task, writer: Writer, unlisted: memoryview) -> Generator[memoryview, None, None]:
        """Reads the block and hands it to the sink; yields its bytes in order, each view valid until the next."""
        for read in task.reads:
            views = writer.place(read, unlisted)
            try:
                read_fully(*self._files[task.file_index], views, read.file_offset)
                writer.write(read)
                yield from views
            finally:
                # A view that an error's traceback keeps alive would forbid to unmap the slab.
                for view in views:
                    view.release()


def read_fully(fd: int, path: str, views: list[memoryview], offset: int) -> None:
    """Fills the views from the file at `offset`. `CheckpointChanged` if it ends early, `CheckpointError` on EIO."""
    try:
        got = os.preadv(fd, views, offset)
        index = 0  # of the first view that is not full yet; `got` counts from its start, `offset` is where it starts
        while True:
            while index < len(views) and got >= len(views[index]):
                got -= len(views[index])
                offset += len(views[index])
                index += 1
            if index == len(views):
                return
            # A read may stop early: at a signal, or at the end of the file.
            with views[index][got:] as rest:
                more = os.preadv(fd, [rest, *views[index + 1 :]], offset + got)
            if not more:
                problem = f"shrank while it was read: it ends at byte {offset + got} now"
                raise CheckpointChanged(file=path, problem=problem)
            got += more
    except OSError as error:
        problem = f"cannot be read at byte {offset}: {error.strerror}"
        raise CheckpointError(file=path, problem=problem) from error
