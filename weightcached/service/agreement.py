"""What the nodes of a cluster tell one another, and in what they differ. Pure.

    {"software": {"weightcached", "protocol", "manifest", "format"}      what made the shards
     "cluster": {"nodes", "local_ranks", "master_port", ...}             settings that must be the same
     "models": {name: {"settings": {...}                                 how the config cuts it
                       "key": {...} or None                              what is cached, without what ranks differ in
                       "ranks": [first, number]                          those of the node
                       "bytes": [...]}}}                                 of each of its ranks, once it is cached

Devices, the path of the checkpoint and the node's own number may differ: each node has its own, and the digest of the
content says whether the files are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import __version__
from ..checkpoint.digest import json_digest
from ..config_cluster import ClusterConfig
from ..errors import ProtocolError
from ..shard.key import FORMAT_VERSION, STAT_CONTENT
from ..shard.manifest import SCHEMA
from ..text import MODEL_NAME, cut_middle
from ..wire.messages import PROTOCOL
from .membership import Seen, is_count
from .models import Model
from .nodes import missing_nodes

SHOWN = 80  # characters of a value in a sentence
SHOWN_VALUES = 8  # of one field in a sentence
SHOWN_NODES = 16  # that have one value
SHOWN_DIFFERENCES = 8
REASON_CHARS = 500  # of why the nodes have not agreed
_REASON_HEAD = 400  # of those of one that is too long; the others are its end
_DEPTH = 8  # of objects and lists in a description, which has five
_FIELD = re.compile(r"\w{1,64}", re.ASCII)

Description = dict[str, Any]
Kind = Literal["software", "cluster", "settings", "files", "made"]
_NEXT_STEP: dict[Kind, str] = {
    "software": "install the same version on the nodes that differ, and restart the service there",
    "cluster": "make [cluster] the same in the configs of the nodes that differ, and restart the service there",
    "settings": "make [[model]] the same in the configs of the nodes that differ, then `weightcachectl reload` there, "
    "or start the service again",
    "files": "put the same files on the nodes that differ, then `weightcachectl reload` there, or start the service "
    "again",
    "made": "have it made in the same way on the nodes that differ: `weightcachectl evict` it there, then load it by "
    "the same config, or engine",
}
_OF_FILES = ("content", "config", "revision", "architecture", "quantization", "quantization_digest")  # of a key


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which nodes differ. `model` is None where it is of the nodes as a whole; `values` by node.

    `kind` is what to change where it differs. Fields of a key are "files" if they follow from the checkpoint, else
    "made": what is cached was made otherwise.
    """

    model: str | None
    field: str
    values: Mapping[int, Any]
    kind: Kind

    def __str__(self) -> str:
        """ "m: content is "1a" on node 0 and "2b" on nodes 1, 2"; of bounded length, whatever the nodes sent."""
        nodes_of: dict[str, list[int]] = {}
        for node, value in self.values.items():
            nodes_of.setdefault(_shown(value, None), []).append(node)
        parts = [f"{_cut(text)} on {_nodes(nodes)}" for text, nodes in nodes_of.items()]
        if len(parts) > SHOWN_VALUES:
            parts[SHOWN_VALUES - 1 :] = [f"{len(parts) - SHOWN_VALUES + 1} other values elsewhere"]
        named = f"{self.model}: {self.field}" if self.model else self.field
        return f"{named} is {' and '.join(parts)}"

    def concerns(self, model: str) -> bool:
        """Whether the ranks of the model on these nodes may not fit together.

        Another version of the software concerns every model: its rules may cut a model otherwise, and a shard does not
        say which version's rules have cut it.
        """
        return self.kind == "software" or self.model == model


def describe_differences(found: Sequence[Difference]) -> str:
    """One sentence, with SHOWN_DIFFERENCES of them at most, and what to do about each kind."""
    parts = list(map(str, found[:SHOWN_DIFFERENCES]))
    if len(found) > SHOWN_DIFFERENCES:
        parts.append(f"and {len(found) - SHOWN_DIFFERENCES} more")
    next_steps = dict.fromkeys(_NEXT_STEP[item.kind] for item in found)
    return "the nodes differ: " + "; ".join([*parts, *next_steps])


def not_agreed(nodes: Sequence[Seen], me: int, refusal: str | None, problem: str | None) -> str:
    """Why a model is not given out that the nodes have not agreed on. Without times, so that it changes with the nodes.

    `me`: the number of this node. `refusal`: why a node is not counted. `problem`: of the last attempt to agree.
    """
    missing = missing_nodes(nodes, me, refusal)
    loading = [node for node, item in enumerate(nodes) if item.state == "loading"]
    parts = ["the nodes of the cluster have not agreed on it yet"]
    if missing:  # with the refusal in it
        parts.append(f"missing: {missing}")
    elif refusal:
        parts.append(refusal)
    if loading:
        parts.append(f"still loading: {_nodes(loading)}")
    if len(parts) == 1 and problem:
        parts.append(problem)
    return cut_middle("; ".join(parts), REASON_CHARS, _REASON_HEAD)


def describe(cluster: ClusterConfig, models: Iterable[Model]) -> Description:
    """What this node tells the others."""
    return {
        "software": {
            "weightcached": __version__,
            "protocol": PROTOCOL,
            "manifest": SCHEMA,
            "format": FORMAT_VERSION,
        },
        "cluster": {
            "nodes": cluster.nodes,
            "local_ranks": list(cluster.local_ranks) if cluster.local_ranks is not None else None,
            "master_port": cluster.master_port,
            "engine_port": cluster.engine_port,
            "publisher_port": cluster.publisher_port,
            "keep_alive": cluster.keep_alive,
        },
        "models": {model.name: describe_model(model) for model in models},
    }


