"""One tensor parallel rank of a transformers model over the service's own slices of it.

    service     [[model]] tensor_parallel = 2, loaded by its own rules (weightcached.parallel)
    here        the skeleton, distributed by transformers' own plan: parameters are DTensors on meta, hooks in place
    fill        the local part of each DTensor becomes the cached slice

Service and plan cut for themselves, so the two cuts are compared for each parameter, byte range by byte range, before
anything is taken: equal shapes alone could be different rows. Where the service keeps a tensor whole that the plan
cuts, the rank's part is a view of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checkpoint.digest import json_digest
from ...checkpoint.fileset import open_checkpoint
from ...client.target import Target
from ...client.weights import Weights
from ...errors import EngineError
from ...parallel.cuts import Part, Piece, cut, whole
from ...parallel.ranks import Parallel
from ...parallel.slices import ShardSlices, Slice, plan_slices
from ...shard.dtypes import DTYPES
from ..names import conversion
from . import quantised
from .filling import move_buffers
from .skeleton import buffer_dtype, build, building, compute, finish, put, refuse_meta

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Rank:
    """This process's place (rank, size) among those of torch.distributed, and transformers' mesh over them."""

    transformers: Any
    target: Target
    place: tuple[int, int]
    distributed_config: Any
    mesh: Any

    @classmethod
    def of_this_process(cls, transformers: Any, target: Target, tensor_parallel: tuple[int, int] | None) -> Rank:
        """Every rank must call it: the mesh is made together. `EngineError` where there are no ranks."""
        import torch

        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise EngineError(
                problem="tp_plan needs torch.distributed: call torch.distributed.init_process_group in every rank, "
                "as torchrun has set it up"
            )
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if tensor_parallel not in (None, (rank, size)):
            raise EngineError(problem=f"tensor_parallel={tensor_parallel}, but torch.distributed has ({rank}, {size})")
        if size == 1:
            raise EngineError(problem="tp_plan with one rank: leave it out, the whole model is this rank's")
        try:
            from transformers.distributed import DistributedConfig
            from transformers.distributed.utils import TransformersDeviceMesh
        except ImportError as error:
            raise EngineError(
                problem=f"transformers {transformers.__version__} cuts models in another way than 5.24, by which this "
                f"was built ({error}); use from_pretrained(..., tp_plan='auto')"
            ) from error
        kind = "cpu" if target.ordinal is None else "cuda"
        dense, expert = (
            torch.distributed.init_device_mesh(kind, (1, 1, *last), mesh_dim_names=("pp", "dp_replicate", *names))
            for last, names in (((1, size), ("fsdp", "tp")), ((size, 1), ("efsdp", "ep")))
        )
        config = DistributedConfig(tp_size=size, tp_plan="auto")
        return cls(transformers, target, (rank, size), config, TransformersDeviceMesh(dense, expert))

    def agree(self, problem: str | None) -> str | None:
        """What is wrong with any rank, since a model of which one rank is missing is none. Every rank must call it."""
        import torch

        found: list[str | None] = [None] * self.place[1]
        torch.distributed.all_gather_object(found, problem)
        named = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
        return "; ".join(named) or None


@dataclass(frozen=True)
class Plan:
    """The distributed skeleton, and for each parameter the cached name and the part of it that is this rank's.

    `sources`: parameter -> (cached name, (axis, start, length) of a view, None for the tensor as it is cached).
    `key` are the fields of `ShardKey` to ask for.
    """

    rank: Rank
    model: PreTrainedModel
    key: dict[str, Any]
    sources: dict[str, tuple[str, tuple[int, int, int] | None]]
    buffers: tuple[str, ...]


def plan(rank: Rank, cls: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Plan:
    """How this rank is put together. `EngineError` where the service's slices are not what transformers' plan wants."""
    if (method := quantised.method_of(config)) is not None:
        raise EngineError(problem=f"{cls.__name__} is quantised with {method}: not supported with tp_plan")
    with open_checkpoint(folder) as checkpoint:
        tensors, on_disk, raw = list(checkpoint.tensors()), checkpoint.dtype, checkpoint.config
    model = build(cls, config, buffer_dtype(on_disk), tied=False)
    if (reason := conversion(model, [tensor.name for tensor in tensors])) is not None:
        raise EngineError(problem=f"{cls.__name__}: {reason}, which is not supported with tp_plan")
    model = cls.maybe_distribute_model(model, rank.distributed_config, rank.mesh)
    number, size = rank.place
    shard = plan_slices(tensors, raw, Parallel(tensor=size))[number]
    full = {tensor.name: tensor.shape for tensor in tensors}
    sources, buffers = _sources(model, shard, full)
    key: dict[str, Any] = {"layout": "checkpoint", "config": json_digest(raw)}
    if shard.rules:  # of a plan that the service has borrowed from transformers
        key["rules"] = json_digest(list(shard.rules))
    return Plan(rank, model, key, sources, buffers)


def fill(plan: Plan, weights: Weights, folder: Path) -> PreTrainedModel:
    """The plan's model with the slices of `weights` as the local parts of its parameters."""
    import torch
    from torch.distributed.tensor import DTensor

    model = plan.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for parameter in parameters.values():
        parameter._is_hf_initialized = True  # as in the skeleton: cutting has made new ones
    with building:
        compute(model)
    made: dict[str, torch.nn.Parameter] = {}
    for name, (source, part) in plan.sources.items():
        old = parameters[name]
        value = weights[source] if part is None else weights[source].narrow(*part)
        if isinstance(old, DTensor):
            value = DTensor.from_local(
                value, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
        same = made.get(source)
        if same is None or not _alike(same, old):
            made[source] = same = torch.nn.Parameter(value, requires_grad=False)
            same.__dict__.update(old.__dict__)
        put(model, name, same)
    device = torch.device(plan.rank.target.torch_device)
    for name in plan.buffers:
        put(model, name, weights[name].clone())  # written by the model perhaps
    move_buffers(model, device, except_for=dict.fromkeys(plan.buffers, ""))
    refuse_meta(model)
    return finish(plan.rank.transformers, model, folder)


def from_disk(rank: Rank, cls: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """This rank as transformers loads it; every rank must call it."""
    model = cls.from_pretrained(
        folder, config=config, torch_dtype="auto", local_files_only=True, distributed_config=rank.distributed_config
    )
    return model.requires_grad_(False).eval()


def bytes_on_disk(rank: Rank, folder: Path) -> int:
    """What a rank takes at least, in bytes: its share of the checkpoint."""
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.tensor_bytes // rank.place[1]


def _alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return type(ours.data) is type(theirs.data) and getattr(ours, "placements", None) == getattr(
        theirs, "placements", None
    )


def _sources(
    model: PreTrainedModel, shard: ShardSlices, full: dict[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[str, tuple[int, int, int] | None]], tuple[str, ...]]:
    slices = {item.name: item for item in shard.slices}
    tied: dict[str, str] = {**getattr(model, "all_tied_weights_keys", {}), **shard.aliases}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    persistent = [name for name in model.state_dict() if name not in parameters]
    sources, problems, used = {}, [], set(persistent)
    for name, parameter in parameters.items():
        source = name if name in slices else tied.get(name, name)
        if source not in slices:
            problems.append(f"{name} is not in the checkpoint")
            continue
        used.add(source)
        try:
            sources[name] = source, _part(parameter, slices[source], full[source])
        except _OtherCut as error:
            problems.append(f"{name}: {error}")
    problems += [f"{name} is not in the checkpoint whole" for name in persistent if not _is_whole(slices, full, name)]
    problems += [f"{name} is not in the model" for name in slices if name not in used]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise EngineError(
            problem=f"{type(model).__name__}: the cache's slices are not what transformers' plan makes: "
            f"{'; '.join(problems[:8])}{more}; use from_pretrained(..., tp_plan='auto')"
        )
    return sources, tuple(persistent)


class _OtherCut(Exception):
    """The service cuts a tensor otherwise than transformers, in words."""


def _part(parameter: torch.Tensor, found: Slice, full: tuple[int, ...]) -> tuple[int, int, int] | None:
    """The view of a cached slice that is the parameter's local part; None for all of it. `_OtherCut` if none is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if tuple(parameter.shape) != full:
        raise _OtherCut(f"is {list(full)} on disk, the model's is {list(parameter.shape)}")
    complete = found.shape == full and found.parts == _whole(found.dtype, full)
    if not isinstance(parameter, DTensor):
        placement: Any = Replicate()
    elif len(parameter.placements) != 1:
        raise _OtherCut(f"is spread over a mesh of {len(parameter.placements)} dimensions")
    else:
        (placement,) = parameter.placements
    if isinstance(placement, Replicate):
        if not complete:
            raise _OtherCut(f"is cut to {list(found.shape)}, transformers keeps it whole")
        return None
    if type(placement) is not Shard:  # a strided one, of fused weights, is a class of its own
        raise _OtherCut(f"transformers places it as {placement}")
    axis = placement.dim % len(full)
    start, length = _range(parameter, axis)
    if complete:
        return axis, start, length
    wanted = cut(full, DTYPES[found.dtype].bits, axis, Piece(((start, start + length),)))
    if wanted != (found.shape, found.parts):
        raise _OtherCut(f"is cut to {list(found.shape)}, of other places than transformers' {list(wanted[0])}")
    return None


def _range(parameter: Any, axis: int) -> tuple[int, int]:
    """Where this rank's part of the axis starts, and its length."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[axis]), int(shape[axis])


def _is_whole(slices: dict[str, Slice], full: dict[str, tuple[int, ...]], name: str) -> bool:
    return name in slices and slices[name].parts == _whole(slices[name].dtype, full[name])


def _whole(dtype: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    return whole(math.prod(shape) * DTYPES[dtype].bits // 8)
