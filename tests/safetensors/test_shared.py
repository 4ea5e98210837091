"""safetensors/shared.py: the shards that a process has mapped, who has them, and when they are not used."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.client.handmade import RunningWorker
from tests.client.lending import wait_for
from tests.running import ROOT, RunningService, import_path
from tests.safetensors.conftest import Cache
from weightcached.paths import socket_path
from weightcached.safetensors import safe_open, shared
from weightcached.safetensors.files import RealFile
from weightcached.safetensors.torch import load_file
from weightcached.shard.dtypes import DTYPES
from weightcached.shard.manifest import TensorEntry
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Status


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def flipped(tensor: torch.Tensor) -> bytes:
    """The bytes as the fixture `cache` changes them."""
    return bytes((raw(tensor) ^ 1).tolist())


def has(tensor: torch.Tensor) -> bytes:
    return bytes(raw(tensor).tolist())


@pytest.fixture
def two_files(tmp_path: Path) -> list[Path]:
    """A hub's cache: a snapshot whose two files are links to blobs by other names, as transformers finds them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "one").mkdir(parents=True)
    links = []
    for number in (1, 2):
        blob = tmp_path / "blobs" / f"abc{number}"
        save_file({f"t{number}": torch.full((4,), number)}, blob)
        links.append(tmp_path / "snapshots" / "one" / f"model-0000{number}-of-00002.safetensors")
        links[-1].symlink_to(f"../../blobs/abc{number}")
    return links


