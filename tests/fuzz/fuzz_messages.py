"""Fuzzes what a peer's message goes through on the listening side: bytes, request, state. Pure: no socket, no clock.

    python -m tests.fuzz.fuzz_messages [MESSAGES] [SEED]

Every message is judged by rules of this module's own: a refusal is a `WeightCacheError` that can be sent and changes
nothing; a request is what the bytes say, from the operations of this side and this peer; hello comes first and once,
publish after a granted reserve and then nothing else, descriptors with publish only. A `Violation` names the message.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import fields
from typing import Any

from tests.fuzz.messages import Mutator
from weightcached.errors import ProtocolError, WeightCacheError, to_wire
from weightcached.shard.key import KEY_FIELDS
from weightcached.wire.framing import Frame, decode
from weightcached.wire.messages import GUEST_OPS, SERVICE_OPS, WORKER_OPS, Hello, Request
from weightcached.wire.protocol import HELLO_SECONDS, IDLE_SECONDS, Session, State

MESSAGES = 1_000_000
NOW = 1000.0
_TYPES: dict[str, Any] = {
    "client": str, "version": str, "device": (str, type(None)), "protocol": int, "model": str, "key": dict,
    "generation": int, "created": str, "nbytes": int, "since": str, "force": bool, "op": str, "wait": (int, float),
}  # fmt: skip


class Violation(Exception):
    """The listening side did what it must not."""


class Judge:
    """One session and what is known of it from outside: whether it was greeted, holds something, has room reserved."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance.random
        self.begin()

    def begin(self) -> None:
        """Another connection: to a worker or a service, by its own user or another one."""
        kind = self._chance()
        self.device = "host-0" if kind < 0.8 else None
        self.ops = WORKER_OPS if kind < 0.8 else SERVICE_OPS
        self.allowed = self.ops if kind < 0.6 or kind >= 0.9 else self.ops & GUEST_OPS
        self.greeted = self.holding = self.reserved = self.busy = False
        self.session = Session(ops=self.ops, uid=1, allowed=self.allowed, device=self.device, version="1.2.3", now=NOW)

    def receive(self, data: bytes, descriptors: int) -> bool:
        """Whether the session takes a message. `Violation` if it must not, or refuses it in a wrong way."""
        session = self.session
        state, deadline = session.state, session.deadline
        try:
            request = session.receive(data, descriptors, NOW + 1)
        except WeightCacheError as error:
            if session.state is not state or session.deadline != deadline:
                raise Violation(f"a refused message has changed the state: {data[:200]!r}") from error
            if self._chance() < 0.01:
                check_can_be_sent(error)
            return False
        self._check(request, data, descriptors)
        self.busy = True
        self.greeted = True
        return True

    def reply(self) -> None:
        """Answers what was taken, with what a handler may grant, and looks whether the state is the one it must be."""
        session, granted = self.session, self._chance()
        if self.reserved:
            self.reserved = False  # by the publish, done or refused
        elif granted < 0.1:
            session.reserved()
            self.reserved = True
        elif granted < 0.2:
            session.hold()
            self.holding = True
        session.replied(NOW)
        self.busy = False
        expected = State.RESERVED if self.reserved else State.HOLDING if self.holding else State.OPEN
        limit = IDLE_SECONDS if expected is State.OPEN else None
        if session.state is not expected or session.deadline != (None if limit is None else NOW + limit):
            raise Violation(f"{session.state} until {session.deadline}, expected {expected}")

    def _check(self, request: Request, data: bytes, descriptors: int) -> None:
        def require(holds: bool, what: str) -> None:
            if not holds:
                raise Violation(f"{what}: {data[:200]!r}")

        session = self.session
        op = request.op
        require(not self.busy, "a message before the reply is taken")
        require(op in self.allowed, "an operation that is not for this peer is taken")
        require((op == "hello") is not self.greeted, "hello is not the first message, or not the only one")
        require((op == "publish") is self.reserved, "publish is taken without room, or something else with it")
        require(op != "renew" or not self.holding, "renew is taken on a connection that holds something")
        require(not descriptors or op == "publish", "descriptors are taken that nobody wants")
        require(session.state is State.BUSY and session.deadline is None, "the peer is not waited for")
        said = json.loads(data)
        require(type(said) is dict, "something else than an object is taken")
        known = {item.name for item in fields(request)}
        require(isinstance(request, Hello) or said.keys() <= known, "an unknown field is taken")
        for name in known & said.keys():
            value = float(said[name]) if name == "wait" else said[name]
            require(getattr(request, name) == value, f"{name} is taken as another value")
            require(isinstance(value, _TYPES[name]), f"{name} is taken of another type")
            require(not isinstance(value, bool) or name == "force", f"{name} is taken as a number")
        if op == "hello":
            require((said.get("protocol", 1), said.get("device")) == (1, self.device), "a stranger is greeted")
        require(op != "attach" or said.get("key", {}).keys() <= KEY_FIELDS, "an unknown field of the key is taken")


def check_can_be_sent(error: WeightCacheError) -> None:
    """A refusal fits into a message, and what this side says of a message is a sentence in one line."""
    reply = {"error": to_wire(error)}
    Frame(reply).close()
    if type(error) is not ProtocolError:  # the others say what the peer has said of itself
        return
    if len(reply["error"]["message"]) > 10_000:
        raise Violation(f"a refusal that is as long as what it refuses: {str(reply)[:500]}")
    if not reply["error"]["message"] or not reply["error"]["message"].isprintable():
        raise Violation(f"a refusal without a sentence in one line: {reply}")


def check_decode(data: bytes) -> None:
    """What the other direction reads bytes with gives an object or a `ProtocolError`."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    if type(message) is not dict:
        raise Violation(f"not an object: {data[:200]!r}")


def run(messages: int, seed: int) -> dict[str, int]:
    """Sends that many mutated messages, and honest ones in between to come to every state. Returns what came of them.

    {"taken": mutated messages that were requests, "refused": the others, "connections", and each state: messages met}
    """
    chance = random.Random(seed)
    mutator, judge, pick = Mutator(chance), Judge(chance), chance.random
    met = dict.fromkeys(State, 0)
    taken = connections = 0
    assert judge.session.deadline == NOW + HELLO_SECONDS
    for number in range(messages):
        state = judge.session.state
        met[state] += 1
        data = mutator.message()
        descriptors = 0 if pick() < 0.9 else int(pick() * 254)
        if judge.receive(data, descriptors):
            taken += 1
            if pick() < 0.9:  # else the next message comes before the reply
                judge.reply()
        elif state is State.BUSY:
            judge.reply()
        elif pick() < 0.3:  # an honest message to get on with
            op = mutator.valid[int(pick() * len(mutator.valid))]
            if not judge.greeted:
                op = mutator.valid[0] if judge.device else mutator.valid[0].replace(b'"host-0"', b"null")
            elif judge.reserved:
                op = b'{"op":"publish"}'
            if judge.receive(op, 0):
                judge.reply()
        elif pick() < 0.05:
            judge.begin()
            connections += 1
        if number % 8 == 0:
            check_decode(data)
    return {
        "taken": taken,
        "refused": messages - taken,
        "connections": connections,
        **{state.value: count for state, count in met.items()},
    }


def main() -> None:
    messages, seed = [*map(int, sys.argv[1:]), *(MESSAGES, 1)[len(sys.argv) - 1 :]]
    started = time.perf_counter()
    result = run(messages, seed)
    elapsed = time.perf_counter() - started
    print(json.dumps({"messages": messages, "seed": seed, "seconds": round(elapsed, 2), **result}))


if __name__ == "__main__":
    main()
