"""Whether a new shard fits on a device, and which shards must go so that it does. Arithmetic only; nothing is evicted.

free         of the limit: what is not held, for all of a shard's bytes; of the device: what nobody uses, less what
             reservations will still take of it, for the publisher's peak, which is less where it frees as it goes
evictable    idle shards of other models that are not pinned: the least recently used go first, no more than needed
the model's  beside (default): the old generation stays until the next one is published, so both must fit
own shard    evict-first: it goes before any other model does, unless it is in use
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..devices import Memory
from ..errors import DeviceFull

if TYPE_CHECKING:
    from .catalogue import Catalogue, Shard

Replace = Literal["beside", "evict-first"]


class ModelPolicy(NamedTuple):
    """What the service says of one configured model. A model that it does not name is neither pinned nor kept.

    pin: never evicted to make room. keep: not until the service has loaded all that it loads together now.
    """

    pin: bool = False
    keep: bool = False
    replace: Replace = "beside"


Policies = Mapping[str, ModelPolicy]


class Need(NamedTuple):
    """What a publisher asks for: `nbytes` of the limit, and `peak` of what nobody uses on the device."""

    nbytes: int
    peak: int

    @classmethod
    def of(cls, nbytes: int, peak: int | None) -> Need:
        return cls(nbytes, nbytes if peak is None else peak)


def missing_bytes(catalogue: Catalogue, need: Need, memory: Memory) -> int:
    """Bytes that must come free before so much can be reserved; none where 0 or less.

    What reservations may still take of the device's free memory is not free, and nobody knows how much of it they have
    taken already: beside a publisher in mid work this errs on the safe side.
    """
    return max(need.nbytes - _by_limit(catalogue), need.peak - _by_device(catalogue, memory))


def _by_limit(catalogue: Catalogue) -> int:
    """Bytes that the limit leaves; negative where more is held than may be."""
    return catalogue.limit - catalogue.held


def _by_device(catalogue: Catalogue, memory: Memory) -> int:
    """Bytes that the device has left beside what is reserved."""
    return memory.free - catalogue.peaks


def choose_victims(catalogue: Catalogue, model: str, need: Need, memory: Memory) -> list[Shard]:
    """The shards to evict so that `need` of `model` fits; none if it fits as it is.

    `DeviceFull` if they would not fit then either: nothing is evicted in vain.
    """
    missing = missing_bytes(catalogue, need, memory)
    if missing <= 0:
        return []
    first = []
    own = catalogue.find(model)
    if own is not None and not own.leases and _policy(catalogue, model).replace == "evict-first":
        first = [own]
    victims = [*first, *_evictable(catalogue, model)]
    surplus = _bytes_of(victims) - missing
    if surplus < 0:
        raise device_full(catalogue, model, need, memory)
    for shard in reversed(victims):  # the most recently used first: they stay if what is left is enough
        if shard.head.nbytes <= surplus and shard not in first:
            victims.remove(shard)
            surplus -= shard.head.nbytes
    return victims


def device_full(catalogue: Catalogue, model: str, need: Need, memory: Memory) -> DeviceFull:
    """The refusal: what is needed, what is free or could be, who holds the rest, and what an operator can do."""
    by_limit, by_device = _by_limit(catalogue), _by_device(catalogue, memory)
    on_device = need.peak - by_device > need.nbytes - by_limit  # the device is what is short
    nbytes, free = (need.peak, by_device) if on_device else (need.nbytes, by_limit)
    evictable = _bytes_of(_evictable(catalogue, model))
    others = 0
    if on_device:  # the device has less than the books say; reservations may be allocated or not
        others = max(memory.total - memory.free - catalogue.held, 0)
    advice = []
    if others:
        advice.append(f"{others} bytes of the device are used by others")
    own = catalogue.find(model)
    if need.nbytes > catalogue.limit:
        advice.append("it is larger than memory_limit, whatever is evicted")
    else:
        if own is not None:
            advice += _about_own(catalogue, own, fits_without=nbytes <= free + evictable + own.head.nbytes)
        advice.append("evict a model" if others or on_device else "evict a model or raise memory_limit")
    return DeviceFull(
        device=catalogue.device,
        needed=nbytes,
        free=max(free, 0),
        evictable=evictable,
        limit=catalogue.limit,
        others=others,
        holders=[_holder(catalogue, shard) for shard in catalogue.shards]
        + [f"{item.model} {item.nbytes} bytes (loading)" for item in catalogue.reservations],
        advice="; ".join(advice),
    )


def _evictable(catalogue: Catalogue, model: str) -> list[Shard]:
    """Idle shards of other models that may go, the least recently used first."""
    idle = [shard for shard in catalogue.shards if not shard.closed and not shard.leases and shard.model != model]
    return sorted(
        (shard for shard in idle if not (_policy(catalogue, shard.model).pin or _policy(catalogue, shard.model).keep)),
        key=lambda shard: shard.used,
    )


def _about_own(catalogue: Catalogue, own: Shard, *, fits_without: bool) -> list[str]:
    """Why the model's own generation on the device stays, and what lets it go."""
    name = f"its generation {own.generation} of {own.head.nbytes} bytes"
    policy = catalogue.policies.get(own.model)
    if own.leases:
        return [f"{name} is in use, by {', '.join(own.holders)}"] if fits_without else []
    if policy is None or policy.replace == "evict-first" or not fits_without:
        return []
    return [f'{name} stays until the next one is there; replace = "evict-first" in its config lets it go before']


def _holder(catalogue: Catalogue, shard: Shard) -> str:
    notes = ["draining"] if shard.closed else []
    if shard.leases:
        notes.append(f"in use by {', '.join(shard.holders)}")
    elif _policy(catalogue, shard.model).pin:
        notes.append("pinned")
    elif _policy(catalogue, shard.model).keep:
        notes.append("preloaded")
    return f"{shard.model} {shard.head.nbytes} bytes" + (f" ({', '.join(notes)})" if notes else "")


def _policy(catalogue: Catalogue, model: str) -> ModelPolicy:
    return catalogue.policies.get(model, ModelPolicy())


def _bytes_of(shards: Iterable[Shard]) -> int:
    return sum(shard.head.nbytes for shard in shards)
