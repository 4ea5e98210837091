"""client/leases.py: what an engine holds, in the eyes of workers and operators, through outages."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.lending import GONE, SECONDS, Host, Listener, held_lease, lines, tell, wait_for
from tests.conftest import MakeCheckpoint
from tests.manager import Manager
from tests.worker.process import ROOT
from weightcached import attach
from weightcached.client import leases
from weightcached.errors import DeviceError
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Status

ENGINE = """
import hashlib, sys, torch, weightcached
weights = weightcached.attach(sys.argv[1], device="host-0")
tensors = list(weights.values())
def digest():
    return hashlib.sha256(b"".join(bytes(tensor.flatten().view(torch.uint8).numpy()) for tensor in tensors)).hexdigest()
print(digest(), flush=True)
for line in sys.stdin:
    print(digest(), flush=True)
"""


class Engine:
    """A process that has a model attached and computes over all of its bytes when asked."""

    def __init__(self, model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, model],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.digest = self._line()

    @property
    def pid(self) -> int:
        return self.process.pid

    def compute(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> str:
        """Lets it end by itself; what it has written to stderr."""
        _, errors = self.process.communicate(timeout=SECONDS)
        assert self.process.returncode == 0, errors
        return errors

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def engine(model: str) -> Iterator[Engine]:
    started = Engine(model)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.communicate()


@pytest.fixture
def config(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> str:
    """One small model on host-0."""
    path = make_checkpoint(tmp_path / "small.safetensors", {"a": ("U8", (1 << 20,), os.urandom(1 << 20))})
    return f'devices = ["host-0"]\n[[model]]\nname = "small"\ncheckpoint = "{path}"\n'


@pytest.fixture
def service(runtime_dir: Path, config: str) -> Iterator[Manager]:
    """A whole service under a service manager, ready."""
    manager = Manager(runtime_dir, config)
    yield manager.start().ready()
    manager.abandon()


def shards(service: Manager) -> list[dict[str, Any]]:
    """The worker's word, for which no process is started: while it is being replaced the answer takes as long."""
    with Connection.open(service.runtime_dir / "host-0.sock", device="host-0", timeout=SECONDS) as worker:
        status, fds = worker.request(Status(), timeout=SECONDS)
        fds.close()
        return list(status["shards"])


