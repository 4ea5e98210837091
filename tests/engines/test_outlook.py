"""engines/outlook.py: what a worker and its service say of a model; the rest of it is in test_policy*.py."""

from __future__ import annotations

import struct
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import DEVICE, RunningWorker
from tests.conftest import MakeCheckpoint
from tests.engines.tiny import FILE
from tests.running import RunningService
from weightcached.client.duplicates import worker_status
from weightcached.engines import outlook
from weightcached.shard.key import ShardKey


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    make_checkpoint(tmp_path / "tiny" / FILE, {"w": ("F32", (1,), struct.pack("<f", 1.0))})
    return tmp_path / "tiny"


def soon() -> float:
    return time.monotonic() + 10


def test_who_is_configured(runtime_dir: Path, folder: Path) -> None:
    """A model is meant by its name, or by its files: the folder, a link to it, its one file. The built-in loader does
    not bring an engine's layout, and other files are another model."""
    (folder.parent / "link").symlink_to(folder)
    model = f'[[model]]\nname = "tiny"\ncheckpoint = "{folder}"\npreload = false\n'
    service = RunningService(runtime_dir, f'devices = ["host-0"]\n{model}').ready()
    try:
        status = worker_status(DEVICE, soon())
        for path in (folder, folder.parent / "link", folder / FILE):
            found = outlook.configured(status, path, None, "checkpoint", soon())
            assert found is not None and (found.model, found.state, found.coming) == ("tiny", "absent", False)
        assert outlook.configured(status, None, "tiny", "checkpoint", soon()) is not None
        assert outlook.configured(status, folder, "other", "checkpoint", soon()) is None
        assert outlook.configured(status, folder, None, "vllm/1", soon()) is None
        assert outlook.configured(status, folder.parent, None, "checkpoint", soon()) is None
        assert outlook.configured({**status, "device": "host-1"}, folder, None, "checkpoint", soon()) is None
    finally:
        service.stop()


def test_a_service_that_does_not_say(worker: RunningWorker, folder: Path) -> None:
    """A worker whose service cannot be asked is no error: nothing is known of what is configured."""
    assert outlook.configured(worker.status(), folder, None, "checkpoint", soon()) is None


def test_the_most_similar_form(folder: Path) -> None:
    """Of several shards of a checkpoint the one with the fewest differences is named; one without any is none."""

    def shard(model: str, **key: Any) -> dict[str, Any]:
        described = asdict(ShardKey(content="c", **key))
        return {"model": model, "state": "cached", "checkpoint": str(folder), "key": described}

    shards = [shard("far", layout="b", dtype="float16"), shard("near", layout="b", dtype="float32")]
    key = {"layout": "a", "dtype": "float32"}
    assert outlook.in_another_form(shards, key, folder) == ("near", {"layout": ["a", "b"]})
    assert outlook.in_another_form(shards, key, folder.parent) is None
    assert outlook.in_another_form([shard("same", layout="a", dtype="float32")], key, folder) is None
