"""What the preload command is told by the service, and what it refuses."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines.vllm import shaped
from weightcached.engines.vllm import preload
from weightcached.errors import EngineError

REDUCING = [f"VLLM_ALLREDUCE_USE_{name}" for name in ("SYMM_MEM", "FLASHINFER", "FLASHINFER_PCIE_IPC")]


def test_place_is_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, rank, number of ranks, and where they meet."""
    for name, value in {"PUBLISH_NAME": "qwen", "RANK": "1", "WORLD": "2"}.items():
        monkeypatch.setenv(f"WEIGHTCACHED_{name}", value)
    monkeypatch.setenv("MASTER_PORT", "29650")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert preload.Place.from_environment() == preload.Place("qwen", 1, 2, "tcp://127.0.0.1:29650")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"WEIGHTCACHED_RANK": "2", "WEIGHTCACHED_WORLD": "2"}, "no rank of"),
        ({"WEIGHTCACHED_RANK": "one"}, "invalid literal"),
        ({"WEIGHTCACHED_PUBLISH_NAME": "-x"}, "no name for a model"),
        ({"WEIGHTCACHED_WORLD": "2"}, "set MASTER_PORT"),
    ],
)
def test_wrong_places(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], problem: str) -> None:
    """Each says which variable it is about."""
    for name in ("WEIGHTCACHED_PUBLISH_NAME", "WEIGHTCACHED_RANK", "WEIGHTCACHED_WORLD", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=problem):
        preload.Place.from_environment()


@pytest.mark.parametrize(
    ("world", "given", "backend"), [(1, [], None), (2, [], "mp"), (2, ["--distributed-executor-backend", "ray"], "ray")]
)
def test_ranks_that_see_one_gpu_each(
    monkeypatch: pytest.MonkeyPatch, world: int, given: list[str], backend: str | None
) -> None:
    """vLLM chooses how to start ranks by the GPUs that it sees, and refuses more ranks; what is chosen it takes."""
    made = modules(monkeypatch, "vllm.engine", "vllm.engine.arg_utils", "vllm.plugins", "vllm.utils.argparse_utils")
    made["vllm.plugins"].load_general_plugins = lambda: None
    made["vllm.utils.argparse_utils"].FlexibleArgumentParser = argparse.ArgumentParser
    made["vllm.engine.arg_utils"].EngineArgs = EngineArgs
    config = preload.engine_config(["model", *given], preload.Place("qwen", 0, world))
    assert (config.model, config.load_format) == ("model", "weightcached")
    assert json.loads(config.model_loader_extra_config) == {"publish": True, "model": "qwen"}
    assert config.distributed_executor_backend == backend


def test_a_rank_looks_for_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own ways to reduce over GPUs, which need those of all ranks, are off before its groups are made."""
    for name in (*REDUCING, "VLLM_DIST_IDENT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("WEIGHTCACHED_DEVICE", raising=False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    made = modules(monkeypatch, "vllm.platforms", "vllm.utils.network_utils", "vllm.v1.worker.workspace")
    made["vllm.platforms"].current_platform = SimpleNamespace(device_type="cpu", dist_backend="gloo")
    made["vllm.utils.network_utils"].get_distributed_init_method = made["vllm.utils.network_utils"].get_open_port = None
    made["vllm.v1.worker.workspace"].init_workspace_manager = lambda device: None
    made["vllm.config"].set_current_vllm_config = lambda config: nullcontext()
    calls: list[tuple[object, ...]] = []

    def group(*sizes: int, **arguments: object) -> None:
        calls.append(("group", *sizes, *(os.environ[name] for name in REDUCING)))

    groups = made["vllm.distributed"]
    groups.set_custom_all_reduce = lambda enable: calls.append(("custom", enable))
    groups.init_distributed_environment = lambda **arguments: calls.append(("init", arguments["local_rank"]))
    groups.ensure_model_parallel_initialized = group
    groups.destroy_model_parallel = groups.destroy_distributed_environment = lambda: None
    weights = SimpleNamespace(manifest=SimpleNamespace(model="qwen"), generation=1, nbytes=1)
    model = SimpleNamespace(**{preload.ATTRIBUTE: weights})
    monkeypatch.setattr(preload, "load_to_publish", lambda *arguments: model)
    parallel = SimpleNamespace(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        worker_cls="json.Worker",
    )
    loading = SimpleNamespace(model_loader_extra_config={})
    config = SimpleNamespace(parallel_config=parallel, load_config=loading, model_config=None)
    assert preload.preload(config, preload.Place("qwen", 1, 2, "tcp://127.0.0.1:29650")) == 0
    assert calls == [("custom", False), ("init", 0), ("group", 2, 1, 1, 1, "0", "0", "0")]
    assert os.environ["VLLM_DIST_IDENT"] == "29650"


def modules(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, Any]:
    """Those of `shaped`, and empty ones of these names."""
    made = shaped.install(monkeypatch)
    for name in names:
        made[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
    return made


class EngineArgs(argparse.Namespace):
    """vLLM's arguments, as many as are given; its config is these."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in ("model", "load-format", "model-loader-extra-config", "distributed-executor-backend"):
            parser.add_argument(f"--{name}")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        return cls(**vars(args))

    def create_engine_config(self) -> EngineArgs:
        return self


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model there is nothing to do."""
    assert preload.main(["preload"]) == 2
    assert "preload MODEL" in capsys.readouterr().err


def test_old_vllm_is_a_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With the sentence, and exit status 1."""
    shaped.install(monkeypatch, version="0.28.0")
    with caplog.at_level(logging.ERROR):
        assert preload.main(["preload", "model"]) == 1
    assert "needs vLLM 0.30" in caplog.text
