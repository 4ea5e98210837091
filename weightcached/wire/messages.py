"""Every message of the protocol. One message is one JSON object, with descriptors beside it where the class says so.

Plain dataclasses: the client and `weightcachectl` build and read them without importing pydantic, which alone would
cost more than the whole attach. The receiving side of a request validates it with pydantic over these same classes
(`wire.validate`). Not frozen: making ten frozen classes costs 5 ms at each import, and a message is sent right after
it is made.

    a worker    hello, attach, renew, publish, reserve, status, evict, subscribe
    a service   hello, status, load, evict, verify, reload, subscribe, stop

Operations of `GUEST_OPS` are for every peer that is let in; the others are for the service's own user alone, and are
`NotPermitted` to the users of `allow_uids`, root included: who is root can become that user.

A reply is ``{"ok": {...}}`` or ``{"error": {...}}`` (`errors.to_wire`). Subscribers and waiting clients also get
``{"event": {...}}``. Unknown fields of a reply are ignored, unknown fields of a request are refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

PROTOCOL = 1  # another number is another protocol: both sides refuse and name both


@dataclass(slots=True)
class Hello:
    """First message. `device` is the device whose worker the client means to reach, None on a service's socket."""

    client: str
    version: str
    device: str | None = None
    protocol: int = PROTOCOL
    op: Literal["hello"] = "hello"


@dataclass(slots=True)
class Attach:
    """Asks for a shard and a lease on it; the reply carries the manifest and the slabs as descriptors.

    `key` holds the fields of `ShardKey` that must match. With `wait` seconds the reply comes when the model is there.
    """

    model: str
    key: dict[str, Any] = field(default_factory=dict)
    wait: float = 0.0
    op: Literal["attach"] = "attach"


@dataclass(slots=True)
class Renew:
    """Says again that a shard is in use, after the connection of its attach was lost; the reply grants a lease.

    The fields are those of the attach: `created` and `nbytes` as in the manifest, `since` of the first lease. Only on a
    connection that holds nothing yet, so one lease for each connection.
    """

    model: str
    generation: int
    created: str
    nbytes: int
    since: str
    op: Literal["renew"] = "renew"


@dataclass(slots=True)
class Reserve:
    """Asks for room for `nbytes` bytes on the device, before they are allocated. Ends with the connection.

    `peak`: bytes of the device that the publisher takes at any time beyond what it gives back by itself; None is
    `nbytes`. An engine that moves its weights into slabs frees as much as it takes, one slab later.
    """

    model: str
    nbytes: int
    peak: int | None = None
    op: Literal["reserve"] = "reserve"


@dataclass(slots=True)
class Publish:
    """Hands over a shard for which room is reserved: descriptors are the manifest, then the slabs in order."""

    op: Literal["publish"] = "publish"


@dataclass(slots=True)
class Status:
    op: Literal["status"] = "status"


@dataclass(slots=True)
class Evict:
    """Drops a model's shards; with `force` also those in use. `device` None: on every device of the service."""

    model: str
    device: str | None = None
    force: bool = False
    op: Literal["evict"] = "evict"


@dataclass(slots=True)
class Load:
    """Loads a configured model; the reply comes at once, progress comes to subscribers."""

    model: str
    op: Literal["load"] = "load"


@dataclass(slots=True)
class Verify:
    """Compares a model's resident bytes with its manifests' checksums; the reply comes when all are compared.

    `device` None: on every device of the service that has the model.
    """

    model: str
    device: str | None = None
    op: Literal["verify"] = "verify"


@dataclass(slots=True)
class Reload:
    """Reads the config file again and loads what is new or changed."""

    op: Literal["reload"] = "reload"


@dataclass(slots=True)
class Subscribe:
    """The reply is a status; events follow on the same connection."""

    op: Literal["subscribe"] = "subscribe"


@dataclass(slots=True)
class Stop:
    op: Literal["stop"] = "stop"


Request = Hello | Attach | Renew | Reserve | Publish | Status | Evict | Load | Verify | Reload | Subscribe | Stop
WORKER_OPS = frozenset({"hello", "attach", "renew", "reserve", "publish", "status", "evict", "subscribe"})
GUEST_OPS = frozenset({"hello", "attach", "renew", "status", "subscribe"})
SERVICE_OPS = frozenset({"hello", "status", "load", "evict", "verify", "reload", "subscribe", "stop"})


def request_to_json(request: Request) -> dict[str, Any]:
    return asdict(request)
