"""The messages: every request has an operation of its own and survives JSON."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from weightcached.wire.messages import (
    PROTOCOL,
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

EXPECTED: list[tuple[Request, dict[str, Any]]] = [
    (
        Hello("python", "0.1.0", device="host-0"),
        {"client": "python", "version": "0.1.0", "device": "host-0", "protocol": PROTOCOL, "op": "hello"},
    ),
    (
        Attach("minilm", {"layers": (0, 6), "revision": None}, wait=1.5),
        {"model": "minilm", "key": {"layers": [0, 6], "revision": None}, "wait": 1.5, "op": "attach"},
    ),
    (
        Renew("minilm", 3, "2026-01-01T00:00:00+00:00", 1 << 30, "2026-01-02T00:00:00+00:00"),
        {
            "model": "minilm",
            "generation": 3,
            "created": "2026-01-01T00:00:00+00:00",
            "nbytes": 1 << 30,
            "since": "2026-01-02T00:00:00+00:00",
            "op": "renew",
        },
    ),
    (Reserve("minilm", 1 << 40), {"model": "minilm", "nbytes": 1 << 40, "peak": None, "op": "reserve"}),
    (Publish(), {"op": "publish"}),
    (Status(), {"op": "status"}),
    (Evict("minilm"), {"model": "minilm", "device": None, "force": False, "op": "evict"}),
    (Load("minilm"), {"model": "minilm", "op": "load"}),
    (Verify("minilm", "host-0"), {"model": "minilm", "device": "host-0", "op": "verify"}),
    (Reload(), {"op": "reload"}),
    (Subscribe(), {"op": "subscribe"}),
    (Stop(), {"op": "stop"}),
]


@pytest.mark.parametrize(("request_", "expected"), EXPECTED, ids=lambda value: type(value).__name__)
def test_what_goes_over_the_wire(request_: Request, expected: dict[str, Any]) -> None:
    """The JSON object of each request, field by field: this is the protocol, and other versions rely on it."""
    assert json.loads(json.dumps(request_to_json(request_))) == expected


def test_every_request_is_among_the_expected() -> None:
    """No message can be added without its wire form being written down here."""
    assert {type(request) for request, _ in EXPECTED} == set(get_args(Request))


def test_every_operation_is_answered_by_somebody() -> None:
    """Operations are unique, and the worker's and the service's together are all of them."""
    ops = [request.op for request, _ in EXPECTED]

    assert len(set(ops)) == len(ops)
    assert set(ops) == WORKER_OPS | SERVICE_OPS
