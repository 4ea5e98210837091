"""Slabs filled from a checkpoint, on whichever devices: made, filled by the pipeline, checksummed, sealed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple

from ..devices import is_host
from ..errors import DeviceError
from ..fds import OwnedFd
from ..shard.checksum import checksum_host
from ..shard.host import HostSlab
from ..shard.manifest import Checksums, TensorEntry
from ..shard.slab import SlabWriter
from .pipeline import LoadResult, run
from .plan import LoadPlan
from .readers import Readers
from .sink import HostSink, Sink

if TYPE_CHECKING:
    from ..checkpoint.fileset import Checkpoint
    from ..parallel.slices import Slice
    from ..shard.cuda import PrimaryContext

# Slabs, the sink that fills them, and what gives one's checksums.
_Made = tuple[Sequence[SlabWriter], Sink, Callable[[Any, Sequence[TensorEntry]], Checksums]]


class Filled(NamedTuple):
    """A sealed slab, owned by whoever has this, and the checksums of its tensors, in the plan's order."""

    fd: OwnedFd
    checksums: Checksums


class Devices:
    """The devices that slabs go to, in order, all GPUs or all host devices; a context manager.

    Making a GPU's context takes some 0.3 s, which is done in a thread from the start on, while headers are read.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="contexts")
        self._contexts: list[PrimaryContext] = []
        self._ready = self._thread.submit(self._set_up)

    @property
    def host(self) -> bool:
        return all(map(is_host, self.names))

    def ready(self) -> None:
        """Returns when all have a context. `NoSuchDevice`, `DeviceError`, `MissingDependency` for one that cannot."""
        self._ready.result()

    def close(self) -> None:
        self._thread.shutdown()
        while self._contexts:
            self._contexts.pop().close()

    def __enter__(self) -> Devices:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _set_up(self) -> None:
        if self.host:
            return
        from ..shard.cuda import PrimaryContext, ordinal_of

        for name in dict.fromkeys(self.names):
            self._contexts.append(PrimaryContext(ordinal_of(name)))


def fill_slabs(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    devices: Devices,
    staging: int,
    readers: Readers,
    progress: Callable[[int], None] = lambda done: None,
    replicas: Mapping[int, int] | None = None,
) -> tuple[list[Filled], LoadResult]:
    """Each slab of the plan on its device, from one pass over the files, and what was read.

    `staging` is in bytes; `readers` and `progress` are those of `pipeline.run`; the readers have ended when the slabs
    are sealed. `replicas` as of `replicas_of`: GPUs that can reach each other copy them from one another. The caller
    owns the descriptors. Every error leaves nothing: those of the pipeline, `DeviceFull`, `NoSuchDevice`, `DeviceError`
    for a replica that is none.
    """
    devices.ready()
    with ExitStack() as undo:
        if devices.host:
            slabs, sink, checksum = _on_hosts(plan, staging, undo)
        else:
            slabs, sink, checksum = _on_gpus(plan, devices.names, staging, undo, replicas)
        with readers, closing(sink):  # a slab that another process has mapped cannot be sealed
            result = run(plan, checkpoint, sink, readers, progress)
            readers.stop()  # they end while the checksums are computed
            checksums = [checksum(slab, slab_plan.entries) for slab, slab_plan in zip(slabs, plan.slabs, strict=True)]
            for slab, source in (replicas or {}).items():
                if checksums[slab] != checksums[source]:
                    problem = f"holds other bytes than {devices.names[source]}, of which it was to have a copy"
                    raise DeviceError(device=devices.names[slab], problem=problem)
        return _seal(slabs, checksums), result


def _on_hosts(plan: LoadPlan, staging: int, undo: ExitStack) -> _Made:
    slabs = []
    for slab_plan in plan.slabs:
        slabs.append(HostSlab(slab_plan.nbytes))
        undo.callback(slabs[-1].close)
    return slabs, HostSink(slabs, staging), lambda slab, entries: checksum_host(slab.view, entries)


def replicas_of(shards: Sequence[Sequence[Slice]]) -> dict[int, int]:
    """Which ranks hold the same as an earlier one, and the first such: replicas of a data parallel model."""
    first: dict[tuple[Slice, ...], int] = {}
    found = {}
    for number, slices in enumerate(shards):
        source = first.setdefault(tuple(slices), number)
        if source != number:
            found[number] = source
    return found


def _on_gpus(
    plan: LoadPlan, names: Sequence[str], staging: int, undo: ExitStack, replicas: Mapping[int, int] | None
) -> _Made:
    from ..shard.cuda import CudaSlab, ordinal_of
    from ..shard.cuda_checksum import checksum_slab
    from .cuda_sink import CudaSink

    slabs = []
    for name, slab_plan in zip(names, plan.slabs, strict=True):
        slabs.append(CudaSlab.create(ordinal_of(name), slab_plan.nbytes))
        undo.callback(slabs[-1].close)
    return (
        slabs,
        CudaSink(slabs, staging, replicas),
        lambda slab, entries: checksum_slab(slab.context, slab.address, entries),
    )


def _seal(slabs: Sequence[SlabWriter], checksums: Sequence[Checksums]) -> list[Filled]:
    """All sealed, or none left open."""
    with ExitStack() as on_error:
        filled = []
        for slab, sums in zip(slabs, checksums, strict=True):
            filled.append(Filled(slab.seal(), sums))
            on_error.callback(filled[-1].fd.close)
        on_error.pop_all()
    return filled
