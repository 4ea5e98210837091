"""Casts while loading: elements of one floating type become another's, row by row, by torch on the CPU.

torch is imported by a load that casts, and by no other. It rounds to nearest, ties to even, as `Tensor.to` does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependency
from ..shard.dtypes import DTYPES

if TYPE_CHECKING:
    from .plan import Copy


def require_torch() -> None:
    """`MissingDependency` where no load can cast. Finds torch without importing it."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(package="torch", extra="torch", what="a model whose config casts it (dtype)")


@functools.cache
def _torch() -> Any:
    require_torch()
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # the readers are at work on the other cores
    return torch


def cast_rows(copy: Copy, block: memoryview, out: memoryview, out_pitch: int) -> None:
    """Casts the copy's rows, which lie in `block` at its `start`, into `out`, row after row, `out_pitch` bytes apart.

    `out` is writable and begins with the first row. Both must start at a multiple of their elements' size.
    """
    assert copy.cast is not None
    torch = _torch()
    source_bytes, target_bytes = copy.cast.source_bytes, copy.cast.target_bytes
    elements = copy.width // source_bytes
    last = copy.rows - 1
    with (
        block[copy.start : copy.start + last * copy.pitch + copy.width] as read,
        out[: last * out_pitch + elements * target_bytes] as written,
    ):
        source = torch.frombuffer(read, dtype=getattr(torch, str(DTYPES[copy.cast.source].torch_name)))
        target = torch.frombuffer(written, dtype=getattr(torch, str(DTYPES[copy.cast.target].torch_name)))
        shape = (copy.rows, elements)
        rows = source.as_strided(shape, (copy.pitch // source_bytes, 1))
        target.as_strided(shape, (out_pitch // target_bytes, 1)).copy_(rows)
