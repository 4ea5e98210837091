"""engines/transformers.py on a real GPU, with a real service."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import TINY, assert_same, save_random
from tests.running import RunningService
from weightcached.devices import gpu_devices
from weightcached.engines.transformers import from_cache

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


@pytest.fixture
def service(runtime_dir: Path, tmp_path: Path) -> Iterator[RunningService]:
    """A service that caches a random tied Llama in bfloat16 and a GPT-J on the first GPU."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, tie_word_embeddings=True))
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    gptj = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2))
    config = f'devices = ["{gpu_devices()[0].name}"]\n'
    for name, model in (("llama", llama), ("gptj", gptj)):
        folder = save_random(model.to(torch.bfloat16), tmp_path / name)
        config += f'[[model]]\nname = "{name}"\ncheckpoint = "{folder}"\n'
    running = RunningService(runtime_dir, config)
    try:
        yield running.ready()
    finally:
        running.abandon()


@pytest.mark.parametrize("name", ["llama", "gptj"])
@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
def test_a_model_on_the_gpu(service: RunningService, tmp_path: Path, name: str, mode: Any) -> None:
    """Every parameter and buffer is on the GPU; state, buffers and outputs are those of `from_pretrained`."""
    model = from_cache(name, device="cuda:0", mode=mode)

    want = type(model).from_pretrained(tmp_path / name, torch_dtype="auto").to("cuda:0").eval()
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {torch.device("cuda:0")}
    assert_same(model, want)
    (found,) = service.status()["devices"]
    leases = [lease for shard in found["shards"] for lease in shard["leases"]]
    assert len(leases) == (1 if mode == "zero_copy" else 0)
    del model
    gc.collect()
    service.stop()


def test_tokens_are_the_same(service: RunningService, tmp_path: Path) -> None:
    """Greedy generation over read-only memory gives the tokens of ordinary memory."""
    ids = torch.tensor([[1, 5, 7]], device="cuda:0")
    model = from_cache("llama", device="cuda:0")
    want = type(model).from_pretrained(tmp_path / "llama", torch_dtype="auto").to("cuda:0").eval()

    options = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
    assert torch.equal(model.generate(ids, **options), want.generate(ids, **options))
    del model
    gc.collect()
    service.stop()
