"""A real worker under fire, and planted leaks, which are found."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import fuzz_session
from tests.fuzz.fuzz_session import fuzz

MESSAGES = int(os.environ.get("WEIGHTCACHED_FUZZ_MESSAGES") or fuzz_session.MESSAGES)
SEED = int(os.environ.get("WEIGHTCACHED_FUZZ_SEED") or 1)
PATIENCE = 3.0  # seconds in which nothing changes any more, after which a planted leak is not waited for

# Every twentieth set of descriptors leaves one behind; none of its own: a connection, for one, would not end.
DESCRIPTOR_LEAK = """
import os
from weightcached.wire import framing
honest, calls = framing._descriptors, 0
def leaky(ancillary):
    global calls
    fds = honest(ancillary)
    calls += 1
    if fds and calls % 20 == 0:
        os.open(os.devnull, os.O_RDONLY)
    return fds
framing._descriptors = leaky
"""

# What was sent is never forgotten.
MEMORY_LEAK = """
from weightcached.wire import framing
honest, kept = framing.receive, []
def leaky(sock, *, large=False):
    received = honest(sock, large=large)
    if received:
        kept.append(bytearray(received[0] * 20))
    return received
framing.receive = leaky
"""


@pytest.mark.timeout(60 + MESSAGES / 100)
def test_a_worker_under_fire_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """After thousands of messages of every kind, most of them bad, a worker serves, and has kept nothing."""
    met = fuzz(MESSAGES, SEED)
    with capsys.disabled():
        print(f"\nseed {SEED}: {met}")
    assert met["cut_short"] == 2, "a message whose descriptors did not all arrive was not met"
    assert met["descriptors"] > met["sent"] >= MESSAGES
    for reply in ("ok", "event", "protocol-error", "bad-manifest", "key-mismatch", "no-such-model"):
        assert met["replies"].get(reply, 0) > 0, f"{reply} is never met: {met}"


@pytest.mark.parametrize(
    ("spoiled", "finding"), [(DESCRIPTOR_LEAK, " descriptors, "), (MEMORY_LEAK, " bytes more than before")]
)
def test_a_planted_leak_is_found(spoiled: str, finding: str) -> None:
    """A worker that loses descriptors, or forgets nothing, fails the same check."""
    with pytest.raises(AssertionError, match=finding):
        fuzz(2000, SEED, spoiled=spoiled, patience=PATIENCE)
