"""What doctor says of a machine: of systemd, of the runtime directory, of the NVIDIA driver."""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
from pathlib import Path

import pytest

from tests.cli.fake_host import INACTIVE, USER_UNIT, FakeHost
from weightcached.cli import doctor_host
from weightcached.cli.doctor_findings import Host, Level, run_command
from weightcached.cli.doctor_host import (
    check_directory,
    check_gpus,
    check_leftovers,
    check_linger,
    check_nodes,
    check_nvidia,
    check_systemd,
    check_user_manager,
    find_systemd,
    find_unit,
)
from weightcached.devices import Device, Memory
from weightcached.errors import DeviceError


def test_without_systemd_it_says_what_survives(tmp_path: Path) -> None:
    """In a container nothing is asked of systemctl; the finding is a warning that tells what is lost when."""
    host = FakeHost(tmp_path, version=None)
    systemd = find_systemd(host)
    finding = check_systemd(systemd)
    assert (finding.level, host.commands) == (Level.WARNING, [])
    assert "worker loses nothing" in finding.found
    assert "main process frees the cache" in finding.found
    assert find_unit(host, "one", systemd) is None


@pytest.mark.parametrize(
    ("version", "level"),
    [("systemd 252 (252.39)", Level.OK), ("systemd 251", Level.PROBLEM), ("sytemd", Level.PROBLEM)],
)
def test_version_of_systemd(tmp_path: Path, version: str, level: Level) -> None:
    """252 is enough, 251 is not, and what cannot be read is a problem too."""
    assert check_systemd(find_systemd(FakeHost(tmp_path, version=version))).level is level


def test_user_manager_out_of_reach(tmp_path: Path) -> None:
    """As after su: the words of systemctl are passed on, with how to log in."""
    no_bus = "Failed to connect to bus: No medium found"
    finding = check_user_manager(find_systemd(FakeHost(tmp_path, user_manager=no_bus)))
    assert (finding.level, no_bus in finding.found) == (Level.PROBLEM, True)
    assert "ssh" in finding.next
    assert check_user_manager(find_systemd(FakeHost(tmp_path))).level is Level.OK


def test_unit_that_runs_goes_first(tmp_path: Path) -> None:
    """With both units installed the one with a process is meant; without one running, the user's."""
    for user, system, scope in (
        (USER_UNIT, {**USER_UNIT, **INACTIVE}, "user"),
        ({**USER_UNIT, **INACTIVE}, USER_UNIT, "system"),
        ({**USER_UNIT, **INACTIVE}, {**USER_UNIT, **INACTIVE}, "user"),
    ):
        host = FakeHost(tmp_path, units={"user": user, "system": system})
        unit = find_unit(host, "one", find_systemd(host))
        assert unit is not None
        assert (unit.scope, unit.name) == (scope, "weightcached@one.service")
    host = FakeHost(tmp_path)
    assert find_unit(host, "one", find_systemd(host)) is None


def test_system_unit_without_a_user_manager(tmp_path: Path) -> None:
    """A user manager that does not answer is not asked for units; the system's is."""
    host = FakeHost(tmp_path, user_manager="no bus", units={"system": USER_UNIT})
    unit = find_unit(host, "one", find_systemd(host))
    assert unit is not None
    assert (unit.scope, unit.systemctl, unit.journal) == (
        "system",
        "systemctl",
        "journalctl -u weightcached@one.service",
    )


def test_linger(tmp_path: Path) -> None:
    """A warning until the file is there that loginctl enable-linger makes."""
    host = FakeHost(tmp_path)
    assert (check_linger(host).level, check_linger(host).next) == (Level.WARNING, "loginctl enable-linger")
    host.write(f"/var/lib/systemd/linger/{pwd.getpwuid(os.geteuid()).pw_name}", "")
    assert check_linger(host).level is Level.OK


def test_runtime_directory(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good when it is there and when it can be made; a problem when it is open to others or has no parent."""
    assert check_directory().level is Level.OK
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(runtime_dir / "later"))
    assert check_directory().level is Level.OK
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(runtime_dir / "no" / "parent"))
    assert check_directory().level is Level.PROBLEM
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(runtime_dir))
    runtime_dir.chmod(0o777)
    assert (check_directory().level, "chmod" in check_directory().found) == (Level.PROBLEM, True)


def test_runtime_directory_that_is_too_deep(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has 107 bytes at most: where those of the service would be longer, it could not start."""
    deep = runtime_dir / ("x" * (90 - len(str(runtime_dir)) - 1))
    gpu = "GPU-00000000-0000-0000-0000-000000000000"
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(deep))
    for _ in ("not there yet", "there"):
        assert check_directory(["one"], ["host-0"]).level is Level.OK
        for names, devices, length in ((["long-name"], ["host-0"], 113), (["one"], [gpu], 136)):
            finding = check_directory(names, devices)
            assert finding.level is Level.PROBLEM
            assert f"{length} bytes, at most 107" in finding.found
        deep.mkdir(0o700, exist_ok=True)
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(runtime_dir / ("x" * 110)))
    assert check_directory().level is Level.PROBLEM
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(deep))
    monkeypatch.setenv("WEIGHTCACHED_SOCKET_TEMPLATE", f"{runtime_dir}/{{device_uuid}}.sock")
    assert check_directory(["one"], [gpu]).level is Level.OK


