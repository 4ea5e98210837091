"""The reader processes of one load, seen from the loader: started, fed, listened to, ended. See `reader_process`."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, NoReturn

from ..errors import ConnectionLost, DeviceError, from_wire
from ..text import describe_exit
from ..wire import framing
from .reader_process import DONE, PIECE, TASK

MAX_READERS = 12  # by then the bus of one GPU is full
_CORES_LEFT = 0.25  # of the usable cores, for the loader and the driver: on 16 cores 12 readers were the fastest
_FILES_PER_MESSAGE = 2  # two paths fit into a message however long they are (PATH_MAX), six bytes a byte in JSON
_log = logging.getLogger(__name__)


class Region(NamedTuple):
    """Shared memory: its descriptor, which stays its owner's, and its bytes."""

    fd: int
    nbytes: int


class Place(NamedTuple):
    """`nbytes` bytes at `offset` of region number `region`."""

    region: int
    offset: int
    nbytes: int


class OpenFile(NamedTuple):
    """A file to read from: its descriptor, which stays its owner's, and its path for errors."""

    fd: int
    path: str


def reader_count(tasks: int) -> int:
    """How many readers a load of so many tasks gets: three for four usable cores, `MAX_READERS` at most."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MAX_READERS, cores - int(cores * _CORES_LEFT), tasks))


class Readers:
    """`count` reader processes; a context manager that ends them. Started at once, of use after `open`.

    To start them takes a moment, in which the loader may do something else. Every method raises `ConnectionLost` when
    one has died, and `DeviceError` when the host lacks what it takes to start or to tell one.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._channels: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._numbers: dict[int, int] = {}  # descriptor of the channel -> number of the reader
        self._tasks = 0  # in progress
        self._poll = select.poll()
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for _ in range(count):
                try:
                    self._start()
                except OSError as error:
                    problem = f"cannot start {count} reader processes: {error.strerror}; see its limits (ulimit -a)"
                    raise DeviceError(device="host", problem=problem) from error
            on_error.pop_all()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._numbers[ours.fileno()] = len(self._channels)
            self._channels.append(ours)
            debug = ["--debug"] if _log.isEnabledFor(logging.DEBUG) else []
            arguments = [sys.executable, "-P", "-m", f"{__package__}.reader_process", *debug, str(theirs.fileno())]
            self._processes.append(subprocess.Popen(arguments, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL))
        self._poll.register(ours, select.POLLIN)

    def open(self, regions: Sequence[Region], files: Sequence[OpenFile]) -> None:
        """Gives every reader the memory and the files."""
        setup = [framing.Frame({"regions": [region.nbytes for region in regions]}, [region.fd for region in regions])]
        for first in range(0, len(files), _FILES_PER_MESSAGE):
            some = files[first : first + _FILES_PER_MESSAGE]
            setup.append(framing.Frame({"files": [file.path for file in some]}, [file.fd for file in some]))
        setup.append(framing.Frame({"start": True}))
        for number, channel in enumerate(self._channels):
            try:
                for frame in setup:
                    frame.send(channel)
            except OSError as error:
                self._raise_why(number, error)

    @property
    def has_idle(self) -> bool:
        """Whether some reader has nothing to do, as far as their number tells."""
        return self._tasks < self.count

    def submit(self, reader: int, task: int, file: int, offset: int, places: Sequence[Place]) -> None:
        """Has the reader fill the places, `MAX_PIECES` at most, from byte `offset` of file number `file` on.

        `task` is a number of the caller's, below 2**32. A reader does one task after the other.
        """
        message = TASK.pack(task, file, offset) + b"".join(PIECE.pack(*place) for place in places)
        try:
            self._channels[reader].send(message)
        except OSError as error:
            self._raise_why(reader, error)
        self._tasks += 1

    def done(self) -> list[tuple[int, bytes]]:
        """Waits until one task at least is done. Number and block digest of each that is.

        Raises the error of a reader that could not do its task: `CheckpointError`, `CheckpointChanged`.
        """
        found = []
        for descriptor, _ in self._poll.poll():
            task, digest = DONE.unpack(self._receive(self._numbers[descriptor]))
            self._tasks -= 1
            found.append((task, digest))
        return found

    def stop(self) -> None:
        """Ends all of them, at once, and waits for none."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Ends them, and waits until they have let go of the memory. Idempotent."""
        self.stop()
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _receive(self, number: int) -> bytes:
        """The reader's next answer. Raises the error that it sent instead, `ConnectionLost` when it sent nothing."""
        channel = self._channels[number]
        try:
            try:
                answer = channel.recv(framing.MAX_MESSAGE)
            except ConnectionResetError:
                # It ended with a task unread. The kernel says so once, before what the reader sent last (af_unix).
                answer = channel.recv(framing.MAX_MESSAGE)
        except OSError as error:
            raise self._lost(number) from error
        if not answer:
            raise self._lost(number)
        if len(answer) != DONE.size:
            raise from_wire(framing.decode(answer)["error"])
        return answer

    def _raise_why(self, number: int, error: OSError) -> NoReturn:
        """Why a message could not be sent: of a reader that has ended, the error behind the answers it had sent."""
        if not isinstance(error, BrokenPipeError | ConnectionResetError):  # it lives: there is nothing to wait for
            problem = f"cannot send to a reader process: {error.strerror}; see its limits (ulimit -a)"
            raise DeviceError(device="host", problem=problem) from error
        while True:
            self._receive(number)

    def _lost(self, number: int) -> ConnectionLost:
        process = self._processes[number]
        process.kill()  # it closed its end, so it is ending; without this a stopped one would be waited for
        code = process.wait()
        problem = f"ended by {describe_exit(code)} in the middle of the load"
        if code == -signal.SIGKILL:
            problem += "; the kernel's log says whether memory ran out"
        return ConnectionLost(path=f"reader process {process.pid}", problem=problem)
