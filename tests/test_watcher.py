"""watcher: the real process, with GPUs whose errors the test writes; what it says, and what it holds open."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.scripted_gpus import ScriptedGpus
from weightcached.watcher import KernelLog
from weightcached.wire import framing
from weightcached.xids import PciAddress

ROOT = Path(__file__).parents[1]
A, B = "GPU-aaaa", "GPU-bbbb"
MIG_1, MIG_2 = "MIG-1111", "MIG-2222"
SECONDS = 20.0
HERE = PciAddress(0, 0x3B, 0)


class WatcherProcess:
    """``weightcached watch-devices`` with the test at the other end of its channel."""

    def __init__(self, gpus: ScriptedGpus, *devices: str) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(SECONDS)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weightcached", "watch-devices", *devices, "--channel-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **gpus.environ},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd=ROOT,
            )

    def hear(self) -> dict[str, Any]:
        received = framing.receive(self.channel)
        assert received is not None, f"the watcher ended: {self.log()}"
        data, fds = received
        with fds:
            assert len(fds) == 0
        return framing.decode(data)

    def log(self) -> str:
        """Everything it has logged, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[ScriptedGpus]:
    """Two GPUs, the second cut into two MIG instances."""
    scripted = ScriptedGpus(tmp_path, [A, B], {MIG_1: B, MIG_2: B})
    yield scripted
    scripted.close()


@pytest.fixture
def watch(gpus: ScriptedGpus) -> Iterator[Callable[..., WatcherProcess]]:
    """``watch(*devices)`` starts a watcher; all are ended."""
    started: list[WatcherProcess] = []

    def start(*devices: str) -> WatcherProcess:
        started.append(WatcherProcess(gpus, *devices))
        return started[-1]

    yield start
    for process in started:
        process.close()


Watch = Callable[..., WatcherProcess]


def xid(device: str, number: int) -> dict[str, Any]:
    """What is said of an Xid when the kernel log tells nothing of it."""
    return {"xid": {"device": device, "xid": number, "pid": None, "command": None}}


def test_it_says_what_happens_and_keeps_the_devices_open(gpus: ScriptedGpus, watch: Watch) -> None:
    """Which devices it watches, then every Xid with its device. Device files stay open all the while: with persistence
    mode off that is what keeps a GPU's state."""
    watcher = watch(A, B)
    assert watcher.hear() == {"watching": {"devices": [A, B]}}
    gpus.say(device=A, xid=31)
    gpus.say(device=B, xid=13)
    assert [watcher.hear(), watcher.hear()] == [xid(A, 31), xid(B, 13)]
    assert gpus.opened_by(watcher.process.pid) == {A, B}


def test_only_the_devices_that_are_served_are_opened(gpus: ScriptedGpus, watch: Watch) -> None:
    """Another GPU of the host is neither held open nor spoken of."""
    watcher = watch(A)
    watcher.hear()
    assert gpus.opened_by(watcher.process.pid) == {A}
    gpus.say(device=B, xid=79)
    gpus.say(device=A, xid=63)
    assert watcher.hear() == xid(A, 63)


def test_an_event_of_a_gpu_is_one_of_all_its_mig_instances(gpus: ScriptedGpus, watch: Watch) -> None:
    """NVML names the whole GPU; each instance that is served is told."""
    watcher = watch(MIG_1, MIG_2, A)
    assert watcher.hear() == {"watching": {"devices": [MIG_1, MIG_2, A]}}
    gpus.say(device=B, xid=94)
    assert [watcher.hear(), watcher.hear()] == [xid(MIG_1, 94), xid(MIG_2, 94)]
    gpus.say(device=B, ecc=True)
    assert [watcher.hear(), watcher.hear()] == [{"ecc": {"device": MIG_1}}, {"ecc": {"device": MIG_2}}]


