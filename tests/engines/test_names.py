"""engines/names.py: every cached tensor has its place in the model, or the reason is named."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.client.handmade import DEVICE, Raw, RunningWorker, read_file
from tests.engines.models import TINY, assert_same, cache, save_random
from weightcached.engines.names import conversion, match_names
from weightcached.engines.transformers import from_cache
from weightcached.errors import EngineError

transformers = pytest.importorskip("transformers")


class Cached(Mapping[str, torch.Tensor]):
    """Weights with nothing behind them but a dict."""

    manifest = SimpleNamespace(model="m")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def bert(kind: str = "BertModel", **changes: Any) -> Any:
    config = transformers.BertConfig(**{**TINY, **changes})
    return getattr(transformers, kind)(config)


def state(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint of the model would hold: tied ones once."""
    seen: dict[int, str] = {}
    return {
        name: value.detach()
        for name, value in model.state_dict(keep_vars=True).items()
        if seen.setdefault(id(value), name) == name
    }


def test_every_name_finds_its_own() -> None:
    """With equal names each parameter is its namesake, and tied ones share theirs."""
    model = bert("BertForMaskedLM")
    cached = Cached(state(model))

    found = match_names(model, cached)  # type: ignore[arg-type]

    assert found.parameters["bert.embeddings.word_embeddings.weight"] == "bert.embeddings.word_embeddings.weight"
    assert found.parameters["cls.predictions.decoder.weight"] == "bert.embeddings.word_embeddings.weight"
    assert set(found.parameters) == {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_a_base_model_out_of_a_larger_one() -> None:
    """The prefix is taken off, and the heads that nobody asked for are left out."""
    cached = Cached(state(bert("BertForMaskedLM")))
    base = transformers.BertModel(transformers.BertConfig(**TINY), add_pooling_layer=False)

    found = match_names(base, cached)  # type: ignore[arg-type]

    assert found.parameters["embeddings.word_embeddings.weight"] == "bert.embeddings.word_embeddings.weight"
    assert all(source.startswith("bert.") for source in found.parameters.values())


def test_a_larger_model_needs_its_heads() -> None:
    """The prefix is added to a base model's names, but a head without weights is refused by name."""
    with pytest.raises(EngineError, match=r"not in the cache: classifier\.weight, classifier\.bias$"):
        match_names(bert("BertForSequenceClassification"), Cached(state(bert())))  # type: ignore[arg-type]


def test_what_is_missing_unexpected_or_of_another_shape_is_named() -> None:
    """One error lists all three kinds; long lists are cut and counted."""
    cached = state(bert())
    cached["embeddings.word_embeddings.weight"] = torch.zeros(98, 32)
    del cached["pooler.dense.bias"]
    cached |= {f"extra.{number}": torch.zeros(1) for number in range(10)}

    with pytest.raises(EngineError) as caught:
        match_names(bert(), Cached(cached))  # type: ignore[arg-type]

    message = str(caught.value)
    assert "BertModel does not fit m" in message
    assert "not in the cache: pooler.dense.bias" in message
    assert "not in the model: extra.0, " in message and "extra.7 and 2 more" in message
    assert "embeddings.word_embeddings.weight is [98, 32], the model's is [99, 32]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_values_are_refused(dtype: torch.dtype) -> None:
    """Elements of one byte in place of floating-point weights are not taken for weights, even of the same shape."""
    cached = state(bert())
    cached["pooler.dense.weight"] = cached["pooler.dense.weight"].to(dtype)

    with pytest.raises(EngineError, match=r"pooler\.dense\.weight is torch\..*, quantised perhaps"):
        match_names(bert(), Cached(cached))  # type: ignore[arg-type]


def test_buffers_of_old_checkpoints_are_left_aside() -> None:
    """position_ids that older versions saved, and rotary frequencies of each layer, are the model's to compute."""
    cached = state(bert()) | {"embeddings.position_ids": torch.zeros(1, 512, dtype=torch.int64)}
    match_names(bert(), Cached(cached))  # type: ignore[arg-type]

    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    match_names(llama, Cached(state(llama) | old))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="not in the model"):
        match_names(bert(), Cached(state(bert()) | old))  # type: ignore[arg-type]


