"""Whether a load from disk fits on a device beside what is cached there."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..client.duplicates import worker_status
from ..client.target import import_torch, resolve
from ..devices import device_memory
from ..errors import DeviceFull, WeightCacheError
from ..text import holder
from . import outlook

if TYPE_CHECKING:
    from .policy import Wanted

ANSWER_SECONDS = 10.0  # for a service that is there, where nothing is waited for
_log = logging.getLogger(__name__)


def refuse_beside(wanted: Wanted) -> None:
    """`DeviceFull` if a load from disk does not fit beside what is cached on the device, and would fit without it.

    To be called before such a load. It says what is needed, what is free, and which shards to evict. Where no service
    answers, nothing is cached, or the device is too small anyway, an engine that runs out of memory says so itself.
    """
    target = resolve(wanted.device)
    if target.ordinal is None:
        memory = device_memory(target.name)
        free, total = memory.free, memory.total
    else:
        free, total = import_torch("a load from disk").cuda.mem_get_info(target.ordinal)
    if wanted.nbytes <= free:
        return
    try:
        shards = worker_status(target.name, time.monotonic() + ANSWER_SECONDS)["shards"]
    except WeightCacheError as error:
        _log.debug("%s: what is cached there is not known: %s", target.name, error)
        return
    if free + sum(shard["nbytes"] for shard in shards) >= wanted.nbytes:
        raise _full(wanted, target.name, shards, free, total)


def _full(wanted: Wanted, device: str, shards: Sequence[outlook.Shard], free: int, total: int) -> DeviceFull:
    idle = [shard for shard in shards if shard["state"] == "cached" and not shard["leases"]]
    missing = wanted.nbytes - free
    chosen: list[str] = []
    for shard in sorted(idle, key=lambda shard: shard["nbytes"], reverse=True):  # the fewest that are enough
        if missing > 0:
            chosen.append(shard["model"])
            missing -= shard["nbytes"]
    advice = [f"{wanted.engine} would load {wanted.checkpoint or wanted.name} from disk, beside what is cached"]
    if chosen:
        advice.append("evict what nobody uses: " + " && ".join(f"weightcachectl evict {name}" for name in chosen))
    if missing > 0:
        advice.append(("that is not enough, " if chosen else "") + "end those who use the others, then evict those too")
    return DeviceFull(
        device=device,
        needed=wanted.nbytes,
        free=free,
        evictable=sum(shard["nbytes"] for shard in idle),
        limit=total,
        others=max(total - free - sum(shard["nbytes"] for shard in shards), 0),
        holders=[_held(shard) for shard in shards],
        advice="; ".join(advice),
    )


def _held(shard: outlook.Shard) -> str:
    users = [holder(lease["pid"], lease["command"], lease["ended"]) for lease in shard["leases"]]
    notes = [
        *(["draining"] if shard["state"] != "cached" else []),
        *([f"in use by {', '.join(users)}"] if users else []),
    ]
    return f"{shard['model']} {shard['nbytes']} bytes" + (f" ({', '.join(notes)})" if notes else "")
