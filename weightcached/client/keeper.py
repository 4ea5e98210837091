"""The thread that has a process's leases renewed when the worker at their other end has died.

    Lease ──► Line ◄── Keeper           one daemon thread a process, from the first lease on
                │
            Connection                  the lease in the eyes of the worker

The keeper polls every line's connection. One that ends is lost, and the keeper connects again and renews the lease:

    held        events are read                        of lost memory too: it is mapped as long as the lease lasts
    lost        waits for the socket                   by inotify where it is missing, for a moment where it refuses
    greeting    a hello is sent, its answer awaited    for ANSWER_SECONDS, then it is lost again
    renewing    a renew is sent, its answer awaited    likewise; a refusal ends the line

Only the keeper touches what it was given: a lease that ends puts its line into the keeper's inbox, from whichever
thread or finaliser, and takes no lock. Nothing that the keeper does blocks, so that an end is never late. Nor does it
import anything later: that may be in the middle of an upgrade of this package.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import ConnectionFailed, ServiceNotRunning, TooManyConnections, WeightCacheError
from ..fds import OwnedFd
from ..trace import point
from ..wire.connection import Connection
from ..wire.messages import Renew
from .waiting import PathWatch

ANSWER_SECONDS = 5.0  # for each answer; a connection waits in the socket's queue while no worker runs
LONGEST_DELAY = 1.0  # seconds between two tries where somebody listens, or may do so in a moment
STALE_DELAY = 30.0  # where nobody listens any more; a new socket at the path is an event
_FIRST_DELAY = 0.05
_CALM_SECONDS = 10.0  # after a try, for the next one to be the first again
_AT_HAND = 0.1  # seconds to read what the poll says is there
# Signals that are sent to a process are for the engine's own threads, which may block one in order to wait for it.
# Those that a thread causes itself are not among them: the engine may have its crashes traced.
_FOR_THE_ENGINE = signal.valid_signals() - {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT,
}  # fmt: skip
_log = logging.getLogger(__name__)


class Closable(Protocol):
    def close(self) -> None: ...


class Grant(NamedTuple):
    """What a worker has granted: what another one must know to grant it again. Times are UTC in RFC 3339."""

    device: str
    model: str
    generation: int
    created: str
    nbytes: int
    since: str


class _State(enum.Enum):
    HELD = "held"
    LOST = "lost"
    GREETING = "greeting"
    RENEWING = "renewing"


class Line:
    """A lease's connection, whichever it is now. Outlives the lease by what it takes to close it.

    Until it is given to the keeper it is the caller's alone.
    """

    def __init__(self, connection: Closable) -> None:
        self.connection = connection
        self.grant: Grant | None = None
        self.keeper: Keeper | None = None
        self.state = _State.HELD
        self.fd = -1  # as it is in the poll
        self.deadline = math.inf
        self.ended = False
        self.lost: str | None = None

    def end(self) -> None:
        """The lease is gone. Idempotent; from any thread, and from a finaliser in the middle of anything."""
        self.ended = True
        if self.keeper is not None and self.keeper.running:
            self.keeper.hand_over(self)
        else:
            self.connection.close()


class _Endpoint:
    """A worker's socket: who waits for it, and when it is tried again."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.device = device
        self.lost: collections.deque[Line] = collections.deque()
        self.calling: set[Line] = set()
        self.renewed: set[Line] = set()
        self.watch: PathWatch | None = None
        self.tried = -math.inf
        self.next_try = math.inf
        self._delay = 0.0

    @property
    def out(self) -> bool:
        return bool(self.lost or self.calling)

    def try_soon(self) -> None:
        """Something has changed: the next try is the first again. Not a second one at once: changes come in bursts."""
        self._delay = 0.0
        self.next_try = max(time.monotonic(), self.tried + _FIRST_DELAY)

    def try_later(self, longest: float) -> None:
        """After a try that failed, or a connection that ended: twice as late as the last time, `longest` at most.

        At once when nothing was tried for a while.
        """
        now = time.monotonic()
        self._delay = 0.0 if now - self.tried > _CALM_SECONDS else min(self._delay, longest)
        self.next_try = max(now, self.tried + self._delay)
        self._delay = min(max(2 * self._delay, _FIRST_DELAY), longest)


