"""peer: who is at the other end, by the kernel's word."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import PeerRefused
from weightcached.wire import peer
from weightcached.wire.peer import Peer, PeerProcess, peer_of, require_user


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


CONNECTS = (
    "import socket as s, sys; c = s.socket(s.AF_UNIX, s.SOCK_SEQPACKET); c.connect(b'\\0' + sys.argv[1].encode()); "
    "print(flush=True); sys.stdin.read()"
)


@pytest.mark.parametrize("kernel", ["as it is", "before 6.5"])
def test_a_process_is_known_to_have_ended(
    kernel: str, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """It runs, and has ended as soon as it has, reaped or not, whether the kernel gives a socket's pidfd or only one by
    number; a process that had ended before the question is known too. Nothing stays open."""
    if kernel == "before 6.5":
        monkeypatch.setattr(peer, "_SO_PEERPIDFD", 9999)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        name = listener.getsockname()[1:].decode()
        with subprocess.Popen(
            [sys.executable, "-c", CONNECTS, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            accepted, _ = listener.accept()
            process = PeerProcess(accepted, child.pid)
            assert not process.ended
            pidfd = os.pidfd_open(child.pid)
            child.stdin.close()
            assert select.select([pidfd], [], [], 10)[0]
            os.close(pidfd)
            assert process.ended  # a zombie by now
        with accepted:
            assert process.ended
            late = PeerProcess(accepted, child.pid)
            assert late.ended
        for item in (process, late):
            item.close()
            item.close()
            assert item.ended


def test_what_is_not_known_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor to be had the process counts as running, and nothing is raised."""

    def full(sock: socket.socket, pid: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(peer, "_pidfd_of", full)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = PeerProcess(ours, os.getpid())
        assert not process.ended
        process.close()


def test_another_user_is_refused() -> None:
    """Only the users that are named are believed, root is none of them; the error names all."""
    for uid in (1000, 1002):
        require_user(Peer(1, uid, "x"), {1002, 1000})
    for uid in (0, 1001):
        with pytest.raises(PeerRefused) as caught:
            require_user(Peer(1, uid, "x"), {1002, 1000})
        assert (caught.value.uid, caught.value.allowed) == (uid, [1000, 1002])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_the_largest_uid_is_read_as_it_is(runtime_dir: Path) -> None:
    """A uid has 32 bits without a sign: 4294967294 is not -2."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        name = listener.getsockname()[1:].decode()
        code = (
            "import os, socket as s, sys; os.setresuid(2**32 - 2, 2**32 - 2, 2**32 - 2); "
            "s.socket(s.AF_UNIX, s.SOCK_SEQPACKET).connect(b'\\0' + sys.argv[1].encode())"
        )
        assert subprocess.run([sys.executable, "-c", code, name]).returncode == 0
        accepted, _ = listener.accept()
        with accepted:
            assert peer_of(accepted).uid == 2**32 - 2
