"""The families whose cuts are known, by architecture.

Everything here is a table of names on disk; `rules` says what the kinds mean. A model whose architecture is not in it
is refused when it has to be cut (slices.py), unless its user or transformers' own plan says how. Mixtures of linear and
ordinary attention (Qwen3-Next) are not in it on purpose: they interleave several projections by groups of heads.
"""

from __future__ import annotations

from typing import Any

from ..rules import Family
from . import deepseek, dense, llama4, moe
from .gpt_oss import gpt_oss

__all__ = ["family_of"]

_FAMILIES = {**dense.FAMILIES, **moe.FAMILIES, **deepseek.FAMILIES, **llama4.FAMILIES}


def family_of(config: dict[str, Any]) -> Family | None:
    """The family of the model that `config` (config.json) describes, None when its architecture is not known."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        return None
    if architectures[0] == "GptOssForCausalLM":
        return gpt_oss(config)
    return _FAMILIES.get(architectures[0])