def test_leftovers_are_what_nobody_holds(runtime_dir: Path) -> None:
    """A socket that answers and a lock that is held are not named; those of a dead service are. No lock is taken."""
    host = Host()
    assert check_leftovers(host).level is Level.OK
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as alive,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead,
        open(runtime_dir / "host-0.lock", "w") as held,
        open(runtime_dir / "host-1.lock", "w"),
    ):
        alive.bind(str(runtime_dir / "host-0.sock"))
        alive.listen()
        dead.bind(str(runtime_dir / "host-1.sock"))
        fcntl.flock(held, fcntl.LOCK_EX)
        finding = check_leftovers(host)
        assert finding.level is Level.WARNING
        assert finding.found.partition(":")[0] == "host-1.sock, host-1.lock"


def gpu_host(tmp_path: Path, *, nodes: tuple[str, ...] = ("nvidiactl", "nvidia-uvm", "nvidia0")) -> FakeHost:
    """A driver with one GPU of minor number 0, and these device nodes (plain files)."""
    host = FakeHost(tmp_path)
    host.write("/sys/module/nvidia/version", "580.159.03\n")
    host.write("/proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA H200\nDevice Minor: \t 0\n")
    for node in nodes:
        host.write(f"/dev/{node}", "")
    return host


def test_no_driver(tmp_path: Path) -> None:
    """Without a driver host memory is served, which is good unless a config names a GPU."""
    (finding,) = check_nvidia(FakeHost(tmp_path), {"host-0"})
    assert finding.level is Level.OK
    (finding,) = check_nvidia(FakeHost(tmp_path), {"host-0", "GPU-1"})
    assert (finding.level, "GPU-1" in finding.found) == (Level.PROBLEM, True)


def test_device_nodes(tmp_path: Path) -> None:
    """Every node must be there and may be opened; a missing one is named with the command that makes it."""
    host = gpu_host(tmp_path, nodes=("nvidiactl", "nvidia0"))
    finding = check_nodes(host)
    assert (finding.level, finding.found) == (Level.PROBLEM, "missing: /dev/nvidia-uvm")
    assert "nvidia-modprobe" in finding.next
    host.write("/dev/nvidia-uvm", "")
    assert check_nodes(host).found == "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0"
    host.path("/dev/nvidiactl").unlink()
    host.path("/dev/nvidiactl").mkdir()  # what even root cannot open for writing
    finding = check_nodes(host)
    assert (finding.level, "/dev/nvidiactl cannot be opened" in finding.found) == (Level.PROBLEM, True)


GPU = Device("GPU-1", "NVIDIA H200", Memory(1 << 37, 1 << 37), persistence=True)


def test_gpus_as_nvml_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistence mode off is a warning for its GPU; a GPU of the config that is not here is a problem."""
    asleep = Device("GPU-2", "NVIDIA H200", GPU.memory, persistence=False)
    monkeypatch.setattr(doctor_host, "probe_devices", lambda names: [GPU, asleep])
    levels = {finding.check: finding.level for finding in check_gpus(["GPU-1", "GPU-3"])}
    assert levels == {"GPU-1": Level.OK, "GPU-2": Level.WARNING, "GPU-3": Level.PROBLEM}
    checks = [finding.check for finding in check_nvidia(gpu_host(tmp_path), {"GPU-1"})]
    assert checks == ["driver", "device nodes", "GPU-1", "GPU-2"]


def test_nvml_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the probing child says is passed on: doctor itself goes on."""

    def fail(names: object) -> list[Device]:
        raise DeviceError(device="NVML", problem="does not answer within 30 s")

    monkeypatch.setattr(doctor_host, "probe_devices", fail)
    (finding,) = check_gpus([])
    assert (finding.level, "does not answer" in finding.found) == (Level.PROBLEM, True)


def test_a_command_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A systemctl that never answers costs its time-out and is reported as such; one that is missing too."""
    from weightcached.cli import doctor_findings

    monkeypatch.setattr(doctor_findings, "COMMAND_SECONDS", 0.2)
    ran = run_command(["sleep", "600"])
    assert (ran.code, "does not answer" in ran.reason) == (124, True)
    assert run_command([str(tmp_path / "systemctl")]).code == 127
    assert run_command(["sh", "-c", "echo one >&2; echo two >&2; exit 3"]).reason == "one"
