"""weightcachectl against real services, as a person or a script runs it."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint
from tests.llama import write_llama
from tests.running import RunningService
from tests.wire.serving import serving
from weightcached.cli import ctl as ctl_module
from weightcached.fds import FdSet
from weightcached.paths import socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import SERVICE_OPS, Attach, Request
from weightcached.wire.server import ServerConnection

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Callable[..., RunningService]]:
    """Starts services that are ended with the test."""
    started: list[RunningService] = []

    def begin(config: str, **options: str) -> RunningService:
        service = RunningService(runtime_dir, config, instance=options.get("instance", "test"))
        started.append(service)
        return service.ready()

    yield begin
    for service in started:
        service.abandon()


@pytest.fixture
def config(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> str:
    """One small model on host-0."""
    path = make_checkpoint(tmp_path / "small.safetensors", {"a": ("F32", (64, 16), bytes(4096))})
    return f'devices = ["host-0"]\n[[model]]\nname = "small"\ncheckpoint = "{path}"\n'


def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One command, whatever its exit status."""
    return subprocess.run(
        [sys.executable, "-m", "weightcached.cli.ctl", *arguments], capture_output=True, text=True, timeout=30, cwd=ROOT
    )


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize(
    "command", [["status"], ["list"], ["load", "m"], ["evict", "m"], ["wait"], ["verify", "m"], ["reload"]]
)
def test_no_service_is_exit_code_3(command: list[str]) -> None:
    """Every command says how to start one."""
    done = ctl(*command)
    assert done.returncode == 3
    assert "systemctl --user start weightcached@" in done.stderr
    assert done.stdout == ""


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize("command", [[], ["frobnicate"], ["load"], ["verify"], ["wait", "--timeout", "soon"]])
def test_wrong_usage_is_exit_code_2(command: list[str]) -> None:
    """argparse's own code, with usage on stderr."""
    done = ctl(*command)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_status_shows_models_devices_and_users(start: Callable[..., RunningService], config: str) -> None:
    """The table names the model, its device, size and generation. A holder appears with its pid, and in a table
    of its own with command, uid, since when and bytes; that table is there only when somebody holds something."""
    service = start(config)
    with Connection.open(socket_path("host-0"), device="host-0") as worker:
        _, fds = worker.request(Attach(model="small"))
        fds.close()
        text = service.ctl("status")
    assert f"weightcached@test 0.1.0, pid {service.process.pid}, ready" in text
    row = next(line for line in text.splitlines() if line.startswith("small"))
    assert row.split()[:6] == ["small", "host-0", "-", "cached", "4.0", "KiB"]
    assert "(pytest)" in row or "(python" in row
    heading, holder = text.splitlines()[-2:]
    assert heading.split() == ["PID", "COMMAND", "UID", "SINCE", "SIZE", "MODEL", "GEN", "DEVICE"]
    assert holder.split()[0] == str(os.getpid())
    assert holder.split()[2] == str(os.getuid())
    assert datetime.fromisoformat(holder.split()[3]).tzinfo is not None
    assert holder.split()[4:] == ["4.0", "KiB", "small", "1", "host-0"]
    assert "PID" not in service.ctl("status")
    service.stop()


def test_status_of_several_ranks(
    start: Callable[..., RunningService], tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """Each rank is a row with its place; how many of them are there is a line, whether all are or not."""
    write_llama(tmp_path / "llama", make_checkpoint)
    service = start(
        'devices = ["host-0", "host-1", "host-2", "host-3"]\n'
        f'[[model]]\nname = "cut"\ncheckpoint = "{tmp_path}/llama"\ntensor_parallel = 2\n'
        f'[[model]]\nname = "grid"\ncheckpoint = "{tmp_path}/llama"\ntensor_parallel = 2\npipeline_parallel = 2\n'
    )
    text = service.ctl("status")
    rows = [line.split() for line in text.splitlines()]
    for number in (0, 1):
        assert ["cut", f"host-{number}", "tp", f"{number}/2", "cached"] in [row[:5] for row in rows]
    places = [row[1:6] for row in rows if row[0] == "grid"]
    assert places == [
        [f"host-{2 * stage + rank}", "pp", f"{stage}/2", "tp", f"{rank}/2"] for stage in (0, 1) for rank in (0, 1)
    ]
    assert "cut: cached, 2/2 ranks" in text.splitlines()
    assert "grid: cached, 4/4 ranks" in text.splitlines()
    assert "tp 1/2" in service.ctl("list")
    assert "cut is cached on host-0, host-1 already" in service.ctl("load", "cut")
    service.ctl("evict", "cut", "--device", "host-0")
    lines = service.ctl("status").splitlines()
    assert ["cut", "host-0", "-", "absent", "-", "-", "-"] in [line.split() for line in lines]
    assert "cut: absent, 1/2 ranks" in lines
    assert "cut is configured for host-0, host-1 but not loaded" in service.ctl("wait", "cut", code=4)
    service.stop()


def test_json_is_one_object_with_a_schema(start: Callable[..., RunningService], config: str) -> None:
    """`status` and `list` as JSON: a schema number, bytes as integers."""
    service = start(config)
    status = json.loads(service.ctl("status", "--json"))
    assert status["schema"] == 1
    assert status["services"][0]["devices"][0]["held"] == 4096
    shards = json.loads(service.ctl("list", "--json"))
    assert (shards["schema"], shards["shards"][0]["nbytes"]) == (1, 4096)
    service.stop()


def test_unknown_names_are_exit_code_4(start: Callable[..., RunningService], config: str) -> None:
    """A model or a device that the service does not have is named with what it has."""
    service = start(config)
    for command in (["load", "big"], ["wait", "big"]):
        assert "there: small" in service.ctl(*command, code=4)
    service.ctl("evict", "big", code=4)
    service.ctl("evict", "small", "--device", "host-7", code=4)
    assert service.model("small")["state"] == "cached"
    service.stop()


def test_several_services_need_a_choice(start: Callable[..., RunningService], config: str, runtime_dir: Path) -> None:
    """With two services, `load` asks for --instance; with it, it works."""
    service = start(config)
    with serving(runtime_dir / "other.control.sock", ops=SERVICE_OPS, device=None):
        done = ctl("load", "small")
        assert done.returncode == 1
        assert "several services run here; choose one with --instance" in done.stderr
        assert ctl("load", "small", "--instance", "test").returncode == 0
    service.stop()


def test_a_dead_services_socket_hides_nobody(
    start: Callable[..., RunningService], config: str, runtime_dir: Path
) -> None:
    """The file that a killed service left is passed over, unless it is the one that is asked for."""
    service = start(config)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(runtime_dir / "dead.control.sock"))
    assert "small" in service.ctl("status")
    assert "already" in service.ctl("load", "small")
    assert ctl("status", "--instance", "dead").returncode == 3
    (runtime_dir / "dead.control.sock").unlink()
    service.stop()


