"""Trace points: free unless asked for, and a stop that only the tracer ends."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcached import trace

SECONDS = 20.0
PROGRAM = "from weightcached.trace import point\npoint('one')\nprint('between', flush=True)\npoint('two')\n"


@pytest.fixture
def listener(runtime_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(os.fspath(runtime_dir / "trace"))
        server.listen()
        server.settimeout(SECONDS)
        yield server


def start(listener: socket.socket) -> subprocess.Popen[str]:
    """A process that passes two points, with the role of a worker."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "worker", "host-0"],
        env={**os.environ, "WEIGHTCACHED_TRACE": listener.getsockname()},
        stdout=subprocess.PIPE,
        text=True,
    )


def stopped(listener: socket.socket) -> tuple[socket.socket, dict[str, object]]:
    connection, _ = listener.accept()
    return connection, json.loads(connection.recv(4096))


def test_a_process_stops_at_each_point_until_it_is_let_go(listener: socket.socket) -> None:
    """It names point, pid and role, and what comes after a point happens after the answer."""
    with start(listener) as process:
        assert process.stdout is not None
        at, hit = stopped(listener)
        assert hit == {"point": "one", "pid": process.pid, "role": "worker host-0"}
        assert not select.select([process.stdout], [], [], 0.1)[0]  # the proof of a stop is that nothing comes
        with at:
            at.send(b"\1")
        assert process.stdout.readline() == "between\n"
        at, hit = stopped(listener)
        at.close()  # a tracer that hangs up lets it go as well
        assert hit["point"] == "two"
        assert process.wait(SECONDS) == 0


def test_a_process_can_be_killed_at_a_point(listener: socket.socket) -> None:
    """Killed while it stops, it has done nothing of what comes after."""
    with start(listener) as process:
        at, _ = stopped(listener)
        with at:
            process.send_signal(signal.SIGKILL)
            assert process.wait(SECONDS) == -signal.SIGKILL
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_without_a_tracer_nothing_stops(listener: socket.socket) -> None:
    """A socket that nobody serves any more is passed over."""
    with start(listener) as process:
        at, _ = stopped(listener)
        Path(listener.getsockname()).unlink()
        at.close()
        assert process.wait(SECONDS) == 0


def test_unset_it_is_one_look_at_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable `point` calls nothing."""
    monkeypatch.setattr(trace, "_listener", None)
    monkeypatch.delattr(trace, "_stop_at")

    trace.point("anything")


def test_the_module_costs_no_import() -> None:
    """json and socket are loaded at the first stop, not with the module."""
    program = "import sys, weightcached; before = set(sys.modules); import weightcached.trace\n"
    program += "print(*set(sys.modules) - before)"

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout.split() == ["weightcached.trace"]
