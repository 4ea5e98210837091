"""Checks of one instance: its config, its unit, who answers for it, its descriptors and its memory."""

from __future__ import annotations

import os
import sys
import uuid
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from .. import __version__
from ..config import Config, find_config, load_config
from ..config_cluster import ClusterConfig
from ..devices import device_memory, host_devices, is_host
from ..errors import ServiceNotRunning, WeightCacheError
from ..paths import control_path
from ..wire.connection import Connection
from ..wire.messages import Status
from .doctor_findings import Finding, Host, Level, Systemd, Unit
from .doctor_host import PRESERVES, find_unit, nvidia_driver
from .output import human_bytes

STATUS_SECONDS = 10.0  # the service itself waits up to 5 s for a worker
PER_SHARD = 2  # descriptors: the manifest and one slab; a reload holds two generations
CLIENTS = 1024  # descriptors that are left for connections

_LONGEST = f"GPU-{uuid.UUID(int=0)}"
_NO_LIMIT = 1 << 60  # bytes; cgroup v1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True, slots=True)
class Instance:
    """What is known of a service: its config, its unit and its status, or why they are not there."""

    name: str
    config: Config | None
    config_problem: str | None
    unit: Unit | None
    status: dict[str, Any] | None
    status_problem: str | None

    @property
    def gpu_names(self) -> list[str]:
        """GPUs that its config names."""
        devices = () if self.config is None or self.config.devices == "all" else self.config.devices
        return [name for name in devices if not is_host(name)]

    @property
    def socket_names(self) -> tuple[str, ...]:
        """Devices whose sockets it makes, as far as its config is known; for "all" one whose name is as long as any."""
        if self.config is None:
            return ()
        return (_LONGEST,) if self.config.devices == "all" else tuple(self.config.devices)


def look_at(host: Host, name: str, systemd: Systemd) -> Instance:
    """Everything that the checks of an instance are made of."""
    status, status_problem = _ask(name)
    config, config_problem = None, None
    try:
        # A service that runs says which file it reads; its environment may be another one than this.
        file = status.get("config") if status is not None else None
        config = load_config(Path(file) if file else find_config(name))
    except WeightCacheError as error:
        config_problem = str(error)
    return Instance(name, config, config_problem, find_unit(host, name, systemd), status, status_problem)


def _ask(name: str) -> tuple[dict[str, Any] | None, str | None]:
    """The status of the service, or (None, why there is none); (None, None): nobody listens."""
    try:
        with Connection.open(control_path(name), client="weightcachectl", timeout=STATUS_SECONDS) as service:
            return service.ask(Status(), timeout=STATUS_SECONDS), None
    except ServiceNotRunning:
        return None, None
    except WeightCacheError as error:
        return None, str(error)


def check_service(host: Host, item: Instance, systemd: Systemd) -> list[Finding]:
    """Every finding of the instance, in the order in which they are mended."""
    findings = [_config(item)]
    if systemd.runs:
        findings.append(_unit(host, item))
    findings.append(_service(item, systemd))
    if item.status is not None:
        findings.append(_store(item, systemd))
        findings += _over_limit(item.status)
    if item.config is not None:
        findings += [_descriptors(host, item, item.config), _memory(host, item, item.config)]
        findings.append(_packages(host, item, item.config))
        if item.config.cluster is not None and not item.config.cluster.alone:
            findings.append(_cluster(item, item.config.cluster))
    return [replace(finding, instance=item.name) for finding in findings]


def _config(item: Instance) -> Finding:
    if item.config is None:
        next_step = f"mend it, then: weightcached check --instance {item.name}"
        if item.status is not None:
            next_step += "; until then a restart of the service would fail and lose its cache"
        return Finding("config", Level.PROBLEM, item.config_problem or "cannot be read", next_step)
    models = len(item.config.models)
    found = f"{item.config.file}, {models} {'model' if models == 1 else 'models'}; "
    return Finding(
        "config", Level.OK, found + f"whether they load and fit says weightcached check --instance {item.name}"
    )


