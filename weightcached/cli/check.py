"""``weightcached check``: what the service would load where, with bytes, found without loading anything.

It opens every checkpoint as a load does, with all rules for files, and counts the slab's bytes as a load reserves them.
Only headers are read.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.fileset import Checkpoint, open_checkpoint
from ..config import Config, ModelConfig, load_config
from ..devices import Device, default_devices, find_devices
from ..errors import CheckpointError
from ..shard.manifest import ALIGNMENT
from ..text import printable
from .output import emit, human_bytes, print_json, print_table

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model as it would be loaded. `bytes` is its slab on the device, `file_bytes` what is read from disk.

    What is not known of a refused checkpoint is None; `problem` then says why.
    """

    name: str
    checkpoint: str
    device: str
    preload: bool
    bytes: int | None = None
    file_bytes: int | None = None
    tensors: int | None = None
    files: int | None = None
    dtype: str | None = None
    architecture: str | None = None
    ignored: tuple[str, ...] = ()
    problem: str | None = None


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
    config = load_config(path)
    devices = _find(config)
    models = [_report_model(model, device) for model, device in _placed(config, devices)]
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


def slab_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the slab that a load makes (`loader.plan`), without planning its reads, which takes seconds for TiBs."""
    end = 0
    for tensor in checkpoint.tensors():
        end = -(-end // ALIGNMENT) * ALIGNMENT + tensor.nbytes
    return end


def _find(config: Config) -> list[Device]:
    return default_devices() if config.devices == "all" else find_devices(list(config.devices))


def _placed(config: Config, devices: list[Device]) -> list[tuple[ModelConfig, str]]:
    names = [device.name for device in devices]
    return [(model, model.device_for(names)) for model in config.models]


def _report_model(model: ModelConfig, device: str) -> ModelReport:
    report = ModelReport(model.name, str(model.checkpoint), device, model.preload)
    known = asdict(report)
    try:
        with open_checkpoint(model.checkpoint) as checkpoint:
            known |= {
                "bytes": slab_bytes(checkpoint),
                "file_bytes": checkpoint.nbytes,
                "tensors": sum(1 for _ in checkpoint.tensors()),
                "files": len(checkpoint.files),
                "dtype": checkpoint.dtype,
                "architecture": checkpoint.architecture,
                "ignored": tuple(checkpoint.ignored),
            }
    except CheckpointError as error:
        known["problem"] = str(error)
    return ModelReport(**known)


def _report_device(device: Device, config: Config, models: list[ModelReport]) -> DeviceReport:
    limit = config.memory_limit.bytes_of(device.memory.total)
    needed = sum(model.bytes or 0 for model in models if model.device == device.name and model.preload)
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
    # Preloaded models are in that sum. Others are loaded on demand, into what room is left then.
    problems += [
        f"{model.name}: needs {human_bytes(model.bytes)} ({model.bytes} bytes), "
        f"the limit of {device.name} is {human_bytes(device.limit)} ({device.limit} bytes)"
        for model in models
        if model.device == device.name and not model.preload and model.bytes is not None and model.bytes > device.limit
    ]
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
            ["MODEL", "DEVICE", "PRELOAD", "SIZE", "DTYPE", "TENSORS", "FILES", "IGNORED"],
            [_model_row(model) for model in models],
            right=("SIZE", "TENSORS", "FILES"),
        )
        emit("")
    print_table(
        ["DEVICE", "KIND", "TOTAL", "LIMIT", "NEEDED", "FITS"],
        [_device_row(device) for device in devices],
        right=("TOTAL", "LIMIT", "NEEDED"),
    )


def _model_row(model: ModelReport) -> list[object]:
    preload = "yes" if model.preload else "no"
    if model.bytes is None:
        return [model.name, model.device, preload, "refused", "-", "-", "-", "-"]
    ignored = ", ".join(model.ignored) or "-"
    return [
        model.name,
        model.device,
        preload,
        human_bytes(model.bytes),
        model.dtype or "-",
        model.tensors,
        model.files,
        ignored,
    ]


def _device_row(device: DeviceReport) -> list[object]:
    sizes = [human_bytes(size) for size in (device.total, device.limit, device.needed)]
    return [device.name, device.model, *sizes, "yes" if device.fits else "no"]
