"""engines/policy.py: the table of docs/engines/policies.md, cell by cell: a situation, a policy, what the engine does.

A real worker or service on host-0, and a torch module of one weight as the engine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.tracing import Tracer, Trap
from tests.client.handmade import DEVICE, RunningWorker
from tests.client.lending import GONE, wait_for
from tests.conftest import MakeCheckpoint
from tests.engines.tiny import FILE, attached, cache, from_disk, run, said, shard_of, wanted
from tests.manager import Manager
from tests.running import RunningService
from weightcached.engines.policy import Options, find, without_cache
from weightcached.errors import (
    ConnectionFailed,
    EngineError,
    KeyMismatch,
    ModelFailed,
    ModelLoading,
    ModelNotLoaded,
    NoSuchDevice,
    NoSuchModel,
    OtherContent,
    PeerRefused,
    ServiceNotRunning,
    TimedOut,
    TooManyConnections,
    WeightCacheError,
    WrongDevice,
)
from weightcached.paths import socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Load, Publish, Reserve

OTHER_UID = 54321
POLICIES = ("wait", "start", "fallback", "fail")
VALUES = [1.0, 2.0, 3.0, 4.0]
StartWorker = Callable[[], RunningWorker]
Caplog = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def _logged(caplog: Caplog) -> None:
    caplog.set_level("INFO", "weightcached")


@pytest.fixture
def folder(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """The engine's checkpoint."""
    return tensors_in(tmp_path / "tiny", make_checkpoint, *VALUES)


def tensors_in(folder: Path, make_checkpoint: MakeCheckpoint, *values: float) -> Path:
    """A checkpoint of one tensor; those of equally many values have equal headers and sizes."""
    make_checkpoint(folder / FILE, {"w": ("F32", (len(values),), struct.pack(f"<{len(values)}f", *values))})
    return folder


def config(folder: Path, *more: str) -> str:
    """Of a service that has the checkpoint as a model."""
    model = ["[[model]]", 'name = "tiny"', f'checkpoint = "{folder}"', *more]
    return "\n".join(['devices = ["host-0"]', 'ready = "listening"', *model, ""])


def options(on_miss: str, timeout: float = 30.0, **more: Any) -> Options:
    return Options.parse({"on_miss": on_miss, "timeout": timeout, **more})


def never(instance: str, timeout: float) -> None:
    raise AssertionError(f"weightcached@{instance} was to be started")


def warned_once(caplog: Caplog, reason: str) -> None:
    """One warning, which names engine and checkpoint, says what is done, and why."""
    (warning,) = said(caplog)
    assert warning.startswith("tiny 1.0: /"), warning
    assert "/tiny is loaded from disk: " in warning, warning
    assert reason in warning, warning


def wait_until_it_listens(path: Path, seconds: float = 30.0) -> None:
    """Nothing announces that: between bind(2) and listen(2) the socket is there, and refuses."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            try:
                client.connect(str(path))
                return
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.001)  # as early as can be; the service says nothing before
    raise AssertionError(f"nobody listens at {path}")


@contextlib.contextmanager
def quick(seconds: float = 10.0) -> Iterator[None]:
    """What is inside takes far less than the 30 s that a wait would."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


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

        with _service(RunningService(runtime_dir, config(folder, "preload = false")).ready()) as service:
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


