"""Leases: why a worker counts a shard as in use."""

from __future__ import annotations

import weakref

from .keeper import Closable, Grant, Line, keep


class Lease:
    """The shard counts as in use while this object lives. Takes over the connection of an attach.

    It ends with that connection, unless it is kept. It belongs to one process: a child that is forked holds the
    connection as well, so that the worker counts the shard as in use, by this process, until both have ended; but the
    child renews nothing.
    """

    def __init__(self, connection: Closable) -> None:
        self._line = Line(connection)
        self._end = weakref.finalize(self, self._line.end)

    def keep(self, grant: Grant) -> None:
        """From now on it is renewed when its connection ends. Nobody else may use or close that any more."""
        keep(self._line, grant)

    def give_up(self) -> None:
        """The worker counts it no more, while this object goes on: `take_over` gives it life again. Idempotent."""
        self._end()

    def take_over(self, other: Lease) -> None:
        """This object, which was given up, stands for the other's lease; the other one for none any more."""
        self._line = other._line
        self._end = weakref.finalize(self, self._line.end)
        other._end.detach()

    @property
    def ended(self) -> bool:
        """Whether no worker counts it any more: it was dropped, or refused when it was to be renewed."""
        return self._line.ended

    @property
    def lost(self) -> str | None:
        """Why the memory's content is lost, None while it is good."""
        return self._line.lost
