"""A real systemd user manager for tests, in a container that shares this machine's files and changes none of them.

`systemd-nspawn --volatile=overlay` boots a bind of `/`: every write goes to a tmpfs that ends with the container.
systemd must never be booted on the machine's own root: its tmpfiles step empties the real /tmp.
"""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import weightcached
from weightcached.fds import OwnedFd

USER = "weightcached-test"
SHARE = Path("/share")  # where the container sees `UserSystemd.share`
REPOSITORY = Path(weightcached.__file__).resolve().parent.parent
HIDDEN = (Path("/tmp"), Path("/run"), Path("/dev"))  # the container has its own

# Run in a mount namespace of its own, so that what is mounted here ends with the container, however it ends.
# /run must be empty: nspawn would take the machine's own running systemd for the container's.
BOOT = """
for cgroup in $1; do echo $$ > "$cgroup/cgroup.procs"; done
shift
mount -t tmpfs tmpfs /run
mkdir /run/systemd /run/root
mount --bind / /run/root
exec systemd-nspawn --quiet --register=no --keep-unit --directory=/run/root --volatile=overlay "$@" \
    --boot systemd.unit=weightcached-test.service systemd.show_status=no
"""

# The container ends at once and by force: what a clean stop does is for the tests to ask for, inside.
UNIT = """
[Unit]
Wants=dbus.socket systemd-logind.service
After=dbus.socket systemd-logind.service
SuccessAction=exit-force
FailureAction=exit-force

[Service]
Type=oneshot
TimeoutStartSec=infinity
KillSignal=SIGKILL
ExecStart=/bin/bash /share/.harness/prepare
StandardOutput=append:/share/.harness/console
StandardError=append:/share/.harness/console
"""

PREPARE = """
set -eu
useradd --create-home --groups systemd-journal --shell /bin/bash {user}
for folder in {closed}; do chmod o+x "$folder"; done
loginctl enable-linger {user}
uid=$(id -u {user})
systemctl start "user@$uid.service"
export USER={user}
code=0
timeout --kill-after=2 {timeout} bash /share/.harness/as-root > /share/.harness/output 2>&1 || code=$?
if [ $code = 0 ]; then
cd /home/{user}
setpriv --reuid={user} --regid={user} --init-groups env --ignore-environment \
    HOME=/home/{user} USER={user} LOGNAME={user} LANG=C.UTF-8 PATH=/share/bin:/usr/local/bin:/usr/bin:/bin \
    SYSTEMD_PAGER=cat SYSTEMD_COLORS=0 XDG_RUNTIME_DIR="/run/user/$uid" \
    DBUS_SESSION_BUS_ADDRESS="unix:path=/run/user/$uid/bus" \
    timeout --kill-after=2 {timeout} bash /share/.harness/script >> /share/.harness/output 2>&1 || code=$?
fi
journalctl --sync
journalctl --boot --no-pager --output=short-monotonic {units} "_UID=$uid" > /share/.harness/journal
echo "$code" > /share/.harness/code
systemctl kill --signal=SIGKILL "user@$uid.service"
"""


@dataclass(frozen=True)
class Result:
    """What a script did: its exit code (124: it ran past its time), its output, and the user's journal."""

    code: int
    output: str
    journal: str


