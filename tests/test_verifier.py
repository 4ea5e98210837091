"""The verifier: what it compares, what it refuses, and the process around it. A GPU's memory is the fake driver's."""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import HandMade, Raw, make_shard
from tests.fake_cuda import FakeDriver, Status
from tests.leaks import NoDescriptorLeaks
from tests.shard.test_checksum import layout
from weightcached.errors import DeviceError, ManifestError, ModelError, from_wire
from weightcached.shard import cuda
from weightcached.shard.cuda import CudaMapping, CudaSlab
from weightcached.shard.cuda_checksum import checksum_slab
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import Checksums, ManifestHead, SlabEntry, TensorTable, write_manifest
from weightcached.verifier import inspect, verify

ROOT = Path(__file__).parents[1]
GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
TENSORS = [
    Raw("wide", "U8", (70_000,), os.urandom(70_000)),
    Raw("empty", "F32", (0, 4), b""),
    Raw("scalar", "U8", (), b"\7"),
    Raw("transposed", "F32", (2, 3), os.urandom(24), {"stride": (1, 2), "role": "buffer", "private": True}),
]
NAMES = [raw.name for raw in TENSORS]


@pytest.fixture(autouse=True)
def _no_leaks(descriptors: NoDescriptorLeaks) -> NoDescriptorLeaks:
    return descriptors


def outcome(shard: HandMade, device: str = "host-0") -> dict[str, Any]:
    """What the verifier finds in a shard, whose descriptors are closed afterwards."""
    try:
        return verify("tiny", device, shard.manifest, shard.slabs)
    finally:
        shard.close()


@pytest.mark.parametrize("slabs", [1, 3])
def test_nothing_differs_in_what_nobody_touched(slabs: int) -> None:
    """Every tensor is compared, whatever its shape, stride or role, an empty one too; tied names are no second one."""
    found = outcome(make_shard(TENSORS, slabs=slabs, aliases={"tied": "wide"}, checksums=True))
    assert found == {"tensors": 4, "bytes": 70_025, "differ": [], "seconds": found["seconds"]}
    assert found["seconds"] > 0


@pytest.mark.parametrize("name", ["wide", "scalar", "transposed"])
@pytest.mark.parametrize("slabs", [1, 3])
def test_a_planted_flip_names_its_tensor(name: str, slabs: int) -> None:
    """One bit, changed after the checksums were taken: that tensor differs and no other."""
    assert outcome(make_shard(TENSORS, slabs=slabs, checksums=True, flip=[name]))["differ"] == [name]


def test_every_tensor_that_differs_is_named() -> None:
    """Not the first one only, and in the table's order."""
    flip = ["transposed", "wide"]
    assert outcome(make_shard(TENSORS, checksums=True, flip=flip))["differ"] == ["wide", "transposed"]


def test_a_shard_of_nothing_is_verified() -> None:
    """No tensors, no differences."""
    assert outcome(make_shard([], checksums=True))["tensors"] == 0


def test_a_shard_without_checksums_is_an_error() -> None:
    """Nothing was compared, which must not look like a success."""
    with pytest.raises(ModelError, match="tiny: generation 7 on host-0 has no checksums recorded"):
        outcome(make_shard(TENSORS, generation=7))


def test_checksums_of_another_algorithm_are_an_error() -> None:
    """A host slab is not compared with what a GPU computes: every tensor would seem to differ."""
    shard = make_shard(TENSORS)
    shard.manifest.close()
    shard.manifest = write_manifest(shard.head, shard.table, Checksums("mix64-sum", ("0" * 16,) * 4))
    with pytest.raises(ManifestError, match="checksums of mix64-sum, on host-0 they are of xxh3-64"):
        outcome(shard)


def test_what_does_not_fit_together_is_an_error() -> None:
    """Fewer checksums than tensors, fewer slabs than listed, a slab of another size."""
    shard = make_shard(TENSORS)
    shard.manifest.close()
    shard.manifest = write_manifest(shard.head, shard.table, Checksums("xxh3-64", ("0" * 16,) * 3))
    with pytest.raises(ManifestError, match="3 checksums of 4 tensors"):
        outcome(shard)
    shard = make_shard(TENSORS, slabs=2, checksums=True)
    shard.slabs.pop().close()
    with pytest.raises(ManifestError, match="2 slabs listed, 1 descriptors came"):
        outcome(shard)
    shard = make_shard(TENSORS, slabs=2, checksums=True)
    shard.slabs.reverse()
    with pytest.raises(ManifestError, match="slab of"):
        outcome(shard)


# GPU slabs.


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A process with one GPU, whose driver is initialised."""
    driver = FakeDriver()
    driver.initialised = True
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    return driver


def cuda_shard(fake: FakeDriver) -> HandMade:
    """Two slabs of tensors in the fake's memory, with checksums."""
    entries = [*layout([300, 0, 1000]), *(e._replace(name=f"v{e.name}", slab=1) for e in layout([70]))]
    slabs, values = [], []
    for number, size in enumerate((entries[2].offset + 1000, 70)):
        slab = CudaSlab.create(0, size)
        fake.poke(slab.address, os.urandom(size))
        own = [entry for entry in entries if entry.slab == number]
        values += checksum_slab(slab.context, slab.address, own).values
        slabs.append((size, slab.seal()))
    table = TensorTable(tuple(entries))
    head = ManifestHead(
        model="tiny",
        generation=1,
        device=GPU,
        key=ShardKey("c0"),
        slabs=tuple(SlabEntry(size) for size, _ in slabs),
        tensor_count=len(entries),
        created=datetime.now(UTC).isoformat(),
    )
    manifest = write_manifest(head, table, Checksums("mix64-sum", tuple(values)))
    return HandMade(head, table, manifest, [fd for _, fd in slabs])


