"""engines/transformers/skeleton.py: a model without weight memory, as its class and config say."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.engines.models import TINY
from weightcached.engines.transformers.skeleton import (
    _parameters_on_meta,
    build,
    class_of,
    configured_dtype,
    folder_of,
    read_config,
)
from weightcached.errors import EngineError

transformers = pytest.importorskip("transformers")


def test_parameters_have_no_memory_and_buffers_do() -> None:
    """All parameters are on meta, tied ones are one; rotary frequencies are computed. The caller's config is kept."""
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    before = config.to_dict()

    model = build(transformers.LlamaForCausalLM, config, torch.bfloat16)

    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert config.to_dict() == before and configured_dtype(model.config) == torch.bfloat16


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers 5 ties after loading")
def test_untied() -> None:
    """With tied=False the head is apart, as a plan that cuts both wants it."""
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    model = build(transformers.LlamaForCausalLM, config, torch.float32, tied=False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert build(transformers.LlamaForCausalLM, config, torch.float32).lm_head.weight.is_meta


def test_what_is_built_from_what(tmp_path: Path) -> None:
    """A path is a folder, a bare word a name; a folder without a config is an error that names it."""
    assert folder_of("m") is None
    assert folder_of("a/b") == folder_of(Path("a/b")) == Path("a/b")
    with pytest.raises(EngineError, match=f"no config can be read from {tmp_path}"):
        read_config(transformers, tmp_path)
    assert class_of(transformers, transformers.LlamaConfig(architectures=["LlamaModel"])) is transformers.LlamaModel


def test_other_threads_keep_their_parameters() -> None:
    """While one thread builds a model for the cache, another thread's modules get real parameters."""
    made: list[torch.nn.Module] = []
    with _parameters_on_meta(torch.float32):
        thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(4, 4)))
        thread.start()
        thread.join()
        own = torch.nn.Linear(4, 4)
    assert own.weight.is_meta
    assert not made[0].weight.is_meta