def _unit(host: Host, item: Instance) -> Finding:
    unit = item.unit
    if unit is None:
        next_step = "copy weightcached@.service to ~/.config/systemd/user/, then: systemctl --user daemon-reload"
        return Finding(
            "unit", Level.WARNING, "not installed: nothing restarts the service or keeps its cache", next_step
        )
    command = _command(unit)
    where = f"{unit['FragmentPath']}, starts {command}, {unit['UnitFileState'] or 'state unknown'}"
    if unit["ActiveState"] == "failed":
        return Finding("unit", Level.PROBLEM, f"failed: {unit['Result']}; {where}", unit.journal)
    if command is None or not os.access(host.path(command), os.X_OK):
        found = f"{unit['FragmentPath']} starts {command}, which is not there"
        return Finding("unit", Level.PROBLEM, found, "install weightcached there, or see venv.conf.example")
    if unit["Type"] != "notify" or unit["NotifyAccess"] != "main":
        found = f"has Type={unit['Type']} and NotifyAccess={unit['NotifyAccess']}, should be notify and main; {where}"
        return Finding("unit", Level.PROBLEM, found, "take the unit of this version, then restart")
    if unit["NeedDaemonReload"] == "yes":
        return Finding("unit", Level.WARNING, f"changed since it was read; {where}", f"{unit.systemctl} daemon-reload")
    return Finding("unit", Level.OK, where)


def _command(unit: Unit) -> str | None:
    """The program of ``ExecStart={ path=/usr/bin/x ; argv[]=... }``."""
    _, found, rest = unit["ExecStart"].partition("path=")
    return rest.partition(" ;")[0] if found else None


def _service(item: Instance, systemd: Systemd) -> Finding:
    unit, status = item.unit, item.status
    if status is None:
        if item.status_problem is not None:
            return Finding("service", Level.PROBLEM, item.status_problem, _look(unit, item.name))
        if unit is not None and unit["ActiveState"] == "active":
            return Finding("service", Level.PROBLEM, "the unit is active, but nobody listens", _look(unit, item.name))
        start = f"{unit.systemctl if unit else 'systemctl --user'} start weightcached@{item.name}"
        if not systemd.runs:
            start = f"weightcached serve --instance {item.name}"
        return Finding("service", Level.WARNING, "does not run", start)
    found = f"weightcached {status['version']}, pid {status['pid']}, {'ready' if status['ready'] else 'starting'}"
    if unit is not None and unit["MainPID"] != str(status["pid"]):
        found += f"; not started by {unit.name}, so that nothing restarts it or keeps its cache"
        return Finding("service", Level.WARNING, found, f"end it, then: {unit.systemctl} start {unit.name}")
    if status["version"] != __version__:
        restart = f"{unit.systemctl} restart {unit.name}" if unit else "restart it"
        return Finding("service", Level.WARNING, f"{found}; installed here is {__version__}", restart)
    return Finding("service", Level.OK, found)


def _look(unit: Unit | None, name: str) -> str:
    return unit.journal if unit is not None else f"look at the log of weightcached@{name}"


def _store(item: Instance, systemd: Systemd) -> Finding:
    """What systemd keeps, against what the service believes that it keeps."""
    assert item.status is not None
    unit, store = item.unit, item.status.get("store")
    if unit is None or unit["MainPID"] != str(item.status["pid"]):
        found = "no service manager keeps descriptors: the end of the main process frees the cache"
        return Finding("store", Level.WARNING, found, "run the service as a unit where the cache must outlive it")
    limit, kept = unit.number("FileDescriptorStoreMax") or 0, unit.number("NFileDescriptorStore") or 0
    if limit == 0:
        found = "the unit keeps no descriptors (FileDescriptorStoreMax=0)"
        return Finding("store", Level.PROBLEM, found, "take the unit of this version, then restart")
    if store is None or not store["active"]:
        found = "the service gives systemd nothing to keep: the end of its main process frees the cache"
        return Finding("store", Level.PROBLEM, found, f"{unit.systemctl} restart {unit.name}; {unit.journal}")
    counts = f"{kept} of at most {limit} descriptors, {store['shards']} shards"
    if store["refused"]:
        names = ", ".join(f"{shard['model']} on {shard['device']} ({shard['reason']})" for shard in store["refused"])
        found = f"not kept, a restart loses them: {names}; {counts}"
        return Finding("store", Level.PROBLEM, found, f"raise FileDescriptorStoreMax= in a drop-in; {unit.journal}")
    if store["pending"]:
        found = f"{counts}; {store['pending']} more on their way"
        return Finding("store", Level.WARNING, found, "again in some seconds")
    if kept != store["stored"]:
        found = f"systemd keeps {kept} descriptors, the service counts {store['stored']}"
        next_step = f"again when nothing is loaded or evicted; if it stays: {unit.systemctl} restart {unit.name}"
        return Finding("store", Level.PROBLEM, found, next_step)
    return Finding("store", Level.OK, f"{counts}; {_outlives(unit, systemd)}")


