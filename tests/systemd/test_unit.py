"""The unit as shipped, under a real systemd user manager, with real models on host-0."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .conftest import Result, UserSystemd

pytestmark = pytest.mark.systemd

UNITS = Path(__file__).resolve().parents[2] / "packaging" / "systemd" / "user"
SMALL, BIG = 1 << 20, 300 << 20  # bytes

# For any script. `save NAME COMMAND...` keeps the command's output and exit code for the test.
SHELL = """
save() {
    local name=$1 code=0; shift
    "$@" > "/share/facts/$name" 2>&1 || code=$?
    echo "$code" > "/share/facts/$name.code"
}
# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    local end=$((SECONDS + $1)); shift
    until "$@"; do
        [ $SECONDS -lt $end ] || { echo "waited in vain for: $*"; exit 99; }
        sleep 0.02
    done
}
"""

# What every script begins with.
PRELUDE = """
set -eu
mkdir -p ~/.local ~/.config
cp -r /share/bin ~/.local/bin
cp -r /share/config ~/.config/weightcached
cp -r /share/systemd ~/.config/systemd
systemctl --user daemon-reload
show() { systemctl --user show --value --property="$2" "weightcached@$1.service"; }
# An inactive unit that nothing refers to is unloaded, and its result with it: enable a unit to look at it once stopped.
state() { save "$2" systemctl --user show "weightcached@$1.service"; }
is() { [ "$(show "$1" "$2")" = "$3" ]; }
"""

# Lets a loader run in slices of a few milliseconds, so that its load is slow; prints each status line seen.
SLICES = """
import os, re, signal, subprocess, time
from pathlib import Path

def loader():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"\\0loader\\0host-0\\0" in path.read_bytes():
                return int(path.parent.name)
        except OSError:  # it has ended
            pass

