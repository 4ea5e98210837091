"""An engine of SGLang's shape in this process, a checkpoint for it, and the client's worker."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.client.conftest import start_worker, worker
from tests.engines.sglang import standin
from weightcached.engines.sglang import plugin

__all__ = ["start_worker", "worker"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[standin.Engine]:
    """SGLang with its plug-ins loaded; what it has attached is given up at the end."""
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: standin.VERSION if name == "sglang" else version(name)
    )
    made = standin.Engine(monkeypatch)
    made.load_plugins(plugin.register)
    yield made
    gc.collect()
    assert plugin.shared() == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with one file of random weights for `standin.Model`."""
    folder = tmp_path / "Tiny-1B"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(32, 16, generator=generator),
        "attention.kv_b_proj.weight": torch.randn(16, 16, generator=generator),
    }
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
