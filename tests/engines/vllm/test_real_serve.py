"""The plug-in in `vllm serve`: engines in processes of their own, killed; the service killed; ranks; preloading.

    WEIGHTCACHED_VLLM_PYTHON=/path/to/python pytest tests/engines/vllm/test_real_serve.py

As test_real_vllm.py, which see; these take a minute for each start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm import real
from tests.engines.vllm.serving import Served, cached_memory, preload_command
from tests.manager import Manager
from tests.running import ROOT
from weightcached.devices import gpu_devices

PYTHON = os.environ.get("WEIGHTCACHED_VLLM_PYTHON", "")
PROMPT = [100, 200, 300, 400]
Start = Callable[..., Served]  # arguments of vLLM, options of the loader
RANKS = {  # checkpoint, and how vLLM is to divide it
    "tensor": ("qwen3", ("--tensor-parallel-size", "2")),
    "pipeline": ("qwen3", ("--pipeline-parallel-size", "2")),
    "expert": ("qwen3-moe", ("--tensor-parallel-size", "2", "--enable-expert-parallel")),
    "data": ("qwen3", ("--data-parallel-size", "2")),
    "data and expert": ("qwen3-moe", ("--data-parallel-size", "2", "--enable-expert-parallel")),
}
TWO = 'devices = "all"\n' if gpu_devices() else 'devices = ["host-0", "host-1"]\n'
TWO_DEVICES = pytest.mark.skipif(len(gpu_devices()) == 1, reason="each rank needs a GPU, and there is one")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="WEIGHTCACHED_VLLM_PYTHON names no interpreter that has vLLM"),
    pytest.mark.timeout(1800),
]


def computes(kind: str) -> bool:
    """Whether such ranks answer. On a CPU vLLM 0.32 loads the others and fails at the first request."""
    return kind == "tensor" or bool(gpu_devices())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense checkpoint and one with experts."""
    root = tmp_path_factory.mktemp("checkpoints")
    command = [PYTHON, "-m", "tests.engines.vllm.checkpoints", str(root), "qwen3", "qwen3-moe"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return root


@pytest.fixture
def model(models: Path) -> Path:
    return models / "qwen3"


@contextlib.contextmanager
def running(runtime_dir: Path, config: str) -> Iterator[Manager]:
    made = Manager(runtime_dir, config)
    try:
        made.start().wait_for("READY=1", 300.0)
        yield made
        made.stop()
    finally:
        made.abandon()


@pytest.fixture
def serve(models: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[Served] = []

    def start(*arguments: str, of: str = "qwen3", **options: object) -> Served:
        started.append(Served(PYTHON, models / of, tmp_path, *arguments, **options))
        return started[-1].ready()

    yield start
    for served in started:
        served.kill()


def test_killed_engines_and_a_killed_service(serve: Start, runtime_dir: Path) -> None:
    """An engine that is killed finds its weights again. The service is killed under it: it goes on, and so does the
    service with the same copy, which a second engine then shares."""
    with running(runtime_dir, 'devices = "all"\n') as service:
        first = serve()
        assert "is loaded from disk" in first.log
        tokens = first.complete(PROMPT)
        first.kill()
        second = serve(on_miss="fail")
        assert "generation 1" in second.log
        assert second.complete(PROMPT) == tokens
        service.kill()
        assert second.complete(PROMPT) == tokens
        service.start().ready()
        third = serve(on_miss="fail")
        assert "generation 1" in third.log
        assert third.complete(PROMPT) == second.complete(PROMPT) == tokens
        if not gpu_devices():
            for engine in (second, third):
                (memory,) = [found for found in map(cached_memory, engine.processes()) if found["Rss"]]
                assert memory["Pss"] <= memory["Rss"] // 2
        second.kill()
        third.kill()


@TWO_DEVICES
@pytest.mark.parametrize("kind", RANKS)
def test_two_ranks(serve: Start, runtime_dir: Path, kind: str) -> None:
    """Two ranks publish side by side, and both find their own, with the tokens of a load from disk (if it computes)."""
    of, arguments = RANKS[kind]

    def tokens_of(engine: Served) -> list[int]:
        tokens = engine.complete(PROMPT) if computes(kind) else []
        engine.kill()
        return tokens

    with running(runtime_dir, TWO):
        disk = tokens_of(serve("--load-format", "auto", *arguments, of=of)) if computes(kind) else []
        first = serve(*arguments, of=of)
        assert first.log.count("is loaded from disk") == 2
        assert tokens_of(first) == disk
        second = serve(*arguments, of=of, on_miss="fail")
        assert second.log.count("generation 1") == 2
        assert tokens_of(second) == disk


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=TWO_DEVICES)])
def test_a_service_preloads_by_the_command(
    serve: Start, model: Path, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """`publisher = [...]`: the service is ready when the weights are cached; the first engine is a hit, each rank."""
    devices = [device.name for device in gpu_devices()[:size]] or ["host-0", "host-1"][:size]
    ranks = ["--tensor-parallel-size", str(size)]
    config = f"""devices = {json.dumps(devices)}
[[model]]
name = "served"
checkpoint = "{model}"
tensor_parallel = {size}
publisher = {json.dumps(preload_command(PYTHON, model, tmp_path, *ranks))}
"""
    for name, value in real.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with running(runtime_dir, config):
        engine = serve(*ranks, on_miss="fail")
        assert engine.log.count("served generation 1") == size
        tokens = engine.complete(PROMPT)
        engine.kill()
        disk = serve("--load-format", "auto", *ranks)
        assert disk.complete(PROMPT) == tokens
        disk.kill()
