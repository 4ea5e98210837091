"""client/identity.py: finding the cached model that holds the bytes of a checkpoint on disk."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import hub_cache, wait_for_tick, write_sharded
from tests.client.handmade import DEVICE, HandMade, RunningWorker, make_shard, read_file
from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from tests.running import RunningService
from weightcached import attach
from weightcached.checkpoint import remembered
from weightcached.checkpoint.digest import digest_checkpoint, json_digest
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.client import identity
from weightcached.client.publish import checkpoint_files
from weightcached.errors import CheckpointError, DigestPending, KeyMismatch, NoSuchModel, OtherContent, TimedOut
from weightcached.shard.key import STAT_CONTENT
from weightcached.shard.manifest import SourceFile

NO_CONFIG = json_digest({})  # of a folder without config.json


def tensors(value: float) -> dict[str, Any]:
    """A checkpoint's only tensor; checkpoints of different values have equal headers and sizes."""
    return {"w": ("F32", (4,), struct.pack("<4f", value, value, value, value))}


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint folder with one file."""
    return make_checkpoint(tmp_path / "base" / "model.safetensors", tensors(1.0)).parent


def shard_of(folder: Path, model: str = "base", **key: Any) -> HandMade:
    """The shard that a loader makes of the folder."""
    content, files = digests_of(folder)
    raws = [raw for file in files for raw in read_file(folder / file.name)]
    return make_shard(raws, model=model, files=tuple(files), key={"content": content, **key})


def digests_of(folder: Path) -> tuple[str, list[SourceFile]]:
    """The content of a checkpoint and its files with their digests, as a loader records them."""
    with open_checkpoint(folder) as checkpoint:
        content, digests = digest_checkpoint(checkpoint)
        files = zip(checkpoint.files, digests, strict=True)
        return content, [replace(file.source, digest=digest) for file, digest in files]


def flip_last_bit(path: Path) -> None:
    """Changes the lowest bit of the file's last byte in place; length, inode and mtime stay."""
    wait_for_tick(path)
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of three files."""
    return write_sharded(tmp_path / "sharded", {f"{name}.safetensors": [name, name * 2] for name in "abc"})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each preadv from now on, with every file old enough to be remembered; only digests read with it."""
    monkeypatch.setattr(remembered, "SETTLED_NS", 0)
    counted: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counted.append(preadv(*args)) or counted[-1])
    return counted


@pytest.fixture
def no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digesting a checkpoint fails the test."""

    def refuse(checkpoint: Any) -> Any:
        raise AssertionError("the checkpoint was read")

    monkeypatch.setattr(remembered, "digest_once", refuse)


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


# What an engine has published: its files are known by their stat tuples, their digests later.

TAG = "test-1/0"
ENGINES: dict[str, Any] = {"key": {"layout": TAG}, "device": DEVICE}


def published_by_engine(folder: Path, model: str = "engine", **key: Any) -> HandMade:
    """The shard that an engine publishes of the folder, with what `checkpoint_files` says of it."""
    files = checkpoint_files(folder)
    raws = [raw for file in files for raw in read_file(folder / file.name)]
    content = STAT_CONTENT + json_digest([file.stat for file in files])
    attributes = {"checkpoint": str(folder)}
    key = {"content": content, "layout": TAG, **key}
    return make_shard(raws, model=model, files=files, key=key, attributes=attributes)


def digest_in_the_background(folder: Path) -> None:
    """What the service's digest process does once the engine has published."""
    with open_checkpoint(folder) as checkpoint:
        remembered.remember(digests_of(folder)[1])
        assert None not in remembered.recall([file.source for file in checkpoint.files])


@pytest.mark.usefixtures("no_digest")
def test_the_files_that_an_engine_loaded_are_found_unread(worker: RunningWorker, sharded: Path) -> None:
    """Equal stat tuples are a hit from the first moment, for who asks for the engine's layout; to others it is not
    there."""
    worker.publish(published_by_engine(sharded))

    with attach(checkpoint=sharded, **ENGINES) as weights:
        assert weights.manifest.model == "engine"
        assert weights.key.content.startswith(STAT_CONTENT)
    for layout in ({}, {"key": {"layout": "test-1/1"}}):
        with pytest.raises(NoSuchModel) as caught:
            attach(checkpoint=sharded, device=DEVICE, **layout)
        assert type(caught.value) is NoSuchModel


def test_a_copy_of_what_an_engine_loaded_waits_for_its_digest(
    worker: RunningWorker, sharded: Path, tmp_path: Path, reads: list[int]
) -> None:
    """Before the digest is known: `DigestPending` with the model's name, and nothing is read. After it: a hit, for one
    reading of the copy."""
    worker.publish(published_by_engine(sharded))
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    wait_for_tick(copy / "c.safetensors")
    nbytes = sum(path.stat().st_size for path in copy.glob("*.safetensors"))

    with NoDescriptorLeaks(), pytest.raises(DigestPending) as caught:
        attach(checkpoint=copy, **ENGINES)
    assert (caught.value.cached, reads) == (["engine"], [])
    with pytest.raises(TimedOut, match="what engine was loaded from is being digested"):
        attach(checkpoint=copy, on_miss="wait", timeout=0.2, **ENGINES)
    digest_in_the_background(sharded)
    reads.clear()
    for _ in range(2):
        attach(checkpoint=copy, **ENGINES).close()
        assert sum(reads) == nbytes


