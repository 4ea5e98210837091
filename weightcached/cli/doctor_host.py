"""Checks of the machine: systemd, the runtime directory and what lies in it, the NVIDIA driver and its GPUs."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
from collections.abc import Collection
from pathlib import Path

from ..devices import is_host
from ..errors import RuntimeDirectoryError, ServiceNotRunning, WeightCacheError
from ..paths import check_runtime_dir, control_path, runtime_dir, socket_path
from ..probe import probe_devices
from .doctor_findings import Finding, Host, Level, Systemd, Unit

FLOOR = 252  # the oldest systemd that the unit is written for
PRESERVES = 254  # the first one that can keep stored descriptors through stop and start
_PROPERTIES = (
    "LoadState,ActiveState,SubState,Result,MainPID,NRestarts,UnitFileState,FragmentPath,NeedDaemonReload,Type,"
    "NotifyAccess,RestrictAddressFamilies,PrivateNetwork,ExecStart,FileDescriptorStoreMax,NFileDescriptorStore,FileDescriptorStorePreserve,LimitNOFILE"
)
_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
_MAKE_NODES = "as root, at every boot: nvidia-modprobe -u -c 0, or enable nvidia-persistenced"


def find_systemd(host: Host) -> Systemd:
    """Whether systemd is this machine's init (sd_booted(3)), its version, and whether the user's manager answers."""
    if not host.path("/run/systemd/system").is_dir():
        return Systemd(runs=False)
    version = re.match(r"systemd (\d+)", host.run(["systemctl", "--version"]).output)
    manager = host.run(["systemctl", "--user", "show", "--property=Version"])
    return Systemd(
        runs=True,
        version=int(version[1]) if version else None,
        user_problem=None if manager.code == 0 else manager.reason,
    )


def find_unit(host: Host, instance: str, systemd: Systemd) -> Unit | None:
    """The instance's unit: of this user's manager, else of the system's; None where neither has one installed.

    One that runs goes before one that does not.
    """
    name = f"weightcached@{instance}.service"
    units = []
    for scope in ("user", "system"):
        if not systemd.runs or (scope == "user" and systemd.user_problem is not None):
            continue
        manager = ["--user"] if scope == "user" else []
        shown = host.run(["systemctl", *manager, "show", f"--property={_PROPERTIES}", name])
        lines = (line.partition("=") for line in shown.output.splitlines())
        unit = Unit(name, scope, {key: value for key, _, value in lines})
        if unit["LoadState"] not in ("", "not-found"):
            units.append(unit)
    return next((unit for unit in units if unit["MainPID"] not in ("", "0")), units[0] if units else None)


def check_systemd(systemd: Systemd) -> Finding:
    if not systemd.runs:
        return Finding(
            "systemd",
            Level.WARNING,
            "does not run here: the death of a worker loses nothing, the end of the main process frees the cache",
            "run the service as a unit where the cache must outlive it",
        )
    if systemd.version is None:
        return Finding("systemd", Level.PROBLEM, "its version cannot be told", "try: systemctl --version")
    if systemd.version < FLOOR:
        found = f"version {systemd.version}; the unit needs {FLOOR} or newer"
        return Finding("systemd", Level.PROBLEM, found, "upgrade the distribution")
    return Finding("systemd", Level.OK, f"version {systemd.version}")


def check_user_manager(systemd: Systemd) -> Finding:
    if systemd.user_problem is None:
        return Finding("user manager", Level.OK, "answers")
    return Finding(
        "user manager",
        Level.PROBLEM,
        f"is not reached: {systemd.user_problem}",
        "log in as this user, by ssh or machinectl shell USER@, since su and sudo set no XDG_RUNTIME_DIR",
    )


def check_linger(host: Host) -> Finding:
    """Without it the user's manager, and with it the descriptor store, ends when the user's last session does."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    if host.path(f"/var/lib/systemd/linger/{user}").exists():
        return Finding("linger", Level.OK, f"on for {user}")
    found = f"off: the service and its cache end when {user} logs out"
    return Finding("linger", Level.WARNING, found, "loginctl enable-linger")


def check_directory(instances: Collection[str] = (), devices: Collection[str] = ("host-0",)) -> Finding:
    """The runtime directory, by the rules that the service and its clients go by.

    The sockets of these instances and devices must have room in it: their paths are limited to 107 bytes.
    """
    path = runtime_dir()
    try:
        check_runtime_dir()
    except ServiceNotRunning:
        if path.parent.is_dir():
            if problem := _refused_socket(instances, devices):
                return Finding("runtime directory", Level.PROBLEM, problem)
            return Finding("runtime directory", Level.OK, f"{path}, not there yet; the service makes it")
        found = f"{path} cannot be made: {path.parent} does not exist"
        return Finding(
            "runtime directory", Level.PROBLEM, found, "log in as this user, or set WEIGHTCACHED_RUNTIME_DIR"
        )
    except WeightCacheError as error:
        return Finding("runtime directory", Level.PROBLEM, str(error))
    if problem := _refused_socket(instances, devices):
        return Finding("runtime directory", Level.PROBLEM, problem)
    return Finding("runtime directory", Level.OK, str(path))


