"""For architectures that have no family here: the tensor parallel plan of an installed transformers.

The plan (`base_model_tp_plan` of the config class, `_tp_plan` of the model class) is read out of transformers' source
as text: importing it would import torch, which the service side does without, and run code for a table of strings.

A plan covers a model only if it can mean nothing else than ours: every kind in it is one of `_KINDS`, every key names a
module of the checkpoint (transformers renames and stacks some while loading, so that its names may not be those on
disk), and the ranks divide query heads and key/value heads, since the plan cuts rows without regard to heads and knows
no replication. What a plan does not name is whole on every rank, as in transformers.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import UnknownArchitecture
from .cuts import Misfit
from .model import architecture
from .ranks import Parallel
from .rules import COL, REPLICATE, ROW, Family, Kind, Patterns, Rule
from .sizes import Sizes

_KINDS: dict[str, Kind] = {
    "colwise": COL,
    "rowwise": ROW,
    "embedding_rowwise": COL,  # the rows of the vocabulary
    "replicate": REPLICATE,
    "replicated_with_grad_allreduce": REPLICATE,
    "sequence_parallel": REPLICATE,
}
_HEAD_KINDS = {**_KINDS, "colwise_rep": COL, "colwise_gather_output": COL}  # gathered afterwards; elsewhere not ours

_BASE = "(base)"  # among a class's attributes, the name of its first base


class _NotCovered(Exception):
    """Why the plan cannot be used, as the end of a sentence."""


def borrowed_family(
    config: dict[str, Any], parallel: Parallel, names: Collection[str], models: Path | None = None
) -> Family:
    """A family made of transformers' plan for this config.json and checkpoint with tensors of these names.

    `models` is transformers' folder of models, by default that of the installed one. Raises `UnknownArchitecture`,
    which says why, when there is no plan or it does not cover the model.
    """
    try:
        return _borrow(config, parallel, names, models or _installed_models())
    except (_NotCovered, Misfit) as problem:
        raise UnknownArchitecture(
            architecture=architecture(config),
            problem=f"no slicing rules for this architecture, and transformers' own plan cannot be used: {problem}",
        ) from None


def _borrow(config: dict[str, Any], parallel: Parallel, names: Collection[str], models: Path) -> Family:
    if parallel.tensor != parallel.world:
        raise _NotCovered("it is for tensor parallel alone")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", model_type):
        raise _NotCovered("config.json says no model_type")
    folder = models / model_type.replace("-", "_")
    plan = _plan_of_config(folder, model_type)
    prefix, head_plan = _names_of_model(folder, architecture(config))
    if not any(name.startswith(f"{prefix}.") for name in names):
        raise _NotCovered(f"no tensor of the checkpoint is named {prefix}.*")
    rules = [Rule(f"{prefix}.{key}", _kind(key, kind, _KINDS)) for key, kind in plan.items()]
    for rule in rules:
        found = Patterns([rule.pattern])
        if not any(found.find(name) for name in names):
            raise _NotCovered(f"it names {rule.pattern}, which the checkpoint does not have")
    rules += [Rule(key, _kind(key, kind, _HEAD_KINDS)) for key, kind in head_plan.items()]
    sizes = Sizes(config, {"num_key_value_heads": "num_attention_heads"})
    if sizes.heads % parallel.tensor or sizes.kv_heads % parallel.tensor:
        raise _NotCovered(
            f"{parallel.tensor} ranks do not divide {sizes.heads} attention heads and {sizes.kv_heads} key/value heads"
        )
    return Family(
        f"{model_type} of transformers",
        rules=(*rules, Rule("**", REPLICATE)),
        layers=None,
        first=(),
        last=(),
        embedding=None,
        head=None,
    )


def _installed_models() -> Path:
    spec = importlib.util.find_spec("transformers")  # looks for it, imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise _NotCovered("transformers is not installed")
    return Path(spec.submodule_search_locations[0]) / "models"


def _plan_of_config(folder: Path, model_type: str) -> dict[str, str]:
    """base_model_tp_plan of the config class of this model_type."""
    for path in sorted(folder.glob("configuration_*.py")):
        for attributes in _classes(path).values():
            plan = attributes.get("base_model_tp_plan")
            if attributes.get("model_type") == model_type and _is_plan(plan) and plan:
                return dict(plan)
    raise _NotCovered(f"it has none for {model_type}")


def _names_of_model(folder: Path, name: str) -> tuple[str, dict[str, str]]:
    """What the base model is called inside the class `name` (its own word or a base's), and the _tp_plan beside it."""
    for path in sorted(folder.glob("modeling_*.py")):
        classes = _classes(path)
        if name in classes:
            attributes = {**classes.get(classes[name].get(_BASE, ""), {}), **classes[name]}
            prefix, plan = attributes.get("base_model_prefix"), attributes.get("_tp_plan")
            if isinstance(prefix, str) and prefix:
                return prefix, dict(plan) if _is_plan(plan) else {}
    raise _NotCovered(f"it does not tell how the parts of {name} are named")


def _classes(path: Path) -> dict[str, dict[str, Any]]:
    """The classes of a source file: for each, the attributes that are plain literals, and its first base's name."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, ValueError, SyntaxError) as problem:
        raise _NotCovered(f"{path.name} cannot be read: {problem}") from None
    return {node.name: dict(_attributes(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    if node.bases and isinstance(node.bases[0], ast.Name):
        yield _BASE, node.bases[0].id
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if statement.value is None or len(targets) != 1 or not isinstance(targets[0], ast.Name):
            continue
        try:
            yield targets[0].id, ast.literal_eval(statement.value)
        except ValueError:
            continue  # not a literal, so none of those that are looked for


def _is_plan(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(part, str) for item in value.items() for part in item)


def _kind(key: str, kind: str, known: dict[str, Kind]) -> Kind:
    if kind not in known:
        raise _NotCovered(f"it cuts {key} as {kind}, which has no equal here")
    return known[kind]
