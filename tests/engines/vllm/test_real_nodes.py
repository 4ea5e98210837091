"""The plug-in in `vllm serve --nnodes 2`: an engine over two nodes, each with a service and a device of its own.

    WEIGHTCACHED_VLLM_PYTHON=/path/to/python pytest tests/engines/vllm/test_real_nodes.py

As test_real_serve.py, which see. Both nodes are this host, with a runtime directory each. With one GPU it is the device
of both: NCCL, which refuses a device that two ranks of a host share, is told that they are two hosts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm import real
from tests.engines.vllm.serving import Served, preload_command
from tests.engines.vllm.test_real_serve import PROMPT, PYTHON, RANKS, computes, models, pytestmark
from tests.manager import Manager
from tests.service.nodes import free_port, table
from weightcached.devices import gpu_devices

__all__ = ["models", "pytestmark"]

Start = Callable[..., "Engine"]  # checkpoint, arguments of vLLM; options of the loader
KEYS = {  # of the model in the config, for the kinds of RANKS that can be preloaded
    "tensor": "tensor_parallel = 2",
    "pipeline": "pipeline_parallel = 2",
    "expert": "tensor_parallel = 2\nexpert_parallel = true",
}


class Engine:
    """vLLM over the nodes; it starts with the object and ends by `kill`."""

    def __init__(self, nodes: list[Manager], model: Path, folder: Path, *arguments: str, **options: object) -> None:
        port = str(free_port())
        self.nodes: list[Served] = []
        for rank, node in enumerate(nodes):
            place = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port]
            place += ["--headless"] if rank else []
            place += ["--disable-custom-all-reduce"]  # vLLM sees that it is one host, and looks for both GPUs in it
            environ = {**node.environ, "WEIGHTCACHED_RUNTIME_DIR": str(node.runtime_dir)}
            self.nodes.append(Served(PYTHON, model, folder, *place, *arguments, environ=environ, **options))

    def ready(self) -> Engine:
        self.nodes[0].ready()
        return self

    def complete(self) -> list[int]:
        return self.nodes[0].complete(PROMPT)

    def count(self, text: str) -> list[int]:
        """How often each node has said it."""
        return [node.log.count(text) for node in self.nodes]

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


@pytest.fixture
def nodes(runtime_dir: Path) -> Iterator[list[Manager]]:
    """Two nodes, whose config says which devices they have, and nothing yet of models. They do not run."""
    names = [device.name for device in gpu_devices()] or ["host-0", "host-1"]
    with contextlib.ExitStack() as ended:
        made = []
        for rank, name in enumerate((names * 2)[:2]):
            folder = runtime_dir / str(rank)
            folder.mkdir(mode=0o700)
            environ = {"NCCL_HOSTID": f"node-{rank}", **real.ENVIRONMENT}
            environ |= {"CUDA_VISIBLE_DEVICES": name} if gpu_devices() else {}
            made.append(Manager(folder, f'devices = ["{name}"]\n', instance=f"node{rank}", environ=environ))
            ended.callback(made[-1].abandon)
        yield made


@contextlib.contextmanager
def running(nodes: list[Manager]) -> Iterator[None]:
    """Ready together, since those of a cluster wait for one another; stopped in order unless the test fails."""
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_for("READY=1", real.START_SECONDS)
    yield
    for node in nodes:
        node.stop()


@pytest.fixture
def start(models: Path, nodes: list[Manager], tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as ended:

        def started(of: str, *arguments: str, **options: object) -> Engine:
            engine = Engine(nodes, models / of, tmp_path, *arguments, **options)
            ended.callback(engine.kill)
            return engine.ready()

        yield started


def test_published_on_two_nodes(nodes: list[Manager], start: Start) -> None:
    """The first engine's ranks publish, each to its node's service; those of the second find them. No cluster."""
    of, arguments = RANKS["tensor"]
    with running(nodes):
        first = start(of, *arguments)
        assert first.count("is loaded from disk") == [1, 1]
        tokens = first.complete()
        first.kill()
        second = start(of, *arguments, on_miss="fail")
        assert second.count("generation 1") == [1, 1]
        assert second.complete() == tokens
        second.kill()


@pytest.mark.parametrize("kind", KEYS)
def test_preloaded_on_two_nodes(models: Path, nodes: list[Manager], start: Start, tmp_path: Path, kind: str) -> None:
    """The services preload a rank each by `publisher`, agree, and the engine's ranks find them, with the tokens of a
    load from disk; also after a node's service was killed under the engine, and the engine after it."""
    of, arguments = RANKS[kind]
    publisher = json.dumps(preload_command(PYTHON, models / of, tmp_path, *arguments))
    port, publisher_port = free_port(), free_port()
    for rank, node in enumerate(nodes):
        model = f'[[model]]\nname = "served"\ncheckpoint = "{models / of}"\n{KEYS[kind]}\npublisher = {publisher}\n'
        cluster = table(2, rank, port, f"publisher_port = {publisher_port}")
        node.configure(node.config.read_text() + model + cluster)

    def tokens_of(engine: Engine) -> list[int]:
        return engine.complete() if computes(kind) else []

    with running(nodes):
        tokens = []
        if computes(kind):
            disk = start(of, *arguments, "--load-format", "auto")
            tokens = tokens_of(disk)
            disk.kill()
        engine = start(of, *arguments, on_miss="fail")
        assert engine.count("served generation 1") == [1, 1]
        assert tokens_of(engine) == tokens
        nodes[1].kill()
        assert tokens_of(engine) == tokens
        engine.kill()
        nodes[1].start().wait_for("READY=1", real.START_SECONDS)
        again = start(of, *arguments, on_miss="fail")
        assert again.count("served generation 1") == [1, 1]
        assert tokens_of(again) == tokens
