"""protocol: every state against every operation, and the deadline of each state, on a clock of the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from weightcached.errors import NotPermitted, ProtocolError, VersionMismatch, WrongDevice
from weightcached.wire.messages import (
    GUEST_OPS,
    SERVICE_OPS,
    WORKER_OPS,
    Attach,
    Evict,
    Hello,
    Load,
    Publish,
    Reload,
    Renew,
    Request,
    Reserve,
    Status,
    Stop,
    Subscribe,
    Verify,
    request_to_json,
)
from weightcached.wire.protocol import HELLO_SECONDS, IDLE_SECONDS, Session, State

START = 1000.0
REQUESTS: dict[str, Request] = {
    "hello": Hello(client="test", version="1", device="host-0"),
    "attach": Attach(model="m"),
    "renew": Renew(model="m", generation=1, created="", nbytes=1, since=""),
    "reserve": Reserve(model="m", nbytes=1),
    "publish": Publish(),
    "status": Status(),
    "evict": Evict(model="m"),
    "load": Load(model="m"),
    "verify": Verify(model="m"),
    "reload": Reload(),
    "subscribe": Subscribe(),
    "stop": Stop(),
}


def data_of(request: Request) -> bytes:
    return json.dumps(request_to_json(request)).encode()


def new(
    ops: frozenset[str] = WORKER_OPS, device: str | None = "host-0", allowed: frozenset[str] | None = None
) -> Session:
    return Session(
        ops=ops, uid=1000, allowed=ops if allowed is None else allowed, device=device, version="1.2.3", now=START
    )


def answer(session: Session, op: str, then: Callable[[], None] | None = None, now: float = START) -> None:
    """One request and its reply; `then` is what the handler grants with it."""
    session.receive(data_of(REQUESTS[op]), 0, now)
    if then is not None:
        then()
    session.replied(now)


def in_state(state: State) -> Session:
    """A session that came to a state in the way a client takes it."""
    session = new()
    if state is State.NEW:
        return session
    answer(session, "hello")
    match state:
        case State.BUSY:
            session.receive(data_of(REQUESTS["status"]), 0, START)
        case State.RESERVED:
            answer(session, "reserve", session.reserved)
        case State.HOLDING:
            answer(session, "attach", session.hold)
        case State.CLOSED:
            session.close()
    assert session.state is state
    return session


FIRST = "the first message must be hello"
SECOND = "a second hello"
NOT_HERE = "no operation"
PUBLISH = "publish must follow reserve"
AWAIT = "await the reply first"
OWN = "each lease has one of its own"
OK = ""
ON_A_WORKER = ["attach", "renew", "reserve", "status", "evict", "subscribe"]
ON_A_SERVICE_ONLY = ["load", "verify", "reload", "stop"]

TABLE: dict[State, dict[str, str]] = {
    State.NEW: {op: OK if op == "hello" else FIRST for op in REQUESTS},
    State.OPEN: {
        "hello": SECOND,
        "publish": PUBLISH,
        **dict.fromkeys(ON_A_WORKER, OK),
        **dict.fromkeys(ON_A_SERVICE_ONLY, NOT_HERE),
    },
    State.BUSY: dict.fromkeys(REQUESTS, AWAIT),
    State.RESERVED: {
        "hello": SECOND,
        "publish": OK,
        **dict.fromkeys(ON_A_WORKER, PUBLISH),
        **dict.fromkeys(ON_A_SERVICE_ONLY, NOT_HERE),
    },
    State.HOLDING: {
        "hello": SECOND,
        "publish": PUBLISH,
        **dict.fromkeys(ON_A_WORKER, OK),
        **dict.fromkeys(ON_A_SERVICE_ONLY, NOT_HERE),
        "renew": OWN,
    },
    State.CLOSED: dict.fromkeys(REQUESTS, AWAIT),
}


@pytest.mark.parametrize(
    ("state", "op", "problem"),
    [(state, op, problem) for state, row in TABLE.items() for op, problem in row.items()],
    ids=lambda value: value.value if isinstance(value, State) else str(value),
)
def test_every_state_and_every_operation(state: State, op: str, problem: str) -> None:
    """An operation is taken in exactly the states that the module's table allows; elsewhere the error says why."""
    session = in_state(state)
    if problem == OK:
        assert session.receive(data_of(REQUESTS[op]), 0, START) == REQUESTS[op]
        assert session.state is State.BUSY
    else:
        with pytest.raises(ProtocolError, match=problem):
            session.receive(data_of(REQUESTS[op]), 0, START)
        assert session.state is state


def test_the_table_is_complete() -> None:
    """The table above leaves out no state and no operation."""
    assert set(TABLE) == set(State)
    assert all(set(row) == set(REQUESTS) for row in TABLE.values())
    assert set(REQUESTS) == WORKER_OPS | SERVICE_OPS


@pytest.mark.parametrize("op", sorted(set(REQUESTS) - {"hello"}))
def test_a_service_takes_its_own_operations(op: str) -> None:
    """On a service's socket load, verify, reload and stop are known, and what only a worker does is not."""
    session = new(SERVICE_OPS, device=None)
    session.receive(data_of(Hello(client="ctl", version="1")), 0, START)
    session.replied(START)
    if op in SERVICE_OPS:
        assert session.receive(data_of(REQUESTS[op]), 0, START) == REQUESTS[op]
    else:
        with pytest.raises(ProtocolError, match=f"no operation '{op}' on this socket; there are \\['evict', "):
            session.receive(data_of(REQUESTS[op]), 0, START)


