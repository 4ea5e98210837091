"""One process of a publisher: what it is told, its process group, and what it says.

In its environment:

    WEIGHTCACHED_PUBLISH_NAME      the name to publish under
    WEIGHTCACHED_CHECKPOINT        what to load
    WEIGHTCACHED_DEVICE            where to, as in "host-0"; CUDA_VISIBLE_DEVICES is the same where that is a GPU
    WEIGHTCACHED_RANK, _WORLD      which of how many it is
    WEIGHTCACHED_RUNTIME_DIR       where the workers' sockets are
    WEIGHTCACHED_SPEC              a digest of what the config asks for, and which load of it this is
    RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT       as a child of torchrun has them

`weightcached.publish` carries the spec on in the shard, so that a restart of the service knows whose it is. LOCAL_RANK
is 0 on a GPU, as after ``torchrun --virtual-local-rank``: it is the number of a device among those that the process
sees, and it sees its own alone. RANK and WORLD_SIZE are of all nodes.

Nobody knows how far a load is, so a process is ended when it says nothing at all for SILENT_SECONDS. What it says, on
either output, goes to the log. It ends with the service (`tied`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable

from ..devices import is_host
from ..fds import OwnedFd
from ..paths import runtime_dir
from ..text import describe_exit, printable
from . import tied
from .notify import clean_environment
from .spec import LoadSpec
from .workers import END_SECONDS, gone

SILENT_SECONDS = 1800.0  # an engine compiles and captures for minutes without a word
LAST_LINES = 8  # of what a process said, in the error of its load
# What a launcher has told the service's own process, were it started by one: torch would look for its store there.
_OF_A_LAUNCHER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")
_LINE_BYTES = 2000  # of one line that are kept
_log = logging.getLogger(__name__)


class Rank:
    """One process, its group and what it says."""

    def __init__(self, model: str, spec: LoadSpec, tag: str, index: int) -> None:
        """`tag`: what its shard is to carry as its spec. `index`: of its device among those of the spec."""
        number = spec.first + index
        self.device = spec.devices[index]
        self.killed = False  # by somebody else
        self._model = model
        self._spec = spec
        self._tag = tag
        self._number = number
        self._index = index
        self._process: asyncio.subprocess.Process | None = None
        self._kill_sent = asyncio.Event()
        self._output = Output(f"{model}: rank {number}", self._silent)
        self._was_silent = False
        self._over = False  # from then on its number may be another group's

    def problem(self, what: str) -> str:
        """A sentence about the process, with what it said last."""
        said = f"; it said last: {' | '.join(self._output.last)}" if self._output.last else "; it said nothing"
        return f"the publisher of rank {self._number} on {self.device} {what}{said}"

    async def run(self, meet: tuple[str, int] | None) -> str | None:
        """From start to exit, with all that it has started. Returns what went wrong. `meet`: where the ranks do."""
        command = [sys.executable if self._spec.publisher[0] == "python" else self._spec.publisher[0]]
        command += self._spec.publisher[1:]
        environ = self._environment(meet)
        try:
            with self._output.open() as end:
                _log.info("%s: rank %d to %s by %s", self._model, self._number, self.device, shlex.join(command))
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", tied.__file__, str(os.getpid())),
                    *command,
                    stdin=subprocess.DEVNULL,
                    stdout=end.fileno(),
                    stderr=end.fileno(),
                    env=environ,
                    start_new_session=True,
                )
        except OSError as error:  # no descriptor, no process to be had; that there is no such program `tied` says
            self._output.close()
            return f"the process of rank {self._number} cannot be started: {error.strerror}"
        except BaseException:
            self._output.close()
            raise
        try:
            if self._kill_sent.is_set():  # while it was being started
                self._signal()
            await self._exited(self._process)
            if self._process.returncode:  # what it has started is in vain; the other ranks are told that much sooner
                self._signal()
            await self._emptied()
        finally:
            self._over = True
            self._output.close()
        code = self._process.returncode
        if self._was_silent:
            return self.problem(f"has said nothing for {SILENT_SECONDS:.0f} s and was ended")
        self.killed = code is not None and code < 0 and not self._kill_sent.is_set()
        if code == 0:
            return None
        return self.problem("hangs" if code is None else f"ended by {describe_exit(code)}")

    def kill(self) -> None:
        """Ends it and all that it has started, with SIGKILL; `run` returns soon."""
        if not self._kill_sent.is_set():
            self._kill_sent.set()
            self._signal()

    async def _exited(self, process: asyncio.subprocess.Process) -> None:
        """Returns when it has ended, or hangs after it was killed."""
        ends = [asyncio.create_task(process.wait()), asyncio.create_task(self._kill_sent.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
        if process.returncode is None:
            await gone(process, "publisher")

    async def _emptied(self) -> None:
        """Returns when all that it said is read. What it has left behind would keep its memory: that is ended too."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._output.ended.wait()
        except TimeoutError:
            _log.warning(
                "%s: the publisher of rank %d left processes behind, they are ended", self._model, self._number
            )
            self._signal()

    def _signal(self) -> None:
        """SIGKILL to its group, where that is still its own."""
        # The number stays the group's while one process of it is left, and whoever is left holds the output open.
        left = self._process is not None and (self._process.returncode is None or not self._output.ended.is_set())
        if self._process is not None and left and not self._over:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _silent(self) -> None:
        """Its output calls this: it has said nothing for too long."""
        self._was_silent = True
        self.kill()

    def _environment(self, meet: tuple[str, int] | None) -> dict[str, str]:
        """As the module says; what the service itself has is inherited, what a launcher told it is not."""
        inherited = clean_environment(os.environ).items()
        world = str(self._spec.parallel.world)
        environ = {name: value for name, value in inherited if not name.startswith(_OF_A_LAUNCHER)} | {
            "WEIGHTCACHED_PUBLISH_NAME": self._model,
            "WEIGHTCACHED_DEVICE": self.device,
            "WEIGHTCACHED_RANK": str(self._number),
            "WEIGHTCACHED_WORLD": world,
            "WEIGHTCACHED_CHECKPOINT": str(self._spec.checkpoint),
            "WEIGHTCACHED_RUNTIME_DIR": str(runtime_dir().absolute()),
            "WEIGHTCACHED_SPEC": self._tag,
            "RANK": str(self._number),
            "LOCAL_RANK": str(self._index) if is_host(self.device) else "0",
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(len(self._spec.devices)),
        }
        if meet is not None:
            environ |= {"MASTER_ADDR": meet[0], "MASTER_PORT": str(meet[1])}
        environ.setdefault("PYTHONUNBUFFERED", "1")  # or its lines come when there are 8 KiB of them
        if not is_host(self.device):
            environ["CUDA_VISIBLE_DEVICES"] = self.device
        return environ


