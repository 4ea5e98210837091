"""vLLM as far as the loader sees it, and a real worker for host-0."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.conftest import start_worker, worker
from tests.engines.vllm import shaped
from weightcached.engines.vllm import layout, loader

__all__ = ["start_worker", "worker"]


class Vllm:
    """An engine's process: loads models as vLLM's worker does."""

    def __init__(self, modules: dict[str, Any]) -> None:
        self.modules = modules
        self.config: Any = None

    @property
    def writes(self) -> list[str]:
        """Parameters that `replace_parameter` has written in place."""
        return self.modules["vllm.model_executor.utils"].writes

    def loader(self, **options: Any) -> Any:
        options = {"timeout": 0, **options}
        return loader.loader_class()(shaped.LoadConfig("weightcached", model_loader_extra_config=options))

    def start(self, folder: Path, *, model: dict[str, Any] | None = None, options: Any = None, **config: Any) -> Any:
        """A model as a new engine gets it; `external` is what was counted for it."""
        model_config = shaped.ModelConfig(folder, **(model or {}))
        self.config = shaped.vllm_config(model_config, **config)
        self.external = self.loader(**(options or {})).get_external_weight_memory(self.config)
        return self.loader(**(options or {})).load_model(vllm_config=self.config, model_config=model_config)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    loader.loader_class.cache_clear()
    monkeypatch.setattr(shaped.DefaultModelLoader, "loads", 0)
    yield Vllm(shaped.install(monkeypatch))
    loader.loader_class.cache_clear()
    loader._decided.clear()
    layout._taken.clear()
    shaped._infos.clear()
    gc.collect()  # models are cycles, and hold leases


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shaped.write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO)
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("weightcached.engines")
    ]


def run(model: Any) -> list[float]:
    return model(torch.tensor([1, 5, 7])).flatten().tolist()
