"""A machine for the checks of ``weightcachectl doctor``: a folder in place of /, a systemctl that answers at will."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weightcached.cli.doctor_findings import Host, Ran

USER_UNIT = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "Result": "success",
    "MainPID": "42",
    "UnitFileState": "enabled",
    "FragmentPath": "/home/u/.config/systemd/user/weightcached@.service",
    "NeedDaemonReload": "no",
    "Type": "notify",
    "NotifyAccess": "main",
    "ExecStart": "{ path=/usr/bin/weightcached ; argv[]=/usr/bin/weightcached serve ; ignore_errors=no }",
    "FileDescriptorStoreMax": "512",
    "NFileDescriptorStore": "4",
    "LimitNOFILE": "524288",
}
INACTIVE = {"ActiveState": "inactive", "SubState": "dead", "MainPID": "0", "NFileDescriptorStore": "0"}


class FakeHost(Host):
    """``units`` maps a scope ("user", "system") to the properties of every unit there; without it none is installed.

    ``user_manager`` is what systemctl says when it cannot reach the user's manager.
    """

    def __init__(
        self,
        root: Path,
        *,
        version: str | None = "systemd 252 (252.39-1~deb12u2)",
        user_manager: str | None = None,
        units: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        super().__init__(root)
        self.version = version
        self.user_manager = user_manager
        self.units = dict(units or {})
        self.commands: list[Sequence[str]] = []
        if version is not None:
            self.write("/run/systemd/system/.keep", "")
        self.write("/usr/bin/weightcached", "#!/bin/sh\n").chmod(0o755)

    def write(self, absolute: str, text: str) -> Path:
        path = self.path(absolute)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, command: Sequence[str]) -> Ran:
        self.commands.append(command)
        if "--version" in command:
            return Ran(0, f"{self.version}\n+PAM +AUDIT\n", "")
        user = "--user" in command
        if user and self.user_manager is not None:
            return Ran(1, "", self.user_manager + "\n")
        if command[-1] == "--property=Version":
            return Ran(0, "Version=252\n", "")
        unit = self.units.get("user" if user else "system", {"LoadState": "not-found", "MainPID": "0"})
        return Ran(0, "".join(f"{name}={value}\n" for name, value in unit.items()), "")
