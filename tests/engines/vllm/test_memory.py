"""What vLLM versions that do not count attached weights are told."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tests.engines.vllm import shaped
from weightcached.engines.vllm import memory


def test_setting_that_makes_up_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    """The utilisation without the share of the weights."""
    with caplog.at_level(logging.WARNING):
        memory.warn_uncounted(0.9, 32 << 30, 128 << 30)
    assert "--gpu-memory-utilization 0.650 in place of 0.900" in caplog.text
    assert "32.00 GiB" in caplog.text


@pytest.mark.parametrize(("load_format", "told"), [("weightcached", True), ("auto", False)])
def test_refusal_for_want_of_memory_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, load_format: str, told: bool
) -> None:
    """0.30 and 0.31 check free memory before any loader is made; other formats are left alone."""
    modules = shaped.install(monkeypatch, version="0.31.0")
    memory.advise_on_memory()
    memory.advise_on_memory()
    modules["vllm.config"].current = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
    snapshot = SimpleNamespace(total_memory=100, free_memory=61)
    check = modules["vllm.v1.worker.utils"].request_memory
    assert check(snapshot, SimpleNamespace(gpu_memory_utilization=0.5)) == 50
    with pytest.raises(ValueError, match="less than desired") as raised:
        check(snapshot, SimpleNamespace(gpu_memory_utilization=0.9))
    assert ("--gpu-memory-utilization 0.61 or less" in str(raised.value)) is told
