"""How much one peer may ask for: connections by user, messages by time. Pure state, without sockets or clocks."""

from __future__ import annotations

import collections
import resource
from collections.abc import Iterable

from ..errors import PeerRefused, TooManyConnections

MAX_CONNECTIONS = 4096  # of one server, as long as its queue (`service.claim.BACKLOG`)
MAX_HELD = 256  # leases, waits, reservations and subscriptions that one connection may collect
BURST = 100  # messages that are read at once
PER_SECOND = 50.0  # messages that are read in the long run


def connection_limit() -> int:
    """Connections that this process can keep: two files each, a socket and a pidfd, take half of those it may open.

    The other half is for what it holds.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(soft // 4, 1))


class Shares:
    """Connections by user. Half of all are for the server's own user, the others share the rest evenly.

    No user can take another's share: not by silence, not by number. Without others all are for the server's user.
    """

    def __init__(self, total: int, own: int, others: Iterable[int]) -> None:
        """`own` and `others` are uids."""
        guests = frozenset(others) - {own}
        self._shares = dict.fromkeys(guests, max(total // 2 // len(guests), 1)) if guests else {}
        self._shares[own] = total - total // 2 if guests else total
        self._open: collections.Counter[int] = collections.Counter()

    def take(self, uid: int) -> None:
        """One more connection of a user. `PeerRefused` for one without a share, `TooManyConnections` beyond it."""
        share = self._shares.get(uid)
        if share is None:
            raise PeerRefused(uid=uid, allowed=sorted(self._shares))
        if self._open[uid] >= share:
            raise TooManyConnections(uid=uid, limit=share)
        self._open[uid] += 1

    def give_back(self, uid: int) -> None:
        """A connection of that user has ended."""
        self._open[uid] -= 1


class Pace:
    """How fast one connection's messages are read: BURST at once, then PER_SECOND. Nothing is refused, only read later.

    An honest client never notices: an attach is two messages. `now` is monotonic seconds, given by the caller.
    """

    def __init__(self, now: float) -> None:
        self._next = now - BURST / PER_SECOND  # when the message after those already read is due at PER_SECOND

    def read(self, now: float) -> float:
        """One message has been read. Seconds until the next one may be, 0 for at once."""
        self._next = max(self._next, now - BURST / PER_SECOND) + 1 / PER_SECOND
        return max(self._next - now, 0.0)