class Output:
    """What a process says, line by line into the log. Owns a pipe from `open` to `close`.

    `ended` is set when nobody can write to it any more. `silent()` is called when nothing came for SILENT_SECONDS. Of a
    line that was written over and over with carriage returns, as progress bars are, the last state counts.
    """

    def __init__(self, label: str, silent: Callable[[], None]) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.ended = asyncio.Event()
        self._label = label
        self._silent = silent
        self._pipe: OwnedFd | None = None
        self._rest = b""
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> OwnedFd:
        """Makes the pipe. The end to write to, which the caller closes. `OSError` without descriptors."""
        read, write = os.pipe2(os.O_CLOEXEC)
        self._pipe = OwnedFd(read)
        os.set_blocking(read, False)
        asyncio.get_running_loop().add_reader(read, self._readable)
        self._heard()
        return OwnedFd(write)

    def close(self) -> None:
        """Gives up the pipe and the timer: what is still written is lost. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pipe is not None and not self._pipe.closed:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._pipe.close()

    def _readable(self) -> None:
        assert self._pipe is not None
        try:
            data = os.read(self._pipe.fileno(), 65536)
        except BlockingIOError:
            return
        self._heard()
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE_BYTES:]
        for line in lines if data else [*lines, rest]:
            self._say(line)
        if not data:
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self.ended.set()

    def _say(self, line: bytes) -> None:
        text = printable(line.rstrip().rpartition(b"\r")[2][-_LINE_BYTES:].decode(errors="replace"))
        if text:
            self.last.append(text)
            _log.info("%s: %s", self._label, text)

    def _heard(self) -> None:
        """Something was said: the time of silence begins anew."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._silent)
