"""The small checkpoints have the names and shapes that transformers' own classes write to disk, and their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.families.checkpoints import EVERY, Checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.parallel.families import family_of
from weightcached.parallel.rules import Patterns

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.conversion_mapping")  # earlier releases write other names for some classes

# By our name: transformers' configuration class. What is quantised, or named for each expert, they do not save.
CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "mistral3": "Mistral3Config",
    "qwen2": "Qwen2Config",
    "qwen2-vl": "Qwen2VLConfig",
    "qwen2.5-vl": "Qwen2_5_VLConfig",
    "qwen3": "Qwen3Config",
    "qwen3-vl": "Qwen3VLConfig",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3": "Gemma3TextConfig",
    "gemma3-nested": "Gemma3Config",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "olmo3": "Olmo3Config",
    "mixtral": "MixtralConfig",
    "qwen2-moe": "Qwen2MoeConfig",
    "qwen3-moe": "Qwen3MoeConfig",
    "olmoe": "OlmoeConfig",
    "glm4-moe": "Glm4MoeConfig",
    "deepseek-v2": "DeepseekV2Config",
    "deepseek-v2-lite": "DeepseekV2Config",
    "deepseek-v3": "DeepseekV3Config",
    "deepseek-v32": "DeepseekV32Config",
    "gpt-oss": "GptOssConfig",
    "llama4": "Llama4TextConfig",
    "llama4-nested": "Llama4Config",
}
# Small sizes that the small checkpoints' config.json need not say, since nothing is cut by them.
SMALL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "index_n_heads": 4, "index_head_dim": 16}
VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
TEXT_TYPES = {"mistral3": "mistral"}
# Their classes have no head_dim of their own: hidden_size / heads, which the small checkpoints are not.
OTHER_SHAPES = {"qwen2-vl": "self_attn", "qwen2.5-vl": "self_attn", "olmoe": "_norm"}


def saved(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the class of a small checkpoint's config.json saves."""
    config = {**EVERY[name]().config, **SMALL}
    (architecture,) = config.pop("architectures")
    if "text_config" in config:
        text = config["text_config"] | SMALL
        if name in TEXT_TYPES:
            text["model_type"] = TEXT_TYPES[name]
        config |= {"text_config": text, "vision_config": VISION, "tie_word_embeddings": text["tie_word_embeddings"]}
    elif name in ("qwen2-vl", "qwen2.5-vl"):
        config = {"text_config": config, "vision_config": VISION, "tie_word_embeddings": False}
    model = getattr(transformers, architecture)(getattr(transformers, CONFIGS[name])(**config))
    model.save_pretrained(folder)
    with open_checkpoint(folder) as checkpoint:
        return {tensor.name: tensor.shape for file in checkpoint.files for tensor in file.header.tensors}


def own_layers(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The language model's names and shapes, without layers past its own, which transformers does not have."""
    embedding = next(name for name in checkpoint.entries if name.endswith("embed_tokens.weight"))
    prefix = embedding.removesuffix("embed_tokens.weight")
    return {
        name: shape
        for name, (_, shape) in checkpoint.entries.items()
        if name.startswith((prefix, "lm_head", "language_model.")) and not name.startswith(f"{prefix}layers.3.")
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_saves_these_names(name: str, tmp_path: Path) -> None:
    """The language model has the same names on disk and the same shapes, and a rule names the vision tower's too."""
    ours, theirs = own_layers(EVERY[name]()), saved(name, tmp_path)
    family = family_of(EVERY[name]().config)
    assert family is not None
    patterns = Patterns([rule.pattern for rule in family.rules])

    assert ours.keys() <= theirs.keys()
    assert not [other for other in theirs.keys() - ours.keys() if not other.startswith(("vis", "model.vis", "multi_"))]
    assert [other for other in theirs if patterns.find(other) is None] == []
    free = OTHER_SHAPES.get(name, "-")
    assert {key: theirs[key] for key in ours if free not in key} == {
        key: shape for key, shape in ours.items() if free not in key
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_the_defaults_are_the_classs(name: str) -> None:
    """What a family supplies for a key that config.json leaves out is what the model class does."""
    family = family_of(EVERY[name]().config)
    assert family is not None
    whole: Any = getattr(transformers, CONFIGS[name])()
    text = type(whole.get_text_config())()

    for key, value in family.defaults.items():
        assert getattr(text, key) == (getattr(text, value) if isinstance(value, str) else value), key
    if name != "mistral3":  # see the family
        assert family.tied == bool(whole.tie_word_embeddings)
