"""Every error that weightcached raises or sends over a socket: one tree.

    WeightCacheError
    ├── ConfigError               the config file, its keys or values
    ├── CheckpointError           files on disk that are not loadable weights
    │   └── CheckpointChanged     a file that changed while it was read
    ├── ResourceError             descriptors or memory that are lacking to read a checkpoint
    ├── SliceError                a model that cannot be cut for its ranks
    │   ├── UnknownArchitecture   no rules for it, or for one of its parameters
    │   └── CannotCut             sizes that the ranks do not divide
    ├── RuntimeDirectoryError     the runtime directory or a socket path in it
    ├── LockHeld                  another service serves the device
    ├── DeviceError               the device, its driver or its memory
    │   ├── NoSuchDevice
    │   ├── WrongDevice           memory or a peer that belongs to another device
    │   └── DeviceFull            more bytes than the device has
    ├── ConnectionFailed          the other side of a socket
    │   ├── ServiceNotRunning
    │   ├── ConnectionLost
    │   └── TimedOut
    ├── ProtocolError             a message that breaks the protocol
    │   ├── PeerRefused           a peer of another user
    │   │   └── TooManyConnections
    │   └── VersionMismatch
    ├── NotPermitted              an operation that is not for the peer's user
    ├── ModelError                what was asked of a model
    │   ├── NoSuchModel
    │   │   ├── ModelNotLoaded    configured, but not asked for yet
    │   │   ├── ModelElsewhere    its ranks belong on other devices
    │   │   ├── OtherContent      files of the same sizes are cached, with other bytes
    │   │   └── DigestPending     files of the same sizes are cached, whose bytes are not known yet
    │   ├── ModelLoading
    │   │   └── ModelHeldBack     cached, but the nodes of a cluster have not agreed on it yet
    │   ├── ModelFailed           its last load failed, or it was lost
    │   ├── KeyMismatch           cached, but not what was asked for
    │   │   └── RankMismatch      another rank, or for other parallel sizes
    │   ├── ModelReplaced         what is cached by its name now is not what was mapped
    │   ├── ModelInUse
    │   └── LoadFailed            raised by the loader, carries the reason
    ├── ManifestError             a manifest that does not fit its slabs
    ├── EngineError               an engine adapter that cannot take the weights
    └── MissingDependency         an optional package that is not installed

Each class holds its wire code, its exit code and its sentence, a format string over the error's fields, which are
attributes too (``error.needed``). An error crosses a socket as code and fields, and arrives as the same class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar


class WeightCacheError(Exception):
    """The root. ``problem`` is a whole sentence when no subclass fits better."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    sentence: ClassVar[str] = "{problem}"
    unsent: ClassVar[Mapping[str, Any]] = {}  # fields that older versions do not send, as their sentence had them

    def __init__(self, /, **fields: Any) -> None:
        super().__init__()
        self.fields = fields

    def __str__(self) -> str:
        try:
            return self.sentence.format_map({k: _readable(v) for k, v in {**self.unsent, **self.fields}.items()})
        except (KeyError, ValueError, TypeError) as problem:
            # A peer of another version may send fewer or other fields than this version's sentence is made of.
            return f"{self.code}: {self.fields} ({type(problem).__name__}: {problem})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(type(self), **self.fields), ())


class ConfigError(WeightCacheError):
    """Fields: file (path or None), problem."""

    code = "bad-config"
    exit_code = 78  # EX_CONFIG of sysexits.h: the unit is not restarted on it
    sentence = "{file}: {problem}"


class CheckpointError(WeightCacheError):
    """Fields: file (path), problem (the rule with what was expected and found)."""

    code = "bad-checkpoint"
    sentence = "{file}: {problem}"


class CheckpointChanged(CheckpointError):
    """Fields: file, problem. The load that raises it has published nothing."""

    code = "checkpoint-changed"


class ResourceError(WeightCacheError):
    """Fields: file (path that was read), errno (of the kernel, such as EMFILE), problem. The file may be good."""

    code = "out-of-resources"
    sentence = "{file}: {problem}"


class SliceError(WeightCacheError):
    """Fields: problem."""

    code = "cannot-slice"


