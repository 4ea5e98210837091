"""The messages that systemd gets, read from the other end of a real datagram socket."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcached.errors import ConnectionFailed
from weightcached.service.notify import Notifier, clean_environment


class Manager:
    """The receiving end of `NOTIFY_SOCKET`, as systemd holds it."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(5)

    def receive(self) -> list[str]:
        """The lines of the next message, decoded as strictly as systemd decodes them."""
        return self.socket.recv(4096).decode("utf-8").split("\n")

    def close(self) -> None:
        self.socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@weightcached-test-{os.getpid()}"
    manager = Manager(address)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    yield manager
    manager.close()


@pytest.fixture
def notifier(manager: Manager) -> Iterator[Notifier]:
    notifier = Notifier.from_environ()
    yield notifier
    notifier.close()


def test_ready_and_its_status_are_one_message(manager: Manager, notifier: Notifier) -> None:
    """READY=1 carries the status, so that no moment exists in which the unit is active and its status is old."""
    notifier.ready("serving minilm on host-0")
    assert notifier.active
    assert manager.receive() == ["READY=1", "STATUS=serving minilm on host-0"]


def test_progress_extends_the_start_by_a_minute(manager: Manager, notifier: Notifier) -> None:
    """A progress message is a status and 60 s more for the start, in one datagram."""
    notifier.progress("loading minilm 41 %, 1.2 GB/s")
    assert manager.receive() == ["STATUS=loading minilm 41 %, 1.2 GB/s", "EXTEND_TIMEOUT_USEC=60000000"]


def test_plain_status_does_not_extend(manager: Manager, notifier: Notifier) -> None:
    """A status outside the start leaves every timeout alone."""
    notifier.status("idle")
    assert manager.receive() == ["STATUS=idle"]


def test_reloading_carries_the_monotonic_clock(manager: Manager, notifier: Notifier) -> None:
    """RELOADING=1 comes with CLOCK_MONOTONIC in microseconds, which systemd 253 and newer compare with their own."""
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    first, second = manager.receive()
    key, value = second.split("=")
    assert first == "RELOADING=1"
    assert key == "MONOTONIC_USEC"
    assert before <= int(value) <= after


def test_stopping_and_watchdog(manager: Manager, notifier: Notifier) -> None:
    """STOPPING=1 says why; WATCHDOG=1 says nothing else."""
    notifier.stopping("releasing 3 models")
    notifier.watchdog()
    assert manager.receive() == ["STOPPING=1", "STATUS=releasing 3 models"]
    assert manager.receive() == ["WATCHDOG=1"]


def test_status_is_one_line_of_ascii(manager: Manager, notifier: Notifier) -> None:
    """A model name with any character gives a status that systemd accepts, and cannot smuggle in a second field."""
    notifier.status("loading Modèle-日本\nREADY=1\t 7 %")
    assert manager.receive() == ["STATUS=loading Mod?le-?? READY=1 7 %"]


def test_long_status_fits_one_datagram(manager: Manager, notifier: Notifier) -> None:
    """A status longer than a message is cut, not lost."""
    notifier.progress("x" * 10_000)
    status, extend = manager.receive()
    assert status == "STATUS=" + "x" * 1024
    assert extend.startswith("EXTEND_TIMEOUT_USEC=")


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal, with NOTIFY_SOCKET unset or empty, every call is allowed and does nothing."""
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
        else:
            monkeypatch.setenv("NOTIFY_SOCKET", value)
        notifier = Notifier.from_environ()
        assert not notifier.active
        assert notifier.watchdog_seconds is None
        notifier.progress("a")
        notifier.ready("b")
        notifier.reloading()
        notifier.stopping("c")
        notifier.watchdog()
        notifier.close()


def test_unreachable_manager_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NOTIFY_SOCKET that leads nowhere is named at once: READY=1 could never arrive."""
    path = str(tmp_path / "gone")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    with pytest.raises(ConnectionFailed) as caught:
        Notifier.from_environ()
    assert caught.value.path == path
    assert "unset it" in str(caught.value)


