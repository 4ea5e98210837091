"""A Qwen3-shaped model for two ranks: its files with random weights, and the forward pass of one rank, in plain torch.

The forward pass takes the tensors by their names on disk, as `attach` gives them, each cut for its rank:

    rows      q, k, v, gate, up, embed_tokens, lm_head      each rank has some of the output
    columns   o, down                                       each rank has a part of a sum, which all_reduce makes whole
"""

from __future__ import annotations

import functools
import json
import random
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

THETA, EPSILON = 1e6, 1e-6
_BLOCK = 16 << 20  # elements that a thread makes at once
_FREE = -0x7F81  # bits of a bfloat16 that may be anything: its sign and its mantissa


@dataclass(frozen=True)
class Shape:
    """The numbers of a model; `layers` is what makes it large."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int

    @classmethod
    def of_bytes(cls, nbytes: int) -> Shape:
        """That of Qwen3 32B with as many layers as `nbytes` bytes have room for; far narrower below some 4 GB."""
        wide = nbytes > 4e9
        one = cls(5120, 25600, 64, 8, 128, 151936, 1) if wide else cls(128, 384, 4, 2, 32, 512, 1)
        layer = one.nbytes - one._replace_layers(0).nbytes
        return one._replace_layers(max(2, (nbytes - one._replace_layers(0).nbytes) // layer))

    def _replace_layers(self, layers: int) -> Shape:
        return Shape(**{**self.__dict__, "layers": layers})

    @property
    def nbytes(self) -> int:
        return sum(2 * torch.Size(shape).numel() for shape in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, in the order of the files."""
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.heads * self.head_dim, self.hidden),
            "self_attn.k_proj": (self.kv_heads * self.head_dim, self.hidden),
            "self_attn.v_proj": (self.kv_heads * self.head_dim, self.hidden),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "self_attn.o_proj": (self.hidden, self.heads * self.head_dim),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            **{f"model.layers.{n}.{name}.weight": size for n in range(self.layers) for name, size in layer.items()},
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "rope_theta": THETA,
            "rms_norm_eps": EPSILON,
        }


def write(folder: Path, shape: Shape) -> int:
    """Writes the checkpoint, one file, and returns its bytes. Weights are +-1/128 to +-1/64, those of norms are 1."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    end = 0
    for name, size in shape.tensors().items():
        nbytes = 2 * torch.Size(size).numel()
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    path = folder / "model.safetensors"
    _random()
    with path.open("wb") as file, ThreadPoolExecutor(8) as pool:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in shape.tensors().items():
            count = torch.Size(size).numel()
            blocks = [min(_BLOCK, count - start) for start in range(0, count, _BLOCK)]
            make = _ones if "norm" in name else _small
            for start in range(0, len(blocks), 8):  # so many are in memory at once
                for data in pool.map(make, blocks[start : start + 8]):
                    file.write(memoryview(data.numpy()))
    return path.stat().st_size


def _small(count: int) -> torch.Tensor:
    """Random bits of sign and mantissa around an exponent: no NaN, nothing that overflows. No two blocks are alike."""
    start = random.randrange(_BLOCK)
    return _random()[start : start + count] ^ (random.randrange(1 << 16) - (1 << 15) & _FREE)


@functools.cache
def _random() -> torch.Tensor:
    """Two blocks of them, of which each block is a part: making all anew would take longer than writing them."""
    return torch.empty(2 * _BLOCK, dtype=torch.int16).random_(-(1 << 15), 1 << 15) & _FREE | 0x3C00


def _ones(count: int) -> torch.Tensor:
    return torch.full((count,), 0x3F80, dtype=torch.int16)


def forward(
    weights: Mapping[str, torch.Tensor],
    shape: Shape,
    tokens: torch.Tensor,
    rank: int = 0,
    size: int = 1,
    reduce: Callable[[torch.Tensor], None] = lambda part: None,
) -> torch.Tensor:
    """Logits [tokens, vocab] in float32, equal on all ranks, of the int64 ids `tokens`.

    `weights`: those of this of `size` ranks. `reduce` adds a tensor up over the ranks, in place.
    """
    rows = weights["model.embed_tokens.weight"].shape[0]  # padded, so that all ranks have as many
    inside = (tokens >= rank * rows) & (tokens < (rank + 1) * rows)
    hidden = weights["model.embed_tokens.weight"][(tokens - rank * rows).clamp(0, rows - 1)]
    hidden = torch.where(inside[:, None], hidden, torch.zeros_like(hidden))
    reduce(hidden)
    for number in range(shape.layers):
        layer = f"model.layers.{number}."
        part = _attention(weights, layer, shape, _norm(hidden, weights[f"{layer}input_layernorm.weight"]), size)
        reduce(part)
        hidden = hidden + part
        normed = _norm(hidden, weights[f"{layer}post_attention_layernorm.weight"])
        gate = functional.silu(normed @ weights[f"{layer}mlp.gate_proj.weight"].T)
        part = (gate * (normed @ weights[f"{layer}mlp.up_proj.weight"].T)) @ weights[f"{layer}mlp.down_proj.weight"].T
        reduce(part)
        hidden = hidden + part
    part = (_norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T).float()
    logits = torch.zeros(len(tokens), rows * size, device=part.device)
    logits[:, rank * rows : (rank + 1) * rows] = part
    reduce(logits)
    return logits[:, : shape.vocab]


def _attention(
    weights: Mapping[str, torch.Tensor], layer: str, shape: Shape, normed: torch.Tensor, size: int
) -> torch.Tensor:
    heads, kv_heads, width = shape.heads // size, max(shape.kv_heads // size, 1), shape.head_dim
    query, key, value = (normed @ weights[f"{layer}self_attn.{name}_proj.weight"].T for name in "qkv")
    query = _norm(query.view(-1, heads, width), weights[f"{layer}self_attn.q_norm.weight"])
    key = _norm(key.view(-1, kv_heads, width), weights[f"{layer}self_attn.k_norm.weight"])
    query, key = (_turned(item).transpose(0, 1) for item in (query, key))
    value = value.view(-1, kv_heads, width).transpose(0, 1)
    key, value = (item.repeat_interleave(heads // kv_heads, dim=0) for item in (key, value))
    mixed = functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
    return mixed.transpose(0, 1).reshape(len(normed), -1) @ weights[f"{layer}self_attn.o_proj.weight"].T


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(hidden.dtype) * weight


def _turned(heads: torch.Tensor) -> torch.Tensor:
    """Rotary positions, for [tokens, heads, width]."""
    count, _, width = heads.shape
    steps = THETA ** (-torch.arange(0, width, 2, device=heads.device) / width)
    angles = torch.arange(count, device=heads.device)[:, None] * steps
    cos, sin = (torch.cat([part, part], -1)[:, None, :].to(heads.dtype) for part in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
