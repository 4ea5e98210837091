"""client/identity.py: finding the cached model that holds the bytes of a checkpoint on disk."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import DEVICE, HandMade, RunningWorker, make_shard, read_file
from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from weightcached import attach
from weightcached.checkpoint import digest
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointError, KeyMismatch, NoSuchModel, TimedOut


def tensors(value: float) -> dict[str, Any]:
    """A checkpoint's only tensor; checkpoints of different values have equal headers and sizes."""
    return {"w": ("F32", (4,), struct.pack("<4f", value, value, value, value))}


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint folder with one file."""
    return make_checkpoint(tmp_path / "base" / "model.safetensors", tensors(1.0)).parent


def shard_of(folder: Path, model: str = "base", **key: Any) -> HandMade:
    """The shard that a loader makes of the folder."""
    with open_checkpoint(folder) as checkpoint:
        content, _ = digest_checkpoint(checkpoint)
        files = tuple(file.source for file in checkpoint.files)
    raws = read_file(folder / "model.safetensors")
    return make_shard(raws, model=model, files=files, key={"content": content, **key})


@pytest.fixture
def no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digesting a checkpoint fails the test."""

    def refuse(checkpoint: Any) -> Any:
        raise AssertionError("the checkpoint was read")

    monkeypatch.setattr(digest, "digest_checkpoint", refuse)


@pytest.mark.usefixtures("no_digest")
@pytest.mark.parametrize("given", ["folder", "file", "text", "symlink"])
def test_the_same_files_are_found_without_reading_them(worker: RunningWorker, folder: Path, given: str) -> None:
    """A folder, its file or a symlink to it: equal device, inode, size and times are enough, nothing is digested."""
    worker.publish(shard_of(folder))
    link = folder.parent / "link"
    link.symlink_to(folder)
    path = {"folder": folder, "file": folder / "model.safetensors", "text": str(folder), "symlink": link}[given]

    with attach(checkpoint=path, device=DEVICE) as weights:
        assert weights.manifest.model == "base"
        assert weights["w"].tolist() == [1.0] * 4


def test_the_same_bytes_elsewhere_are_found(worker: RunningWorker, folder: Path, tmp_path: Path) -> None:
    """A copy at another path, with another inode and other times, is the same by its content."""
    worker.publish(shard_of(folder))
    shutil.copytree(folder, tmp_path / "copy")

    with attach(checkpoint=tmp_path / "copy", device=DEVICE) as weights:
        assert weights["w"].tolist() == [1.0] * 4


