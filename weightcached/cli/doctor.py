"""``weightcachectl doctor``: every fact that makes the service survive or fail, a line each, with the next step.

    doctor            which checks, in which order, and how they are printed
    doctor_host       the machine: systemd, directories, drivers
    doctor_service    one instance: its config, its unit, its descriptors, its memory
    doctor_findings   what a check says, and where it looks

Nothing is changed and nothing is loaded. Every command and every connection has a time-out, NVML is asked by a child.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..config import config_directories
from ..errors import WeightCacheError
from ..paths import CONTROL_SUFFIX, check_instance, control_paths
from ..text import printable
from .doctor_findings import Finding, Host, Level
from .doctor_host import (
    check_directory,
    check_leftovers,
    check_linger,
    check_nvidia,
    check_systemd,
    check_user_manager,
    find_systemd,
)
from .doctor_service import check_service, look_at
from .output import emit, print_json

SCHEMA = 1


def doctor(instance: str | None, *, as_json: bool = False) -> int:
    """Prints what was found of one instance, or of all that have a config file or run. 1 if there is a problem.

    Warnings do not count: nothing is wrong now, but the cache ends sooner than it could.
    """
    findings = examine(Host(), known_instances() if instance is None else [check_instance(instance)])
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        print_json({"schema": SCHEMA, "problems": problems, "checks": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            emit(printable(finding.line()))
    return 1 if problems else 0


def examine(host: Host, names: Sequence[str]) -> list[Finding]:
    """Every finding: those of the machine, then those of each instance of `names`."""
    systemd = find_systemd(host)
    instances = [look_at(host, name, systemd) for name in names]
    findings = [check_systemd(systemd)]
    if systemd.runs and not any(item.unit is not None and item.unit.scope == "system" for item in instances):
        findings += [check_user_manager(systemd), check_linger(host)]
    devices = {device for item in instances for device in item.socket_names}
    findings += [check_directory(names, devices or {"host-0"}), check_leftovers(host)]
    findings += check_nvidia(host, {name for item in instances for name in item.gpu_names})
    if not instances:
        places = ", ".join(str(directory) for directory in config_directories())
        next_step = "write one; etc/model.toml is an example"
        findings.append(Finding("config", Level.WARNING, f"no file NAME.toml in {places}", next_step))
    for item in instances:
        findings += check_service(host, item, systemd)
    return findings


def known_instances() -> list[str]:
    """The names of the services that have a config file or a control socket."""
    names: set[str] = set()
    for directory in config_directories():
        with contextlib.suppress(OSError):  # not there, or not for this user, whose config it is not then
            names.update(Path(name).stem for name in os.listdir(directory) if name.endswith(".toml"))
    with contextlib.suppress(WeightCacheError):  # `check_directory` says so
        names.update(path.name.removesuffix(CONTROL_SUFFIX) for path in control_paths())
    return sorted(names)
