"""What a family's table is made of: patterns of names, and kinds of cuts. Pure data, no bytes.

    Rule("model.layers.*.self_attn.q_proj", Q_HEADS)           a module: its weight, bias and scales follow (scales.py)
    Rule("model.layers.*.mlp.experts.*.down_proj", expert(ROW))  the number of the last * is the expert
    Rule("model.layers.*.mlp.experts.down_proj", stacked(ROW, axis=1))   one parameter that holds all experts on axis 0

A pattern names a module or a whole parameter. In it `*` is one component between dots, `**` one or more of them,
`{a,b}` either. The first rule that matches wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Cut = Literal["whole", "even", "q_heads", "kv_heads", "vocab", "merged", "first_only"]
Side = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Kind:
    """How a tensor is cut for T ranks.

    `cut`         along its axis of n elements, rank r gets
      whole       everything
      even        n/T elements. `unit`: so many stay together. `uneven`: ceil(n/unit/T) units, the last ranks fewer
      q_heads     H/T query heads
      kv_heads    K/T key/value heads; with fewer heads than ranks, T/K ranks share each head
      vocab       1/T of n padded to a multiple of 64, the missing tail as zeros
      merged      the pieces of each of `segments`, joined; the segments lie behind each other on the axis
      first_only  everything on rank 0, zeros on the others: a bias that is added on every rank, then summed
    `side`        "out": the weight's output axis, and its bias alike. "in": its input axis; every bias is whole
    `axis`        which axis that is, when the rule names a parameter. None: 0 for "out", 1 for "in". For a module's
                  tensors the axes are known.
    `experts`     "named": a module is one expert, its number in the name. "stacked": axis 0 counts the experts.
                  Expert parallel gives a rank whole experts; without it each is cut over all ranks of the stage.
    """

    cut: Cut
    side: Side = "out"
    axis: int | None = None
    unit: int = 1
    uneven: bool = False
    segments: tuple[Kind, ...] = ()
    experts: Literal["no", "named", "stacked"] = "no"

    def __post_init__(self) -> None:
        if self.unit < 1 or (self.axis is not None and self.axis < 0):
            raise ValueError(f"unit must be at least 1 and axis at least 0, found {self.unit} and {self.axis}")

    def on_input(self) -> Kind:
        """The same cut of the weight's input axis: Q_HEADS.on_input() is for the projection after attention."""
        return replace(self, side="in")


REPLICATE = Kind("whole")
COL = Kind("even")
ROW = Kind("even", side="in")
Q_HEADS = Kind("q_heads")
KV_HEADS = Kind("kv_heads")
VOCAB = Kind("vocab")
FIRST_ONLY = Kind("first_only")


def merged(*segments: Kind) -> Kind:
    """Several projections in one tensor: all COL (equal lengths), or Q_HEADS and KV_HEADS (of head_dim each)."""
    if len(segments) < 2:
        raise ValueError("merged needs at least two segments")
    if not (all(kind == COL for kind in segments) or all(kind in (Q_HEADS, KV_HEADS) for kind in segments)):
        raise ValueError("merged takes col segments only, or q_heads and kv_heads segments only")
    return Kind("merged", segments=segments)


def even(unit: int = 1, *, uneven: bool = False) -> Kind:
    """Equal shares in whole units; `uneven` gives ceil(units / T) to each rank and fewer to the last ones."""
    return Kind("even", unit=unit, uneven=uneven)


def interleaved2(unit: int = 1, *, uneven: bool = False) -> Kind:
    """Two projections whose rows alternate; `unit` counts rows of one of them."""
    return even(2 * unit, uneven=uneven)


def expert(kind: Kind) -> Kind:
    """One expert per module: model.layers.*.mlp.experts.*.up_proj."""
    return replace(kind, experts="named")


def stacked(kind: Kind, axis: int | None = None) -> Kind:
    """All experts in one parameter, on axis 0; `axis` is the one that `kind` cuts without expert parallel."""
    return replace(kind, experts="stacked", axis=axis)


