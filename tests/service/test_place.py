"""Which of several processes that say that they are one node counts. Times are numbers: no clock is read."""

from __future__ import annotations

import pytest

from weightcached.service.place import PROCESSES, Place

KEEP = 5.0
SILENCE = 15.0


class Heard:
    """A place, and what became of each beat. The number of a beat is its time in ms, if nothing else is said."""

    def __init__(self) -> None:
        self.place = Place(KEEP, SILENCE)

    def __call__(self, boot: str, now: float, number: int | None = None, *, leaving: bool = False) -> str:
        return self.place.hear(boot, round(now * 1000) if number is None else number, now, leaving=leaving)

    def all(self, *beats: tuple[str, float]) -> list[str]:
        return [self(boot, now) for boot, now in beats]


@pytest.fixture
def heard() -> Heard:
    """Of a node whose first process counts since second 0."""
    made = Heard()
    assert made("first", 0.0) == "counts"
    return made


def test_a_node_that_starts_anew_counts_at_once(heard: Heard) -> None:
    """Whether its former process was gone or not, and as often as it does."""
    assert heard.all(("second", 1.0), ("third", 2.0), ("third", 7.0), ("fourth", 100.0)) == ["counts"] * 4


def test_beats_that_were_overtaken_are_ignored(heard: Heard) -> None:
    """An earlier number of the process that counts changes nothing; the same one may say more."""
    assert heard("first", 1.0, 7) == "counts"
    assert heard("first", 2.0, 6) == "ignored"
    assert heard("first", 3.0, 7) == "counts"


@pytest.mark.parametrize("late", [1.2, 3.0, 5.9])
def test_a_late_datagram_of_a_dead_process_does_not_bring_it_back(heard: Heard, late: float) -> None:
    """What it sent last may come after the first word of its successor, by less than `keep_alive`: nobody hears of two
    services, and the successor goes on counting."""
    assert heard("second", 1.0) == "counts"
    assert [heard("first", late, number) for number in (100, 101)] == ["ignored"] * 2
    assert heard.all(("second", 6.0), ("second", 11.0), ("second", 16.0)) == ["counts"] * 3


def test_what_the_network_repeats_is_no_sign_of_life(heard: Heard) -> None:
    """However late a beat comes again whose number was heard before, its process is not alive."""
    heard("first", 0.5, 3)
    heard("second", 1.0)
    assert [heard("first", 8.0, number) for number in (2, 3)] == ["ignored"] * 2
    assert heard("second", 9.0) == "counts"


def test_who_was_there_first_and_goes_on_gets_its_place_back(heard: Heard) -> None:
    """Once it is heard `keep_alive` seconds after another one took its place, which is refused from then on."""
    beats = [("second", 1.0), ("first", 5.9), ("second", 5.95), ("first", 6.0), ("second", 6.1), ("first", 11.0)]
    assert heard.all(*beats) == ["counts", "ignored", "counts", "counts", "refused", "counts"]
    later = [(boot, 12.0 + n) for n in range(100) for boot in ("first", "second")]
    assert heard.all(*later) == ["counts", "refused"] * 100


def test_one_forged_beat_takes_the_place_for_a_moment(heard: Heard) -> None:
    """The node counts again with its first beat after `keep_alive`, and at once with each one then."""
    beats = [("first", 5.0), ("forged", 6.0), ("first", 10.0), ("first", 15.0), ("first", 20.0)]
    assert heard.all(*beats) == ["counts", "counts", "ignored", "counts", "counts"]


def test_a_forged_beat_right_after_a_restart(heard: Heard) -> None:
    """The successor is the one that goes on, though the dead process was there before it."""
    beats = [("second", 1.0), ("forged", 2.0), ("second", 6.0), ("second", 11.0)]
    assert heard.all(*beats) == ["counts", "counts", "ignored", "counts"]


@pytest.mark.parametrize("leaving", [True, False])
def test_the_next_one_counts_when_the_first_one_ends(heard: Heard, leaving: bool) -> None:
    """At its next beat, if the first one said so, and else after the silence in which a node is gone."""
    heard.all(("second", 1.0), ("first", 6.0))
    if leaving:
        assert heard("first", 7.0, leaving=True) == "counts"
        assert heard("second", 7.1) == "counts"
    else:
        assert heard.all(("second", 20.9), ("second", 21.1)) == ["refused", "counts"]


