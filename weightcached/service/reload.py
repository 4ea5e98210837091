"""What a changed config file means for a running service, decided before anything is done: a bad file does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.fileset import open_checkpoint
from ..config import Config, load_config
from ..errors import CheckpointError, ConfigError, ResourceError
from ..shard.manifest import SourceFile, parse_head, read_documents
from .models import LoadSpec, Model
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
        where = item.devices_for(devices)
        model = models.get(item.name)
        if model is None or model.spec != LoadSpec.of(item, where):
            # What is cached under the name must not stay in the place of what the file means now.
            held = any(vault.find(device, item.name) for device in (*where, *(model.devices if model else ())))
            if item.preload or held or (model is not None and model.state == "loading"):
                load.append(item.name)
        elif model.complete and model.error is None:
            shards = [shard for device in where if (shard := vault.find(device, item.name))]
            read_from = {parse_head(read_documents(shard.descriptors[0].fileno())[0]).files for shard in shards}
            unsure += [(item.name, item.checkpoint, files) for files in read_from]
        elif item.preload or model.complete:
            load.append(item.name)  # an operator asks for a reload: what failed before is tried again
    return Changes(new, load, unsure)


def _changed_on_disk(checkpoint: Path, files: tuple[SourceFile, ...]) -> bool:
    """Whether the files are not the ones that the cached shard was read from; an unreadable set counts as changed."""
    try:
        with open_checkpoint(checkpoint) as found:
            return [file.source.stat for file in found.files] != [file.stat for file in files]
    except (CheckpointError, ResourceError):
        return True  # the load that follows says what is wrong with it