def _outlives(unit: Unit, systemd: Systemd) -> str:
    if unit["FileDescriptorStorePreserve"] == "yes":
        return "they stay through crash, restart and stop"
    newer = systemd.version is not None and systemd.version >= PRESERVES
    return "they stay through crash and restart, a stop frees them" + (
        " (FileDescriptorStorePreserve=yes would not)" if newer else ""
    )


def _descriptors(host: Host, item: Instance, config: Config) -> Finding:
    """Room for the descriptors of what the config lists: in the service, and in the store."""
    ranks = sum(len(model.ranks_here) for model in config.models)
    needed = 2 * PER_SHARD * ranks
    text = f"{ranks} shards need up to {needed} during a reload"
    store = item.unit.number("FileDescriptorStoreMax") if item.unit is not None else None
    if store and store < needed + 1:
        found = f"{text}, and one more to try the store with; it takes {store}"
        return Finding("descriptors", Level.PROBLEM, found, f"FileDescriptorStoreMax={needed + 1} in a drop-in")
    limit = _descriptor_limit(host, item)
    if limit is not None and limit < needed + CLIENTS:
        found = f"{text}, and clients some; a process of the service may have {limit}"
        return Finding("descriptors", Level.PROBLEM, found, f"LimitNOFILE={needed + CLIENTS} in a drop-in")
    return Finding("descriptors", Level.OK, f"{text}; limit {'unknown' if limit is None else limit}")


def _descriptor_limit(host: Host, item: Instance) -> int | None:
    """The hard limit of the running service, else of its unit; the service raises its soft one to it."""
    if item.status is not None:
        for line in (host.read(f"/proc/{item.status['pid']}/limits") or "").splitlines():
            if line.startswith("Max open files"):
                hard = line.split()[4]
                return int(hard) if hard.isdigit() else None
    return item.unit.number("LimitNOFILE") if item.unit is not None else None


def _memory(host: Host, item: Instance, config: Config) -> Finding:
    """Room for what the host devices may hold: in the machine, and in the service's cgroup."""
    machine = host_devices()
    if config.devices == "all":
        names = [] if nvidia_driver(host) else [device.name for device in machine[:1]]
    else:
        names = [name for name in config.devices if is_host(name)]
    if not names:
        staging = human_bytes(config.staging_memory)
        return Finding("memory", Level.OK, f"weights are in GPU memory alone; a load takes {staging} of the host's")
    wanted = sum(config.memory_limit.bytes_of(device_memory(name).total) for name in names)
    total = sum(device.memory.total for device in machine)
    text = f"{', '.join(names)} may hold {human_bytes(wanted)} by memory_limit"
    if wanted > total:
        found = f"{text}, the machine has {human_bytes(total)}"
        return Finding("memory", Level.WARNING, found, "lower memory_limit, which counts for each device")
    limit = cgroup_limit(host, "self" if item.status is None else str(item.status["pid"]))
    if limit is not None and wanted > limit:
        # Counted there and not freed by a restart: memory of a memfd stays charged to the unit that filled it.
        found = f"{text}, its cgroup allows {human_bytes(limit)}"
        return Finding(
            "memory", Level.PROBLEM, found, "lower memory_limit, or raise MemoryMax= of the unit or its slice"
        )
    return Finding("memory", Level.OK, f"{text} of {human_bytes(total)}")


