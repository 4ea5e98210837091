"""Where the nodes meet: addresses and the port of node 0."""

from __future__ import annotations

import socket

import pytest

from tests.service.nodes import free_port
from weightcached.errors import ConnectionFailed
from weightcached.meeting import Job, listen, refused


def test_addresses_are_written_as_usual() -> None:
    """With brackets where the port would be taken for a part of the address."""
    made = Job("::1", 7, 0, 2, "r", 1.0, "")
    assert made.address == "[::1]:7"
    assert Job("10.0.0.1", 7, 0, 2, "r", 1.0, "").address == "10.0.0.1:7"


def test_a_port_can_be_had_again_at_once() -> None:
    """After connections that this side has closed first, which keeps others off it for a minute."""
    port = free_port()
    for _ in range(3):
        with listen("127.0.0.1", port) as server, socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()


@pytest.mark.parametrize(
    ("host", "problem"),
    [("192.0.2.1", "is no address of this node; master_addr is that of node 0"), ("::2", "is no address of this node")],
)
def test_an_address_that_is_not_here(host: str, problem: str) -> None:
    """It is said which node master_addr is of."""
    with pytest.raises(ConnectionFailed, match=problem):
        listen(host, free_port())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (13, "may not be listened on by this user; take a master_port of 1024 or more"),
        (97, "needs internet sockets, which the unit forbids; see network.conf.example"),
        (12, "cannot be listened on: Cannot allocate memory"),
    ],
)
def test_what_the_kernel_refuses_is_said_with_what_to_do(number: int, words: str) -> None:
    """For TCP and UDP alike, with the address."""
    error = refused("10.0.0.1", 80, OSError(number, "Cannot allocate memory"))
    assert str(error).startswith(f"10.0.0.1:80: {words}")
