"""client/waiting.py: a path's arrival is noticed, at once and never too late."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.client.waiting import PathWatch
from weightcached.errors import ConnectionFailed


def test_a_new_file_ends_the_wait(tmp_path: Path) -> None:
    """A file that another thread makes wakes the waiter long before its time is over."""
    path = tmp_path / "there.sock"
    with PathWatch(path) as watch:
        maker = threading.Thread(target=path.touch)
        start = time.monotonic()
        maker.start()
        assert watch.wait(30)
        maker.join()
    assert time.monotonic() - start < 15


def test_what_came_before_the_wait_is_not_lost(tmp_path: Path) -> None:
    """A change between making the watch and waiting ends the wait at once."""
    with PathWatch(tmp_path / "x") as watch:
        (tmp_path / "x").touch()
        assert watch.wait(30)


def test_nothing_happens(tmp_path: Path) -> None:
    """Without a change the wait ends after its time, with False."""
    with PathWatch(tmp_path / "x") as watch:
        start = time.monotonic()
        assert not watch.wait(0.05)
        assert time.monotonic() - start >= 0.05


def test_a_missing_directory_is_watched_from_above(tmp_path: Path) -> None:
    """With missing directories on the way, the nearest that exists is watched: its next level wakes the waiter."""
    with PathWatch(tmp_path / "run" / "weightcached" / "x.sock") as watch:
        (tmp_path / "run").mkdir()
        assert watch.wait(30)


def test_a_file_in_the_way_is_passed_over(tmp_path: Path) -> None:
    """A file where a directory should be does not stop the watch: its own directory is watched."""
    (tmp_path / "run").touch()
    with PathWatch(tmp_path / "run" / "x.sock") as watch:
        (tmp_path / "run").unlink()
        (tmp_path / "run").mkdir()
        assert watch.wait(30)


@pytest.mark.parametrize("change", ["rename", "chmod", "remove directory"])
def test_other_ways_to_appear(tmp_path: Path, change: str) -> None:
    """A file moved in, a mode changed after bind, and the end of the directory itself all wake the waiter."""
    directory = tmp_path / "run"
    directory.mkdir()
    other = directory / "other"
    if change == "chmod":
        other.touch()
    with PathWatch(directory / "x.sock") as watch:
        match change:
            case "rename":
                (tmp_path / "elsewhere").touch()
                os.rename(tmp_path / "elsewhere", directory / "x.sock")
            case "chmod":
                other.chmod(0o600)
            case _:
                directory.rmdir()
        assert watch.wait(30)


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    """Watches close what they open."""
    with NoDescriptorLeaks():
        for _ in range(10):
            with PathWatch(tmp_path / "x"):
                pass


def test_the_kernel_may_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of inotify instances or descriptors: an error that names the path and inotify."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ConnectionFailed, match=r"x\.sock: cannot be waited for: inotify says Too many open files"):
            PathWatch(tmp_path / "x.sock")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
