"""client/mapping.py: who keeps memory and lease alive, and for how long."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.client.handmade import Raw, make_shard
from tests.leaks import NoDescriptorLeaks, open_descriptors
from weightcached.client import mapping
from weightcached.client.leases import Lease
from weightcached.client.mapping import copy_slabs, map_slabs
from weightcached.client.target import Target
from weightcached.errors import DeviceError, ManifestError
from weightcached.fds import OwnedFd

HOST = Target("host-0")
DATA = bytes(range(256)) * 32


@pytest.fixture
def peers() -> Iterator[tuple[Lease, socket.socket]]:
    """A lease on one end of a SEQPACKET pair, and the other end: the worker's, which sees when the lease ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(10)
    yield Lease(ours), theirs
    theirs.close()


def ended(theirs: socket.socket) -> bool:
    """Whether the worker's end sees that the other side has closed."""
    theirs.setblocking(False)
    try:
        return theirs.recv(1) == b""
    except BlockingIOError:
        return False


def mapped() -> bool:
    """Whether a slab is mapped in this process."""
    return "memfd:weightcached-slab" in Path("/proc/self/maps").read_text()


def map_one(lease: Lease, data: bytes = DATA) -> torch.Tensor:
    """One mapped slab; the descriptors are closed."""
    shard = make_shard([Raw("t", "U8", (len(data),), data)])
    (slab,) = map_slabs(shard.head, shard.slabs, lease, HOST)
    shard.close()
    return slab


def drop(pair: list[Any]) -> None:
    """Forgets what is in the list, so that no local name of the test keeps it."""
    pair.clear()
    gc.collect()


def test_the_last_tensor_ends_mapping_and_lease() -> None:
    """The worker sees the lease end when the last view is gone, not before, and the memory is unmapped then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        slab = [map_one(Lease(ours))]
        view = [slab[0][256:512].view(torch.float32)]
        drop(slab)
        assert not ended(theirs)
        assert mapped()

        drop(view)

        assert ended(theirs)
        assert not mapped()


def test_all_slabs_share_the_lease() -> None:
    """With several slabs the lease lasts as long as a tensor of any of them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        shard = make_shard([Raw(str(n), "U8", (8,), b"12345678") for n in range(2)], slabs=2)
        slabs = map_slabs(shard.head, shard.slabs, Lease(ours), HOST)
        shard.close()

        slabs.pop(0)
        gc.collect()
        assert not ended(theirs)

        slabs.pop()
        gc.collect()
        assert ended(theirs)


def test_descriptors_end_with_the_mapping(peers: tuple[Lease, socket.socket]) -> None:
    """A mapping holds no descriptor, so none is left open when the tensors are gone."""
    with NoDescriptorLeaks():
        before = slab_descriptors()
        slab = map_one(peers[0])
        assert bytes(slab.numpy()) == DATA
        assert slab_descriptors() == before
        del slab


def slab_descriptors() -> int:
    """Descriptors of this process that are slabs."""
    return sum("memfd:weightcached-slab" in what for what in open_descriptors().values())


def test_a_write_stays_in_this_process(peers: tuple[Lease, socket.socket]) -> None:
    """A stray write changes this process's copy of a page; another process reads the original from the same slab."""
    shard = make_shard([Raw("t", "U8", (len(DATA),), DATA)])
    (slab,) = map_slabs(shard.head, shard.slabs, peers[0], HOST)
    slab.fill_(7)
    reader = (
        "import sys, torch\n"
        "from weightcached.shard.host import map_host_slab\n"
        "m = map_host_slab(int(sys.argv[1]), int(sys.argv[2]))\n"
        "t = torch.frombuffer(m, dtype=torch.uint8)\n"
        "sys.stdout.buffer.write(bytes(t.numpy()))\n"
    )
    fd = shard.slabs[0].fileno()
    run = subprocess.run(
        [sys.executable, "-c", reader, str(fd), str(len(DATA))], pass_fds=[fd], capture_output=True, timeout=50
    )
    shard.close()

    assert run.stdout == DATA, run.stderr.decode()
    assert bytes(slab.numpy()) == b"\x07" * len(DATA)


