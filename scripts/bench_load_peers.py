"""The loaders that `scripts/bench load` compares. Each is called as its own documentation shows it, with its defaults.

A loader here is a function of the job that imports what it needs and returns `load`. `load()` is what is timed: it
returns when it has read everything; the caller then waits for the device and stops the clock, and later closes `held`.
The function that `load` returns gives the tensors by name, one dict for each rank; it is not timed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

Shards = list[dict[str, Any]]  # of each rank, torch tensors by name
Load = Callable[[], Callable[[], Shards]]


@dataclass(frozen=True)
class Job:
    """What to load. `ranks` is the tensor parallel size, `rank` one of them or None for all; `site`: see `prefetch`."""

    folder: str
    files: list[str]
    device: str  # "cuda:0" or "cpu"
    ranks: int = 1
    rank: int | None = None
    site: str | None = None


def weightcached(job: Job, held: ExitStack) -> Load:
    """Our loader without the service around it, from opening the files to full slabs. Its reader processes run already:
    in the loader they start while CUDA makes its context, which is not within anybody's clock."""
    return _weightcached(job, held, started=True)


def weightcached_starting(job: Job, held: ExitStack) -> Load:
    """The same with the start of its readers within the clock, as early as it can be."""
    return _weightcached(job, held, started=False)


def _weightcached(job: Job, held: ExitStack, *, started: bool) -> Load:
    from weightcached.checkpoint.fileset import open_checkpoint
    from weightcached.loader import pipeline
    from weightcached.loader.plan import plan_load
    from weightcached.loader.readers import MAX_READERS, Readers, reader_count
    from weightcached.parallel.ranks import Parallel
    from weightcached.parallel.slices import plan_slices

    host = job.device == "cpu"
    if host:
        from weightcached.loader.sink import HostSink
        from weightcached.shard.host import HostSlab
    else:
        from weightcached.loader.cuda_sink import CudaSink
        from weightcached.shard.cuda import CudaSlab, driver

        driver()
    early = held.enter_context(Readers(reader_count(MAX_READERS))) if started else None

    gc.disable()  # as the loader process does

    def load() -> Callable[[], Shards]:
        checkpoint = held.enter_context(open_checkpoint(job.folder))
        shards = plan_slices(list(checkpoint.tensors()), checkpoint.config, Parallel(tensor=job.ranks))
        if job.rank is not None:
            shards = (shards[job.rank],)
        plan = plan_load(checkpoint, [shard.slices for shard in shards])
        readers = early or held.enter_context(Readers(reader_count(plan.task_count)))
        slabs: list[Any] = []
        for slab_plan in plan.slabs:
            slabs.append(HostSlab(slab_plan.nbytes) if host else CudaSlab.create(0, slab_plan.nbytes))
            held.enter_context(closing(slabs[-1]))
        sink = HostSink(slabs) if host else CudaSink(slabs)
        held.enter_context(closing(sink))
        pipeline.run(plan, checkpoint, sink, readers)
        return lambda: [_views(slab, slab_plan.entries) for slab, slab_plan in zip(slabs, plan.slabs, strict=True)]

    return load


def _views(slab: Any, entries: Any) -> dict[str, Any]:
    import torch

    from weightcached.shard.dtypes import DTYPES

    if hasattr(slab, "view"):
        whole = torch.frombuffer(slab.view, dtype=torch.uint8)
    else:
        whole = torch.as_tensor(_DeviceMemory(slab.address, slab.nbytes), device="cuda:0")
    return {
        entry.name: whole[entry.offset : entry.offset + entry.nbytes]
        .view(getattr(torch, str(DTYPES[entry.dtype].torch_name)))
        .view(entry.shape)
        for entry in entries
    }


