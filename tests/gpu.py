"""What tests do with real device memory: fill it, read it back, ask NVML how much is used."""

from __future__ import annotations

import time
from collections.abc import Callable

from weightcached.devices import device_memory
from weightcached.shard import cuda


def fill(slab: cuda.CudaSlab, data: bytes) -> None:
    """Copies to the beginning of the slab and waits until it is there."""
    with slab.context.current():
        cuda.check(cuda.driver().cuMemcpyHtoD(slab.address, data, len(data)), "cuMemcpyHtoD")
    slab.context.synchronize()


def read(ordinal: int, address: int, nbytes: int) -> bytes:
    """Device memory that this process has mapped, copied to the host."""
    data = bytearray(nbytes)
    context = cuda.PrimaryContext(ordinal)
    try:
        with context.current():
            cuda.check(cuda.driver().cuMemcpyDtoH(data, address, nbytes), "cuMemcpyDtoH")
    finally:
        context.close()
    return bytes(data)


def used_bytes(ordinal: int) -> int:
    """Bytes of the device in use, by anyone."""
    memory = device_memory(cuda.device_name(ordinal))
    return memory.total - memory.free


def becomes_true(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Waits for what nothing announces, such as the driver's accounts after a process was killed."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
