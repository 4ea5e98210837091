"""What an attach says in the log while it waits: why, once, and then how far the load has come."""

from __future__ import annotations

import logging
import time
from typing import Any

PROGRESS_SECONDS = 5.0  # at least so long between two lines
_STATES = {
    "absent": "it is not loaded yet",
    "queued": "it is queued behind other loads",
    "failed": "its last load found no room and is tried again",
    "cached": "it is there in part",
    None: "there is no such model yet",
}
_log = logging.getLogger(__name__)


class WaitLog:
    """The lines of one wait, at INFO: the first with its reason, later ones when there is news, not too often."""

    def __init__(self, what: str, seconds: float) -> None:
        """`what` is waited for, up to `seconds`."""
        self._what = what
        self._seconds = seconds
        self._said = ""
        self._last = 0.0

    def because(self, reason: str) -> None:
        """The wait goes on for this reason."""
        now = time.monotonic()
        if not self._said:
            _log.info("waiting up to %g s for %s: %s", self._seconds, self._what, reason)
        elif reason != self._said and now - self._last >= PROGRESS_SECONDS:
            _log.info("waiting for %s: %s", self._what, reason)
        else:
            return
        self._said, self._last = reason, now

    def event(self, event: dict[str, Any]) -> None:
        """A worker's word on the model that is waited for."""
        state, progress = event.get("state"), event.get("progress")
        if event.get("held_back"):
            self.because(f"it is cached, but not given out: {event.get('reason')}")
        elif state == "loading" and isinstance(progress, int | float):
            self.because(f"loading {100 * progress:.0f} %")
        elif state in _STATES:
            self.because(_STATES[state])
