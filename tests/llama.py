"""A small checkpoint with a Llama's names, and what each tensor-parallel rank of it holds, cut in plain Python."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Tensor = tuple[str, tuple[int, ...], bytes]  # safetensors dtype, shape, data

LAYERS = 3


class Sizes(NamedTuple):
    """The numbers of a Llama, as its config.json has them."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int = LAYERS

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, in the order of the file."""
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.heads * self.head_dim, self.hidden),
            "self_attn.k_proj": (self.kv_heads * self.head_dim, self.hidden),
            "self_attn.v_proj": (self.kv_heads * self.head_dim, self.hidden),
            "self_attn.o_proj": (self.hidden, self.heads * self.head_dim),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        numbers = range(self.layers)
        return {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            **{f"model.layers.{number}.{name}.weight": shape for number in numbers for name, shape in layer.items()},
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }


SMALL = Sizes(hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=256)
_CUT_ON_INPUT = ("o_proj.weight", "down_proj.weight")


def write_llama(folder: Path, make_checkpoint: Callable[..., Path]) -> dict[str, Tensor]:
    """Writes config.json and model.safetensors with random bytes; returns the tensors in their order."""
    tensors = {name: ("BF16", shape, os.urandom(2 * math.prod(shape))) for name, shape in SMALL.shapes().items()}
    make_checkpoint(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(SMALL.config()))
    return tensors


def part_of(name: str, tensor: Tensor, rank: int, size: int) -> bytes:
    """The bytes that tensor-parallel rank `rank` of `size` holds; `size` divides the key/value heads."""
    _, shape, data = tensor
    if len(shape) == 1:
        return data
    row = 2 * shape[1]
    rows = [data[start : start + row] for start in range(0, len(data), row)]
    if name.endswith(_CUT_ON_INPUT):
        width = row // size
        return b"".join(one[rank * width : (rank + 1) * width] for one in rows)
    count = len(rows) // size
    return b"".join(rows[rank * count : (rank + 1) * count])


def slab_of(tensors: dict[str, Tensor], rank: int, size: int) -> bytes:
    """The whole slab of that rank: its parts in order, each at the next multiple of 256."""
    slab = b""
    for name, tensor in tensors.items():
        slab += bytes(-len(slab) % 256) + part_of(name, tensor, rank, size)
    return slab