def test_persistent_buffers_come_from_the_cache(worker: RunningWorker, tmp_path: Path) -> None:
    """Batch norm's statistics are the cached ones, in private memory; one that is missing is refused, not invented."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    folder = save_random(transformers.ResNetModel(transformers.ResNetConfig(**sizes)), tmp_path / "random")
    cache(worker, folder)

    model = from_cache("m", device=DEVICE)

    want = transformers.ResNetModel.from_pretrained(folder).eval()
    statistics = {name: value for name, value in model.named_buffers() if name.endswith("running_mean")}
    assert statistics
    storage = next(model.parameters()).untyped_storage().data_ptr()
    for name, value in statistics.items():
        assert torch.equal(value, want.get_buffer(name))
        assert value.untyped_storage().data_ptr() != storage
    pixels = torch.arange(3 * 32 * 32, dtype=torch.float32).reshape(1, 3, 32, 32) / 3072
    with torch.no_grad():
        assert torch.equal(model(pixels).last_hidden_state, want(pixels).last_hidden_state)

    raws = [raw for raw in read_file(folder / "model.safetensors") if not raw.name.endswith("running_mean")]
    cache(worker, folder, "incomplete", raws=raws)
    with pytest.raises(EngineError, match=r"not in the cache: .*running_mean"):
        from_cache("incomplete", device=DEVICE)


def test_a_checkpoint_that_holds_only_the_other_tied_name(worker: RunningWorker, tmp_path: Path) -> None:
    """With lm_head.weight saved in place of the embeddings, the tie still has its value."""
    folder = save_random(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, tie_word_embeddings=True)), tmp_path / "random"
    )
    raws = read_file(folder / "model.safetensors")
    for raw in raws:
        if raw.name == "model.embed_tokens.weight":
            raw.name = "lm_head.weight"
    cache(worker, folder, raws=raws)

    model = from_cache("m", device=DEVICE)

    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(folder).eval())


@pytest.mark.parametrize("equal", [True, False])
def test_the_bytes_decide_on_a_tie(
    worker: RunningWorker, tmp_path: Path, equal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Both tied names in the checkpoint: equal bytes are tied; other bytes are kept apart, with a warning."""
    config = transformers.LlamaConfig(**TINY, tie_word_embeddings=True)
    folder = save_random(transformers.LlamaForCausalLM(config), tmp_path / "random")
    raws = read_file(folder / "model.safetensors")
    embeddings = next(raw for raw in raws if raw.name == "model.embed_tokens.weight")
    count = len(embeddings.data) // 4
    data = embeddings.data if equal else struct.pack(f"<{count}f", *([0.5] * count))
    cache(worker, folder, raws=[*raws, Raw("lm_head.weight", "F32", embeddings.shape, data)])

    with caplog.at_level(logging.WARNING, "weightcached"):
        model = from_cache("m", device=DEVICE)

    assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal
    assert ("different values" in caplog.text) == (not equal)
    if not equal:
        assert model.lm_head.weight.unique().tolist() == [0.5]


def test_what_transformers_rewrites_is_named() -> None:
    """Experts that it fuses while loading, by their names on disk; without those it takes everything as it is."""
    pytest.importorskip("transformers.conversion_mapping")
    config = transformers.Qwen3MoeConfig(
        **TINY, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    kept = [name for name in model.state_dict() if "experts" not in name]

    found = conversion(model, [*kept, "model.layers.0.mlp.experts.0.up_proj.weight"])

    assert found is not None
    assert found.startswith("transformers rewrites weights while it loads them (rewritten: model.layers.0.mlp.experts")
    assert conversion(model, kept) is None


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="transformers 4 renames elsewhere")
def test_what_transformers_renames_is_named() -> None:
    """Old names of layer norms are found; the model's own names are not taken for renamed ones."""
    names = list(bert().state_dict())
    assert conversion(bert(), names) is None
    names[names.index("embeddings.LayerNorm.weight")] = "embeddings.LayerNorm.gamma"

    found = conversion(bert(), names)

    assert found == "transformers renames tensors while it loads them (renamed: embeddings.LayerNorm.gamma)"
