"""Digests of what engines publish, computed by a real service in the background."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.manager import Manager
from tests.running import ROOT, RunningService, children_of, import_path, process_of_role, wait_for_end
from tests.service.conftest import HOST, HOSTS, StartService, held_by, model
from tests.test_digester import IDLE, io_class
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.checkpoint.remembered import recall
from weightcached.errors import CheckpointError
from weightcached.paths import socket_path
from weightcached.service import digests
from weightcached.service.vault import DigestOutcome, HeldShard
from weightcached.shard.key import STAT_CONTENT, ShardKey
from weightcached.shard.manifest import ManifestHead, SlabEntry, SourceFile, TensorTable, write_manifest
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Status, Subscribe

# The publisher touches the checkpoint, so that a digest process waits for 2 seconds before it reads.
LISTENING = 'ready = "listening"\n'


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher imports this package's modules, whose service runs in another folder."""
    monkeypatch.setenv("PYTHONPATH", import_path())


def published(checkpoint: Path, *more: str) -> str:
    """The config's part for a model that a command publishes."""
    command = ["python", str(ROOT / "tests" / "service" / "publishing.py"), "touch="]
    return model("engine", checkpoint, f"publisher = {json.dumps(command)}", *more)


def sources(checkpoint: Path) -> list[SourceFile]:
    with open_checkpoint(checkpoint) as found:
        return [file.source for file in found.files]


def wait_until(condition: Callable[[], bool], service: RunningService | Manager) -> None:
    """For what is only written to the log or to the disk."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, service.log
        time.sleep(0.02)


def digested(watcher: Connection) -> dict[str, Any]:
    """The event of that name, after whatever comes before it."""
    while (event := watcher.next_event(30))["what"] != "digested":
        pass
    return event


def digest_of_engine(service: RunningService) -> str:
    """What the status says of the digest, as soon as it is not pending any more."""
    found = ""

    def ended() -> bool:
        nonlocal found
        with Connection.open(socket_path("host-0"), device="host-0") as connection:
            status, fds = connection.request(Status())
            fds.close()
        found = status["shards"][0]["digest"] if status["shards"] else "pending"
        return found != "pending"

    wait_until(ended, service)
    return found


def touch(path: Path) -> None:
    """Gives a file other times, and with them another stat tuple."""
    os.utime(path)


def test_what_a_command_publishes_is_digested(start_service: StartService, checkpoint: Path) -> None:
    """A while after the publish the digest is remembered under the files' stat tuples, the log says so, and subscribers
    of the device are told. Its process stands behind all others for disk and core."""
    service = start_service(LISTENING + HOST + published(checkpoint)).ready()
    with Connection.open(socket_path("host-0"), device="host-0") as watcher:
        watcher.request(Subscribe())[1].close()
        digester = process_of_role(service, "digest")
        wait_until(lambda: io_class(digester) == IDLE, service)
        assert os.getpriority(os.PRIO_PROCESS, digester) == 19
        assert recall(sources(checkpoint)) == [None]

        event = digested(watcher)

    assert (event["what"], event["model"], event["generation"]) == ("digested", "engine", 1)
    assert None not in recall(sources(checkpoint))
    assert f"{checkpoint}: {checkpoint.stat().st_size} bytes digested in" in service.log
    wait_for_end(digester)
    service.stop()


def test_all_ranks_are_digested_once(start_service: StartService, checkpoint: Path) -> None:
    """Two ranks of the same files: one process, one reading, and the subscribers of both devices are told."""
    command = ["python", str(ROOT / "tests" / "service" / "publishing.py")]
    more = ["tensor_parallel = 2", f"publisher = {json.dumps(command)}"]
    service = start_service(LISTENING + HOSTS + model("engine", checkpoint, *more)).ready()
    with contextlib.ExitStack() as stack:
        for device in ("host-0", "host-1"):
            watcher = stack.enter_context(Connection.open(socket_path(device), device=device))
            watcher.request(Subscribe())[1].close()
            stack.callback(digested, watcher)
    assert service.log.count("bytes digested in") == 1
    service.stop()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (touch, "small.safetensors: (is not the file any more that|was written or altered while it)"),  # by its moment
        (Path.unlink, "small.safetensors"),
        (None, "the digest process ended by signal SIGKILL before it answered"),
    ],
)
def test_a_digest_is_given_up(
    start_service: StartService, checkpoint: Path, change: Callable[[Path], None] | None, why: str
) -> None:
    """Files that change or go before they are read, and a process that is killed: one warning with the reason; what is
    published stays, nothing is remembered, and the service goes on with the next one."""
    service = start_service(HOST + published(checkpoint)).ready()
    before = sources(checkpoint)
    digester = process_of_role(service, "digest")
    if change is None:
        os.kill(digester, signal.SIGKILL)
    else:
        change(checkpoint)
    wait_until(lambda: "its digest is given up" in service.log, service)
    (line,) = (line for line in service.log.splitlines() if "its digest is given up" in line)
    assert "what was published of it is found by the very same files only" in line
    assert re.search(why, line)
    assert re.search(why, digest_of_engine(service).removeprefix("given up: "))
    os.kill(process_of_role(service, "worker"), signal.SIGKILL)  # the next one is told again
    assert re.search(why, digest_of_engine(service))
    assert "digest given up" in service.ctl("status")
    assert recall(before) == [None]
    assert held_by("engine", "host-0", layout="test-1/0") == b"x0".ljust(16)
    if change is touch:
        service.ctl("reload")
        wait_until(lambda: "bytes digested in" in service.log, service)
        assert None not in recall(sources(checkpoint))
    service.stop()


def held(*files: SourceFile, checkpoint: str | None = "/models/a", model: str = "m") -> HeldShard:
    """A shard as an engine publishes one that it has loaded from these files."""
    head = ManifestHead(
        model=model,
        generation=1,
        device="host-0",
        key=ShardKey(content=STAT_CONTENT + model, layout="test-1/0"),
        slabs=(SlabEntry(0),),
        tensor_count=0,
        created="2026-01-01T00:00:00+00:00",
        files=files,
        attributes={} if checkpoint is None else {"checkpoint": checkpoint},
    )
    return HeldShard("host-0", model, 1, 0, [write_manifest(head, TensorTable((), {}))])


def on_disk(number: int, name: str = "w.safetensors") -> SourceFile:
    return SourceFile(name, number, 1, 8, 1, 1)


def test_a_disk_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one file system one checkpoint is read at a time; those of another one go on meanwhile. What has no checkpoint
    is given up at once, and what is digested by then is told for every shard of it."""
    reading: list[str] = []
    told: list[tuple[str, str | None]] = []

    async def scenario() -> None:
        answers, news = asyncio.Event(), asyncio.Event()

        async def digest(checkpoint: str, files: tuple[SourceFile, ...]) -> dict[str, Any]:
            reading.append(checkpoint)
            if files[0].device == 1:
                await answers.wait()
            return {"bytes": 1, "seconds": 0.0}

        monkeypatch.setattr(digests, "_digest", digest)
        monkeypatch.setattr(digests, "recall", lambda files: [None])
        shards = [
            held(on_disk(1), checkpoint="/dead/a", model="a"),
            held(on_disk(1, "v.safetensors"), checkpoint="/dead/b", model="b"),
            held(on_disk(2), checkpoint="/good/c", model="c"),
            held(on_disk(2), checkpoint="/good/c", model="d"),
            held(on_disk(2), checkpoint=None, model="e"),
        ]

        def tell(device: str, model: str, generation: int, problem: str | None) -> None:
            told.append((model, problem))
            news.set()

        queue = digests.Digests(tell)
        running = asyncio.create_task(queue.run())
        for shard in shards:
            queue.add(shard)
        async with asyncio.timeout(20):
            while len(told) < 3:
                news.clear()
                await news.wait()
            assert sorted(reading) == ["/dead/a", "/good/c"]
            assert shards[0].digest is None and shards[2].digest == DigestOutcome(None)
            answers.set()
            while len(told) < 5:
                news.clear()
                await news.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for shard in shards:
            shard.close()

    asyncio.run(scenario())
    unsaid = "its publisher has not said which checkpoint it has loaded"
    assert told == [("e", unsaid), ("c", None), ("d", None), ("a", None), ("b", None)]


