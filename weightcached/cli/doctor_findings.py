"""What a check of ``weightcachectl doctor`` says, and where it looks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

COMMAND_SECONDS = 5.0  # systemctl answers in milliseconds, or its manager hangs


class Level(StrEnum):
    """`WARNING`: right now nothing is wrong, but the cache ends sooner than it could. `PROBLEM`: something is wrong."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `next` is the step to take, empty where there is none; `instance` None for the machine."""

    check: str
    level: Level
    found: str
    next: str = ""
    instance: str | None = None

    def line(self) -> str:
        """As one line for a person."""
        where = self.check if self.instance is None else f"{self.instance}: {self.check}"
        return f"{self.level:<8} {where}: {self.found}" + (f"; next: {self.next}" if self.next else "")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command said; `code` is 127 where it is not installed, 124 where it did not end in time."""

    code: int
    output: str
    error: str

    @property
    def reason(self) -> str:
        """Why it failed, as one line."""
        lines = (self.error or self.output).strip().splitlines()
        return lines[0] if lines else f"exit status {self.code}"


def run_command(command: Sequence[str]) -> Ran:
    """Runs it for at most `COMMAND_SECONDS`."""
    env = {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            env=env,
        )
    except FileNotFoundError:
        return Ran(127, "", f"{command[0]} is not installed")
    except OSError as error:
        return Ran(126, "", f"{command[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Ran(124, "", f"{command[0]} does not answer within {COMMAND_SECONDS:.0f} s")
    return Ran(done.returncode, done.stdout, done.stderr)


class Host:
    """The machine as the checks see it. A test gives another root folder and another way to run commands."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def path(self, absolute: str) -> Path:
        return self._root / absolute.lstrip("/")

    def read(self, absolute: str) -> str | None:
        """The text of a file, None where there is none or it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except OSError:
            return None

    def run(self, command: Sequence[str]) -> Ran:
        return run_command(command)


@dataclass(frozen=True, slots=True)
class Systemd:
    """The service manager: its version (None: it cannot be told), and why this user's own manager is out of reach."""

    runs: bool
    version: int | None = None
    user_problem: str | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """A loaded unit as ``systemctl show`` prints it. `scope` is whose manager it is of: "user" or "system"."""

    name: str
    scope: str
    properties: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> str:
        """A property, empty where this release of systemd has none of that name."""
        return self.properties.get(name, "")

    @property
    def systemctl(self) -> str:
        return "systemctl --user" if self.scope == "user" else "systemctl"

    @property
    def journal(self) -> str:
        return f"journalctl {'--user ' if self.scope == 'user' else ''}-u {self.name}"

    def number(self, name: str) -> int | None:
        """A property as a number; None where it is none, as "infinity" and "[not set]" are."""
        return int(self[name]) if self[name].isascii() and self[name].isdigit() else None
