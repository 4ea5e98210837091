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


def is_reserved(status: Mapping[str, Any], names: Collection[str], before: int | None = None) -> bool:
    """Whether somebody has room for a model of one of these names: it is about to be published.

    `status` is a worker's. With `before` only reservations of lower generations count.
    """
    return any(
        item["model"] in names and (before is None or item.get("generation", before) < before)
        for item in status["reservations"]
    )


def wait_for_publisher(device: str, names: Collection[str], end: float) -> dict[str, Any]:
    """The worker's status when nobody has room reserved under one of these names: it is published, or given up.

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


def gives_way(offer: Offer, generation: int | None, end: float) -> bool:
    """Whether another publisher of the same comes first: it is done, or has reserved before `generation` (None: ever).

    To be asked after the reservation: of those who ask at the same time, all but the first then hear of another one.
    """
    device = offer.target.name
    with Connection.open(worker_socket(device), device=device, timeout=seconds_left(end)) as connection:
        status = connection.ask(Status(), timeout=seconds_left(end))
    return is_reserved(status, [offer.name], generation) or _same_shard(status["shards"], offer.key) is not None


def take_duplicate(offer: Offer, end: float) -> Weights | None:
    """Puts the engine's tensors onto what somebody else has published of the same, after a wait for who is about to.

    None where there is nothing with this key, and nobody about to publish it. `TimedOut`; `ModelError` if not all
    bytes are the same, what `attach` raises if it is evicted in this moment: the tensors are as they were.
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
    names = _names(offer)
    slabs = weights.require_mapped("tensors are put onto them").slabs
    shared, own = [], [block for block in offer.plan.blocks if block.alone]
    for block in offer.plan.blocks:
        if block.moves:
            named = [(name, at) for tensor, at in block.places for name in names.get((id(tensor), block.slab, at), ())]
            if not named:  # its storage has named tensors, but it is none, and has no place in the other shard
                own.append(block)
                continue
            there = _there(block, {(theirs[name].slab, theirs[name].offset - at) for name, at in named}, weights)
            if there is None:
                raise _differ(weights, f"what shares bytes with {named[0][0]} lies in another way")
            if not _equal(there, slabs[there.slab]):
                raise _differ(weights, f"{named[0][0]} has other bytes")
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
        raise _differ(weights, f"only one of the two has {other[0]}")
    for name, entry in ours.items():
        if (entry.dtype, entry.shape) != (theirs[name].dtype, theirs[name].shape):
            found = f"{theirs[name].dtype} {list(theirs[name].shape)}"
            raise _differ(weights, f"{name} is {found} there, {entry.dtype} {list(entry.shape)} here")


def _names(offer: Offer) -> dict[tuple[int, int, int], list[str]]:
    """What the tensors are called that begin at a place of the plan: by identity, slab and byte.

    One that is laid out a second time, apart from what it shares bytes with, is not at its own place.
    """
    tensors = {item.name: item.tensor for item in offer.named}
    found: dict[tuple[int, int, int], list[str]] = {}
    for entry in offer.plan.entries:
        found.setdefault((id(tensors[entry.name]), entry.slab, entry.offset), []).append(entry.name)
    return found


def _there(block: Block, shifts: Collection[tuple[int, int]], weights: Weights) -> Block | None:
    """The block as it lies in the other shard, from which its named tensors are shifted; None where it cannot lie."""
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


def _differ(weights: Weights, problem: str) -> ModelError:
    head = weights.manifest
    there = f"generation {head.generation} on {head.device}"
    return ModelError(model=head.model, problem=f"{there} has the same key, but {problem}")
