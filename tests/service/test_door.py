"""The door of a running service: which users come in, what they may do there, what a publisher cannot bring along."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running import children_of, process_of_role, wait_for_end
from tests.service.conftest import HOST, StartService, model
from tests.worker.process import Shard, WorkerProcess, shard
from tests.worker.test_handlers import unsealed
from weightcached.fds import OwnedFd
from weightcached.memfd import SEALS
from weightcached.paths import control_path, socket_path
from weightcached.shard import manifest
from weightcached.shard.host import HostSlab
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ManifestHead, SlabEntry, TensorEntry, TensorTable, write_manifest

ROOT = Path(__file__).parents[2]
GUEST, STRANGER = 61001, 61002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

CLIENT = """
import os, sys
from weightcached import WeightCacheError
from weightcached.paths import control_path, check_runtime_dir, socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach, Evict, Load, Reload, Reserve, Status, Stop, Subscribe, Verify
uid = int(sys.argv[1])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
WORKER = (socket_path("host-0"), "host-0", [Attach("small"), Status(), Subscribe(), Evict("small"), Reserve("x", 1)])
SERVICE = (control_path("test"), None, [
    Status(), Subscribe(), Evict("small"), Load("small"), Verify("small"), Reload(), Stop()])
try:
    check_runtime_dir()
    for path, device, requests in (WORKER, SERVICE):
        with Connection.open(path, device=device) as connection:
            for request in requests:
                try:
                    answer, fds = connection.request(request)
                    print(request.op, "done", len(fds))
                    if request.op == "attach":
                        slab = list(fds)[1].fileno()
                        print(os.pread(slab, 1, 0) != b"")
                        try:
                            os.pwrite(slab, b"x", 0)
                        except PermissionError:
                            print("sealed")
                    fds.close()
                except WeightCacheError as error:
                    print(request.op, error.code)
except WeightCacheError as error:
    print(error.code)
"""


@pytest.fixture
def reachable(runtime_dir: Path) -> Path:
    """The runtime directory, as systemd makes it for a system-wide service."""
    runtime_dir.chmod(0o755)
    return runtime_dir


def as_user(uid: int, **environ: str) -> list[str]:
    """What a process of that user is told by the running service."""
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(uid)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def socket_names(pid: int) -> list[str]:
    """What the Unix sockets of a process are bound to (proc_net(5)); abstract names begin with @."""
    rows = (line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:])
    bound = {f"socket:[{row[6]}]": row[7] for row in rows if len(row) > 7}
    held = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return [bound[what] for what in held if what in bound]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@needs_root
def test_a_listed_user_attaches_and_looks_and_no_more(
    start_service: StartService, checkpoint: Path, reachable: Path
) -> None:
    """A client of a listed uid that names the service's user gets the weights and cannot write them; everything that
    changes something is refused by both sockets, and the service goes on."""
    service = start_service(f"allow_uids = [{GUEST}]\n" + HOST + model("small", checkpoint)).ready()
    assert [mode(socket_path("host-0")), mode(control_path("test"))] == [0o666, 0o666]
    assert [mode(path) for path in sorted(reachable.glob("*.lock"))] == [0o600, 0o600]

    assert as_user(GUEST, WEIGHTCACHED_SERVICE_USER="root") == [
        "attach done 2", "True", "sealed", "status done 0", "subscribe done 0", "evict not-permitted",
        "reserve not-permitted", "status done 0", "subscribe done 0", "evict not-permitted", "load not-permitted",
        "verify not-permitted", "reload not-permitted", "stop not-permitted",
    ]  # fmt: skip

    assert as_user(GUEST) == ["bad-runtime-directory"]  # it has not said whom it believes
    assert as_user(GUEST, WEIGHTCACHED_SERVICE_USER=str(STRANGER)) == ["bad-runtime-directory"]
    assert as_user(STRANGER, WEIGHTCACHED_SERVICE_USER="root") == ["peer-refused"]
    os.environ["WEIGHTCACHED_SERVICE_USER"] = "root"  # the fixture's monkeypatch puts it back
    assert service.model("small")["state"] == "cached"
    log = service.log
    assert f"peer of uid {STRANGER} refused" in log
    service.stop()


@needs_root
def test_a_worker_that_is_started_again_lets_the_same_users_in(
    start_service: StartService, checkpoint: Path, reachable: Path
) -> None:
    """The list goes to each worker, also to the one after a death."""
    service = start_service(f"allow_uids = [{GUEST}]\n" + HOST + model("small", checkpoint)).ready()
    pid = process_of_role(service, "worker")
    os.kill(pid, 9)
    wait_for_end(pid)
    assert as_user(GUEST, WEIGHTCACHED_SERVICE_USER="root")[0] == "attach done 2"
    service.stop()


def test_without_the_list_everything_is_closed(
    start_service: StartService, checkpoint: Path, runtime_dir: Path
) -> None:
    """Sockets and locks are for the own user alone, as the directory is. No socket has a name outside of it, such as an
    abstract one, which has no mode."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    files = sorted([*runtime_dir.glob("*.sock"), *runtime_dir.glob("*.lock")])
    assert [mode(path) for path in files] == [0o600] * 4
    names = [name for pid in (service.process.pid, *children_of(service.process.pid)) for name in socket_names(pid)]
    assert sorted(set(names)) == sorted(map(str, runtime_dir.glob("*.sock")))
    service.stop()


