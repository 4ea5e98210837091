"""``weightcachectl doctor`` as a person or a script runs it, on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fake_host import USER_UNIT, FakeHost
from tests.conftest import MakeCheckpoint
from tests.running import RunningService
from weightcached.cli.doctor import examine, known_instances
from weightcached.cli.doctor_findings import Level

ROOT = Path(__file__).parents[2]


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightcached.cli.ctl", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT)


@pytest.fixture
def config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place of config files besides /etc/weightcached."""
    path = tmp_path / "config"
    path.mkdir()
    monkeypatch.setenv("WEIGHTCACHED_CONFIG_DIR", str(path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    return path


@pytest.fixture
def service(runtime_dir: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Iterator[RunningService]:
    """One small model on host-0, served by hand as instance `test`."""
    path = make_checkpoint(tmp_path / "small.safetensors", {"a": ("F32", (64, 16), bytes(4096))})
    service = RunningService(
        runtime_dir, f'devices = ["host-0"]\nmemory_limit = "1GiB"\n[[model]]\nname = "small"\ncheckpoint = "{path}"\n'
    )
    yield service.ready()
    service.abandon()


def by_check(output: str) -> dict[tuple[str | None, str], dict[str, Any]]:
    report = json.loads(output)
    assert report["schema"] == 1
    assert report["problems"] == sum(finding["level"] == "problem" for finding in report["checks"])
    return {(finding["instance"], finding["check"]): finding for finding in report["checks"]}


def test_service_by_hand(service: RunningService, config_dir: Path) -> None:
    """Of a service that runs without systemd it says that its cache ends with it; what is well is said to be well."""
    done = doctor("--json", "--instance", "test")
    found = by_check(done.stdout)
    assert found["test", "service"]["found"].startswith("weightcached ")
    assert f"pid {service.process.pid}, ready" in found["test", "service"]["found"]
    assert found["test", "config"]["level"] == "ok"
    assert str(service.config) in found["test", "config"]["found"]
    assert found["test", "store"]["level"] == "warning"
    assert "end of the main process frees the cache" in found["test", "store"]["found"]
    assert found["test", "descriptors"]["level"] == "ok"
    assert found[None, "leftovers"]["level"] == "ok"
    assert "1 shards need up to 4" in found["test", "descriptors"]["found"]
    service.stop()


def test_lines_for_people(service: RunningService, config_dir: Path) -> None:
    """One line for each check, each beginning with its level; found without naming the instance."""
    (config_dir / "broken.toml").write_text("no_such_key = 1\n")
    done = doctor()
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {level.value for level in Level}
    assert any(line.startswith("problem  broken: config: ") and "no_such_key" in line for line in lines)
    assert any(line.startswith("ok       test: service: ") for line in lines)
    service.stop()


def test_after_a_kill(service: RunningService, config_dir: Path) -> None:
    """The socket and the lock that a killed service leaves are named, and it does not run."""
    service.process.kill()
    service.wait()
    found = by_check(doctor("--json", "--instance", "test").stdout)
    assert found["test", "service"]["found"] == "does not run"
    assert "test.control.lock" in found[None, "leftovers"]["found"]
    assert "test.control.sock" in found[None, "leftovers"]["found"]
    service.stop(code=None)


def test_warnings_are_no_failure(runtime_dir: Path, config_dir: Path, tmp_path: Path) -> None:
    """Nothing is configured and nothing runs: a warning that says where to write a config."""
    findings = examine(FakeHost(tmp_path / "root"), [])
    assert {finding.level for finding in findings} == {Level.OK, Level.WARNING}
    (config,) = [finding for finding in findings if finding.check == "config"]
    assert str(config_dir) in config.found


def test_room_for_the_sockets_of_the_config(
    runtime_dir: Path, config_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the runtime directory is too deep depends on the devices: a GPU's socket has the longest name."""
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(runtime_dir / ("x" * (80 - len(str(runtime_dir)) - 1))))
    for devices, level in (('["host-0"]', Level.OK), ('"all"', Level.PROBLEM)):
        (config_dir / "one.toml").write_text(f"devices = {devices}\n")
        findings = examine(FakeHost(tmp_path / "root"), known_instances())
        assert [finding.level for finding in findings if finding.check == "runtime directory"] == [level]


@pytest.mark.usefixtures("runtime_dir")
def test_system_wide_service_needs_no_user_manager(config_dir: Path, tmp_path: Path) -> None:
    """For a unit of the system neither the user's manager nor linger is a subject."""
    (config_dir / "one.toml").write_text('devices = ["host-0"]\n')
    units = {"system": {**USER_UNIT, "ActiveState": "inactive", "MainPID": "0"}}
    host = FakeHost(tmp_path / "root", user_manager="no bus", units=units)
    checks = [finding.check for finding in examine(host, known_instances())]
    assert "user manager" not in checks
    assert "linger" not in checks
    assert "user manager" in [finding.check for finding in examine(host, [])]


def test_instances_are_found_by_file_and_socket(runtime_dir: Path, config_dir: Path) -> None:
    """Every config file and every control socket names one, once."""
    (config_dir / "one.toml").write_text("")
    for name in ("one.control.sock", "two.control.sock", "host-0.sock"):
        (runtime_dir / name).touch()
    found = known_instances()  # with those of /etc/weightcached, if there are any
    assert (found.count("one"), found.count("two"), found.count("host-0")) == (1, 1, 0)


def test_a_config_directory_that_is_closed_to_its_user(config_dir: Path, runtime_dir: Path) -> None:
    """As ``sudo -u weightcached`` with the home of another user: nothing of it is this user's, and the rest is said."""
    (config_dir / "one.toml").write_text("")
    (runtime_dir / "two.control.sock").touch()
    config_dir.chmod(0)
    try:
        found = known_instances() if os.geteuid() else as_nobody(config_dir)
    finally:
        config_dir.chmod(0o700)
    assert "one" not in found


def as_nobody(config_dir: Path) -> list[str]:
    """`known_instances` of a user for whom the modes of files count. The import comes first: so does the venv's."""
    code = "import os; from weightcached.cli.doctor import known_instances; os.setgid(65534); os.setuid(65534);"
    done = subprocess.run(
        [sys.executable, "-c", f"{code} print(','.join(known_instances()))"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split(",")


@pytest.mark.usefixtures("runtime_dir")
def test_a_bad_instance_name_is_refused(config_dir: Path) -> None:
    """It could be a path; the reason goes to stderr."""
    done = doctor("--instance", "../one")
    assert (done.returncode, done.stdout) == (1, "")
    assert "instance name" in done.stderr


@pytest.mark.usefixtures("runtime_dir", "config_dir")
def test_a_hanging_systemctl_does_not_hang_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question to systemctl has a time-out: one that never answers is a finding."""
    from weightcached.cli import doctor_findings
    from weightcached.cli.doctor_findings import Host

    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "systemd 252" && exit\nexec sleep 600\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor_findings, "COMMAND_SECONDS", 0.3)
    (tmp_path / "root/run/systemd/system").mkdir(parents=True)
    findings = {finding.check: finding for finding in examine(Host(tmp_path / "root"), ["one"])}
    assert "does not answer within" in findings["user manager"].found