def describe_model(model: Model) -> Description:
    """What this node tells the others of one model."""
    spec = model.spec
    here = model.config.ranks_here
    sizes = {f"{name}_parallel": getattr(spec.parallel, name) for name in ("tensor", "pipeline", "data", "expert")}
    layers = spec.parallel.layers
    return {
        "settings": {
            **sizes,
            "expert_placement": spec.parallel.placement,
            "pipeline_layers": list(layers) if isinstance(layers, tuple) else layers,
            "dtype": spec.dtype,
            "rules": list(spec.rules),
            "publisher": bool(spec.publisher),
        },
        "key": model.weights if model.complete else None,
        "ranks": [here.start, len(here)],
        "bytes": model.rank_bytes if model.complete else [],
    }


def not_cached(description: Description, among: Iterable[str]) -> list[str]:
    """Which of these models are not cached on a node, of those that it has in its config."""
    models = description["models"]
    return [name for name in among if name in models and models[name]["key"] is None]


def to_text(description: Description) -> str:
    """As it is sent."""
    return json.dumps(description, separators=(",", ":"))


def digest_of(description: Description) -> str:
    """Equal for equal descriptions."""
    return json_digest(description)


def parse(text: str, node: int) -> Description:
    """The description that node `node` sent. `ProtocolError` for what is none."""
    try:
        found = json.loads(text)
        _require_depth(found, _DEPTH)
        for part in ("software", "cluster"):
            _require_fields(found[part], part)
        for name, model in found["models"].items():
            if not MODEL_NAME.fullmatch(name):
                raise ValueError(f"{_shown(name)} is no name of a model")
            first, number = model["ranks"]
            if not all(is_count(value) for value in (first, number, *model["bytes"])):
                raise TypeError(f"ranks and bytes of {name} must be numbers")
            _require_fields(model["settings"], f"settings of {name}")
            if model["key"] is not None:
                _require_fields(model["key"], f"key of {name}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(problem=f"node {node} sent a description that is not readable: {error!r}") from None
    return dict(found)


def _require_depth(value: Any, depth: int) -> None:
    """`ValueError` if objects and lists are nested deeper than `depth`: json.dumps could not show them."""
    if depth == 0:
        raise ValueError("it is too deep")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_depth(item, depth - 1)


def _require_fields(value: Any, what: str) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{what} must be an object")
    for name in value:
        if not _FIELD.fullmatch(name):
            raise ValueError(f"{_shown(name)} is no name of a field, in {what}")


def differences(descriptions: Sequence[Description]) -> list[Difference]:
    """Every field in which the nodes differ, `descriptions` in the order of the nodes.

    What is cached is compared among the nodes where it is; a digest that is not known yet differs from none.
    """
    nodes = dict(enumerate(descriptions))
    found: list[Difference] = []
    found += _fields("software", None, {node: item["software"] for node, item in nodes.items()})
    found += _fields("cluster", None, {node: item["cluster"] for node, item in nodes.items()})
    names = list(dict.fromkeys(name for item in descriptions for name in item["models"]))
    for name in names:
        models = {node: item["models"][name] for node, item in nodes.items() if name in item["models"]}
        if len(models) < len(nodes):
            there = {node: "configured" if node in models else "not configured" for node in nodes}
            found.append(Difference(name, "the model", there, "settings"))
            continue
        found += _fields("settings", name, {node: item["settings"] for node, item in models.items()})
        keys = {node: _known(item["key"]) for node, item in models.items() if item["key"] is not None}
        found += _fields("made", name, keys)
        found += _shares(name, {node: item["ranks"] for node, item in models.items()})
    return found


def _fields(kind: Kind, model: str | None, objects: Mapping[int, Mapping[str, Any]]) -> list[Difference]:
    """The fields whose values are not the same in all of `objects`; one that is missing is None."""
    names = dict.fromkeys(name for item in objects.values() for name in item)
    found = []
    for name in names:
        values = {node: item.get(name) for node, item in objects.items() if item.get(name) is not _UNKNOWN}
        if len({_shown(value, None) for value in values.values()}) > 1:
            of_files = kind == "made" and name in _OF_FILES
            found.append(Difference(model, name, values, "files" if of_files else kind))
    return found


def _known(key: Mapping[str, Any]) -> dict[str, Any]:
    """The key, whose content is left out of the comparison where no digest is known."""
    content = key.get("content")
    known = not (isinstance(content, str) and content.startswith(STAT_CONTENT))
    return {**key, "content": content if known else _UNKNOWN}


def _shares(model: str, ranks: Mapping[int, Sequence[int]]) -> list[Difference]:
    """Ranks that do not follow one another from node to node."""
    shown = {node: f"{first}-{first + number - 1}" for node, (first, number) in ranks.items()}
    next_rank = 0
    for first, number in ranks.values():
        if first != next_rank or number < 1:
            return [Difference(model, "which ranks a node has", shown, "cluster")]
        next_rank += number
    return []


_UNKNOWN = object()


def _shown(value: Any, most: int | None = SHOWN) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if most is None else _cut(text, most)


def _cut(text: str, most: int = SHOWN) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _nodes(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    more = f" and {len(numbers) - SHOWN_NODES} more" if len(numbers) > SHOWN_NODES else ""
    return f"nodes {', '.join(map(str, numbers[:SHOWN_NODES]))}{more}"
