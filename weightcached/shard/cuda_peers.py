"""Device memory that another device of the same process reads, over NVLink or PCIe."""

from __future__ import annotations

from . import cuda


def can_reach(ordinal: int, other: int) -> bool:
    """Whether a device can read the memory of the other one directly; its own it always can."""
    if ordinal == other:
        return True
    driver = cuda.driver()
    ours, theirs = (cuda.check(driver.cuDeviceGet(number), "cuDeviceGet") for number in (ordinal, other))
    return bool(cuda.check(driver.cuDeviceCanAccessPeer(ours, theirs), "cuDeviceCanAccessPeer"))


def let_read(slab: cuda.CudaSlab, ordinal: int) -> None:
    """Another device may read the slab for as long as it is mapped here. `DeviceError` if it cannot reach it."""
    driver = cuda.driver()
    granule = cuda.granularity(int(slab.context.device))
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    size = max(1, -(-slab.nbytes // granule)) * granule
    cuda.check(driver.cuMemSetAccess(slab.address, size, [access], 1), "cuMemSetAccess")
