"""A million mutated messages through parser and state, and planted bugs, which the judge finds."""

from __future__ import annotations

import os
import random

import pytest

from tests.fuzz.fuzz_messages import MESSAGES, Violation, run
from weightcached.errors import WeightCacheError
from weightcached.wire import messages, protocol
from weightcached.wire.protocol import Session, State

SEED = int(os.environ.get("WEIGHTCACHED_FUZZ_SEED") or 1)


@pytest.mark.timeout(240)
def test_a_million_messages_break_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is a request that may come now, or a `WeightCacheError` that leaves the connection's state as it was."""
    met = run(MESSAGES, SEED)
    with capsys.disabled():
        print(f"\n{MESSAGES} messages, seed {SEED}: {met}")
    assert met["taken"] + met["refused"] == MESSAGES
    assert met["taken"] > MESSAGES // 20, (
        "hardly any mutated message is a request: what is behind the parser is not met"
    )
    for state in set(State) - {State.CLOSED}:
        assert met[state.value] > MESSAGES // 1000, f"{state} is hardly met"


def test_a_seed_repeats_a_run() -> None:
    """What a run met once it meets again, so that a finding can be looked at."""
    assert run(2000, 5) == run(2000, 5) != run(2000, 6)


class _Never:
    """In the place of a class: nothing is an instance."""


@pytest.mark.parametrize(
    ("plant", "finding"),
    [
        ("crash", KeyError),
        ("lax", Violation),
        ("anybody", Violation),
        ("no room", Violation),
        ("stray", Violation),
        ("impatient", Violation),
        ("forgets", Violation),
    ],
)
def test_a_planted_bug_is_found(plant: str, finding: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another exception, loose types, no hello, publish without room, stray descriptors, no waiting for the reply, a
    state that a refused message changes: each ends the run."""
    parse, receive = protocol.parse_request, Session.receive
    match plant:
        case "crash":
            chance = random.Random(1)

            def crash(data: bytes) -> messages.Request:
                request = parse(data)
                if request.op == "renew" and chance.random() < 0.01:
                    raise KeyError("model")
                return request

            monkeypatch.setattr(protocol, "parse_request", crash)
        case "lax":

            def lax(data: bytes) -> messages.Request:
                try:
                    return parse(data)
                except WeightCacheError:
                    if not data.startswith(b'{"op":"reserve","model":"m","nbytes":1.5'):
                        raise
                    return messages.Reserve(model="m", nbytes=1)

            monkeypatch.setattr(protocol, "parse_request", lax)
        case "anybody":
            monkeypatch.setattr(Session, "_greet", lambda self, request: None)
        case "no room":
            monkeypatch.setattr(protocol, "Publish", _Never)
        case "stray":
            monkeypatch.setattr(Session, "receive", lambda self, data, count, now: receive(self, data, 0, now))
        case "impatient":

            def impatient(self: Session, data: bytes, count: int, now: float) -> messages.Request:
                if self._state is State.BUSY:
                    self._state = State.OPEN
                return receive(self, data, count, now)

            monkeypatch.setattr(Session, "receive", impatient)
        case "forgets":

            def forgets(self: Session, data: bytes, count: int, now: float) -> messages.Request:
                try:
                    return receive(self, data, count, now)
                except WeightCacheError:
                    self._deadline = None
                    raise

            monkeypatch.setattr(Session, "receive", forgets)
    with pytest.raises(finding):
        run(100_000, SEED)
