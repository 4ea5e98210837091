"""Which cached shard was loaded from exactly this file.

The shard must hold the file's tensors under their names with their bytes, all of them and whole: layout "checkpoint",
one rank, every layer, nothing cast, nothing cut by rules. It is the same file if device, inode, size and both times are
those that the loader saw; nothing is digested here, since reading the file is what this is to save.

A miss is logged once for each file and reason at INFO. A cache that is there and does not work is one WARNING.
"""

from __future__ import annotations

import logging
import os
import re
import time
from typing import Any, NamedTuple

import safetensors

from ..client.target import Target, resolve, worker_socket
from ..errors import NoSuchDevice, ServiceNotRunning, TimedOut, WeightCacheError
from ..shard.manifest import read_key, source_files
from ..wire.connection import Connection
from ..wire.messages import Status

Stat = tuple[int, int, int, int, int]

ANSWER_SECONDS = 5.0  # for a service that is there; a load from disk waits no longer for it
STALLED_SECONDS = 60.0  # one that did not answer is left alone for so long: a checkpoint has a hundred files
# What a cache that is broken may raise: its own errors, and what answers cause that are not as they should be.
TROUBLE = (
    WeightCacheError,
    safetensors.SafetensorError,  # of another file of the checkpoint, which is looked into
    OSError,
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
)
# As the library reads a device: "cuda" is the first one, not torch's current one (safetensors 0.8, lib.rs, Device).
_CUDA = re.compile(r"cuda(?::(\d+))?")
_WHOLE = {"layout": "checkpoint", "cast": None, "rules": None, "layers": None, "expert_placement": None} | {
    f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "expert", "data")
}

_log = logging.getLogger(__name__)
_told: set[tuple[str, ...]] = set()  # what has been logged
_stalled: dict[str, float] = {}  # socket -> when it may be asked again, monotonic seconds


class Found(NamedTuple):
    """A cached shard with the file's tensors; `key` is what to attach with."""

    target: Target
    socket: str
    model: str
    generation: int
    key: dict[str, Any]


def stat_of(path: Any) -> Stat | None:
    """What tells a file's content, through symbolic links; None for what cannot be looked at."""
    try:
        found = os.stat(path)
    except (OSError, TypeError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def target_of(device: Any) -> Target | None:
    """The cache's device for what the library takes as a device, None for one that is never cached (mps, xpu).

    "cpu" is host-0. A number is a CUDA device, as it is to torch where it is built for CUDA.
    """
    if device is None or device == "cpu":
        return resolve("cpu")
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    if not isinstance(device, str) or not (match := _CUDA.fullmatch(device)):
        return None
    return resolve(f"cuda:{match[1] or 0}")


def find(path: Any, stat: Stat, device: Any) -> Found | None:
    """The shard on `device` that was loaded from the file with this stat tuple; None has been logged with its reason.

    Never raises for a cache that is absent, unreachable or broken.
    """
    place = str(device)  # what a warning names; the socket, as soon as it is known
    try:
        target = target_of(device)
        if target is None:
            return None
        socket = worker_socket(target.name)
        place = str(socket)
        if _stalled.get(place, 0.0) > time.monotonic():
            return None
        with Connection.open(socket, device=target.name, timeout=ANSWER_SECONDS) as connection:
            status = connection.ask(Status(), timeout=ANSWER_SECONDS)
        found, reason = _choose(status["shards"], stat)
    except (ServiceNotRunning, NoSuchDevice) as error:
        miss(path, str(error))
        return None
    except TROUBLE as error:
        trouble(place, error)
        return None
    if found is None:
        miss(path, f"{reason} on {target.name}")
        return None
    return Found(target, place, found["model"], found["generation"], {**_WHOLE, "content": found["key"]["content"]})


def miss(path: Any, reason: str) -> None:
    """Says once why a file is read from disk."""
    if _first(str(path), reason):
        _log.info("%s is read from disk: %s", path, reason)


def trouble(place: str, error: Exception) -> None:
    """Says once that a cache does not work, and that files are read from disk. One that is too slow is left alone."""
    if isinstance(error, TimedOut):
        _stalled[place] = time.monotonic() + STALLED_SECONDS
    if _first(place, type(error).__name__):
        _log.warning("files are read from disk, the cache at %s does not work: %s", place, str(error) or repr(error))


def forget() -> None:
    """Everything may be said and asked again, as in a process that has opened no file."""
    _told.clear()
    _stalled.clear()


def _choose(shards: list[dict[str, Any]], stat: Stat) -> tuple[dict[str, Any] | None, str]:
    """The first shard that fits, else why none does."""
    reason = "no cached shard was loaded from this file"
    for shard in shards:
        if shard["state"] != "cached" or stat not in (file.stat for file in source_files(shard["files"])):
            continue
        differences = read_key(shard["key"]).differences(_WHOLE)
        if not differences:
            return shard, ""
        told = ", ".join(f"{field} {cached!r}" for field, (_, cached) in sorted(differences.items()))
        reason = f"{shard['model']} was loaded from it, but not as it is ({told}),"
    return None, reason


def _first(*what: str) -> bool:
    """Whether this is asked for the first time: then it is to be said."""
    if what in _told:
        return False
    _told.add(what)
    return True
