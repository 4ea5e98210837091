"""The checkpoints of `scripts/bench load`: names and shapes of real models, sized to fit, filled with random bytes.

    dense    Llama 3 8B, as many layers as fit
    moe      Qwen3 30B A3B with all its 18,867 tensors, its experts as wide as fits
    fp8      the same in blocks of FP8 with their scales (weight_scale_inv), as many layers as fit

Below some GiB the models are narrower and have fewer experts. Tensors lie in a file as the safetensors library puts
them: wide element types first, then by name. Run as a program, with one JSON object, it writes them.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_ubyte
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench_common import BenchError

GIB = 1 << 30
BLOCK = 8 << 20  # bytes that a thread makes and writes at once
FP8_BLOCK = 128  # rows and columns that share a scale
INDEX = "model.safetensors.index.json"
MARK = ".written-by-bench-load"  # what has it may be written again
_FULL_MOE = (2048, 128, 128, 48, 151936)  # hidden, head_dim, experts, layers, vocab
_SMALL_MOE = (256, 16, 16, 4, 8192)
_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = _BYTES[self.dtype]
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Layout:
    """A model's tensors in model order, its config.json, and the number of files that they are cut into."""

    name: str
    config: dict[str, Any]
    tensors: tuple[Tensor, ...]
    shards: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the headers come to it."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def files(self) -> dict[str, list[Tensor]]:
        """The tensors of each file in the order of their bytes; files of about equal size."""
        parts: list[list[Tensor]] = [[] for _ in range(self.shards)]
        position, whole = 0, self.nbytes
        for tensor in self.tensors:
            parts[min(position * self.shards // whole, self.shards - 1)].append(tensor)
            position += tensor.nbytes
        return {
            f"model-{number:05}-of-{self.shards:05}.safetensors": sorted(
                part, key=lambda tensor: (-_BYTES[tensor.dtype], tensor.name)
            )
            for number, part in enumerate(parts, 1)
        }


def dense(nbytes: int) -> Layout:
    """Llama 3 8B: hidden 4096, 32 heads of 128, 8 key/value heads; narrower by halves where that does not fit."""
    for divisor in (1, 2, 4, 8, 16):
        hidden, head_dim, inner = 4096 // divisor, 128 // divisor, 14336 // divisor
        vocab = 128256 // divisor // 512 * 512
        outer = _outer(hidden, vocab)
        layer = partial(_dense_layer, hidden, head_dim, inner)
        per_layer, fixed = _sum(layer(0)), _sum(outer)
        if fixed + 4 * per_layer <= nbytes:
            break
    layers = max(2, (nbytes - fixed) // per_layer)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return Layout("dense", config, _assemble(outer, layer, layers), 4)


def moe(nbytes: int) -> Layout:
    """Qwen3 30B A3B in bfloat16; `moe_intermediate_size`, 768 in the original, is what fits."""
    hidden, head_dim, experts, layers, vocab = _FULL_MOE if nbytes >= 8 * GIB else _SMALL_MOE
    outer = _outer(hidden, vocab)
    attention = partial(_moe_attention, hidden, head_dim, experts, "BF16")
    room = nbytes - _sum(outer) - layers * _sum(attention(0))
    inner = max(16, room // (layers * experts * 3 * hidden * 2) // 16 * 16)
    layer = partial(_moe_layer, hidden, head_dim, experts, inner, "BF16")
    config = _moe_config(hidden, head_dim, experts, layers, vocab, inner)
    return Layout("moe", config, _assemble(outer, layer, layers), 4)


def fp8(nbytes: int) -> Layout:
    """Qwen3 30B A3B in FP8 blocks of 128 x 128, with one F32 scale each; as many layers as fit."""
    hidden, head_dim, experts, _, vocab = _FULL_MOE if nbytes >= 4 * GIB else _SMALL_MOE
    inner = 768 if nbytes >= 4 * GIB else 256
    outer = _outer(hidden, vocab)
    layer = partial(_moe_layer, hidden, head_dim, experts, inner, "F8_E4M3")
    layers = max(1, (nbytes - _sum(outer)) // _sum(layer(0)))
    config = _moe_config(hidden, head_dim, experts, layers, vocab, inner) | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    }
    return Layout("fp8", config, _assemble(outer, layer, layers), 3)


LAYOUTS: dict[str, Callable[[int], Layout]] = {"dense": dense, "moe": moe, "fp8": fp8}


def _sum(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _assemble(outer: list[Tensor], layer: Callable[[int], list[Tensor]], layers: int) -> tuple[Tensor, ...]:
    first, *last = outer
    return (first, *(tensor for number in range(layers) for tensor in layer(number)), *last)


def _linear(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(f"{name}.weight", "BF16", (rows, columns))


def _norm(name: str, width: int, kind: str = "norm") -> Tensor:
    return Tensor(f"{name}.{kind}.weight", "BF16", (width,))


def _dense_layer(hidden: int, head_dim: int, inner: int, number: int) -> list[Tensor]:
    name = f"model.layers.{number}"
    return [
        _norm(name, hidden, "input_layernorm"),
        *_attention(name, hidden, 32, 8, head_dim, "BF16"),
        _norm(name, hidden, "post_attention_layernorm"),
        *_mlp(f"{name}.mlp", hidden, inner, "BF16"),
    ]


def _attention(name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Iterator[Tensor]:
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield from _weight(f"{name}.self_attn.{part}_proj", count * head_dim, hidden, dtype)
    yield from _weight(f"{name}.self_attn.o_proj", hidden, heads * head_dim, dtype)


def _mlp(name: str, hidden: int, inner: int, dtype: str) -> Iterator[Tensor]:
    yield from _weight(f"{name}.gate_proj", inner, hidden, dtype)
    yield from _weight(f"{name}.up_proj", inner, hidden, dtype)
    yield from _weight(f"{name}.down_proj", hidden, inner, dtype)


def _weight(name: str, rows: int, columns: int, dtype: str) -> Iterator[Tensor]:
    """The weight; of FP8 its scales too."""
    yield Tensor(f"{name}.weight", dtype, (rows, columns))
    if dtype == "F8_E4M3":
        yield Tensor(f"{name}.weight_scale_inv", "F32", (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))


def _outer(hidden: int, vocab: int) -> list[Tensor]:
    return [_linear("model.embed_tokens", vocab, hidden), _linear("lm_head", vocab, hidden), _norm("model", hidden)]


def _moe_attention(hidden: int, head_dim: int, experts: int, dtype: str, number: int) -> list[Tensor]:
    """A layer without its experts."""
    name = f"model.layers.{number}"
    return [
        _norm(name, hidden, "input_layernorm"),
        *_attention(name, hidden, 32, 4, head_dim, dtype),
        _norm(f"{name}.self_attn", head_dim, "q_norm"),
        _norm(f"{name}.self_attn", head_dim, "k_norm"),
        _norm(name, hidden, "post_attention_layernorm"),
        _linear(f"{name}.mlp.gate", experts, hidden),
    ]


def _moe_layer(hidden: int, head_dim: int, experts: int, inner: int, dtype: str, number: int) -> list[Tensor]:
    tensors = _moe_attention(hidden, head_dim, experts, dtype, number)
    for expert in range(experts):
        tensors += _mlp(f"model.layers.{number}.mlp.experts.{expert}", hidden, inner, dtype)
    return tensors


def _moe_config(hidden: int, head_dim: int, experts: int, layers: int, vocab: int, inner: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


# Writing.


def header(tensors: list[Tensor]) -> bytes:
    """A file's start: the length of its header and the header, which ends at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(folder: Path, layout: Layout, random: Callable[[int], Any]) -> bool:
    """Writes the checkpoint through to disk; its pages stay in page cache. False: it was there already.

    `random(n)` gives n random bytes. The index comes last: a folder without one was not finished and is written again.
    `BenchError` when the file system has no room, or when the folder holds what this function did not write.
    """
    parts = layout.files()
    starts = {name: header(tensors) for name, tensors in parts.items()}
    sizes = {name: len(starts[name]) + _sum(tensors) for name, tensors in parts.items()}
    names = {tensor.name: name for name, tensors in parts.items() for tensor in tensors}
    index = json.dumps({"metadata": {"total_size": layout.nbytes}, "weight_map": names})
    if _is_written(folder, index, starts, sizes):
        return False
    _clear(folder)
    needed, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise BenchError(f"{layout.name}: {needed} bytes needed in {folder}, {free} free: give another --data or --gib")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        fds = {name: os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644) for name in parts}
        try:
            for name, fd in fds.items():
                os.ftruncate(fd, sizes[name])
                os.pwrite(fd, starts[name], 0)
            blocks = [
                (fds[name], offset, min(BLOCK, sizes[name] - offset))
                # Block by block over all files: the kernel lets one thread at a time write to a file.
                for offset in range(0, max(sizes.values()), BLOCK)
                for name in parts
                if offset < sizes[name]
            ]
            list(pool.map(partial(_fill, random, {fds[name]: len(starts[name]) for name in parts}), blocks))
            list(pool.map(os.fdatasync, fds.values()))
        finally:
            for fd in fds.values():
                os.close(fd)
    (folder / "config.json").write_text(json.dumps(layout.config, indent=1))
    (folder / INDEX).write_text(index)
    return True


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = list(folder.iterdir())
    if found and not (folder / MARK).exists():
        raise BenchError(f"{folder} is not empty and not of this benchmark: give another --data")
    (folder / MARK).touch()
    for path in found:
        if path.name != MARK:
            path.unlink()


def _fill(random: Callable[[int], Any], starts: dict[int, int], block: tuple[int, int, int]) -> None:
    fd, offset, nbytes = block
    skip = max(0, starts[fd] - offset)  # a header may be longer than a block
    if skip < nbytes:
        content = memoryview(random(nbytes - skip)).cast("B")
        offset += skip
        while content:
            written = os.pwrite(fd, content, offset)
            content, offset = content[written:], offset + written


def _is_written(folder: Path, index: str, starts: dict[str, bytes], sizes: dict[str, int]) -> bool:
    try:
        if (folder / INDEX).read_text() != index:
            return False
        for name, start in starts.items():
            with (folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size != sizes[name] or file.read(len(start)) != start:
                    return False
    except FileNotFoundError:
        return False
    return True


def gpu_random(nbytes: int) -> Any:
    """Random bytes made by the first GPU."""
    import torch

    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda").cpu()
    content = (c_ubyte * nbytes).from_address(made.data_ptr())
    content.kept = made  # type: ignore[attr-defined]  # the memory is the tensor's
    return content


def main() -> int:
    """Writes ``layouts`` (name -> bytes) below ``folder``; prints for each how long it took, 0 if it was there."""
    job = json.loads(sys.argv[1])
    random = gpu_random if job["device"] == "cuda" else os.urandom
    report = {}
    for name, nbytes in job["layouts"].items():
        started = time.perf_counter()
        try:
            fresh = write(Path(job["folder"]) / name, LAYOUTS[name](nbytes), random)
        except BenchError as error:
            sys.exit(str(error))
        report[name] = {"seconds": time.perf_counter() - started if fresh else 0.0}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
