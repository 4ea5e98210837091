"""Fixtures of the loader's tests: a driver, and a folder on a real disk."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_cuda import FakeDriver, Gpu
from tests.leaks import NoDescriptorLeaks
from tests.loader.loads import cached_bytes
from weightcached.shard import cuda

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks) -> Iterator[FakeDriver]:
    """A process with two GPUs, whose driver is initialised. The test must leave nothing on them, and no descriptor."""
    driver = use_fake(monkeypatch)
    yield driver
    assert driver.live() == {}


def use_fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver(Gpu(total=8 << 30), Gpu(uuid=bytes(range(16, 32)), total=8 << 30))
    driver.initialised = True
    monkeypatch.setattr(cuda, "driver", lambda: driver)

    return driver


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files can be dropped from the page cache and read with O_DIRECT; skips where there is none."""
    problem = _problem_with(tmp_path)
    if not problem:
        yield tmp_path
        return
    (ROOT / "build").mkdir(exist_ok=True)  # ignored by git
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:
        if problem := _problem_with(Path(name)):
            pytest.skip(problem)
        yield Path(name)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tests that write the same file for each of many examples."""
    return tmp_path_factory.mktemp("scratch")


def _problem_with(folder: Path) -> str | None:
    path = folder / "probe"
    try:
        path.write_bytes(os.urandom(1 << 16))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_bytes(path):
            return f"the file system of {folder} keeps its files in the page cache"
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        return f"the file system of {folder} refuses O_DIRECT: {error.strerror}"
    finally:
        path.unlink()
    return None
