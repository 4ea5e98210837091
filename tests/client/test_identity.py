"""client/identity.py: finding the cached model that holds the bytes of a checkpoint on disk."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import wait_for_tick
from tests.client.handmade import DEVICE, RunningWorker, make_shard, read_file
from tests.client.on_disk import digests_of, flip_last_bit, shard_of, tensors
from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from tests.running import RunningService
from weightcached import attach
from weightcached.checkpoint import remembered
from weightcached.checkpoint.digest import json_digest
from weightcached.errors import CheckpointError, KeyMismatch, NoSuchModel, OtherContent, TimedOut

NO_CONFIG = json_digest({})  # of a folder without config.json


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
    with pytest.raises(OtherContent, match=r"tuned/model\.safetensors is not what base on host-0 was loaded from"):
        attach(checkpoint=tuned, device=DEVICE)

    worker.publish(shard_of(tuned, "tuned"))

    for path, value in ((folder, 1.0), (tuned, 2.0)):
        with attach(checkpoint=path, device=DEVICE) as weights:
            assert weights["w"].tolist() == [value] * 4


def test_a_file_overwritten_in_place_is_another(worker: RunningWorker, folder: Path) -> None:
    """Other bytes of the same length in the same file, its mtime set back: ctime tells, and the miss names the file."""
    worker.publish(shard_of(folder))
    flip_last_bit(folder / "model.safetensors")

    with pytest.raises(OtherContent) as caught:
        attach(checkpoint=folder, device=DEVICE)
    assert caught.value.file == str(folder / "model.safetensors")


@pytest.fixture(params=["worker", "service"])
def cached(request: pytest.FixtureRequest, runtime_dir: Path, sharded: Path) -> Iterator[Path]:
    """The checkpoint of three files, cached as "base": published by hand, and loaded by a real service."""
    if request.param == "worker":
        request.getfixturevalue("worker").publish(shard_of(sharded))
        yield sharded
        return
    config = f'devices = ["host-0"]\n[[model]]\nname = "base"\ncheckpoint = "{sharded}"\n'
    service = RunningService(runtime_dir, config)
    try:
        service.ready()
        yield sharded
        service.stop()
    finally:
        service.abandon()


def test_one_flipped_bit_is_a_miss_that_names_the_file(cached: Path, tmp_path: Path) -> None:
    """In a copy whose last tensor has one other bit, the file with it is named, with its digest and the cached one."""
    copy = Path(shutil.copytree(cached, tmp_path / "copy"))
    with attach(checkpoint=copy, device=DEVICE) as weights:
        assert list(weights) == ["a", "aa", "b", "bb", "c", "cc"]
    flip_last_bit(copy / "c.safetensors")
    here, recorded = (digests_of(path)[1][2].digest for path in (copy, cached))
    assert here != recorded

    with NoDescriptorLeaks(), pytest.raises(OtherContent) as caught:
        attach(checkpoint=copy, device=DEVICE)

    error = caught.value
    assert (error.file, error.digest, error.recorded) == (str(copy / "c.safetensors"), here, recorded)
    assert (error.cached, error.differing, error.files) == ("base", 1, 3)
    assert (error.model, error.device, error.known) == (str(copy), DEVICE, ["base"])
    with pytest.raises(TimedOut, match=rf"copy/c\.safetensors is not what base on host-0 .* {here}.* {recorded}"):
        attach(checkpoint=copy, device=DEVICE, on_miss="wait", timeout=0.2)


def test_the_nearest_model_is_named(worker: RunningWorker, sharded: Path, tmp_path: Path) -> None:
    """Of several models with files of these sizes, the one with the fewest other files is compared with."""
    for model, names in (("far", "ab"), ("near", "a"), ("further", "abc")):
        other = Path(shutil.copytree(sharded, tmp_path / model))
        for name in names:
            flip_last_bit(other / f"{name}.safetensors")
        worker.publish(shard_of(other, model))

    with pytest.raises(OtherContent, match=r"a\.safetensors is not what near .* \(1 of 3 files differ\)"):
        attach(checkpoint=sharded, device=DEVICE)


@pytest.mark.parametrize("recorded", [None, "sha256:00", "xxh3-128-8m:00"])
def test_what_is_not_recorded_is_not_named(
    worker: RunningWorker, folder: Path, tmp_path: Path, recorded: str | None
) -> None:
    """Where no digest of this definition is recorded for a file, nothing is said of it: `NoSuchModel`."""
    content, files = digests_of(folder)
    files = [replace(file, digest=recorded) for file in files]
    raws = read_file(folder / "model.safetensors")
    worker.publish(make_shard(raws, model="base", files=tuple(files), key={"content": content}))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    flip_last_bit(copy / "model.safetensors")

    with pytest.raises(NoSuchModel, match="copy on host-0; there: base") as caught:
        attach(checkpoint=copy, device=DEVICE)
    assert type(caught.value) is NoSuchModel


def test_a_copy_is_read_once(worker: RunningWorker, sharded: Path, tmp_path: Path, reads: list[int]) -> None:
    """The first attach to a copy digests it; the next ones read nothing of it but headers, a miss neither."""
    worker.publish(shard_of(sharded))
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    wait_for_tick(copy / "c.safetensors")
    nbytes = sum(path.stat().st_size for path in copy.glob("*.safetensors"))
    reads.clear()

    for _ in range(3):
        attach(checkpoint=copy, device=DEVICE).close()
        assert sum(reads) == nbytes
    flip_last_bit(copy / "b.safetensors")
    for _ in range(2):
        with pytest.raises(OtherContent, match=r"b\.safetensors"):
            attach(checkpoint=copy, device=DEVICE)
        assert sum(reads) == nbytes + (copy / "b.safetensors").stat().st_size


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
    with pytest.raises(OtherContent) as caught:
        attach("base", checkpoint=tuned, device=DEVICE)
    assert (caught.value.model, caught.value.cached) == ("base", "base")
    worker.publish(shard_of(tuned, "tuned"))
    with pytest.raises(OtherContent) as caught:  # tuned is there by its times, unread; it is not base nevertheless
        attach("base", checkpoint=tuned, device=DEVICE)
    assert (caught.value.cached, caught.value.digest) == ("base", digests_of(tuned)[1][0].digest)


def test_the_key_decides_between_equals(worker: RunningWorker, folder: Path) -> None:
    """Of models with the same bytes the one with the wanted key is taken; with none, the worker says why."""
    cut = {"tensor_parallel_size": 2, "config": NO_CONFIG}
    worker.publish(shard_of(folder, "rank0", **cut))
    worker.publish(shard_of(folder, "rank1", tensor_parallel_rank=1, **cut))
    worker.publish(shard_of(folder, "engine", layout="vllm/1"))

    with attach(checkpoint=folder, device=DEVICE, tensor_parallel=(1, 2)) as weights:
        assert weights.manifest.model == "rank1"
    with attach(checkpoint=folder, device=DEVICE, key={"layout": "vllm/1"}) as weights:
        assert weights.manifest.model == "engine"
    with pytest.raises(KeyMismatch, match=r"tensor_parallel=\(rank, size\)") as caught:
        attach(checkpoint=folder, device=DEVICE)
    assert caught.value.differences == {"tensor_parallel_size": [1, 2]}


@pytest.mark.parametrize("other", [{"config": "that of another"}, {"rules": "somebody's"}, {"cast": "float16"}])
def test_who_names_files_gets_their_own_cut(worker: RunningWorker, folder: Path, other: dict[str, str]) -> None:
    """The same bytes cut by another config.json or by rules of a config, or cast: a mismatch, unless asked by name."""
    worker.publish(shard_of(folder, "cut", **{"tensor_parallel_size": 2, "config": NO_CONFIG, **other}))

    with pytest.raises(KeyMismatch) as caught:
        attach(checkpoint=folder, device=DEVICE, tensor_parallel=(0, 2))
    assert set(caught.value.differences) == set(other)
    with attach("cut", device=DEVICE, tensor_parallel=(0, 2)) as weights:
        assert weights.manifest.model == "cut"


def test_an_index_chooses_among_the_tensors_of_its_files(
    worker: RunningWorker, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """Both files have the tensor; which one counts is in the index alone, in place and elsewhere."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, chosen in ((one, "m-1.safetensors"), (other, "m-2.safetensors")):
        for number in (1, 2):
            raw = {"w": ("U8", (2,), bytes([number] * 2)), f"x{number}": ("U8", (1,), b"x")}
            make_checkpoint(folder / f"m-{number}.safetensors", raw)
        map_ = {"w": chosen, "x1": "m-1.safetensors", "x2": "m-2.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": map_}))
    content, files = digests_of(one)
    chosen_file = read_file(one / "m-1.safetensors")
    worker.publish(make_shard(chosen_file, model="one", files=tuple(files), key={"content": content}))

    with attach(checkpoint=one, device=DEVICE) as weights:
        assert weights.manifest.model == "one"
    with pytest.raises(NoSuchModel):
        attach(checkpoint=other, device=DEVICE)
    shutil.copy(other / "model.safetensors.index.json", one)
    with pytest.raises(NoSuchModel):
        attach(checkpoint=one, device=DEVICE)


