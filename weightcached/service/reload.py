"""What a config file means for what is cached, decided before anything is done: a bad file does nothing.

For a running service whose file changed, and for one that has started with what an earlier process left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.fileset import open_checkpoint
from ..config import Config, ModelConfig, load_config
from ..errors import CheckpointError, ConfigError, ResourceError
from ..loader.keys import rank_fields
from ..parallel.ranks import Rank
from ..shard.key import ShardKey
from ..shard.manifest import SourceFile
from ..trace import point
from .models import Model
from .spec import LoadSpec, spec_of
from .vault import HeldShard, Vault

if TYPE_CHECKING:
    from .placement import Placement

_OF_A_RANK = {  # key fields that ranks of one load differ in
    "tensor_parallel_rank", "pipeline_parallel_rank", "expert_parallel_rank", "data_parallel_rank", "layers", "dtype",
}  # fmt: skip
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Changes:
    """What a new config changes as far as memory tells; `unsure` are models whose files must be looked at."""

    config: Config
    load: list[str]
    unsure: list[tuple[str, Path, tuple[SourceFile, ...]]]

    def models_to_load(self) -> list[str]:
        """Names in the file's order. Looks at files, so it blocks as long as the disks take; for any thread."""
        changed = [name for name, checkpoint, files in self.unsure if _changed_on_disk(checkpoint, files)]
        return [item.name for item in self.config.models if item.name in (*self.load, *changed)]


def read_changes(old: Config, models: dict[str, Model], vault: Vault, placement: Placement) -> Changes:
    """Reads the file that `old` came from. `ConfigError` if it is not valid for the devices that are served.

    `placement` decides where models go by that, and keeps to it.
    """
    if old.file is None:
        raise ConfigError(file="config", problem="was not read from a file, so it cannot be read again")
    new = load_config(old.file)
    if new.cluster != old.cluster:
        raise ConfigError(
            file=str(old.file), problem="[cluster] has changed, which only a restart of the service applies"
        )
    load, unsure = [], []
    placement.choose(new, models, vault)
    for item in new.models:
        where = placement.place(item)
        model = models.get(item.name)
        if model is None or model.spec != LoadSpec.of(item, where):
            # What is cached under the name must not stay in the place of what the file means now.
            held = any(vault.find(device, item.name) for device in (*where, *(model.devices if model else ())))
            if item.preload or held or (model is not None and model.state == "loading"):
                load.append(item.name)
        elif model.complete and model.error is None:
            shards = [shard for device in where if (shard := vault.find(device, item.name))]
            read_from = {shard.read_head().files for shard in shards}
            unsure += [(item.name, item.checkpoint, files) for files in read_from]
        elif item.preload or model.complete:
            load.append(item.name)  # an operator asks for a reload: what failed before is tried again
    point("service.reload")
    return Changes(new, load, unsure)


def only_at_restart(started_with: Config, config: Config) -> list[str]:
    """Names of settings that changed and that a reload does not apply."""
    names = ("devices", "memory_limit", "allow_uids", "ready")
    return [name for name in names if getattr(config, name) != getattr(started_with, name)]


def left_over(models: dict[str, Model], vault: Vault, devices: Iterable[str]) -> list[dict[str, Any]]:
    """{"model", "device"} of each copy that no model of the config stands for."""
    configured = {(device, model.name) for model in models.values() for device in model.devices}
    return [
        {"model": shard.model, "device": shard.device}
        for name in devices
        for shard in vault.of_device(name)
        if (shard.device, shard.model) not in configured
    ]


def cached_ranks(model: Model, vault: Vault) -> list[HeldShard]:
    """What is cached of a model's ranks, by whatever publisher, each on its device.

    Ranks of other weights than those of the newest one are left out: a service that was killed while a load published
    has some of either.
    """
    found = []
    ranks = model.spec.parallel.ranks()
    for rank, device in zip(ranks[model.spec.first :], model.devices, strict=False):  # the rest are on other nodes
        if shard := vault.find(device, model.name):
            head = shard.read_head()
            if len(ranks) == 1 or not head.key.differences(_place(rank)):
                found.append((shard, head))
    if not found:
        return []
    newest = max((head for _, head in found), key=lambda head: head.created)
    return [shard for shard, head in found if _weights(head.key) == _weights(newest.key)]


def where_cached(item: ModelConfig, vault: Vault, devices: Iterable[str]) -> tuple[str, ...] | None:
    """The devices on which all ranks of a model are cached, in rank order; None if one is nowhere."""
    held = [(name, shard.read_head().key) for name in devices if (shard := vault.find(name, item.name))]
    found = []
    for rank in item.parallel.ranks()[item.ranks_here.start : item.ranks_here.stop]:
        place = {} if item.parallel.world == 1 else _place(rank)
        here = next((name for name, key in held if name not in found and not key.differences(place)), None)
        if here is None:
            return None
        found.append(here)
    return tuple(found)


def weights_of(shard: HeldShard) -> dict[str, Any]:
    """What tells a shard's weights from others; equal for all ranks of one load."""
    return _weights(shard.read_head().key)


def loads_of_start(models: Iterable[Model], vault: Vault) -> list[Model]:
    """What a start has to load: preloads that are not there, and what was loaded by a config that meant something else.

    The latter is served until its load replaces it.
    """
    loads = []
    for model in models:
        specs = {spec_of(shard.read_head().attributes) for shard in cached_ranks(model, vault)}
        otherwise = not specs <= {None, model.spec.digest}  # None: an engine has published it
        if otherwise if model.complete else model.config.preload:
            loads.append(model)
    return loads


def changed_files(models: Iterable[Model], vault: Vault) -> Callable[[], list[str]]:
    """A function for any thread, since it looks at files: the names of models whose files are not those that were read.

    What cannot be looked at stays cached, with a warning: a disk that is gone is no reason to lose what was read of it.
    """
    read_from = [
        (model.name, model.config.checkpoint, {head.files for head in heads})
        for model in models
        if model.state == "cached"
        and (heads := [head for item in cached_ranks(model, vault) if "spec" in (head := item.read_head()).attributes])
    ]

    def look() -> list[str]:
        changed = []
        for name, checkpoint, sets in read_from:
            try:
                if not all(_as_read(checkpoint, files) for files in sets):
                    changed.append(name)
            except (CheckpointError, ResourceError) as error:
                _log.warning("%s: what is cached stays, but its files cannot be looked at: %s", name, error)
        return changed

    return look


def _place(rank: Rank) -> dict[str, Any]:
    # Without the experts' place, which follows from the others, and which not every publisher gives.
    return {name: value for name, value in rank_fields(rank).items() if not name.startswith("expert")}


def _weights(key: ShardKey) -> dict[str, Any]:
    """The fields of a key that all ranks of one load share."""
    return {name: value for name, value in asdict(key).items() if name not in _OF_A_RANK}


def _changed_on_disk(checkpoint: Path, files: tuple[SourceFile, ...]) -> bool:
    """Whether the files are not the ones that the cached shard was read from; an unreadable set counts as changed."""
    try:
        return not _as_read(checkpoint, files)
    except (CheckpointError, ResourceError):
        return True  # the load that follows says what is wrong with it


def _as_read(checkpoint: Path, files: tuple[SourceFile, ...]) -> bool:
    if not files:  # its publisher has not said what it read, so nothing tells that it is something else now
        return True
    with open_checkpoint(checkpoint) as found:
        return {file.name: file.source.stat for file in found.files} == {file.name: file.stat for file in files}
