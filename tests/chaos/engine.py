"""Engines of a chaos run: processes that attach through the public API, hold what they got, and digest it when asked.

``python -m tests.chaos.engine FD`` imports torch once and forks an engine for each socket that it is sent, since an
import for each would cost more than everything else of a round. CUDA is first used in the engines.

    to the nursery   b"fork" + the engine's socket      -> its pid
    to an engine     {"do": "attach", "model", "device", "wait", "rank": [0, 2]}
                         -> {"id", "generation", "content", "digest"}, or {"error": class, "text"}
                     {"do": "look", ...}                 the same, given back at once
                     {"do": "check"}                     -> {"digests": {id: digest}}
                     {"do": "drop"}                      -> {}
                     {"do": "leak"}                      a planted leak, -> {"fd"}
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.chaos.models import digest_of
from tests.running import wait_for_end
from weightcached.errors import WeightCacheError

REPLY_SECONDS = 60.0
_ROOT = Path(__file__).parents[2]


class EngineDied(Exception):
    """The engine's process has ended, killed as a rule."""


class EngineFailed(Exception):
    """What a call raised in the engine: `name` is the class."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Nursery:
    """The process that forks engines. `close` ends it."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.engine", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environ},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
            )
        self._socket.settimeout(REPLY_SECONDS)

    def fork(self) -> Engine:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
            pid = int(self._socket.recv(64))
        return Engine(pid, ours)

    def close(self) -> None:
        self._socket.close()
        self.process.wait(REPLY_SECONDS)


class Engine:
    """One engine process, seen from the driver. `held`: id -> what the attach said. Not for several threads at once."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.held: dict[str, dict[str, Any]] = {}
        self._channel = channel
        self._channel.settimeout(REPLY_SECONDS)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """`EngineFailed` for an error of the call, `EngineDied` when there is nobody left to answer."""
        try:
            self._channel.send(json.dumps({"do": do, **arguments}).encode())
            data = self._channel.recv(1 << 16)
        except TimeoutError:
            raise AssertionError(f"engine {self.pid} does not answer {do} {arguments}") from None
        except OSError:
            data = b""
        if not data:
            wait_for_end(self.pid)  # its sockets are closed a moment before
            raise EngineDied
        reply: dict[str, Any] = json.loads(data)
        if "error" in reply:
            raise EngineFailed(reply["error"], reply["text"])
        if do == "attach":
            self.held[str(reply["id"])] = {**reply, **arguments}
        elif do == "drop":
            self.held.clear()
        return reply

    def close(self) -> None:
        self._channel.close()


def nurse(channel: socket.socket) -> socket.socket | None:
    """Forks engines until the driver hangs up. Returns once in each engine, with its socket, and None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the driver knows their ends by their sockets
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 16, 1)
        if not message:
            return None
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            return socket.socket(fileno=fds[0])
        os.close(fds[0])
        channel.send(str(pid).encode())


def serve(channel: socket.socket) -> None:
    """The engine itself."""
    import weightcached

    held: dict[int, weightcached.Weights] = {}
    number = 0
    while message := channel.recv(1 << 16):
        match json.loads(message):
            case {"do": "drop"}:
                held.clear()
                gc.collect()
                reply: dict[str, Any] = {}
            case {"do": "leak"}:
                reply = {"fd": os.memfd_create("weightcached-leak")}
            case {"do": "check"}:
                reply = {"digests": {number: digest_weights(weights) for number, weights in held.items()}}
            case {"do": do, "model": model, "device": device, "wait": wait, "rank": rank}:
                try:
                    weights = weightcached.attach(
                        model,
                        device=device,
                        on_miss="wait" if wait else "fail",
                        timeout=wait or 10.0,
                        tensor_parallel=tuple(rank),
                    )
                except WeightCacheError as error:
                    reply = {"error": type(error).__name__, "text": str(error)}
                else:
                    number += 1
                    reply = {
                        "id": number,
                        "generation": weights.generation,
                        "content": weights.key.content,
                        "digest": digest_weights(weights),
                    }
                    if do == "attach":
                        held[number] = weights
                    del weights
        channel.send(json.dumps(reply).encode())


def digest_weights(weights: Any) -> str:
    """Of names and bytes, as `models.digest_of` makes it of a checkpoint's."""
    return digest_of((name, _bytes_of(tensor)) for name, tensor in weights.items())


def _bytes_of(tensor: Any) -> bytes:
    here = tensor.contiguous().cpu()
    return ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())


def main() -> None:
    import torch  # noqa: F401 - before the first fork

    import weightcached.client.attach  # noqa: F401

    gc.collect()
    gc.freeze()  # what an engine drops it collects without going through all of torch, in pages that it would then copy
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        mine = nurse(channel)
    if mine is not None:
        sys.argv[1:] = ["engine"]  # its role at trace points
        with mine, contextlib.suppress(ConnectionError):
            serve(mine)


if __name__ == "__main__":
    main()
