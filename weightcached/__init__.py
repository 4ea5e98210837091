"""Model weights that outlive the engine: attach to what a host service keeps in device memory.

    weights = weightcached.attach("qwen3-8b", device="cuda:0")

Importing this package imports neither torch nor anything else that takes time; `attach` does, when it is called.
"""

from __future__ import annotations

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
    EngineError,
    KeyMismatch,
    LoadFailed,
    LockHeld,
    ManifestError,
    MissingDependency,
    ModelError,
    ModelFailed,
    ModelInUse,
    ModelLoading,
    ModelNotLoaded,
    NoSuchDevice,
    NoSuchModel,
    NotPermitted,
    OtherContent,
    PeerRefused,
    ProtocolError,
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
    "EngineError",
    "KeyMismatch",
    "LoadFailed",
    "LockHeld",
    "ManifestError",
    "MissingDependency",
    "ModelError",
    "ModelFailed",
    "ModelInUse",
    "ModelLoading",
    "ModelNotLoaded",
    "NoSuchDevice",
    "NoSuchModel",
    "NotPermitted",
    "OtherContent",
    "PeerRefused",
    "ProtocolError",
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
]


def __getattr__(name: str) -> Any:
    if name in ("Weights", "attach"):
        from .client.attach import Weights, attach

        globals().update(Weights=Weights, attach=attach)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
