"""A reader process: fills shared memory with blocks of files and hashes each while it is hot.

Processes and not threads, since sixteen threads of one Python hinder each other: each waited for the interpreter's lock
longer than it read. A reader has no CUDA, no torch, nothing to clean up. It ends when the loader closes its socket.

    {"regions": [bytes, ...]}, descriptors      shared memory, to be mapped writable
    {"files": [path, ...]}, descriptors         files by number; may come several times
    {"start": true}                             from here on both ways are binary
    --> number, file, offset, then pieces       read the file from `offset` on into the pieces, one after the other
    <-- number, digest of the bytes             or {"error": {...}} in JSON, after which the reader ends
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator

from .. import logs
from ..checkpoint.digest import block_digest
from ..errors import ProtocolError, WeightCacheError, to_wire
from ..fds import raise_descriptor_limit
from ..wire import framing
from .reader import Reader

TASK = struct.Struct("<IIQ")  # number of the task, number of the file, offset in bytes
PIECE = struct.Struct("<IQQ")  # number of the region, offset and length in bytes
DONE = struct.Struct("<I16s")  # number of the task, digest
PART_BYTES = 1 << 20  # is hashed while it is in the core's own cache
MAX_PIECES = 512  # of one task; fewer than preadv takes (IOV_MAX is 1024), and a message of 10 KiB
MAX_TASK_BYTES = TASK.size + MAX_PIECES * PIECE.size


def serve(channel: socket.socket) -> None:
    """Reads what the loader asks for until it closes the channel, which stays the caller's.

    `CheckpointError` and `CheckpointChanged` for files that cannot be read as asked, `ProtocolError` for a loader that
    is not understood.
    """
    with contextlib.ExitStack() as held:
        regions: list[memoryview] = []
        readers: list[Reader] = []
        while (received := framing.receive(channel)) is not None:
            data, fds = received
            message = framing.decode(data)
            with fds:
                match message:
                    case {"regions": list(sizes)} if len(sizes) == len(fds):
                        for fd, nbytes in zip(fds, sizes, strict=True):
                            regions.append(memoryview(mmap.mmap(fd.fileno(), nbytes) if nbytes else b""))
                    case {"files": list(paths)} if len(paths) == len(fds):
                        for fd, path in zip(fds.steal_all(), paths, strict=True):
                            held.enter_context(fd)
                            readers.append(Reader(fd.fileno(), path))
                            held.callback(readers[-1].close)
                    case {"start": True}:
                        _read_tasks(channel, regions, readers)
                        return
                    case _:
                        raise ProtocolError(problem=f"the loader sent {sorted(message)} to a reader")


def _read_tasks(channel: socket.socket, regions: list[memoryview], readers: list[Reader]) -> None:
    while task := channel.recv(MAX_TASK_BYTES):
        number, file, offset = TASK.unpack_from(task)
        pieces = list(PIECE.iter_unpack(memoryview(task)[TASK.size :]))
        views = [regions[region][begin : begin + nbytes] for region, begin, nbytes in pieces]
        # Regions are mapped at pages, so one piece that begins at a multiple of a page is what O_DIRECT asks for.
        page_aligned = len(pieces) == 1 and pieces[0][1] % mmap.PAGESIZE == offset % mmap.PAGESIZE == 0
        parts = _read(readers[file], views, offset, page_aligned=page_aligned)
        channel.send(DONE.pack(number, block_digest(parts)))


def _read(reader: Reader, views: list[memoryview], offset: int, *, page_aligned: bool) -> Iterator[memoryview]:
    """Reads into the views, a large one in parts, and yields what is there now."""
    if len(views) > 1:
        reader.read(views, offset, page_aligned=False)
        yield from views
        return
    (view,) = views
    for begin in range(0, len(view), PART_BYTES):
        part = view[begin : begin + PART_BYTES]
        reader.read([part], offset + begin, page_aligned=page_aligned)
        yield part


def main() -> int:
    """``python -m weightcached.loader.reader_process [--debug] FD``: the exit code, 0 when the loader has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the loader, whose end ends this process
    *options, channel_fd = sys.argv[1:]
    logs.setup(logging.DEBUG if "--debug" in options else logging.INFO, f"reader {os.getpid()}")
    raise_descriptor_limit()
    with socket.socket(fileno=int(channel_fd)) as channel:
        try:
            serve(channel)
        except WeightCacheError as error:
            with contextlib.suppress(OSError):
                framing.Frame({"error": to_wire(error)}).send(channel)
            return 1
        except (BrokenPipeError, ConnectionResetError):  # the loader is gone
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
