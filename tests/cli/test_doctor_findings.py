"""doctor_findings: how findings, commands and units read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weightcached.cli import doctor_findings
from weightcached.cli.doctor_findings import Finding, Host, Level, Ran, Unit, run_command


def test_a_finding_is_one_line() -> None:
    """Level, where, what was found, and the next step where there is one."""
    assert Finding("linger", Level.OK, "on").line() == "ok       linger: on"
    found = Finding("store", Level.WARNING, "full", "raise it", instance="model")
    assert found.line() == "warning  model: store: full; next: raise it"


@pytest.mark.parametrize(
    ("program", "code", "output", "reason"),
    [
        ("print('all good')", 0, "all good\n", "all good"),
        ("import sys; sys.exit('first\\nsecond')", 1, "", "first"),
        ("raise SystemExit(3)", 3, "", "exit status 3"),
        ("import os; print(os.environ['LC_ALL'])", 0, "C.UTF-8\n", "C.UTF-8"),
        ("import sys; print(repr(sys.stdin.read()))", 0, "''\n", "''"),
    ],
)
def test_a_command_ends_in_words(program: str, code: int, output: str, reason: str) -> None:
    """Its exit status and output; the reason is the first line of what it said. It reads nothing, in plain English."""
    ran = run_command([sys.executable, "-c", program])
    assert (ran.code, ran.output, ran.reason) == (code, output, reason)


def test_a_command_that_is_not_there() -> None:
    """Not installed is 127, not executable 126: no exception."""
    assert run_command(["no-such-command-here"]) == Ran(127, "", "no-such-command-here is not installed")
    assert run_command([__file__]).code == 126


def test_a_command_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended after `COMMAND_SECONDS`, and said to hang."""
    monkeypatch.setattr(doctor_findings, "COMMAND_SECONDS", 0.2)
    ran = run_command([sys.executable, "-c", "import signal; signal.pause()"])
    assert (ran.code, ran.error) == (124, f"{sys.executable} does not answer within 0 s")


def test_a_host_under_another_root(tmp_path: Path) -> None:
    """Absolute paths are looked up below it; what cannot be read is None."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/name").write_bytes(b"caf\xe9\n")
    host = Host(tmp_path)
    assert host.read("/etc/name") == "caf\ufffd\n"
    assert host.read("/etc/other") is None
    assert host.path("/etc/name") == tmp_path / "etc/name"
    assert Host().path(os.devnull) == Path(os.devnull)


def test_a_unit_reads_as_systemctl_shows_it() -> None:
    """A property that this systemd does not have is empty; a number is a number or nothing."""
    unit = Unit("weightcached@m.service", "user", {"Max": "4096", "Limit": "infinity", "Odd": "²"})
    assert (unit["Max"], unit["Nothing"]) == ("4096", "")
    assert [unit.number(name) for name in ("Max", "Limit", "Odd", "Nothing")] == [4096, None, None, None]
    assert (unit.systemctl, unit.journal) == ("systemctl --user", "journalctl --user -u weightcached@m.service")
    system = Unit("weightcached@m.service", "system")
    assert (system.systemctl, system.journal) == ("systemctl", "journalctl -u weightcached@m.service")
