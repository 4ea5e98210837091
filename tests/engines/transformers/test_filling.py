"""engines/transformers/filling.py: the skeleton filled with the service's copy of a checkpoint, or refused."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.handmade import DEVICE, RunningWorker, read_file
from tests.engines.models import TINY, cache, save_random
from weightcached.engines.transformers import from_cache
from weightcached.errors import EngineError

transformers = pytest.importorskip("transformers")
AFTER_5 = int(transformers.__version__.split(".")[0]) >= 5


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, tie_word_embeddings=True))


def test_parameters_are_the_cached_memory(worker: RunningWorker, tmp_path: Path) -> None:
    """All parameters share the slab's storage, tied ones are one object, and the lease lasts as long as the model."""
    cache(worker, save_random(llama(), tmp_path / "random"))

    held = [from_cache("m", device=DEVICE)]

    assert held[0].lm_head.weight is held[0].model.embed_tokens.weight
    storages = {parameter.untyped_storage().data_ptr() for parameter in held[0].parameters()}
    assert len(storages) == 1
    assert {buffer.untyped_storage().data_ptr() for buffer in held[0].buffers()}.isdisjoint(storages)
    assert worker.leases() == [os.getpid()]
    worker.wait_released(lambda: (held.clear(), gc.collect()))


def test_a_parameter_without_a_value_is_refused(worker: RunningWorker, tmp_path: Path) -> None:
    """A tensor that stays on meta, even in a plain attribute, is named instead of returned."""

    class Odd(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            vars(self)["scale"] = self.lm_head.weight.detach()

    cache(worker, save_random(llama(), tmp_path / "random"))

    with pytest.raises(EngineError, match=r"Odd has tensors without a value: scale"):
        from_cache("m", device=DEVICE, model_class=Odd)


@pytest.mark.skipif(not AFTER_5, reason="transformers 4 computes such parameters in the constructor only")
def test_parameters_that_the_model_computes(worker: RunningWorker, tmp_path: Path) -> None:
    """Marian's sine tables are parameters that no checkpoint holds: the model's own code fills them."""
    sizes = {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = transformers.MarianConfig(**sizes, **heads, pad_token_id=0, decoder_start_token_id=0)
    folder = tmp_path / "random"
    transformers.MarianMTModel(config).save_pretrained(folder)
    assert not [raw for raw in read_file(folder / "model.safetensors") if "embed_positions" in raw.name]
    cache(worker, folder)

    model = from_cache("m", device=DEVICE)

    want = transformers.MarianMTModel.from_pretrained(folder)
    table = model.model.encoder.embed_positions.weight
    assert torch.equal(table, want.model.encoder.embed_positions.weight)
    assert not table.requires_grad
