"""What a changed config file means for a running service, decided before anything is done: a bad file does nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.fileset import open_checkpoint
from ..config import Config, load_config
from ..errors import CheckpointError, ConfigError
from ..shard.manifest import parse_head, read_documents
from .models import Model
from .vault import Vault


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """The new config; models to load, models no longer listed, settings that wait for a restart: all by name."""

    config: Config
    load: list[str]
    forgotten: list[str]
    restart: list[str]


def plan_reload(old: Config, models: dict[str, Model], vault: Vault, devices: list[str]) -> ReloadPlan:
    """Reads the file that `old` came from. `ConfigError` if it is not valid for the devices that are served."""
    if old.file is None:
        raise ConfigError(file="config", problem="was not read from a file, so it cannot be read again")
    new = load_config(old.file)
    load = []
    for item in new.models:
        device = item.device_for(devices)
        model = models.get(item.name)
        shard = vault.find(device, item.name)
        if shard is None:
            # Named by an operator who asks for a reload: a load that failed before is tried again.
            if item.preload:
                load.append(item.name)
        elif (
            model is None
            or model.config.checkpoint != item.checkpoint
            or _changed_on_disk(item.checkpoint, shard.descriptors[0].fileno())
        ):
            load.append(item.name)
    forgotten = sorted(set(models) - {item.name for item in new.models})
    restart = [name for name in ("devices", "memory_limit", "ready") if getattr(new, name) != getattr(old, name)]
    return ReloadPlan(new, load, forgotten, restart)


def _changed_on_disk(checkpoint: object, manifest_fd: int) -> bool:
    """Whether the files are not the ones that the cached shard was read from; an unreadable set counts as changed."""
    head = parse_head(read_documents(manifest_fd)[0])
    try:
        with open_checkpoint(str(checkpoint)) as found:
            return [file.source.stat for file in found.files] != [file.stat for file in head.files]
    except CheckpointError:
        return True  # the load that follows says what is wrong with it
