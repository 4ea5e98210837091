"""Which tensors a requested element type applies to: plain floats, nothing that belongs to a quantized weight.

    F64, F32, F16, BF16        cast
    integers, FP8, FP4 ...     stay, and so does what belongs to a quantized weight, except its bias
    scales, zero points        stay
    what the family lists      stays: router biases and the like, which the model class keeps in F32

A cast never changes which bytes are read: a slice's parts are counted in the type on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..shard.dtypes import DTYPES
from .rules import Patterns
from .scales import COMPANIONS, PLAIN

if TYPE_CHECKING:
    from ..checkpoint.header import TensorRange

TARGETS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Element types of quantized matrices. Booleans and 64 bit integers are masks and positions beside ordinary weights.
_QUANTIZED = frozenset(DTYPES) - PLAIN - {"BOOL", "I64", "U64", "I16", "U16", "C64"}


class Casts:
    """Decides for one model; `dtype` is a torch name, None casts nothing. `ValueError` for one that is no target."""

    def __init__(self, dtype: str | None, uncast: Sequence[str] = ()) -> None:
        if dtype is not None and dtype not in TARGETS:
            raise ValueError(f"dtype must be one of {', '.join(TARGETS)}, found {dtype!r}")
        self.target = TARGETS[dtype] if dtype is not None else None
        self._uncast = Patterns(uncast)

    def dtype(self, leaf: str, tensor: TensorRange, module: Mapping[str, TensorRange]) -> str:
        """The safetensors name of the type in the shard; `module` holds the tensors beside it, by last part of name."""
        if self.target is None or tensor.dtype not in PLAIN:
            return tensor.dtype
        quantized = not leaf.endswith("bias") and any(_is_quantized(other) for other in module.values())
        stays = quantized or leaf in COMPANIONS or self._uncast.find(tensor.name) is not None
        return tensor.dtype if stays else self.target


def _is_quantized(tensor: TensorRange) -> bool:
    return tensor.dtype in _QUANTIZED and len(tensor.shape) > 1
