"""Small random models on disk and in the cache, for the engines' tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.client.handmade import RunningWorker, make_shard, read_file
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_random(model: Any, folder: Path) -> Path:
    """Gives every parameter and persistent buffer random values and saves the model to `folder`."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.2 + 0.01)
    model.save_pretrained(folder)
    return folder


def to_fp8(folder: Path, quantization: dict[str, Any], scale: str = "_scale_inv") -> Path:
    """Stores the projections of the model in `folder` in FP8, with a scale for each block, or row without blocks."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors[name].shape
        high, wide = quantization.get("weight_block_size") or (1, columns)
        blocks = tensors[name].float().reshape(rows // high, high, columns // wide, wide)
        scales = blocks.abs().amax(dim=(1, 3)) / 448.0
        tensors[name] = (blocks / scales[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors[f"{name}{scale}"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def cache(worker: RunningWorker, folder: Path, name: str = "m", **changes: Any) -> None:
    """Publishes `folder` as the loader does; `changes` go to `make_shard`."""
    file = folder / "model.safetensors"
    with open_checkpoint(file) as checkpoint:
        content, _ = digest_checkpoint(checkpoint)
        files = tuple(item.source for item in checkpoint.files)
        key = {"content": content, "dtype": checkpoint.dtype, **changes.pop("key", {})}
    raws = changes.pop("raws", None) or read_file(file)
    arguments = {"attributes": {"checkpoint": str(folder)}, "files": files, **changes}
    worker.publish(make_shard(raws, model=name, key=key, **arguments))


def outputs(model: Any, **more: Any) -> list[torch.Tensor]:
    """Every tensor that the model gives for the same input each time."""
    ids = torch.arange(1, 15, device=model.device).reshape(2, 7)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


def assert_same(ours: Any, theirs: Any) -> None:
    """State, every buffer, the ties and the outputs are the same, bit for bit."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for name, tensor in [*mine.items(), *ours.named_buffers()]:
        want = other[name] if name in other else theirs.get_buffer(name)
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), name
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
    for found, want in zip(outputs(ours), outputs(theirs), strict=True):
        assert torch.equal(found, want)
