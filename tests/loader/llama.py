"""A small random Llama: its files as they are on disk, and what each tensor-parallel rank holds of it, cut by torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.llama import Sizes
from tests.loader.loads import Raw, noise

SIZES = Sizes(hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=1408, vocab=1003)
HIDDEN, KV_HEADS, VOCAB = SIZES.hidden, SIZES.kv_heads, SIZES.vocab
PADDED_VOCAB = 1024  # the next multiple of 64
SHAPES = SIZES.shapes()


def tensors() -> Raw:
    found: Raw = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        elements = 1
        for size in shape:
            elements *= size
        found[name] = ("BF16", shape, noise(2 * elements, number))
    return found


def write(folder: Path, make_checkpoint: Callable[..., Path], **config: Any) -> Path:
    """The folder with the model in two files, an index, and a config.json with these changes."""
    items = list(tensors().items())
    weight_map = {}
    for number, some in enumerate((items[:14], items[14:])):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        make_checkpoint(folder / name, dict(some))
        weight_map.update(dict.fromkeys(dict(some), name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({**SIZES.config(), **config}))
    return folder


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def shard(torch: Any, rank: int, size: int) -> dict[str, Any]:
    """The tensors of one of `size` ranks by name, as vLLM's layers cut them."""
    held = {}
    for name, (_, shape, data) in tensors().items():
        whole = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape)
        held[name] = whole if size == 1 else cut(torch, name, whole, rank, size)
    return held


def cut(torch: Any, name: str, whole: Any, rank: int, size: int) -> Any:
    layer = name.split(".")[-2]
    if layer in ("embed_tokens", "lm_head"):
        padding = torch.zeros(PADDED_VOCAB - VOCAB, HIDDEN, dtype=whole.dtype)
        return torch.cat([whole, padding]).chunk(size)[rank]
    if layer in ("k_proj", "v_proj"):
        return whole.chunk(size)[rank] if size <= KV_HEADS else whole.chunk(KV_HEADS)[rank * KV_HEADS // size]
    if layer in ("q_proj", "gate_proj", "up_proj"):
        return whole.chunk(size)[rank]
    if layer in ("o_proj", "down_proj"):
        return whole.chunk(size, dim=1)[rank]
    return whole
