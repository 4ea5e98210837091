"""limits: shares of connections and the pace of messages, by arithmetic on clocks of the test's own."""

from __future__ import annotations

import resource

import pytest

from weightcached.errors import PeerRefused, TooManyConnections
from weightcached.wire import limits
from weightcached.wire.limits import BURST, MAX_CONNECTIONS, PER_SECOND, Pace, Shares, connection_limit

START = 1000.0


def fill(shares: Shares, uid: int) -> int:
    """How many connections a user gets before it is refused."""
    for number in range(10_000):
        try:
            shares.take(uid)
        except TooManyConnections as error:
            assert error.fields == {"uid": uid, "limit": number}
            return number
    raise AssertionError("no limit")


def test_alone_the_own_user_has_everything() -> None:
    """Without others every connection is for the server's own user, and others are refused as before."""
    shares = Shares(10, own=1000, others=())
    assert fill(shares, 1000) == 10
    with pytest.raises(PeerRefused) as caught:
        shares.take(1001)
    assert (type(caught.value), caught.value.fields) == (PeerRefused, {"uid": 1001, "allowed": [1000]})


@pytest.mark.parametrize(
    ("total", "others", "own_share", "share"),
    [
        (10, [1001], 5, 5),
        (11, [1001], 6, 5),
        (10, [0, 1001], 5, 2),
        (10, [1000, 1001, 1001], 5, 5),
        (2, [1, 2, 3], 1, 1),
    ],
)
def test_nobody_takes_anothers_share(total: int, others: list[int], own_share: int, share: int) -> None:
    """Whoever comes first and takes all it gets leaves the others what is theirs; root is a user like any other."""
    users = sorted({1000, *others})
    for order in (users, users[::-1]):
        shares = Shares(total, own=1000, others=others)
        assert {uid: fill(shares, uid) for uid in order} == {uid: own_share if uid == 1000 else share for uid in users}


def test_an_ended_connection_makes_room_for_its_user_only() -> None:
    """What one user gives back is not another's."""
    shares = Shares(4, own=1000, others=[1001])
    assert (fill(shares, 1000), fill(shares, 1001)) == (2, 2)
    shares.give_back(1001)
    with pytest.raises(TooManyConnections):
        shares.take(1000)
    shares.take(1001)
    with pytest.raises(TooManyConnections):
        shares.take(1001)


@pytest.mark.parametrize(
    ("soft", "limit"),
    [(1 << 20, MAX_CONNECTIONS), (1024, 256), (1, 1), (resource.RLIM_INFINITY, MAX_CONNECTIONS)],
)
def test_the_limit_leaves_descriptors_for_shards(soft: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the files that the process may open, and never more than the queue of the socket."""
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (soft, soft))
    assert connection_limit() == limit


def test_a_burst_is_read_at_once() -> None:
    """The first BURST messages are not delayed, the next one is, by as much as the pace says."""
    pace = Pace(START)
    assert [pace.read(START) for _ in range(BURST)] == [0.0] * BURST
    assert pace.read(START) == pytest.approx(1 / PER_SECOND)


def test_in_the_long_run_the_pace_holds() -> None:
    """A client that asks as soon as it may is read BURST + PER_SECOND x seconds times, however long it goes on."""
    pace, now, read = Pace(START), START, 0
    while now < START + 60:
        now += pace.read(now)
        read += 1
    assert read == pytest.approx(BURST + 60 * PER_SECOND, abs=2)


def test_a_slow_client_is_never_delayed() -> None:
    """At the pace or below it nothing waits, and what was not used does not add up to more than one burst."""
    pace = Pace(START)
    assert all(pace.read(START + number / PER_SECOND) == 0.0 for number in range(1000))
    later = START + 1e6
    assert [pace.read(later) for _ in range(BURST)] == pytest.approx([0.0] * BURST, abs=1e-6)
    assert pace.read(later) == pytest.approx(1 / PER_SECOND, abs=1e-6)
