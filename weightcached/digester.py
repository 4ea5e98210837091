"""The digest process: reads a checkpoint that an engine has loaded, in the background, and remembers its digest.

An engine that publishes what its own loader read knows the files by their stat tuples alone. Until their digest is
known, only who has the very same files finds what was published. The service hands this process one socket, with the
job on it; the answer goes the other way:

    {"job": {"checkpoint", "files": [{"name", "device", "inode", "size", "mtime_ns", "ctime_ns"}]}}
    {"digested": {"bytes", "seconds"}}
    {"failed": {"error": {...}}}             an error as on every socket of weightcached

It reads only what no one else wants to read: at idle I/O priority, and with the least claim to a core.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

from .checkpoint.fileset import open_checkpoint
from .checkpoint.remembered import SETTLED_NS, digest_once, recall
from .errors import CheckpointChanged, CheckpointError, ProtocolError, WeightCacheError, to_wire
from .fds import raise_descriptor_limit
from .shard.manifest import SourceFile, changed_files
from .wire import framing

THREADS = 1  # more would only take more of the disk
# ioprio_set(2): it has no wrapper in the C library. Its number, by machine; the class IDLE in the bits from 13 on.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3 << 13
_NICE = 19
_log = logging.getLogger(__name__)


def run(checkpoint: str, channel_fd: int) -> int:
    """Does the job that comes on the channel, which it takes over. Returns the exit code.

    `checkpoint` is in the job too; as an argument it makes the process readable in a process list.
    """
    raise_descriptor_limit()
    stay_behind()
    with socket.socket(fileno=channel_fd) as channel:
        code = 0
        try:
            answer: dict[str, Any] = {"digested": digest(*_receive(channel))}
        except WeightCacheError as error:
            code, answer = 1, {"failed": {"error": to_wire(error)}}
        frame = framing.Frame(answer)
        with contextlib.closing(frame), contextlib.suppress(OSError):  # the service itself may be what is gone
            frame.send(channel)
    return code


def stay_behind() -> None:
    """Takes this process's claims to disks and cores back, for good. Where that is refused it warns and goes on."""
    os.nice(_NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        _log.warning("no idle I/O priority on %s: it reads at the usual one", platform.machine())
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE) != 0:
        _log.warning("no idle I/O priority, it reads at the usual one: %s", os.strerror(ctypes.get_errno()))


def digest(path: Path, files: list[SourceFile]) -> dict[str, Any]:
    """Has the digests of the files remembered. Returns {"bytes": of all files, "seconds"}.

    `CheckpointChanged` when they are not those files, before or after they are read; `CheckpointError` for files that
    cannot be read, or whose digest cannot be kept.
    """
    began = time.monotonic()
    with open_checkpoint(path) as checkpoint:
        now = [file.source for file in checkpoint.files]
        _require_unchanged(checkpoint.folder, files, now)
        # A write soon after the last one may leave the times as they are, so what is read before is not remembered. The
        # clock may have been set back since: never longer than that.
        age = time.time_ns() - max(source.ctime_ns for source in now)
        time.sleep(min(max(SETTLED_NS - age, 0), SETTLED_NS) / 1e9)
        digest_once(checkpoint, THREADS)
    if None in recall(now):
        raise CheckpointError(file=str(path), problem="its digest cannot be kept; is ~/.cache/weightcached writable?")
    return {"bytes": sum(source.size for source in now), "seconds": time.monotonic() - began}


def _require_unchanged(folder: Path, recorded: list[SourceFile], now: list[SourceFile]) -> None:
    """`CheckpointChanged` names the first file that is not in both, with the same stat tuple."""
    if changed := changed_files(recorded, now):
        raise CheckpointChanged(file=str(folder / changed[0]), problem="is not the file any more that was loaded")


def _receive(channel: socket.socket) -> tuple[Path, list[SourceFile]]:
    """The job: the checkpoint and the files that were loaded. `ProtocolError` if none comes, or one of another form."""
    received = framing.receive(channel, large=True)
    if received is None:
        raise ProtocolError(problem="the service closed the channel before it sent a job")
    received[1].close()
    try:
        job = framing.decode(received[0])["job"]
        return Path(job["checkpoint"]), [SourceFile(**file) for file in job["files"]]
    except (KeyError, TypeError) as error:
        raise ProtocolError(problem=f"the service sent a job that is not readable: {error!r}") from error
