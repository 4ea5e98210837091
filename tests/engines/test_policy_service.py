"""engines/policy.py: the rows of docs/engines/policies.md in which the service cannot be asked, or is not done yet.

A real worker or service on host-0, and a torch module of one weight as the engine.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.tracing import Tracer, Trap
from tests.client.handmade import DEVICE, RunningWorker
from tests.engines.situations import (
    POLICIES,
    VALUES,
    Caplog,
    config,
    never,
    options,
    quick,
    running,
    wait_until_it_listens,
    warned_once,
)
from tests.engines.tiny import FILE, attached, cache, from_disk, run, said, shard_of, wanted
from tests.running import RunningService
from weightcached.engines import policy
from weightcached.engines.policy import find
from weightcached.errors import (
    ConnectionFailed,
    ModelElsewhere,
    ModelLoading,
    PeerRefused,
    ServiceNotRunning,
    TimedOut,
    TooManyConnections,
)
from weightcached.paths import socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Load, Publish, Reserve

OTHER_UID = 54321
StartWorker = Callable[[], RunningWorker]


@pytest.fixture(autouse=True)
def _logged(caplog: Caplog) -> None:
    caplog.set_level("INFO", "weightcached")


@pytest.fixture(params=["nothing", "stale socket"])
def no_service(runtime_dir: Path, request: pytest.FixtureRequest) -> Path:
    """Nobody listens: there is no socket, or one that refuses, whose service was killed."""
    if request.param == "stale socket":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
            stale.bind(str(socket_path(DEVICE)))
    return runtime_dir


@pytest.mark.usefixtures("no_service")
class TestNoService:
    """No service answers: there is no socket, or one that refuses."""

    def test_fail(self, folder: Path, caplog: Caplog) -> None:
        """Raised at once, with the command that starts one."""
        with quick(), pytest.raises(ServiceNotRunning, match="systemctl --user start"):
            find(wanted(folder), options("fail"))
        assert not said(caplog)

    def test_wait(self, folder: Path, start_worker: StartWorker, caplog: Caplog) -> None:
        """A service that comes in time is used."""
        socket_path(DEVICE).unlink(missing_ok=True)

        def come() -> None:
            cache(start_worker(), folder)

        timer = threading.Timer(0.2, come)
        timer.start()
        module = attached(wanted(folder), options("wait"))
        timer.join()
        assert module is not None and run(module) == VALUES
        assert not said(caplog)

    def test_wait_in_vain(self, folder: Path, caplog: Caplog) -> None:
        """The wait ends with how long it was, for what, and the policy that would have gone on."""
        with pytest.raises(
            TimedOut, match=r"waited 0\.\d s for the service; on_miss='fallback' would load it from disk"
        ):
            find(wanted(folder), options("wait", 0.3))
        assert not said(caplog)

    def test_start(self, folder: Path, runtime_dir: Path, caplog: Caplog) -> None:
        """The service is started, under the name that the options give, and what it loads is waited for."""
        asked: list[str] = []
        started: list[RunningService] = []

        def start(instance: str, timeout: float) -> None:
            asked.append(instance)
            assert 0 < timeout <= 30
            started.append(RunningService(runtime_dir, config(folder, "preload = true")).ready())

        try:
            module = attached(wanted(folder), options("start", instance="mine"), start)
            assert module is not None and run(module) == VALUES
            assert asked == ["mine"]
            assert not said(caplog)
        finally:
            for service in started:
                service.stop()

    def test_start_fails(self, folder: Path) -> None:
        """What is wrong with starting it is raised, even though the files are there: a start was asked for."""

        def start(instance: str, timeout: float) -> None:
            assert instance == "model"
            raise ConnectionFailed(path="systemd", problem="is not there")

        with pytest.raises(ConnectionFailed, match="systemd: is not there"):
            find(wanted(folder), options("start"), start=start)

    def test_fallback(self, folder: Path, caplog: Caplog) -> None:
        """The engine loads from disk at once, whatever the timeout, and one warning says why."""
        with quick():
            assert find(wanted(folder), options("fallback")) is None
        warned_once(caplog, "no service answers at")
        assert run(from_disk(folder)) == VALUES


class TestRefusedSocket:
    """The socket's other side, or its mode, keeps this user out."""

    @pytest.fixture
    def closed(
        self, worker: RunningWorker, readable: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Path]:
        """The checkpoint. This process is another user, to whom the worker's socket is closed."""
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        runtime_dir.chmod(0o755)
        worker.path.chmod(0o600)
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", "0")
        os.seteuid(OTHER_UID)
        yield readable
        os.seteuid(0)

    @pytest.fixture
    def readable(self, folder: Path) -> Path:
        """The checkpoint, for every user."""
        for path in (folder, *folder.parents):
            if path.owner() == "root" and path.parts[:2] == ("/", "tmp") and len(path.parts) > 2:
                path.chmod(0o755)
        return folder

    @pytest.mark.parametrize("on_miss", ["wait", "start", "fail"])
    def test_closed(self, closed: Path, on_miss: str, caplog: Caplog) -> None:
        """Waiting would not help, nor a start: raised at once, with what the service must allow."""
        with quick(), pytest.raises(ConnectionFailed, match="is closed to uid 54321; its service must list that"):
            find(wanted(closed), options(on_miss), start=never)
        assert not said(caplog)

    def test_closed_fallback(self, closed: Path, caplog: Caplog) -> None:
        """A cache that is not for this user is as good as none."""
        with quick():
            assert find(wanted(closed), options("fallback")) is None
        warned_once(caplog, "is closed to uid 54321")

    @pytest.mark.parametrize("on_miss", POLICIES)
    def test_a_listener_that_is_not_trusted(
        self, worker: RunningWorker, folder: Path, on_miss: str, monkeypatch: pytest.MonkeyPatch, caplog: Caplog
    ) -> None:
        """Somebody else poses as the service: raised under every policy, since that is no miss."""
        cache(worker, folder)
        monkeypatch.setattr("weightcached.wire.connection.trusted_uids", lambda: frozenset({OTHER_UID}))
        with quick(), pytest.raises(PeerRefused):
            find(wanted(folder), options(on_miss), start=never)
        assert not said(caplog)

    def test_no_connection_left(self, worker: RunningWorker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A user with too many connections is refused for now; that is a miss, not an impostor."""

        def refuse(*arguments: object, **more: object) -> None:
            raise TooManyConnections(uid=0, limit=4)

        monkeypatch.setattr(Connection, "open", refuse)
        assert find(wanted(folder), options("fallback")) is None
        with pytest.raises(TooManyConnections):
            find(wanted(folder), options("fail"))
        with pytest.raises(TimedOut, match="a connection"):
            find(wanted(folder), options("wait", 0.3))


class TestLoading:
    """The service is loading these files."""

    @pytest.fixture
    def tracer(self, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
        found = Tracer(runtime_dir / "trace")
        found.arm([Trap("loader.filled", 1, lambda pid: None, freeze=True)])
        monkeypatch.setenv("WEIGHTCACHED_TRACE", str(found.path))
        yield found
        found.close()

    @pytest.fixture
    def loading(self, tracer: Tracer, folder: Path, runtime_dir: Path) -> Iterator[RunningService]:
        """A service in the middle of the load, where it stays until the tracer lets it go on."""
        service = RunningService(runtime_dir, config(folder, "preload = true"))
        assert tracer.wait(30), service.log
        yield service
        tracer.release()
        gc.collect()
        service.stop()

    @pytest.mark.usefixtures("loading")
    def test_fail(self, folder: Path, caplog: Caplog) -> None:
        """Raised at once; that the files are being loaded is said by their path too, not by a model's name alone."""
        with quick(), pytest.raises(ModelLoading, match="tiny is still loading on host-0"):
            find(wanted(folder), options("fail"))
        with quick(), pytest.raises(ModelLoading):
            find(wanted(None), options("fail", model="tiny"))
        assert not said(caplog)

    @pytest.mark.usefixtures("loading")
    @pytest.mark.parametrize("on_miss", ["wait", "start", "fallback"])
    @pytest.mark.parametrize("model", [None, "tiny"])
    def test_waited_for(self, folder: Path, tracer: Tracer, on_miss: str, model: str | None, caplog: Caplog) -> None:
        """Three policies wait for a load that is under way, by files or by name; it is a hit then, and no warning."""
        timer = threading.Timer(0.3, tracer.release)
        timer.start()
        module = attached(wanted(folder), options(on_miss, model=model), never)
        timer.join()
        assert module is not None and run(module) == VALUES
        assert not said(caplog)

    @pytest.mark.usefixtures("loading")
    @pytest.mark.parametrize("on_miss", ["wait", "start"])
    def test_too_slow(self, folder: Path, on_miss: str) -> None:
        """A load that outlasts the timeout ends the wait, which says that it was loading."""
        with pytest.raises(TimedOut, match=r"still loading.*on_miss='fallback' would load it from disk"):
            find(wanted(folder), options(on_miss, 0.3), start=never)

    @pytest.mark.usefixtures("loading")
    @pytest.mark.parametrize("timeout", [0, 0.3])
    def test_too_slow_for_fallback(self, folder: Path, timeout: float, caplog: Caplog) -> None:
        """The engine loads from disk after the timeout, or at once with 0, and the warning says it was loading."""
        with quick():
            assert find(wanted(folder), options("fallback", timeout)) is None
        warned_once(caplog, "tiny is still loading on host-0")

    def test_a_load_that_fails(self, folder: Path, runtime_dir: Path, tracer: Tracer, caplog: Caplog) -> None:
        """A fallback ends with the load, not with its timeout, and says why that failed."""
        tracer.arm([Trap("loader.planned", 1, lambda pid: None, freeze=True)])

        def spoil() -> None:
            with (folder / FILE).open("ab") as file:
                file.write(b"more")
            tracer.release()

        with running(RunningService(runtime_dir, config(folder, "preload = false")).ready()) as service:
            with Connection.open(service.control) as control:
                control.request(Load("tiny"))[1].close()
            assert tracer.wait(30), service.log
            timer = threading.Timer(0.3, spoil)
            timer.start()
            with quick():
                assert find(wanted(None), options("fallback", model="tiny")) is None
            timer.join()
        (warning,) = said(caplog)
        assert "tiny is not on host-0: " in warning, warning

    def test_a_service_that_starts(self, folder: Path, runtime_dir: Path, tracer: Tracer, caplog: Caplog) -> None:
        """Its socket listens before it knows its models: a fallback waits until it can say, then for the load."""
        tracer.release()
        service = RunningService(runtime_dir, config(folder, "preload = true"))
        try:
            wait_until_it_listens(socket_path(DEVICE))
            module = attached(wanted(folder), options("fallback"))
            assert module is not None and run(module) == VALUES
            assert not said(caplog)
            del module
            gc.collect()
        finally:
            service.ready().stop()

    @pytest.mark.parametrize("published", [True, False])
    def test_another_engine_publishes(
        self, worker: RunningWorker, folder: Path, published: bool, caplog: Caplog
    ) -> None:
        """Room that is reserved under the engine's name is waited for: who has it publishes, or gives up."""
        shard = shard_of(folder, "tiny-1", key={"layout": "tiny-1/0"})
        publisher = Connection.open(worker.path, device=DEVICE)
        publisher.request(Reserve("tiny-1", shard.head.nbytes))[1].close()

        def end() -> None:
            if published:
                publisher.request(Publish(), [item.fileno() for item in (shard.manifest, *shard.slabs)])[1].close()
            publisher.close()

        timer = threading.Timer(0.3, end)
        timer.start()
        began = time.monotonic()
        with quick():
            module = attached(wanted(folder, "tiny-1/0"), options("fallback"))
        assert time.monotonic() - began > 0.25
        timer.join()
        shard.close()
        assert (module is not None and run(module) == VALUES) == published
        assert len(said(caplog)) == (0 if published else 1)


class TestModelElsewhere:
    """A model that the config puts on another device, asked for by its name."""

    @pytest.fixture(autouse=True)
    def elsewhere(self, folder: Path, runtime_dir: Path) -> Iterator[None]:
        text = config(folder, 'devices = ["host-1"]').replace('["host-0"]', '["host-0", "host-1"]', 1)
        with running(RunningService(runtime_dir, text).ready()) as service:
            service.ctl("wait", "tiny", "--timeout", "30")
            yield

    @pytest.mark.parametrize("on_miss", ["wait", "start", "fail"])
    def test_at_once(self, on_miss: str) -> None:
        """There is nothing to wait for, and the error says where it is."""
        with (
            quick(),
            pytest.raises(ModelElsewhere, match="tiny belongs on host-1, and is not on host-0; attach it with"),
        ):
            find(wanted(None), options(on_miss, model="tiny"), start=never)

    def test_fallback(self, folder: Path, caplog: Caplog) -> None:
        """Disk: of these files nothing is on the device."""
        with quick():
            assert find(wanted(folder), options("fallback", model="tiny")) is None
        warned_once(caplog, "no model tiny on host-0")


class TestStuckService:
    """The worker answers, the service does not: it only knows what is configured."""

    @pytest.fixture
    def stuck(self, folder: Path, runtime_dir: Path) -> Iterator[None]:
        service = RunningService(runtime_dir, config(folder, "preload = false")).ready()
        service.status()  # its worker answers by then, which this is about: a service is ready before
        os.kill(service.process.pid, signal.SIGSTOP)
        yield
        os.kill(service.process.pid, signal.SIGCONT)
        service.stop()

    @pytest.mark.usefixtures("stuck")
    def test_fallback(self, folder: Path, caplog: Caplog) -> None:
        """The timeout holds, but for a moment in which a better reason is asked for."""
        with quick(6):
            assert find(wanted(folder), options("fallback", timeout=0.5)) is None
        warned_once(caplog, "no model")

    @pytest.mark.usefixtures("stuck")
    def test_no_time_left(self, folder: Path, caplog: Caplog, monkeypatch: pytest.MonkeyPatch) -> None:
        """The service has had all of it, and the worker is not asked again in time: the reason is still the miss."""

        def late(device: str, end: float) -> Any:
            raise TimedOut(path=device, seconds=0.5, waited_for="the reply to status")

        monkeypatch.setattr(policy, "worker_status", late)
        assert find(wanted(folder), options("fallback", timeout=0.5)) is None
        warned_once(caplog, "no model")
