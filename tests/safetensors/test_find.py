"""safetensors/find.py: which shard is a file's, and what is said where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.client.handmade import RunningWorker
from tests.client.lending import Listener
from tests.safetensors.conftest import Cache
from weightcached.client import target
from weightcached.errors import TimedOut
from weightcached.safetensors import find, safe_open
from weightcached.safetensors.files import RealFile


def stat(path: Path) -> find.Stat:
    found = find.stat_of(path)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (None, "host-0"), ("cpu", "host-0"), ("cuda", "GPU-b"), ("cuda:0", "GPU-b"), ("cuda:1", "GPU-a"), (0, "GPU-b"),
        (1, "GPU-a"),
    ],
)  # fmt: skip
def test_devices_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch, device: Any, name: str) -> None:
    """Under CUDA_VISIBLE_DEVICES=b,a a number means what it means to torch here, and "cuda" the first one."""
    monkeypatch.setattr(target, "_visible", lambda torch: ["GPU-b", "GPU-a"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # which the library does not ask for

    found = find.target_of(device)

    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("device", ["mps", "xpu:0", "0", True, "cuda:x", "meta", 1.0])
def test_other_devices_are_never_cached(device: Any) -> None:
    """They are the library's matter."""
    assert find.target_of(device) is None


def test_a_gpu_that_is_not_there_is_a_miss(file: Path, caplog: pytest.LogCaptureFixture, runtime_dir: Path) -> None:
    """INFO names it; the library's own error comes when a tensor is asked for."""
    with caplog.at_level(logging.INFO, "weightcached"):
        assert find.find(file, stat(file), "cuda:99") is None

    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "cuda:99" in caplog.text


def test_files_of_one_name_are_told_apart(tmp_path: Path, cache: Cache) -> None:
    """Two checkpoints have a model.safetensors of the same names and shapes; each is answered by its own."""
    paths = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        paths.append(tmp_path / str(number) / "model.safetensors")
        save_file({"a": torch.full((4,), number, dtype=torch.uint8)}, paths[-1])
        cache(paths[-1], name=f"m{number}")

    found = [find.find(path, stat(path), "cpu") for path in paths]

    assert [item.model for item in found if item is not None] == ["m1", "m2"]
    assert [safe_open(path, "pt").get_tensor("a").tolist() for path in paths] == [[0] * 4, [3] * 4]  # 1 ^ 1 and 2 ^ 1


def test_a_whole_shard_is_found_beside_others(file: Path, cache: Cache) -> None:
    """The same file is cached cut for two ranks and as it is: the latter is taken, whichever came first."""
    cache(file, name="half", key={"tensor_parallel_size": 2})
    cache(file, name="whole")
    cache(file, name="quarter", key={"tensor_parallel_size": 4})

    found = find.find(file, stat(file), "cpu")

    assert found is not None
    assert (found.model, found.generation) == ("whole", 1)


def test_a_cut_shard_is_named(file: Path, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which model it is, and what is different."""
    cache(file, name="half", key={"tensor_parallel_size": 2})
    with caplog.at_level(logging.INFO, "weightcached"):
        assert find.find(file, stat(file), "cpu") is None

    assert "half was loaded from it, but not as it is (tensor_parallel_size 2), on host-0" in caplog.text


def test_a_cache_that_does_not_answer_is_left_alone(
    file: Path,
    listen: Callable[[], Listener],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One time-out, one warning; for 60 s nobody connects again, after that the next opening does."""
    listener = listen()
    now = [100.0]
    monkeypatch.setattr(find, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(find, "ANSWER_SECONDS", 0.05)

    for seconds in (0.0, 1.0, 58.0):
        now[0] += seconds
        assert find.find(file, stat(file), "cpu") is None
    listener.accept()
    assert listener.quiet(0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]

    now[0] += 2.0
    assert find.find(file, stat(file), "cpu") is None
    listener.accept()
    assert listener.quiet(0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_attach_that_takes_too_long_is_remembered_too(
    file: Path, cache: Cache, worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a hundred files waits once, not at each of them."""
    cache(file)

    def late(*_: Any, **__: Any) -> Any:
        raise TimedOut(path=str(worker.path), seconds=5.0, waited_for="the reply to attach")

    monkeypatch.setattr("weightcached.safetensors.shared.attach", late)
    opened = safe_open(file, "pt")
    assert type(opened) is safe_open

    assert torch.equal(opened.get_tensor("a"), RealFile(file, "pt").get_tensor("a"))
    assert type(safe_open(file, "pt")) is RealFile


def test_what_cannot_be_looked_at_has_no_stat() -> None:
    """A missing file, and what is no path; the library has its own errors for these."""
    assert find.stat_of("/nope") is None
    assert find.stat_of(None) is None
    assert find.stat_of("a\0b") is None
