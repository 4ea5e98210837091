"""The unit's text: what systemd 252 accepts, enforces, and was given on purpose."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from weightcached.errors import ConfigError, LockHeld

UNITS = Path(__file__).resolve().parents[2] / "packaging" / "systemd" / "user"
UNIT = UNITS / "weightcached@.service"
EXAMPLE = UNITS / "weightcached@.service.d" / "venv.conf.example"
FLOOR = 252

# The systemd release that introduced each directive ("Added in version" in the man pages of systemd 257). What has no
# such note is older than 187, the oldest that they name.
INTRODUCED = {
    "Unit": {"Description": 201, "StartLimitIntervalSec": 229, "StartLimitBurst": 229},
    "Service": {
        "Type": 187,
        "NotifyAccess": 187,
        "ExecStart": 187,
        "ExecReload": 187,
        "SyslogIdentifier": 187,
        "TimeoutStartSec": 188,
        "TimeoutStopSec": 188,
        "KillMode": 187,
        "OOMPolicy": 243,
        "Restart": 187,
        "RestartSec": 187,
        "RestartPreventExitStatus": 189,
        "NoNewPrivileges": 187,
        "UMask": 187,
        "LockPersonality": 235,
        "RestrictRealtime": 231,
        "RestrictSUIDSGID": 242,
        "RestrictNamespaces": 233,
        "RestrictAddressFamilies": 211,
        "SystemCallArchitectures": 209,
        "SystemCallFilter": 187,
        "SystemCallErrorNumber": 209,
    },
    "Install": {"WantedBy": 201},
}


def parse(path: Path) -> dict[str, dict[str, list[str]]]:
    """Section -> directive -> its values in order. Fails on anything that is not a section, directive or comment."""
    sections: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] | None = None
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            current = sections.setdefault(header[1], {})
            continue
        directive = re.fullmatch(r"(\w+)=(.*)", line)
        assert directive is not None, f"not a directive: {line!r}"
        assert current is not None, f"outside of a section: {line!r}"
        current.setdefault(directive[1], []).append(directive[2])
    return sections


def service(name: str) -> str:
    """The one value of a [Service] directive."""
    (value,) = parse(UNIT)["Service"][name]
    return value


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs systemd-analyze as a user whose home and first unit folder are in ``folder``."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian package systemd)")
    env = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "SYSTEMD_COLORS": "0",
        "HOME": str(folder / "home"),
        "XDG_RUNTIME_DIR": str(folder),
        "SYSTEMD_UNIT_PATH": f"{folder}:",  # the empty entry stands for the usual folders
    }
    command = ["systemd-analyze", "--user", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


def verify(unit: Path) -> subprocess.CompletedProcess[str]:
    return analyze(unit.parent, "verify", "--man=no", "--recursive-errors=no", str(unit))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit in a folder of its own, with a command where it looks for one."""
    for command in (".local/bin/weightcached", "weightcached/.venv/bin/weightcached"):
        path = tmp_path / "home" / command
        path.parent.mkdir(parents=True)
        path.symlink_to("/bin/true")
    return Path(shutil.copy(UNIT, tmp_path))


def test_every_directive_is_as_old_as_the_floor() -> None:
    """The unit uses exactly the directives of the golden list, and each exists in systemd 252."""
    used = {section: set(directives) for section, directives in parse(UNIT).items()}
    assert used == {section: set(directives) for section, directives in INTRODUCED.items()}
    assert all(version <= FLOOR for directives in INTRODUCED.values() for version in directives.values())


def test_no_directive_is_given_twice() -> None:
    """Each directive stands once, so that the value read is the value meant."""
    assert not [name for section in parse(UNIT).values() for name, values in section.items() if len(values) != 1]


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


def test_drop_in_example_takes_the_command_over(installed: Path) -> None:
    """Copied without its suffix, the example is a drop-in that systemd accepts; as shipped, it is not read."""
    assert EXAMPLE.suffix != ".conf"
    assert parse(EXAMPLE) == {
        "Service": {"ExecStart": ["", "%h/weightcached/.venv/bin/weightcached serve --instance %i"]}
    }
    (installed.parent / "home/.local/bin/weightcached").unlink()
    assert verify(installed).returncode != 0, "without the drop-in the command is missing"
    drop_ins = installed.parent / "weightcached@.service.d"
    drop_ins.mkdir()
    shutil.copy(EXAMPLE, drop_ins / "venv.conf")
    result = verify(installed)
    assert (result.returncode, result.stderr) == (0, "")


def test_hardening_does_not_loosen(installed: Path) -> None:
    """systemd 252 rates the unit's exposure 6.3 of 10; the number may only go down."""
    version = re.search(r"systemd (\d+)", analyze(installed.parent, "--version").stdout)
    if version is None or int(version[1]) != FLOOR:
        pytest.skip(f"the rating is compared on systemd {FLOOR} only: each release rates differently")
    result = analyze(installed.parent, "security", "--offline=true", "--no-pager", "--threshold=63", str(installed))
    assert result.returncode == 0, result.stdout
    assert "Overall exposure level" in result.stdout


def test_exit_codes_are_those_of_the_errors() -> None:
    """What is never restarted is a bad config and a held lock, by the same numbers that the service exits with."""
    codes = {getattr(os, f"EX_{name}") for name in service("RestartPreventExitStatus").split()}
    assert codes == {ConfigError.exit_code, LockHeld.exit_code}


def test_devices_and_runtime_directory_stay_visible() -> None:
    """None of the directives that hide the GPU's device nodes, /tmp or the sockets from engines, or delete sockets."""
    hiding = {"PrivateDevices", "PrivateTmp", "PrivateIPC", "PrivateUsers", "ProtectHome", "RuntimeDirectory"}
    assert not hiding & set(parse(UNIT)["Service"])


def test_start_limit_can_be_reached() -> None:
    """The restarts that the limit allows fit into its interval; with systemd's default of 10 s they never would."""
    burst = int(parse(UNIT)["Unit"]["StartLimitBurst"][0])
    interval = int(parse(UNIT)["Unit"]["StartLimitIntervalSec"][0].removesuffix("min")) * 60
    delay = int(service("RestartSec").removesuffix("s"))
    start = int(service("TimeoutStartSec").removesuffix("s"))
    assert burst * (delay + start) < interval
