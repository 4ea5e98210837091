"""An engine for the tests of publishing: one module with all kinds of tensors, and what is looked at in it."""

from __future__ import annotations

from typing import Any

import torch

KEY = {"layout": "test-1", "content": "c1"}


class Router:
    """A plain object that captured a parameter when it was made."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.part = bias[4:8]


class Engine(torch.nn.Module):  # type: ignore[misc]
    """Tied, fused, strided and private tensors, and plain objects that hold some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.randn(8, 16), requires_grad=False)
        self.query = torch.nn.Parameter(self.fused.data[:4], requires_grad=False)
        self.column = torch.nn.Parameter(self.fused.data[:, 4:8], requires_grad=False)
        self.embed = torch.nn.Linear(16, 32, bias=False)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.bias = torch.nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.randn(5, 2).T, persistent=False)
        self.register_buffer("none", torch.empty(0, 4))
        self.extra = torch.randn(6, dtype=torch.float64).to(torch.bfloat16)
        self.router = Router(self.bias)


def contents(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def same(found: Any, wanted: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def addresses(module: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.named_parameters(remove_duplicate=False)}
