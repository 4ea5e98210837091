"""peer: who is at the other end, by the kernel's word."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weightcached.errors import PeerRefused
from weightcached.wire import peer
from weightcached.wire.peer import Peer, peer_of, require_same_user


def test_both_ends_see_each_other(runtime_dir: Path) -> None:
    """On an accepted and on a connecting socket the peer is this process: its pid, its uid, its command."""
    path = runtime_dir / "x.sock"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        listener.bind(os.fspath(path))
        listener.listen()
        client.connect(os.fspath(path))
        accepted, _ = listener.accept()
        with accepted:
            command = Path("/proc/self/comm").read_text().strip()
            me = Peer(os.getpid(), os.geteuid(), command)
            assert peer_of(accepted) == me
            assert peer_of(client) == me


def test_a_peer_that_is_gone_keeps_its_credentials() -> None:
    """The kernel remembers pid and uid of a process that connected and ended; its command is not known any more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # an abstract address of the kernel's choice (unix(7), autobind)
        listener.listen()
        code = "import socket as s, sys; s.socket(s.AF_UNIX, s.SOCK_SEQPACKET).connect(b'\\0' + sys.argv[1].encode())"
        name = listener.getsockname()[1:].decode()
        child = subprocess.Popen([sys.executable, "-c", code, name])
        assert child.wait() == 0
        accepted, _ = listener.accept()
        with accepted:
            assert peer_of(accepted) == Peer(child.pid, os.geteuid(), "?")


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the effective user of this process is let in, not even root; the error names both uids."""
    monkeypatch.setattr(peer.os, "geteuid", lambda: 1000)
    require_same_user(Peer(1, 1000, "x"))
    for uid in (0, 1001):
        with pytest.raises(PeerRefused) as caught:
            require_same_user(Peer(1, uid, "x"))
        assert (caught.value.uid, caught.value.allowed) == (uid, [1000])
