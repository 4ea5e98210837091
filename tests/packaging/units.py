"""Unit files as text, and what systemd-analyze says of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SHIPPED = Path(__file__).resolve().parents[2] / "packaging" / "systemd"
FLOOR = 252

# The systemd release that introduced each directive: "Added in version" in the man pages of systemd 257, or its NEWS.
# What has no such note is older than 187, the oldest that the man pages name.
INTRODUCED = {
    "Unit": {"Description": 201, "After": 201, "StartLimitIntervalSec": 229, "StartLimitBurst": 229},
    "Service": {
        "Type": 187,
        "NotifyAccess": 187,
        "User": 187,
        "Group": 187,
        "ExecStart": 187,
        "ExecReload": 187,
        "SyslogIdentifier": 187,
        "Environment": 187,
        "RuntimeDirectory": 211,
        "RuntimeDirectoryMode": 211,
        "RuntimeDirectoryPreserve": 235,
        "TimeoutStartSec": 188,
        "TimeoutStopSec": 188,
        "KillMode": 187,
        "OOMPolicy": 243,
        "FileDescriptorStoreMax": 219,
        "FileDescriptorStorePreserve": 254,
        "Restart": 187,
        "RestartSec": 187,
        "RestartMode": 254,
        "RestartSteps": 254,
        "RestartMaxDelaySec": 254,
        "RestartPreventExitStatus": 189,
        "DevicePolicy": 208,
        "DeviceAllow": 208,
        "ProtectSystem": 214,
        "ProtectHome": 214,
        "ReadOnlyPaths": 231,
        "ProtectClock": 245,
        "ProtectControlGroups": 232,
        "ProtectHostname": 242,
        "ProtectKernelLogs": 244,
        "ProtectKernelModules": 232,
        "ProtectKernelTunables": 232,
        "PrivateNetwork": 187,
        "PrivateUsers": 232,
        "MemoryDenyWriteExecute": 231,
        "CapabilityBoundingSet": 187,
        "NoNewPrivileges": 187,
        "UMask": 187,
        "KeyringMode": 235,
        "LockPersonality": 235,
        "RemoveIPC": 232,
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


def version_of(section: str, directive: str) -> int:
    """The systemd release that introduced it. `KeyError` for one that nobody has looked up."""
    return INTRODUCED[section][directive]


def require_floor(folder: Path) -> None:
    """Skips a test whose numbers are those of the floor version: each release rates and warns differently."""
    version = re.search(r"systemd (\d+)", analyze(folder, "--version").stdout)
    if version is None or int(version[1]) != FLOOR:
        pytest.skip(f"compared on systemd {FLOOR} only")


def analyze(folder: Path, *arguments: str, user: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs systemd-analyze as a user whose home and first unit folder are in ``folder``, or as the system's manager."""
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
    command = ["systemd-analyze", "--user" if user else "--system", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


def verify(unit: Path, *, user: bool = True) -> subprocess.CompletedProcess[str]:
    return analyze(unit.parent, "verify", "--man=no", "--recursive-errors=no", str(unit), user=user)


def exposure(unit: Path, at_most: int, *, user: bool = True) -> subprocess.CompletedProcess[str]:
    """What systemd-analyze rates the unit's exposure; its exit status is 1 above ``at_most`` tenths."""
    return analyze(
        unit.parent, "security", "--offline=true", "--no-pager", f"--threshold={at_most}", str(unit), user=user
    )