def test_a_disk_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is killed after a time in which any disk has answered, and the digest is given up."""
    monkeypatch.setattr(digests, "PATIENCE_SECONDS", 0.2)
    hanging = ["import time; time.sleep(60)"]

    async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", *hanging, pass_fds=tuple(fds.values()))

    monkeypatch.setattr(digests, "spawn_role", spawn)
    with pytest.raises(CheckpointError, match=r"/dead: not read within 0 s; does its disk hang\?"):
        asyncio.run(digests._digest("/dead", (on_disk(1),)))


def test_a_stop_ends_a_digest(start_service: StartService, checkpoint: Path) -> None:
    """At once: nothing is lost but the reading."""
    service = start_service(HOST + published(checkpoint)).ready()
    digester = process_of_role(service, "digest")
    assert digester in children_of(service.process.pid)
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < 5
    wait_for_end(digester)
    assert recall(sources(checkpoint)) == [None]


def test_a_start_goes_on_with_what_it_adopts(runtime_dir: Path, checkpoint: Path) -> None:
    """A service that was killed before the digest was known computes it after its restart, once."""
    manager = Manager(runtime_dir, HOST + published(checkpoint))
    try:
        manager.start().ready()
        manager.wait_stored(2)
        assert "bytes digested in" not in manager.log
        manager.restart().ready()
        wait_until(lambda: "bytes digested in" in manager.log, manager)
        assert None not in recall(sources(checkpoint))
        manager.restart().ready()
        assert held_by("engine", "host-0", layout="test-1/0") == b"x0".ljust(16)
        manager.stop()
        assert manager.log.count("bytes digested in") == 1
    finally:
        manager.abandon()


def test_what_the_service_loads_itself_is_not_digested_again(start_service: StartService, checkpoint: Path) -> None:
    """Its digest is computed while it is read, and stands in the key."""
    service = start_service(HOST + model("own", checkpoint)).ready()
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children_of(service.process.pid)]
    assert any(b"worker" in words for words in lines)
    assert not any(b"digest" in words for words in lines)
    with Connection.open(socket_path("host-0"), device="host-0") as connection:
        status, fds = connection.request(Status())
        fds.close()
    assert [shard["key"]["content"].startswith(STAT_CONTENT) for shard in status["shards"]] == [False]
    service.stop()
