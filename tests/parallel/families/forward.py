"""Llama's forward pass, and that of its likes, on the slices of all ranks in one process: a sum is an all-reduce.

Attention by heads, sums after what is cut by columns, embedding and head by ranges of the vocabulary, experts cut or
spread. A few lines of torch that use nothing but the names and the bytes of each rank. Shapes: ids [n] -> [n, V].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from weightcached.parallel.ranks import Parallel

Weights = dict[str, torch.Tensor]  # of one rank


@dataclass(frozen=True)
class Sliced:
    """A model of which rank i holds `ranks[i]`; `stages`: the range of layers of each pipeline stage."""

    config: Any
    parallel: Parallel
    ranks: Sequence[Weights]
    stages: Sequence[tuple[int, int]]

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids, self.stage(0)[0])
        for stage, (first, last) in enumerate(self.stages):
            copies = self.stage(stage)
            for layer in range(first, last):
                name = f"model.layers.{layer}."
                normed = self.norm(hidden, copies[0][0][f"{name}input_layernorm.weight"])
                hidden = hidden + sum(self.attention(weights, name, normed) for weights in copies[0])
                normed = self.norm(hidden, copies[0][0][f"{name}post_attention_layernorm.weight"])
                hidden = hidden + self.feed_forward(copies, name, normed)
        last_ranks = self.stage(len(self.stages) - 1)[-1]
        hidden = self.norm(hidden, last_ranks[0]["model.norm.weight"])
        logits = torch.cat([hidden @ weights["lm_head.weight"].T for weights in last_ranks], dim=1)
        return logits[:, : self.config.vocab_size]

    def stage(self, stage: int) -> list[list[Weights]]:
        """The ranks of a stage: its data-parallel copies, each by tensor rank."""
        size = self.parallel.tensor
        starts = [(data * self.parallel.pipeline + stage) * size for data in range(self.parallel.data)]
        return [list(self.ranks[start : start + size]) for start in starts]

    def embed(self, ids: torch.Tensor, ranks: Sequence[Weights]) -> torch.Tensor:
        total = torch.zeros(len(ids), self.config.hidden_size)
        for rank, weights in enumerate(ranks):
            table = weights["model.embed_tokens.weight"]
            row = ids - rank * len(table)
            mine = (row >= 0) & (row < len(table))
            total[mine] += table[row[mine]]
        return total

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def attention(self, weights: Weights, layer: str, x: torch.Tensor) -> torch.Tensor:
        """One rank's heads; queries of its own, and the key/value heads that they look at."""
        size = self.config.head_dim
        q, k, v = (
            (x @ weights[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(1, (-1, size)).transpose(0, 1)
            for name in "qkv"
        )
        if f"{layer}self_attn.q_norm.weight" in weights:
            q = self.norm(q, weights[f"{layer}self_attn.q_norm.weight"])
            k = self.norm(k, weights[f"{layer}self_attn.k_norm.weight"])
        q, k = self.rotate(q), self.rotate(k)
        k, v = (kv.repeat_interleave(len(q) // len(kv), 0) for kv in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(0, 1).flatten(1) @ weights[f"{layer}self_attn.o_proj.weight"].T

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions: [heads, n, d], halves paired."""
        half = x.shape[2] // 2
        rope = getattr(self.config, "rope_parameters", None)
        theta = rope["rope_theta"] if rope else self.config.rope_theta
        angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=2
        )

    def feed_forward(self, copies: Sequence[Sequence[Weights]], layer: str, x: torch.Tensor) -> torch.Tensor:
        """A dense layer over the tensor ranks, or experts over all ranks of the stage."""
        if f"{layer}mlp.gate_proj.weight" in copies[0][0]:
            return torch.stack([mlp(weights, f"{layer}mlp.", x) for weights in copies[0]]).sum(0)
        experts = next(name for name in ("mlp.", "block_sparse_moe.") if f"{layer}{name}gate.weight" in copies[0][0])
        total = torch.zeros_like(x)
        for weights in (weights for ranks in copies for weights in ranks):
            scores = (x @ weights[f"{layer}{experts}gate.weight"].T).softmax(-1)
            top, chosen = scores.topk(self.config.num_experts_per_tok)
            share = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(1, keepdim=True))
            for expert in range(scores.shape[1]):
                name = f"{layer}{experts}experts.{expert}."
                if any(key.startswith(name) for key in weights):
                    total += share[:, expert, None] * mlp(weights, name, x)
        return total


def mlp(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """What one rank adds to the result; Mixtral's names are w1, w3, w2."""
    names = ("w1", "w3", "w2") if f"{name}w1.weight" in weights else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (weights[f"{name}{part}.weight"] for part in names)
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
