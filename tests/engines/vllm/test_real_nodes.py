"""The plug-in in `vllm serve --nnodes 2`: an engine over two nodes, each with a service and a device of its own.

    WEIGHTCACHED_VLLM_PYTHON=/path/to/python pytest tests/engines/vllm/test_real_nodes.py

As test_real_serve.py, which see. Both nodes are this host, with a runtime directory each. With one GPU it is the device
of both: NCCL, which refuses a device that two ranks of a host share, is told that they are two hosts.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.vllm import real
from tests.engines.vllm.serving import Served, plugin_folder
from tests.engines.vllm.test_real_serve import PROMPT, PYTHON, models, pytestmark
from tests.manager import Manager
from tests.running import import_path
from tests.service.nodes import free_port
from weightcached.devices import gpu_devices

__all__ = ["models", "pytestmark"]

SECONDS = 300.0  # for anything that is waited for
KINDS = {  # checkpoint, keys of the model in the config, arguments of vLLM
    "tensor": ("qwen3", "tensor_parallel = 2", ("--tensor-parallel-size", "2")),
    "pipeline": ("qwen3", "pipeline_parallel = 2", ("--pipeline-parallel-size", "2")),
    "expert": (
        "qwen3-moe",
        "tensor_parallel = 2\nexpert_parallel = true",
        ("--tensor-parallel-size", "2", "--enable-expert-parallel"),
    ),
}


Start = Callable[..., "Engine"]  # checkpoint, arguments of vLLM; options of the loader


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
        self.nodes[0].ready(SECONDS)
        return self

    @property
    def logs(self) -> list[str]:
        return [node.log for node in self.nodes]

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


@pytest.fixture
def nodes() -> Iterator[list[Manager]]:
    """Two nodes, whose config says which devices they have, and nothing yet of models. They do not run."""
    names = [device.name for device in gpu_devices()] or ["host-0", "host-1"]
    with contextlib.ExitStack() as ended:
        made = []
        for rank, name in enumerate((names * 2)[:2]):
            folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="wcn-", dir="/tmp")))
            environ = {"NCCL_HOSTID": f"node-{rank}", **real.ENVIRONMENT}
            environ |= {"CUDA_VISIBLE_DEVICES": name} if gpu_devices() else {}
            made.append(Manager(folder, f'devices = ["{name}"]\n', instance=f"node{rank}", environ=environ))
            ended.callback(made[-1].abandon)
        yield made


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
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_for("READY=1", SECONDS)
    of, _, arguments = KINDS["tensor"]
    first = start(of, *arguments)
    assert [log.count("is loaded from disk") for log in first.logs] == [1, 1]
    tokens = first.nodes[0].complete(PROMPT)
    first.kill()
    second = start(of, *arguments, on_miss="fail")
    assert [log.count("generation 1") for log in second.logs] == [1, 1]
    assert second.nodes[0].complete(PROMPT) == tokens
    second.kill()
    for node in nodes:
        node.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_preloaded_on_two_nodes(models: Path, nodes: list[Manager], start: Start, tmp_path: Path, kind: str) -> None:
    """The services preload a rank each by `publisher`, agree, and the engine's ranks find them, with the tokens of a
    load from disk; also after a node's service was killed under the engine, and the engine after it."""
    of, keys, arguments = KINDS[kind]
    computes = kind == "tensor" or gpu_devices()  # see test_two_ranks
    path = import_path() if gpu_devices() else f"{plugin_folder(tmp_path)}:{import_path()}"
    command = ["env", f"PYTHONPATH={path}", PYTHON, "-m", "weightcached.engines.vllm", "preload", str(models / of)]
    command += [*real.ENGINE, *arguments]
    ports = [free_port(), free_port()]
    for rank, node in enumerate(nodes):
        model = f'[[model]]\nname = "served"\ncheckpoint = "{models / of}"\n{keys}\npublisher = {json.dumps(command)}\n'
        cluster = f'[cluster]\nnodes = 2\nnode_rank = {rank}\nmaster_addr = "127.0.0.1"\nmaster_port = {ports[0]}\n'
        node.configure(node.config.read_text() + model + cluster + f"publisher_port = {ports[1]}\n")
        node.start()
    for node in nodes:
        node.wait_for("READY=1", SECONDS)

    def tokens_of(engine: Engine) -> list[int]:
        return engine.nodes[0].complete(PROMPT) if computes else []

    tokens = []
    if computes:
        disk = start(of, *arguments, "--load-format", "auto")
        tokens = tokens_of(disk)
        disk.kill()
    engine = start(of, *arguments, on_miss="fail")
    assert [log.count("served generation 1") for log in engine.logs] == [1, 1]
    assert tokens_of(engine) == tokens
    nodes[1].kill()
    assert tokens_of(engine) == tokens
    engine.kill()
    nodes[1].start().wait_for("READY=1", SECONDS)
    again = start(of, *arguments, on_miss="fail")
    assert [log.count("served generation 1") for log in again.logs] == [1, 1]
    assert tokens_of(again) == tokens
    for node in nodes:
        node.stop()
