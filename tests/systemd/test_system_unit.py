"""The unit for all users, under a real systemd: who is let in, what outlives what, what it can reach."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.systemd.test_unit import SHELL, SMALL, Installation

if TYPE_CHECKING:
    from .conftest import Result, UserSystemd

pytestmark = pytest.mark.systemd

SHIPPED = Path(__file__).resolve().parents[2] / "packaging" / "systemd"
UNIT = "weightcached@one.service"

# The checkpoint lies in a home, which the service may only read.
INSTALL = """
set -eu
systemd-sysusers /share/sysusers.conf
install -D -m 644 -t /etc/systemd/system /share/weightcached@.service
install -m 755 -t /usr/local/bin /share/bin/*
useradd --no-create-home stranger
cp -r /share/models /home/$USER/models
mkdir -p /etc/weightcached
cat > /etc/weightcached/one.toml <<END
devices = ["host-0"]
allow_uids = [$(id -u $USER)]
[[model]]
name = "minilm"
checkpoint = "/home/$USER/models/minilm"
END
systemctl daemon-reload
export WEIGHTCACHED_RUNTIME_DIR=/run/weightcached WEIGHTCACHED_SERVICE_USER=weightcached
as() { setpriv --reuid="$1" --regid="$1" --clear-groups "${@:2}"; }
show() { systemctl show --value --property="$1" weightcached@one.service; }
"""

# Attaches as an engine does, without torch, and prints the digest of what it got.
CLIENT = """
import hashlib, mmap, os, sys
from weightcached.paths import check_runtime_dir, socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach

check_runtime_dir()
with Connection.open(socket_path("host-0"), device="host-0") as worker:
    _, fds = worker.request(Attach(model="minilm"))
    with fds:
        slab = list(fds)[1].fileno()
        with mmap.mmap(slab, 0, prot=mmap.PROT_READ) as memory:
            print(hashlib.sha256(memory).hexdigest())
"""


def digest(installation: Installation) -> str:
    """Of the bytes that a client of `minilm` must find."""
    file = (installation.share / "models/minilm/model.safetensors").read_bytes()
    return hashlib.sha256(file[-SMALL:]).hexdigest()


@pytest.fixture
def installation(user_systemd: UserSystemd) -> Installation:
    installation = Installation(user_systemd)
    shutil.copy(SHIPPED / "system" / "weightcached@.service", user_systemd.share)
    shutil.copy(SHIPPED / "sysusers.d" / "weightcached.conf", user_systemd.share / "sysusers.conf")
    (user_systemd.share / "client.py").write_text(CLIENT)
    installation.model("minilm", SMALL)
    return installation


def run(installation: Installation, script: str) -> Result:
    """Runs the script as root, with everything installed."""
    result = installation.systemd.run("", as_root=SHELL + INSTALL + script, unit=UNIT)
    print(result.journal)  # pytest shows it beside a failure
    assert result.code == 0, result.output
    return result


def test_users_of_allow_uids_are_let_in(installation: Installation) -> None:
    """The service runs as its own user; a user of allow_uids attaches, any other is refused and told why."""
    python = installation.systemd.python
    run(
        installation,
        f"""
        systemctl start weightcached@one.service
        save uid stat -c %U "/proc/$(show MainPID)"
        save listed as $USER {python} /share/client.py
        save stranger as stranger {python} /share/client.py
        save status as weightcached weightcachectl status --json
        save evict as $USER weightcachectl evict minilm
        save directory stat -c '%U %a' /run/weightcached
        """,
    )
    assert installation.text("uid") == "weightcached"
    assert (installation.code("listed"), installation.text("listed")) == (0, digest(installation))
    assert installation.code("stranger") != 0
    assert "PeerRefused" in installation.text("stranger")
    assert installation.models("status") == {"minilm": "cached"}
    assert installation.code("evict") != 0, "a user of allow_uids may attach, not evict"
    assert installation.text("directory") == "weightcached 755"


def test_the_cache_outlives_crash_and_restart(installation: Installation) -> None:
    """With the checkpoint gone, a killed and a restarted service serve the same bytes; another instance's stop takes
    nothing of it along."""
    python = installation.systemd.python
    run(
        installation,
        f"""
        sed 's/host-0/host-90/' /etc/weightcached/one.toml > /etc/weightcached/two.toml
        systemctl start weightcached@one.service weightcached@two.service
        mv /home/$USER/models /home/$USER/gone
        systemctl kill --signal=SIGKILL --kill-whom=main weightcached@one.service
        again() {{ [ "$(show NRestarts)" = 1 ] && [ "$(show ActiveState)" = active ]; }}
        wait_for 15 again
        save killed as $USER {python} /share/client.py
        systemctl restart weightcached@one.service
        systemctl stop weightcached@two.service
        save restarted as $USER {python} /share/client.py
        save files ls /run/weightcached
        """,
    )
    for name in ("killed", "restarted"):
        assert (installation.code(name), installation.text(name)) == (0, digest(installation))
    assert installation.text("files").split() == [
        "host-0.lock",
        "host-0.sock",
        "one.control.lock",
        "one.control.sock",
    ]


def test_what_it_can_reach(installation: Installation) -> None:
    """It has no capability, cannot gain any, and may write to its runtime directory alone."""
    run(
        installation,
        """
        systemctl start weightcached@one.service
        pid=$(show MainPID)
        save status grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/$pid/status
        inside() { nsenter --target $pid --mount -- setpriv --reuid=weightcached --clear-groups "$@" 2> /dev/null; }
        install -d -o weightcached /srv/own /home/own
        for folder in /tmp /var/tmp /srv/own /home/own /run/weightcached; do
            as weightcached touch $folder/outside
            ! inside touch $folder/canary || echo $folder
        done > /share/facts/writable
        save network nsenter --target $pid --net cat /proc/net/route
        save doctor as weightcached weightcachectl doctor --json --instance one
        """,
    )
    assert installation.text("status").split() == ["CapBnd:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
    assert installation.text("writable").split() == ["/run/weightcached"]
    assert len(installation.text("network").splitlines()) <= 1, "a route to somewhere"
    report = json.loads(installation.text("doctor"))
    assert (installation.code("doctor"), report["problems"]) == (0, 0), report
    found = {finding["check"]: finding for finding in report["checks"]}
    assert (found["store"]["level"], found["unit"]["level"]) == ("ok", "ok")
    assert "user manager" not in found


def test_a_publisher_runs_in_it(installation: Installation) -> None:
    """Tied to the service by a call that the sandbox lets through; what it says and how it ends is in the status."""
    run(
        installation,
        """
        cat >> /etc/weightcached/one.toml <<END
[[model]]
name = "engine"
checkpoint = "/home/$USER/models/minilm"
preload = false
publisher = ["sh", "-c", "echo here; exit 3"]
END
        systemctl start weightcached@one.service
        save load as weightcached weightcachectl load engine
        save wait as weightcached weightcachectl wait engine --timeout 20
        """,
    )
    assert installation.code("load") == 0, installation.text("load")
    ended = "the publisher of rank 0 on host-0 ended by exit status 3; it said last: here\n"
    assert ended in installation.text("wait") + "\n", installation.text("wait")
