"""What the preload command is told by the service, and what it refuses."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from types import ModuleType

import pytest

from tests.engines.vllm import shaped
from weightcached.engines.vllm import preload
from weightcached.errors import EngineError


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
    made = shaped.install(monkeypatch)
    for name in ("vllm.engine", "vllm.engine.arg_utils", "vllm.plugins", "vllm.utils.argparse_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        made[name] = sys.modules[name]
    made["vllm.plugins"].load_general_plugins = lambda: None
    made["vllm.utils.argparse_utils"].FlexibleArgumentParser = argparse.ArgumentParser
    made["vllm.engine.arg_utils"].EngineArgs = EngineArgs
    config = preload.engine_config(["model", *given], preload.Place("qwen", 0, world))
    assert (config.model, config.load_format) == ("model", "weightcached")
    assert json.loads(config.model_loader_extra_config) == {"publish": True, "model": "qwen"}
    assert config.distributed_executor_backend == backend


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
