"""Loads by a command of the config, in a real service: run, awaited, ended, and what is said of those that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import weightcached
from tests.checkpoint.files import hub_cache
from tests.gpu import becomes_true
from tests.manager import Manager
from tests.running import ROOT, children_of, import_path, process_of_role, wait_for_end
from tests.service.commands import PUBLISHING, publisher
from tests.service.conftest import HOST, HOSTS, StartService, attach, generation, held_by, model
from tests.service.gathering import ENGINE
from weightcached.checkpoint.remembered import recall
from weightcached.client.publish import checkpoint_files
from weightcached.errors import OtherContent
from weightcached.paths import socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Subscribe

LISTENING = 'ready = "listening"\n'


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher imports this package's modules, whose service runs in another folder."""
    monkeypatch.setenv("PYTHONPATH", import_path())


def test_a_preloaded_model_is_published_by_its_command(start_service: StartService, checkpoint: Path) -> None:
    """READY comes when the command has published and ended. What it says is in the log, by rank; its environment and
    its command line are what the config asks for."""
    service = start_service(
        HOST + model("engine", checkpoint, publisher("value=first", "say=out", "err=in\rerr"))
    ).ready()
    assert held_by("engine", "host-0", layout="test-1/0") == b"first0".ljust(16)
    assert service.model("engine")["state"] == "cached"
    assert "engine: rank 0: out\n" in service.log
    assert "engine: rank 0: err\n" in service.log
    assert f"engine: rank 0 to host-0 by {sys.executable} {PUBLISHING} value=first" in service.log
    service.stop()


def test_a_client_that_waits_has_it_published(start_service: StartService, checkpoint: Path) -> None:
    """`preload = false`: the command runs when somebody waits for the model."""
    service = start_service(HOST + model("lazy", checkpoint, "preload = false", publisher())).ready()
    assert service.model("lazy")["state"] == "absent"
    worker, fds = attach("lazy", wait=30, layout="test-1/0")
    with worker, fds:
        assert generation(fds) == 1
    service.stop()


def test_all_ranks_run_at_once_each_for_its_device(
    start_service: StartService, checkpoint: Path, runtime_dir: Path
) -> None:
    """Two ranks that wait for each other both publish, and the model is whole."""
    more = ["tensor_parallel = 2", publisher(f"meet={runtime_dir}/meet")]
    service = start_service(HOSTS + model("cut", checkpoint, *more)).ready()
    found = [held_by("cut", f"host-{rank}", layout="test-1/0", tensor_parallel_rank=rank) for rank in (0, 1)]
    assert found == [b"x0".ljust(16), b"x1".ljust(16)]
    assert service.model("cut")["ranks_cached"] == 2
    service.stop()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["say=one", "err=two", "exit=0:3"], "of rank 0 on host-0 ended by exit status 3; it said last: one | two"),
        (["nothing=0"], "ended by exit status 0, but has not published bad there; it said nothing"),
        (["nospec="], "generation 1 there is not its own: it lacks the attribute spec"),
        (["late=4"], "ended by exit status 4"),
    ],
)
def test_what_is_no_load(start_service: StartService, checkpoint: Path, words: list[str], reason: str) -> None:
    """Another status than 0, before or after the publish, and 0 without a publish of its own: failed, with the reason
    and what the command said last."""
    service = start_service(LISTENING + HOST + model("bad", checkpoint, publisher(*words))).ready()
    assert reason in service.ctl("wait", "bad", "--timeout", "30", code=1)
    assert service.model("bad")["error"]["code"] == "load-failed"
    service.stop()


def test_what_a_failed_command_had_published_goes_again(start_service: StartService, checkpoint: Path) -> None:
    """A status other than 0 after the publish: failed, nothing of it is there, and the next load makes it whole."""
    service = start_service(LISTENING + HOST + model("bad", checkpoint, publisher("late=4"))).ready()
    said = service.ctl("wait", "bad", "--timeout", "30", code=1)
    assert "what it had published, generation 1 on host-0, is evicted again: the publisher of rank 0" in said
    assert "still served" not in said
    assert (service.model("bad")["state"], service.model("bad")["generations"]) == ("failed", [None])
    assert becomes_true(lambda: service.status()["devices"][0]["shards"] == [])
    service.config.write_text(LISTENING + HOST + model("bad", checkpoint, publisher()))
    service.ctl("reload")
    service.ctl("wait", "bad", "--timeout", "30")
    assert held_by("bad", "host-0", layout="test-1/0") == b"x0".ljust(16)
    service.stop()


def test_a_start_that_waits_for_it_fails_with_the_reason(start_service: StartService, checkpoint: Path) -> None:
    """`ready = "loaded"`: the service ends with exit code 1 when the command cannot be run."""
    command = 'publisher = ["/no/such/program"]'
    service = start_service(HOST + model("bad", checkpoint, command))
    assert service.wait() == 1
    assert "/no/such/program cannot be started: No such file or directory" in service.log
    service.stop(1)


