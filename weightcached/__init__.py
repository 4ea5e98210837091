"""Model weights that outlive the engine: attach to what a host service keeps in device memory.

    weights = weightcached.attach("qwen3-8b", device="cuda:0")

Importing this package imports neither torch nor anything else that takes time; `attach` does, when it is called.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .errors import (
    CannotCut,
    CheckpointChanged,
    CheckpointError,
    ConfigError,
    ConnectionFailed,
    ConnectionLost,
    DeviceError,
    DeviceFull,
    DigestPending,
    EngineError,
    KeyMismatch,
    LoadFailed,
    LockHeld,
    ManifestError,
    MissingDependency,
    ModelElsewhere,
    ModelError,
    ModelFailed,
    ModelHeldBack,
    ModelInUse,
    ModelLoading,
    ModelNotLoaded,
    ModelReplaced,
    NoSuchDevice,
    NoSuchModel,
    NotPermitted,
    OtherContent,
    PeerRefused,
    ProtocolError,
    RankMismatch,
    ResourceError,
    RuntimeDirectoryError,
    ServiceNotRunning,
    SliceError,
    TimedOut,
    TooManyConnections,
    UnknownArchitecture,
    VersionMismatch,
    WeightCacheError,
    WrongDevice,
)

if TYPE_CHECKING:
    from .client.attach import Weights, attach
    from .client.publish import publish

__version__ = "0.1.0"

__all__ = [
    "CannotCut",
    "CheckpointChanged",
    "CheckpointError",
    "ConfigError",
    "ConnectionFailed",
    "ConnectionLost",
    "DeviceError",
    "DeviceFull",
    "DigestPending",
    "EngineError",
    "KeyMismatch",
    "LoadFailed",
    "LockHeld",
    "ManifestError",
    "MissingDependency",
    "ModelElsewhere",
    "ModelError",
    "ModelFailed",
    "ModelHeldBack",
    "ModelInUse",
    "ModelLoading",
    "ModelNotLoaded",
    "ModelReplaced",
    "NoSuchDevice",
    "NoSuchModel",
    "NotPermitted",
    "OtherContent",
    "PeerRefused",
    "ProtocolError",
    "RankMismatch",
    "ResourceError",
    "RuntimeDirectoryError",
    "ServiceNotRunning",
    "SliceError",
    "TimedOut",
    "TooManyConnections",
    "UnknownArchitecture",
    "VersionMismatch",
    "WeightCacheError",
    "Weights",
    "WrongDevice",
    "__version__",
    "attach",
    "publish",
]


def __getattr__(name: str) -> Any:
    if name in ("Weights", "attach"):
        from .client.attach import Weights, attach

        globals().update(Weights=Weights, attach=attach)
        return globals()[name]
    if name == "publish":
        from .client.publish import publish

        globals().update(publish=publish)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# 1 or map: whoever uses safetensors in this process is answered from the cache. Not imported by name, since nothing in
# the package may depend on it.
if os.environ.get("WEIGHTCACHED_SAFETENSORS"):
    import importlib

    importlib.import_module("weightcached.safetensors.hook").install_if_wanted()
