"""Plain values of kernel objects: there again in the next engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import RunningWorker
from tests.engines.vllm import shaped
from tests.engines.vllm.conftest import Vllm, run


class Kernel:
    """As CutlassFP8ScaledMMLinearKernel and CPUFp8PerTensorScaledMMLinearKernel of vLLM 0.32.0."""

    def __init__(self) -> None:
        self.logical_output_size: int | None = None
        self.scale = float("inf")

    def process_weights_after_loading(self, layer: Any) -> None:
        self.logical_output_size = layer.weight.shape[1]
        self._block_size_n = 32


class Method(shaped.LinearMethod):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_linear = Kernel()

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        if not shaped.utils().is_weights_pre_processed():
            self.fp8_linear.process_weights_after_loading(layer)


def test_what_processing_sets_is_there_again(
    vllm: Vllm, worker: RunningWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pre-processed mode does not call the kernel, which asserts that it was when the model runs."""
    monkeypatch.setattr(shaped.Linear, "method", Method)
    expected = run(vllm.start(folder))
    model = vllm.start(folder)
    kernel = model.linear.quant_method.fp8_linear
    assert shaped.DefaultModelLoader.loads == 1
    assert (kernel.logical_output_size, kernel._block_size_n) == (shaped.HIDDEN, 32)
    assert run(model) == expected
    assert not hasattr(model, "weightcached_kernels")


def test_another_kernel_is_refused(
    vllm: Vllm, worker: RunningWorker, folder: Path, warnings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM chooses one without that name, the engine loads from disk and says why."""
    monkeypatch.setattr(shaped.Linear, "method", Method)
    vllm.start(folder)
    monkeypatch.setattr(shaped.Linear, "method", shaped.LinearMethod)
    vllm.start(folder)
    assert shaped.DefaultModelLoader.loads == 2
    assert "kernels are not those of the publisher: linear:fp8_linear" in warnings()[-1]