@pytest.mark.parametrize(
    ("state", "limit"),
    [
        (State.NEW, HELLO_SECONDS),
        (State.OPEN, IDLE_SECONDS),
        (State.BUSY, None),
        (State.RESERVED, None),
        (State.HOLDING, None),
        (State.CLOSED, None),
    ],
)
def test_each_state_has_its_deadline(state: State, limit: float | None) -> None:
    """A peer that owes a message has a deadline; one that waits, holds a lease or loads into reserved room has none."""
    assert in_state(state).deadline == (None if limit is None else START + limit)


def test_the_idle_time_begins_at_each_reply() -> None:
    """The deadline of an open connection counts from the last reply, not from the last request."""
    session = in_state(State.OPEN)
    session.receive(data_of(REQUESTS["status"]), 0, START + 50)
    assert session.deadline is None
    session.replied(START + 500)
    assert session.deadline == START + 500 + IDLE_SECONDS


def test_a_refused_message_does_not_extend_the_deadline() -> None:
    """A peer cannot stay by sending what is refused."""
    session = new()
    with pytest.raises(WrongDevice):
        session.receive(data_of(Hello(client="c", version="1", device="host-1")), 0, START + 4)
    assert (session.state, session.deadline) == (State.NEW, START + HELLO_SECONDS)


def test_a_publish_ends_the_reservation() -> None:
    """After the reply to a publish the connection is open again: a second publish needs a second reserve."""
    session = in_state(State.RESERVED)
    answer(session, "publish")
    assert session.state is State.OPEN
    answer(session, "reserve", session.reserved)
    assert session.state is State.RESERVED


@pytest.mark.parametrize("op", ["status", "attach", "evict"])
def test_a_lease_outlives_later_requests(op: str) -> None:
    """A connection that holds a lease or a subscription goes on holding it after other requests, granted or refused."""
    session = in_state(State.HOLDING)
    answer(session, op)
    assert (session.state, session.deadline) == (State.HOLDING, None)


def test_a_lease_outlives_a_publish() -> None:
    """A client that holds a lease and publishes on the same connection does not lose the lease to the idle deadline."""
    session = in_state(State.HOLDING)
    answer(session, "reserve", session.reserved)
    assert session.state is State.RESERVED
    answer(session, "publish")
    assert (session.state, session.deadline) == (State.HOLDING, None)


def test_a_reservation_that_was_refused_leaves_the_state() -> None:
    """Without the handler's grant a reserve is an operation like any other."""
    session = in_state(State.OPEN)
    answer(session, "reserve")
    assert session.state is State.OPEN


@pytest.mark.parametrize("ops", [WORKER_OPS, SERVICE_OPS], ids=["worker", "service"])
def test_another_user_attaches_and_looks_and_no_more(ops: frozenset[str]) -> None:
    """What is not for the peer's user is refused by name with what is, and leaves the connection as it was."""
    for op in sorted(ops - {"hello"}):
        session = new(ops, allowed=ops & GUEST_OPS)
        answer(session, "hello")
        if op in ("attach", "renew", "status", "subscribe"):
            answer(session, op)
        else:
            with pytest.raises(NotPermitted, match=f"{op} is not for uid 1000, .*; others may: .*status, subscribe"):
                session.receive(data_of(REQUESTS[op]), 0, START + 1)
            assert (session.state, session.deadline) == (State.OPEN, START + IDLE_SECONDS)


def test_only_publish_takes_descriptors() -> None:
    """Descriptors beside any other operation are a broken message; publish takes as many as a message carries."""
    with pytest.raises(ProtocolError, match="status carries 1 descriptors, it takes none"):
        in_state(State.OPEN).receive(data_of(Status()), 1, START)
    with pytest.raises(ProtocolError, match="hello carries 253 descriptors"):
        new().receive(data_of(REQUESTS["hello"]), 253, START)
    in_state(State.RESERVED).receive(data_of(Publish()), 253, START)


def test_another_protocol_is_refused_with_both_versions() -> None:
    """Whichever side is older, the error names both, and the fields that a later hello may have do not hide it."""
    text = b'{"op":"hello","client":"python","version":"9.1","protocol":9,"device":"host-7","more":{}}'
    with pytest.raises(VersionMismatch) as caught:
        new().receive(text, 0, START)
    assert caught.value.ours == "protocol 1 of weightcached 1.2.3"
    assert caught.value.theirs == "protocol 9 of python 9.1"


@pytest.mark.parametrize(("ours", "theirs"), [("host-0", "host-1"), ("host-0", None), (None, "host-0")])
def test_another_device_is_refused(ours: str | None, theirs: str | None) -> None:
    """A client that means another device, or a service and not a worker, is told which device it has reached."""
    session = new(device=ours)
    with pytest.raises(WrongDevice) as caught:
        session.receive(data_of(Hello(client="c", version="1", device=theirs)), 0, START)
    assert (caught.value.wanted, caught.value.found) == (theirs, ours)


def test_the_client_is_known_after_its_hello() -> None:
    """Name and version of the client are kept for messages."""
    session = new()
    assert session.client == ""
    answer(session, "hello")
    assert session.client == "test 1"


def test_garbage_leaves_the_state_as_it_was() -> None:
    """What is no request changes nothing; its owner closes the connection."""
    session = in_state(State.OPEN)
    with pytest.raises(ProtocolError):
        session.receive(b"\x00", 0, START)
    assert session.state is State.OPEN


def test_a_reply_after_the_end_does_not_reopen() -> None:
    """A late reply to a request of a closed connection leaves it closed."""
    session = in_state(State.BUSY)
    session.close()
    session.replied(START)
    assert (session.state, session.deadline) == (State.CLOSED, None)
