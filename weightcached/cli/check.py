"""``weightcached check``: what the service would load where, with bytes, found without loading anything.

It opens every checkpoint as a load does, with all rules for files, cuts it for the model's ranks, and lays out each
rank's slab as a load does. Only headers are read.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.fileset import Checkpoint, open_checkpoint
from ..choosing import checkpoint_bytes, choose
from ..config import Config, ModelConfig, load_config
from ..devices import Device, default_devices, find_devices
from ..errors import CheckpointError, MissingDependency, ResourceError, SliceError
from ..fds import raise_descriptor_limit
from ..loader.cast import require_torch
from ..loader.keys import loaded_dtype, rank_fields
from ..loader.plan import plan_load
from ..parallel.slices import plan_slices
from ..text import printable
from .output import emit, human_bytes, print_json, print_table, rank_label

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank as it would be loaded: `bytes` of slab on its device, and the fields of its key that say which it is.

    `layers` is the range [first, last) of its pipeline stage, None for all. A refused model's ranks have no numbers.
    """

    device: str
    tensor_parallel_size: int
    tensor_parallel_rank: int
    pipeline_parallel_size: int
    pipeline_parallel_rank: int
    expert_parallel_size: int
    expert_parallel_rank: int
    data_parallel_size: int
    data_parallel_rank: int
    layers: tuple[int, int] | None = None
    bytes: int | None = None
    tensors: int | None = None


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model as it would be loaded: `bytes` on all devices together, `file_bytes` read from disk.

    `tensors` and `files` are those of the checkpoint; `dtype` is the type of most floating-point bytes once loaded.
    What is not known of a refused model is None; `problem` then says why. `chosen`: its devices are those that have the
    most memory free now; a service keeps a model where it is cached already.
    """

    name: str
    checkpoint: str
    preload: bool
    pin: bool
    ranks: tuple[RankReport, ...]
    bytes: int | None = None
    file_bytes: int | None = None
    tensors: int | None = None
    files: int | None = None
    dtype: str | None = None
    architecture: str | None = None
    ignored: tuple[str, ...] = ()
    publisher: tuple[str, ...] = ()
    chosen: bool = False
    problem: str | None = None

    def bytes_on(self, device: str) -> int:
        """What it takes of one device; a refused model takes nothing."""
        return sum(rank.bytes or 0 for rank in self.ranks if rank.device == device)


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device, in bytes. `needed` sums the models that are preloaded to it; `free` is now, and decides nothing:
    a service that runs already holds what it serves."""

    name: str
    model: str
    total: int
    free: int
    limit: int
    needed: int
    fits: bool


def check(path: Path, *, as_json: bool = False) -> int:
    """Prints the report. 0, or 1 if a model is refused or does not fit.

    `ConfigError` for a bad file, `NoSuchDevice` for a device that is not here; both before anything is printed.
    """
    raise_descriptor_limit()  # as the service and its loaders do: a set that they can open is none to refuse
    config = load_config(path)
    devices = _find(config)
    names = [device.name for device in devices]
    free = {device.name: device.memory.free for device in devices}
    sizes = {model.name: checkpoint_bytes(model.checkpoint) for model in config.models}
    chosen = choose(config.models, names, free, {}, sizes)
    placed = [(model, chosen.get(model.name) or model.devices_for(names)) for model in config.models]
    models = [replace(_report_model(model, where), chosen=model.name in chosen) for model, where in placed]
    reports = [_report_device(device, config, models) for device in devices]
    problems = [f"{model.name}: {model.problem}" for model in models if model.problem is not None]
    for report in reports:
        problems += _room_problems(report, models)
    if as_json:
        print_json(_as_object(path, models, reports, problems))
    else:
        _print_tables(models, reports)
    for problem in problems:
        print(f"weightcached: {printable(problem)}", file=sys.stderr)
    return 1 if problems else 0


def _find(config: Config) -> list[Device]:
    return default_devices() if config.devices == "all" else find_devices(list(config.devices))


def _report_model(model: ModelConfig, devices: tuple[str, ...]) -> ModelReport:
    here = model.ranks_here
    ranks = tuple(
        RankReport(device, **rank_fields(rank))
        for rank, device in zip(model.parallel.ranks()[here.start : here.stop], devices, strict=True)
    )
    report = ModelReport(model.name, str(model.checkpoint), model.preload, model.pin, ranks, publisher=model.publisher)
    try:
        with open_checkpoint(model.checkpoint) as checkpoint:
            return _measure(report, model, checkpoint)
    except (CheckpointError, ResourceError, SliceError, MissingDependency) as error:
        return replace(report, problem=str(error))


