"""Who is at the other end of a Unix socket: the kernel's word (SO_PEERCRED, unix(7)), never the peer's."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

from ..errors import PeerRefused


class Peer(NamedTuple):
    """The process that connected (or listened): its pid, its uid, and its command name where /proc tells it."""

    pid: int
    uid: int
    command: str


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected socket."""
    credentials = struct.Struct("3i")
    pid, uid, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            command = file.read().strip()
    except OSError:  # gone already, or in another pid namespace
        command = "?"
    return Peer(pid, uid, command)


def require_same_user(peer: Peer) -> None:
    """`PeerRefused` unless the peer runs as this process's user."""
    if peer.uid != os.geteuid():
        raise PeerRefused(uid=peer.uid, allowed=[os.geteuid()])
