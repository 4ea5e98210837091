"""What may come next on one connection, and until when: the protocol's state, without sockets or clocks.

    state       a request may come   deadline for it
    NEW         hello                HELLO_SECONDS after the connection
    OPEN        any op of this side  IDLE_SECONDS after the last reply
    BUSY        none                 none: the reply is this side's business
    RESERVED    publish              none: loading takes its time, and a reservation lasts as long as its connection
    HOLDING     any but publish,     none: a lease or a subscription lasts as long as its connection
                renew
    CLOSED      none

A message that does not fit raises `ProtocolError`; the connection is then answered and closed by its owner. An
operation that is not for the peer's user raises `NotPermitted` and changes nothing.
"""

from __future__ import annotations

import enum

from ..errors import NotPermitted, ProtocolError, VersionMismatch, WrongDevice
from .messages import PROTOCOL, Hello, Publish, Renew, Request
from .validate import parse_request

HELLO_SECONDS = 5.0
IDLE_SECONDS = 60.0


class State(enum.Enum):
    NEW = "new"
    OPEN = "open"
    BUSY = "busy"
    RESERVED = "reserved"
    HOLDING = "holding"
    CLOSED = "closed"


_LIMITS: dict[State, float | None] = {
    State.NEW: HELLO_SECONDS,
    State.OPEN: IDLE_SECONDS,
    State.BUSY: None,
    State.RESERVED: None,
    State.HOLDING: None,
    State.CLOSED: None,
}


class Session:
    """One connection's state. `now` is monotonic seconds, given by the caller each time."""

    def __init__(
        self, *, ops: frozenset[str], uid: int, allowed: frozenset[str], device: str | None, version: str, now: float
    ) -> None:
        """`ops` are those of this side, `allowed` those of them that are for the peer, whose user is `uid`."""
        self.client = ""
        self._ops = ops
        self._uid = uid
        self._allowed = allowed
        self._device = device
        self._version = version
        self._after_reply = State.OPEN
        self._holding = False
        self._deadline: float | None
        self._enter(State.NEW, now)

    @property
    def state(self) -> State:
        return self._state

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds by which the next message must have come; None: it may take any time."""
        return self._deadline

    def receive(self, data: bytes, descriptors: int, now: float) -> Request:
        """The request in a message, if it may come now. The session is BUSY until `replied`."""
        if self._state in (State.BUSY, State.CLOSED):
            raise ProtocolError(problem=f"a message on a connection that is {self._state.value}; await the reply first")
        request = parse_request(data)
        if self._state is State.NEW:
            self._greet(request)
        elif request.op == "hello":
            raise ProtocolError(problem="a second hello")
        if request.op not in self._ops:
            raise ProtocolError(problem=f"no operation {request.op!r} on this socket; there are {sorted(self._ops)}")
        if request.op not in self._allowed:
            raise NotPermitted(op=request.op, uid=self._uid, allowed=sorted(self._allowed - {"hello"}))
        publishing = isinstance(request, Publish)
        if publishing != (self._state is State.RESERVED):
            raise ProtocolError(problem="publish must follow reserve on the same connection, and nothing else may")
        if isinstance(request, Renew) and self._holding:
            raise ProtocolError(problem="renew on a connection that holds something; each lease has one of its own")
        if descriptors and not publishing:
            raise ProtocolError(problem=f"{request.op} carries {descriptors} descriptors, it takes none")
        self._after_reply = State.HOLDING if self._holding else State.OPEN
        self._enter(State.BUSY, now)
        return request

    def hold(self) -> None:
        """From the next reply on the connection is a lease or a subscription, a publish in between does not end it."""
        self._holding = True
        self._after_reply = State.HOLDING

    def reserved(self) -> None:
        """After the next reply only a publish may come."""
        self._after_reply = State.RESERVED

    def replied(self, now: float) -> None:
        """The reply is on its way; the peer may speak again."""
        if self._state is State.BUSY:
            self._enter(self._after_reply, now)

    def close(self) -> None:
        self._state = State.CLOSED
        self._deadline = None

    def _greet(self, request: Request) -> None:
        if not isinstance(request, Hello):
            raise ProtocolError(problem=f"the first message must be hello, not {request.op}")
        if request.protocol != PROTOCOL:
            raise VersionMismatch(
                ours=f"protocol {PROTOCOL} of weightcached {self._version}",
                theirs=f"protocol {request.protocol} of {request.client} {request.version}",
            )
        if request.device != self._device:
            raise WrongDevice(wanted=request.device, found=self._device)
        self.client = f"{request.client} {request.version}"

    def _enter(self, state: State, now: float) -> None:
        limit = _LIMITS[state]
        self._state = state
        self._deadline = None if limit is None else now + limit
