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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..checkpoint.digest import json_digest
from ..config_cluster import ClusterConfig
from ..errors import ProtocolError
from ..shard.key import FORMAT_VERSION, STAT_CONTENT
from ..shard.manifest import SCHEMA
from ..wire.messages import PROTOCOL
from .models import Model

SHOWN = 80  # characters of a value in a sentence

Description = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which nodes differ. `model` is None where it is of the nodes as a whole; `values` by node."""

    model: str | None
    field: str
    values: Mapping[int, Any]

    def __str__(self) -> str:
        """ "m: content is "1a" on node 0 and "2b" on nodes 1, 2"."""
        nodes_of: dict[str, list[int]] = {}
        for node, value in self.values.items():
            nodes_of.setdefault(_shown(value), []).append(node)
        parts = [f"{value} on {_nodes(nodes)}" for value, nodes in nodes_of.items()]
        named = f"{self.model}: {self.field}" if self.model else self.field
        return f"{named} is {' and '.join(parts)}"


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
        },
        "key": model.weights if model.complete else None,
        "ranks": [here.start, len(here)],
        "bytes": model.rank_bytes if model.complete else [],
    }


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
        if not isinstance(found["software"], dict) or not isinstance(found["cluster"], dict):
            raise TypeError("software and cluster must be objects")
        for name, model in found["models"].items():
            first, number = model["ranks"]
            if not all(isinstance(value, int) for value in (first, number, *model["bytes"])):
                raise TypeError(f"ranks and bytes of {name} must be numbers")
            if not isinstance(model["settings"], dict) or not isinstance(model["key"], dict | None):
                raise TypeError(f"settings and key of {name} must be objects")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(problem=f"node {node} sent a description that is not readable: {error!r}") from None
    return dict(found)


def differences(descriptions: Sequence[Description]) -> list[Difference]:
    """Every field in which the nodes differ, `descriptions` in the order of the nodes.

    What is cached is compared among the nodes where it is; a digest that is not known yet differs from none.
    """
    nodes = dict(enumerate(descriptions))
    found = []
    for part in ("software", "cluster"):
        found += _fields(None, {node: item[part] for node, item in nodes.items()})
    names = list(dict.fromkeys(name for item in descriptions for name in item["models"]))
    for name in names:
        models = {node: item["models"][name] for node, item in nodes.items() if name in item["models"]}
        if len(models) < len(nodes):
            there = {node: "configured" if node in models else "not configured" for node in nodes}
            found.append(Difference(name, "the model", there))
            continue
        found += _fields(name, {node: item["settings"] for node, item in models.items()})
        found += _fields(name, {node: _known(item["key"]) for node, item in models.items() if item["key"] is not None})
        found += _shares(name, {node: item["ranks"] for node, item in models.items()})
    return found


def _fields(model: str | None, objects: Mapping[int, Mapping[str, Any]]) -> list[Difference]:
    """The fields whose values are not the same in all of `objects`; one that is missing is None."""
    names = dict.fromkeys(name for item in objects.values() for name in item)
    found = []
    for name in names:
        values = {node: item.get(name) for node, item in objects.items() if item.get(name) is not _UNKNOWN}
        if len({_shown(value, None) for value in values.values()}) > 1:
            found.append(Difference(model, name, values))
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
            return [Difference(model, "which ranks a node has", shown)]
        next_rank += number
    return []


_UNKNOWN = object()


def _shown(value: Any, most: int | None = SHOWN) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if most is None or len(text) <= most else text[: most - 3] + "..."


def _nodes(numbers: Sequence[int]) -> str:
    return f"node {numbers[0]}" if len(numbers) == 1 else f"nodes {', '.join(map(str, numbers))}"