def test_a_device_with_a_fatal_error_is_let_go_of_and_comes_back(gpus: ScriptedGpus, watch: Watch) -> None:
    """A reset is refused while anybody has the device open, so nobody here has; the other device stays watched. When
    the driver asks for no reset any more, it is back and its events are seen again."""
    watcher = watch(A, B)
    watcher.hear()
    gpus.set(A, "reset")
    gpus.say(device=A, xid=79)
    assert watcher.hear() == xid(A, 79)
    gpus.say(device=B, xid=31)
    assert watcher.hear() == xid(B, 31)
    assert gpus.opened_by(watcher.process.pid) == {B}

    gpus.set(A, "ok")
    assert watcher.hear() == {"back": {"device": A}}
    gpus.say(device=A, xid=43)
    assert watcher.hear() == xid(A, 43)
    assert gpus.opened_by(watcher.process.pid) == {A, B}


@pytest.mark.parametrize(
    ("device", "state", "code"),
    [
        (A, "ok", 0),
        (MIG_2, "ok", 0),
        (A, "reset", 1),
        (A, "lost", 1),
        ("GPU-none", "ok", 1),
        (A, "old driver", 0),
    ],
)
def test_what_is_usable(gpus: ScriptedGpus, device: str, state: str, code: int) -> None:
    """A look's exit code. A device for which NVML answers, but whose driver asks for a reset, is not usable."""
    gpus.set(A, state)
    command = [sys.executable, "-m", "weightcached", "watch-devices", "--look", device]
    assert subprocess.run(command, env={**os.environ, **gpus.environ}, cwd=ROOT, timeout=SECONDS).returncode == code


def test_a_device_that_is_lost_without_an_xid_is_gone(gpus: ScriptedGpus, watch: Watch) -> None:
    """NVML says that a GPU is lost, not which: each is asked. The one that does not answer is gone, with its parts."""
    watcher = watch(A, MIG_1, MIG_2)
    watcher.hear()
    gpus.set(B, "lost")
    gpus.say(error=15)
    lost = [watcher.hear(), watcher.hear()]
    assert lost == [{"gone": {"device": name, "problem": "NVML error 15"}} for name in (MIG_1, MIG_2)]
    gpus.set(B, "ok")
    assert sorted(watcher.hear()["back"]["device"] for _ in range(2)) == [MIG_1, MIG_2]


def test_a_false_alarm_loses_nothing(gpus: ScriptedGpus, watch: Watch) -> None:
    """Each device is asked, and each answers; so it is when nothing is heard for a while."""
    watcher = watch(A, B, MIG_1)
    watcher.hear()
    gpus.say(error=15)
    gpus.say(device=A, xid=31)
    assert watcher.hear() == xid(A, 31)


def test_a_device_without_events_is_watched_nevertheless(gpus: ScriptedGpus, watch: Watch) -> None:
    """Such as a virtual GPU: it is no lost one, and another one's events are told."""
    gpus.set(A, "no events")
    watcher = watch(A, B)
    assert watcher.hear() == {"watching": {"devices": [A, B]}}
    gpus.say(device=B, xid=31)
    assert watcher.hear() == xid(B, 31)
    gpus.set(A, "lost")
    gpus.say(error=15)
    assert watcher.hear() == {"gone": {"device": A, "problem": "NVML error 15"}}
    watcher.channel.close()
    watcher.process.wait(3)
    assert "GPU-aaaa: its errors are not reported by NVML: NVML error 999" in watcher.log()


def test_a_device_that_wants_a_reset_at_the_start(gpus: ScriptedGpus, watch: Watch) -> None:
    """It answers, and is of no use: a watcher that was started anew must not take it for one that is back."""
    gpus.set(A, "reset")
    watcher = watch(A)
    problem = "GPU-aaaa: must be reset (NVML's recovery action 1)"
    assert watcher.hear() == {"gone": {"device": A, "problem": problem}}
    assert watcher.hear() == {"watching": {"devices": []}}


def test_a_device_that_is_not_there_at_the_start(gpus: ScriptedGpus, watch: Watch) -> None:
    """It is gone at once, the others are watched; with all of them gone nothing is open, and all are looked for."""
    gpus.set(A, "lost")
    watcher = watch(A, B)
    assert watcher.hear() == {"gone": {"device": A, "problem": "NVML error 15"}}
    assert watcher.hear() == {"watching": {"devices": [B]}}
    gpus.set(B, "lost")
    gpus.say(error=15)
    assert "gone" in watcher.hear()
    look_of(watcher)  # the watcher has let go before anybody looks
    assert gpus.opened_by(watcher.process.pid) == set()
    gpus.set(A, "ok")
    assert watcher.hear() == {"back": {"device": A}}