class UserSystemd:
    """Runs scripts as an ordinary user under a systemd user manager of its own, one boot each.

    ``share`` is a folder of this machine that the scripts see as /share and may write to; its ``bin`` is first on their
    PATH. ``python`` runs this test run's own interpreter and package there.
    """

    def __init__(self, share: Path) -> None:
        self.share = share
        self.python = f"env PYTHONPATH={shlex.quote(str(REPOSITORY))} PYTHONDONTWRITEBYTECODE=1 {sys.executable}"
        self.boots = 0
        (share / "bin").mkdir(parents=True)
        share.chmod(0o777)

    def run(self, script: str, *, timeout: float = 40.0, as_root: str = "", unit: str | None = None) -> Result:
        """Boots, runs ``script`` (bash) for at most ``timeout`` seconds, and ends everything that it started.

        ``as_root`` is run before it by root, who finds the user's name in $USER; a failure there is the result. The
        journal is the user's, with that of the system's own ``unit``.
        Raises AssertionError with the console's text when the container does not get as far as the script's end.
        """
        harness = self.share / ".harness"
        shutil.rmtree(harness, ignore_errors=True)
        harness.mkdir()
        closed = [str(path) for path in _closed_parents()]
        units = "" if unit is None else f"_SYSTEMD_UNIT={shlex.quote(unit)} +"
        prepare = PREPARE.format(user=USER, closed=shlex.join(closed) or "''", timeout=timeout, units=units)
        for name, text in (("script", script), ("as-root", as_root), ("prepare", prepare), ("unit", UNIT)):
            (harness / name).write_text(text)
        with ExitStack() as stack:
            cgroups = [str(stack.enter_context(_OwnCgroup(parent)).path) for parent in _cgroups_of_systemd()]
            # Read-only: below /tmp the container's tmpfiles step would find them.
            binds = [f"--bind-ro={path}" for path in _needed() if _hidden(path)]
            unit = "/etc/systemd/system/weightcached-test.service"
            command = ["timeout", "--kill-after=3", str(timeout + 12), "unshare", "--mount", "--propagation=private"]
            command += ["bash", "-euc", BOOT, "boot", " ".join(cgroups), *binds]
            command += [f"--bind={self.share}:{SHARE}", f"--bind-ro={harness / 'unit'}:{unit}"]
            boot = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        self.boots += 1
        if not (harness / "code").exists():
            console = harness / "console"
            inside = console.read_text(errors="replace") if console.exists() else ""
            raise AssertionError(f"the container ended early ({boot.returncode}):\n{boot.stdout}{boot.stderr}{inside}")
        texts = [(harness / name).read_text(errors="replace") for name in ("code", "output", "journal")]
        return Result(int(texts[0]), texts[1], texts[2])


class _OwnCgroup:
    """A cgroup below ours for one container: systemd would otherwise arrange its slices among ours."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"weightcached-test-{os.getpid()}"

    def __enter__(self) -> _OwnCgroup:
        self.path.mkdir()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends whatever an interrupted boot left, and removes the cgroup."""
        while pids := [pid for procs in self.path.rglob("cgroup.procs") for pid in procs.read_text().split()]:
            for pid in pids:
                _kill(int(pid))
        for folder, _, _ in os.walk(self.path, topdown=False):
            os.rmdir(folder)


def _kill(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with OwnedFd(pidfd):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], 10)[0]:
            raise AssertionError(f"pid {pid} of the container does not end")


def _cgroups_of_systemd() -> list[Path]:
    """This process's own cgroup in the hierarchies that a container's systemd writes to: v2, and v1's name=systemd."""
    mounts = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts[""] = before.split()[3:5]
        elif kind == "cgroup" and "name=systemd" in options.split(","):
            mounts["name=systemd"] = before.split()[3:5]
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in mounts:
            root, mounted_at = mounts[controllers]
            found.append(Path(mounted_at) / os.path.relpath(path, root))
    return found


def _needed() -> list[Path]:
    """The folders that the interpreter and the package need, without repeats."""
    return list(dict.fromkeys([REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]))


def _hidden(path: Path) -> bool:
    """Whether the container does not see ``path`` through its root: its own mount there, or another file system."""
    return any(path.is_relative_to(top) for top in HIDDEN) or path.stat().st_dev != Path("/").stat().st_dev


def _closed_parents() -> list[Path]:
    """Folders on the way to those that an ordinary user may not pass through; the container opens its own copy."""
    wanted = [folder for path in _needed() if not _hidden(path) for folder in (path, *path.parents)]
    return [folder for folder in dict.fromkeys(wanted) if not folder.stat().st_mode & 0o001]


def _missing() -> str | None:
    """Why no container can be booted here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("systemd-nspawn") is None:
        return "needs systemd-nspawn (Debian package systemd-container)"
    unshared = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if unshared.returncode != 0:
        return f"needs a mount namespace: {unshared.stderr.strip()}"
    cgroups = _cgroups_of_systemd()
    if not cgroups or not all(os.access(path, os.W_OK) for path in cgroups):
        return "needs a writable cgroup file system"
    return None


@pytest.fixture(scope="session")
def _bootable() -> None:
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def user_systemd(_bootable: None, tmp_path: Path) -> Iterator[UserSystemd]:
    """A systemd user manager of this test's own."""
    yield UserSystemd(tmp_path / "share")
