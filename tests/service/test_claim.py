"""claim: one holder of a name at a time, proven with real processes; what holds, races and is taken over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.errors import LockHeld, RuntimeDirectoryError
from weightcached.service import claim
from weightcached.service.claim import Claim, Owner, start_time

ROOT = Path(__file__).parents[2]
SECONDS = 20.0

# A service in miniature: it does what the words on its standard input say and reports on its standard output.
CHILD = """
import fcntl, json, os, signal, socket, subprocess, sys
from pathlib import Path
from weightcached.errors import WeightCacheError
from weightcached.service import claim
from weightcached.service.claim import Claim, Owner

folder, words = Path(sys.argv[1]), sys.argv[2:]
claim.TAKE_OVER_SECONDS = float(os.environ.get("TAKE_OVER_SECONDS", "20"))

def say(**what):
    print(json.dumps(what), flush=True)

def end(*_):
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in words else end)
if "dawdle" in words:  # between the opening of the file and its locking
    flock = fcntl.flock
    def slow(fd, how):
        fcntl.flock = flock
        say(opened=os.fstat(fd).st_ino)
        sys.stdin.readline()
        flock(fd, how)
    fcntl.flock = slow
try:
    held = Claim.take(folder / "host-0.lock", folder / "host-0.sock", Owner.this_process("child"), what="host-0",
                      take_over="take-over" in words)
except WeightCacheError as error:
    say(error=error.code, fields={key: str(value) for key, value in error.fields.items()})
    sys.exit(error.exit_code)
if "worker" in words:  # a process that shares the lock and ends with its standard input
    worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                              pass_fds=[held.lock.fileno()])
    say(taken=os.fstat(held.lock.fileno()).st_ino, worker=worker.pid)
else:
    say(taken=os.fstat(held.lock.fileno()).st_ino)
try:
    sys.stdin.read()
finally:
    held.close()
"""


class Child:
    """One such process."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
        self.pid = self.process.pid

    def says(self) -> dict[str, Any]:
        """The next thing it reports."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], SECONDS)[0], "the child says nothing"
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def finish(self) -> int:
        """Closes its standard input, which it ends with; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(SECONDS)