def _cluster(item: Instance, cluster: ClusterConfig) -> Finding:
    """Whether the unit lets the service reach the other nodes, and what it says of them."""
    where = f"node {cluster.node_rank} of {cluster.nodes}, meets at {cluster.meets_at}"
    unit = item.unit
    if unit is not None:
        families = unit["RestrictAddressFamilies"]
        closed = families and not families.startswith("~") and "AF_INET" not in families.split()
        if closed or unit["PrivateNetwork"] == "yes":
            next_step = f"copy network.conf.example to {unit.name}.d/network.conf, then: {unit.systemctl} daemon-reload"
            return Finding("cluster", Level.PROBLEM, f"{where}; its unit cuts it off the network", next_step)
    said = item.status.get("cluster") if item.status is not None else None
    if not said:
        return Finding("cluster", Level.OK, where)
    if said["problem"]:
        return Finding("cluster", Level.PROBLEM, f"{where}; {said['problem']}", "mend it, then restart or reload there")
    missing = [f"node {node['node']} {node['state']}" for node in said["nodes"] if node["state"] != "loaded"]
    if missing:
        return Finding("cluster", Level.WARNING, f"{where}; {', '.join(missing)}", "start the service there")
    agreed = "" if said["agreed"] else ", not agreed yet"
    return Finding("cluster", Level.OK, f"{where}; all nodes are there{agreed}")


def _over_limit(status: dict[str, Any]) -> list[Finding]:
    """Devices on which more is held than may be: memory_limit was lowered, or engines keep what was dropped."""
    return [
        Finding(
            "limit",
            Level.WARNING,
            f"{device['device']} holds {human_bytes(device['held'])}, more than its {human_bytes(device['limit'])}; "
            "idle models go when room is needed",
            "weightcachectl evict what is not needed, or raise memory_limit and restart",
        )
        for device in status.get("devices", ())
        if device.get("held", 0) > device["limit"]
    ]


def cgroup_limit(host: Host, pid: str) -> int | None:
    """The least of the memory limits of a process's cgroup and of those above it, in bytes; None without any.

    As mounted by systemd: version 2 at /sys/fs/cgroup, the memory hierarchy of version 1 below it.
    """
    limits = []
    for line in (host.read(f"/proc/{pid}/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = PurePosixPath("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            top, name = PurePosixPath("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path)
        for folder in (own, *own.parents):
            text = (host.read(str(top / folder.relative_to("/") / name)) or "").strip()
            if text.isdigit() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=None)


def _packages(host: Host, item: Instance, config: Config) -> Finding:
    """What the service imports only when it needs it, in the environment that this command runs in."""
    command = _command(item.unit) if item.unit is not None else None
    if command is not None and not _same_environment(command):
        found = f"not looked at: {item.name} runs from another environment, {command}"
        return Finding("packages", Level.WARNING, found, f"{Path(command).parent}/weightcachectl doctor")
    casts = [model.name for model in config.models if model.dtype != "checkpoint"]
    gpu = item.gpu_names or (config.devices == "all" and nvidia_driver(host) is not None)
    wanted = [("torch", "torch", f"casts {', '.join(casts)}")] if casts else []
    wanted += [("cuda.bindings", "cuda", "loads to a GPU")] if gpu else []
    if config.cluster is not None and not config.cluster.alone:
        wanted.append(("torch", "torch", "agrees with the other nodes"))
    missing = [(package, extra, why) for package, extra, why in wanted if not _installed(package)]
    if missing:
        found = ", ".join(f"no {package}, which {why}" for package, _, why in missing)
        extras = ",".join(extra for _, extra, _ in missing)
        return Finding("packages", Level.PROBLEM, f"{found}, in {sys.prefix}", f"pip install 'weightcached[{extras}]'")
    return Finding(
        "packages", Level.OK, f"{', '.join(package for package, _, _ in wanted) or 'none'} needed; {sys.prefix}"
    )


def _same_environment(command: str) -> bool:
    folder = Path(command).resolve().parent
    return folder in (Path(sys.prefix).resolve() / "bin", Path(sys.argv[0]).resolve().parent)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
