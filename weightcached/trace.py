"""Named points in the code at which a test may stop a process, or kill it: races without sleeps.

    point("loader.filled")

does nothing but look at one variable, unless $WEIGHTCACHED_TRACE names a SOCK_SEQPACKET socket when the process starts
(children inherit it). Then the process says who it is and where,

    {"point": "loader.filled", "pid": 4242, "role": "loader host-0 minilm"}

and stops there, event loop and all, until the other end sends one byte, kills it, or closes the connection. Where
nobody listens it goes on. Imports nothing that an engine would pay for.
"""

from __future__ import annotations

import os
import sys

_listener = os.environ.get("WEIGHTCACHED_TRACE")


def point(name: str) -> None:
    """The process is at `name`. Returns when whoever traces it lets it go on; at once when nobody does."""
    if _listener is not None:
        _stop_at(name, _listener)


def _stop_at(name: str, listener: str) -> None:
    import json
    import socket

    here = {"point": name, "pid": os.getpid(), "role": " ".join(sys.argv[1:4])}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(listener)
            connection.send(json.dumps(here).encode())
            connection.recv(1)
        except OSError:  # whoever traces has ended; the process must not end with it
            return
