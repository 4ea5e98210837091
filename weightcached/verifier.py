"""The verifier process: looks at what is resident, answers, ends.

The service hands it one socket. The first message on it is the job, with a shard's manifest and slabs as descriptors;
the answer goes the other way. It computes the checksums of one shard anew and compares them, or it finds out whether
the GPU slabs of shards from an earlier process of the service are what their manifests say:

    {"job": {"model", "device", "generation"}}        one shard to compare
    {"inspect": {"model", "device", "more"}}          one shard to look at; another one follows while `more`
    {"verified": {"tensors", "bytes", "differ": [names], "seconds"}}
    {"inspected": [null or {...}]}                    for each shard what is wrong with it, an error as below
    {"failed": {"error": {...}}}                      an error as on every socket of weightcached

A process of its own, since on a GPU it takes a CUDA context, and since a fault of the device ends no one else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from .devices import is_host
from .errors import DeviceError, ManifestError, ModelError, ProtocolError, WeightCacheError, WrongDevice, to_wire
from .fds import FdSet, OwnedFd, raise_descriptor_limit
from .shard.checksum import checksum_host
from .shard.host import map_host_slab
from .shard.manifest import (
    MIX64_SUM,
    XXH3_64,
    Checksums,
    ManifestHead,
    TensorTable,
    check_checksums,
    check_table,
    parse_head,
    parse_table,
    read_checksums,
    read_documents,
)
from .wire import framing

THREADS = 16  # at most; memory gives no more beyond
# What the driver answers to a descriptor that it has not exported.
_NO_EXPORT = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_DEVICE")
_log = logging.getLogger(__name__)


def run(device: str, model: str, channel_fd: int) -> int:
    """Does the job that comes on the channel, which it takes over. Returns the exit code.

    `device` and `model` are in the job too; as arguments they make the process readable in a process list.
    """
    raise_descriptor_limit()
    with socket.socket(fileno=channel_fd) as channel:
        code = 0
        try:
            answer = _do_job(channel)
        except WeightCacheError as error:
            _log.debug("failed: %s", error)
            code, answer = 1, {"failed": {"error": to_wire(error)}}
        frame = framing.Frame(answer)
        with contextlib.closing(frame), contextlib.suppress(OSError):  # the service itself may be what is gone
            frame.send(channel)
    return code


def _do_job(channel: socket.socket) -> dict[str, Any]:
    message, fds = _receive(channel)
    if "inspect" not in message:
        job = message["job"]
        with fds:
            manifest, *slabs = fds
            return {"verified": verify(job["model"], job["device"], manifest, slabs)}
    found = []
    while True:
        job = message["inspect"]
        with fds:
            manifest, *slabs = fds
            error = inspect(job["device"], manifest, slabs)
        if error is not None:
            _log.debug("%s: %s", job["model"], error)
        found.append(None if error is None else to_wire(error))
        if not job["more"]:
            return {"inspected": found}
        message, fds = _receive(channel)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], FdSet]:
    received = framing.receive(channel)
    if received is None:
        raise ProtocolError(problem="the service closed the channel before it sent a job")
    return framing.decode(received[0]), received[1]


def inspect(device: str, manifest: OwnedFd, slabs: Sequence[OwnedFd]) -> WeightCacheError | None:
    """What is wrong with a shard's slabs on a GPU: no allocations, of another device, of other sizes than recorded.

    None if nothing is. Raises `DeviceError` or `MissingDependency` where the driver cannot tell.
    """
    from .shard.cuda import check_slabs, driver, ordinal_of

    driver()
    ordinal = ordinal_of(device)
    try:
        head = parse_head(read_documents(manifest.fileno())[0])
        check_slabs(ordinal, [(fd.fileno(), slab.nbytes) for fd, slab in zip(slabs, head.slabs, strict=True)])
    except DeviceError as error:
        if isinstance(error, WrongDevice) or error.fields.get("status") in _NO_EXPORT:
            return error
        raise  # want of memory, a device that is not ready: it says nothing about the shard
    except ManifestError as error:
        return error
    return None


def verify(model: str, device: str, manifest: OwnedFd, slabs: Sequence[OwnedFd]) -> dict[str, Any]:
    """What is in the slabs, compared with the manifest's checksums; the descriptors stay the caller's.

    Returns {"tensors": how many were compared, "bytes": of all of them, "differ": names, "seconds"}. `ModelError`
    where the manifest has no checksums, `ManifestError` where it does not fit, `DeviceError` where memory cannot be
    mapped or read.
    """
    began = time.monotonic()
    head_json, table_json = read_documents(manifest.fileno())
    head, table = parse_head(head_json), parse_table(table_json)
    check_table(head, table)
    recorded = read_checksums(manifest.fileno())
    if recorded is None:
        problem = f"generation {head.generation} on {device} has no checksums recorded; its publisher computed none"
        raise ModelError(model=model, problem=problem)
    check_checksums(table, recorded)
    if len(slabs) != len(head.slabs):
        raise ManifestError(problem=f"{len(head.slabs)} slabs listed, {len(slabs)} descriptors came")
    algorithm = XXH3_64 if is_host(device) else MIX64_SUM
    if recorded.algorithm != algorithm:
        raise ManifestError(problem=f"checksums of {recorded.algorithm}, on {device} they are of {algorithm}")
    compute = _checksum_host if is_host(device) else _checksum_cuda
    found = compute(device, head, table, slabs)
    compared = zip(table.tensors, recorded.values, found.values, strict=True)
    return {
        "tensors": len(table.tensors),
        "bytes": sum(entry.nbytes for entry in table.tensors),
        "differ": [entry.name for entry, wanted, value in compared if wanted != value],
        "seconds": time.monotonic() - began,
    }


def _checksum_host(device: str, head: ManifestHead, table: TensorTable, slabs: Sequence[OwnedFd]) -> Checksums:
    values = [""] * len(table.tensors)
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    for slab, (fd, listed) in enumerate(zip(slabs, head.slabs, strict=True)):
        mapping = map_host_slab(fd.fileno(), listed.nbytes)
        view = memoryview(mapping if mapping is not None else b"").toreadonly()
        numbers = [number for number, entry in enumerate(table.tensors) if entry.slab == slab]
        part = checksum_host(view, [table.tensors[number] for number in numbers], threads)
        for number, value in zip(numbers, part.values, strict=True):
            values[number] = value
    return Checksums(XXH3_64, tuple(values))


def _checksum_cuda(device: str, head: ManifestHead, table: TensorTable, slabs: Sequence[OwnedFd]) -> Checksums:
    from .shard.cuda import CudaMapping, PrimaryContext, ordinal_of
    from .shard.cuda_checksum import checksum_slab

    ordinal = ordinal_of(device)
    listed = [(fd.fileno(), slab.nbytes) for fd, slab in zip(slabs, head.slabs, strict=True)]
    with (
        contextlib.closing(PrimaryContext(ordinal)) as context,
        contextlib.closing(CudaMapping.open(ordinal, listed)) as mapping,
    ):
        # All slabs lie in one range of addresses, so that one launch reads them all.
        entries = [entry._replace(offset=mapping.offsets[entry.slab] + entry.offset) for entry in table.tensors]
        return checksum_slab(context, mapping.address, entries)