def _measure(report: ModelReport, model: ModelConfig, checkpoint: Checkpoint) -> ModelReport:
    tensors = list(checkpoint.tensors())
    if model.publisher:  # what its command makes of them only that knows
        return replace(
            report,
            file_bytes=checkpoint.nbytes,
            tensors=len(tensors),
            files=len(checkpoint.files),
            architecture=checkpoint.architecture,
            ignored=tuple(checkpoint.ignored),
        )
    dtype = None if model.dtype == "checkpoint" else model.dtype
    if dtype is not None:
        require_torch()
    shards = plan_slices(tensors, checkpoint.config, model.parallel, rules=model.rules, dtype=dtype)
    here = model.ranks_here
    slabs = plan_load(checkpoint, [shard.slices for shard in shards[here.start : here.stop]]).slabs
    return replace(
        report,
        ranks=tuple(
            replace(rank, layers=shard.layers, bytes=slab.nbytes, tensors=len(slab.entries))
            for rank, shard, slab in zip(report.ranks, shards[here.start : here.stop], slabs, strict=True)
        ),
        bytes=sum(slab.nbytes for slab in slabs),
        file_bytes=checkpoint.nbytes,
        tensors=len(tensors),
        files=len(checkpoint.files),
        dtype=loaded_dtype(checkpoint, shards),
        architecture=checkpoint.architecture,
        ignored=tuple(checkpoint.ignored),
    )


def _report_device(device: Device, config: Config, models: list[ModelReport]) -> DeviceReport:
    limit = config.memory_limit.bytes_of(device.memory.total)
    needed = sum(model.bytes_on(device.name) for model in models if model.preload)
    return DeviceReport(
        name=device.name,
        model=device.model,
        total=device.memory.total,
        free=device.memory.free,
        limit=limit,
        needed=needed,
        fits=needed <= limit,
    )


def _room_problems(device: DeviceReport, models: list[ModelReport]) -> list[str]:
    problems = []
    if not device.fits:
        problems.append(
            f"{device.name}: the preloaded models need {human_bytes(device.needed)} ({device.needed} bytes), "
            f"its limit is {human_bytes(device.limit)} ({device.limit} bytes); preload fewer or raise memory_limit"
        )
    # Preloaded models are in that sum. Others are loaded on demand, and evict whatever is not pinned.
    alone = {model.name: model.bytes_on(device.name) for model in models if not model.preload}
    pinned = sum(model.bytes_on(device.name) for model in models if model.preload and model.pin)
    for name, nbytes in alone.items():
        problem = f"{name}: needs {human_bytes(nbytes)} ({nbytes} bytes), "
        limit = f"the limit of {device.name} is {human_bytes(device.limit)} ({device.limit} bytes)"
        if nbytes > device.limit:
            problems.append(problem + limit)
        elif nbytes and nbytes > device.limit - pinned and device.fits:
            room = device.limit - pinned
            problems.append(f"{problem}{limit}, and pinned models leave {human_bytes(room)} ({room} bytes) of it")
    return problems


def _as_object(
    path: Path, models: list[ModelReport], devices: list[DeviceReport], problems: list[str]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "config": str(path),
        "models": [asdict(model) for model in models],
        "devices": [asdict(device) for device in devices],
        "problems": problems,
    }


def _print_tables(models: list[ModelReport], devices: list[DeviceReport]) -> None:
    if models:
        print_table(
            ["MODEL", "DEVICE", "RANK", "PRELOAD", "SIZE", "DTYPE", "TENSORS", "FILES", "IGNORED"],
            [_rank_row(model, rank) for model in models for rank in model.ranks],
            right=("SIZE", "TENSORS", "FILES"),
        )
        emit("")
    for model in models:
        if model.chosen:
            room = {device.name: human_bytes(device.free) for device in devices}
            where = ", ".join(f"{rank.device} ({room[rank.device]} free)" for rank in model.ranks)
            emit(f"{model.name}: of {len(devices)} devices the most memory is free on {where}; what is cached stays")
    if any(model.chosen for model in models):
        emit("")
    print_table(
        ["DEVICE", "KIND", "TOTAL", "LIMIT", "NEEDED", "FITS"],
        [_device_row(device) for device in devices],
        right=("TOTAL", "LIMIT", "NEEDED"),
    )


def _rank_row(model: ModelReport, rank: RankReport) -> list[object]:
    where = [model.name, rank.device, rank_label(asdict(rank)), "yes" if model.preload else "no"]
    if model.publisher and model.problem is None:
        return [*where, "by publisher", "-", "-", model.files, ", ".join(model.ignored) or "-"]
    if rank.bytes is None:
        return [*where, "refused", "-", "-", "-", "-"]
    ignored = ", ".join(model.ignored) or "-"
    return [*where, human_bytes(rank.bytes), model.dtype or "-", rank.tensors, model.files, ignored]


def _device_row(device: DeviceReport) -> list[object]:
    sizes = [human_bytes(size) for size in (device.total, device.limit, device.needed)]
    return [device.name, device.model, *sizes, "yes" if device.fits else "no"]