@dataclass(frozen=True, slots=True)
class Rule:
    """Everything that `pattern` names is cut as `kind` says."""

    pattern: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a pipeline: "first" and "last" stage hold what `pattern` names; "layers": its * is a layer's number."""

    pattern: str
    stage: Literal["layers", "first", "last"]


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of some architectures are cut. All names are those in the checkpoint.

    `layers`: what stands before the layer's number in the names of a layer, with the dot. `first` and `last`: patterns
    of what only the first and the last pipeline stage hold, beside their layers. `embedding` and `head`: the two
    parameters that are one when embeddings are tied, which `tied` decides where config.json does not say. `uncast`:
    patterns of parameters and modules that keep their type when the others are cast. `defaults`: keys of config.json
    that the model class supplies when they are left out: a number, or the key that has it.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    layers: str | None = "model.layers."
    first: tuple[str, ...] = ("model.embed_tokens",)
    last: tuple[str, ...] = ("model.norm", "lm_head")
    embedding: str | None = "model.embed_tokens.weight"
    head: str | None = "lm_head.weight"
    tied: bool = False
    uncast: tuple[str, ...] = ()
    defaults: Mapping[str, int | str] = field(default_factory=dict)


_TOKEN = re.compile(r"\*\*|\*|\{[^{}]*\}|[^*{}]+")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression, to be used with fullmatch. `ValueError` for one that cannot match a name."""
    tokens = _TOKEN.findall(pattern)
    if "".join(tokens) != pattern or not pattern or not all(part for part in pattern.split(".")):
        raise ValueError(f"{pattern!r} is no pattern of names: components between dots, *, ** or {{a,b}}")
    return re.compile("".join(_regex(token) for token in tokens))


def _regex(token: str) -> str:
    if token == "**":
        return ".+"
    if token == "*":
        return "[^.]+"
    if token.startswith("{"):
        return f"(?:{'|'.join(re.escape(choice) for choice in token[1:-1].split(','))})"
    return re.escape(token)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of digits
_SPELLED_NUMBER = re.compile(r"(?<![^.{,*}])\d+(?![^.},*{])")  # in a pattern: all or part of one


def split_name(name: str) -> tuple[str, str]:
    """The module that a parameter belongs to, and what it is there: ("model.norm", "weight").

    bitsandbytes puts what belongs to a weight behind it: ("...q_proj", "weight.absmax").
    """
    module, of_weight, leaf = name.rpartition(".weight.")
    if of_weight:
        return module, f"weight.{leaf}"
    module, _, leaf = name.rpartition(".")
    return module, leaf


def number(component: str) -> int | None:
    """The number of a layer or an expert, None for any other component of a name."""
    return int(component) if component.isascii() and component.isdigit() and len(component) < 10 else None


def last_number(name: str) -> tuple[str, int] | None:
    """The last number in a name, of an expert, and what stands before it: ("model.layers.3.mlp.experts", 17)."""
    parts = name.split(".")
    for index in range(len(parts) - 1, -1, -1):
        found = number(parts[index])
        if found is not None:
            return ".".join(parts[:index]), found
    return None


class Patterns:
    """Finds the first of several patterns that matches a name or the module it belongs to; remembers what it found.

    Names that differ only in their numbers (layers, experts) get one answer, unless a pattern spells a number.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._regexes = [compile_pattern(pattern) for pattern in patterns]
        self._exact = any(_SPELLED_NUMBER.search(pattern) for pattern in patterns)
        self._found: dict[str, tuple[int, bool] | None] = {}

    def key(self, name: str) -> str:
        """`name` without what cannot matter to any pattern: equal keys, equal answers."""
        return name if self._exact else _NUMBER.sub("*", name)

    def find(self, name: str) -> tuple[int, bool] | None:
        """The index of the pattern, and whether it names the whole parameter; None when no pattern matches."""
        key = self.key(name)
        if key not in self._found:
            self._found[key] = self._search(key)
        return self._found[key]

    def _search(self, key: str) -> tuple[int, bool] | None:
        module = split_name(key)[0]
        for index, regex in enumerate(self._regexes):
            if regex.fullmatch(key):
                return index, True
            if regex.fullmatch(module):
                return index, False
        return None
