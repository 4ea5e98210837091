"""The same weights from several publishers: the first one's copy is for all of them.

Engines that start together miss together, and each has its own copy when it publishes. A worker numbers reservations
in order, so whoever has reserved looks who has reserved the same name before, gives way to that one, and takes its copy
when it is there; if that one gives up, the next one publishes.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, TimedOut
from ..shard.key import ShardKey
from ..shard.manifest import TensorEntry, read_key
from ..wire.connection import Connection, seconds_left
from ..wire.messages import Status, Subscribe
from .attach import attach
from .moving import free_cached, pieces, rebind, set_apart
from .offer import Offer
from .storages import Block
from .target import worker_socket
from .weights import Weights

if TYPE_CHECKING:
    import torch

_LOOK_AGAIN = 0.5  # seconds; a reservation that is given up announces nothing
_LAST_LOOK = 1.0  # seconds at least for an answer: at the end it is to be known what was waited for
_COMPARED_AT_ONCE = 1 << 26  # bytes; a comparison on a device takes as much memory again
_log = logging.getLogger(__name__)


def worker_status(device: str, end: float) -> dict[str, Any]:
    """What the worker of `device` (a name such as "host-0") holds now, and as "instance" whose worker it is.

    Raises what `Connection` raises, when `end` (monotonic seconds) passes too.
    """
    with Connection.open(worker_socket(device), device=device, timeout=seconds_left(end)) as connection:
        return connection.ask(Status(), timeout=seconds_left(end))


def is_reserved(status: Mapping[str, Any], names: Collection[str], before: int | None = None) -> bool:
    """Whether somebody has reserved room for a model of one of these names: it is about to be published.

    `status` is a worker's. With `before`, a generation, only reservations with a lower one count.
    """
    return any(
        item["model"] in names and (before is None or item.get("generation", before) < before)
        for item in status["reservations"]
    )


def wait_for_publisher(device: str, names: Collection[str], end: float) -> dict[str, Any]:
    """Waits until nobody has room reserved under one of these names, and gives the worker's status then.

    What was reserved is published by then, or given up.

    `TimedOut` at `end` (monotonic seconds), and what `Connection` raises.
    """
    started = time.monotonic()
    path = worker_socket(device)
    with Connection.open(path, device=device, timeout=seconds_left(end)) as connection:
        status = connection.ask(Subscribe(), timeout=seconds_left(end))
        while is_reserved(status, names):
            if end <= time.monotonic():
                waited_for = f"the publisher of {' or '.join(names)}, which has reserved room"
                raise TimedOut(path=str(path), seconds=time.monotonic() - started, waited_for=waited_for)
            if select.select([connection], [], [], min(seconds_left(end), _LOOK_AGAIN))[0]:
                connection.next_event(_LAST_LOOK)
            status = connection.ask(Status(), timeout=max(seconds_left(end), _LAST_LOOK))
    return status


def another_comes_first(offer: Offer, generation: int | None, end: float) -> bool:
    """Whether another publisher of the same is done, or has reserved room with a generation below this one.

    `generation`: that of this publisher's own reservation, None where it has none; then any other one counts.

    Ask after the reservation: of all who reserve at the same time, all but the first then see an earlier one.
    """
    status = worker_status(offer.target.name, end)
    return is_reserved(status, [offer.name], generation) or _same_shard(status["shards"], offer.key) is not None


def take_duplicate(offer: Offer, end: float) -> Weights | None:
    """Puts the engine's tensors onto a shard that another publisher has with the same key, and gives its `Weights`.

    Waits first until nobody is about to publish the name; None if no shard has this key then. After an error the
    tensors are as they were: `TimedOut`, `ModelError` if not all bytes are the same, what `attach` raises if the shard
    is evicted in this moment.
    """
    device = offer.target.name
    status = wait_for_publisher(device, [offer.name], end)
    shard = _same_shard(status["shards"], offer.key)
    if shard is None:
        return None
    weights = attach(shard["model"], device=device, key=asdict(offer.key), timeout=seconds_left(end))
    with ExitStack() as undo:
        undo.callback(weights.close)
        _move_onto(offer, weights)
        undo.pop_all()
    _log.info("%s has been published on %s by another process, as generation %d of %s; this one runs from that copy",
              offer.name, device, weights.generation, weights.manifest.model)  # fmt: skip
    return weights


def _same_shard(shards: Sequence[Mapping[str, Any]], key: ShardKey) -> Mapping[str, Any] | None:
    """A cached shard with exactly this key, whatever its name."""
    wanted = asdict(key)
    cached = (shard for shard in shards if shard["state"] == "cached")
    return next((shard for shard in cached if not read_key(shard["key"]).differences(wanted)), None)


def _move_onto(offer: Offer, weights: Weights) -> None:
    """The engine's own tensors onto the slabs of `weights`, after all bytes were compared."""
    theirs = {entry.name: entry for entry in weights.table.tensors}
    _require_same_tensors(offer, theirs, weights)
    names = _names_by_place(offer)
    slabs = weights.require_mapped("tensors are put onto them").slabs
    shared, own = [], [block for block in offer.plan.blocks if block.alone]
    for block in offer.plan.blocks:
        if block.moves:
            named = [(name, at) for tensor, at in block.places for name in names.get((id(tensor), block.slab, at), ())]
            if not named:  # its storage has named tensors, but it is none, and has no place in the other shard
                own.append(block)
                continue
            there = _as_theirs(block, {(theirs[name].slab, theirs[name].offset - at) for name, at in named}, weights)
            if there is None:
                raise _difference(weights, f"what shares bytes with {named[0][0]} lies in another way")
            if not _equal(there, slabs[there.slab]):
                raise _difference(weights, f"{named[0][0]} has other bytes")
            shared.append(there)
    for block in shared:
        rebind(block, slabs[block.slab].untyped_storage())
    for block in own:
        set_apart(block)
    free_cached(offer.target)