class TestAbsent:
    """A service is there, and has not got the model."""

    @pytest.fixture
    def service(self, folder: Path, runtime_dir: Path) -> Iterator[RunningService]:
        """It has the files in its config, and loads them on demand."""
        service = RunningService(runtime_dir, config(folder, "preload = false")).ready()
        yield service
        gc.collect()
        service.stop()

    @pytest.mark.usefixtures("service")
    def test_fail(self, folder: Path, caplog: Caplog) -> None:
        """Raised at once, by files as by name: it is configured, and how it is loaded."""
        for asked, name in ((wanted(folder), None), (wanted(None), "tiny")):
            with quick(), pytest.raises(ModelNotLoaded, match="weightcachectl load tiny"):
                find(asked, options("fail", model=name))
        assert not said(caplog)

    @pytest.mark.usefixtures("service")
    @pytest.mark.parametrize("on_miss", ["wait", "start"])
    def test_loaded_on_demand(self, folder: Path, on_miss: str, caplog: Caplog) -> None:
        """Who waits for files that are in the config has them loaded."""
        module = attached(wanted(folder), options(on_miss), never)
        assert module is not None and run(module) == VALUES
        assert not said(caplog)

    def test_fallback(self, service: RunningService, folder: Path, caplog: Caplog) -> None:
        """A miss at once: it is not loaded twice, by the service and by the engine."""
        with quick():
            assert find(wanted(folder), options("fallback")) is None
        warned_once(caplog, "tiny is configured for host-0 but not loaded")
        assert service.model("tiny")["state"] == "absent"

    def test_a_load_that_failed(self, runtime_dir: Path, folder: Path, caplog: Caplog) -> None:
        """Files that the service could not load are a miss with its reason; who waits is told at once."""
        (folder / "config.json").write_text("{")
        with _service(RunningService(runtime_dir, config(folder, "preload = false")).ready()) as service:
            for on_miss in ("wait", "start"):
                with quick(), pytest.raises(ModelFailed, match=r"tiny is not on host-0: .*config\.json"):
                    find(wanted(folder), options(on_miss), start=never)
            (folder / "config.json").unlink()
            assert find(wanted(folder), options("fallback")) is None
            warned_once(caplog, "config.json")
            assert service.model("tiny")["state"] == "failed"

    @pytest.mark.parametrize("on_miss", ["wait", "start"])
    def test_nobody_will_load_it(self, worker: RunningWorker, folder: Path, on_miss: str) -> None:
        """A layout that nobody publishes is waited for in vain; the error says what is there, and what would help."""
        cache(worker, folder, "other", key={"layout": "another-engine"})
        text = r"there: other; on_miss='fallback' would load it from disk and publish it$"
        with pytest.raises(TimedOut, match=text):
            find(wanted(folder, "tiny-1/0"), options(on_miss, 0.3), start=never)
        with pytest.raises(TimedOut, match=r"would load it from disk$"):
            find(wanted(folder, "tiny-1/0"), options(on_miss, 0.3, publish=False), start=never)

    def test_unknown(self, worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
        """Files that nobody knows of: raised, or a miss at once with a warning that says what is there."""
        worker.models(known={"state": "absent"})
        with quick(), pytest.raises(NoSuchModel, match=r"no model .*/tiny on host-0; there: none"):
            find(wanted(folder), options("fail"))
        with quick():
            assert find(wanted(folder), options("fallback")) is None
        warned_once(caplog, "no model ")

    def test_nothing_to_compare_with(self, worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
        """An engine without files gets nothing by the name that it would publish under: these may be other weights."""
        cache(worker, folder, "tiny-1")
        for on_miss in ("wait", "start", "fail"):
            with pytest.raises(EngineError, match="no files on disk to compare the cache with; name the cached model"):
                find(wanted(None), options(on_miss), start=never)
        assert find(wanted(None), options("fallback")) is None
        (warning,) = said(caplog)
        assert warning.startswith("tiny 1.0: tiny-1 is loaded from disk: no files on disk")
        assert attached(wanted(None), options("fallback", model="tiny-1")) is not None


class TestMismatch:
    """The files are cached, but not as the engine needs them, or others are."""

    @pytest.mark.parametrize("on_miss", ["wait", "start", "fail"])
    @pytest.mark.parametrize("named", [None, "tiny"])
    def test_another_cut(
        self, worker: RunningWorker, folder: Path, on_miss: str, named: str | None, caplog: Caplog
    ) -> None:
        """Raised at once, under every policy that uses no disk, with both values of each field."""
        cache(worker, folder, key={"tensor_parallel_size": 2, "dtype": "bfloat16"})
        with quick(), pytest.raises(KeyMismatch) as caught:
            find(wanted(folder), options(on_miss, model=named), start=never)
        assert caught.value.differences == {"tensor_parallel_size": [1, 2], "dtype": ["float32", "bfloat16"]}
        assert not said(caplog)

    def test_another_cut_fallback(self, worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
        """The engine loads from disk, and the warning says what differs."""
        cache(worker, folder, key={"tensor_parallel_size": 2})
        with quick():
            assert find(wanted(folder), options("fallback")) is None
        warned_once(caplog, "tiny is cached, but not as asked for: tensor_parallel_size [1, 2]")

    def test_another_layout(self, worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
        """After an upgrade of the engine, say: the layout is named in the error and in the warning. Who waits does so
        until the timeout, since an engine may publish the right one."""
        cache(worker, folder, key={"layout": "tiny-0/0"})
        asked = wanted(folder, "tiny-1/0")
        with quick(), pytest.raises(KeyMismatch, match="layout ") as caught:
            find(asked, options("fail"))
        assert caught.value.differences == {"layout": ["tiny-1/0", "tiny-0/0"]}
        with quick():
            assert find(asked, options("fallback")) is None
        warned_once(caplog, "tiny is cached, but not as asked for: layout ['tiny-1/0', 'tiny-0/0']")
        for on_miss in ("wait", "start"):
            with pytest.raises(TimedOut, match="there: tiny"):
                find(asked, options(on_miss, 0.3), start=never)

    def test_other_bytes(
        self, worker: RunningWorker, folder: Path, tmp_path: Path, make_checkpoint: MakeCheckpoint, caplog: Caplog
    ) -> None:
        """A fine-tune with the headers of what is cached is never given its base model, by name either; the file that
        differs is named."""
        base = tensors_in(tmp_path / "base", make_checkpoint, 9.0, 9.0, 9.0, 9.0)
        cache(worker, base, "base")
        for name in (None, "base"):
            with pytest.raises(OtherContent, match=r"tiny/model\.safetensors is not what base on host-0 was loaded"):
                find(wanted(folder), options("fail", model=name))
            for on_miss in ("wait", "start"):
                with pytest.raises(TimedOut, match="is not what base on host-0 was loaded from"):
                    find(wanted(folder), options(on_miss, 0.3, model=name), start=never)
            assert find(wanted(folder), options("fallback", model=name)) is None
            warned_once(caplog, "model.safetensors is not what base on host-0 was loaded from")
            caplog.clear()


class TestWrongDevice:
    """A mistake, or somebody's trick: never a reason to go on."""

    @pytest.mark.parametrize("on_miss", POLICIES)
    def test_another_devices_worker(self, worker: RunningWorker, folder: Path, on_miss: str, caplog: Caplog) -> None:
        """At the socket of host-1 the worker of host-0 answers: raised under every policy, with both names."""
        cache(worker, folder)
        socket_path("host-1").symlink_to(worker.path)
        with quick(), pytest.raises(WrongDevice, match=r"host-1.*host-0"):
            find(wanted(folder, device="host-1"), options(on_miss), start=never)
        assert not said(caplog)

    @pytest.mark.parametrize("on_miss", POLICIES)
    def test_no_such_device(self, worker: RunningWorker, folder: Path, on_miss: str, caplog: Caplog) -> None:
        """A device that this process does not see: raised under every policy."""
        missing = f"cuda:{torch.cuda.device_count()}"
        with quick(), pytest.raises(NoSuchDevice, match=missing):
            find(wanted(folder, device=missing), options(on_miss), start=never)
        assert not said(caplog)


class TestUnsupportedQuantisation:
    """The adapter knows that the cache cannot hold what this checkpoint becomes."""

    REASON = EngineError(problem="awq weights are not supported; block-wise FP8 and unquantised ones are")

    @pytest.mark.parametrize("on_miss", ["wait", "start", "fail"])
    def test_raised(self, folder: Path, on_miss: str, caplog: Caplog) -> None:
        """The adapter's reason comes out as it is."""
        with pytest.raises(EngineError, match="awq weights are not supported; block-wise FP8"):
            without_cache(wanted(folder), options(on_miss), self.REASON)
        assert not said(caplog)

    def test_fallback(self, folder: Path, caplog: Caplog) -> None:
        """One warning with it, and the engine loads from disk."""
        without_cache(wanted(folder), options("fallback"), self.REASON)
        warned_once(caplog, "awq weights are not supported; block-wise FP8")


class TestAttached:
    """What happens to a service after an engine has attached is the same under every policy."""

    @pytest.mark.parametrize("on_miss", POLICIES)
    def test_died_and_restarted(self, runtime_dir: Path, folder: Path, on_miss: str, caplog: Caplog) -> None:
        """The engine goes on over its mapping while the service is dead, logged once. When it is back the lease comes
        back by itself, logged once, and a new engine attaches to the same shard."""
        manager = Manager(runtime_dir, config(folder, "preload = true")).start().ready()
        try:
            manager.ctl("wait", "tiny")
            module = attached(wanted(folder), options(on_miss), never)
            assert module is not None
            manager.wait_stored(2)
            manager.kill()
            wait_for(caplog, GONE)
            assert run(module) == VALUES

            manager.start().ready()
            wait_for(caplog, "the service of host-0 is back; leases renewed: 1")
            assert run(module) == VALUES
            assert said(caplog) == [GONE, "weightcached: the service of host-0 is back; leases renewed: 1"]
            (shard,) = manager.status()["devices"][0]["shards"]
            assert [lease["pid"] for lease in shard["leases"]] == [os.getpid()]
            again = attached(wanted(folder), options(on_miss), never)
            assert again is not None and run(again) == VALUES
            del module, again
            gc.collect()
            manager.stop()
        finally:
            manager.abandon()

    def test_a_worker_that_ends_in_the_middle(
        self, worker: RunningWorker, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Caplog
    ) -> None:
        """A connection that is lost is no miss for a fallback: the next worker has the same shards, and is asked."""
        from weightcached.engines import policy
        from weightcached.errors import ConnectionLost

        cache(worker, folder)
        real, asked = policy.attach, []

        def once_lost(*arguments: Any, **more: Any) -> Any:
            asked.append(more["on_miss"])
            if len(asked) == 1:
                raise ConnectionLost(path=str(worker.path), problem="closed by the other side")
            return real(*arguments, **more)

        monkeypatch.setattr(policy, "attach", once_lost)
        assert attached(wanted(folder), options("fallback")) is not None
        assert asked == ["fail", "fail"] and not said(caplog)


@pytest.mark.parametrize("on_miss", POLICIES)
@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
def test_a_hit(worker: RunningWorker, folder: Path, on_miss: str, mode: str, caplog: Caplog) -> None:
    """Under every policy the cached weights are used, without a warning; a copy holds no lease."""
    cache(worker, folder)
    module = attached(wanted(folder), options(on_miss, mode=mode), never)
    assert module is not None and run(module) == VALUES
    assert worker.leases() == ([os.getpid()] if mode == "zero_copy" else [])
    assert not said(caplog)


@contextlib.contextmanager
def _service(service: RunningService) -> Iterator[RunningService]:
    try:
        yield service
        gc.collect()
        service.stop()
    finally:
        service.abandon()


def test_every_error_that_falls_back_is_of_the_tree() -> None:
    """What is raised under every policy is all the rest: no class falls back by being a subclass of a wrong one."""
    from weightcached.engines.policy import FALLS_BACK

    for error in (PeerRefused, WrongDevice, NoSuchDevice, EngineError):
        assert not issubclass(error, FALLS_BACK)
    assert all(issubclass(error, WeightCacheError) for error in FALLS_BACK)


class TestStuckService:
    """The worker answers, the service does not: it only knows what is configured."""

    @pytest.fixture
    def stuck(self, folder: Path, runtime_dir: Path) -> Iterator[None]:
        service = RunningService(runtime_dir, config(folder, "preload = false")).ready()
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


def test_an_endless_timeout_is_a_long_one(worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
    """Options that an adapter makes by itself may say so: sockets take no infinity."""
    assert find(wanted(folder), Options(timeout=float("inf"))) is None
    warned_once(caplog, "no model")
