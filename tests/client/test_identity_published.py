"""client/identity.py: finding what an engine has published by the bytes that it was loaded from.

Its files are known by their stat tuples, their digests later.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import hub_cache, wait_for_tick, write_sharded
from tests.client.handmade import DEVICE, HandMade, RunningWorker, make_shard, read_file
from tests.client.on_disk import digests_of, flip_last_bit
from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from weightcached import attach
from weightcached.checkpoint import remembered
from weightcached.checkpoint.digest import json_digest
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.client import identity
from weightcached.client.publish import checkpoint_files
from weightcached.errors import DigestPending, ModelFailed, NoSuchModel, OtherContent, TimedOut
from weightcached.shard.key import STAT_CONTENT

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


def test_a_digest_that_is_given_up_is_no_longer_waited_for(
    worker: RunningWorker, folder: Path, tmp_path: Path, reads: list[int]
) -> None:
    """Who has other files is told why they cannot be compared, at once; the very same files are a hit as before."""
    worker.publish(published_by_engine(folder))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    with pytest.raises(DigestPending):
        attach(checkpoint=copy, **ENGINES)
    assert worker.status()["shards"][0]["digest"] == "pending"
    worker.digested("engine", 1, "small.safetensors: is gone")
    with pytest.raises(ModelFailed):
        attach(checkpoint=copy, on_miss="wait", timeout=300, **ENGINES)
    with pytest.raises(ModelFailed) as caught:
        attach(checkpoint=copy, **ENGINES)
    assert str(caught.value) == (
        f"{copy} is not on host-0: it cannot be compared with what engine was loaded from: its digest is given up: "
        "small.safetensors: is gone; only the very same files find it"
    )
    assert reads == []
    attach(checkpoint=folder, **ENGINES).close()


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
