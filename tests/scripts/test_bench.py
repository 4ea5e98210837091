"""`scripts/bench attach` runs without a GPU and leaves nothing; its slabs are filled right on both kinds of device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import GRANULARITY, FakeDriver, Status
from weightcached.devices import gpu_devices
from weightcached.shard import cuda

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = ["--quick", "--slabs", "2", "--slab-bytes", "1MiB", "--tensors", "50", "--runs", "2"]


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with the benchmark's processes."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_attach_roles

    return bench_attach_roles


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The command's temporary directory, which it must leave empty. Short: a socket's path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="wct-", dir="/tmp") as folder:
        yield Path(folder)
        assert os.listdir(folder) == []


def bench(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a session of its own, with a temporary directory of its own."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTCACHED_")}
    return subprocess.Popen(
        [str(SCRIPTS / "bench"), *arguments],
        env={**environ, "BENCH_PYTHON": sys.executable, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def session_is_empty(leader: int) -> bool:
    """Whether no process is left of the session that a finished `leader` had started.

    Looks for ten seconds: those that the leader has killed end a moment after it, and nobody is told when.
    """
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.timeout(180)
def test_attach_measures_everything_and_leaves_nothing(temporary: Path, tmp_path: Path) -> None:
    """All parts are measured as often as asked, the JSON has every sample, and no process and no file is left."""
    pytest.importorskip("torch")
    target = tmp_path / "out.json"

    process = bench(temporary, "attach", *TINY, "--big", "3MiB", "--json", str(target))
    output, errors = process.communicate(timeout=170)

    assert process.returncode == 0, errors
    assert session_is_empty(process.pid)
    found = json.loads(target.read_text())
    assert found["failed"] == {}
    assert found["device"]["name"] == "host-0"
    layouts = ["2 x 1.0 MiB, 50 tensors", "1 x 2.0 MiB, 50 tensors", "1 x 3.0 MiB, 50 tensors"]
    names = {f"{layout}: {value}" for layout in layouts for value in ("attach", "views", "touch")}
    names |= {"load_file: load_file", "load_file: touch", "client: import", "weightcachectl: status"}
    assert {name: len(found["samples"].get(name, ())) for name in names} == dict.fromkeys(names, 2)
    assert all(value > 0 for values in found["samples"].values() for value in values)
    for result in found["results"]:
        assert result["min"] <= result["median"] <= result["max"]
        assert result["what"] in output
        assert (f"missed: {result['what']}:" in output) == (result["met"] is False)


@pytest.mark.timeout(120)
def test_an_interrupted_run_cleans_up_and_reports(temporary: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle ends with status 1, what was measured is written, and no process and no file is left."""
    target = tmp_path / "out.json"

    process = bench(temporary, "attach", *TINY, "--json", str(target))
    assert process.stderr is not None
    while "publishing 1 x " not in (line := process.stderr.readline()):  # the last step before the first sample
        assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 1
    assert session_is_empty(process.pid)
    found = json.loads(target.read_text())
    assert found["samples"]["service start"]
    assert "interrupted" in found["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["attach", "--device", "tpu"], "--device"),
        (["attach", "--slab-bytes", "64"], "64MiB"),
        (["attach", "--slab-bytes", "1KiB", "--tensors", "1000"], "do not fit"),
        (["atach"], "scripts/bench attach"),
    ],
)
def test_wrong_usage(arguments: list[str], reason: str, temporary: Path) -> None:
    """Wrong usage exits with 2 and says what is wrong before anything is started."""
    process = bench(temporary, *arguments)
    _, errors = process.communicate(timeout=50)

    assert process.returncode == 2
    assert reason in errors


def test_no_gpu_is_a_sentence(temporary: Path) -> None:
    """Without a GPU, `--device cuda` exits with 1 and one line; host memory is not measured in its place."""
    if gpu_devices():
        pytest.skip("this host has a GPU")

    process = bench(temporary, "attach", "--device", "cuda", "--quick")
    output, errors = process.communicate(timeout=50)

    assert process.returncode == 1
    assert output == ""
    assert errors.startswith("bench: ")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(("slabs", "slab_bytes", "tensors"), [(16, 1 << 20, 1000), (3, 256 * 7, 4), (1, 1 << 20, 1)])
def test_tensors_fill_the_slabs(roles: Any, slabs: int, slab_bytes: int, tensors: int) -> None:
    """A layout's tensors have names of their own and cover every byte of every slab exactly once."""
    entries = roles.Layout(slabs, slab_bytes, tensors).entries()

    assert len({entry.name for entry in entries}) == tensors
    ends = [0] * slabs
    for entry in entries:
        assert entry.offset == ends[entry.slab]
        assert entry.nbytes == entry.shape[0] * entry.shape[1] * 2 > 0
        ends[entry.slab] += entry.nbytes
    assert ends == [slab_bytes] * slabs


class CopyingDriver(FakeDriver):
    """The fake driver with the synchronous copies, which only the benchmark uses."""

    def cuMemcpyHtoD(self, dstDevice: int, srcHost: bytes, ByteCount: int) -> tuple[Any]:
        self.poke(dstDevice, srcHost[:ByteCount])
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoD(self, dstDevice: int, srcDevice: int, ByteCount: int) -> tuple[Any]:
        self.poke(dstDevice, self.peek(srcDevice, ByteCount))
        return (Status.CUDA_SUCCESS,)


@pytest.mark.parametrize("nbytes", [GRANULARITY, 14 << 20])
def test_cuda_slabs_hold_the_pattern(roles: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab filled by copies on the device, shorter and longer than the random block, is the pattern everywhere."""
    fake = CopyingDriver()
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    fake.cuInit(0)
    device = cuda.device_name(0)

    with roles._filled(device, 3, nbytes) as slab:
        content = os.pread(slab.fileno(), nbytes, 0)

    assert content == roles.pattern(3, 0, nbytes)
    assert roles.pattern(3, 1000, 77) == content[1000:1077]
    assert fake.live() == {}
