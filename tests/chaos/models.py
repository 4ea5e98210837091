"""The checkpoints of a chaos run: three models of which each has two variants, and the bytes that a rank of each holds.

    plain    one file, one rank on the first device
    cut      a small Llama, two ranks, one on each device
    lazy     one file, one rank on the second device, loaded when it is asked for

Variants have equal names, shapes and sizes, as two fine-tunes of one model; only the content digest tells them apart.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.llama import SMALL, Tensor, part_of
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint

VARIANTS = 2
FILE = "model.safetensors"


@dataclass
class ModelFiles:
    """One model's checkpoint on disk, and what it may hold. `contents`: content digest -> the digest of each rank."""

    name: str
    folder: Path
    devices: tuple[str, ...]
    preload: bool = True
    variants: list[bytes] = field(default_factory=list)
    contents: dict[str, list[str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # content digests by variant
    current: int = 0

    @property
    def file(self) -> Path:
        return self.folder / FILE

    @property
    def stat(self) -> tuple[int, int, int, int, int]:
        """As a manifest's `SourceFile.stat`."""
        found = self.file.stat()
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def replace(self, variant: int) -> None:
        """The file becomes the variant at once, as a new file under the old name."""
        fresh = self.folder / f".{FILE}.new"
        fresh.write_bytes(self.variants[variant])
        fresh.rename(self.file)
        self.current = variant

    def overwrite(self, variant: int) -> None:
        """The file becomes the variant in place, in two steps: whoever reads meanwhile may get some of each."""
        data = self.variants[variant]
        half = len(data) // 2
        with open(self.file, "r+b", buffering=0) as file:
            file.write(data[:half])
            file.write(data[half:])
        self.current = variant


def digest_of(tensors: Iterable[tuple[str, bytes]]) -> str:
    """One digest of names and bytes, in the order of the names."""
    state = hashlib.sha256()
    for name, data in sorted(tensors):
        state.update(name.encode() + b"\0" + len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def make_models(folder: Path, devices: list[str], rng: random.Random, *, extra_bytes: int = 0) -> list[ModelFiles]:
    """Writes all checkpoints. `devices`: of the first model, of the two ranks of the second, of the third.

    `extra_bytes`: of one more tensor in the models of one file.
    """
    first, *ranks, last = devices
    models = [
        ModelFiles("plain", folder / "plain", (first,)),
        ModelFiles("cut", folder / "cut", tuple(ranks)),
        ModelFiles("lazy", folder / "lazy", (last,), preload=False),
    ]
    for model in models:
        model.folder.mkdir()
        if model.name == "cut":
            (model.folder / "config.json").write_text(json.dumps(SMALL.config()))
        for _ in range(VARIANTS):
            _add_variant(model, rng, extra_bytes)
        model.replace(0)
    return models


def _add_variant(model: ModelFiles, rng: random.Random, extra_bytes: int) -> None:
    if model.name == "cut":
        tensors = {name: _tensor(rng, shape) for name, shape in SMALL.shapes().items()}
        parts = [
            {name: part_of(name, tensor, rank, len(model.devices)) for name, tensor in tensors.items()}
            for rank in range(len(model.devices))
        ]
    else:
        shapes = {"a.weight": (96, 128), "b.weight": (33,), "c.bias": (1, 7)}
        if extra_bytes:
            shapes["extra.weight"] = (extra_bytes // 2,)
        tensors = {name: _tensor(rng, shape) for name, shape in shapes.items()}
        parts = [{name: data for name, (_, _, data) in tensors.items()}]
    model.variants.append(_file_of(tensors))
    model.replace(len(model.variants) - 1)
    with open_checkpoint(model.folder) as checkpoint:
        content, _ = digest_checkpoint(checkpoint)
    model.order.append(content)
    model.contents[content] = [digest_of(part.items()) for part in parts]


def _tensor(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    return "BF16", shape, rng.randbytes(2 * math.prod(shape))


def _file_of(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file, by the format's description."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