class _DeviceMemory:
    """Device memory as torch takes it (CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def safetensors(job: Job, held: ExitStack) -> Load:
    """`load_file`, file by file. On the CPU by "pread": its default, a mapping, would read nothing at all."""
    from safetensors.torch import load_file

    options = {"backend": "pread"} if job.device == "cpu" else {}

    def load() -> Callable[[], Shards]:
        tensors: dict[str, Any] = {}
        for path in job.files:
            tensors.update(load_file(path, device=job.device, **options))
        return lambda: [tensors]

    return load


def prefetch(job: Job, held: ExitStack) -> Load:
    """`safe_open(...).prefetch()` of safetensors 0.9, all files at once, since each has threads of its own.

    `job.site` is a folder with that version, where another one is installed.
    """
    return _prefetch(job, held, at_once=True)


def prefetch_serial(job: Job, held: ExitStack) -> Load:
    """The same, a file after the other."""
    return _prefetch(job, held, at_once=False)


def _prefetch(job: Job, held: ExitStack, *, at_once: bool) -> Load:
    if job.site:
        sys.path.insert(0, job.site)
    import safetensors

    if not hasattr(safetensors, "PrefetchLoader"):
        raise ImportError(f"safetensors {safetensors.__version__} has no prefetch; --prefetch-site: a folder with 0.9")

    def load() -> Callable[[], Shards]:
        tensors: dict[str, Any] = {}
        for paths in [job.files] if at_once else [[path] for path in job.files]:
            loaders = []
            for path in paths:
                file = held.enter_context(safetensors.safe_open(path, framework="pt", device=job.device))
                loaders.append(held.enter_context(file.prefetch()))
            for loader in loaders:
                tensors.update(iter(loader))
        return lambda: [tensors]

    return load


def instanttensor(job: Job, held: ExitStack) -> Load:
    """Its default: io_uring with O_DIRECT; all files in one plan, tensors that own their memory."""
    return _instanttensor(job, held, buffered=False)


def instanttensor_buffered(job: Job, held: ExitStack) -> Load:
    """Through the page cache, as it advises for repeated loading."""
    return _instanttensor(job, held, buffered=True)


def _instanttensor(job: Job, held: ExitStack, *, buffered: bool) -> Load:
    import instanttensor

    options = {"backend": instanttensor.BackendPolicy.BUFFERED} if buffered else {}

    def load() -> Callable[[], Shards]:
        opened = instanttensor.safe_open(list(job.files), framework="pt", device=job.device, **options)
        tensors = dict(held.enter_context(opened).tensors())
        return lambda: [tensors]

    return load


def fastsafetensors(job: Job, held: ExitStack) -> Load:
    """Without GPUDirect Storage; O_DIRECT unless $FASTSAFETENSORS_ODIRECT is 0."""
    from fastsafetensors import SafeTensorsFileLoader

    def load() -> Callable[[], Shards]:
        loader = held.enter_context(closing(SafeTensorsFileLoader(None, device=job.device, nogds=True)))
        loader.add_filenames({0: list(job.files)})
        buffers = held.enter_context(closing(loader.copy_files_to_device()))
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        return lambda: [tensors]

    return load


def runai(job: Job, held: ExitStack) -> Load:
    """Its streamer to the device, by default with O_DIRECT; $RUNAI_STREAMER_FS_STRATEGY says otherwise."""
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Callable[[], Shards]:
        streamer = held.enter_context(SafetensorsStreamer())
        streamer.stream_files(list(job.files), device=job.device)
        tensors = dict(streamer.get_tensors())
        return lambda: [tensors]

    return load


def get_slice(job: Job, held: ExitStack) -> Load:
    """safetensors' `get_slice` of each tensor, for each rank in turn. On the CPU by "pread", see `safetensors`."""
    from safetensors import safe_open

    options = {"backend": "pread"} if job.device == "cpu" else {}

    def load() -> Callable[[], Shards]:
        shards = []
        for rank in range(job.ranks) if job.rank is None else [job.rank]:
            tensors: dict[str, Any] = {}
            for path in job.files:
                with safe_open(path, framework="pt", device=job.device, **options) as file:
                    for name in file.offset_keys():
                        part = file.get_slice(name)
                        tensors[name] = part[cut(name, part.get_shape(), rank, job.ranks)]
            shards.append(tensors)
        return lambda: shards

    return load


def cut(name: str, shape: list[int], rank: int, ranks: int) -> tuple[slice, ...]:
    """What a rank holds of a tensor of the dense model: q, k, v, gate, up and the vocabulary by rows, o and down by
    columns, norms whole. Written for this model alone, so that the loader's rules are compared with something else."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    by_rows = part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    by_columns = part in ("o_proj", "down_proj")
    if not by_rows and not by_columns:
        return tuple(slice(0, length) for length in shape)
    rows, columns = shape
    if by_rows:
        return slice(rank * rows // ranks, (rank + 1) * rows // ranks), slice(0, columns)
    return slice(0, rows), slice(rank * columns // ranks, (rank + 1) * columns // ranks)


@dataclass(frozen=True)
class Peer:
    """A loader with the module that it needs, the environment it runs in, and what it can do.

    `caches` are those of "hot" and "cold" in which it is measured unless asked for by name.
    """

    prepare: Callable[[Job, ExitStack], Load]
    module: str
    gpu_only: bool = False
    caches: tuple[str, ...] = ("hot", "cold")
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def package(self) -> str:
        """What the module is installed as."""
        return self.module.replace("_", "-")


OURS = "weightcached"
OURS_STARTING = "weightcached-starting"
PEERS = {
    OURS: Peer(weightcached, "weightcached"),
    OURS_STARTING: Peer(weightcached_starting, "weightcached"),
    "safetensors": Peer(safetensors, "safetensors"),
    "prefetch": Peer(prefetch, "safetensors", gpu_only=True),
    "prefetch-serial": Peer(prefetch_serial, "safetensors", gpu_only=True, caches=("hot",)),
    "instanttensor": Peer(instanttensor, "instanttensor", gpu_only=True),
    "instanttensor-buffered": Peer(instanttensor_buffered, "instanttensor", gpu_only=True, caches=("hot",)),
    "fastsafetensors": Peer(fastsafetensors, "fastsafetensors", caches=("cold",)),
    "fastsafetensors-buffered": Peer(
        fastsafetensors, "fastsafetensors", caches=("hot",), environ={"FASTSAFETENSORS_ODIRECT": "0"}
    ),
    "runai": Peer(runai, "runai_model_streamer", caches=("cold",)),
    "runai-buffered": Peer(
        runai, "runai_model_streamer", caches=("hot",), environ={"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}
    ),
}
SLICERS = {OURS: PEERS[OURS], OURS_STARTING: PEERS[OURS_STARTING], "get_slice": Peer(get_slice, "safetensors")}
