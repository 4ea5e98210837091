"""The rendezvous process: the nodes of a cluster exchange their descriptions once, through torch's TCPStore.

Node 0 hosts the store for as long as that takes. The service, which never imports torch, hands this process one socket
with the job on it; the answer goes the other way:

    {"job": {"host", "port", "node", "nodes", "round", "seconds", "description"}}
    {"met": {"descriptions": [...]}}          as text, in the order of the nodes
    {"failed": {"error": {...}}}              an error as on every socket of weightcached

What is in the store, below the name of the round, so that two rounds never mix:

    come/N    how often node N has come: twice is two services with one number
    node/N    its description, a JSON object
    read/N    it has read all others: when all have, node 0 closes the store, and nobody listens on the port any more
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from .errors import (
    ConnectionLost,
    MissingDependency,
    ProtocolError,
    TimedOut,
    WeightCacheError,
    to_wire,
)
from .meeting import DESCRIPTION_BYTES, Job, listen
from .wire import framing

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.distributed import TCPStore

LEAVE_SECONDS = 10.0  # for the other nodes to have read everything


def run(channel_fd: int) -> int:
    """Does the job that comes on the channel, which it takes over. Returns the exit code."""
    with socket.socket(fileno=channel_fd) as channel:
        code = 0
        try:
            job = _receive(channel)
            _end_with(channel, alive=True)
            frame = framing.Frame({"met": {"descriptions": meet(job)}})  # `ProtocolError` if it is too large
        except WeightCacheError as error:
            code, frame = 1, framing.Frame({"failed": {"error": to_wire(error)}})
        _end_with(channel, alive=False)
        with contextlib.closing(frame), contextlib.suppress(OSError):  # the service itself may be what is gone
            frame.send(channel)
    return code


def meet(job: Job) -> list[str]:
    """The descriptions of all nodes, in their order.

    `TimedOut` names the nodes that did not come; `ConnectionFailed` for a port that node 0 cannot have,
    `ConnectionLost` when node 0 has gone in between, `ProtocolError` for a node that came twice.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the same in many lines, with C++ stacks
    deadline = time.monotonic() + job.seconds
    with contextlib.ExitStack() as undo:
        # Before torch is imported, which takes a second: whoever comes meanwhile waits in the socket's queue.
        listener = undo.enter_context(listen(job.host, job.port)) if job.node == 0 else None
        try:
            from torch.distributed import DistError, TCPStore
        except ImportError:
            raise MissingDependency(package="torch", extra="torch", what="agreeing with other nodes") from None
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
        try:
            if listener is None:
                store = TCPStore(job.host, job.port, is_master=False, wait_for_workers=False, timeout=left)
            else:
                store = TCPStore(
                    job.host, job.port, is_master=True, wait_for_workers=False, timeout=left,
                    master_listen_fd=listener.detach(),
                )  # fmt: skip
        except DistError as error:
            raise TimedOut(
                path=job.address,
                seconds=job.seconds,
                waited_for=f"node 0, which does not listen there ({_first_line(error)}); "
                "every node must have its address and the same master_port",
            ) from None
    try:
        return _exchange(job, store, deadline)
    except DistError as error:
        problem = f"node 0 has gone in the middle of a rendezvous ({_first_line(error)})"
        raise ConnectionLost(path=job.address, problem=problem) from None


def _exchange(job: Job, store: TCPStore, deadline: float) -> list[str]:
    everybody = range(job.nodes)
    if store.add(job.key("come", job.node), 1) > 1:
        raise ProtocolError(problem=f"two services say that they are node {job.node} of {job.nodes}; see node_rank")
    store.set(job.key("node", job.node), job.description)
    if missing := _wait(job, store, "node", deadline):
        names = ", ".join(f"node {node}" for node in missing)
        store.set(job.key("read", job.node), "1")
        if job.node == 0:  # or the others, whose time began a little later, would say that node 0 has gone
            _wait(job, store, "read", time.monotonic() + LEAVE_SECONDS, without=missing)
        raise TimedOut(path=job.address, seconds=job.seconds, waited_for=f"{names} to come to the rendezvous there")
    found = []
    for node in everybody:
        data = store.get(job.key("node", node))
        if len(data) > DESCRIPTION_BYTES:
            raise ProtocolError(problem=f"node {node} sent {len(data)} bytes, at most {DESCRIPTION_BYTES} are read")
        found.append(data.decode(errors="replace"))
    store.set(job.key("read", job.node), "1")
    if job.node == 0:  # the store ends with this process: not before everybody has read it, if they can be waited for
        _wait(job, store, "read", time.monotonic() + LEAVE_SECONDS)
    return found


def _wait(job: Job, store: TCPStore, what: str, deadline: float, without: Collection[int] = ()) -> list[int]:
    """Waits until every node, but for `without`, has written that key. Returns those that have not at `deadline`."""
    from torch.distributed import DistStoreError

    left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
    nodes = [node for node in range(job.nodes) if node not in without]
    try:
        store.wait([job.key(what, node) for node in nodes], left)
    except DistStoreError:
        return [node for node in nodes if not store.check([job.key(what, node)])]
    return []


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _end_with(channel: socket.socket, alive: bool) -> None:
    """Has the kernel end this process, as SIGTERM does, when the service has gone; not `alive`: not any more.

    A wait in the store's C++ code sees nothing of a closed channel, and need not let another thread run.
    """
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    if not alive:
        fcntl.fcntl(channel, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        return
    fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(channel, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([channel], [], [], 0)[0]:  # it has gone before; it says nothing more, so nothing else is to read
        signal.raise_signal(signal.SIGTERM)


def _receive(channel: socket.socket) -> Job:
    received = framing.receive(channel, large=True)
    if received is None:
        raise ProtocolError(problem="the service closed the channel before it sent a job")
    received[1].close()
    try:
        return Job(**framing.decode(received[0])["job"])
    except (KeyError, TypeError) as error:
        raise ProtocolError(problem=f"the service sent a job that is not readable: {error!r}") from error
