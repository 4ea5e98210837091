"""The other process of a GPU test: ``python -m tests.shard.cuda_child ROLE ORDINAL ARGUMENT...``

    own SOCKET NBYTES      makes a slab of random bytes, sends its digest and its descriptor, and waits to be killed
    read FD:NBYTES...      maps the slabs read-only and prints the digest of all their bytes, in order
    write FD:NBYTES        maps the slab read-only, writes to it, and prints what became of that

An error of weightcached is printed as its class and sentence.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

import xxhash

from tests import gpu
from weightcached.errors import DeviceError, WeightCacheError
from weightcached.shard import cuda


def own(ordinal: int, channel: str, nbytes: str) -> None:
    data = os.urandom(int(nbytes))
    slab = cuda.CudaSlab.create(ordinal, len(data))
    gpu.fill(slab, data)
    with slab.seal() as fd, socket.socket(fileno=int(channel)) as connection:
        socket.send_fds(connection, [xxhash.xxh3_128_hexdigest(data).encode()], [fd.fileno()])
        signal.pause()


def read(ordinal: int, *slabs: str) -> None:
    pairs = [(int(fd), int(nbytes)) for fd, _, nbytes in (slab.partition(":") for slab in slabs)]
    mapping = cuda.CudaMapping.open(ordinal, pairs)
    digest = xxhash.xxh3_128()
    for offset, (_, nbytes) in zip(mapping.offsets, pairs, strict=True):
        digest.update(gpu.read(ordinal, mapping.address + offset, nbytes))
    mapping.close()
    print(digest.hexdigest())


def write(ordinal: int, slab: str) -> None:
    fd, _, nbytes = slab.partition(":")
    mapping = cuda.CudaMapping.open(ordinal, [(int(fd), int(nbytes))])
    context = cuda.PrimaryContext(ordinal)
    try:
        with context.current():
            cuda.check(cuda.driver().cuMemsetD8(mapping.address, 0xEE, int(nbytes)), "cuMemsetD8")
        context.synchronize()
        print("written", flush=True)
    except DeviceError as error:
        print(error.status, flush=True)
    with contextlib.suppress(DeviceError):  # the context is broken
        mapping.close()
    with contextlib.suppress(DeviceError):
        context.close()


if __name__ == "__main__":
    role, number, *arguments = sys.argv[1:]
    try:
        {"own": own, "read": read, "write": write}[role](int(number), *arguments)
    except WeightCacheError as raised:
        print(f"{type(raised).__name__}: {raised}")
