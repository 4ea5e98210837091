"""progress: what an attach says in the log, once for each policy, and not too often while it waits."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from tests.client.handmade import DEVICE, Raw, RunningWorker, make_shard
from weightcached import attach
from weightcached.client import progress
from weightcached.client.progress import PROGRESS_SECONDS, WaitLog
from weightcached.errors import NoSuchModel, TimedOut


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "weightcached.client")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name.startswith("weightcached.client")]


class TestWaitLog:
    """The lines of one wait."""

    def test_what_is_held_back_has_its_reason(self, log: pytest.LogCaptureFixture) -> None:
        """It is not said to be loading, as which its worker has it."""
        event = {"model": "m", "state": "loading", "progress": 1.0, "held_back": True, "reason": "node 1 is missing"}
        WaitLog("m on host-0", 30.0).event(event)
        assert lines(log) == ["waiting up to 30 s for m on host-0: it is cached, but not given out: node 1 is missing"]

    def test_the_first_has_the_reason_and_others_are_rare(
        self, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One line at the start; then what is new, when PROGRESS_SECONDS have passed since the line before."""
        now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: now)
        wait = WaitLog("m on host-0", 30.0)
        wait.because("no service answers")
        for share in range(0, 100, 10):
            wait.event({"model": "m", "state": "loading", "progress": share / 100})
            now += PROGRESS_SECONDS / 4
        wait.event({"model": "m", "state": "loading", "progress": 0.8})
        assert lines(log) == [
            "waiting up to 30 s for m on host-0: no service answers",
            "waiting for m on host-0: loading 40 %",
            "waiting for m on host-0: loading 80 %",
        ]

    def test_every_state_has_words(self, log: pytest.LogCaptureFixture) -> None:
        """Also what a later version says is taken: without a line."""
        for state in ("absent", "queued", "failed", "cached", None, "loading", "invented-later"):
            WaitLog("m", 1.0).event({"state": state, "progress": 0.5})
        WaitLog("m", 1.0).event({"state": "loading", "progress": "much"})
        assert [line.removeprefix("waiting up to 1 s for m: ") for line in lines(log)] == [
            "it is not loaded yet", "it is queued behind other loads",
            "its last load found no room and is tried again", "it is there in part", "there is no such model yet",
            "loading 50 %",
        ]  # fmt: skip


class TestPolicies:
    """What `attach` says."""

    def test_fail(self, worker: RunningWorker, log: pytest.LogCaptureFixture) -> None:
        """One line with the reason, which is the error's."""
        with pytest.raises(NoSuchModel) as caught:
            attach("m", device=DEVICE)
        assert lines(log) == [f"m on {DEVICE} is not attached: {caught.value}"]

    def test_wait(self, worker: RunningWorker, log: pytest.LogCaptureFixture) -> None:
        """Why it waits, and when it has waited enough, why there is still nothing."""
        worker.models(m={"state": "loading", "progress": 0.41})
        with pytest.raises(TimedOut) as caught:
            attach("m", device=DEVICE, on_miss="wait", timeout=0.2)
        assert lines(log) == [
            f"waiting up to 0.2 s for m on {DEVICE}: loading 41 %", f"m on {DEVICE} is not attached: {caught.value}",
        ]  # fmt: skip

    def test_wait_for_the_service(self, runtime_dir: Path, log: pytest.LogCaptureFixture) -> None:
        """No service is the reason then."""
        with pytest.raises(TimedOut):
            attach("m", device=DEVICE, on_miss="wait", timeout=0.1)
        assert "no service answers" in lines(log)[0]
        assert len(lines(log)) == 2

    def test_wait_by_checkpoint(self, worker: RunningWorker, minilm: Path, log: pytest.LogCaptureFixture) -> None:
        """The reason names what there is."""
        with pytest.raises(TimedOut):
            attach(checkpoint=minilm, device=DEVICE, on_miss="wait", timeout=0.2)
        assert lines(log)[0].startswith(f"waiting up to 0.2 s for {minilm} on {DEVICE}: no model {minilm}")
        assert len(lines(log)) == 2

    def test_a_hit_says_nothing_more(self, worker: RunningWorker, log: pytest.LogCaptureFixture) -> None:
        """The wait's line alone when the model comes, none when it is there."""
        timer = threading.Timer(0.1, lambda: worker.publish(make_shard([Raw("w", "U8", (4,), b"data")], model="m")))
        timer.start()
        attach("m", device=DEVICE, on_miss="wait").close()
        timer.join()
        assert lines(log) == [f"waiting up to 30 s for m on {DEVICE}: there is no such model yet"]
        attach("m", device=DEVICE, on_miss="wait").close()
        assert len(lines(log)) == 1
