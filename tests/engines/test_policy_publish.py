"""engines/policy.py: what becomes of a load from disk: published, or why not, and the engine runs on in any case."""

from __future__ import annotations

import gc
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import RunningWorker
from tests.conftest import MakeCheckpoint
from tests.engines.tiny import FILE, NAME, attached, from_disk, run, said, wanted
from weightcached.client import publish as publishing
from weightcached.engines import policy
from weightcached.engines.policy import Options, find, publish_loaded
from weightcached.errors import ConnectionLost, DeviceFull

VALUES = [1.0, 2.0, 3.0, 4.0]
LAYOUT = "tiny-1/0"
Caplog = pytest.LogCaptureFixture


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: MakeCheckpoint, caplog: Caplog) -> Path:
    caplog.set_level("INFO", "weightcached")
    make_checkpoint(tmp_path / "tiny" / FILE, {"w": ("F32", (4,), struct.pack("<4f", *VALUES))})
    return tmp_path / "tiny"


def load_and_publish(folder: Path, options: Options | None = None) -> tuple[Any, Any]:
    """The engine's way on a miss: its module, and what it runs from if that is shared."""
    files = publishing.checkpoint_files(folder)
    module = from_disk(folder)
    return module, publish_loaded(wanted(folder, LAYOUT), options or Options(), module, files)


def test_a_miss_makes_the_next_start_a_hit(worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
    """The engine runs from the shared copy that it has published, and the next one attaches without a warning."""
    assert find(wanted(folder, LAYOUT), Options()) is None
    assert len(said(caplog)) == 1
    caplog.clear()
    module, shared = load_and_publish(folder)
    assert shared is not None and run(module) == VALUES
    assert worker.leases() == [os.getpid()]
    again = attached(wanted(folder, LAYOUT), Options())
    assert again is not None and run(again) == VALUES
    assert not said(caplog)
    del module, shared, again
    gc.collect()


def test_two_engines_that_miss_at_once(worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
    """The second one finds the same weights there meanwhile: it says so at INFO, and runs from that copy too."""
    first, shared = load_and_publish(folder)
    second, same = load_and_publish(folder)
    assert shared is not None and same is not None and run(second) == run(first) == VALUES
    assert second.w.data_ptr() == same["w"].data_ptr()
    (shard,) = worker.status()["shards"]
    assert (shard["generation"], len(shard["leases"])) == (1, 2)
    assert not said(caplog)
    (line,) = [line for line in said(caplog, 20) if "by another process" in line]
    assert line.startswith(f"{NAME} has been published on host-0 by another process, as generation 1 of {NAME}; ")
    del first, shared, second, same
    gc.collect()


def test_two_engines_that_do_not_agree(worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
    """The same key and other bytes: one warning that names the tensor, and the engine keeps its own copy."""
    first, shared = load_and_publish(folder)
    files, second = publishing.checkpoint_files(folder), from_disk(folder)
    second.w.data[1] = 7.0
    assert publish_loaded(wanted(folder, LAYOUT), Options(), second, files) is None
    assert run(second) == [1.0, 7.0, 3.0, 4.0] and run(first) == VALUES
    (warning,) = said(caplog)
    assert warning == (
        f"tiny 1.0: {NAME} is not published, and this engine keeps the copy of its own: "
        f"{NAME}: generation 1 on host-0 has the same key, but w has other bytes"
    )
    assert [shard["generation"] for shard in worker.status()["shards"]] == [1]
    del first, shared
    gc.collect()


def test_a_service_that_does_not_answer(
    worker: RunningWorker, folder: Path, caplog: Caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that hangs while it takes the weights over holds the engine for the timeout, and no longer than
    PUBLISH_SECONDS: one warning, and the engine runs on."""
    monkeypatch.setattr(worker, "_tell", lambda message: None)  # "held" never comes
    monkeypatch.setattr(policy, "PUBLISH_SECONDS", 0.3)
    monkeypatch.setattr(publishing, "ANSWER_SECONDS", 0.0)
    module, shared = load_and_publish(folder, Options(timeout=600.0))
    assert shared is None and run(module) == VALUES
    (warning,) = said(caplog)
    assert "s for the service to take over tiny-1; this process keeps the weights, as its own memory" in warning
    del module
    gc.collect()


def test_no_service(runtime_dir: Path, folder: Path, caplog: Caplog) -> None:
    """One line at INFO, no warning: the one of the miss has said it all."""
    module, shared = load_and_publish(folder)
    assert shared is None and run(module) == VALUES
    assert not said(caplog)
    (line,) = said(caplog, 20)
    assert line.startswith(f"tiny 1.0: {NAME} is not published: no service answers at ")


def test_switched_off(worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
    """With publish=False nothing is handed over."""
    module, shared = load_and_publish(folder, Options(publish=False))
    assert shared is None and run(module) == VALUES
    assert worker.status()["shards"] == [] and not said(caplog, 20)


def test_files_that_change_during_the_load(worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
    """Weights of which nobody knows what they were read from are not published: one warning, the engine runs on."""
    files = publishing.checkpoint_files(folder)
    module = from_disk(folder)
    os.utime(folder / FILE, ns=(1, 1))
    assert publish_loaded(wanted(folder, LAYOUT), Options(), module, files) is None
    (warning,) = said(caplog)
    assert f"{NAME} is not published, so the next start loads from disk again; this one runs on: " in warning
    assert run(module) == VALUES and worker.status()["shards"] == []


@pytest.mark.parametrize(
    "error",
    [
        DeviceFull(device="host-0", needed=2, free=1, evictable=0, limit=1, others=0, holders=[], advice="evict a"),
        ConnectionLost(path="x", problem="closed by the other side"),
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_trouble_with_the_cache(
    worker: RunningWorker, folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: Caplog
) -> None:
    """No room, a service that goes away, a kernel without memory: one warning with the reason, the engine runs on."""

    def fail(*arguments: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(publishing, "publish", fail)
    module, shared = load_and_publish(folder)
    assert shared is None and run(module) == VALUES
    (warning,) = said(caplog)
    assert warning.endswith(f"this one runs on: {error}")


def test_a_mistake_is_not_hidden(worker: RunningWorker, folder: Path) -> None:
    """A wrong argument of an adapter is a defect to see."""
    files = publishing.checkpoint_files(folder)
    with pytest.raises(TypeError):
        publish_loaded(wanted(folder, LAYOUT), Options(), from_disk(folder), files, no_such_argument=1)
