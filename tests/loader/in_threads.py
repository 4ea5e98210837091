"""Readers as threads of the test's own process: quick to start, and a test can change what a system call does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from weightcached.errors import WeightCacheError, to_wire
from weightcached.loader import reader_process, readers
from weightcached.loader.readers import Readers
from weightcached.wire import framing


def thread_readers(count: int) -> Readers:
    """The readers of the loader, each of which has a thread in the place of its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "subprocess", SimpleNamespace(Popen=_Thread, DEVNULL=subprocess.DEVNULL))
        return Readers(count)


class _Thread:
    """As much of `Popen` as the readers use. It is ended through its channel, when its task is done."""

    pid = 0

    def __init__(self, arguments: list[str], **options: Any) -> None:
        self._channel = socket.socket(fileno=os.dup(int(arguments[-1])))
        self._thread = threading.Thread(target=_serve, args=(self._channel,), name="reader")
        self._thread.start()

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_RDWR)

    def wait(self) -> int:
        self._thread.join()
        return 1


def _serve(channel: socket.socket) -> None:
    """What the process does around `reader_process.serve`."""
    with channel:
        try:
            reader_process.serve(channel)
        except WeightCacheError as error:
            with contextlib.suppress(OSError):
                framing.Frame({"error": to_wire(error)}).send(channel)
        except (BrokenPipeError, ConnectionResetError):
            return
