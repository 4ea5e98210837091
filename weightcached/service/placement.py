"""Which devices a start serves, and which of them each model's ranks go to."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Config, ModelConfig
from ..devices import Device
from ..errors import ConfigError, DeviceError, NoSuchDevice
from ..probe import probe_devices

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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where ranks go in one process of the service.

    `names`: devices that models may be on, those that were left out at the start among them, in the config's order: a
    model does not move because a device is gone. `to_lose`: one that has no place has failed, and ends nothing.
    """

    served: tuple[str, ...]
    names: tuple[str, ...]
    to_lose: bool

    @classmethod
    def of(cls, config: Config, served: Iterable[str], *, to_lose: bool) -> Placement:
        """That of a start with `config`, which serves the devices `served`."""
        served = tuple(served)
        names = served if config.devices == "all" else config.devices
        if to_lose:
            named = [name for item in config.models for name in item.devices or () if name not in names]
            names = (*names, *dict.fromkeys(named))
        return cls(served, names, to_lose)

    def devices_for(self, item: ModelConfig) -> tuple[str, ...]:
        """As `ModelConfig.devices_for`; ranks of whose devices there are too few are NOWHERE, if there is something
        to lose."""
        try:
            return item.devices_for(self.names)
        except ConfigError as error:
            if not self.to_lose:
                raise
            _log.error("%s", error)
            return (NOWHERE,) * item.parallel.world

    def problem(self, devices: Iterable[str]) -> DeviceError | None:
        """Why nothing can be loaded to `devices`; None if all of them are served."""
        for name in devices:
            if name == NOWHERE:
                return DeviceError(device=", ".join(self.served), problem="not as many devices as the model has ranks")
            if name not in self.served:
                problem = "was not there when the service started; restart the service once it is"
                return DeviceError(device=name, problem=problem)
        return None
