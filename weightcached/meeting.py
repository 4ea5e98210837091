"""Where the nodes of a cluster meet: what a `rendezvous` process is told, and the port of node 0. Without torch."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass

from .errors import ConnectionFailed

DESCRIPTION_BYTES = 1 << 20  # of a node, as UTF-8


@dataclass(frozen=True, slots=True)
class Job:
    """Where the nodes meet, for at most `seconds`; `round` names the meeting."""

    host: str
    port: int
    node: int
    nodes: int
    round: str
    seconds: float
    description: str

    @property
    def address(self) -> str:
        return host_and_port(self.host, self.port)

    def key(self, what: str, node: int) -> str:
        return f"weightcached/{self.round}/{what}/{node}"


def host_and_port(host: object, port: object) -> str:
    """As people write them: "10.0.0.1:29650", "[::1]:29650"."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


async def resolve(name: str, port: int) -> str:
    """The address of node 0, which `name` may be already. `ConnectionFailed` if it is not to be found."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"master_addr is not to be found: {error.strerror or error}"
        raise ConnectionFailed(path=host_and_port(name, port), problem=problem) from error
    return str(found[0][4][0])


def listen(host: str, port: int, setting: str = "master_port") -> socket.socket:
    """A socket that listens there and nowhere else; the caller closes it. `ConnectionFailed` with what to do.

    `setting` of [cluster] that names the port. A port that a rendezvous has just left can be had again at once.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)  # sets SO_REUSEADDR
    except OSError as error:
        raise refused(host, port, error, setting) from error


def refused(host: str, port: int, error: OSError, setting: str = "master_port") -> ConnectionFailed:
    """Why node 0 cannot have a port of that address, of TCP or UDP."""
    problem = {
        errno.EADDRINUSE: f"is in use by another program on this node; end it, or give all nodes another {setting}",
        errno.EADDRNOTAVAIL: "is no address of this node; master_addr is that of node 0, is this node_rank = 0?",
        errno.EACCES: f"may not be listened on by this user; take a {setting} of 1024 or more",
        errno.EAFNOSUPPORT: "needs internet sockets, which the unit forbids; see network.conf.example beside the unit",
    }.get(error.errno or 0, f"cannot be listened on: {error.strerror or error}")
    return ConnectionFailed(path=host_and_port(host, port), problem=problem)