def test_one_rank_that_fails_ends_the_others(start_service: StartService, checkpoint: Path) -> None:
    """Rank 1 ends with an error while rank 0 waits for ever: rank 0 is ended, the error is that of rank 1."""
    more = ["tensor_parallel = 2", publisher("hang=0", "exit=1:7")]
    service = start_service(LISTENING + HOSTS + model("cut", checkpoint, *more)).ready()
    assert "of rank 1 on host-1 ended by exit status 7" in service.ctl("wait", "cut", "--timeout", "30", code=1)
    assert not [pid for pid in children_of(service.process.pid) if is_publisher(pid)]
    service.stop()


def is_publisher(pid: int) -> bool:
    return PUBLISHING.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def group_of(pid: int) -> list[int]:
    """The processes of a process group now."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,pgid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if line.split()[1] == str(pid)]


def wait_for_child(leader: int) -> list[int]:
    """The group of a publisher, once it has started its child."""
    end = time.monotonic() + 20
    while len(group := group_of(leader)) < 2:
        assert time.monotonic() < end
    return group


@pytest.mark.parametrize("how", ["stop", "evict", "reload"])
def test_an_end_reaches_all_that_it_has_started(start_service: StartService, checkpoint: Path, how: str) -> None:
    """A stop, an eviction and a reload that takes the model out end the command and its children at once."""
    service = start_service(LISTENING + HOST + model("slow", checkpoint, publisher("child=", "hang=0"))).ready()
    leader = process_of_role(service, PUBLISHING)
    assert os.getsid(leader) == leader
    group = wait_for_child(leader)
    if how == "evict":
        assert "called off" in service.ctl("evict", "slow")
        assert service.model("slow")["state"] == "absent"
    elif how == "reload":
        service.config.write_text(LISTENING + HOST)
        service.ctl("reload")
    if how == "stop":
        service.stop()
    for pid in group:
        wait_for_end(pid)
    if how != "stop":
        service.stop()


def test_what_a_command_leaves_behind_is_ended(start_service: StartService, checkpoint: Path) -> None:
    """A child that outlives the command would keep its memory: it is ended with a warning, the load is good."""
    service = start_service(LISTENING + HOST + model("left", checkpoint, publisher("child="))).ready()
    leader = process_of_role(service, PUBLISHING)
    group = wait_for_child(leader)
    service.ctl("wait", "left", "--timeout", "30")
    for pid in group:
        wait_for_end(pid)
    assert "left processes behind, they are ended" in service.log
    assert service.model("left")["error"] is None
    service.stop()


def test_a_killed_publisher_is_tried_again_for_who_waits(start_service: StartService, checkpoint: Path) -> None:
    """SIGKILL by somebody else: failed with that reason; the next client that waits has the command run again."""
    service = start_service(LISTENING + HOST + model("slow", checkpoint, publisher("hang=0"))).ready()
    os.kill(process_of_role(service, PUBLISHING), signal.SIGKILL)
    assert "SIGKILL" in service.ctl("wait", "slow", "--timeout", "30", code=1)
    service.config.write_text(LISTENING + HOST + model("slow", checkpoint, publisher()))
    service.ctl("reload")
    service.ctl("wait", "slow", "--timeout", "30")
    service.stop()


def test_a_restart_adopts_it_and_a_reload_leaves_it(runtime_dir: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The command is run once: not by a restart, nor by a reload, but by one after its words or its files changed."""
    runs = tmp_path / "runs"
    config = HOST + model("engine", checkpoint, publisher(f"count={runs}"))
    manager = Manager(runtime_dir, config)
    try:
        manager.start().ready()
        manager.wait_stored(2)
        manager.restart().ready()
        assert json.loads(manager.ctl("reload", "--json"))["loading"] == []
        assert runs.read_bytes() == b"."
        manager.configure(HOST + model("engine", checkpoint, publisher(f"count={runs}", "value=other")))
        manager.restart().ready()
        assert runs.read_bytes() == b".."
        assert held_by("engine", "host-0", layout="test-1/0") == b"other0".ljust(16)
        os.utime(checkpoint)
        assert json.loads(manager.ctl("reload", "--json"))["loading"] == ["engine"]
        manager.ctl("wait", "engine", "--timeout", "30")
        assert runs.read_bytes() == b"..."
        manager.stop()
    finally:
        manager.abandon()


@pytest.mark.parametrize("how", ["kill", "restart"])
def test_a_restart_in_the_middle_of_a_load_keeps_nothing_of_it(
    runtime_dir: Path, checkpoint: Path, tmp_path: Path, how: str
) -> None:
    """Published, but its command had not ended, so it could still have failed: it is loaded anew."""
    os.mkfifo(tmp_path / "fifo")
    config = LISTENING + HOST + model("engine", checkpoint, publisher(f"hold=0:{tmp_path / 'fifo'}"))
    manager = Manager(runtime_dir, config)
    try:
        manager.start().ready()
        manager.wait_stored(2)
        if how == "kill":
            manager.kill()
            manager.start().ready()
        else:
            manager.restart().ready()
        assert "engine on host-0, generation 1, is dropped: the service ended before its load was over" in manager.log
        (tmp_path / "fifo").write_text("0")
        manager.ctl("wait", "engine", "--timeout", "30")
        assert manager.model("engine")["generations"] == [2]
        manager.restart().ready()
        assert manager.model("engine")["generations"] == [2]
        manager.stop()
    finally:
        manager.abandon()