def test_a_gpus_slabs_are_compared_on_the_gpu(fake: FakeDriver) -> None:
    """In one launch for all slabs, through read-only mappings, and with everything given back."""
    shard = cuda_shard(fake)
    fake.launches.clear()
    found = outcome(shard, GPU)
    assert (found["tensors"], found["bytes"], found["differ"]) == (4, 1370, [])
    assert len(fake.launches) == 1
    assert fake.live() == {}


def test_a_flip_in_a_gpus_slab_is_found(fake: FakeDriver) -> None:
    """By whoever maps the slab writable, which a descriptor's holder can: in the second slab, at its own offset."""
    shard = cuda_shard(fake)
    mapping = CudaMapping.open(0, [(shard.slabs[1].fileno(), 70)], read_only=False)
    byte = fake.peek(mapping.address + 69, 1)[0]
    fake.poke(mapping.address + 69, bytes([byte ^ 1]))
    mapping.close()
    assert outcome(shard, GPU)["differ"] == ["vw0"]


def test_a_fault_on_the_gpu_gives_everything_back(fake: FakeDriver) -> None:
    """Whichever call fails, as after any error of the device."""
    shard = cuda_shard(fake)
    fake.calls.clear()
    verify("tiny", GPU, shard.manifest, shard.slabs)
    calls = list(fake.calls)
    undoing = {"cuCtxPopCurrent", "cuMemFree", "cuModuleUnload", "cuMemRelease", "cuMemUnmap", "cuMemAddressFree"}
    for number, name in enumerate(calls):
        if name in undoing | {"cuDevicePrimaryCtxRelease"}:
            continue
        fake.calls.clear()
        fake.failures = {number: Status.CUDA_ERROR_UNKNOWN}
        with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
            verify("tiny", GPU, shard.manifest, shard.slabs)
        assert fake.live() == {}, f"left behind after {name} failed"
    shard.close()


def test_slabs_are_inspected_without_a_context(fake: FakeDriver) -> None:
    """What was published is found good; no context is made, nothing stays mapped, the descriptors stay the caller's."""
    shard = cuda_shard(fake)
    for slab in shard.slabs:
        assert not slab.closed
    fake.calls.clear()
    assert inspect(GPU, shard.manifest, shard.slabs) is None
    assert not {"cuDevicePrimaryCtxRetain", "cuMemSetAccess"} & set(fake.calls)
    assert fake.live() == {}
    shard.close()


def test_slabs_that_are_not_what_is_recorded(fake: FakeDriver) -> None:
    """Another size, or no allocation at all: an error is the answer. A driver that cannot tell raises: it says nothing
    about the shard."""
    shard = cuda_shard(fake)
    big = CudaSlab.create(0, 5 << 20)
    other = [shard.slabs[0], big.seal()]
    found = inspect(GPU, shard.manifest, other)
    assert isinstance(found, ManifestError)
    assert "slab 1 is not of the 70 bytes listed" in str(found)
    assert isinstance(inspect(GPU, shard.manifest, [shard.manifest, shard.slabs[1]]), DeviceError)
    fake.calls.clear()
    assert inspect(GPU, shard.manifest, shard.slabs) is None
    reserve, count = fake.calls.index("cuMemAddressReserve"), len(fake.calls)
    fake.failures = {count + reserve: Status.CUDA_ERROR_OUT_OF_MEMORY}
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        inspect(GPU, shard.manifest, shard.slabs)
    assert fake.live() == {}
    with pytest.raises(DeviceError, match="no device"):
        inspect(GPU.replace("0001", "1111"), shard.manifest, shard.slabs)
    other[1].close()
    shard.close()


# The process.


def run_role(*arguments: str, job: dict[str, Any] | None, fds: list[int]) -> tuple[int, dict[str, Any]]:
    """The role in a process of its own: its exit code, and what it answered to a job."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if job is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            ours.sendmsg([json.dumps({"job": job}).encode()], rights)
        else:
            ours.shutdown(socket.SHUT_WR)
        command = [sys.executable, "-m", "weightcached", "verifier", *arguments, "--channel-fd", str(theirs.fileno())]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            answer = json.loads(ours.recv(1 << 16))
            assert ours.recv(10) == b"", "it says one thing and ends"
        return process.returncode, answer


def test_the_process_answers_and_ends() -> None:
    """One job with descriptors in, one answer out; exit code 0 for a comparison, whatever it found."""
    with_flip = make_shard(TENSORS, checksums=True, flip=["scalar"])
    fds = [item.fileno() for item in (with_flip.manifest, *with_flip.slabs)]
    job = {"model": "tiny", "device": "host-0", "generation": 1}
    code, answer = run_role("host-0", "tiny", job=job, fds=fds)
    assert (code, answer["verified"]["differ"]) == (0, ["scalar"])
    with_flip.close()


def test_the_process_sends_its_error() -> None:
    """What the function raises comes over the channel as the same class, and the exit code is 1."""
    shard = make_shard(TENSORS)
    fds = [item.fileno() for item in (shard.manifest, *shard.slabs)]
    job = {"model": "tiny", "device": "host-0", "generation": 1}
    code, answer = run_role("host-0", "tiny", job=job, fds=fds)
    error = from_wire(answer["failed"]["error"])
    assert (code, type(error)) == (1, ModelError)
    shard.close()
    code, answer = run_role("host-0", "tiny", job=None, fds=[])
    assert (code, answer["failed"]["error"]["code"]) == (1, "protocol-error")
