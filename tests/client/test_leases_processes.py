"""client/leases.py: the leases of whole processes, through forks, outages, signals and their own end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.client.lending import GONE, SECONDS, Host
from tests.worker.process import ROOT

LIGHT = """
import os, sys
from pathlib import Path
from weightcached.client.keeper import Grant
from weightcached.client.leases import Lease
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach

def attach(model):
    path = Path(os.environ["WEIGHTCACHED_RUNTIME_DIR"], "host-0.sock")
    connection = Connection.open(path, device="host-0")
    granted, fds = connection.request(Attach(model))
    fds.close()
    created = "2026-01-01T00:00:00+00:00"
    lease = Lease(connection)
    lease.keep(Grant("host-0", model, granted["generation"], created, 4096, granted["since"]))
    return lease
"""  # what `attach` does, without torch, whose import takes seconds
FORK = (
    LIGHT
    + """
lease = attach("tiny")
go, going = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(go, 1)
    if sys.argv[1] == "drops":
        del lease
    elif sys.argv[1] == "attaches":
        lease = attach("other")
    print("child", flush=True)
    os.read(go, 1)
    sys.exit(0)
print(pid, flush=True)
for line in sys.stdin:
    match line.strip():
        case "go":
            os.write(going, b"x")
        case "wait":
            print(os.waitpid(pid, 0)[1], flush=True)
        case "drop":
            del lease
            print("dropped", flush=True)
        case "end":
            break
"""
)


class TestFork:
    """A child that was forked with a lease."""

    @contextlib.contextmanager
    def forked(self, child: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], None], Callable[[], str]]]:
        """The parent, a way to tell it something, and what it or the child says."""
        with subprocess.Popen(
            [sys.executable, "-Xdev", "-c", FORK, child],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        ) as process:  # fmt: skip

            def say(line: str) -> None:
                assert process.stdin is not None
                process.stdin.write(line + "\n")
                process.stdin.flush()

            def hear() -> str:
                assert process.stdout is not None
                return process.stdout.readline().strip()

            try:
                yield process, say, hear
                assert process.stdin is not None and process.stderr is not None
                process.stdin.close()
                errors = process.stderr.read()
                assert "Traceback" not in errors and "Warning" not in errors, errors
                assert process.wait(SECONDS) == 0
            finally:
                process.kill()

    @pytest.mark.parametrize("child", ["drops", "keeps"])
    def test_the_parent_is_not_disturbed(self, host: Host, child: str) -> None:
        """A child that drops its copy of the weights, or ends with it, ends no lease of its parent, whose leases are
        renewed as ever."""
        with self.forked(child) as (process, say, hear):
            assert int(hear()) > 0
            say("go")
            assert hear() == "child"
            say("go")
            say("wait")
            assert hear() == "0"
            assert [lease["pid"] for lease in host.leases()] == [process.pid]
            host.kill()
            host.replace()
            assert [lease["pid"] for lease in host.wait_leases(1)] == [process.pid]
            say("drop")
            assert hear() == "dropped"
            host.wait_leases(0)

    def test_the_child_holds_what_it_has_inherited(self, host: Host) -> None:
        """After the parent's end its child still has the memory: the lease lasts, and says that its process has ended.
        An eviction is refused with that. When the child ends, the lease does."""
        with self.forked("keeps") as (process, say, hear):
            child = int(hear())
            say("end")
            with contextlib.closing(Pidfd(process.pid)) as parent:
                parent.wait()
            (lease,) = host.leases()
            assert (lease["pid"], lease["ended"]) == (process.pid, True)
            with host.worker.client() as client:
                error = client.refused({"op": "evict", "model": "tiny"})
                assert (
                    f"pid {process.pid} (" in error["message"] and "ended; a child of it holds on" in error["message"]
                )
            os.kill(child, signal.SIGKILL)
            host.wait_leases(0)

    def test_the_child_may_attach_itself(self, host: Host) -> None:
        """What a child attaches is its own, with a keeper of its own: it is renewed beside its parent's."""
        with self.forked("attaches") as (process, say, hear):
            child = int(hear())
            say("go")
            assert hear() == "child"
            assert sorted(lease["pid"] for lease in host.leases()) == sorted([process.pid, child])
            host.kill()
            host.replace()
            assert sorted(lease["pid"] for lease in host.wait_leases(2)) == sorted([process.pid, child])
            say("go")
            say("wait")
            assert hear() == "0"
            host.wait_leases(1)


class Pidfd:
    """Waits for the end of a process that is not waited for otherwise."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def wait(self) -> None:
        assert select.select([self._fd], [], [], SECONDS)[0]

    def close(self) -> None:
        os.close(self._fd)


OUTAGE = (
    LIGHT
    + """
lease = attach("tiny")
before = set(sys.modules)
print("attached", flush=True)
sys.stdin.readline()
print(sorted(set(sys.modules) - before))
"""
)


def test_an_outage_imports_nothing(host: Host) -> None:
    """What an outage needs is imported before: in it, this very package may be in the middle of an upgrade."""
    with subprocess.Popen(
        [sys.executable, "-c", OUTAGE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        hidden = host.worker.folder / "hidden"
        host.worker.path.rename(hidden)  # so that the keeper has to wait for the path as well
        host.kill()
        hidden.rename(host.worker.path)
        host.replace()
        host.wait_leases(1)
        output, _ = process.communicate("\n", timeout=SECONDS)
    assert output == "[]\n"


SIGNALS = (
    LIGHT
    + """
import signal
lease = attach("tiny")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
print(signal.sigtimedwait([signal.SIGTERM], 20).si_signo == signal.SIGTERM)
"""
)


def test_signals_are_the_engines(host: Host) -> None:
    """A signal that an engine blocks and waits for reaches it, and not the keeper's thread, where it would be the end
    of the process."""
    run = subprocess.run([sys.executable, "-c", SIGNALS], stdout=subprocess.PIPE, text=True, timeout=SECONDS, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "True\n")


EXIT = (
    LIGHT
    + """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s", level="WARNING")
kept = [attach("tiny") for _ in range(20)]
print("attached", flush=True)
sys.stdin.readline()
"""
)


class TestExit:
    """The interpreter's end, with everything that it warns of switched on."""

    @pytest.mark.parametrize("outage", ["none", "queued", "gone"])
    def test_it_is_silent(self, host: Host, outage: str) -> None:
        """A process that ends with leases, while they are held, while they wait to be answered and while there is no
        service, writes nothing and is not kept from ending."""
        hidden = host.worker.folder / "hidden"
        with subprocess.Popen(
            [sys.executable, "-Xdev", "-Werror", "-c", EXIT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            if outage != "none":
                if outage == "gone":
                    host.worker.path.rename(hidden)
                host.kill()
                assert process.stdout.readline() == GONE + "\n"
            started = time.monotonic()
            output, errors = process.communicate("\n", timeout=SECONDS)
            took = time.monotonic() - started
        assert (process.returncode, output, errors) == (0, "", "")
        assert took < 5
        if outage == "gone":
            hidden.rename(host.worker.path)
        if outage != "none":
            host.replace()
        host.wait_leases(0)
