"""Which devices a start serves, and which of them each model's ranks go to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..choosing import checkpoint_bytes, choose
from ..config import Config, ModelConfig, load_config
from ..devices import Device
from ..errors import ConfigError, DeviceError, NoSuchDevice, WeightCacheError
from ..probe import probe_devices
from .models import Model
from .reload import where_cached
from .vault import Vault

NOWHERE = "no-device"  # in the place of a rank's device where there are too few
_log = logging.getLogger(__name__)


def devices_of(config: Config, *, to_lose: bool = False) -> list[Device]:
    """The devices that a config names, as they are on this host. `ConfigError` for one that is not here.

    With something `to_lose`, such a one is left out with an error in the log, as long as another one is here: a start
    that fails for good would cost all that the service manager keeps of the others.
    """
    names = None if config.devices == "all" else list(config.devices)
    while True:
        try:
            return probe_devices(names)
        except NoSuchDevice as error:
            if not to_lose or names is None or len(names) == 1:
                raise ConfigError(file=str(config.file), problem=f"devices: {error}") from error
            _log.error("%s; the others are served without it until a restart finds it", error)
            names.remove(error.fields["device"])


@dataclass(slots=True)
class Placement:
    """Where ranks go in one process of the service.

    `names`: devices that models may be on, those that were left out at the start among them, in the config's order: a
    model that names its devices does not move because one is gone. `to_lose`: one that has no place has failed, and
    ends nothing.
    """

    served: tuple[str, ...]
    names: tuple[str, ...]
    to_lose: bool
    free: dict[str, int] = field(default_factory=dict)  # bytes of each device, when it was looked at last
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each model's checkpoint, likewise
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of models that name no devices

    @classmethod
    def of(cls, config: Config, free: Mapping[str, int], *, to_lose: bool) -> Placement:
        """That of a start with `config`, which serves the devices of `free`, with so many bytes free on each."""
        served = tuple(free)
        names = served if config.devices == "all" else config.devices
        if to_lose:
            named = [name for item in config.models for name in item.devices or () if name not in names]
            names = (*names, *dict.fromkeys(named))
        return cls(served, names, to_lose, dict(free))

    def look(self, config: Config) -> None:
        """Sees how large the models of a config are, if that matters. Blocks, so it is for a thread."""
        if self._has_a_choice(config):
            self.sizes = {item.name: checkpoint_bytes(item.checkpoint) for item in config.models}

    def look_again(self, file: Path | None) -> None:
        """The same for a config that is to be read again, and how much memory the devices have free now.

        `ConfigError` for a bad one.
        """
        config = load_config(file) if file is not None else None
        if config is None or not self._has_a_choice(config):
            return
        self.look(config)
        try:
            self.free = {device.name: device.memory.free for device in probe_devices(self.served)}
        except WeightCacheError as error:
            _log.warning("devices are chosen by what they had free before: %s", error)

    def choose(self, config: Config, models: Mapping[str, Model], vault: Vault) -> None:
        """Decides for the models of a config that name no devices. One that is cached, or on its way, does not move."""
        kept = {}
        for item in config.models:
            model = models.get(item.name)
            if model is not None and (model.ranks_cached or model.state in ("queued", "loading")):
                kept[item.name] = model.devices
            elif (where := where_cached(item, vault, self.served)) is not None:
                kept[item.name] = where
        before, self.chosen = self.chosen, choose(config.models, self.names, self.free, kept, self.sizes)
        for name, devices in self.chosen.items():
            if name not in kept and before.get(name) != devices:
                _log.info("%s: of %d devices the most memory is free on %s", name, len(self.names), ", ".join(devices))

    def _has_a_choice(self, config: Config) -> bool:
        return len(self.names) > 1 and any(item.devices is None for item in config.models)

    def place(self, item: ModelConfig) -> tuple[str, ...]:
        """Those that were chosen, or as `ModelConfig.devices_for`."""
        chosen = self.chosen.get(item.name) if item.devices is None else None
        return chosen or item.devices_for(self.names)

    def devices_for(self, item: ModelConfig) -> tuple[str, ...]:
        """The same; ranks of whose devices there are too few are NOWHERE, if there is something to lose."""
        try:
            return self.place(item)
        except ConfigError as error:
            if not self.to_lose:
                raise
            _log.error("%s", error)
            return (NOWHERE,) * len(item.ranks_here)

    def problem(self, devices: Iterable[str]) -> DeviceError | None:
        """Why nothing can be loaded to `devices`; None if all of them are served."""
        for name in devices:
            if name == NOWHERE:
                return DeviceError(device=", ".join(self.served), problem="not as many devices as the model has ranks")
            if name not in self.served:
                problem = "was not there when the service started; restart the service once it is"
                return DeviceError(device=name, problem=problem)
        return None
