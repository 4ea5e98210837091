"""The slice plan: which bytes of which tensor each rank holds. Pure; knows nothing of files, devices or torch.

    config.json --> family (families/), or rules of the config file (custom.py), or a plan of transformers (borrowed.py)
    name        --> pipeline stage: its layer's number, or the first or the last stage
                --> rule (rules.py) --> kind: one side of the weight is cut ...
    kind, rank  --> piece (pieces.py): [start, stop) ranges of that side in elements, joined, then zeros
    scales.py       the piece in the entries of each tensor of the module: bias, scales, packed values
    cuts.py         ... as runs of bytes: the parts

    ShardSlices  one rank         slices in the order of the given tensors; aliases: name -> name with the same bytes
      Slice      one tensor       name, dtype and shape in the shard
        Part     runs of bytes    where in the checkpoint's tensor, where in the rank's; zeros where no part is

What a rank does not hold at all has no slice: other stages' layers and, under expert parallel, other ranks' experts.
Of those the scales of one element stay on every rank, since a kernel may need the largest of all (FlashInfer's NVFP4
does); block and group scales go with their expert. Layers past the model's own, for multi-token prediction, are skipped
as soon as there are several ranks. One rank without a cast gets every tensor as it is, of whatever architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CannotCut, CheckpointError, SliceError
from .borrowed import borrowed_family
from .casts import Casts
from .complete import require_complete
from .custom import extend, parse_rules
from .cuts import Part, whole
from .entries import Entries, Refused
from .families import family_of
from .model import Model, architecture
from .ranks import Parallel
from .rules import Family, Patterns, Place
from .stages import Stages, layer_of

if TYPE_CHECKING:
    from ..checkpoint.header import TensorRange


class Slice(NamedTuple):
    """One tensor of a shard.

    `dtype` is the safetensors name of its element type there, which differs from that on disk only by a cast. What
    `parts` do not cover is zeros: the tail of a padded vocabulary, a bias that only rank 0 adds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ShardSlices:
    """What one rank holds: `slices` in the order of the checkpoint's tensors.

    `aliases`: names that have the bytes of another one. `layers`: the range [first, last) of its pipeline stage, None
    without pipeline. `skipped`: tensors that no rank holds. `rules`: by which it was cut, as text, where they are not
    this version's own: the config's, or those of a borrowed plan.
    """

    slices: tuple[Slice, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    layers: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()


def plan_slices(
    tensors: Sequence[TensorRange],
    config: dict[str, Any],
    parallel: Parallel,
    *,
    rules: Sequence[str] = (),
    dtype: str | None = None,
) -> tuple[ShardSlices, ...]:
    """What each rank holds, in the order of the ranks.

    `tensors` are all of a checkpoint, `config` is its config.json. `rules` come before the family's own (custom.py).
    `dtype`: "bfloat16", "float16" or "float32" casts what casts.py says. Raises `UnknownArchitecture` when there are no
    rules for the architecture or one of its parameters, `CannotCut` when sizes do not fit, `SliceError` for rules or
    layers that cannot be, `CheckpointError` when a layer, an expert or an untied head is missing.
    """
    try:
        family, others = _find_family(tensors, config, parallel, rules)
        casts = Casts(dtype, family.uncast)
    except ValueError as problem:
        raise SliceError(problem=str(problem)) from None
    model = Model(tensors, config, family, casts)
    try:
        return tuple(replace(shard, rules=others) for shard in _shards(model, parallel))
    except Refused as refused:
        largest, why = _largest_tensor_parallel(model, parallel, parallel.tensor - 1), refused.problem
        if largest is None and parallel.data > 1:
            alone = _largest_tensor_parallel(model, replace(parallel, data=1), parallel.moe_size)
            if alone is not None:
                why += f" (with data_parallel {parallel.data} no smaller one fits, with 1 tensor_parallel {alone} does)"
        raise CannotCut(parameter=refused.parameter, problem=why, largest=largest) from None


def _find_family(
    tensors: Sequence[TensorRange], config: dict[str, Any], parallel: Parallel, rules: Sequence[str]
) -> tuple[Family, tuple[str, ...]]:
    """The family with the user's rules before its own, and those of its rules that are not this version's, as text.

    `UnknownArchitecture` when something has to be cut by none.
    """
    names = [tensor.name for tensor in tensors]
    parsed = parse_rules(rules)
    for text, rule in zip(rules, parsed, strict=True):
        if isinstance(rule, Place) and rule.stage == "layers":
            prefix = rule.pattern.removesuffix("*")
            if all(layer_of(name, prefix) is None for name in names):
                raise SliceError(problem=f"rule {text!r} matches no tensor of the checkpoint with a number for its *")
        elif not any(map(Patterns([rule.pattern]).find, names)):
            raise SliceError(problem=f"rule {text!r} matches no tensor of the checkpoint")
    family = family_of(config)
    others = tuple(rules)
    if family is None and not parsed and parallel.world > 1:
        family = borrowed_family(config, parallel, names)
        others = tuple(map(str, family.rules))
    return extend(family, parsed, architecture(config)), others


def _shards(model: Model, parallel: Parallel) -> tuple[ShardSlices, ...]:
    if parallel.world == 1:
        return (_whole_model(model),)
    stages = Stages(parallel, model.family, model.sizes, model.tied)
    entries = Entries(model, parallel)
    ranks = parallel.ranks()
    slices: list[list[Slice]] = [[] for _ in ranks]
    stage_ranks: list[list[list[Slice]]] = [[] for _ in range(parallel.pipeline)]
    for rank, held in zip(ranks, slices, strict=True):
        stage_ranks[rank.pipeline].append(held)  # at index moe_rank, since ranks come in that order
    skipped = []
    for tensor, (module, leaf) in zip(model.tensors, model.places, strict=True):
        name = tensor.name
        holders = stages.of(name)
        if not holders:
            skipped.append(name)
            continue
        entry = entries.of(module, leaf)
        made = [Slice(name, *template) for template in entry.templates]
        for stage in holders:
            if entry.owned:
                stage_ranks[stage][entries.owner(name)] += made
            else:
                for held, slice_ in zip(stage_ranks[stage], cycle(made), strict=False):
                    held.append(slice_)
    require_complete(model, stages)
    alias = _alias(model, cut=True)
    ranges = stages.ranges
    return tuple(
        ShardSlices(
            tuple(held),
            dict(alias) if rank.pipeline == parallel.pipeline - 1 else {},
            ranges[rank.pipeline] if ranges is not None else None,
            tuple(skipped),
        )
        for rank, held in zip(ranks, slices, strict=True)
    )


def _whole_model(model: Model) -> ShardSlices:
    tensors = model.tensors
    if model.casts:
        dtypes = [model.dtype(module, leaf) for module, leaf in model.places]
    else:
        dtypes = [tensor.dtype for tensor in tensors]
    slices = [
        Slice(tensor.name, dtype, tensor.shape, whole(tensor.nbytes))
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
    return ShardSlices(tuple(slices), _alias(model, cut=False))


def _alias(model: Model, *, cut: bool) -> dict[str, str]:
    """The head's name for the embedding's bytes, when the checkpoint holds them once.

    A head that is missing and not tied is refused, but only where something is cut: a whole load asks no questions.
    """
    head, embedding = model.family.head, model.family.embedding
    if head is None or embedding is None or model.holds(head):
        return {}
    if model.tied and model.holds(embedding):
        return {head: embedding}
    if cut:
        missing = f"neither {head} nor {embedding}" if model.tied else f"no {head}, and tie_word_embeddings is not set"
        raise CheckpointError(file="config.json", problem=f"the checkpoint has {missing}: fetch what is missing")
    return {}


def _largest_tensor_parallel(model: Model, parallel: Parallel, most: int) -> int | None:
    """The largest size up to `most` for which every tensor fits, beside the other sizes; None when not even 1 does."""
    sample = model.sample()
    return next((size for size in range(most, 0, -1) if _fits(sample, replace(parallel, tensor=size))), None)


def _fits(model: Model, parallel: Parallel) -> bool:
    """Whether every tensor can be cut for these sizes. One rank takes anything."""
    if parallel.world == 1:
        return True
    try:
        stages = Stages(parallel, model.family, model.sizes, model.tied)
        entries = Entries(model, parallel)
        for tensor, (module, leaf) in zip(model.tensors, model.places, strict=True):
            if stages.of(tensor.name) and entries.of(module, leaf).owned:
                entries.owner(tensor.name)
    except (Refused, SliceError):  # SliceError: a name without a rule, behind the one that was refused first
        return False
    return True