@pytest.fixture
def spawn(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> Iterator[Any]:
    """``spawn("take-over", ...)`` starts a child on this test's folder."""
    children: list[Child] = []

    def spawn(*words: str, **environment: str) -> Child:
        children.append(Child(runtime_dir, *words, **environment))
        return children[-1]

    yield spawn
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
        for pipe in (child.process.stdin, child.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def paths(runtime_dir: Path) -> tuple[Path, Path]:
    return runtime_dir / "host-0.lock", runtime_dir / "host-0.sock"


def take(paths: tuple[Path, Path], **options: Any) -> Claim:
    return Claim.take(*paths, Owner.this_process("test"), what="host-0", **options)


def held_by(paths: tuple[Path, Path], **options: Any) -> LockHeld:
    with pytest.raises(LockHeld) as caught:
        take(paths, **options)
    return caught.value


def wait_for_waiter(path: Path) -> None:
    """Returns when somebody is blocked on the lock of this file: an indented line of /proc/locks (proc_locks(5))."""
    inode = f":{path.stat().st_ino} "
    end = time.monotonic() + SECONDS
    while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
        assert time.monotonic() < end, "nobody waits for the lock"


def test_a_claim_is_a_lock_and_a_socket(paths: tuple[Path, Path], descriptors: NoDescriptorLeaks) -> None:
    """While it is held the lock's file says who holds it, and clients can connect; afterwards both files are gone."""
    with contextlib.closing(take(paths)) as held:
        assert json.loads(paths[0].read_text()) == {
            "instance": "test", "pid": os.getpid(), "started": start_time(os.getpid()),
        }  # fmt: skip
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(os.fspath(paths[1]))
        held.close()
        held.close()
    assert list(paths[0].parent.iterdir()) == []


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
def test_both_files_are_this_users_alone(paths: tuple[Path, Path], mask: int, descriptors: NoDescriptorLeaks) -> None:
    """The socket has mode 0600 whatever the umask, which is as it was afterwards; the lock is never wider than that."""
    before = os.umask(mask)
    try:
        with contextlib.closing(take(paths)):
            assert stat.S_IMODE(paths[1].stat().st_mode) == 0o600
            assert stat.S_IMODE(paths[0].stat().st_mode) & ~0o600 == 0
    finally:
        assert os.umask(before) == mask


def test_a_second_claim_names_the_holder(paths: tuple[Path, Path], spawn: Any) -> None:
    """Another process, and this one too, is refused with the instance and the pid; the holder's socket stays."""
    child = spawn()
    child.says()
    error = held_by(paths)
    assert (error.device, error.instance, error.pid) == ("host-0", "child", child.pid)
    assert f"host-0 is served by weightcached@child, pid {child.pid}" in str(error)
    assert error.exit_code == 75
    assert paths[1].exists()
    assert child.finish() == 0
    with contextlib.closing(take(paths)):
        assert held_by(paths).pid == os.getpid()


def test_a_stale_socket_is_replaced(paths: tuple[Path, Path], spawn: Any) -> None:
    """What a killed service left behind does not stand in the way of the next one."""
    child = spawn()
    child.says()
    child.process.kill()
    child.process.wait()
    assert paths[0].exists() and paths[1].exists()
    with contextlib.closing(take(paths)), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(os.fspath(paths[1]))


@pytest.mark.parametrize("number", [0, 1])
def test_a_symlink_is_refused(
    paths: tuple[Path, Path], tmp_path: Path, number: int, descriptors: NoDescriptorLeaks
) -> None:
    """A lock file that is a symlink is not followed; a socket's symlink is replaced, not what it points to."""
    target = tmp_path / "target"
    target.write_text("precious")
    paths[number].symlink_to(target)
    if number == 0:
        with pytest.raises(RuntimeDirectoryError, match=r"host-0\.lock: cannot be opened: Too many levels"):
            take(paths)
    else:
        with contextlib.closing(take(paths)):
            assert paths[1].is_socket()
    assert target.read_text() == "precious"


def test_a_socket_that_cannot_be_bound_gives_the_lock_back(
    paths: tuple[Path, Path], descriptors: NoDescriptorLeaks
) -> None:
    """Where something else is in the socket's place the claim fails whole: no lock stays held, no lock file is left."""
    paths[1].mkdir()
    with pytest.raises(RuntimeDirectoryError, match=r"host-0\.sock: cannot be bound"):
        take(paths)
    assert not paths[0].exists()
    paths[1].rmdir()
    take(paths).close()


def test_a_full_file_system_is_an_error_of_the_tree(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """A lock that cannot be written into is given back, with the path and the reason."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(claim.os, "pwrite", full)
    with pytest.raises(RuntimeDirectoryError, match=r"host-0\.lock: cannot be written: No space left on device"):
        take(paths)
    monkeypatch.undo()
    assert not paths[0].exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"[]", b'{"pid":1}', b"\xff" * 5000])
def test_a_holder_that_has_not_written_yet_is_a_holder(
    paths: tuple[Path, Path], content: bytes, descriptors: NoDescriptorLeaks
) -> None:
    """A lock whose file says nothing of use is held all the same, and nobody is signalled for it."""
    paths[0].write_bytes(content)
    with open(paths[0], "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for take_over in (False, True):
            error = held_by(paths, take_over=take_over)
            assert (error.instance, error.pid) == ("?", "?")


def test_a_racing_opener_notices_that_the_file_is_gone(paths: tuple[Path, Path], spawn: Any) -> None:
    """A process that opened the lock's file before its holder removed it, and locks it afterwards, has locked a file
    without a name: it starts again, and really holds the name."""
    held = take(paths)
    child = spawn("dawdle")
    opened = child.says()["opened"]
    assert opened == paths[0].stat().st_ino
    held.close()
    child.go_on()
    taken = child.says()["taken"]
    assert taken == paths[0].stat().st_ino
    assert held_by(paths).pid == child.pid


def test_a_racing_opener_does_not_push_out_a_third(paths: tuple[Path, Path], spawn: Any) -> None:
    """As before, but a third process takes the name in between: the late one is refused, with the third one's pid."""
    held = take(paths)
    child = spawn("dawdle")
    child.says()
    held.close()
    with contextlib.closing(take(paths)):
        child.go_on()
        said = child.says()
        assert (said["error"], said["fields"]["pid"]) == ("lock-held", str(os.getpid()))
        assert child.process.wait(SECONDS) == 75


class TestTakeOver:
    """`take_over` ends the holder and waits for its end."""

    def test_the_holder_is_ended(self, paths: tuple[Path, Path], spawn: Any) -> None:
        """A holder that closes on SIGTERM has ended, cleanly, before the lock changes hands, and the new file is the
        one with the name."""
        holder = spawn()
        holder.says()
        taker = spawn("take-over")
        taken = taker.says()["taken"]
        assert holder.process.wait(SECONDS) == 0
        assert taken == paths[0].stat().st_ino
        assert held_by(paths).pid == taker.pid
        assert paths[1].is_socket()
        assert taker.finish() == 0
        assert list(paths[0].parent.iterdir()) == []

    def test_a_free_lock_is_simply_taken(self, paths: tuple[Path, Path], descriptors: NoDescriptorLeaks) -> None:
        """Nobody holds it, so nobody is ended; a stale file that names a living process changes nothing."""
        victim = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        owner = {"instance": "old", "pid": victim.pid, "started": start_time(victim.pid)}
        paths[0].write_text(json.dumps(owner))
        with contextlib.closing(take(paths, take_over=True)):
            assert victim.poll() is None
        victim.communicate()
        assert victim.returncode == 0

    def test_a_holder_that_does_not_end_keeps_it(
        self, paths: tuple[Path, Path], spawn: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A holder that ignores SIGTERM is not killed; the error says that it is still there."""
        monkeypatch.setattr(claim, "TAKE_OVER_SECONDS", 0.2)
        holder = spawn("stubborn")
        holder.says()
        error = held_by(paths, take_over=True)
        assert error.pid == f"{holder.pid} (still there after SIGTERM)"
        assert holder.process.poll() is None

    def test_another_process_of_the_same_pid_is_never_signalled(self, paths: tuple[Path, Path], spawn: Any) -> None:
        """A pid that was only read from a file may belong to somebody else by now: its start time tells. That process
        lives on, and the lock is waited for instead."""
        victim = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        started = start_time(victim.pid)
        assert started is not None
        paths[0].write_text(json.dumps({"instance": "old", "pid": victim.pid, "started": started - 1}))
        with open(paths[0], "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            taker = spawn("take-over")
            wait_for_waiter(paths[0])
        assert "taken" in taker.says()
        assert victim.poll() is None
        victim.communicate()
        assert victim.returncode == 0

    def test_a_worker_that_outlives_its_service_is_waited_for(self, paths: tuple[Path, Path], spawn: Any) -> None:
        """The lock lives in the open file, which a service shares with its worker: after SIGKILL of the service it is
        still held, by name of the dead service, until the worker ends too; a take-over waits for that."""
        holder = spawn("worker")
        worker = holder.says()["worker"]
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait(SECONDS)
        pidfd = os.pidfd_open(worker)
        try:
            error = held_by(paths)
            assert (error.instance, error.pid) == ("child", holder.pid)
            taker = spawn("take-over")
            wait_for_waiter(paths[0])
            assert not select.select([taker.process.stdout], [], [], 0)[0]
            holder.process.stdin.close()  # the worker's standard input is the same pipe
            assert select.select([pidfd], [], [], SECONDS)[0]
            assert taker.says()["taken"] == paths[0].stat().st_ino
        finally:
            os.close(pidfd)

    def test_a_worker_that_does_not_end_is_named(self, paths: tuple[Path, Path], spawn: Any) -> None:
        """A lock that is still held after all the time there is makes the take-over fail, and says by whom."""
        holder = spawn("worker")
        holder.says()
        holder.process.send_signal(signal.SIGKILL)
        holder.process.wait(SECONDS)
        taker = spawn("take-over", TAKE_OVER_SECONDS="0.2")
        said = taker.says()
        assert said["error"] == "lock-held"
        assert said["fields"]["pid"] == f"{holder.pid} (ended, a worker still holds it)"
        assert taker.process.wait(SECONDS) == 75
        assert paths[0].exists()


def test_start_times() -> None:
    """A process has one start time for its whole life, no process has none, and a command with spaces and parentheses
    does not confuse it."""
    assert start_time(os.getpid()) == start_time(os.getpid())
    code = "import sys; open('/proc/self/comm', 'w').write('a) b (c'); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    own, other = start_time(os.getpid()), start_time(child.pid)
    assert own is not None and other is not None and other >= own
    child.communicate()
    assert start_time(child.pid) is None


def test_a_lock_file_removed_under_its_holder(
    paths: tuple[Path, Path], descriptors: NoDescriptorLeaks, caplog: pytest.LogCaptureFixture
) -> None:
    """While the holder still listens nobody takes its place; what another has made since is not removed by it."""
    holder = take(paths)
    paths[0].unlink()
    with pytest.raises(RuntimeDirectoryError, match="lock file was removed"):
        take(paths)
    paths[1].unlink()
    successor = take(paths)
    holder.close()
    assert "removed or replaced" in caplog.text
    assert paths[0].exists()
    assert paths[1].exists()
    successor.close()
    assert not paths[0].exists()
    assert not paths[1].exists()