@pytest.mark.parametrize("lost", [False, True], ids=["watching", "a device is lost"])
def test_it_ends_with_its_channel(gpus: ScriptedGpus, watch: Watch, lost: bool) -> None:
    """The service has gone, so the watcher goes, at once and without an error, though nothing happens on a GPU."""
    watcher = watch(A)
    watcher.hear()
    if lost:
        gpus.set(A, "lost")
        gpus.say(error=15)
        watcher.hear()
    watcher.channel.close()
    assert watcher.process.wait(3) == 0
    assert watcher.log() == ""


def test_it_ends_with_its_channel_while_nvml_hangs(gpus: ScriptedGpus, watch: Watch) -> None:
    """A call that does not return keeps no watcher alive."""
    watcher = watch(A)
    watcher.hear()
    gpus.say(hang=True)
    watcher.channel.close()
    watcher.process.wait(3)


def test_nvml_that_fails_ends_the_watcher(gpus: ScriptedGpus, watch: Watch) -> None:
    """A defect of NVML is said and is exit code 1: a process that sees nothing must not look as if it watched."""
    watcher = watch(A)
    watcher.hear()
    gpus.say(error=999)
    assert watcher.process.wait(SECONDS) == 1
    assert "ERROR device watcher: NVML: cannot wait for events: NVML error 999" in watcher.log()


def test_a_look_that_hangs_hides_no_event(gpus: ScriptedGpus, watch: Watch) -> None:
    """A child that looks for a lost device has no part in the watching: while it hangs, other events are told. When it
    has ended without an answer, another one looks."""
    watcher = watch(A, B)
    watcher.hear()
    gpus.set(A, "lost")
    gpus.say(device=A, xid=79)
    watcher.hear()
    child = look_of(watcher)
    os.kill(child, signal.SIGSTOP)
    try:
        gpus.say(device=B, xid=31)
        assert watcher.hear() == xid(B, 31)
    finally:
        os.kill(child, signal.SIGKILL)
    gpus.set(A, "ok")
    assert watcher.hear() == {"back": {"device": A}}


def look_of(watcher: WatcherProcess) -> int:
    """The pid of the child that looks for a lost device, as soon as there is one; nothing announces it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for task in Path(f"/proc/{watcher.process.pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                # Until it has become the program that looks, its parent waits for it (vfork(2)).
                if b"--look" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    raise AssertionError("nobody looks for the lost device")


class TestKernelLog:
    """Whose an Xid is, from a file in the place of /dev/kmsg."""

    def line(self, xid: int, pid: int) -> str:
        return f"4,1,2,-;NVRM: Xid (PCI:0000:3b:00): {xid}, pid={pid}, name=python, Ch 1\n SUBSYSTEM=pci\n"

    def test_the_process_is_found(self, tmp_path: Path) -> None:
        """By device and number, each line once, in the order in which they were logged; what was before is not read."""
        path = tmp_path / "kmsg"
        path.write_text(self.line(31, 1))
        log = KernelLog(os.fspath(path))
        assert log.find(HERE, 31) is None
        with open(path, "a") as file:
            file.write("6,1,2,-;something else\n" + self.line(31, 22) + self.line(43, 22) + self.line(31, 33))
        found = [log.find(HERE, 31), log.find(HERE, 31), log.find(HERE, 43)]
        assert [(item.pid, item.command) for item in found if item] == [(22, "python"), (33, "python"), (22, "python")]
        assert log.find(HERE, 31) is None
        assert log.find(PciAddress(0, 1, 0), 31) is None

    def test_a_log_that_may_not_be_read_tells_nothing(self, tmp_path: Path, descriptors: NoDescriptorLeaks) -> None:
        """That is how most users find /dev/kmsg, and no error."""
        assert KernelLog(os.fspath(tmp_path / "none")).find(HERE, 31) is None

    def test_a_log_that_fails_is_read_no_more(self, tmp_path: Path, descriptors: NoDescriptorLeaks) -> None:
        """What cannot be read is closed, and nothing is found."""
        assert KernelLog(os.fspath(tmp_path)).find(HERE, 31) is None
