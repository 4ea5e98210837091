"""What a publisher's load has brought before it was over, so that a service started anew does not take it for good.

A file in the runtime directory while such a load is under way, {"model": name, "before": {device: newest generation}}.
The service manager hands back what was published all the same; what is newer is dropped at the next start.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from .vault import Vault

_log = logging.getLogger(__name__)


class UnderWay:
    """The file. Without a path it is none, and nothing is remembered."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def begin(self, model: str, before: Mapping[str, int]) -> None:
        """A load begins; `before`: of its devices, the newest generation that the model ever had there."""
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(json.dumps({"model": model, "before": dict(before)}))
            os.replace(beside, self._path)
        except OSError as error:  # it is for a death in the next minutes alone
            _log.warning("%s: %s; a restart in the middle of this load keeps what it has published", self._path, error)

    def end(self) -> None:
        """It is over, and what it has published is good, or was withdrawn."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def settle(self, vault: Vault) -> None:
        """At a start: drops what a load that was never over has left in the vault."""
        if self._path is None or not self._path.exists():
            return
        try:
            found = json.loads(self._path.read_text())
            model, before = str(found["model"]), {str(name): int(last) for name, last in found["before"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.error("%s is not readable (%s); what it was about counts as cached", self._path, error)
            self.end()
            return
        for device, last in before.items():
            for shard in vault.of_device(device):
                if shard.model == model and shard.generation > last:
                    _log.warning(
                        "%s on %s, generation %d, is dropped: the service ended before its load was over",
                        model, device, shard.generation,
                    )  # fmt: skip
                    vault.drop(device, model, shard.generation)
        self.end()
