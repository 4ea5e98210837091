"""One message on a SOCK_SEQPACKET socket: a JSON object and the descriptors that travel with it.

The kernel keeps message boundaries (unix(7)), so there is no length field. A message is 64 KiB at most; a larger reply
travels as a sealed memfd in front of its other descriptors. Received descriptors are owned before a byte of JSON is
read, so no error leaks one. `socket.recv_fds` of Python 3.11 ignores its flags: `recvmsg` is called here instead, with
MSG_CMSG_CLOEXEC.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable
from typing import Any

from ..errors import ManifestError, ProtocolError
from ..fds import FdSet, OwnedFd
from ..memfd import require_seals, sealed_memfd

MAX_MESSAGE = 64 << 10
MAX_DESCRIPTORS = 253  # SCM_MAX_FD of the Linux kernel
MAX_LARGE_MESSAGE = 64 << 20
_LARGE = b'{"in":"memfd"}'
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class Frame:
    """One encoded message, ready to be sent. Owns the memfd of a large one; the other descriptors stay the caller's."""

    def __init__(self, message: dict[str, Any], fds: Iterable[int] = ()) -> None:
        self.data = json.dumps(message, separators=(",", ":")).encode()
        self._fds = list(fds)
        self._large: OwnedFd | None = None
        if len(self.data) > MAX_LARGE_MESSAGE:
            raise ProtocolError(problem=f"a message of {len(self.data)} bytes, at most {MAX_LARGE_MESSAGE} are sent")
        if len(self.data) > MAX_MESSAGE:
            self._large = sealed_memfd("weightcached-message", self.data)
            self.data = _LARGE
            self._fds.insert(0, self._large.fileno())
        if len(self._fds) > MAX_DESCRIPTORS:
            self.close()
            raise ProtocolError(problem=f"{len(self._fds)} descriptors in one message, at most {MAX_DESCRIPTORS}")

    def send(self, sock: socket.socket) -> None:
        """Sends it whole or raises `OSError` (`BlockingIOError` on a full non-blocking socket: try again later)."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._fds))] if self._fds else []
        sock.sendmsg([self.data], ancillary, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        if self._large is not None:
            self._large.close()


def receive(sock: socket.socket, *, large: bool = False) -> tuple[bytes, FdSet] | None:
    """The next message's JSON bytes and its descriptors, which the caller owns; None when the peer has closed.

    Messages by memfd are accepted with `large` only: a client reads large replies, a server takes no large request.
    Raises `ProtocolError` for an oversized or truncated message, `OSError` of the socket as it is.
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # A peer that closed with unread input: the kernel says so once, before what the peer sent last (af_unix).
        data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    fds = FdSet(_descriptors(ancillary))
    try:
        if flags & socket.MSG_TRUNC:
            raise ProtocolError(problem=f"a message of more than {MAX_MESSAGE} bytes")
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(problem="a message whose descriptors did not all arrive; raise the open files limit")
        if not data:
            fds.close()
            return None
        if large and data == _LARGE:
            return _read_large(fds)
        return data, fds
    except ProtocolError:
        fds.close()
        raise


def decode(data: bytes) -> dict[str, Any]:
    """The JSON object. `ProtocolError` for anything else."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(problem=f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(problem=f"a JSON {type(message).__name__} where an object was expected")
    return message


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return list(numbers)


def _read_large(fds: FdSet) -> tuple[bytes, FdSet]:
    owned = fds.steal_all()
    rest = FdSet()
    try:
        if not owned:
            raise ProtocolError(problem="a large message without its memfd")
        fd = owned[0].fileno()
        try:
            require_seals(fd, "message")
        except ManifestError as error:
            raise ProtocolError(problem=str(error)) from None
        size = os.fstat(fd).st_size
        if size > MAX_LARGE_MESSAGE:
            raise ProtocolError(problem=f"a message of {size} bytes, at most {MAX_LARGE_MESSAGE} are read")
        data = os.pread(fd, size, 0)
        rest = FdSet(item.steal() for item in owned[1:])
        return data, rest
    finally:
        for item in owned:
            item.close()
