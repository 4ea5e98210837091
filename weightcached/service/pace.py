"""How often something may happen that others can cause: log lines and processes, by whoever reaches a port."""

from __future__ import annotations

import logging
import time


class Pace:
    """A token bucket: `burst` things may happen at once, then one every `seconds`. Times are passed in."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = float(burst)
        self._seconds = seconds
        self._left = self._burst
        self._at: float | None = None

    def take(self, now: float) -> float:
        """0.0: it may happen now, and counts. Otherwise the seconds until it may. `now`: seconds, monotonic."""
        if self._at is not None:
            self._left = min(self._left + (now - self._at) / self._seconds, self._burst)
        self._at = now
        if self._left < 1.0:
            return (1.0 - self._left) * self._seconds
        self._left -= 1.0
        return 0.0


class PacedLines:
    """Lines of a log that others cause. Those that come too fast are left out, and then counted."""

    def __init__(self, log: logging.Logger, about: str, pace: Pace) -> None:
        """`about` is put before each."""
        self._log = log
        self._about = about
        self._pace = pace
        self._unsaid = 0

    def say(self, level: int, text: str) -> None:
        """Logs it, or leaves it out."""
        if self._pace.take(time.monotonic()) > 0:
            self._unsaid += 1
            return
        if self._unsaid:
            self._log.warning("%s: %d lines that came too fast are left out", self._about, self._unsaid)
            self._unsaid = 0
        self._log.log(level, "%s: %s", self._about, text)