class Keeper:
    """Polls every lease of this process. All but `hand_over` is for its own thread."""

    def __init__(self) -> None:
        self.running = True
        self._inbox: collections.deque[Line] = collections.deque()
        self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._poll = select.poll()
        self._poll.register(self._wake.fileno(), select.POLLIN)
        self._ready: dict[int, Callable[[], None]] = {}
        self._endpoints: dict[Path, _Endpoint] = {}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_ENGINE)  # which the thread inherits
        try:
            threading.Thread(target=self._run, name="weightcached leases", daemon=True).start()
        except RuntimeError:
            self._wake.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def hand_over(self, line: Line) -> None:
        """A line that is new, or whose lease has ended."""
        self._inbox.append(line)
        os.eventfd_write(self._wake.fileno(), 1)

    def forget(self) -> None:
        """In a forked child, which has no thread: closes its copies of the descriptors that are not the leases'."""
        self.running = False
        self._wake.close()
        for endpoint in self._endpoints.values():
            if endpoint.watch is not None:
                endpoint.watch.close()

    def _run(self) -> None:
        try:
            while True:
                for fd, _ in self._poll.poll(self._milliseconds()):
                    if (ready := self._ready.get(fd)) is not None:
                        ready()
                # After the events: what comes in here may have the number of a descriptor that was closed by one.
                self._look_into_the_inbox()
                self._look_at_the_clock()
        finally:  # a defect, which the interpreter reports: from now on leases end without this thread
            self.running = False
            self._look_into_the_inbox()

    def _look_into_the_inbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake.fileno())
        while self._inbox:
            line = self._inbox.popleft()
            if line.ended:
                self._drop(line)
            else:
                self._listen(line, line.connection, _State.HELD)

    def _milliseconds(self) -> int | None:
        """Until something is due; None: nothing is. Rounded up, so that it is due then."""
        times = [endpoint.next_try for endpoint in self._endpoints.values() if endpoint.lost]
        times += [line.deadline for endpoint in self._endpoints.values() for line in endpoint.calling]
        first = min(times, default=math.inf)
        return None if first == math.inf else max(math.ceil((first - time.monotonic()) * 1000), 0)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for endpoint in self._endpoints.values():
            for line in [line for line in endpoint.calling if line.deadline <= now]:
                self._hang_up(line)
                self._lose(line, endpoint)
            if endpoint.lost and endpoint.next_try <= now:
                self._try(endpoint)

    # One line.

    def _listen(self, line: Line, connection: Any, state: _State) -> None:
        line.connection, line.state, line.fd = connection, state, connection.fileno()
        line.deadline = math.inf if state is _State.HELD else time.monotonic() + ANSWER_SECONDS
        self._ready[line.fd] = lambda: self._read(line)
        self._poll.register(line.fd, select.POLLIN)

    def _hang_up(self, line: Line) -> None:
        """Out of the poll, and closed."""
        if self._ready.pop(line.fd, None) is not None:
            self._poll.unregister(line.fd)
        line.fd = -1
        line.connection.close()

    def _drop(self, line: Line) -> None:
        """Its lease has ended, or is not to be renewed."""
        self._hang_up(line)
        line.ended = True
        for endpoint in self._endpoints.values():
            if line in endpoint.lost:
                endpoint.lost.remove(line)
            endpoint.calling.discard(line)
            self._settle(endpoint)

    def _read(self, line: Line) -> None:
        """What the poll says is there: an event, an answer, or the end of the connection."""
        connection, grant = line.connection, line.grant
        assert isinstance(connection, Connection) and grant is not None
        try:
            match line.state:
                case _State.HELD:
                    self._hear(line, grant, connection.next_event(_AT_HAND))
                case _State.GREETING:
                    connection.greeted(_AT_HAND)
                    point("client.renew")
                    said = Renew(grant.model, grant.generation, grant.created, grant.nbytes, grant.since)
                    connection.send(said, timeout=_AT_HAND)
                    line.state, line.deadline = _State.RENEWING, time.monotonic() + ANSWER_SECONDS
                case _State.RENEWING:
                    connection.answer("renew", _AT_HAND)[1].close()
                    self._renewed(line)
        except (ConnectionFailed, TooManyConnections, OSError) as error:
            _log.debug("%s of %s: %s", line.state.value, grant.model, error)
            self._hang_up(line)
            self._lose(line, self._endpoint(connection.path, grant.device))
        except WeightCacheError as error:
            self._refused(line, error)

    def _hear(self, line: Line, grant: Grant, event: dict[str, Any]) -> None:
        if event.get("what") == "lost" and line.lost is None:
            line.lost = str(event.get("reason"))
            _log.warning("weightcached: the weights of %s on %s are lost: %s", grant.model, grant.device, line.lost)

    def _lose(self, line: Line, endpoint: _Endpoint) -> None:
        """Its connection has ended, by itself or in the middle of a renewal."""
        endpoint.calling.discard(line)
        if line.ended:
            self._drop(line)
            return
        if line.state is _State.HELD and not endpoint.out:
            _log.warning("weightcached: the service of %s is gone; the weights stay mapped", endpoint.device)
        if not endpoint.lost:
            endpoint.try_later(LONGEST_DELAY)
        line.state = _State.LOST
        endpoint.lost.append(line)

    def _renewed(self, line: Line) -> None:
        line.state, line.deadline = _State.HELD, math.inf
        for endpoint in self._endpoints.values():
            if line in endpoint.calling:
                endpoint.calling.remove(line)
                endpoint.renewed.add(line)
                self._settle(endpoint)

    def _refused(self, line: Line, error: WeightCacheError) -> None:
        assert line.grant is not None
        _log.warning(
            "weightcached: the lease on %s on %s is not renewed, the weights stay mapped: %s",
            line.grant.model, line.grant.device, error,
        )  # fmt: skip
        self._drop(line)

    # One endpoint.

    def _endpoint(self, path: Path, device: str) -> _Endpoint:
        if path not in self._endpoints:
            self._endpoints[path] = _Endpoint(path, device)
        return self._endpoints[path]

    def _try(self, endpoint: _Endpoint) -> None:
        """Calls for every lost lease; the answers come through the poll."""
        endpoint.tried = time.monotonic()
        endpoint.next_try = math.inf
        self._watch(endpoint)  # first: what happens between this try and the next is not missed
        while endpoint.lost:
            line = endpoint.lost[0]
            try:
                connection = Connection.begin(endpoint.path, device=endpoint.device, timeout=_AT_HAND)
            except (ConnectionFailed, TooManyConnections, OSError) as error:
                _log.debug("%s: %s", endpoint.path, error)
                if not isinstance(error, ServiceNotRunning):
                    endpoint.try_later(LONGEST_DELAY)
                elif endpoint.watch is None or os.path.exists(endpoint.path):
                    endpoint.try_later(STALE_DELAY)
                return
            except WeightCacheError as error:
                self._refused(line, error)
                continue
            endpoint.lost.popleft()
            endpoint.calling.add(line)
            self._listen(line, connection, _State.GREETING)

    def _changed(self, endpoint: _Endpoint) -> None:
        """Something has come or gone on the way to the socket. The next try watches anew."""
        self._unwatch(endpoint)
        endpoint.try_soon()

    def _watch(self, endpoint: _Endpoint) -> None:
        self._unwatch(endpoint)
        try:
            endpoint.watch = PathWatch(endpoint.path)
        except ConnectionFailed as error:  # no inotify instance left: it is tried by the clock
            _log.debug("%s", error)
            return
        self._ready[endpoint.watch.fileno()] = lambda: self._changed(endpoint)
        self._poll.register(endpoint.watch.fileno(), select.POLLIN)

    def _unwatch(self, endpoint: _Endpoint) -> None:
        if endpoint.watch is not None:
            del self._ready[endpoint.watch.fileno()]
            self._poll.unregister(endpoint.watch.fileno())
            endpoint.watch.close()
            endpoint.watch = None

    def _settle(self, endpoint: _Endpoint) -> None:
        """Ends the watch if no lease waits for the endpoint any more, and logs how many were renewed."""
        if endpoint.out:
            return
        self._unwatch(endpoint)
        if endpoint.renewed:
            _log.warning(
                "weightcached: the service of %s is back; leases renewed: %d", endpoint.device, len(endpoint.renewed)
            )
            endpoint.renewed.clear()


_keeper: Keeper | None = None
_starting = threading.Lock()


def keep(line: Line, grant: Grant) -> None:
    """Hands the line to this process's keeper, which is started if there is none."""
    global _keeper
    line.grant = grant
    try:
        with _starting:
            if _keeper is None or not _keeper.running:
                _keeper = Keeper()
            line.keeper = _keeper
    except (OSError, RuntimeError) as error:  # no descriptor or no thread to be had; the memory is mapped all the same
        # Its text alone: the error refers to the frames that made the lease, and a log may be kept.
        _log.warning("weightcached: the lease will not be renewed if its service restarts: %s", str(error))
        return
    line.keeper.hand_over(line)


def _after_fork() -> None:
    """A child starts without the thread; what its parent's keeper does is not its business."""
    global _keeper, _starting
    _starting = threading.Lock()
    if _keeper is not None:
        _keeper.forget()
        _keeper = None


os.register_at_fork(after_in_child=_after_fork)
