"""``weightcachectl doctor`` beside a real systemd user manager, and the example drop-ins in force."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.systemd.test_unit import HOST, SMALL, UNITS, Installation

if TYPE_CHECKING:
    from .conftest import UserSystemd

pytestmark = pytest.mark.systemd


@pytest.fixture
def installation(user_systemd: UserSystemd) -> Iterator[Installation]:
    installation = Installation(user_systemd)
    installation.config("one", HOST + 'memory_limit = "64MiB"\n', minilm=SMALL)
    yield installation
    shutil.rmtree(user_systemd.share / "models")


def levels(installation: Installation, name: str) -> dict[str, dict[str, Any]]:
    """Check -> finding, as saved by ``save NAME weightcachectl doctor --json``."""
    report = json.loads(installation.text(name))
    assert installation.code(name) == (1 if report["problems"] else 0)
    return {finding["check"]: finding for finding in report["checks"]}


def test_doctor_sees_what_systemd_keeps(installation: Installation) -> None:
    """Before the start, while the unit serves, and after a store that was too small: each is found as it is."""
    installation.run("""
    save before weightcachectl doctor --json
    systemctl --user start weightcached@one.service
    save running weightcachectl doctor --json
    systemctl --user show --value --property=NFileDescriptorStore weightcached@one.service > /share/facts/kept
    echo >> ~/.config/systemd/user/weightcached@.service
    save changed weightcachectl doctor --json
    mkdir -p ~/.config/systemd/user/weightcached@one.service.d
    printf '[Service]\\nFileDescriptorStoreMax=1\\n' > ~/.config/systemd/user/weightcached@one.service.d/small.conf
    systemctl --user stop weightcached@one.service
    systemctl --user daemon-reload
    systemctl --user start weightcached@one.service
    save small weightcachectl doctor --json
    env --unset=XDG_RUNTIME_DIR --unset=DBUS_SESSION_BUS_ADDRESS weightcachectl doctor --json > /share/facts/su || true
    """)
    before = levels(installation, "before")
    assert before["systemd"]["found"].startswith("version ")
    for check in ("systemd", "user manager", "linger", "config", "unit", "memory", "descriptors"):
        assert before[check]["level"] == "ok", before[check]
    assert (before["service"]["level"], before["service"]["found"]) == ("warning", "does not run")
    running = levels(installation, "running")
    assert (running["service"]["level"], running["store"]["level"]) == ("ok", "ok"), running
    assert running["store"]["found"].startswith(f"{installation.text('kept')} of at most ")
    assert int(installation.text("kept")) == 2, "a manifest and a slab"
    assert levels(installation, "changed")["unit"]["level"] == "warning", "systemd has not read the new file yet"
    small = levels(installation, "small")
    assert (small["store"]["level"], small["descriptors"]["level"]) == ("problem", "problem")
    assert "minilm on host-0" in small["store"]["found"]
    su = {finding["check"]: finding for finding in json.loads(installation.text("su"))["checks"]}
    assert su["user manager"]["level"] == "problem"


def test_sandbox_drop_in(installation: Installation) -> None:
    """With the example sandbox the service serves, in a namespace where it can write to %t and /dev alone."""
    installation.drop_in("sandbox.conf", (UNITS / "weightcached@.service.d/sandbox.conf.example").read_text())
    installation.run("""
    save start systemctl --user start weightcached@one.service
    save status weightcachectl status --json
    pid=$(show one MainPID)
    save map cat /proc/$pid/uid_map
    for folder in /tmp "$HOME" "$XDG_RUNTIME_DIR"; do
        touch "$folder/outside"
        ! nsenter --target $pid --user --mount --preserve-credentials touch "$folder/canary" || echo "$folder"
    done > /share/facts/writable 2> /share/facts/errors
    save restart systemctl --user restart weightcached@one.service
    save again weightcachectl status --json
    """)
    assert (installation.code("start"), installation.text("start")) == (0, "")
    uid, same, count = installation.text("map").split()
    assert (uid, count) == (same, "1"), "the namespace has this user alone"
    assert installation.text("writable").split() == [f"/run/user/{uid}"]
    assert installation.text("errors").count("Read-only file system") == 2
    assert installation.models("status") == installation.models("again") == {"minilm": "cached"}


def test_newer_drop_in_is_harmless_on_the_floor(installation: Installation) -> None:
    """252 ignores each key of the example for 254, says so in the journal, and serves as before."""
    installation.drop_in("newer.conf", (UNITS / "weightcached@.service.d/systemd-254.conf.example").read_text())
    result = installation.run("""
    save start systemctl --user start weightcached@one.service
    save status weightcachectl status --json
    systemctl --version | head -1 > /share/facts/version
    """)
    assert installation.models("status") == {"minilm": "cached"}
    if installation.text("version").startswith("systemd 252"):
        assert "Unknown key 'FileDescriptorStorePreserve' in section [Service], ignoring" in result.journal
