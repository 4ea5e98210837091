"""Finds descriptors that a block of code opened and did not close. `test_leaks` proves that it finds a planted one."""

from __future__ import annotations

import gc
import os
import time
from types import TracebackType

import pytest

_SETTLE_SECONDS = 2.0


def open_descriptors() -> dict[int, str]:
    """Every descriptor of this process and what it refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


class NoDescriptorLeaks:
    """A block after which this process holds the same descriptors as before it; otherwise the test fails with the list.

    An exception inside the block is not masked: descriptors are compared only when the block ended well, so a test of
    an error path catches the error inside the block.
    """

    def __enter__(self) -> NoDescriptorLeaks:
        self.before = open_descriptors()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.check()

    def check(self) -> None:
        """Fails the test now if a descriptor was left open."""
        end = time.monotonic() + _SETTLE_SECONDS
        left = self._new()
        if left:
            gc.collect()  # only then: it is slow where torch is loaded
            left = self._new()
        while left and time.monotonic() < end:  # a worker in this process closes what a client has left in its own time
            time.sleep(0.01)
            left = self._new()
        if left:
            pytest.fail("descriptors left open: " + ", ".join(f"{fd} -> {what}" for fd, what in sorted(left.items())))

    def _new(self) -> dict[int, str]:
        return {fd: what for fd, what in open_descriptors().items() if self.before.get(fd) != what}


@pytest.fixture
def descriptors():  # type: ignore[no-untyped-def]
    """The test must close every descriptor that it opens; ``descriptors.check()`` checks earlier than at its end."""
    checker = NoDescriptorLeaks()
    with checker:
        yield checker
