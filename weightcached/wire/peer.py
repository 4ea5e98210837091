"""Who is at the other end of a Unix socket: the kernel's word (SO_PEERCRED, unix(7)), never the peer's."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Collection
from typing import NamedTuple

from ..errors import PeerRefused
from ..fds import OwnedFd

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module yet


class Peer(NamedTuple):
    """The process that connected (or listened): its pid, its uid, and its command name where /proc tells it."""

    pid: int
    uid: int
    command: str


class PeerProcess:
    """The process that connected, by its pidfd, which no other process ever gets. Owns it until `close`.

    A connection may outlive that process, in a child that was forked with it: then the pid is nobody's, or another's.
    """

    def __init__(self, sock: socket.socket, pid: int) -> None:
        """Of a connected socket's peer, which has that pid. Raises nothing: what is not known counts as running."""
        self._gone = False
        self._pidfd: OwnedFd | None = None
        try:
            self._pidfd = OwnedFd(_pidfd_of(sock, pid))
        except OSError as error:  # also: no descriptor left, or a process of another pid namespace
            self._gone = error.errno == errno.ESRCH

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended. Asks the kernel, without waiting."""
        if not self._gone and self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd.fileno(), select.POLLIN)
            self._gone = bool(poll.poll(0))
        return self._gone

    def close(self) -> None:
        if self._pidfd is not None:
            self._pidfd.close()
            self._pidfd = None


def _pidfd_of(sock: socket.socket, pid: int) -> int:
    with contextlib.suppress(OSError):  # an older kernel; or ended already, which the next call tells
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    return os.pidfd_open(pid)


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected socket."""
    credentials = struct.Struct("iII")
    pid, uid, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            command = file.read().strip()
    except OSError:  # gone already, or in another pid namespace
        command = "?"
    return Peer(pid, uid, command)


def require_user(peer: Peer, allowed: Collection[int]) -> None:
    """`PeerRefused` unless the peer runs as one of the users."""
    if peer.uid not in allowed:
        raise PeerRefused(uid=peer.uid, allowed=sorted(allowed))