class TestNames:
    """Of a checkpoint of several files, whose shard does not say which tensor is from which."""

    def test_links_of_a_snapshot(self, two_files: list[Path], cache: Cache) -> None:
        """The other file is beside the opened link, not beside what it names."""
        cache(*two_files)

        with safe_open(two_files[0], "pt") as opened:
            assert has(opened.get_tensor("t1")) == flipped(torch.full((4,), 1))

    @pytest.mark.parametrize("recorded", [True, False])
    def test_the_blob_itself(self, two_files: list[Path], cache: Cache, recorded: bool) -> None:
        """Its folder has no such names; the loader has recorded where it looked. If not, the disk is read."""
        cache(*two_files, attributes={"checkpoint": str(two_files[0].parent)} if recorded else {})

        with safe_open(two_files[0].resolve(), "pt") as opened:
            found = has(opened.get_tensor("t1"))

        assert found == (flipped if recorded else has)(torch.full((4,), 1))

    def test_another_snapshot_with_the_same_blob(self, two_files: list[Path], cache: Cache, tmp_path: Path) -> None:
        """A new revision has one file in common with the cached one: that file is answered, the other is read."""
        cache(*two_files, attributes={"checkpoint": str(two_files[0].parent)})
        newer = tmp_path / "snapshots" / "two"
        newer.mkdir()
        (newer / two_files[0].name).symlink_to("../../blobs/abc1")
        save_file({"t2": torch.full((4,), 22)}, newer / two_files[1].name)

        assert has(safe_open(newer / two_files[0].name, "pt").get_tensor("t1")) == flipped(torch.full((4,), 1))
        assert torch.equal(safe_open(newer / two_files[1].name, "pt").get_tensor("t2"), torch.full((4,), 22))

    def test_an_unreadable_other_file(
        self, two_files: list[Path], cache: Cache, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is no safetensors file any more, which its stat tuple would have shown: one warning, and the disk."""
        two_files[1].resolve().write_bytes(b"\xff" * 64)
        cache(two_files[0], files=(two_files[0], two_files[1]))

        assert torch.equal(safe_open(two_files[0], "pt").get_tensor("t1"), torch.full((4,), 1))
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_a_shape_or_dtype_that_differs(self, file: Path, cache: Cache) -> None:
        """What is cached under a name and is not as the header says is not given out."""
        cache(file)
        opened = safe_open(file, "pt")
        opened.get_tensor("a")
        (attachment,) = shared.attachments()

        assert attachment.entry("a", "I64", [6]) is not None
        assert attachment.entry("a", "F64", [6]) is None
        assert attachment.entry("a", "I64", [3, 2]) is None
        assert attachment.entry("zz", "I64", [6]) is None


def test_map_on_the_host_is_copy_on_write_too(file: Path, cache: Cache) -> None:
    """`mode="map"` is the cached memory and takes none; a write stays with who writes, the cache keeps its bytes."""
    cache(file)
    before = flipped(RealFile(file, "pt").get_tensor("a"))
    with safe_open(file, "pt", mode="map") as opened:
        tensor = opened.get_tensor("a")
        assert has(tensor) == before
        (attachment,) = shared.attachments()
        assert tensor.data_ptr() == attachment._weights["a"].data_ptr()
        tensor.fill_(5)

    assert has(load_file(file, mode="map")["a"]) == before
    assert has(load_file(file)["a"]) == before


def test_every_dtype_of_torch(tmp_path: Path, cache: Cache) -> None:
    """F8 of each kind, F4, complex and all others: bytes of the cache, dtype and shape of the library."""
    tensors = {}
    for dtype in DTYPES.values():
        element = getattr(torch, dtype.torch_name or "", None)
        if element is None or dtype.name == "BOOL":  # of any byte: below
            continue
        data = torch.randint(0, 256, (5, 3, element.itemsize), dtype=torch.uint8)
        tensors[dtype.name] = data.view(element).reshape(5, 3)
        if dtype.packed == 1:
            tensors[f"{dtype.name}.scalar"] = data[0, 0].clone().view(element).reshape(())
    tensors["BOOL"] = torch.tensor([True, False])
    path = tmp_path / "all.safetensors"
    save_file(tensors, path)
    cache(path)
    assert {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"} <= set(tensors)

    found, real = load_file(path), RealFile(path, "pt")

    for name in tensors:
        expected = real.get_tensor(name)
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape), name
        assert has(found[name]) == flipped(expected), name


def test_a_device_context_changes_nothing(file: Path, cache: Cache) -> None:
    """Under `with torch.device("meta")`, as models are built, tensors are where the library has them: on the CPU."""
    cache(file)
    with torch.device("meta"):
        ours, theirs = safe_open(file, "pt").get_tensors(), RealFile(file, "pt").get_tensors()

    assert {str(tensor.device) for tensor in (*ours.values(), *theirs.values())} == {"cpu"}
    assert has(ours["a"]) == flipped(theirs["a"])


def test_lost_memory_is_not_read(
    file: Path, cache: Cache, worker: RunningWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """The device loses the shard while the file is open: from then on the disk is read, and the log says why."""
    cache(file)
    opened = safe_open(file, "pt")
    held = opened.get_tensor("a")
    (attachment,) = shared.attachments()
    caplog.set_level("INFO", "weightcached")
    worker.lose("m", 1, "an uncorrectable error (Xid 94)")
    wait_for(caplog, "the weights of m on host-0 are lost")
    assert attachment.lost == "an uncorrectable error (Xid 94)"

    assert torch.equal(opened.get_tensor("a"), RealFile(file, "pt").get_tensor("a"))
    assert type(safe_open(file, "pt")) is RealFile
    assert "the memory of m is lost: an uncorrectable error (Xid 94)" in caplog.text
    assert held.numel() == 6


def test_memory_that_torch_does_not_take_is_asked_for_once(
    file: Path, cache: Cache, worker: RunningWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A view that fails is one warning: this tensor and all later ones are read from disk, and the lease ends."""
    cache(file)
    opened = safe_open(file, "pt")
    asked = []

    def fail(self: shared.Attachment, entry: TensorEntry) -> torch.Tensor:
        asked.append(entry.name)
        raise RuntimeError("torch copied it")

    monkeypatch.setattr(shared.Attachment, "view", fail)
    found: dict[str, torch.Tensor] = {}
    worker.wait_released(lambda: found.update({name: opened.get_tensor(name) for name in ("a", "b.weight")}))

    assert all(torch.equal(tensor, RealFile(file, "pt").get_tensor(name)) for name, tensor in found.items())
    assert asked == ["a"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_model_that_was_replaced_is_a_miss(
    file: Path, cache: Cache, worker: RunningWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Between opening and first tensor another generation came, of the same content and from other files."""
    cache(file)
    opened = safe_open(file, "pt")
    other = file.with_name("other.safetensors")
    other.write_bytes(file.read_bytes())
    caplog.set_level("INFO", "weightcached")
    cache(other, generation=2)

    assert torch.equal(opened.get_tensor("a"), RealFile(file, "pt").get_tensor("a"))
    assert [record.levelname for record in caplog.records if "safetensors" in record.name] == ["INFO"]
    assert "m has been replaced since it was found" in caplog.text


def test_threads_share_one_attachment(file: Path, cache: Cache, worker: RunningWorker) -> None:
    """Many threads ask one opened file for its first tensor: one lease, and one memory for each name."""
    cache(file)
    opened = safe_open(file, "pt")
    barrier = threading.Barrier(8)

    def first(_: int) -> torch.Tensor:
        barrier.wait(20)
        return opened.get_tensor("a")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(first, range(8)))

    assert len({tensor.data_ptr() for tensor in found}) == 1
    assert worker.leases() == [os.getpid()]


FORK = """
import os, sys, threading
from weightcached.safetensors import safe_open, shared

opened = safe_open(sys.argv[1], "pt")
held = opened.get_tensor("a")
entered, go = threading.Event(), threading.Event()

def in_the_middle_of_it():
    with shared.attaching():
        entered.set()
        go.wait()

thread = threading.Thread(target=in_the_middle_of_it)
thread.start()
entered.wait()
pid = os.fork()
if pid == 0:
    assert shared.attachments() == []
    mine = safe_open(sys.argv[1], "pt").get_tensor("a")
    assert mine.tolist() == held.tolist() == opened.get_tensor("a").tolist()
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    sys.exit(0)
go.set()
thread.join()
print(os.getpid(), flush=True)
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.timeout(200)  # imports torch in a new process, on a machine that may be slow
def test_a_forked_child_attaches_by_itself(file: Path, cache: Cache, worker: RunningWorker) -> None:
    """What its parent has mapped stays valid in it, and what it opens has a lease of its own; a lock that another
    thread of the parent held does not stop it."""
    cache(file)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(file)],
        env={**os.environ, "PYTHONPATH": import_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            pids = {int(process.stdout.readline()) for _ in range(2)}
            assert set(worker.leases()) == pids
            assert process.pid in pids
            process.communicate("\n", timeout=100)
            assert process.returncode == 0
        finally:
            process.kill()


@pytest.fixture
def service(runtime_dir: Path, tmp_path: Path, file: Path) -> Iterator[RunningService]:
    """A service that has loaded the file."""
    config = f'devices = ["host-0"]\n[[model]]\nname = "real"\ncheckpoint = "{file}"\n'
    running = RunningService(runtime_dir, config)
    try:
        yield running.ready()
    except BaseException:
        running.abandon()
        raise
    running.stop()


def test_a_hit_through_a_live_service(file: Path, service: RunningService) -> None:
    """What the real loader has cached is this file's: bytes, shapes and dtypes, also after the file was overwritten.

    It is overwritten in place after it was opened: what comes from the cache is the file as it was then. Opened again
    it is another file.
    """
    expected = {name: tensor.clone() for name, tensor in RealFile(file, "pt").get_tensors().items()}
    data = bytearray(file.read_bytes())
    opened = safe_open(file, "pt")
    assert type(opened) is safe_open
    data[-8:] = b"\x55" * 8
    file.write_bytes(data)

    found = opened.get_tensors()

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with Connection.open(socket_path("host-0"), device="host-0") as connection:
        status, fds = connection.request(Status())
        fds.close()
    assert [lease["pid"] for shard in status["shards"] for lease in shard["leases"]] == [os.getpid()]
    assert type(safe_open(file, "pt")) is RealFile
