"""Everything that a chaos run has running: the service under its manager, engines, the tracer, files, the config."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import shutil
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos.engine import Nursery
from tests.chaos.models import ModelFiles, make_models
from tests.chaos.plan import TIGHT
from tests.chaos.tracing import Tracer
from tests.manager import Manager
from tests.running import children_of, open_pidfd
from weightcached.config import ModelConfig
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Request, Status

HOSTS = ["host-0", "host-1"]
READY_SECONDS = 60.0
ASK_SECONDS = 30.0
CUDA_BYTES = 32 << 20  # of a tensor in the models on GPUs, so that one slab shows in what NVML says
# Of a main process: asked to, even before it could listen, a preload that failed at the start, killed.
_ENDS = (0, -signal.SIGTERM, 1, -signal.SIGKILL)
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


class Violation(AssertionError):
    """Something that must never be."""


class World:
    """Starts all of it; `close` ends all of it. `gpus`: names of GPUs to use in the place of host devices."""

    def __init__(self, seed: int, engines: int, gpus: list[str] | None = None) -> None:
        self.others = set(below(os.getpid()))
        _adopt_orphans(True)
        self.gpus = list(gpus or [])
        pair = self.gpus[:2] if len(self.gpus) > 1 else HOSTS
        self.devices = [*self.gpus[:2], *(HOSTS if pair is HOSTS else [])]
        self._folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
        self.runtime_dir = self._folder / "run"
        self.runtime_dir.mkdir(mode=0o700)
        places = [self.devices[0], *pair, (self.gpus or HOSTS)[-1]]
        rng = random.Random(f"bytes {seed}")
        made = make_models(self._folder, places, rng, extra_bytes=CUDA_BYTES if self.gpus else 0)
        self.models = {model.name: model for model in made}
        self.settings: dict[str, dict[str, Any]] = {
            "": {"memory_limit": "32MiB", "ready": "loaded"},
            **{model.name: {"listed": True, "preload": model.preload} for model in made},
        }
        self.tracer = Tracer(self._folder / "trace")
        environ = {
            "WEIGHTCACHED_TRACE": str(self.tracer.path),
            "WEIGHTCACHED_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
        }
        self.manager = Manager(self.runtime_dir, self.config_text(), environ=environ, module="tests.chaos.serve")
        self.nursery = Nursery(environ)
        self.engines = [self.nursery.fork() for _ in range(engines)]
        self.judge = self.nursery.fork()  # an engine that nothing happens to
        self.ends: list[int] = []  # exit statuses of main processes that ended by themselves or were killed
        self._unit = threading.RLock()  # held by whoever ends or starts the main process
        self._closing, self._close = os.pipe()
        self.manager.start()
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="keeper")
        self._keeping = self._keeper.submit(self._keep)

    # The unit.

    def config_text(self) -> str:
        known = ModelConfig.model_fields
        whole = dict(self.settings[""])
        if self.gpus:  # whose models are larger than the limits of a plan
            whole["memory_limit"] = "2GiB"
        if whole["memory_limit"] == TIGHT:  # a preload for which engines leave no room would end every start
            whole["ready"] = "listening"
        lines = [f"{key} = {json.dumps(value)}" for key, value in whole.items()]
        lines.insert(0, f"devices = {json.dumps(self.devices)}")
        for model in self.models.values():
            settings = self.settings[model.name]
            if not settings["listed"]:
                continue
            lines += ["", "[[model]]", f'name = "{model.name}"', f'checkpoint = "{model.folder}"']
            lines += [f"devices = {json.dumps(list(model.devices))}", f"tensor_parallel = {len(model.devices)}"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items() if key in known]
        return "\n".join([*lines, ""])

    def configure(self, model: str, key: str, value: Any) -> None:
        """Changes one setting; a service that reads meanwhile reads all of the old file or all of the new one."""
        self.settings[model][key] = value
        fresh = self._folder / "config.new"
        fresh.write_text(self.config_text())
        fresh.rename(self.manager.config)

    def restart(self) -> None:
        """As ``systemctl restart``."""
        with self._unit:
            process = self.manager.process
            assert process is not None
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            self._start_again()

    def ready(self) -> None:
        """Returns when a main process has reported ready, whichever start that takes."""
        end = time.monotonic() + READY_SECONDS
        while True:
            with self._unit:
                pass  # nobody is in the middle of a restart
            try:
                self.manager.wait_for("READY=1", max(end - time.monotonic(), 0.1))
                return
            except AssertionError:
                self.check()
                if time.monotonic() > end:
                    raise

    def _keep(self) -> None:
        """``Restart=on-failure`` without a limit: starts the main process again whenever it has ended."""
        while True:
            with self._unit:
                pid = self.manager.pid
            with contextlib.suppress(ProcessLookupError), open_pidfd(pid) as pidfd:
                readable, _, _ = select.select([pidfd, self._closing], [], [])
                if self._closing in readable:
                    return
            with self._unit:
                if self.manager.pid == pid:
                    self._start_again()

    def _start_again(self) -> None:
        code = self.manager.ended()
        self.ends.append(code)
        assert code in _ENDS, f"the main process ended with {code}:\n{self.manager.log[-4000:]}"
        self.manager.start()

    def check(self) -> None:
        """Raises what has ended one of the threads, if anything has."""
        self.tracer.check()
        if self._keeping.done():
            self._keeping.result()

    # Who is there.

    def ask(self, request: Request, timeout: float = ASK_SECONDS) -> dict[str, Any]:
        """One request to the service."""
        control = self.runtime_dir / f"{self.manager.instance}.control.sock"
        with Connection.open(control, client="chaos", timeout=timeout) as service:
            answer, fds = service.request(request, timeout=timeout)
            fds.close()
            return answer

    def status(self) -> dict[str, Any]:
        return self.ask(Status())

    def pid_of(self, victim: str, number: int = 0) -> int | None:
        """The process that a blow is meant for, None if there is none now."""
        main = self.manager.pid
        if victim == "main":
            return main
        if victim == "engine":
            return self.engines[number].pid
        parents = [main] if victim != "reader" else [pid for pid in children_of(main) if "loader" in arguments_of(pid)]
        children = [pid for parent in parents for pid in children_of(parent)]
        if victim == "reader":
            return next(iter(children), None)
        wanted = ["worker", self.devices[number % len(self.devices)]] if victim == "worker" else [victim]
        return next((pid for pid in children if set(wanted) <= set(arguments_of(pid))), None)

    def signal(self, victim: str, number: int, what: signal.Signals) -> int | None:
        """Sends a signal to a victim, if there is one; its pid."""
        pid = self.pid_of(victim, number)
        if pid is None or not send(pid, what):
            return None
        return pid

    def revive(self) -> None:
        """Every engine that has ended is followed by another one, which holds nothing."""
        for number, engine in enumerate(self.engines):
            if not alive(engine.pid):
                engine.close()
                self.engines[number] = self.nursery.fork()
        if not alive(self.judge.pid):
            self.judge.close()
            self.judge = self.nursery.fork()

    def require_right(self, model: str, rank: int, got: dict[str, Any]) -> None:
        """`Violation` unless what an engine got are a rank's bytes of one of the model's variants."""
        files: ModelFiles = self.models[model]
        digests = files.contents.get(got["content"])
        if digests is None:
            raise Violation(f"{model} generation {got['generation']} has a content that no file ever had: {got}")
        if digests[rank] != got["digest"]:
            raise Violation(
                f"{model} rank {rank} generation {got['generation']} has other bytes than its content: {got}"
            )

    def close(self) -> None:
        self.tracer.disarm()
        with contextlib.ExitStack() as stack:
            stack.callback(_adopt_orphans, False)
            stack.callback(shutil.rmtree, self._folder)
            stack.callback(self.tracer.close)
            stack.callback(self.manager.abandon)
            stack.callback(self.nursery.close)
            for engine in [*self.engines, self.judge]:
                stack.callback(engine.close)
                send(engine.pid, signal.SIGKILL)
            os.close(self._close)
            self._keeper.shutdown()
            os.close(self._closing)


def _adopt_orphans(on: bool) -> None:
    """Whoever loses its parent becomes a child of this process, and is found."""
    assert ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on)) == 0


def below(pid: int) -> list[int]:
    """Every process below that one, however deep."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                    found += [child, *below(child)]
    return found


def send(pid: int, what: signal.Signals) -> bool:
    """Signals one process; False if it has ended. After SIGKILL it has, when this returns."""
    try:
        with open_pidfd(pid) as pidfd:
            signal.pidfd_send_signal(pidfd, what)
            if what == signal.SIGKILL:
                assert select.select([pidfd], [], [], READY_SECONDS)[0], f"process {pid} cannot be killed"
    except ProcessLookupError:
        return False
    return True


def arguments_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
