"""probe: NVML is asked by a child, whose answer, error, silence or nonsense comes back as the caller's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weightcached import probe
from weightcached.devices import gpu_devices, host_devices
from weightcached.errors import DeviceError, NoSuchDevice
from weightcached.probe import answer, probe_devices, probe_memory

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
NOT_HERE = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds the package as this process does, also where it is not installed."""
    monkeypatch.chdir(ROOT)


def child(monkeypatch: pytest.MonkeyPatch, path: Path, code: str) -> None:
    """In place of the real child this Python code runs."""
    path.write_text(f"#!{PYTHON}\n{code}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_host_devices_need_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is read in this process."""
    monkeypatch.setattr(subprocess, "run", None)
    (device,) = probe_devices(["host-0"])
    assert device.name == "host-0"
    assert device.memory.total == host_devices()[0].memory.total
    assert 0 < probe_memory("host-0").free <= device.memory.total


def test_the_child_answers_what_this_process_would_find() -> None:
    """The default devices come back whole: every GPU, and host-0 where there is none."""
    expected = gpu_devices() or host_devices()[:1]
    assert [device.name for device in probe_devices(None)] == [device.name for device in expected]
    assert probe_devices(None)[0].memory.total == expected[0].memory.total


def test_an_error_of_the_child_is_raised_here() -> None:
    """A device that is not there is the same error with the same words as without a child."""
    with pytest.raises(NoSuchDevice, match=NOT_HERE) as caught:
        probe_devices([NOT_HERE])
    assert "host-0" in caught.value.known


def test_the_answer_is_one_object() -> None:
    """Both kinds of answer are JSON on standard output, with exit status 0."""
    assert set(json.loads(answer(["host-0"]))) == {"devices"}
    assert json.loads(answer([NOT_HERE]))["error"]["code"] == "no-such-device"


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that has fallen off the bus can hang NVML: the caller gets an error in bounded time."""
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.3)
    child(monkeypatch, tmp_path / "hangs", "import signal; signal.pause()")
    with pytest.raises(DeviceError, match="does not answer"):
        probe_devices(None)


def test_a_child_that_dies_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it wrote to stderr is in the error; without any, its exit status."""
    child(monkeypatch, tmp_path / "dies", "import sys; sys.exit('no such library')")
    with pytest.raises(DeviceError, match="no such library"):
        probe_devices(None)
    child(monkeypatch, tmp_path / "silent", "raise SystemExit(7)")
    with pytest.raises(DeviceError, match="exit status 7"):
        probe_devices(None)
