"""What a publisher's load has brought before it was over, so that a service started anew does not take it for good.

A file in the runtime directory while such a load is under way: {"model": name, "spec": what its shards carry}. The
service manager hands back what was published all the same; the next start drops it.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from .vault import Vault

_log = logging.getLogger(__name__)


class UnderWay:
    """The file. Without a path it is none, and nothing is remembered."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def begin(self, model: str, spec: str) -> None:
        """A load begins, whose shards carry that spec, and no other load's do (`Model.load_spec`)."""
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(json.dumps({"model": model, "spec": spec}))
            os.replace(beside, self._path)
        except OSError as error:  # it is for a death in the next minutes alone
            _log.warning("%s: %s; a restart in the middle of this load keeps what it has published", self._path, error)

    def end(self) -> None:
        """It is over: what it has published is good, or was withdrawn, or it was called off by who evicts it."""
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                _log.error("%s: %s; remove it, or the next start drops what this load has published", self._path, error)

    def settle(self, vault: Vault) -> None:
        """At a start: drops what a load that was never over has left in the vault."""
        if self._path is None or not self._path.exists():
            return
        try:
            found = json.loads(self._path.read_text())
            model, spec = str(found["model"]), str(found["spec"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("%s is not readable (%s); what it was about counts as cached", self._path, error)
            self.end()
            return
        for shard in vault.shards():
            if shard.model == model and shard.load_spec == spec:
                _log.warning(
                    "%s on %s, generation %d, is dropped: the service ended before its load was over",
                    model, shard.device, shard.generation,
                )  # fmt: skip
                vault.drop(shard.device, model, shard.generation)
        self.end()
