"""engines/policy.py: the table of docs/engines/policies.md, cell by cell: a situation, a policy, what the engine does.

A real worker or service on host-0, and a torch module of one weight as the engine.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.handmade import RunningWorker
from tests.client.lending import GONE, wait_for
from tests.conftest import MakeCheckpoint
from tests.engines.situations import (
    POLICIES,
    VALUES,
    Caplog,
    config,
    never,
    options,
    quick,
    running,
    tensors_in,
    warned_once,
)
from tests.engines.tiny import attached, cache, run, said, wanted
from tests.manager import Manager
from tests.running import RunningService
from weightcached.engines.policy import Options, find, without_cache
from weightcached.errors import (
    EngineError,
    KeyMismatch,
    ModelFailed,
    ModelNotLoaded,
    NoSuchDevice,
    NoSuchModel,
    OtherContent,
    PeerRefused,
    TimedOut,
    WeightCacheError,
    WrongDevice,
)
from weightcached.paths import socket_path


@pytest.fixture(autouse=True)
def _logged(caplog: Caplog) -> None:
    caplog.set_level("INFO", "weightcached")


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
        with running(RunningService(runtime_dir, config(folder, "preload = false")).ready()) as service:
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


def test_every_error_that_falls_back_is_of_the_tree() -> None:
    """What is raised under every policy is all the rest: no class falls back by being a subclass of a wrong one."""
    from weightcached.engines.policy import FALLS_BACK

    for error in (PeerRefused, WrongDevice, NoSuchDevice, EngineError):
        assert not issubclass(error, FALLS_BACK)
    assert all(issubclass(error, WeightCacheError) for error in FALLS_BACK)


def test_an_endless_timeout_is_a_long_one(worker: RunningWorker, folder: Path, caplog: Caplog) -> None:
    """Options that an adapter makes by itself may say so: sockets take no infinity."""
    assert find(wanted(folder), Options(timeout=float("inf"))) is None
    warned_once(caplog, "no model")
