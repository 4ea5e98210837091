"""Descriptor ownership: closed exactly once, by whoever owns it."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.fds import FdSet, OwnedFd, raise_descriptor_limit


@pytest.fixture(autouse=True)
def _no_leaks(descriptors: NoDescriptorLeaks) -> NoDescriptorLeaks:
    return descriptors


def new_fd() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


@pytest.fixture
def pair() -> Iterator[tuple[int, int]]:
    fds = (new_fd(), new_fd())
    yield fds
    for fd in fds:
        if is_open(fd):
            os.close(fd)


def test_close_is_idempotent_and_final() -> None:
    """Closing twice closes once; the number is not handed out any more."""
    owned = OwnedFd(new_fd())
    fd = owned.fileno()

    owned.close()
    owned.close()

    assert owned.closed
    assert not is_open(fd)
    with pytest.raises(ValueError, match="closed or was handed on"):
        owned.fileno()


def test_a_second_close_does_not_close_a_stranger() -> None:
    """A number that the kernel gave to somebody else since is left alone."""
    owned = OwnedFd(new_fd())
    fd = owned.fileno()
    owned.close()
    stranger = new_fd()
    assert stranger == fd, "the kernel gives out the lowest free number"

    owned.close()

    assert is_open(stranger)
    os.close(stranger)


def test_stealing_hands_the_number_on() -> None:
    """After `steal` the caller owns the number; the object is closed and does nothing to it."""
    owned = OwnedFd(new_fd())

    fd = owned.steal()
    owned.close()

    assert owned.closed
    assert is_open(fd)
    os.close(fd)
    with pytest.raises(ValueError, match="handed on"):
        owned.steal()


def test_a_duplicate_is_independent_and_not_inherited() -> None:
    """`dup` gives a second owner of the same file, close-on-exec."""
    with OwnedFd(new_fd()) as owned, owned.dup() as second:
        assert os.fstat(owned.fileno()) == os.fstat(second.fileno())
        assert fcntl.fcntl(second.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        owned.close()
        assert is_open(second.fileno())


def test_the_context_closes_on_an_exception() -> None:
    """Leaving the block by an error closes the descriptor and lets the error through."""
    fd = new_fd()

    with pytest.raises(KeyError), OwnedFd(fd):
        raise KeyError

    assert not is_open(fd)


def test_a_dropped_owner_warns_and_closes() -> None:
    """A descriptor that nobody closed is closed when its owner is collected, with a ResourceWarning that names it."""
    fd = new_fd()
    owned = OwnedFd(fd)

    with pytest.warns(ResourceWarning, match=f"descriptor {fd} was never closed"):
        del owned
        gc.collect()

    assert not is_open(fd)


def test_a_dropped_owner_closes_even_where_warnings_are_errors() -> None:
    """With -W error the warning becomes an exception that Python prints; the descriptor is closed all the same."""
    program = (
        "import os; from weightcached.fds import OwnedFd\n"
        "fd = os.open(os.devnull, os.O_RDONLY); owned = OwnedFd(fd); del owned\n"
        "try: os.fstat(fd)\n"
        "except OSError: print('closed')\n"
    )

    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)

    assert run.stdout == "closed\n"
    assert "ResourceWarning: descriptor" in run.stderr


def test_a_negative_number_is_refused() -> None:
    """-1 is no descriptor, and the refused object warns about nothing."""
    with pytest.raises(ValueError, match="not a descriptor: -1"):
        OwnedFd(-1)
    gc.collect()


def test_repr_says_whether_it_is_open() -> None:
    """A log line shows the number, or that there is none any more."""
    owned = OwnedFd(new_fd())
    assert repr(owned) == f"OwnedFd({owned.fileno()})"
    owned.close()
    assert repr(owned) == "OwnedFd(closed)"


def test_a_set_closes_all_on_an_exception(pair: tuple[int, int]) -> None:
    """An error while a message is parsed closes every descriptor that came with it."""
    with pytest.raises(KeyError), FdSet(pair):
        raise KeyError

    assert not any(map(is_open, pair))


def test_a_set_lends_in_order_and_still_owns(pair: tuple[int, int]) -> None:
    """Iterating lends the descriptors; they stay the set's."""
    with FdSet(pair) as received:
        assert len(received) == 2
        assert tuple(owned.fileno() for owned in received) == pair
        assert all(map(is_open, pair))

    assert not any(map(is_open, pair))


def test_stealing_all_empties_the_set(pair: tuple[int, int]) -> None:
    """After `steal_all` the caller closes; the set has nothing left to close."""
    with FdSet(pair) as received:
        stolen = received.steal_all()

    assert len(received) == 0
    assert all(map(is_open, pair))
    for owned in stolen:
        owned.close()


def test_sets_do_not_share_descriptors() -> None:
    """Two empty sets are two sets."""
    first, second = FdSet(), FdSet()

    assert len(first) == len(second) == 0
    assert first.steal_all() is not second.steal_all()


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """A process that starts with systemd's soft limit gets its hard one."""
    program = (
        "import resource; from weightcached.fds import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout == "512 (512, 512)\n"


def test_raising_the_limit_twice_changes_nothing() -> None:
    """With the soft limit at the hard one already, the call returns it again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert raise_descriptor_limit() == raise_descriptor_limit() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
