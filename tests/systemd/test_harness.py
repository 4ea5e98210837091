"""The container is what it says: a real user manager of the floor version, and nothing of it reaches this machine."""

from __future__ import annotations

import os
import pwd
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import UserSystemd

pytestmark = pytest.mark.systemd


def test_a_script_runs_under_a_user_manager(user_systemd: UserSystemd) -> None:
    """The script is an ordinary user with a running manager; its exit code, output and journal come back."""
    script = """
    id -u
    systemctl --user is-system-running
    systemd-run --user --wait --quiet -p SyslogIdentifier=canary echo "from a unit"
    echo "not from a unit" >&2
    exit 7
    """
    result = user_systemd.run(script)
    uid, state, last = result.output.splitlines()
    assert int(uid) >= 1000
    assert (state, last, result.code) == ("running", "not from a unit", 7)
    assert "canary" in result.journal
    assert "from a unit" in result.journal


def test_the_package_under_test_runs_in_it(user_systemd: UserSystemd) -> None:
    """The user inside imports the same package with the same interpreter, wherever on this machine they are."""
    result = user_systemd.run(f"{user_systemd.python} -c 'import weightcached.errors as e; print(e.__file__)'")
    import weightcached.errors

    assert (result.code, result.output.strip()) == (0, weightcached.errors.__file__)


def test_this_machine_is_untouched(user_systemd: UserSystemd) -> None:
    """A boot, which empties the container's /tmp, leaves this machine's /tmp, users and linger folder as they were."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        canary = Path(folder) / "canary"
        canary.write_text("sings")
        before = canary.stat()
        users = pwd.getpwall()
        result = user_systemd.run(
            "ls -A /tmp; touch ~/left-behind /tmp/left-behind; loginctl show-user -p Linger $USER; id -un"
        )
        assert result.code == 0
        assert Path(folder).name not in result.output, "the container sees this machine's /tmp"
        assert "Linger=yes" in result.output
        user = result.output.splitlines()[-1]
        assert canary.read_text() == "sings"
        assert canary.stat().st_mtime_ns == before.st_mtime_ns
        assert pwd.getpwall() == users
        for path in ("/tmp/left-behind", f"/home/{user}", f"/var/lib/systemd/linger/{user}"):
            assert not os.path.lexists(path)


STUBBORN = """
stubborn='trap "" TERM; exec sleep 987654'
systemd-run --user --quiet bash -c "$stubborn"
setsid bash -c "$stubborn" &
until [ "$(pgrep --count --full 987654)" = 2 ]; do sleep 0.02; done
touch /share/running
"""


def assert_nothing_stays(mounts: str) -> None:
    """No process of STUBBORN, no mount and no cgroup of a container is left."""
    assert Path("/proc/self/mountinfo").read_text() == mounts
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if b"987654" in command]
    assert not list(Path("/sys/fs/cgroup").glob(f"**/weightcached-test-{os.getpid()}"))


def test_nothing_of_a_boot_stays(user_systemd: UserSystemd) -> None:
    """Processes that ignore SIGTERM end with their container, and so do the container's mounts and cgroups."""
    mounts = Path("/proc/self/mountinfo").read_text()
    assert user_systemd.run(STUBBORN).code == 0
    assert_nothing_stays(mounts)


def test_nothing_of_an_interrupted_boot_stays(user_systemd: UserSystemd) -> None:
    """A test that is interrupted while its script runs, as by its time limit, takes the container with it."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def when_running() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if (user_systemd.share / "running").exists():
                os.kill(os.getpid(), signal.SIGUSR1)
                return
            time.sleep(0.02)

    mounts = Path("/proc/self/mountinfo").read_text()
    previous = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=when_running, daemon=True)
    thread.start()
    try:
        with pytest.raises(Interrupted):
            user_systemd.run(STUBBORN + "sleep 600")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    thread.join()
    assert_nothing_stays(mounts)


def test_a_script_that_hangs_is_ended(user_systemd: UserSystemd) -> None:
    """A script past its time has the exit code 124, and what it said until then."""
    result = user_systemd.run("echo begins; sleep 600", timeout=2)
    assert (result.code, result.output) == (124, "begins\n")
    assert user_systemd.run("exit 0").code == 0