@pytest.mark.parametrize(
    ("prepare", "config", "words"),
    [
        (lambda path: path.chmod(0o755), "", "is open to other users (mode 0755)"),
        (lambda path: path.chmod(0o775), "allow_uids = [61001]\n", "may be written by other users (mode 0775)"),
        (lambda path: path.chmod(0o700), "allow_uids = [61001]\n", "allow_uids is in vain, "),
        (lambda path: (path.rmdir(), path.symlink_to("/tmp")), "", "is a symbolic link"),
    ],
    ids=["open", "written", "closed", "link"],
)
def test_the_directory_is_checked_at_each_start(
    start_service: StartService, runtime_dir: Path, prepare: Callable[[Path], object], config: str, words: str
) -> None:
    """A service does not start in a directory that others could use, or that those whom it lists could not."""
    prepare(runtime_dir)
    try:
        service = start_service(config + HOST)
        assert service.wait() == 1
        assert words in service.log
    finally:
        if runtime_dir.is_symlink():
            runtime_dir.unlink()
            runtime_dir.mkdir(0o700)


def test_a_changed_list_needs_a_restart(start_service: StartService, checkpoint: Path) -> None:
    """A reload says so: the sockets are what they were made for."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    service.config.write_text(f"allow_uids = [{GUEST}]\n" + HOST + model("small", checkpoint))
    assert json.loads(service.ctl("reload", "--json"))["restart"] == ["allow_uids"]
    service.stop()


# The publisher's door, at a worker with this process as its service.


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess().serve()
    yield process
    process.close()


def memfd_with(seals: int) -> Callable[[HostSlab], OwnedFd]:
    """In the place of a slab: a memfd of its bytes with these seals only."""

    def change(slab: HostSlab) -> OwnedFd:
        slab.close()
        fd = OwnedFd(os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.write(fd.fileno(), b"data")
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
        return fd

    return change


def of_tensors(generation: int, slabs: int, *tensors: TensorEntry, **key: Any) -> Shard:
    """A shard of slabs of 1 KiB with these tensors."""
    head = ManifestHead(
        model="bad", generation=generation, device="host-0", key=ShardKey(**{"content": "c", **key}),
        slabs=(SlabEntry(1024),) * slabs, tensor_count=len(tensors), created="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    made = [write_manifest(head, TensorTable(tensors))] + [HostSlab(1024).seal() for _ in range(slabs)]
    return Shard([fd.steal() for fd in made])


def tensor(name: str, offset: int, nbytes: int, slab: int = 0) -> TensorEntry:
    return TensorEntry(name, slab, offset, nbytes, "U8", (nbytes,))


Make = Callable[[int], Shard]
BAD: dict[str, tuple[Make, str]] = {
    **{
        f"may {what}": (
            lambda generation, seal=seal: shard("bad", generation, b"data", change_slab=memfd_with(SEALS & ~seal)),
            "the slab 0 is not sealed",
        )
        for what, seal in (
            ("be written", fcntl.F_SEAL_WRITE), ("grow", fcntl.F_SEAL_GROW), ("shrink", fcntl.F_SEAL_SHRINK),
            ("be sealed further", fcntl.F_SEAL_SEAL),
        )
    },
    "no seals": (
        lambda generation: shard("bad", generation, b"data", change_slab=unsealed),
        "the slab 0 is not sealed: seals 0x0",
    ),
    "another device": (lambda generation: shard("bad", generation, b"data", device="host-1"), "device is 'host-1'"),
    "a gpu": (lambda generation: shard("bad", generation, b"data", device="GPU-00"), "device is 'GPU-00'"),
    "another model": (lambda generation: shard("worse", generation, b"data"), "model is 'worse'"),
    "another key": (
        lambda generation: shard("bad", generation, b"data", key=ShardKey(content="c", tensor_parallel_rank=2)),
        "key: tensor parallel rank 2 of 1",
    ),
    "another size": (lambda generation: shard("bad", generation, b"data", nbytes=5), "slab 0 has 4 bytes, 5 listed"),
    "past the slab": (lambda generation: of_tensors(generation, 1, tensor("a", 768, 512)), "ends at byte 1280"),
    "in no slab": (lambda generation: of_tensors(generation, 1, tensor("a", 0, 1, slab=1)), "slab 1 of 1"),
    "overlapping": (
        lambda generation: of_tensors(generation, 1, tensor("a", 0, 300), tensor("b", 256, 512)),
        "tensors 'a' and 'b' share 44 bytes of slab 0",
    ),
    "more bytes": (lambda generation: of_tensors(generation, 5), "5120 bytes published, 4096 were reserved"),
    "more slabs than listed": (
        lambda generation: Shard([*(fd.steal() for fd in of_tensors(generation, 1).steal_all()), os.dup(0)]),
        "2 slabs sent, 1 listed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_what_a_publisher_cannot_bring_along(worker: WorkerProcess, bad: str) -> None:
    """Refused whole, with what is wrong: nothing of it is there, no room is taken, no descriptor is left."""
    make, problem = BAD[bad]
    with worker.client() as client:
        client.ask({"op": "status"})
        before = worker.descriptors()
        generation = client.ask({"op": "reserve", "model": "bad", "nbytes": 4096})["generation"]
        with make(generation) as fds:
            error = client.refused({"op": "publish"}, [fd.fileno() for fd in fds])
        assert error["code"] == "bad-manifest"
        assert problem in error["message"]
        status = client.ask({"op": "status"})
        assert (status["shards"], status["reservations"], status["held"]) == ([], [], 0)
        assert worker.descriptors() == before
        assert client.refused({"op": "attach", "model": "bad"})["code"] == "no-such-model"


def test_more_than_the_limits_is_refused(worker: WorkerProcess) -> None:
    """More slabs than fit into a message, more tensors, more bytes of manifest: each refused with both numbers."""
    rows = [[f"t{number}", 0, 0, 0, "U8", [0]] for number in range(manifest.MAX_TENSORS + 1)]
    head = {
        "model": "bad", "generation": 1, "device": "host-0", "key": {"content": "c"}, "slabs": [{"nbytes": 256}],
        "tensor_count": len(rows), "created": "", "schema": manifest.SCHEMA,
    }  # fmt: skip
    many = f"{json.dumps(head)}\n{json.dumps({'tensors': rows, 'aliases': {}}, separators=(',', ':'))}\n".encode()
    assert len(many) < manifest.MAX_MANIFEST_BYTES
    head["slabs"] = [{"nbytes": 1}] * 253
    slabs = f'{json.dumps(head)}\n{{"tensors":[],"aliases":{{}}}}\n'.encode()
    cases = (
        (many, "tensors, aliases and attributes, at most"),
        (slabs, "253 slabs, at most 252"),
        (None, "at most 33554432 are read"),
    )
    for text, problem in cases:
        with worker.client() as client:
            client.ask({"op": "reserve", "model": "bad", "nbytes": 4096})
            before = worker.descriptors()
            with OwnedFd(os.memfd_create("manifest", os.MFD_ALLOW_SEALING)) as fd:
                if text is None:
                    os.ftruncate(fd.fileno(), manifest.MAX_MANIFEST_BYTES + 1)
                else:
                    os.write(fd.fileno(), text)
                fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, SEALS)
                assert problem in client.refused({"op": "publish"}, [fd.fileno()] * 253)["message"]
            assert client.ask({"op": "status"})["held"] == 0
            assert worker.descriptors() == before
