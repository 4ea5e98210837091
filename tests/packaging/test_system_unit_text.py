"""The unit for all users of a host, as text: what it shares with the one for a user, and what it adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.units import FLOOR, SHIPPED, exposure, parse, require_floor, verify, version_of
from weightcached.paths import SERVICE_USER

UNIT = SHIPPED / "system" / "weightcached@.service"
USER_UNIT = SHIPPED / "user" / "weightcached@.service"
SYSUSERS = SHIPPED / "sysusers.d" / "weightcached.conf"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit in a folder of its own. Its command is one that is here: /usr/local/bin is not a test's to write to."""
    text = UNIT.read_text()
    assert text.count("ExecStart=/usr/local/bin/weightcached ") == 1
    path = tmp_path / UNIT.name
    path.write_text(text.replace("ExecStart=/usr/local/bin/weightcached ", "ExecStart=/bin/true "))
    return path


def test_every_directive_is_as_old_as_the_floor() -> None:
    """Each directive exists in systemd 252."""
    assert all(version_of(section, name) <= FLOOR for section, names in parse(UNIT).items() for name in names)


def test_systemd_finds_nothing_to_say(installed: Path) -> None:
    """systemd-analyze verify passes without one word of warning."""
    result = verify(installed, user=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_hardening_does_not_loosen(installed: Path) -> None:
    """systemd 252 rates the unit's exposure 1.4 of 10; the number may only go down."""
    require_floor(installed.parent)
    result = exposure(installed, at_most=14, user=False)
    assert result.returncode == 0, result.stdout
    assert "Overall exposure level" in result.stdout
    assert exposure(installed, at_most=13, user=False).returncode == 1, "better than this test says: lower the number"


def test_what_both_units_say_is_the_same() -> None:
    """Whatever the unit for a user says, the other says too, except for the command's place and who is meant."""
    differ = {"Description", "ExecStart", "WantedBy"}
    for section, directives in parse(USER_UNIT).items():
        theirs = parse(UNIT)[section]
        assert {name: theirs.get(name) for name in directives if name not in differ} == {
            name: values for name, values in directives.items() if name not in differ
        }


def test_its_user_is_the_one_that_is_made_and_trusted() -> None:
    """sysusers.d makes the user that the unit runs as, whom clients are to name."""
    service = parse(UNIT)["Service"]
    lines = [line.split() for line in SYSUSERS.read_text().splitlines() if line and not line.startswith("#")]
    assert [line[:2] for line in lines] == [["u", *service["User"]]]
    assert service["Group"] == service["User"]
    assert f"{SERVICE_USER}={service['User'][0]}" in service["Environment"]


def test_instances_share_a_directory_that_stays() -> None:
    """The runtime directory is the one that clients look into, open to others for reading, and no stop removes it."""
    service = parse(UNIT)["Service"]
    assert service["RuntimeDirectory"] == ["weightcached"]
    assert "WEIGHTCACHED_RUNTIME_DIR=/run/weightcached" in service["Environment"]
    assert (service["RuntimeDirectoryMode"], service["RuntimeDirectoryPreserve"]) == (["0755"], ["yes"])


def test_clients_and_gpus_stay_visible() -> None:
    """None of the directives that hide the uids, the commands or the /tmp of clients, or the GPUs."""
    hiding = {"PrivateUsers", "PrivateDevices", "PrivateIPC", "PrivateTmp", "ProtectProc", "ProcSubset", "DynamicUser"}
    assert not hiding & set(parse(UNIT)["Service"])


def test_devices_are_those_of_the_driver() -> None:
    """Only the driver's nodes, by name; none may be made."""
    service = parse(UNIT)["Service"]
    assert service["DevicePolicy"] == ["closed"]
    assert all(value.startswith("char-nvidia") and value.endswith(" rw") for value in service["DeviceAllow"])