def test_who_was_gone_comes_last(heard: Heard) -> None:
    """One whose network was cut keeps its number only as long as nobody took it; the other one is there now."""
    heard.all(("second", 14.0), ("second", 19.0))
    assert heard.all(("first", 20.0), ("second", 24.0), ("first", 30.0)) == ["refused", "counts", "refused"]
    assert heard("second", 31.0, leaving=True) == "counts"
    assert heard("first", 32.0) == "counts"


def test_who_was_gone_and_is_back_alone_counts(heard: Heard) -> None:
    """Nobody took its place meanwhile."""
    assert heard("first", 1000.0) == "counts"


def test_a_process_that_leaves_takes_no_place(heard: Heard) -> None:
    """What it says last is no claim, neither while another one counts nor when that is gone, and it is told nothing."""
    heard.all(("second", 1.0), ("first", 6.0))
    assert heard("second", 7.0, leaving=True) == "ignored"
    heard("third", 8.0)
    assert heard("first", 13.5, leaving=True) == "ignored"
    assert heard("first", 14.0) == "refused"
    assert heard("second", 50.0, leaving=True) == "ignored"
    assert heard("third", 51.0) == "counts"


def test_a_start_that_fails_at_once_is_heard(heard: Heard) -> None:
    """The only word of a process is that it leaves: it counts, with its reason; the former one is gone or goes on."""
    assert heard("second", 1.0, leaving=True) == "counts"
    assert heard("first", 2.0) == "counts"


@pytest.mark.parametrize("order", [("first", "second", "third"), ("third", "second", "first")])
def test_of_three_rivals_the_first_one_counts(heard: Heard, order: tuple[str, ...]) -> None:
    """In whatever order they are heard, and then the others are refused until it ends; one of them counts then."""
    heard.all(("second", 1.0), ("third", 2.0))
    for now in (3.0, 8.0, 13.0):
        heard.all(*((boot, now + n / 10) for n, boot in enumerate(order)))
    found = dict(zip(order, heard.all(*((boot, 18.0 + n / 10) for n, boot in enumerate(order))), strict=True))
    assert found == {"first": "counts", "second": "refused", "third": "refused"}
    heard("first", 19.0, leaving=True)
    assert heard.all(("third", 20.0), ("second", 20.1), ("third", 25.0)) == ["counts", "refused", "counts"]


def test_a_rival_that_waits_was_there_before_a_restart(heard: Heard) -> None:
    """A node that is started anew while another service is refused counts at once; but the other one was there before
    it and goes on, so it has the place then, and keeps it."""
    heard.all(("rival", 1.0), ("first", 6.0), ("rival", 7.0))
    assert heard.all(("anew", 8.0), ("rival", 12.0), ("anew", 12.5)) == ["counts", "ignored", "counts"]
    assert heard.all(("rival", 17.0), ("anew", 17.5), ("rival", 22.0)) == ["counts", "refused", "counts"]


def test_any_number_of_processes_takes_bounded_memory(heard: Heard) -> None:
    """Of a flood of forged beats so many are remembered; the node has its place back when it is over."""
    for number in range(1000):
        assert heard(f"forged {number}", 1.0 + number / 1000) == "counts"
    assert sum(f"forged {number}" in heard.place for number in range(1000)) <= PROCESSES
    heard("first", 5.0)
    assert heard.all(("first", 10.0), ("first", 15.0)) == ["counts"] * 2


@pytest.mark.parametrize("after", [2.0, 20.0])
def test_any_number_of_restarts_is_remembered_as_long_as_needed(heard: Heard, after: float) -> None:
    """Quick or slow ones: the one that counts is never forgotten, nor is the one before it."""
    before = "first"
    for number in range(1, 3 * PROCESSES):
        boot, now = f"restart {number}", number * after
        assert heard(boot, now) == "counts"
        assert heard(before, now + 0.5, 1 + round((now - after) * 1000)) in ("ignored", "refused")
        assert heard(boot, now + 1.0) == "counts"
        assert boot in heard.place and before in heard.place
        before = boot


def test_it_knows_whom_it_has_heard(heard: Heard) -> None:
    """By the boot."""
    assert "first" in heard.place
    assert "second" not in heard.place