class UnknownArchitecture(SliceError):
    """Fields: architecture, problem. Nothing is ever cut by a guess."""

    code = "unknown-architecture"
    sentence = "{architecture}: {problem}; give rules = [...] for it, or load it whole"


class CannotCut(SliceError):
    """Fields: parameter, problem (with the sizes), largest (the next smaller tensor_parallel that fits, None: none)."""

    code = "cannot-cut"
    sentence = "{parameter} cannot be cut: {problem}; the next smaller tensor_parallel that fits the model: {largest}"


class RuntimeDirectoryError(WeightCacheError):
    """Fields: path, problem."""

    code = "bad-runtime-directory"
    sentence = "{path}: {problem}"


class LockHeld(WeightCacheError):
    """Fields: device, instance, pid."""

    code = "lock-held"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h
    sentence = "{device} is served by weightcached@{instance}, pid {pid}; stop that service or use --take-over"


class DeviceError(WeightCacheError):
    """Fields: device, problem."""

    code = "device-error"
    sentence = "{device}: {problem}"


class NoSuchDevice(DeviceError):
    """Fields: device, known (list of device names)."""

    code = "no-such-device"
    exit_code = 4
    sentence = "no device {device}; devices here: {known}"


class WrongDevice(DeviceError):
    """Fields: wanted, found (device names or UUIDs)."""

    code = "wrong-device"
    exit_code = 4
    sentence = "wrong device: wanted {wanted}, found {found}"


class DeviceFull(DeviceError):
    """Fields: device, needed, free, evictable, limit, others, holders ("name bytes" strings), advice.

    In bytes: `evictable` would give way by itself, and is too little; `others` is in use beside all of `holders`, or 0.
    """

    code = "device-full"
    sentence = (
        "{device} has no room: needed {needed} bytes, free {free} bytes of a limit of {limit}, "
        "evictable {evictable} bytes; held by: {holders}; {advice}"
    )


class ConnectionFailed(WeightCacheError):
    """Fields: path (socket path), problem."""

    code = "connection-failed"
    sentence = "{path}: {problem}"


class ServiceNotRunning(ConnectionFailed):
    """Fields: path, start (the command that starts a service)."""

    code = "service-not-running"
    exit_code = 3
    sentence = "no service answers at {path}; start it: {start}"
    unsent: ClassVar[Mapping[str, Any]] = {"start": "systemctl --user start weightcached@INSTANCE"}


class ConnectionLost(ConnectionFailed):
    """Fields: path, problem."""

    code = "connection-lost"


class TimedOut(ConnectionFailed):
    """Fields: path, seconds, waited_for."""

    code = "timed-out"
    sentence = "{path}: waited {seconds:.1f} s for {waited_for}"


class ProtocolError(WeightCacheError):
    """Fields: problem."""

    code = "protocol-error"
    sentence = "protocol: {problem}"


class PeerRefused(ProtocolError):
    """Fields: uid, allowed (list of uids)."""

    code = "peer-refused"
    sentence = "peer of uid {uid} refused; allowed: {allowed}"


class TooManyConnections(PeerRefused):
    """Fields: uid, limit (connections that this user may have at once)."""

    code = "too-many-connections"
    sentence = "uid {uid} has {limit} connections here, all that it may have; close some"


class VersionMismatch(ProtocolError):
    """Fields: ours, theirs ("protocol N of weightcached X")."""

    code = "version-mismatch"
    sentence = "protocol versions differ: {ours} here, {theirs} there; upgrade the older side"


class NotPermitted(WeightCacheError):
    """Fields: op, uid (the peer's), allowed (operations)."""

    code = "not-permitted"
    sentence = "{op} is not for uid {uid}, only for the service's own user; others may: {allowed}"


class ModelError(WeightCacheError):
    """Fields: model, problem."""

    code = "model-error"
    sentence = "{model}: {problem}"


class NoSuchModel(ModelError):
    """Fields: model, device, known (names)."""

    code = "no-such-model"
    exit_code = 4
    sentence = "no model {model} on {device}; there: {known}"


class ModelNotLoaded(NoSuchModel):
    """Fields: model, device."""

    code = "model-not-loaded"
    sentence = "{model} is configured for {device} but not loaded; use on_miss='wait' or `weightcachectl load {model}`"