def test_a_stage_is_found_by_its_layers(worker: RunningWorker, folder: Path) -> None:
    """A wanted range of layers, a tuple here and a list on the wire, picks its stage."""
    size: dict[str, Any] = {"pipeline_parallel_size": 2}
    worker.publish(shard_of(folder, "first", layers=(0, 4), config=NO_CONFIG, **size))
    worker.publish(shard_of(folder, "second", layers=(4, 8), pipeline_parallel_rank=1, config=NO_CONFIG, **size))

    with attach(
        checkpoint=folder, device=DEVICE, key={"layers": (4, 8), "pipeline_parallel_rank": 1, **size}
    ) as weights:
        assert weights.manifest.model == "second"


@pytest.mark.usefixtures("no_digest")
def test_a_slice_of_these_files_tells_their_content(worker: RunningWorker, folder: Path, tmp_path: Path) -> None:
    """The whole model was loaded from a copy, a slice from these files: the whole one is found, without reading."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    worker.publish(shard_of(folder, "slice", tensor_parallel_size=2))
    worker.publish(shard_of(copy, "whole"))

    with attach(checkpoint=folder, device=DEVICE) as weights:
        assert weights.manifest.model == "whole"


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
    real = remembered.digest_once

    def slow(checkpoint: Any) -> Any:
        threading.Event().wait(1.2)
        return real(checkpoint)

    monkeypatch.setattr(remembered, "digest_once", slow)
    with attach(checkpoint=tmp_path / "copy", device=DEVICE, timeout=1.0) as weights:
        assert weights["w"].tolist() == [1.0] * 4


def test_a_checkpoint_that_cannot_be_read(worker: RunningWorker, tmp_path: Path) -> None:
    """A path that is no checkpoint is the checkpoint's error, not a missing model."""
    with NoDescriptorLeaks(), pytest.raises(CheckpointError):
        attach(checkpoint=tmp_path / "missing", device=DEVICE)