def test_manager_that_goes_away_does_not_end_the_service(
    manager: Manager, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that nobody takes is logged with its first field, and the caller goes on."""
    manager.close()
    with caplog.at_level(logging.WARNING):
        notifier.watchdog()
    assert "did not take WATCHDOG=1" in caplog.text


def test_full_queue_delays_for_a_second_at_most(
    manager: Manager, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    """A manager that reads nothing fills its queue; the sender then waits one second, logs, and goes on."""
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        while not caplog.records and time.monotonic() - started < 20:
            notifier.status("x" * 1000)
    assert "did not take STATUS=" in caplog.text
    manager.receive()
    manager.receive()


def fill(manager: Manager) -> int:
    """Fills the queue of a manager that reads nothing, and returns how many messages that took."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        other.connect(manager.socket.getsockname())
        for sent in itertools.count():
            try:
                other.send(b"STATUS=x")
            except BlockingIOError:
                return sent
    raise AssertionError


def test_a_change_of_state_is_repeated_until_it_is_taken(manager: Manager, notifier: Notifier) -> None:
    """READY=1 that a busy manager did not take comes when it reads again, once, and before what is said next."""
    sent = fill(manager)
    notifier.ready("serving")
    notifier.repeat()
    assert [manager.receive() for _ in range(sent)] == [["STATUS=x"]] * sent
    notifier.status("idle")
    notifier.repeat()
    notifier.status("end")
    assert [manager.receive() for _ in range(3)] == [["READY=1", "STATUS=serving"], ["STATUS=idle"], ["STATUS=end"]]


def test_only_the_last_change_of_state_is_repeated(manager: Manager, notifier: Notifier) -> None:
    """RELOADING=1 that was not taken is of no use once the reload is done."""
    sent = fill(manager)
    notifier.reloading()
    notifier.ready("reloaded")
    assert [manager.receive() for _ in range(sent)] == [["STATUS=x"]] * sent
    notifier.repeat()
    notifier.status("end")
    assert [manager.receive() for _ in range(2)] == [["READY=1", "STATUS=reloaded"], ["STATUS=end"]]


def test_close_is_idempotent_and_silences(manager: Manager, notifier: Notifier) -> None:
    """After close nothing arrives, and a second close is no error."""
    notifier.close()
    notifier.close()
    notifier.ready("too late")
    assert not notifier.active
    manager.socket.settimeout(0)
    with pytest.raises(BlockingIOError):
        manager.receive()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "20000000"}, 10.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_watchdog_interval_is_half_and_ours(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: float | None
) -> None:
    """The interval is half of WATCHDOG_USEC in seconds, and only for the process that WATCHDOG_PID names."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notifier = Notifier.from_environ()
    assert notifier.watchdog_seconds == expected
    notifier.close()


def test_clean_environment_leaves_a_child_nothing_of_systemd(manager: Manager) -> None:
    """A real child started with the cleaned environment sees none of the main process's variables and all the rest."""
    env = {
        **os.environ,
        "LISTEN_PID": "1",
        "LISTEN_FDS": "2",
        "LISTEN_FDNAMES": "a:b",
        "WATCHDOG_PID": "1",
        "WATCHDOG_USEC": "1",
        "WEIGHTCACHED_CANARY": "stays",
        "LISTENER": "stays too",
    }
    assert "NOTIFY_SOCKET" in env
    show = "import os; print('\\n'.join(sorted(os.environ)))"
    child = subprocess.run(
        [sys.executable, "-c", show], env=clean_environment(env), capture_output=True, text=True, check=True, timeout=30
    )
    names = set(child.stdout.split())
    assert {"WEIGHTCACHED_CANARY", "LISTENER", "PATH"} <= names
    assert not {name for name in names if name.startswith(("NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_"))}
    assert "LISTEN_FDS" in env  # the caller's own mapping is not touched


def test_a_manager_that_does_not_read_costs_no_time(
    manager: Manager, notifier: Notifier, caplog: pytest.LogCaptureFixture
) -> None:
    """Statuses that nobody takes are dropped at once and logged once; the loop of a service does not wait for them."""
    started = time.monotonic()
    for number in range(2000):  # more than a socket's queue holds
        notifier.status(f"status {number}")
    assert time.monotonic() - started < 2.0
    assert len([record for record in caplog.records if "did not take STATUS" in record.message]) == 1