class ModelElsewhere(NoSuchModel):
    """Fields: model, device, devices (of its ranks, in their order), advice."""

    code = "model-elsewhere"
    sentence = "{model} belongs on {devices}, and is not on {device}; {advice}"


class OtherContent(NoSuchModel):
    """Fields: model, device, known, cached (compared with), file, digest, recorded, differing, files (numbers)."""

    code = "other-content"
    sentence = (
        "{file} is not what {cached} on {device} was loaded from: its digest is {digest}, recorded is {recorded} "
        "({differing} of {files} files differ); load it as a model of its own; if it has changed: weightcachectl reload"
    )


class DigestPending(NoSuchModel):
    """Fields: model, device, known, cached (the models that may be it)."""

    code = "digest-pending"
    sentence = "no model {model} on {device} yet: what {cached} was loaded from is being digested; on_miss='wait' waits"


class ModelLoading(ModelError):
    """Fields: model, device, progress (0..1)."""

    code = "model-loading"
    sentence = "{model} is still loading on {device} ({progress:.0%}); on_miss='wait' or `weightcachectl wait` waits"


class ModelHeldBack(ModelLoading):
    """Fields: model, device, progress, reason (why the nodes have not agreed). Who names its content gets it."""

    code = "model-held-back"
    sentence = "{model} is cached on {device} but not given out: {reason}; `weightcachectl status` shows the nodes"


class ModelFailed(ModelError):
    """Fields: model, device, reason (why its last load failed, or its device or its shard was lost)."""

    code = "model-failed"
    sentence = "{model} is not on {device}: {reason}"


class KeyMismatch(ModelError):
    """Fields: model, differences (field -> [wanted, cached])."""

    code = "key-mismatch"
    sentence = (
        "{model} is cached, but not as asked for: {differences} (wanted, cached); "
        "ask for what is cached, with tensor_parallel=(rank, size), dtype= or key=, or load what was asked for"
    )


class RankMismatch(KeyMismatch):
    """Fields: model, differences (field -> [wanted, cached]), advice."""

    code = "rank-mismatch"
    sentence = "{model} is cached, but not as asked for: {differences} (wanted, cached); {advice}"


class ModelReplaced(ModelError):
    """Fields: model, device, wanted, found ("generation N of <time>")."""

    code = "model-replaced"
    sentence = "{model} on {device} is {found} now, {wanted} was unmapped; end this engine's use of it and attach again"


class ModelInUse(ModelError):
    """Fields: model, device, holders (strings "pid 42 (python)")."""

    code = "model-in-use"
    exit_code = 5
    sentence = "{model} on {device} is in use by {holders}; end them or use --force"


class LoadFailed(ModelError):
    """Fields: model, device, reason."""

    code = "load-failed"
    sentence = "loading {model} to {device} failed: {reason}"


class ManifestError(WeightCacheError):
    """Fields: problem."""

    code = "bad-manifest"
    sentence = "manifest refused: {problem}"


class EngineError(WeightCacheError):
    """Fields: problem."""

    code = "engine-error"


class MissingDependency(WeightCacheError):
    """Fields: package, extra, what."""

    code = "missing-dependency"
    sentence = "{what} needs {package}: pip install 'weightcached[{extra}]'"


def _readable(value: Any) -> Any:
    """A field as a person reads it: lists joined, nothing as "none"."""
    items = [f"{key} {item}" for key, item in value.items()] if isinstance(value, dict) else value
    if isinstance(items, list | tuple | set):
        return ", ".join(map(str, items)) or "none"
    return "none" if items is None else items


BY_CODE: dict[str, type[WeightCacheError]] = {
    cls.code: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, WeightCacheError)
}


def to_wire(error: WeightCacheError) -> dict[str, Any]:
    """Code, fields, and the sentence for a peer that does not know the code. What JSON has not becomes its text."""
    return {"code": error.code, "fields": json.loads(json.dumps(error.fields, default=str)), "message": str(error)}


def from_wire(data: dict[str, Any]) -> WeightCacheError:
    """The error that a peer sent. An unknown code becomes the root class with the peer's sentence."""
    cls, fields = BY_CODE.get(str(data.get("code"))), data.get("fields")
    if cls is None or not isinstance(fields, dict):
        return WeightCacheError(problem=str(data.get("message", "an error without a message")))
    return cls(**fields)
