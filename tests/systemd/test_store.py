"""systemd's descriptor store with the unit as shipped: what brings the weights back, and what lets them go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .test_unit import HOST, SMALL, Installation

if TYPE_CHECKING:
    from .conftest import UserSystemd

pytestmark = pytest.mark.systemd

# The model's generation and the store, as the service sees it and as systemd counts.
LOOK = """
import json, subprocess, sys

def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

unit = f"weightcached@{sys.argv[1]}.service"
stored = int(output("systemctl", "--user", "show", "--value", "--property=NFileDescriptorStore", unit))
(service,) = json.loads(output("weightcachectl", "status", "--json", "--instance", sys.argv[1]))["services"]
print(json.dumps([service["models"][0]["generations"], stored, service["store"]]))
"""


@pytest.fixture
def installation(user_systemd: UserSystemd) -> Iterator[Installation]:
    yield Installation(user_systemd)


def test_what_survives_and_what_does_not(installation: Installation) -> None:
    """SIGKILL of the main process, restart, daemon-reload and daemon-reexec find the weights again without their files;
    a stop frees them and the next start loads anew. A store of size 0 is said in the status; the model is served."""
    installation.config("one", HOST, minilm=SMALL)
    installation.config("none", 'devices = ["host-1"]\n', minilm=SMALL)
    folder = installation.share / "systemd/user/weightcached@none.service.d"
    folder.mkdir()
    (folder / "store.conf").write_text("[Service]\nFileDescriptorStoreMax=0\n")
    (installation.share / "look.py").write_text(LOOK)
    result = installation.run(f"""
    look() {{ save "$2" {installation.systemd.python} /share/look.py "$1"; }}
    again() {{ is one NRestarts 1 && is one ActiveState active; }}
    memfds() {{ find /proc/[0-9]*/fd -user "$(id -u)" -lname '*memfd:weightcached*' 2> /dev/null | wc -l; }}
    cp -r /share/models ~/models
    sed -i "s,/share/models,$HOME/models," ~/.config/weightcached/one.toml
    systemctl --user start weightcached@one.service weightcached@none.service
    look one first
    look none none
    save text weightcachectl status --instance none
    systemctl --user stop weightcached@none.service
    mv ~/models ~/gone
    systemctl --user kill --signal=SIGKILL --kill-whom=main weightcached@one.service
    wait_for 15 again
    look one killed
    systemctl --user restart weightcached@one.service
    look one restarted
    systemctl --user daemon-reload
    systemctl --user restart weightcached@one.service
    look one reloaded
    systemctl --user daemon-reexec
    systemctl --user restart weightcached@one.service
    look one reexecuted
    mv ~/gone ~/models
    memfds > /share/facts/running
    systemctl --user stop weightcached@one.service
    memfds > /share/facts/stopped
    systemctl --user start weightcached@one.service
    look one started
    """)
    kept = {"active": True, "stored": 2, "shards": 1, "pending": 0, "refused": []}
    for name in ("first", "killed", "restarted", "reloaded", "reexecuted", "started"):
        assert json.loads(installation.text(name)) == [[1], 2, kept], name
    # The files were not there meanwhile: the first start and the one after the stop have read them.
    assert result.journal.count("minilm: 1048576 bytes to host-0") == 2
    assert result.journal.count("adopted minilm on host-0, generation 1: 1048576 bytes") == 4
    assert int(installation.text("running")) == 6, "of the service, its worker and systemd: manifest and slab"
    assert installation.text("stopped") == "0"
    generations, stored, none = json.loads(installation.text("none"))
    (refused,) = none.pop("refused")
    assert (generations, stored, none) == ([1], 0, {"active": True, "stored": 0, "shards": 0, "pending": 0})
    assert "FileDescriptorStoreMax=" in refused["reason"]
    assert "not kept by the service manager: minilm on host-1, generation 1" in installation.text("text")