def test_a_fine_tune_never_gets_its_base_models_weights(
    worker: RunningWorker, folder: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """Two checkpoints with equal headers and sizes: each gets its own weights, and one that is not cached gets none."""
    tuned = make_checkpoint(tmp_path / "tuned" / "model.safetensors", tensors(2.0)).parent
    worker.publish(shard_of(folder))
    with pytest.raises(NoSuchModel, match="tuned on host-0; there: base"):
        attach(checkpoint=tuned, device=DEVICE)

    worker.publish(shard_of(tuned, "tuned"))

    for path, value in ((folder, 1.0), (tuned, 2.0)):
        with attach(checkpoint=path, device=DEVICE) as weights:
            assert weights["w"].tolist() == [value] * 4


def test_a_file_rewritten_since_the_load_is_another(
    worker: RunningWorker, folder: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """Other bytes of the same length in the same file are not what is cached."""
    worker.publish(shard_of(folder))
    make_checkpoint(folder / "model.safetensors", tensors(3.0))
    os.utime(folder / "model.safetensors", ns=(1, 1))

    with pytest.raises(NoSuchModel):
        attach(checkpoint=folder, device=DEVICE)


def test_files_of_another_size_are_not_read(
    worker: RunningWorker, folder: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint, no_digest: None
) -> None:
    """Where no cached model has files of these sizes, the answer needs no digest."""
    worker.publish(shard_of(folder))
    other = make_checkpoint(tmp_path / "other" / "model.safetensors", {"w": ("F32", (5,), bytes(20))}).parent

    with pytest.raises(NoSuchModel):
        attach(checkpoint=other, device=DEVICE)


def test_a_name_and_a_checkpoint_must_both_fit(
    worker: RunningWorker, folder: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """With both given, the model of that name is taken only if it holds the checkpoint's bytes."""
    tuned = make_checkpoint(tmp_path / "tuned" / "model.safetensors", tensors(2.0)).parent
    worker.publish(shard_of(folder))
    worker.publish(shard_of(folder, "again"))

    with attach("again", checkpoint=folder, device=DEVICE) as weights:
        assert weights.manifest.model == "again"
    with pytest.raises(NoSuchModel, match="no model base on host-0"):
        attach("base", checkpoint=tuned, device=DEVICE)


def test_the_key_decides_between_equals(worker: RunningWorker, folder: Path) -> None:
    """Of models with the same bytes the one with the wanted key is taken; with none, the worker says why."""
    worker.publish(shard_of(folder, "rank0", tensor_parallel_size=2))
    worker.publish(shard_of(folder, "rank1", tensor_parallel_size=2, tensor_parallel_rank=1))
    worker.publish(shard_of(folder, "engine", layout="vllm/1"))

    with attach(checkpoint=folder, device=DEVICE, key={"tensor_parallel_rank": 1}) as weights:
        assert weights.manifest.model == "rank1"
    with attach(checkpoint=folder, device=DEVICE, key={"layout": "vllm/1"}) as weights:
        assert weights.manifest.model == "engine"
    with pytest.raises(KeyMismatch) as caught:
        attach(checkpoint=folder, device=DEVICE, key={"tensor_parallel_size": 1})
    assert caught.value.differences == {"tensor_parallel_size": [1, 2]}


def test_a_draining_model_is_not_offered(worker: RunningWorker, folder: Path) -> None:
    """A model that was evicted while someone uses it is not found any more."""
    from weightcached.wire.connection import Connection
    from weightcached.wire.messages import Evict

    worker.publish(shard_of(folder))
    with attach(checkpoint=folder, device=DEVICE):
        with Connection.open(worker.path, device=DEVICE) as connection:
            connection.request(Evict(model="base", force=True))[1].close()
        with pytest.raises(NoSuchModel):
            attach(checkpoint=folder, device=DEVICE)


def test_waiting_for_a_checkpoint(worker: RunningWorker, folder: Path) -> None:
    """With on_miss="wait" the attach returns when a model with these bytes is published."""
    publisher = threading.Timer(0.2, worker.publish, [shard_of(folder)])
    publisher.start()

    with attach(checkpoint=folder, device=DEVICE, on_miss="wait", timeout=30) as weights:
        assert weights["w"].tolist() == [1.0] * 4
    publisher.join()


def test_waiting_for_a_checkpoint_has_an_end(worker: RunningWorker, folder: Path) -> None:
    """A checkpoint that nobody loads is `TimedOut` after the time given, and no descriptor stays."""
    start = time.monotonic()
    with NoDescriptorLeaks(), pytest.raises(TimedOut):
        attach(checkpoint=folder, device=DEVICE, on_miss="wait", timeout=0.3)
    assert 0.2 < time.monotonic() - start < 5


def test_a_digest_does_not_use_up_the_time(
    worker: RunningWorker, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest that takes longer than the timeout still ends in an attach."""
    worker.publish(shard_of(folder))
    shutil.copytree(folder, tmp_path / "copy")
    real = digest.digest_checkpoint

    def slow(checkpoint: Any) -> Any:
        threading.Event().wait(1.2)
        return real(checkpoint)

    monkeypatch.setattr(digest, "digest_checkpoint", slow)
    with attach(checkpoint=tmp_path / "copy", device=DEVICE, timeout=1.0) as weights:
        assert weights["w"].tolist() == [1.0] * 4


def test_a_checkpoint_that_cannot_be_read(worker: RunningWorker, tmp_path: Path) -> None:
    """A path that is no checkpoint is the checkpoint's error, not a missing model."""
    with NoDescriptorLeaks(), pytest.raises(CheckpointError):
        attach(checkpoint=tmp_path / "missing", device=DEVICE)