def _refused_socket(instances: Collection[str], devices: Collection[str]) -> str | None:
    """Why the first socket that is refused cannot be where it should."""
    for place, names in ((control_path, instances), (socket_path, devices)):
        for name in sorted(names):
            try:
                place(name)
            except RuntimeDirectoryError as error:
                return str(error)
            except WeightCacheError:  # its directory is not there yet, or the name is wrong, which is said elsewhere
                continue
    return None


def check_leftovers(host: Host) -> Finding:
    """Sockets that nobody listens on and locks that nobody holds.

    A lock is looked up in /proc/locks: taking it, for however short a time, would fail a service that starts now.
    """
    locks = host.read("/proc/locks")
    files: list[Path] = []
    with contextlib.suppress(OSError, WeightCacheError):  # `check_directory` says so
        files += sorted(check_runtime_dir().iterdir())
    stale = [path.name for path in files if path.suffix == ".sock" and _is_dead(path)]
    if locks is not None:
        stale += [path.name for path in files if path.suffix == ".lock" and not _is_locked(path, locks)]
    if not stale:
        return Finding("leftovers", Level.OK, "no socket or lock of a dead service")
    found = f"{', '.join(stale)}: of a service that was killed"
    return Finding("leftovers", Level.WARNING, found, "none: the next start replaces them")


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # its queue is full, or it was removed just now
            return False
    return False


def _is_locked(path: Path, locks: str) -> bool:
    """Whether /proc/locks (proc_locks(5)) has the file, by device and inode."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return True  # its service has just ended in order
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(file in line.split() for line in locks.splitlines())


def nvidia_driver(host: Host) -> str | None:
    """Version of the driver that is loaded, None where none is."""
    return (host.read("/sys/module/nvidia/version") or "").strip() or None


def check_nvidia(host: Host, wanted: Collection[str]) -> list[Finding]:
    """The driver, its device nodes, and every GPU as NVML sees it. `wanted`: devices that config files name."""
    named = sorted(name for name in wanted if not is_host(name))
    version = nvidia_driver(host)
    if version is None:
        if not named:
            return [Finding("driver", Level.OK, "no NVIDIA driver is loaded; host memory alone is served")]
        found = f"no NVIDIA driver is loaded, {', '.join(named)} cannot be served"
        return [Finding("driver", Level.PROBLEM, found, "install or load it; nvidia-smi must list the GPU")]
    return [Finding("driver", Level.OK, f"NVIDIA {version}"), check_nodes(host), *check_gpus(named)]


def check_nodes(host: Host) -> Finding:
    """The driver's device nodes exist and may be opened.

    The service cannot make them, since NoNewPrivileges= makes the setuid bit of nvidia-modprobe ineffective. A GPU's
    own node is not opened, which would start a GPU that sleeps.
    """
    minors = []
    for folder in host.path("/proc/driver/nvidia/gpus").glob("*"):
        minor = re.search(
            r"Device Minor:\s*(\d+)", host.read(f"/proc/driver/nvidia/gpus/{folder.name}/information") or ""
        )
        minors += [int(minor[1])] if minor else []
    nodes = [*_NODES, *(f"/dev/nvidia{minor}" for minor in sorted(minors))]
    missing = [node for node in nodes if not host.path(node).exists()]
    closed = [node for node in nodes if node not in missing and not _opens(host.path(node), open_it=node in _NODES)]
    if closed:
        found = f"{', '.join(closed)} cannot be opened by {pwd.getpwuid(os.geteuid()).pw_name}"
        return Finding("device nodes", Level.PROBLEM, found, "join the group that owns them, or allow the container to")
    if missing:
        return Finding("device nodes", Level.PROBLEM, f"missing: {', '.join(missing)}", _MAKE_NODES)
    return Finding("device nodes", Level.OK, ", ".join(nodes))


def _opens(path: Path, *, open_it: bool) -> bool:
    if not os.access(path, os.R_OK | os.W_OK):
        return False
    if open_it:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:  # a device cgroup allows fewer than the mode does
            return False
    return True


def check_gpus(named: Collection[str]) -> list[Finding]:
    """Every GPU that NVML lists, with its persistence mode, and whether those of a config are among them."""
    try:
        gpus = [device for device in probe_devices(None) if not is_host(device.name)]
    except WeightCacheError as error:
        return [Finding("GPUs", Level.PROBLEM, str(error), "nvidia-smi must list the GPU")]
    findings = []
    for gpu in gpus:
        if gpu.persistence is False:
            # The driver unloads what it knows of a GPU that nobody has open, and starts it anew for the next one.
            found = f"{gpu.model}; persistence mode is off"
            findings.append(Finding(gpu.name, Level.WARNING, found, "as root: nvidia-smi -pm 1"))
        else:
            findings.append(Finding(gpu.name, Level.OK, gpu.model))
    for name in named:
        if name not in {gpu.name for gpu in gpus}:
            known = ", ".join(gpu.name for gpu in gpus) or "none"
            findings.append(Finding(name, Level.PROBLEM, f"is not here; GPUs here: {known}", "correct devices = [...]"))
    return findings