# A publisher as an engine is one: torch modules, ranks that meet over TCP, `weightcached.publish`.

GATHERING = str(ROOT / "tests" / "service" / "gathering.py")


def gathering(*words: str) -> str:
    return f"publisher = {json.dumps(['python', GATHERING, *words])}"


def ranks_of(name: str) -> list[dict[str, list[object]]]:
    """The tensors of both ranks, as two engines attach them."""
    found = []
    for rank in (0, 1):
        with weightcached.attach(
            name, device=f"host-{rank}", key={"layout": ENGINE}, tensor_parallel=(rank, 2)
        ) as weights:
            found.append({key: tensor.tolist() for key, tensor in weights.items()})
    return found


BOTH_RANKS = [{"weight": [[21.0] * 3] * 2, "bias": [float(rank)] * 2} for rank in (0, 1)]


def test_ranks_meet_and_publish_their_modules(
    runtime_dir: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks meet by the environment alone, whatever launcher the service itself has; what they publish is attached.
    A restart and a reload take it over without another run; a run after that meets at another port."""
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    runs, ports = tmp_path / "runs", tmp_path / "ports"
    config = HOSTS + model("cut", checkpoint, "tensor_parallel = 2", gathering(f"count={runs}", f"port={ports}"))
    manager = Manager(runtime_dir, config)
    try:
        manager.start().ready()
        assert ranks_of("cut") == BOTH_RANKS
        assert all(f"cut: rank {rank}: met [10, 11]\n" in manager.log for rank in (0, 1))
        manager.wait_stored(4)
        manager.restart().ready()
        assert json.loads(manager.ctl("reload", "--json"))["loading"] == []
        assert ranks_of("cut") == BOTH_RANKS
        assert runs.read_bytes() == b"."
        os.utime(checkpoint)
        assert json.loads(manager.ctl("reload", "--json"))["loading"] == ["cut"]
        manager.ctl("wait", "cut", "--timeout", "60")
        assert runs.read_bytes() == b".."
        assert len(set(ports.read_text().split())) == 2
        assert "1" not in ports.read_text().split()
        manager.stop()
    finally:
        manager.abandon()


def test_a_publisher_reads_from_a_hugging_face_cache(
    start_service: StartService, checkpoint: Path, tmp_path: Path
) -> None:
    """Its files are recorded with their blobs' digests: verifying, reloading and digesting go on as ever, and an engine
    that has the same blobs in another cache attaches."""
    (tmp_path / "plain").mkdir()
    checkpoint.rename(tmp_path / "plain" / "model.safetensors")
    first, second = (hub_cache(tmp_path / name, tmp_path / "plain") for name in ("first", "second"))
    service = start_service(HOST + model("hub", first, gathering())).ready()
    wanted = {"device": "host-0", "key": {"layout": ENGINE}}
    with weightcached.attach(checkpoint=second, **wanted) as weights:
        (file,) = weights.manifest.files
        assert file.digest == f"sha256:{(first / 'model.safetensors').resolve().name}"
        assert weights["bias"].tolist() == [0.0] * 2
    assert "host-0" in service.ctl("verify", "hub")
    assert json.loads(service.ctl("reload", "--json"))["loading"] == []
    with Connection.open(socket_path("host-0"), device="host-0") as watcher:
        watcher.request(Subscribe())[1].close()
        while None in recall(checkpoint_files(first)):
            watcher.next_event(30)
    with weightcached.attach(checkpoint=tmp_path / "plain", **wanted) as weights:
        assert weights.manifest.model == "hub"
    other = hub_cache(tmp_path / "other", tmp_path / "plain", change="model.safetensors")
    with pytest.raises(OtherContent, match="its digest is sha256:"):
        weightcached.attach(checkpoint=other, **wanted)
    service.stop()


def test_a_left_over_rendezvous_is_not_met(start_service: StartService, checkpoint: Path, tmp_path: Path) -> None:
    """What a failed run has left behind, listening at that run's port out of reach: the next run meets elsewhere."""
    runs = tmp_path / "runs"
    more = ["tensor_parallel = 2", gathering(f"leave={runs}")]
    service = start_service(LISTENING + HOSTS + model("cut", checkpoint, *more)).ready()
    assert "of rank 0 on host-0 ended by exit status 9" in service.ctl("wait", "cut", "--timeout", "60", code=1)
    left = int(Path(f"{runs}.pid").read_text())
    try:
        service.ctl("load", "cut")
        service.ctl("wait", "cut", "--timeout", "60")
        assert ranks_of("cut") == BOTH_RANKS
        assert runs.read_bytes() == b".."
        os.kill(left, 0)  # it was there all the time
    finally:
        os.kill(left, signal.SIGKILL)
    service.stop()
