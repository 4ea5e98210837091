"""What the descriptor store does not outlive: README's table says so, and that the memory is free then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.systemd.test_unit import HOST, SMALL, Installation

if TYPE_CHECKING:
    from .conftest import UserSystemd

pytestmark = pytest.mark.systemd

MEMFDS = """
memfds() { find /proc/[0-9]*/fd -lname '*memfd:weightcached*' 2> /dev/null | wc -l; }
"""


@pytest.fixture
def installation(user_systemd: UserSystemd) -> Installation:
    installation = Installation(user_systemd)
    installation.config("one", HOST, minilm=SMALL)
    return installation


def test_a_unit_that_fails_for_good(installation: Installation) -> None:
    """A restart with a config that is refused (78) ends in a failed unit, whose store is empty."""
    installation.run(f"""{MEMFDS}
    systemctl --user --quiet enable --now weightcached@one.service
    memfds > /share/facts/before
    echo 'no_such_key = 1' > ~/.config/weightcached/one.toml
    save restart systemctl --user restart weightcached@one.service
    wait_for 15 is one ActiveState failed
    memfds > /share/facts/after
    state one state
    """)
    state = installation.state("state")
    assert (state["ExecMainStatus"], state["NFileDescriptorStore"]) == ("78", "0")
    assert (installation.text("before"), installation.text("after")) == ("6", "0")


def test_the_users_systemd_restarts(installation: Installation) -> None:
    """With the user's manager its descriptors go; the enabled unit comes back with it and loads anew."""
    (installation.share / "begin").write_text("""
    mkdir -p ~/.local ~/.config
    cp -r /share/bin ~/.local/bin
    cp -r /share/config ~/.config/weightcached
    cp -r /share/systemd ~/.config/systemd
    systemctl --user daemon-reload
    systemctl --user --quiet enable --now weightcached@one.service
    """)
    result = installation.systemd.run(
        "",
        as_root=f"""set -eu
        {MEMFDS}
        user() {{
            setpriv --reuid=$USER --regid=$USER --init-groups env --ignore-environment HOME=/home/$USER USER=$USER \\
                PATH=/share/bin:/usr/bin:/bin XDG_RUNTIME_DIR="/run/user/$(id -u $USER)" "$@"
        }}
        user bash -eu /share/begin
        memfds > /share/facts/before
        systemctl stop "user@$(id -u $USER).service"
        memfds > /share/facts/stopped
        systemctl start "user@$(id -u $USER).service"
        user systemctl --user start weightcached@one.service
        user weightcachectl list > /share/facts/again
        """,
    )
    print(result.journal)
    assert result.code == 0, result.output
    assert (installation.text("before"), installation.text("stopped")) == ("6", "0")
    assert "minilm" in installation.text("again")
    assert result.journal.count("minilm: 1048576 bytes to host-0") == 2, "loaded anew"
