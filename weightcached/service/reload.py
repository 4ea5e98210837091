"""What a changed config file means for a running service, decided before anything is done: a bad file does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.fileset import open_checkpoint
from ..config import Config, load_config
from ..errors import CheckpointError, ConfigError
from ..shard.manifest import SourceFile, parse_head, read_documents
from .models import Model
from .vault import Vault


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


def read_changes(old: Config, models: dict[str, Model], vault: Vault, devices: list[str]) -> Changes:
    """Reads the file that `old` came from. `ConfigError` if it is not valid for the devices that are served."""
    if old.file is None:
        raise ConfigError(file="config", problem="was not read from a file, so it cannot be read again")
    new = load_config(old.file)
    load, unsure = [], []
    for item in new.models:
        device = item.device_for(devices)
        model = models.get(item.name)
        shard = vault.find(device, item.name)
        moved = model is None or model.config.checkpoint != item.checkpoint
        if shard is None:
            # Named by an operator who asks for a reload: a load that failed before is tried again.
            if item.preload or (moved and model is not None and model.state == "loading"):
                load.append(item.name)
        elif moved:
            load.append(item.name)
        else:
            head = parse_head(read_documents(shard.descriptors[0].fileno())[0])
            unsure.append((item.name, item.checkpoint, head.files))
    return Changes(new, load, unsure)


def _changed_on_disk(checkpoint: Path, files: tuple[SourceFile, ...]) -> bool:
    """Whether the files are not the ones that the cached shard was read from; an unreadable set counts as changed."""
    try:
        with open_checkpoint(checkpoint) as found:
            return [file.source.stat for file in found.files] != [file.stat for file in files]
    except CheckpointError:
        return True  # the load that follows says what is wrong with it