def test_who_waits_for_a_digest_is_woken(worker: RunningWorker, folder: Path, tmp_path: Path) -> None:
    """The worker announces that it is known, when its service says so; nobody looks in between."""
    worker.publish(published_by_engine(folder))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    asked = threading.Event()
    looks: list[float] = []
    find = identity._OnDisk.find

    def look(self: Any, *args: Any) -> Any:
        looks.append(time.monotonic())
        found = find(self, *args)
        asked.set()
        return found

    def service() -> None:
        assert asked.wait(20)
        time.sleep(0.7)  # in which it must not look again
        remembered.remember(digests_of(folder)[1])
        worker.digested("engine", 7)  # another generation: says nothing
        worker.digested("engine", 1)

    teller = threading.Thread(target=service)
    teller.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity._OnDisk, "find", look)
        attach(checkpoint=copy, on_miss="wait", timeout=30, **ENGINES).close()
    teller.join()
    assert len(looks) == 2


def test_a_fine_tune_of_what_an_engine_loaded_is_a_miss(worker: RunningWorker, sharded: Path, tmp_path: Path) -> None:
    """Other bytes of equal sizes: pending until the digest is known, then a miss that names the file and both digests.
    Where the sizes differ it is a miss at once."""
    worker.publish(published_by_engine(sharded))
    tuned = Path(shutil.copytree(sharded, tmp_path / "tuned"))
    flip_last_bit(tuned / "b.safetensors")
    with pytest.raises(DigestPending):
        attach(checkpoint=tuned, **ENGINES)

    digest_in_the_background(sharded)

    with pytest.raises(OtherContent) as caught:
        attach(checkpoint=tuned, **ENGINES)
    error = caught.value
    assert (error.cached, error.file, error.differing) == ("engine", str(tuned / "b.safetensors"), 1)
    assert (error.digest, error.recorded) == (digests_of(tuned)[1][1].digest, digests_of(sharded)[1][1].digest)
    smaller = write_sharded(tmp_path / "smaller", {"a.safetensors": ["a"]})
    with pytest.raises(NoSuchModel) as missed:
        attach(checkpoint=smaller, **ENGINES)
    assert type(missed.value) is NoSuchModel


def test_a_file_that_changed_since_an_engine_loaded_it_is_another(worker: RunningWorker, folder: Path) -> None:
    """Overwritten in place after the digest is known, its mtime set back: other bytes, and a miss."""
    worker.publish(published_by_engine(folder))
    digest_in_the_background(folder)
    flip_last_bit(folder / "model.safetensors")

    with pytest.raises(OtherContent):
        attach(checkpoint=folder, **ENGINES)


@pytest.mark.usefixtures("no_digest")
def test_an_engine_does_not_say_how_an_index_chose(
    worker: RunningWorker, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """The very same files, of which the index leaves a tensor out: not taken for what the engine loaded."""
    for number in (1, 2):
        raw = {"w": ("U8", (2,), bytes([number] * 2)), f"x{number}": ("U8", (1,), b"x")}
        make_checkpoint(tmp_path / "one" / f"m-{number}.safetensors", raw)
    map_ = {"w": "m-1.safetensors", "x1": "m-1.safetensors", "x2": "m-2.safetensors"}
    index = tmp_path / "one" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": map_}))
    files = checkpoint_files(tmp_path / "one")
    chosen = read_file(tmp_path / "one" / "m-1.safetensors")
    worker.publish(make_shard(chosen, model="one", files=files, key={"content": "stat:0", "layout": TAG}))

    with pytest.raises(NoSuchModel) as caught:
        attach(checkpoint=tmp_path / "one", **ENGINES)
    assert type(caught.value) is NoSuchModel


# Hugging Face caches, whose blobs have the sha256 of their content as names.


@pytest.mark.usefixtures("no_digest")
def test_equal_blobs_of_two_caches_are_the_same_unread(worker: RunningWorker, sharded: Path, tmp_path: Path) -> None:
    """All blob names equal: a hit at once, with no digest known. One that differs: a miss at once, which names it."""
    first, second = (hub_cache(tmp_path / name, sharded) for name in ("first", "second"))
    other = hub_cache(tmp_path / "other", sharded, change="b.safetensors")
    worker.publish(published_by_engine(first))

    with attach(checkpoint=second, **ENGINES) as weights:
        assert all(str(file.digest).startswith("sha256:") for file in weights.manifest.files)
    with pytest.raises(OtherContent, match=r"snapshots/abc/b\.safetensors .* digest is sha256:") as caught:
        attach(checkpoint=other, **ENGINES)
    assert caught.value.differing == 1
    with pytest.raises(DigestPending):  # a plain folder has no such names
        attach(checkpoint=sharded, **ENGINES)


def test_what_was_read_counts_more_than_a_blobs_name(worker: RunningWorker, folder: Path, tmp_path: Path) -> None:
    """A blob that was overwritten in place keeps its name: once both are digested, the bytes decide."""
    first, second = (hub_cache(tmp_path / name, folder) for name in ("first", "second"))
    flip_last_bit((second / "model.safetensors").resolve())
    worker.publish(published_by_engine(first))
    attach(checkpoint=second, **ENGINES).close()

    for path in (first, second):
        digest_in_the_background(path)

    with pytest.raises(OtherContent, match="digest is xxh3"):
        attach(checkpoint=second, **ENGINES)
