"""shard.cuda_peers: which devices reach each other, and a slab that another one reads."""

from __future__ import annotations

import pytest

from tests.fake_cuda import FakeDriver, Gpu
from weightcached.errors import DeviceError
from weightcached.shard import cuda
from weightcached.shard.cuda_peers import can_reach, let_read


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver with two devices."""
    fake = FakeDriver(Gpu(), Gpu(uuid=bytes(range(1, 17))))
    fake.cuInit(0)
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    return fake


def test_reach(pair: FakeDriver) -> None:
    """The driver is asked for two devices; of its own memory every device is sure."""
    assert can_reach(0, 1)
    pair.peer_access = False
    assert not can_reach(0, 1)
    assert can_reach(1, 1)


def test_another_device_reads_a_slab(pair: FakeDriver) -> None:
    """From then on, and only reads; a device that cannot is an error. The slab's own access stays."""
    slab = cuda.CudaSlab.create(0, 3 << 20)
    try:
        let_read(slab, 1)
        (mapping,) = pair.mappings.values()
        assert (mapping.device, mapping.access, mapping.peers) == (0, 3, {1: 1})
        pair.peer_access = False
        with pytest.raises(DeviceError, match="cuMemSetAccess"):
            let_read(slab, 1)
    finally:
        slab.close()
    assert pair.live() == {}