def _require_same_tensors(offer: Offer, theirs: Mapping[str, TensorEntry], weights: Weights) -> None:
    """`ModelError` unless both have the same names, of the same types and shapes."""
    ours = {entry.name: entry for entry in offer.plan.entries}
    if other := sorted(ours.keys() ^ theirs.keys()):
        raise _difference(weights, f"only one of the two has {other[0]}")
    for name, entry in ours.items():
        if (entry.dtype, entry.shape) != (theirs[name].dtype, theirs[name].shape):
            found = f"{theirs[name].dtype} {list(theirs[name].shape)}"
            raise _difference(weights, f"{name} is {found} there, {entry.dtype} {list(entry.shape)} here")


def _names_by_place(offer: Offer) -> dict[tuple[int, int, int], list[str]]:
    """The names of the tensors, by their identity and where the plan puts them: slab and byte.

    The place is not where its block has it for a tensor that the plan lays out a second time (`storages._apart`).
    """
    tensors = {item.name: item.tensor for item in offer.named}
    found: dict[tuple[int, int, int], list[str]] = {}
    for entry in offer.plan.entries:
        found.setdefault((id(tensors[entry.name]), entry.slab, entry.offset), []).append(entry.name)
    return found


def _as_theirs(block: Block, shifts: Collection[tuple[int, int]], weights: Weights) -> Block | None:
    """The block at its place in the other shard; None where it has none.

    `shifts`: of each of its named tensors the slab there, and how many bytes further it lies there than here.
    """
    if len(shifts) != 1:
        return None
    ((slab, shift),) = shifts
    there = replace(block, slab=slab, offset=block.offset + shift)
    inside = 0 <= there.offset <= weights.manifest.slabs[slab].nbytes - block.nbytes
    aligned = all(at % tensor.element_size() == 0 for tensor, at in there.places)
    return there if inside and aligned else None


def _equal(block: Block, slab: torch.Tensor) -> bool:
    """Whether the block's bytes are those of the slab where it would lie."""
    for place, piece in pieces(block):
        for start in range(0, piece.numel(), _COMPARED_AT_ONCE):
            part = piece[start : start + _COMPARED_AT_ONCE]
            if not part.equal(slab[place + start : place + start + part.numel()]):
                return False
    return True


def _difference(weights: Weights, problem: str) -> ModelError:
    """The error for a shard that has the same key and is not the same."""
    head = weights.manifest
    there = f"generation {head.generation} on {head.device}"
    return ModelError(model=head.model, problem=f"{there} has the same key, but {problem}")
