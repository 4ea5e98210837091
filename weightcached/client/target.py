"""Which device the caller means, by the name that the service knows it by."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..devices import is_device_name, is_host
from ..errors import DeviceError, MissingDependency, NoSuchDevice
from ..paths import check_runtime_dir, socket_path

if TYPE_CHECKING:
    import torch


_CUDA = re.compile(r"cuda(?::(\d+))?")


class Target(NamedTuple):
    """A device's name and how torch calls it in this process; `ordinal` is None for host memory."""

    name: str
    ordinal: int | None = None

    @property
    def torch_device(self) -> str:
        return "cpu" if self.ordinal is None else f"cuda:{self.ordinal}"


def import_torch(what: str) -> Any:
    """The torch module. `MissingDependency` says which extra brings it."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(package="torch", extra="torch", what=what) from None


def resolve(device: str | torch.device | None) -> Target:
    """The target that a caller's `device` means.

    "host-0", "cpu" (host-0), "GPU-<uuid>", "MIG-<uuid>", "cuda", "cuda:1", a torch.device, or None: torch's current
    CUDA device. Needs torch, and cuda-bindings for a GPU. `NoSuchDevice` names what this process sees; `DeviceError`
    when None means nothing here: host memory is never taken unasked.
    """
    torch = import_torch("attach")
    text = None if device is None else str(device)
    if text == "cpu":
        return Target("host-0")
    if text is not None and is_host(text) and is_device_name(text):
        return Target(text)
    visible = _visible(torch)
    if text is None:
        if not visible:
            raise DeviceError(
                device="no device given", problem="torch sees no CUDA device here; name one, such as device='host-0'"
            )
        text = "cuda"
    if match := _CUDA.fullmatch(text):
        ordinal = torch.cuda.current_device() if match[1] is None and visible else int(match[1] or 0)
        if ordinal < len(visible):
            return Target(visible[ordinal], ordinal)
    elif text in visible:
        return Target(text, visible.index(text))
    raise NoSuchDevice(device=text, known=[*visible, "host-0"])


def worker_socket(device: str) -> Path:
    """The checked path of the device's socket; `ServiceNotRunning` where its directory is missing."""
    if not os.environ.get("WEIGHTCACHED_SOCKET_TEMPLATE"):
        check_runtime_dir()
    return socket_path(device)


def _visible(torch: Any) -> list[str]:
    """Device names by ordinal, which is torch's and the driver's in one process."""
    if not torch.cuda.is_available():
        return []
    # The driver, not torch: for a MIG instance the CUDA runtime's property may hold the UUID of the GPU it is on.
    from ..shard.cuda import device_name

    return [device_name(ordinal) for ordinal in range(torch.cuda.device_count())]
