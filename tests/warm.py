"""A Python that has imported torch once and forks a process for each program, which then need not import it again.

An import of torch takes longer than most of the programs that tests start. Each program still has a process, arguments,
an environment and a folder of its own; only what is named is imported before the fork, and nothing of weightcached.

``python tests/warm.py FD MODULE...``, and over the socket FD:

    to it       {"arguments", "environ", "cwd"} + stdout, stderr and a pipe   -> the pid
    the pipe    the exit status, as `subprocess` has it
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

START_SECONDS = 60.0


class Program:
    """A program on its way. `wait` must be called."""

    def __init__(self, channel: socket.socket, arguments: tuple[str, ...], cwd: Path, environ: dict[str, str]) -> None:
        self._arguments = list(arguments)
        self._end, theirs = os.pipe()
        self._output = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed by `wait`
        job = {"arguments": arguments, "environ": environ, "cwd": str(cwd)}
        try:
            fds = [file.fileno() for file in self._output]
            socket.send_fds(channel, [json.dumps(job).encode()], [*fds, theirs])
        finally:
            os.close(theirs)
        self.pid = int(channel.recv(64))

    def wait(self, seconds: float) -> subprocess.CompletedProcess[str]:
        """Its exit status and what it has printed. It is killed, and `AssertionError`, when it takes longer."""
        try:
            late = not select.select([self._end], [], [], seconds)[0]
            if late:
                os.kill(self.pid, signal.SIGKILL)
            code = int(os.read(self._end, 64))
            texts = []
            for file in self._output:
                file.seek(0)
                texts.append(file.read().decode())
        finally:
            os.close(self._end)
            for file in self._output:
                file.close()
        assert not late, f"{self._arguments} has not ended within {seconds} s:\n{texts[0]}{texts[1]}"
        return subprocess.CompletedProcess(self._arguments, code, *texts)


class Warm:
    """The process that forks. `close` ends it; programs that still run are not ended."""

    def __init__(self, *modules: str) -> None:
        """`modules`: what it imports. It has one thread for sums, as a process may not fork with several."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env={**environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )
        self._channel.settimeout(START_SECONDS)

    def start(self, *arguments: str, cwd: Path, environ: dict[str, str]) -> Program:
        """`arguments` as of a Python: ``-c CODE``, ``-m MODULE`` or a file, and more. `environ` is all of it."""
        return Program(self._channel, arguments, cwd, environ)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(START_SECONDS)


def serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Forks until the driver hangs up. Returns in each child, with its job and its descriptors; None at the end."""
    running: dict[int, tuple[int, int]] = {}  # pidfd -> pid, the pipe that is told
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                pid, pipe = running.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                os.write(pipe, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(pipe)
                continue
            message, fds, _, _ = socket.recv_fds(channel, 1 << 18, 3)
            if not message:
                return None
            if (pid := os.fork()) == 0:
                for pidfd, (_, pipe) in running.items():
                    os.close(pidfd)
                    os.close(pipe)
                return json.loads(message), fds
            pidfd = os.pidfd_open(pid)
            poll.register(pidfd, select.POLLIN)
            running[pidfd] = (pid, fds.pop())
            for fd in fds:
                os.close(fd)
            channel.send(str(pid).encode())


def become(arguments: list[str], environ: dict[str, str], cwd: str, fds: list[int]) -> None:
    """Runs the program in this process, as the interpreter would."""
    for number, fd in enumerate(fds[:2], 1):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    match arguments:
        case ["-c", code, *rest]:
            sys.argv, sys.path[:0] = ["-c", *rest], [""]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case ["-m", module, *rest]:
            sys.argv, sys.path[:0] = ["-m", *rest], [cwd]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [path, *rest]:
            sys.argv, sys.path[:0] = [path, *rest], [str(Path(path).resolve().parent)]
            runpy.run_path(path, run_name="__main__")


def main() -> None:
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert "weightcached" not in sys.modules
    assert len(os.listdir("/proc/self/task")) == 1  # a lock that another thread holds would stay locked in a child
    gc.collect()
    gc.freeze()  # else a collection in a child goes through all of it, in pages that it then has to copy
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        mine = serve(channel)
    if mine is not None:
        job, fds = mine
        become(job["arguments"], job["environ"], job["cwd"], fds)


if __name__ == "__main__":
    main()
