"""docs/own-engine.md: its two programs, as they are written there, against a real service."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.running import ROOT, RunningService, import_path
from tests.warm import Warm

PAGE = ROOT / "docs" / "own-engine.md"
RUN_SECONDS = 100
DEVICES = ("host-0", "host-1")
# What C++ says when Python ends while gloo's thread still has a tensor of the last all_reduce: the program has done its
# work by then. It is rare, on busy machines, and torch's (https://github.com/pytorch/pytorch/issues/190489).
GLOO_AT_EXIT = "terminate called without an active exception"
StartService = Callable[[], RunningService]

pytestmark = pytest.mark.timeout(5 * RUN_SECONDS)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The folder with the page's programs, each under the name that the page gives it."""
    text = PAGE.read_text()
    found = re.findall(r"^`(\w+\.py)`, run as .*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == ["engine.py", "ranks.py"]
    assert text.count("```python") == len(found)
    for name, code in found:
        (tmp_path / name).write_text(code)
    return tmp_path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with the random weights that both programs take, in float32."""
    folder = tmp_path / "mine"
    folder.mkdir()
    torch.manual_seed(0)
    shapes = {"embed.weight": (256, 64), "up.weight": (128, 64), "down.weight": (64, 128)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[StartService]:
    """Starts a service for both host devices that has no model of its own; ended and checked at the end."""
    started: list[RunningService] = []

    def start() -> RunningService:
        started.append(RunningService(runtime_dir, f"devices = {list(DEVICES)}\n"))
        return started[-1].ready()

    yield start
    for service in started:
        service.stop()


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Forks Pythons that have imported torch, for each of which it takes longer than the page's program."""
    started = Warm("torch.distributed.run", "torch._dynamo")  # the latter for a module on the device meta
    yield started
    started.close()


def run(warm: Warm, *arguments: object, folder: Path) -> str:
    """What a program of the page prints, with this host's GPUs out of sight."""
    # One thread: a sum in another order would be another number.
    environ = {**os.environ, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = warm.start(*map(str, arguments), cwd=folder, environ=environ).wait(RUN_SECONDS)
    aborted = GLOO_AT_EXIT in done.stderr and "SIGABRT" in done.stderr
    assert done.returncode == 0 or aborted, done.stdout + done.stderr
    return done.stdout


def torchrun(warm: Warm, programs: Path, checkpoint: Path) -> list[str]:
    """What the two ranks print, rank 0 first."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    return sorted(run(warm, *launcher, "ranks.py", checkpoint, folder=programs).splitlines())


def expected(checkpoint: Path, dtype: torch.dtype) -> str:
    """The answer, by the formula of both programs, written out once more."""
    from safetensors.torch import load_file

    tensors = {name: tensor.to(dtype) for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    hidden = tensors["embed.weight"][:8]
    out = hidden + (hidden @ tensors["up.weight"].T).relu() @ tensors["down.weight"].T
    return str((out @ tensors["embed.weight"].T).argmax(-1).tolist())


def other_bytes(checkpoint: Path) -> None:
    """The checkpoint is overwritten in place by others of the same size."""
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4 * 64 * 128 :] = data[-4 * 64 * 128 :][::-1][3:] + b"\0\0\0"
    path.write_bytes(data)


def test_the_programs_are_short(programs: Path) -> None:
    """Some thirty lines each beside the model and the imports, which any engine has."""
    for name in ("engine.py", "ranks.py"):
        own = [part for part in ast.parse((programs / name).read_text()).body if not isinstance(part, ast.ClassDef)]
        lines = {line for part in own for line in range(part.lineno, (part.end_lineno or 0) + 1)}
        assert len(lines) <= 32, name


def test_one_rank_publishes_and_attaches(warm: Warm, programs: Path, checkpoint: Path, start: StartService) -> None:
    """The first start is from disk, the second attached, with the same answer; another checkpoint is not mistaken."""
    start()
    answer = expected(checkpoint, torch.bfloat16)

    first, second = (run(warm, "engine.py", checkpoint, "host-0", folder=programs).splitlines() for _ in range(2))

    assert first[0].startswith("loaded from disk: no model")
    assert second[0] == "attached: 3 tensors"
    assert first[1:] == second[1:] == [answer]

    other_bytes(checkpoint)
    changed = expected(checkpoint, torch.bfloat16)
    third, fourth = (run(warm, "engine.py", checkpoint, "host-0", folder=programs).splitlines() for _ in range(2))

    assert third[0].startswith("loaded from disk: ")
    assert fourth[0] == "attached: 3 tensors"
    assert third[1:] == fourth[1:] == [changed]
    assert changed != answer


def test_one_rank_without_a_service(warm: Warm, programs: Path, checkpoint: Path, runtime_dir: Path) -> None:
    """It runs from disk, and says what it has not got."""
    printed = run(warm, "engine.py", checkpoint, "host-0", folder=programs).splitlines()

    assert printed[0].startswith("loaded from disk: ")
    assert printed[1].startswith("not published: ")
    assert printed[2:] == [expected(checkpoint, torch.bfloat16)]


def test_two_ranks_publish_and_attach(warm: Warm, programs: Path, checkpoint: Path, start: StartService) -> None:
    """Under torchrun, over gloo: each rank its own part, then its own part from the cache, with the same answer."""
    service = start()
    answer = expected(checkpoint, torch.float32)

    first = torchrun(warm, programs, checkpoint)

    assert [line.split(":")[0] for line in first[::2]] == ["rank 0 loaded from disk", "rank 1 loaded from disk"]
    assert "not published" not in "".join(first)
    cached = [(shard["device"], shard["key"]["tensor_parallel_rank"]) for shard in shards(service)]
    assert cached == [("host-0", 0), ("host-1", 1)]

    second = torchrun(warm, programs, checkpoint)

    assert second[::2] == ["rank 0 attached: 3 tensors", "rank 1 attached: 3 tensors"]
    assert first[1::2] == second[1::2] == [f"rank {rank} says {answer}" for rank in range(2)]


def shards(service: RunningService) -> list[dict[str, object]]:
    """What is cached, by device."""
    from weightcached.paths import socket_path
    from weightcached.wire.connection import Connection
    from weightcached.wire.messages import Status

    found: list[dict[str, object]] = []
    assert service.process.poll() is None
    for device in DEVICES:
        with Connection.open(socket_path(device), device=device) as connection:
            status, fds = connection.request(Status())
            fds.close()
        found += ({**shard, "device": device} for shard in status["shards"])
    return found
