"""client/keeper.py: leases outlive their worker. Real workers are killed, and listeners lie, dawdle or flap."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.lending import (
    DATA,
    GONE,
    GRANT,
    SECONDS,
    Host,
    Listener,
    heard,
    held_lease,
    hung_up,
    keepers,
    lines,
    tell,
    wait_for,
)  # fmt: skip
from tests.leaks import NoDescriptorLeaks, open_descriptors
from weightcached import attach
from weightcached.client import keeper
from weightcached.client.keeper import Grant
from weightcached.errors import ConnectionFailed, TooManyConnections, to_wire
from weightcached.wire.connection import Connection


class TestManyLeases:
    """One process with many leases."""

    def test_all_come_back(self, host: Host, caplog: pytest.LogCaptureFixture) -> None:
        """Fifty leases are kept by one thread. After the worker's end all of them are on its successor's shard, by this
        process since the same time, with no descriptor more; the outage is one line in the log, its end another. Each
        ends when its weights are dropped."""
        held = [attach("tiny", device="host-0") for _ in range(50)]
        since = sorted(lease["since"] for lease in host.wait_leases(50))  # of one second, or of two
        time.sleep(1.1 - time.time() % 1)  # the next second, so that a new `since` would be another
        before = open_descriptors()
        host.kill()
        host.replace()
        after = host.wait_leases(50)
        assert {lease["pid"] for lease in after} == {os.getpid()}
        assert sorted(lease["since"] for lease in after) == since
        assert len(host.worker.shards("tiny")) == 1
        assert len(keepers()) == 1
        wait_for(caplog, "is back")
        assert lines(caplog) == [GONE, "weightcached: the service of host-0 is back; leases renewed: 50"]
        assert len(open_descriptors()) <= len(before) + 3  # the new worker's channel and log
        assert all(bytes(weights["w"].numpy()) == DATA for weights in held)
        held.pop()
        host.wait_leases(49)
        held.clear()
        host.wait_leases(0)

    def test_a_worker_that_does_not_have_it_counts_it_once(self, host: Host) -> None:
        """Leases on memory that the new worker was not given are on one draining shard with its bytes."""
        held = [attach("tiny", device="host-0") for _ in range(3)]
        host.kill()
        host.replace(adopt=False)
        host.wait_leases(3)
        (found,) = host.worker.shards("tiny")
        assert (found["state"], found["nbytes"], len(found["leases"])) == ("draining", 4096, 3)
        assert host.worker.status()["held"] == 4096
        held.clear()
        host.wait_leases(0)
        assert host.worker.status()["held"] == 0

    def test_what_is_dropped_in_an_outage_stays_away(self, host: Host) -> None:
        """Of two leases one is dropped while no worker runs: only the other comes back."""
        dropped, kept = attach("tiny", device="host-0"), attach("other", device="host-0")
        host.kill()
        dropped.close()
        host.replace()
        host.wait_leases(1)
        assert [len(host.worker.shards(model)[0]["leases"]) for model in ("tiny", "other")] == [0, 1]
        host.kill()
        host.replace()  # a second time, which proves that nothing of the first is still on its way
        host.wait_leases(1)
        kept.close()
        host.wait_leases(0)


class TestRenewal:
    """One lease, and a worker whose part the test plays."""

    def test_what_is_said_again(self, listen: Callable[[], Listener]) -> None:
        """The renewal carries what was granted; the lease is then the new connection, and ends with it."""
        listener = listen()
        held = [held_lease(listener)]
        held[0][1].close()
        peer, asked = listener.renew()
        assert Grant("host-0", **asked) == GRANT
        assert not held[0][0].ended
        held.clear()
        gc.collect()
        assert hung_up(peer)
        assert listener.quiet(0.2)

    def test_the_socket_may_come_later(
        self, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A service that stops removes its socket: nothing is tried until there is one again, and then at once."""
        begin = Connection.begin
        tries: list[Path] = []
        listener = listen()
        lease, _ = held_lease(listener)
        monkeypatch.setattr(Connection, "begin", lambda path, **more: tries.append(path) or begin(path, **more))
        listener.close()
        wait_for(caplog, GONE)
        assert keepers_cpu(0.5) < 0.03
        assert len(tries) <= 2  # the removal itself may be the second
        listener = listen()
        started = time.monotonic()
        peer, _ = listener.renew()
        assert time.monotonic() - started < 1
        assert not lease.ended
        del lease
        assert hung_up(peer)

    def test_a_dead_socket(self, listen: Callable[[], Listener]) -> None:
        """A service that is killed leaves its socket, at which nobody listens: the next one replaces the file."""
        listener = listen()
        lease, _ = held_lease(listener)
        listener.die()
        assert listener.path.exists()
        assert keepers_cpu(0.3) < 0.03
        peer, _ = listen().renew()
        del lease
        assert hung_up(peer)

    def test_a_worker_that_flaps(self, listen: Callable[[], Listener], caplog: pytest.LogCaptureFixture) -> None:
        """Whoever accepts and dies, before the hello is answered, before the renewal, or after it, is tried again, ever
        later, with one line in the log until a renewal holds."""
        listener = listen()
        lease, peer = held_lease(listener)
        peer.close()
        tried = [time.monotonic()]
        for part in (listener.accept, listener.greet, listener.accept, listener.greet, listener.accept):
            part().close()
            tried.append(time.monotonic())
        peer, _ = listener.renew()
        wait_for(caplog, "is back")
        peer.close()
        peer, _ = listener.renew()
        pauses = [after - before for before, after in itertools.pairwise(tried)]
        assert pauses[0] < 0.5
        assert all(pause > 0.04 for pause in pauses[1:])
        assert pauses[4] > 0.35
        wait_for(caplog, "is back", 2)
        assert lines(caplog) == [GONE, "weightcached: the service of host-0 is back; leases renewed: 1"] * 2
        assert not lease.ended

    def test_a_worker_that_does_not_answer(
        self, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An answer that does not come in time ends the try, not the lease."""
        monkeypatch.setattr(keeper, "ANSWER_SECONDS", 0.2)
        listener = listen()
        lease, peer = held_lease(listener)
        peer.close()
        assert hung_up(listener.accept())
        peer = listener.greet()
        assert heard(peer)["op"] == "renew"
        assert hung_up(peer)
        listener.renew()
        assert not lease.ended

    def test_changes_beside_the_socket(self, listen: Callable[[], Listener]) -> None:
        """While an answer is awaited other files come and go in the folder: that costs nothing."""
        listener = listen()
        lease, peer = held_lease(listener)
        peer.close()
        listener.accept()
        for number in range(3):
            (listener.path.parent / str(number)).touch()
        assert keepers_cpu(0.3) < 0.03
        assert not lease.ended

    @pytest.mark.parametrize("stage", ["accept", "greet"])
    def test_a_lease_may_end_in_the_middle(
        self, listen: Callable[[], Listener], stage: str, descriptors: NoDescriptorLeaks
    ) -> None:
        """A lease that is dropped while it is being renewed hangs up at once, and nobody calls again."""
        listener = listen()
        lease, peer = held_lease(listener)
        peer.close()
        peer = getattr(listener, stage)()
        if stage == "greet":
            assert heard(peer)["op"] == "renew"
        started = time.monotonic()
        del lease
        assert hung_up(peer)
        assert time.monotonic() - started < 1
        assert listener.quiet(0.2)
        listener.close()

    @pytest.mark.parametrize(
        "refusal",
        [
            {"error": {"code": "version-mismatch", "fields": {"ours": "protocol 2", "theirs": "protocol 1"}}},
            {"error": {"code": "peer-refused", "fields": {"uid": 1, "allowed": [2]}}},
            {"ok": {"protocol": 1, "version": "1", "device": "host-1", "instance": "test"}},
            {"ok": {"protocol": 2, "version": "9", "device": "host-0", "instance": "test"}},
        ],
        ids=["version", "user", "device", "protocol"],
    )
    def test_a_refusal_is_final(
        self, listen: Callable[[], Listener], caplog: pytest.LogCaptureFixture, refusal: dict[str, Any]
    ) -> None:
        """Who is refused is told once why, and does not come back; the lease has ended, as far as workers know."""
        listener = listen()
        lease, peer = held_lease(listener)
        peer.close()
        peer = listener.accept()
        tell(peer, refusal)
        wait_for(caplog, "the lease on tiny on host-0 is not renewed, the weights stay mapped: ")
        assert hung_up(peer)
        assert listener.quiet(0.2)
        assert lease.ended
        assert len(lines(caplog)) == 2

    def test_an_older_service_refuses(self, listen: Callable[[], Listener], caplog: pytest.LogCaptureFixture) -> None:
        """A service that does not know the operation says so, which is final too."""
        listener = listen()
        lease, peer = held_lease(listener)
        peer.close()
        peer = listener.greet()
        assert heard(peer)["op"] == "renew"
        tell(peer, {"error": {"code": "protocol-error", "fields": {"problem": "no operation 'renew'"}}})
        wait_for(caplog, "no operation 'renew'")
        assert hung_up(peer)
        assert lease.ended

    def test_a_full_house_is_tried_again(self, listen: Callable[[], Listener]) -> None:
        """A user who has too many connections may have fewer in a moment: that is no refusal for good."""
        listener = listen()
        lease, peer = held_lease(listener)
        peer.close()
        tell(listener.accept(), {"error": to_wire(TooManyConnections(uid=1, limit=2))})
        listener.renew()
        assert not lease.ended

    def test_without_inotify(
        self, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
    ) -> None:
        """Where the kernel gives no watch, the socket is looked for by the clock."""

        def none(path: Path) -> None:
            raise ConnectionFailed(path=str(path), problem="no watch")

        listener = listen()
        lease, _ = held_lease(listener)
        monkeypatch.setattr(keeper, "PathWatch", none)
        listener.close()
        time.sleep(0.2)
        listener = listen()
        peer, _ = listener.renew()
        del lease
        assert hung_up(peer)
        listener.close()

    def test_a_keeper_that_cannot_start(
        self, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Without a thread to be had the lease is a plain one: it holds, it ends, and the log says what it lacks."""

        def full() -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(keeper, "_keeper", None)
        monkeypatch.setattr(keeper, "Keeper", full)
        listener = listen()
        lease, peer = held_lease(listener)
        assert lines(caplog) == [
            "weightcached: the lease will not be renewed if its service restarts: can't start new thread"
        ]
        del lease
        assert hung_up(peer)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_keeper_that_fails(self, listen: Callable[[], Listener], monkeypatch: pytest.MonkeyPatch) -> None:
        """A defect ends the keeper, and neither the leases that it had nor those after it: the ones end all the same,
        the others have a keeper of their own."""
        listener = listen()
        held = [held_lease(listener)]
        failing = keeper._keeper
        assert failing is not None
        monkeypatch.setattr(failing, "_look_at_the_clock", lambda: 1 / 0)
        held.append(held_lease(listener))
        end = time.monotonic() + SECONDS
        while failing.running:
            assert time.monotonic() < end
        for _ in range(2):
            peer = held.pop()[1]
            gc.collect()
            assert hung_up(peer)
        lease, peer = held_lease(listener)
        assert keeper._keeper is not failing
        peer.close()
        listener.renew()
        assert not lease.ended
        del lease
        failing._wake.close()
        listener.close()


def keepers_cpu(seconds: float) -> float:
    """Processor seconds that this process takes in so many seconds of doing nothing."""
    before = time.process_time()
    time.sleep(seconds)  # the time in which nothing may happen
    return time.process_time() - before
