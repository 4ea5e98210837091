"""What the service tells systemd, and what its children must not inherit from it.

The protocol is one datagram of ``KEY=VALUE`` lines to ``$NOTIFY_SOCKET`` (systemd, sd_notify(3)). `Notifier` speaks the
state part of it through the package ``sdnotify``, which cannot pass descriptors and encodes Latin-1.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

import sdnotify

from weightcached.errors import ConnectionFailed

log = logging.getLogger(__name__)

START_EXTENSION_USEC = 60_000_000
"""How long one `Notifier.progress` keeps a start alive, in microseconds."""

_SEND_TIMEOUT = 1.0  # seconds; a manager that is stuck in its own work must not stop the service's loop for longer
_STATUS_LIMIT = 1024  # characters; one datagram holds 4096 bytes (systemd, PIPE_BUF)


class Notifier:
    """State messages from this process to its service manager.

    Only the main process of the unit may send (``NotifyAccess=main``): never hand a Notifier to a child. A status that
    the manager does not take at once is lost. A change of state that it does not take within one second is sent again
    by `repeat`, or before whatever is sent next, unless another one follows. Both are logged, and the service goes on.
    Owns one socket until `close`.
    """

    def __init__(self, systemd: sdnotify.SystemdNotifier | None, watchdog_seconds: float | None = None) -> None:
        self._systemd = systemd
        self._failing = False
        self._owed: tuple[str, ...] = ()  # the last change of state, while the manager has not taken it
        self.watchdog_seconds = watchdog_seconds

    @classmethod
    def from_environ(cls) -> Notifier:
        """The notifier for ``$NOTIFY_SOCKET``, or one that does nothing when that is unset.

        ``watchdog_seconds`` is half of ``$WATCHDOG_USEC`` (systemd, sd_watchdog_enabled(3)) when that is set for this
        process, else None. Raises ConnectionFailed when the socket is named but cannot be reached: a unit of
        ``Type=notify`` could never become active without it.
        """
        address = os.environ.get("NOTIFY_SOCKET")
        if not address:
            return cls(None)
        try:
            # sdnotify drops its socket unclosed when it cannot connect, so it only gets an address that answers.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            systemd = sdnotify.SystemdNotifier(debug=True)  # without debug it swallows every error
        except OSError as error:
            problem = f"NOTIFY_SOCKET names it, but {error.strerror or error}; unset it to run without systemd"
            raise ConnectionFailed(path=address, problem=problem) from error
        return cls(systemd, _watchdog_seconds(os.environ))

    @property
    def active(self) -> bool:
        """Whether a service manager listens to this process."""
        return self._systemd is not None

    def ready(self, status: str) -> None:
        """The start, or a reload, is done."""
        self._send("READY=1", _status(status), wait=True)

    def status(self, text: str) -> None:
        """The one line that ``systemctl status`` shows."""
        self._send(_status(text))

    def progress(self, text: str) -> None:
        """`status`, and 60 more seconds for the start. Only meaningful before `ready`.

        The first one must arrive within the unit's ``TimeoutStartSec=``; send one at least every 20 seconds.
        """
        self._send(_status(text), f"EXTEND_TIMEOUT_USEC={START_EXTENSION_USEC}")

    def reloading(self) -> None:
        """A reload begins; end it with `ready`."""
        # MONOTONIC_USEC is required from systemd 253 on (Type=notify-reload) and ignored by 252.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now}", wait=True)

    def stopping(self, text: str) -> None:
        """The service is going down; send it before memory is freed."""
        self._send("STOPPING=1", _status(text), wait=True)

    def watchdog(self) -> None:
        """A sign of life, due every `watchdog_seconds`. Send it from the event loop, never from a thread of its own."""
        self._send("WATCHDOG=1")

    def repeat(self) -> None:
        """Sends what was not taken, without which a start, or a reload, would never end for the manager."""
        if self._owed and self._systemd is not None:
            self._systemd.socket.settimeout(0.0)
            try:
                self._systemd.notify("\n".join(self._owed))
            except OSError:  # which was logged the first time
                return
            log.info("systemd has taken %s now", self._owed[0])
            self._owed = ()

    def close(self) -> None:
        """Closes the socket; what is sent afterwards goes nowhere. Idempotent."""
        systemd, self._systemd = self._systemd, None
        if systemd is not None:
            systemd.socket.close()

    def _send(self, *lines: str, wait: bool = False) -> None:
        if self._systemd is None:
            return
        if wait:
            self._owed = ()
        self.repeat()  # in order: a status may belong to it
        # A status that is not taken at once is lost: the next one says more. A change of state is worth a moment.
        self._systemd.socket.settimeout(_SEND_TIMEOUT if wait else 0.0)
        try:
            self._systemd.notify("\n".join(lines))
            self._failing = False
        except OSError as error:
            if wait or not self._failing:  # of many in a row the first is enough
                log.warning("systemd did not take %s: %s", lines[0], error)
            self._failing = True
            if wait:
                self._owed = lines


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``env`` for a child: without what systemd addressed to the main process alone.

    A worker that inherits ``NOTIFY_SOCKET`` gets its messages refused and logged; one that inherits ``LISTEN_FDS`` or
    ``WATCHDOG_USEC`` would take another's descriptors or duties for its own (systemd, sd_listen_fds(3)).
    """
    return {
        name: value
        for name, value in env.items()
        if name != "NOTIFY_SOCKET" and not name.startswith(_MAIN_PROCESS_ONLY)
    }


_MAIN_PROCESS_ONLY = ("LISTEN_", "WATCHDOG_")


def _status(text: str) -> str:
    """One line of ASCII: sdnotify would send Latin-1, and systemd drops a status that is not valid UTF-8."""
    line = " ".join(text.split())[:_STATUS_LIMIT]
    return "STATUS=" + line.encode("ascii", "replace").decode("ascii")


def _watchdog_seconds(env: Mapping[str, str]) -> float | None:
    usec, pid = env.get("WATCHDOG_USEC"), env.get("WATCHDOG_PID")
    if not usec or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2_000_000