def wait_shards(service: Manager, wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """The shards, once they are as wanted."""
    end = time.monotonic() + SECONDS
    while not wanted(found := shards(service)):
        assert time.monotonic() < end, found
    return found


class TestWholeService:
    """What an operator sees."""

    def test_an_engine_outlives_its_worker(self, service: Manager) -> None:
        """The worker is killed: the engine computes with the same bytes, an eviction that comes at once is refused with
        its pid, and its lease is in `status` as before, by the same pid since the same time. When it ends, so does the
        lease."""
        with engine("small") as running:
            (before,) = shards(service)[0]["leases"]
            old = service.process_of_role("worker")
            os.kill(old, signal.SIGKILL)
            assert running.compute() == running.digest
            refused = service.ctl("evict", "small", code=5)
            assert f"pid {running.pid} (" in refused
            (after,) = shards(service)[0]["leases"]
            assert service.process_of_role("worker") != old
            assert {**after, "id": 0} == {**before, "id": 0}
            assert (after["pid"], after["nbytes"], after["ended"]) == (running.pid, 1 << 20, False)
            assert after["uid"] == os.getuid()
            assert running.compute() == running.digest
            told = running.end().splitlines()
        assert told == [GONE, "weightcached: the service of host-0 is back; leases renewed: 1"]
        wait_shards(service, lambda found: found[0]["leases"] == [])
        service.ctl("evict", "small")
        service.stop()

    def test_an_engine_outlives_its_service(self, service: Manager) -> None:
        """The service is stopped, which drops the cache, and another is started later: the engine has the same bytes,
        and shows with them as a holder of a draining shard, beside the one that was loaded anew under the same number.
        Both count. When the engine ends its memory is free."""
        with engine("small") as running:
            (lease,) = shards(service)[0]["leases"]
            service.stop()
            assert running.compute() == running.digest
            service.start().ready()
            cached, draining = wait_shards(service, lambda found: len(found) == 2)
            assert (cached["state"], cached["generation"], cached["leases"]) == ("cached", 1, [])
            assert (draining["state"], draining["generation"], draining["nbytes"]) == ("draining", 1, 1 << 20)
            assert [(item["pid"], item["since"]) for item in draining["leases"]] == [(running.pid, lease["since"])]
            text = service.ctl("status")
            assert "host-0: 2.0 MiB of" in text
            row = next(line.split() for line in text.splitlines() if "draining" in line)
            assert row[:3] == ["small", "host-0", "-"]
            assert text.splitlines()[-1].split()[0] == str(running.pid)
            assert running.compute() == running.digest
            running.end()
        wait_shards(service, lambda found: len(found) == 1)
        service.stop()

    def test_a_lease_returns_to_what_was_kept(self, service: Manager) -> None:
        """The service is restarted, then killed and started; each time its successor gets the shard back from the
        service manager, and the lease is on it as before."""
        with engine("small") as running:
            (before,) = shards(service)[0]["leases"]
            for end in ("restart", "kill"):
                if end == "restart":
                    service.restart().ready()
                else:
                    service.kill()
                    service.start().ready()
                (found,) = wait_shards(service, lambda found: len(found) == 1 and len(found[0]["leases"]) == 1)
                assert found["state"] == "cached"
                assert {**found["leases"][0], "id": 0} == {**before, "id": 0}
                assert running.compute() == running.digest
        service.stop()


class TestAttach:
    """Which attach leaves a lease to renew."""

    def test_a_copy_takes_no_lease(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """`mode="copy"` has nothing to renew, and so gives the keeper nothing to do."""
        kept: list[Any] = []
        monkeypatch.setattr(leases, "keep", lambda *line_and_grant: kept.append(line_and_grant))
        attach("tiny", device="host-0", mode="copy").close()
        assert kept == []
        attach("tiny", device="host-0").close()
        assert len(kept) == 1

    def test_an_attach_that_fails_leaves_none(
        self, host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What cannot be mapped is not held, whoever keeps the error, and it disturbs no other lease: those are renewed
        as ever, and nothing is said of a service that is gone."""
        kept: list[Any] = [attach("other", device="host-0")]

        def full(*_: object) -> None:
            raise DeviceError(device="host-0", problem="no room to map it")

        with monkeypatch.context() as patch:
            patch.setattr("weightcached.client.attach.map_slabs", full)
            for _ in range(5):
                with pytest.raises(DeviceError) as caught:
                    attach("tiny", device="host-0")
                kept.append(caught.value)
        host.wait_leases(1)
        host.kill()
        host.replace()
        host.wait_leases(1)
        wait_for(caplog, "is back")
        assert lines(caplog) == [GONE, "weightcached: the service of host-0 is back; leases renewed: 1"]
        kept.clear()
        host.wait_leases(0)


class TestLost:
    """The device loses the memory."""

    def test_weights_say_why(
        self, listen: Callable[[], Listener], caplog: pytest.LogCaptureFixture, host: Host
    ) -> None:
        """The worker's word reaches `Weights.lost`, once in the log; other events mean nothing; closed weights and
        copies are never lost."""
        weights = attach("tiny", device="host-0")
        copies = attach("tiny", device="host-0", mode="copy")
        assert weights.lost is None
        host.worker.tell({"lost": {"reason": "fallen off the bus (Xid 79)"}})
        wait_for(caplog, "the weights of tiny on host-0 are lost: fallen off the bus (Xid 79)")
        assert weights.lost == "fallen off the bus (Xid 79)"
        assert copies.lost is None
        weights.close()
        assert weights.lost is None
        assert host.worker.dropped() in (("tiny", 1), ("other", 1))
        assert host.worker.dropped() in (("tiny", 1), ("other", 1))

    def test_lost_memory_is_held_too(self, listen: Callable[[], Listener], caplog: pytest.LogCaptureFixture) -> None:
        """It is mapped all the same, so its lease is renewed as any other. That it is lost is logged once, with the
        first reason; other events mean nothing."""
        listener = listen()
        lease, peer = held_lease(listener)
        for event in ({"what": "novelty"}, {"what": "lost", "reason": "gone"}, {"what": "lost", "reason": "again"}):
            tell(peer, {"event": event})
        peer.close()
        peer, _ = listener.renew()
        tell(peer, {"event": {"what": "lost", "reason": "still"}})
        wait_for(caplog, "is back")
        assert (lease.lost, lease.ended) == ("gone", False)
        assert lines(caplog)[:2] == ["weightcached: the weights of tiny on host-0 are lost: gone", GONE]
        assert len(lines(caplog)) == 3
