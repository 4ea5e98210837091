"""client/start.py: what an engine asks of systemd, and what it says when that fails. A script stands for systemctl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weightcached.client.start import start_service
from weightcached.errors import ConnectionFailed, TimedOut, WeightCacheError

Systemctl = Callable[[str], Path]


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemctl:
    """``systemctl(code)`` makes one of it; its arguments are in the file that is returned."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("WEIGHTCACHED_SERVICE_USER", raising=False)

    def make(code: str) -> Path:
        script, asked = tmp_path / "systemctl", tmp_path / "asked"
        script.write_text(f'#!/bin/sh\necho "$@" > {asked}\n{code}\n')
        script.chmod(0o755)
        return asked

    return make


def test_the_users_systemd_is_asked(systemctl: Systemctl) -> None:
    """As a user types it."""
    asked = systemctl("exit 0")
    start_service("big", 30.0)
    assert asked.read_text() == "--user start weightcached@big\n"


def test_a_system_wide_service(systemctl: Systemctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the service's user is named, it is the system's."""
    asked = systemctl("exit 0")
    monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", "0")
    start_service("big", 30.0)
    assert asked.read_text() == "start weightcached@big\n"


def test_a_start_that_fails(systemctl: Systemctl) -> None:
    """The error has systemd's own words."""
    systemctl("echo 'Unit weightcached@big.service not found.' >&2; exit 5")
    with pytest.raises(ConnectionFailed, match=r"start weightcached@big: failed: Unit .* not found\.; weightcachectl"):
        start_service("big", 30.0)


def test_a_start_that_takes_too_long(systemctl: Systemctl) -> None:
    """It goes on, and the error says so."""
    systemctl("exec sleep 30")
    with pytest.raises(TimedOut, match=r"waited 0\.\d s for systemctl --user start weightcached@big, which goes on"):
        start_service("big", 0.3)


def test_no_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to start it without."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConnectionFailed, match="no systemd here; start the service yourself: weightcached serve"):
        start_service("big", 30.0)


def test_a_name_that_is_none(systemctl: Systemctl) -> None:
    """Nothing but an instance's name reaches systemctl."""
    asked = systemctl("exit 0")
    with pytest.raises(WeightCacheError, match="instance name"):
        start_service("a b", 30.0)
    assert not asked.exists()
