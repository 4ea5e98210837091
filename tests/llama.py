"""A small checkpoint with a Llama's names, and what each tensor-parallel rank of it holds, cut in plain Python."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

Tensor = tuple[str, tuple[int, ...], bytes]  # safetensors dtype, shape, data

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 64, 4, 2, 16, 96, 256, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
_LAYER: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
_CUT_ON_INPUT = ("o_proj.weight", "down_proj.weight")


def write_llama(folder: Path, make_checkpoint: Callable[..., Path]) -> dict[str, Tensor]:
    """Writes config.json and model.safetensors with random bytes; returns the tensors in their order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _LAYER.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    tensors = {name: ("BF16", shape, os.urandom(2 * math.prod(shape))) for name, shape in shapes.items()}
    make_checkpoint(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
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
