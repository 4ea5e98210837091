"""Trying again until a time: a service that is not there may come, one that goes may come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from ..errors import ConnectionFailed, ConnectionLost, ServiceNotRunning, TimedOut, TooManyConnections
from .progress import WaitLog
from .target import worker_socket
from .waiting import PathWatch

_RETRY_SECONDS = 0.1  # a bound socket that does not listen yet gives no event when it does
_log = logging.getLogger(__name__)
T = TypeVar("T")


def keep_trying(attempt: Callable[[WaitLog], T], what: str, device: str, end: float, timeout: float) -> T:
    """What `attempt` gives as soon as the device's worker can be asked, until `end` (monotonic seconds).

    `TimedOut` then, with `timeout` seconds named; any other error of an attempt at once. `what` is for the log.
    """
    log = WaitLog(what, timeout)
    path: Path | None = None
    missing: Path | None
    while True:
        # The watch is made before the attempt, so that nothing that happens in between is missed.
        with ExitStack() as stack:
            watch = None
            if path is not None:
                try:
                    watch = stack.enter_context(PathWatch(path))
                except ConnectionFailed as error:
                    _log.debug("%s; looked for by the clock", error)
            try:
                return attempt(log)
            except TooManyConnections as error:  # of this user: it may have fewer in a moment, which nobody announces
                missing, waited_for = None, f"a connection: {error}"
                log.because(str(error))
            except (ServiceNotRunning, ConnectionLost) as error:
                missing, waited_for = Path(error.path), "the service"
                log.because(str(error))
            left = end - time.monotonic()
            if left <= 0:
                where = missing or worker_socket(device)
                raise TimedOut(path=str(where), seconds=timeout, waited_for=waited_for)
            if missing is None or (missing == path and watch is None):
                time.sleep(min(left, _RETRY_SECONDS))
            elif missing == path and watch is not None:
                watch.wait(min(left, _RETRY_SECONDS) if missing.exists() else left)
            path = missing
