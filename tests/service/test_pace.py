"""How often something may happen. Times are numbers: no clock is read."""

from __future__ import annotations

from weightcached.service.pace import Pace


def test_many_at_once_and_then_one_by_one() -> None:
    """After the burst the time to wait is said; what was refused does not count."""
    pace = Pace(3, 2.0)
    assert [pace.take(10.0) for _ in range(5)] == [0.0, 0.0, 0.0, 2.0, 2.0]
    assert pace.take(11.0) == 1.0
    assert [pace.take(12.0) for _ in range(2)] == [0.0, 2.0]


def test_a_long_pause_allows_no_more_than_the_burst() -> None:
    """However long nothing has happened."""
    pace = Pace(2, 1.0)
    assert [pace.take(0.0), pace.take(1000.0), pace.take(1000.0), pace.take(1000.0)] == [0.0, 0.0, 0.0, 1.0]
