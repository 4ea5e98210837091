"""The unit for one user, as text: what systemd 252 accepts, enforces, and was given on purpose."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.packaging.units import FLOOR, SHIPPED, exposure, parse, require_floor, verify, version_of
from weightcached.errors import ConfigError, LockHeld

UNIT = SHIPPED / "user" / "weightcached@.service"
EXAMPLES = UNIT.with_name("weightcached@.service.d")
TWICE = {"SystemCallFilter"}  # what is allowed, then what of it is not


def service(name: str) -> str:
    """The one value of a [Service] directive."""
    (value,) = parse(UNIT)["Service"][name]
    return value


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit in a folder of its own, with a command where it looks for one."""
    for command in (".local/bin/weightcached", "weightcached/.venv/bin/weightcached"):
        path = tmp_path / "home" / command
        path.parent.mkdir(parents=True)
        path.symlink_to("/bin/true")
    return Path(shutil.copy(UNIT, tmp_path))


def add_drop_in(unit: Path, example: str) -> None:
    """Installs a shipped example as its first lines say."""
    folder = unit.parent / "weightcached@.service.d"
    folder.mkdir()
    shutil.copy(EXAMPLES / example, folder / example.removesuffix(".example"))


def test_every_directive_is_as_old_as_the_floor() -> None:
    """Each directive of the unit exists in systemd 252."""
    assert all(version_of(section, name) <= FLOOR for section, names in parse(UNIT).items() for name in names)


def test_no_directive_is_given_twice() -> None:
    """Each directive stands once, so that the value read is the value meant."""
    counts = {name: len(values) for names in parse(UNIT).values() for name, values in names.items()}
    assert {name for name, count in counts.items() if count != 1} == TWICE


def test_systemd_finds_nothing_to_say(installed: Path) -> None:
    """systemd-analyze verify passes without one word of warning."""
    result = verify(installed)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[Service]", "[Service]\nNoSuchDirective=yes"),
        ("Type=notify", "Type=no-such-type"),
        ("ExecStart=%h/.local/bin/", "ExecStart=%h/no/such/folder/"),
        ("SystemCallFilter=@system-service", "SystemCallFilter=@no-such-group"),
    ],
)
def test_verify_would_notice(installed: Path, before: str, after: str) -> None:
    """The same check is not silent on a unit with an unknown key, a bad value or a missing command."""
    text = installed.read_text()
    assert text.count(before) == 1
    installed.write_text(text.replace(before, after))
    result = verify(installed)
    assert (result.returncode, result.stderr) != (0, "")


def test_examples_are_not_read_as_shipped() -> None:
    """Copied with the whole folder, an example changes nothing: systemd reads *.conf only."""
    names = sorted(path.name for path in EXAMPLES.iterdir())
    assert names == [
        "network.conf.example", "sandbox.conf.example", "systemd-254.conf.example", "venv.conf.example",
    ]  # fmt: skip


def test_drop_in_example_takes_the_command_over(installed: Path) -> None:
    """Copied without its suffix, the example for a virtual environment is a drop-in that systemd accepts."""
    assert parse(EXAMPLES / "venv.conf.example") == {
        "Service": {"ExecStart": ["", "%h/weightcached/.venv/bin/weightcached serve --instance %i"]}
    }
    (installed.parent / "home/.local/bin/weightcached").unlink()
    assert verify(installed).returncode != 0, "without the drop-in the command is missing"
    add_drop_in(installed, "venv.conf.example")
    result = verify(installed)
    assert (result.returncode, result.stderr) == (0, "")


def test_sandbox_example_is_for_the_floor_too(installed: Path) -> None:
    """Every directive of the sandbox exists in systemd 252, which accepts it beside the unit."""
    sandbox = parse(EXAMPLES / "sandbox.conf.example")["Service"]
    assert all(version_of("Service", name) <= FLOOR for name in sandbox)
    assert sandbox["PrivateUsers"] == ["yes"], "without it 252 ignores the rest"
    add_drop_in(installed, "sandbox.conf.example")
    result = verify(installed)
    assert (result.returncode, result.stderr) == (0, "")


def test_network_example_widens_the_unit(installed: Path) -> None:
    """Its address families come in addition to those of the unit, and systemd 252 knows all of it."""
    network = parse(EXAMPLES / "network.conf.example")["Service"]
    assert all(version_of("Service", name) <= FLOOR for name in network)
    assert network["RestrictAddressFamilies"] == ["AF_INET AF_INET6 AF_NETLINK"], "an empty value would begin anew"
    assert service("RestrictAddressFamilies") == "AF_UNIX"
    add_drop_in(installed, "network.conf.example")
    result = verify(installed)
    assert (result.returncode, result.stderr) == (0, "")


def test_newer_example_is_unknown_to_the_floor_by_name(installed: Path) -> None:
    """What 252 has to say of the example for 254 is that it does not know each of its keys, and nothing else."""
    require_floor(installed.parent)
    keys = list(parse(EXAMPLES / "systemd-254.conf.example")["Service"])
    assert {version_of("Service", key) for key in keys} == {254}
    add_drop_in(installed, "systemd-254.conf.example")
    result = verify(installed)
    said = [line.partition(": ")[2] for line in result.stderr.splitlines()]
    assert said == [f"Unknown key '{key}' in section [Service], ignoring." for key in keys]


def test_hardening_does_not_loosen(installed: Path) -> None:
    """systemd 252 rates the unit's exposure 6.0 of 10; the number may only go down."""
    require_floor(installed.parent)
    result = exposure(installed, at_most=60)
    assert result.returncode == 0, result.stdout
    assert "Overall exposure level" in result.stdout
    assert exposure(installed, at_most=59).returncode == 1, "it is better than this test says: lower the number"


def test_sandbox_tightens(installed: Path) -> None:
    """With the sandbox the rating is 5.0."""
    require_floor(installed.parent)
    add_drop_in(installed, "sandbox.conf.example")
    assert exposure(installed, at_most=50).returncode == 0
    assert exposure(installed, at_most=49).returncode == 1


def test_exit_codes_are_those_of_the_errors() -> None:
    """What is never restarted is a bad config and a held lock, by the same numbers that the service exits with."""
    codes = {getattr(os, f"EX_{name}") for name in service("RestartPreventExitStatus").split()}
    assert codes == {ConfigError.exit_code, LockHeld.exit_code}


def test_devices_and_runtime_directory_stay_visible() -> None:
    """None of the directives that hide the GPU's device nodes, /tmp or the sockets from engines, or delete sockets."""
    hiding = {"PrivateDevices", "PrivateTmp", "PrivateIPC", "PrivateUsers", "ProtectHome", "RuntimeDirectory"}
    assert not hiding & set(parse(UNIT)["Service"])
    assert not (hiding - {"PrivateUsers"}) & set(parse(EXAMPLES / "sandbox.conf.example")["Service"])


def test_start_limit_can_be_reached() -> None:
    """The restarts that the limit allows fit into its interval; with systemd's default of 10 s they never would."""
    burst = int(parse(UNIT)["Unit"]["StartLimitBurst"][0])
    interval = int(parse(UNIT)["Unit"]["StartLimitIntervalSec"][0].removesuffix("min")) * 60
    delay = int(service("RestartSec").removesuffix("s"))
    start = int(service("TimeoutStartSec").removesuffix("s"))
    assert burst * (delay + start) < interval