def test_copies_are_private(peers: tuple[Lease, socket.socket]) -> None:
    """`copy_slabs` gives equal bytes in memory of its own: writes do not reach the mapping, nor the other way round."""
    slab = map_one(peers[0])
    (copy,) = copy_slabs([slab])

    copy[0] = 99
    slab[1] = 98

    assert slab[0] == DATA[0]
    assert copy[1] == DATA[1]
    assert bytes(copy[2:].numpy()) == DATA[2:]
    assert copy.data_ptr() != slab.data_ptr()


def test_a_shard_without_bytes(peers: tuple[Lease, socket.socket]) -> None:
    """Slabs of 0 bytes are empty tensors."""
    shard = make_shard([Raw("e", "F32", (0,), b"")])
    (slab,) = map_slabs(shard.head, shard.slabs, peers[0], HOST)
    shard.close()

    assert (slab.dtype, slab.shape) == (torch.uint8, (0,))


def test_slabs_must_be_what_the_manifest_says(peers: tuple[Lease, socket.socket]) -> None:
    """Too few descriptors, another size, or a file that can still change: refused, nothing left open or mapped."""
    with NoDescriptorLeaks():
        shard = make_shard([Raw(str(n), "U8", (8,), b"12345678") for n in range(2)], slabs=2)
        other = make_shard([Raw("t", "U8", (9,), b"123456789")])
        writable = OwnedFd(os.memfd_create("open", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(writable.fileno(), 8)
        with pytest.raises(ManifestError, match="2 slabs listed, 1 descriptors came"):
            map_slabs(shard.head, shard.slabs[:1], peers[0], HOST)
        with pytest.raises(ManifestError, match="slab of 9 bytes, 8 listed"):
            map_slabs(shard.head, [shard.slabs[0], other.slabs[0]], peers[0], HOST)
        with pytest.raises(ManifestError, match="not sealed"):
            map_slabs(shard.head, [shard.slabs[0], writable], peers[0], HOST)
        for item in (shard, other, writable):
            item.close()
    gc.collect()
    assert not mapped()


def test_a_device_mapping_ends_before_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the range is unmapped and then the lease ended, when the last arena is gone; empty slabs stay out.

    CUDA is played here; `test_attach_gpu.py` is the same on a GPU.
    """
    events: list[str] = []
    opened: list[Any] = []

    class Mapping:
        address = 0x7000_0000
        offsets = (0, 4096)

        def close(self) -> None:
            events.append("unmapped")

    class Connection:
        def close(self) -> None:
            events.append("lease ended")

    def open_(ordinal: int, slabs: list[tuple[int, int]]) -> Mapping:
        opened.append((ordinal, [nbytes for _, nbytes in slabs]))
        return Mapping()

    arenas: list[Any] = []
    played = SimpleNamespace(CudaMapping=SimpleNamespace(open=open_))
    monkeypatch.setitem(sys.modules, "weightcached.shard.cuda", played)
    monkeypatch.setattr(mapping, "_as_tensor", lambda arena, device: arenas.append(arena) or arena)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    raws = [Raw("a", "U8", (8,), b"12345678"), Raw("e", "U8", (0,), b""), Raw("b", "U8", (5,), b"12345")]
    shard = make_shard(raws, slabs=3)
    slabs = map_slabs(shard.head, shard.slabs, Lease(Connection()), Target("GPU-x", 1))
    shard.close()

    assert opened == [(1, [8, 5])]
    described = [arena.__cuda_array_interface__ for arena in arenas]
    assert [(item["data"], item["shape"]) for item in described] == [
        ((0x7000_0000, False), (8,)),
        ((0x7000_1000, False), (5,)),
    ]
    assert slabs[1] is None
    slabs.clear()
    arenas.pop()
    gc.collect()
    assert events == []
    arenas.pop()
    gc.collect()
    assert events == ["unmapped", "lease ended"]


def test_a_copy_made_by_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch ever copied device memory instead of sharing it, that is an error, not a silent doubling."""
    monkeypatch.setattr(torch, "as_tensor", lambda arena, device: torch.zeros(4))
    arena = SimpleNamespace(__cuda_array_interface__={"data": (0x7000_0000, False)})

    with pytest.raises(DeviceError, match="torch copied the slab"):
        mapping._as_tensor(arena, "cuda:0")  # type: ignore[arg-type]