def status():
    command = ["systemctl", "--user", "show", "--value", "--property=StatusText", "weightcached@one.service"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

end = time.monotonic() + 10
while (pid := loader()) is None:
    if time.monotonic() > end:
        raise SystemExit("no loader appeared")
    time.sleep(0.005)
end += 15
percents = set()
while len(percents) < 3 and time.monotonic() < end and loader() == pid:
    os.kill(pid, signal.SIGSTOP)
    line = status()
    print(line, flush=True)
    if found := re.search(r"loading big (\\d+) %", line):
        percents.add(found[1])
        time.sleep(0.3)  # the loader reports four times a second
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.008 if percents else 0.02)
"""


class Installation:
    """The unit, its command, config files and models, and what a script found out about them."""

    def __init__(self, systemd: UserSystemd) -> None:
        self.systemd = systemd
        self.share = systemd.share
        for folder in ("config", "facts", "models", "systemd/user"):
            (self.share / folder).mkdir(parents=True)
        (self.share / "facts").chmod(0o777)
        shutil.copy(UNITS / "weightcached@.service", self.share / "systemd/user")
        self.command("weightcached", "weightcached")
        self.command("weightcachectl", "weightcached.cli.ctl", "import sys; from {} import main; sys.exit(main())")

    def command(self, name: str, module: str, code: str | None = None) -> None:
        """A command of the package, where the unit looks for it."""
        what = f"-m {module}" if code is None else "-c " + shlex.quote(code.format(module))
        path = self.share / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {self.systemd.python} {what} "$@"\n')
        path.chmod(0o755)

    def drop_in(self, name: str, text: str) -> None:
        folder = self.share / "systemd/user/weightcached@.service.d"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    def config(self, instance: str, text: str, **models: int) -> None:
        """``instance.toml`` with ``text``, then these models of so many bytes each, made where they are missing."""
        for name, nbytes in models.items():
            self.model(name, nbytes)
            text += f'[[model]]\nname = "{name}"\ncheckpoint = "/share/models/{name}"\n'
        (self.share / "config" / f"{instance}.toml").write_text(text)

    def model(self, name: str, nbytes: int) -> None:
        """A checkpoint of one tensor of random bytes."""
        folder = self.share / "models" / name
        if folder.exists():
            return
        folder.mkdir()
        header = json.dumps({"weight": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
        header += b" " * (-len(header) % 8)
        block = os.urandom(1 << 20)
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _ in range(nbytes // len(block)):
                file.write(block)

    def run(self, script: str, *, code: int = 0) -> Result:
        """Runs the script after the prelude; it must end with ``code``."""
        result = self.systemd.run(SHELL + PRELUDE + script)
        print(result.journal)  # pytest shows it beside a failure
        assert result.code == code, result.output
        return result

    def text(self, name: str) -> str:
        return (self.share / "facts" / name).read_text().strip()

    def code(self, name: str) -> int:
        return int(self.text(f"{name}.code"))

    def state(self, name: str) -> dict[str, str]:
        """The unit's properties as saved by the script's ``state``."""
        return dict(line.split("=", 1) for line in self.text(name).splitlines())

    def models(self, name: str) -> dict[str, str]:
        """Model -> state as saved by ``save NAME weightcachectl status --json``."""
        assert self.code(name) == 0, self.text(name)
        status: dict[str, Any] = json.loads(self.text(name))
        return {model["model"]: model["state"] for service in status["services"] for model in service["models"]}


@pytest.fixture
def installation(user_systemd: UserSystemd) -> Iterator[Installation]:
    yield Installation(user_systemd)
    shutil.rmtree(user_systemd.share / "models")  # pytest keeps what is in its temporary folders for three runs


HOST = 'devices = ["host-0"]\n'


def test_active_means_served(installation: Installation) -> None:
    """`systemctl start` returns when the model is served, and not before; the status line names it."""
    installation.config("one", HOST, minilm=SMALL)
    result = installation.run("""
    save start systemctl --user start weightcached@one.service
    save status weightcachectl status --json
    state one state
    save security grep -E 'NoNewPrivs|Seccomp:' "/proc/$(show one MainPID)/status"
    """)
    assert (installation.code("start"), installation.text("start")) == (0, "")
    assert installation.models("status") == {"minilm": "cached"}
    state = installation.state("state")
    assert (state["ActiveState"], state["SubState"], state["NRestarts"]) == ("active", "running", "0")
    assert "minilm" in state["StatusText"]
    assert installation.text("security").split() == ["NoNewPrivs:", "1", "Seccomp:", "2"]
    assert "reception only permitted" not in result.journal, "a child talks to systemd"


def test_progress_is_in_the_status(installation: Installation) -> None:
    """While a model loads, the unit is activating and its status line tells the share read and the rate."""
    installation.config("one", HOST, big=BIG)
    (installation.share / "slices.py").write_text(SLICES)
    installation.run(f"""
    systemctl --user start --no-block weightcached@one.service
    save progress {installation.systemd.python} /share/slices.py
    wait_for 10 is one ActiveState active
    state one after
    """)
    lines = installation.text("progress").splitlines()
    found = [re.search(r"\bloading big (\d+) %, \d+\.\d GB/s", line) for line in lines]
    percents = [int(match[1]) for match in found if match]
    print(lines)
    assert len(set(percents)) >= 3
    assert percents == sorted(percents)
    assert percents[-1] <= 100
    assert "loading" not in installation.state("after")["StatusText"]


def test_slow_load_does_not_time_out(installation: Installation) -> None:
    """A load that makes no progress for longer than TimeoutStartSec= is waited for, and the unit becomes active."""
    installation.config("one", HOST, big=BIG)
    installation.drop_in("timeout.conf", "[Service]\nTimeoutStartSec=8s\n")
    installation.run("""
    systemctl --user start --no-block weightcached@one.service
    wait_for 10 pgrep --full 'loader host-0 big' > /dev/null
    loader=$(pgrep --full 'loader host-0 big')
    kill -STOP $loader
    sleep 10
    state one during
    kill -CONT $loader
    wait_for 15 is one ActiveState active
    state one after
    save status weightcachectl status --json
    """)
    assert installation.state("during")["TimeoutStartUSec"] == "8s"
    assert installation.state("during")["ActiveState"] == "activating"
    assert (installation.state("after")["Result"], installation.state("after")["NRestarts"]) == ("success", "0")
    assert installation.models("status") == {"big": "cached"}


GONE = """
    save processes pgrep --euid "$(id -u)" --full --list-full 'weightcached (serve|worker|loader)'
    save sockets find "$XDG_RUNTIME_DIR/weightcached" -type s
    for lock in "$XDG_RUNTIME_DIR"/weightcached/*.lock; do
        [ ! -e "$lock" ] || flock --nonblock "$lock" true || echo "$lock is held"
    done
"""


def test_stop_is_clean(installation: Installation) -> None:
    """A stopped service has exited with 0; no process, socket or held lock is left."""
    installation.config("one", HOST, minilm=SMALL)
    result = installation.run(f"""
    systemctl --user --quiet enable --now weightcached@one.service
    pgrep --euid "$(id -u)" --full 'weightcached worker' > /dev/null || exit 98
    save stop systemctl --user stop weightcached@one.service
    state one state
    {GONE}
    save status weightcachectl status
    """)
    assert installation.code("stop") == 0
    state = installation.state("state")
    assert (state["Result"], state["ExecMainCode"], state["ExecMainStatus"]) == ("success", "1", "0")
    assert state["ActiveState"] == "inactive"
    assert (installation.text("processes"), installation.text("sockets"), result.output) == ("", "", "")
    assert installation.code("status") == 3, "service not running"


def test_stop_during_a_load_is_clean(installation: Installation) -> None:
    """A stop in the middle of a load ends the loader too and counts as success."""
    installation.config("one", HOST, big=BIG)
    result = installation.run(f"""
    systemctl --user --quiet enable --now --no-block weightcached@one.service
    wait_for 10 pgrep --full 'loader host-0 big' > /dev/null
    save stop systemctl --user stop weightcached@one.service
    state one state
    {GONE}
    """)
    state = installation.state("state")
    assert (state["Result"], state["ExecMainCode"], state["ExecMainStatus"]) == ("success", "1", "0")
    assert (state["ActiveState"], state["NRestarts"]) == ("inactive", "0")
    assert (installation.text("processes"), installation.text("sockets"), result.output) == ("", "", "")


def test_bad_config_is_not_retried(installation: Installation) -> None:
    """An unknown key fails the start with 78 for good; the journal names file, key and the nearest valid one."""
    installation.config("one", HOST + '[[model]]\nname = "minilm"\ncheckpont = "/share/models/minilm"\n')
    result = installation.run("""
    save start systemctl --user start weightcached@one.service
    sleep 3  # longer than RestartSec=
    state one state
    """)
    assert installation.code("start") == 1
    state = installation.state("state")
    assert (state["ExecMainStatus"], state["Result"]) == ("78", "exit-code")
    assert (state["ActiveState"], state["NRestarts"]) == ("failed", "0")
    assert re.search(r"/one\.toml: .*\bcheckpont\b.*\bcheckpoint\b", result.journal), result.journal


def test_second_instance_for_a_device_names_the_first(installation: Installation) -> None:
    """A second service for host-0 fails with 75, is not retried, and says who serves it; the first goes on."""
    installation.config("one", HOST, minilm=SMALL)
    installation.config("two", HOST, other=SMALL)
    result = installation.run("""
    systemctl --user start weightcached@one.service
    save start systemctl --user start weightcached@two.service
    sleep 3  # longer than RestartSec=
    state one one
    state two two
    save status weightcachectl status --json
    """)
    assert installation.code("start") == 1
    two = installation.state("two")
    assert (two["ExecMainStatus"], two["Result"]) == ("75", "exit-code")
    assert (two["ActiveState"], two["NRestarts"]) == ("failed", "0")
    one = installation.state("one")
    assert f"host-0 is served by weightcached@one, pid {one['MainPID']}" in result.journal
    assert (one["ActiveState"], one["NRestarts"]) == ("active", "0")
    assert installation.models("status") == {"minilm": "cached"}


def test_killed_service_comes_back(installation: Installation) -> None:
    """After SIGKILL of the main process its workers end with it, and the restarted service serves again."""
    installation.config("one", HOST, minilm=SMALL)
    installation.run("""
    systemctl --user start weightcached@one.service
    state one before
    pgrep --full 'weightcached worker' > /share/facts/worker
    systemctl --user kill --signal=SIGKILL --kill-whom=main weightcached@one.service
    wait_for 15 is one NRestarts 1
    wait_for 15 is one ActiveState active
    state one after
    save status weightcachectl status --json
    save worker_after pgrep --full 'weightcached worker'
    """)
    before, after = installation.state("before"), installation.state("after")
    assert after["MainPID"] != before["MainPID"]
    assert "minilm" in after["StatusText"]
    assert installation.models("status") == {"minilm": "cached"}
    assert installation.text("worker") != installation.text("worker_after")
    assert len(installation.text("worker_after").split()) == 1


def test_reload_picks_up_a_new_model(installation: Installation) -> None:
    """`systemctl reload` reads the config again and loads what is new, in the same process and without a restart."""
    installation.config("more", HOST, minilm=SMALL, other=SMALL)
    installation.config("one", HOST, minilm=SMALL)
    installation.run("""
    systemctl --user start weightcached@one.service
    state one before
    save first weightcachectl status --json
    mv ~/.config/weightcached/more.toml ~/.config/weightcached/one.toml
    save reload systemctl --user reload weightcached@one.service
    other_is_there() { weightcachectl wait other --timeout 10 2> /dev/null; }
    wait_for 15 other_is_there
    wait_for 15 is one ActiveState active
    state one after
    save second weightcachectl status --json
    """)
    assert installation.code("reload") == 0
    assert installation.models("first") == {"minilm": "cached"}
    assert installation.models("second") == {"minilm": "cached", "other": "cached"}
    before, after = installation.state("before"), installation.state("after")
    assert (after["MainPID"], after["NRestarts"]) == (before["MainPID"], "0")


def test_refused_reload_changes_nothing(installation: Installation) -> None:
    """A reload of a broken config is logged with file and key; the service stays active and serves as before."""
    installation.config("broken", "no_such_key = 1\n" + HOST)
    installation.config("one", HOST, minilm=SMALL)
    result = installation.run("""
    systemctl --user start weightcached@one.service
    mv ~/.config/weightcached/broken.toml ~/.config/weightcached/one.toml
    systemctl --user reload weightcached@one.service
    logged() { journalctl --user-unit=weightcached@one.service --grep=no_such_key > /dev/null; }
    wait_for 15 logged
    wait_for 15 is one ActiveState active
    save status weightcachectl status --json
    """)
    assert re.search(r"/one\.toml: .*\bno_such_key\b", result.journal)
    assert installation.models("status") == {"minilm": "cached"}


def test_drop_in_for_a_virtual_environment(installation: Installation) -> None:
    """With the example drop-in the command comes from the virtual environment, not from ~/.local/bin."""
    installation.config("one", HOST, minilm=SMALL)
    installation.drop_in("venv.conf", (UNITS / "weightcached@.service.d/venv.conf.example").read_text())
    installation.run("""
    mkdir -p ~/weightcached/.venv
    mv ~/.local/bin ~/weightcached/.venv/bin
    save start systemctl --user start weightcached@one.service
    state one state
    """)
    assert (installation.code("start"), installation.text("start")) == (0, "")
    state = installation.state("state")
    assert state["ActiveState"] == "active"
    assert "/weightcached/.venv/bin/weightcached" in state["ExecStart"]
