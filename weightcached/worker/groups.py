"""Ranks on other devices: what a client is told that asks for another rank, or for other parallel sizes, than are here.

What a worker knows of them is the service's word on the model (`states`), `state["group"]`:

    {"ranks": [device, ...],      of the config's slicing, in rank order, those of this node
     "first": rank,               the number of the first of them
     "sizes": [data, pipeline, tensor],
     "order": [device, ...]}      where ranks of another slicing go; empty unless the config has on_mismatch = "reload"

and `state["belongs"]`, the devices of its ranks on this node in their order, where this device is none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import KeyMismatch, ModelElsewhere, ModelNotLoaded, NoSuchModel, RankMismatch, WeightCacheError
from ..parallel.slicings import AXES, Sizes, parse_name, wanted_rank, wanted_sizes
from ..shard.key import ShardKey
from ..wire.messages import Attach
from .catalogue import Shard
from .states import State


def meant(request: Attach, state: State, device: str) -> Attach:
    """The request as the service can serve it: under the name of another slicing, where the config allows one.

    `RankMismatch` for a slicing that has no rank for this device, with the device that its rank would be on.
    """
    group = state.get("group")
    if not group or device not in group["order"]:
        return request
    own = Sizes(*group["sizes"])
    sizes = wanted_sizes(request.key, own)
    if sizes == own:
        return request
    order = group["order"]
    if sizes.world > len(order):
        advice = f"{sizes.world} ranks need as many devices of one kind, and {len(order)} are served"
        raise other_sizes(request, state, advice)
    number = wanted_rank(request.key, sizes)
    if number is None:
        raise other_sizes(request, state, f"no rank of {sizes.world} is asked for")
    if order[number] != device:
        there = f"the service puts {_named(request.key, sizes)} on {order[number]}, not on {device}"
        raise other_sizes(request, state, f"{there}; attach it with device={order[number]!r}")
    return replace(request, model=sizes.name(request.model))


def absent_now(error: WeightCacheError, asked: Attach, request: Attach, state: State) -> WeightCacheError:
    """Why `request`, what `meant` made of what was `asked`, is not here: `error`, or that nobody has waited for it."""
    if asked is request or type(error) not in (NoSuchModel, ModelNotLoaded):
        return error
    return other_sizes(asked, state, f"with on_miss='wait' the service loads this slicing, as {request.model}")


def check_key(shard: Shard, request: Attach, state: State, device: str) -> None:
    """`KeyMismatch`, or `RankMismatch`, unless the shard, which is on `device`, is what the client wants."""
    if differences := shard.head.key.differences(request.key):
        advice = _advice(set(differences), shard.head.key, request.key, state, device)
        if advice is None:
            raise KeyMismatch(model=shard.model, differences=differences)
        raise RankMismatch(model=shard.model, differences=differences, advice=advice)


def elsewhere(request: Attach, state: State, device: str) -> ModelElsewhere | None:
    """The error of who asks a device for a model all of whose ranks belong on others; None where that is not known."""
    devices, group = state.get("belongs"), state.get("group")
    if not devices:
        return None
    own = Sizes(*group["sizes"]) if group else Sizes(1, 1, 1)
    if group is None or own.world == 1:
        advice = f"attach it with device={devices[0]!r}"
    else:
        number = wanted_rank(request.key, own) if wanted_sizes(request.key, own) == own else None
        here = dict(enumerate(devices, group["first"]))
        if number is None:
            advice = "attach " + ", ".join(f"rank {rank} with device={name!r}" for rank, name in here.items())
        elif number in here:
            advice = f"attach {_named(request.key, own)} with device={here[number]!r}"
        else:
            advice = f"{_named(request.key, own)} is on another node"
    return ModelElsewhere(model=request.model, device=device, devices=devices, advice=advice)


def may_be_made(name: str, states: Mapping[str, State], device: str) -> bool:
    """Whether the service, which has not named it yet, can load it as another slicing of a model, for this device."""
    parsed = parse_name(name)
    group = states.get(parsed[0], {}).get("group") if parsed and name not in states else None
    return bool(group and device in group["order"])


def other_sizes(request: Attach, state: State, advice: str) -> RankMismatch:
    """The error for sizes that are not the config's."""
    own = Sizes(*state["group"]["sizes"])
    wanted = wanted_sizes(request.key, own)
    differences = {
        f"{axis}_parallel_size": [theirs, ours] for axis, theirs, ours in zip(AXES, wanted, own, strict=True)
        if theirs != ours
    }  # fmt: skip
    return RankMismatch(model=request.model, differences=differences, advice=advice)


def _advice(differing: set[str], key: ShardKey, wanted: Mapping[str, Any], state: State, device: str) -> str | None:
    """What to do where only the rank or the parallel sizes are others; else None."""
    axes = {f"{axis}_parallel_{part}" for axis in AXES for part in ("size", "rank")}
    if not differing & axes or not differing <= axes | {"expert_parallel_size", "expert_parallel_rank"}:
        return None
    own = Sizes(*(getattr(key, f"{axis}_parallel_size") for axis in AXES))
    here = _named({name: getattr(key, name) for name in axes}, own)
    sizes = wanted_sizes(wanted, own)
    if sizes != own:
        group = state.get("group")
        if group and len(group["ranks"]) < Sizes(*group["sizes"]).world:  # with several nodes a model has one slicing
            other = "its sizes in the configs of all nodes"
        else:
            other = 'its sizes in the config, or on_mismatch = "reload" there'
        return f"{device} has {here}; start the engine with these sizes, {_asked_by(key)}, or give the model {other}"
    number = wanted_rank(wanted, sizes)
    advice = f"{device} has {here}, asked for was {_named(wanted, sizes)}"
    group = state.get("group")
    if group and number is not None and Sizes(*group["sizes"]) == sizes:
        place = number - group["first"]
        if 0 <= place < len(group["ranks"]):
            there = group["ranks"][place]
            where = "is on" if state.get("whole", True) else "belongs on"
            advice += f", which {where} {there}: attach it with device={there!r}"
        else:
            advice += ", which is on another node"
    return advice


def _asked_by(key: ShardKey) -> str:
    """How `attach` is asked for a rank of these sizes. Only those of tensor parallel have an argument of their own."""
    axes = [axis for axis in (*AXES, "expert") if axis != "tensor" and getattr(key, f"{axis}_parallel_size") > 1]
    asked = ", ".join(
        f'"{axis}_parallel_size": {getattr(key, f"{axis}_parallel_size")}, "{axis}_parallel_rank": ...' for axis in axes
    )
    parts = ["tensor_parallel=(rank, size)"] if not axes or key.tensor_parallel_size > 1 else []
    return " and ".join([*parts, f"key={{{asked}}}"] if axes else parts)


def _named(key: Mapping[str, Any], sizes: Sizes) -> str:
    """ "tensor parallel rank 1 of 2"; of the whole model "the whole model"."""
    parts = [
        f"{axis} parallel rank {key.get(f'{axis}_parallel_rank', 'unknown')} of {size}"
        for axis, size in zip(AXES, sizes, strict=True)
        if size > 1
    ]
    return ", ".join(parts) or "the whole model"
