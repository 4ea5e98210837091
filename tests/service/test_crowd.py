"""A thousand clients of one worker, nine hundred of which only sit there or speak in halves: nobody is delayed by them.

What is compared: the median of a whole attach (connect, hello, attach, receive the descriptors, close) of 100 clients
that attach in a loop, with and without 900 others beside them. The same 100 by the same program in both, right after
one another: they keep the worker busy all the time in both, so the difference is what the others cost. The time of one
lone client is printed too, for who wants to know what an attach takes when nobody else wants one.

``WEIGHTCACHED_CROWD_SECONDS=60`` for the long run.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running import process_of_role
from tests.service.conftest import HOST, StartService, attach, model
from weightcached.paths import socket_path

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("WEIGHTCACHED_CROWD_SECONDS") or 4.0)
ATTACHING, SITTING = 100, 900
TIMES_SLOWER = 2.0
# Bytes of memory that a worker may keep: pools grow until the silent have been cut off all at once, and then no more. A
# connection that is never freed would cost several thousand, times ten thousand in the shortest run.
GROWTH = 6 << 20


def attachers(clients: int, seconds: float) -> dict[str, Any]:
    """What came of clients that attach in a loop for that long."""
    command = [sys.executable, "-m", "tests.service.crowd", "attach", str(socket_path("host-0")), "small"]
    run = subprocess.run(
        [*command, str(clients), str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=seconds + 60
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@contextlib.contextmanager
def sitting(clients: int) -> Iterator[list[dict[str, Any]]]:
    """That many clients that take up a connection, for a block; afterwards the list holds what came of them."""
    command = [sys.executable, "-m", "tests.service.crowd", "idle", str(socket_path("host-0")), str(clients)]
    result: list[dict[str, Any]] = []
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"here\n"
            yield result
        finally:
            process.stdin.close()
            result.append(json.loads(process.stdout.read()))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def at_rest(pid: int, expected: int) -> int:
    """Descriptors of the worker once it has seen the end of every connection, of which nobody else is told."""
    end = time.monotonic() + 10
    while (found := descriptors(pid)) != expected and time.monotonic() < end:
        worker, fds = attach("small")  # takes its turn behind what the worker has still to see
        worker.close()
        fds.close()
    return found


@pytest.mark.timeout(120 + 2 * SECONDS)
def test_nine_hundred_who_sit_there_delay_nobody(
    start_service: StartService, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No attach of a hundred clients fails, their median is at most twice that without the others, and afterwards the
    worker holds the descriptors and the memory that it held."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8 * (ATTACHING + SITTING):
        pytest.skip(f"a process may open {hard} files, {8 * (ATTACHING + SITTING)} are needed")
    service = start_service(HOST + model("small", checkpoint)).ready()
    pid = process_of_role(service, "worker")
    cold = descriptors(pid)

    with sitting(SITTING):  # pools of memory fill
        attachers(ATTACHING, 1.0)
    assert at_rest(pid, cold) == cold
    warm = memory(pid)

    lone = attachers(1, 0.3)
    before = attachers(ATTACHING, SECONDS / 4)
    with sitting(SITTING) as sat:
        crowded = attachers(ATTACHING, SECONDS)
        there = descriptors(pid)
    after = attachers(ATTACHING, SECONDS / 4)

    left = at_rest(pid, cold)
    growth = memory(pid) - warm
    alone = (before["median_ms"] + after["median_ms"]) / 2
    with capsys.disabled():
        print(
            f"\nattach, median: {crowded['median_ms']} ms beside {SITTING}, {before['median_ms']} and "
            f"{after['median_ms']} ms without them (x{crowded['median_ms'] / alone:.2f}), {lone['median_ms']} ms by a "
            f"lone client; {crowded}; {sat[0]}; memory {growth:+d} bytes, descriptors {cold} -> {left}"
        )
    for result in (lone, before, crowded, after):
        assert result["failures"] == []
    assert crowded["attaches"] > ATTACHING
    assert there > SITTING
    assert sat[0]["connected"] >= SITTING * 0.9  # the others were just about to connect again
    assert crowded["median_ms"] <= TIMES_SLOWER * alone
    assert left == cold
    assert growth <= GROWTH
    service.stop()