def test_a_service_that_hangs_hides_nobody(
    start: Callable[..., RunningService],
    config: str,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is named on stderr and in JSON, and the exit code is 1; the others are shown, and do what is asked. Named with
    --instance it is an error as any other."""
    monkeypatch.setattr(ctl_module, "HELLO_SECONDS", 0.5)
    service = start(config)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hung:
        hung.bind(str(runtime_dir / "hung.control.sock"))
        hung.listen()
        for command in (["status"], ["evict", "small"]):
            assert ctl_module.main(command) == 1
            out, err = capsys.readouterr()
            assert "small" in out
            assert err.startswith("weightcachectl: weightcached@hung: ") and "waited 0.5 s" in err
        for command, key in ((["status"], "services"), (["list"], "shards")):
            assert ctl_module.main([*command, "--json"]) == 1
            answer = json.loads(capsys.readouterr().out)
            assert [item.get("instance") for item in answer["unreachable"]] == ["hung"]
            assert "waited 0.5 s" in answer["unreachable"][0]["error"]
            assert len(answer[key]) == (1 if key == "services" else 0)
        assert ctl_module.main(["status", "--instance", "hung", "--json"]) == 1
        assert capsys.readouterr().out == ""
        assert ctl_module.main(["status", "--instance", "test"]) == 0
        assert capsys.readouterr().err == ""
        service.stop(shared=True)
        assert ctl_module.main(["status", "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert (answer["services"], len(answer["unreachable"])) == ([], 1)
        assert ctl_module.main(["evict", "small"]) == 1
        assert "no service that runs here can be asked" in capsys.readouterr().err


def test_a_service_that_ends_while_it_is_asked_hides_nobody(
    start: Callable[..., RunningService], config: str, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that says hello and then goes is one that could not be asked."""

    def leave(connection: ServerConnection, request: Request, fds: FdSet) -> None:
        connection.close("it goes")

    service = start(config)
    with serving(runtime_dir / "a.control.sock", leave, ops=SERVICE_OPS, device=None):
        assert ctl_module.main(["status"]) == 1
        out, err = capsys.readouterr()
        assert "small" in out
        assert err.startswith("weightcachectl: weightcached@a: ")
    service.stop(shared=True)


def test_a_runtime_directory_of_others_is_refused(runtime_dir: Path) -> None:
    """Whoever may write there could pose as the service, whether it is named or looked for."""
    runtime_dir.chmod(0o777)
    for named in ([], ["--instance", "test"]):
        done = ctl("status", *named)
        assert done.returncode == 1
        assert "is open to other users" in done.stderr


def test_a_holder_that_has_ended_is_said_to_have(runtime_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of those who keep an evicted model's memory, one that lives in a child only is not to be looked for."""
    leases = [
        {"pid": 41, "command": "python", "ended": True},
        {"pid": 42, "command": "vllm", "ended": False},
    ]
    shard = {"model": "m", "device": "host-0", "nbytes": 4096, "draining": leases}

    def evict(connection: ServerConnection, request: Request, fds: FdSet) -> dict[str, object]:
        return {"called_off": False, "evicted": [shard]}

    with serving(runtime_dir / "test.control.sock", evict, ops=SERVICE_OPS, device=None):
        assert ctl_module.main(["evict", "m", "--force"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.endswith("end: pid 41 (python, ended; a child of it holds on), pid 42 (vllm)")


def test_status_costs_little(start: Callable[..., RunningService], config: str) -> None:
    """`status` takes less than 150 ms of processor time, its process's start included."""
    service = start(config)
    service.ctl("status")
    costs = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert ctl("status").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"weightcachectl status: {min(costs) * 1000:.0f} ms of processor time, best of 10")
    assert min(costs) < 0.150
    service.stop()


def test_errors_of_a_device_are_in_its_line() -> None:
    """How often each Xid came, and why the device is lost; nothing of it for a device without."""
    device = {"device": "GPU-1", "held": 0, "limit": 1 << 30, "pid": 7, "worker_restarts": 0, "xids": {}, "lost": None}
    line = "GPU-1: 0 B of 1.0 GiB held, worker pid 7, 0 restarts"
    assert ctl_module._device_line(device) == line
    device |= {"xids": {"31": 2, "79": 1}, "lost": "Xid 79 (GPU has fallen off the bus)"}
    assert ctl_module._device_line(device) == f"{line}, Xids 31 x2, 79, LOST: Xid 79 (GPU has fallen off the bus)"
