"""How the tensors of one module follow its weight: biases, scales, zero points, packed values.

    weight [out, in]        a cut is made on one of these two sides, counted in elements of the unpacked weight
    weight_packed           [out, in/8] int32      an entry of its axis 1 stands for 8 elements of `in`
    weight_scale_inv        [out/128, in/128]      an entry stands for a block of 128 x 128
    weight_scale            [out, 1]               has no `in`: whole on every rank when `in` is cut
    qweight (GPTQ)          [in/8, out] int32      transposed
    input_scale             []                     has neither: always whole

Which side lies on which axis, and how many elements an entry stands for, is a `Layout`. A cut that would divide an
entry is refused. So is a module whose quantization is not known here, by name. Source: how vLLM 0.33 loads them
(`linear.py`, `parameter.py`).

With act-order (GPTQ's `desc_act`, a `weight_g_idx`) the inputs of a group are scattered, so that a cut of the input
side would divide every group: refused. `weight_shape` stays what it is on disk, the shape before the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .cuts import Misfit, Piece
from .rules import Side

if TYPE_CHECKING:
    from ..checkpoint.header import TensorRange

PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
_ONE_VALUE = frozenset({"I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"})
_METHODS = frozenset({"", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"})
_COMPRESSED = frozenset({"compressed-tensors"})
_TRANSPOSED = frozenset({"gptq", "awq"})
FP8_BLOCK = (128, 128)  # what block-wise FP8 is made in, unless config.json says otherwise
KV_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale"})


class Axis(NamedTuple):
    """A dimension of a tensor on which each entry stands for `per` elements of a side, the last perhaps for fewer."""

    dim: int
    per: int = 1


class Layout(NamedTuple):
    """Where a tensor has the two sides of its module's weight; None: it does not have that side."""

    out: Axis | None = None
    inner: Axis | None = None

    def axis(self, side: Side) -> Axis | None:
        return self.out if side == "out" else self.inner


WHOLE = Layout()


@dataclass(frozen=True, slots=True)
class Quantization:
    """quantization_config of config.json, as far as it decides where tensors can be cut. `method` is "" without one."""

    method: str = ""
    block: tuple[int, int] = FP8_BLOCK
    bits: int | None = None
    group: int | None = None
    act_order: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Quantization:
        """What config.json says; values of an unexpected type count as not said."""
        text = config.get("text_config")
        levels = (config, text) if isinstance(text, dict) else (config,)
        found = next((level["quantization_config"] for level in levels if level.get("quantization_config")), None)
        if not isinstance(found, dict):
            return cls()
        weights = _compressed_weights(found)
        block = found.get("weight_block_size") or weights.get("block_structure")
        bits = found.get("bits", weights.get("num_bits"))
        group = found.get("group_size", weights.get("group_size"))
        return cls(
            method=str(found.get("quant_method", "")),
            block=(block[0], block[1]) if block is not None and _is_pair(block) else FP8_BLOCK,
            bits=bits if type(bits) is int and bits > 0 else None,
            group=group if type(group) is int else None,
            act_order=bool(found.get("desc_act", False)),
        )


def _compressed_weights(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of compressed-tensors' groups of modules: what all of them say alike of their weights."""
    groups = found.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    schemes = [scheme for scheme in schemes if isinstance(scheme, dict)]
    if not schemes:
        return {}
    return {key: value for key, value in schemes[0].items() if all(other.get(key) == value for other in schemes)}


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


class Module:
    """One module's tensors by what they are there; `out` and `inner` are the sizes of its unpacked weight.

    Raises `Misfit` when no tensor says these sizes, or the quantization is not known.
    """

    def __init__(self, tensors: Mapping[str, TensorRange], quantization: Quantization) -> None:
        self.quantization = quantization
        leaf = next((leaf for leaf in ("weight", "qweight", "weight_packed") if leaf in tensors), None)
        if leaf is None:
            raise Misfit(f"its module has no weight, only {', '.join(sorted(tensors))}")
        weight = tensors[leaf]
        layout = _LEAVES[leaf](self, weight)
        if layout.out is None:
            raise Misfit("its weight has no axis")
        self.out = weight.shape[layout.out.dim] * layout.out.per
        self.inner = weight.shape[layout.inner.dim] * layout.inner.per if layout.inner else None
        self.act_order = (quantization.act_order and leaf == "qweight") or "weight_g_idx" in tensors

    def length(self, side: Side) -> int:
        """Elements of the weight on this side."""
        found = self.out if side == "out" else self.inner
        if found is None:
            raise Misfit("its weight has no input axis")
        return found

    def axis(self, leaf: str, tensor: TensorRange, side: Side) -> Axis | None:
        """Where the tensor has this side, None: nowhere, it stays whole. `Misfit` for an unknown name or shape."""
        if leaf not in _LEAVES:
            raise Misfit(f"no rule says how it follows its weight (quantization: {self._shown})")
        if side == "in" and self.act_order:
            raise Misfit("its input side is in act-order, which cannot be cut")
        axis = _LEAVES[leaf](self, tensor).axis(side)
        if axis is not None:
            length = self.length(side)
            if tensor.shape[axis.dim] != -(-length // axis.per):
                raise Misfit(f"shape {list(tensor.shape)} does not fit {length} elements, {axis.per} to an entry")
        return axis

    @property
    def _shown(self) -> str:
        return repr(self.quantization.method) if self.quantization.method else "none"

    def _require(self, methods: frozenset[str]) -> None:
        if self.quantization.method not in methods:
            raise Misfit(f"quantization {self._shown} is not known, so neither is where it can be cut")

    def _packed(self, tensor: TensorRange) -> int:
        """Elements in an entry of a packed matrix."""
        _require_axes(tensor, 2)
        word = {"I32": 32, "U8": 8}.get(tensor.dtype)
        bits = self.quantization.bits
        if word is None or bits is None or word % bits:
            raise Misfit(f"values of {bits} bits packed in {tensor.dtype} are not known")
        return word // bits

    def _group(self, groups: int) -> int:
        """Elements of the input side that each of `groups` scales covers."""
        inner, stated = self.length("in"), self.quantization.group
        if stated is not None and stated > 0:
            return stated
        if not groups or inner % groups:
            raise Misfit(f"{groups} groups do not divide {inner}")
        return inner // groups

    def _transposed_groups(self, tensor: TensorRange) -> Axis | None:
        """Of scales [in/g, out]. Without groups there is one row for the whole input side."""
        _require_axes(tensor, 2)
        stated = self.quantization.group
        return Axis(0, self._group(tensor.shape[0])) if tensor.shape[0] > 1 or (stated or 0) > 0 else None

    # One method for each name in `_LEAVES`.

    def weight(self, tensor: TensorRange) -> Layout:
        per = 1
        if tensor.dtype not in PLAIN:
            self._require(_METHODS)
            if tensor.dtype == "U8" and self.quantization.method == "modelopt":
                per = 2  # NVFP4: two values in a byte
            elif tensor.dtype not in _ONE_VALUE:
                raise Misfit(f"a weight of {tensor.dtype} under quantization {self._shown} is not known")
        return Layout(Axis(0) if tensor.shape else None, Axis(1, per) if len(tensor.shape) > 1 else None)

    def bias(self, tensor: TensorRange) -> Layout:
        _require_axes(tensor, 1)
        return Layout(Axis(0))

    def whole(self, tensor: TensorRange) -> Layout:
        return WHOLE

    def one(self, tensor: TensorRange) -> Layout:
        if prod(tensor.shape) != 1:
            raise Misfit(f"one value expected, found shape {list(tensor.shape)}")
        return WHOLE

    def scale(self, tensor: TensorRange) -> Layout:
        """One for the weight, one for each output, or one for each group of inputs or block of both."""
        self._require(_METHODS)
        shape = tensor.shape
        if prod(shape) == 1:
            return WHOLE
        if shape == (self.out,) or (shape == (self.out, 1) and (self.quantization.group or 0) <= 0):
            return Layout(Axis(0))
        if len(shape) == 2 and shape[0] == self.out:
            return Layout(Axis(0), Axis(1, self._group(shape[1])))
        return self.block_scale(tensor)

    def block_scale(self, tensor: TensorRange) -> Layout:
        self._require(_METHODS)
        if len(tensor.shape) < 2:
            return self.one(tensor)
        _require_axes(tensor, 2)
        rows, columns = self.quantization.block
        return Layout(Axis(0, rows), Axis(1, columns))

    def zero_point(self, tensor: TensorRange) -> Layout:
        """Like the scales; in int32 several outputs share a word."""
        if tensor.dtype != "I32":
            return self.scale(tensor)
        self._require(_COMPRESSED)
        _require_axes(tensor, 2)
        channels = tensor.shape[1] == 1 and (self.quantization.group or 0) <= 0
        return Layout(Axis(0, self._packed(tensor)), None if channels else Axis(1, self._group(tensor.shape[1])))

    def packed(self, tensor: TensorRange) -> Layout:
        self._require(_COMPRESSED)
        return Layout(Axis(0), Axis(1, self._packed(tensor)))

    def qweight(self, tensor: TensorRange) -> Layout:
        self._require(_TRANSPOSED)
        per = self._packed(tensor)
        if self.quantization.method == "gptq":
            return Layout(out=Axis(1), inner=Axis(0, per))
        return Layout(out=Axis(1, per), inner=Axis(0))

    def qzeros(self, tensor: TensorRange) -> Layout:
        self._require(_TRANSPOSED)
        return Layout(out=Axis(1, self._packed(tensor)), inner=self._transposed_groups(tensor))

    def scales(self, tensor: TensorRange) -> Layout:
        self._require(_TRANSPOSED)
        return Layout(out=Axis(1), inner=self._transposed_groups(tensor))

    def group_index(self, tensor: TensorRange) -> Layout:
        _require_axes(tensor, 1)
        return Layout(inner=Axis(0))


def _require_axes(tensor: TensorRange, count: int) -> None:
    if len(tensor.shape) != count:
        raise Misfit(f"{count} axes expected, found shape {list(tensor.shape)}")


_LEAVES: dict[str, Callable[[Module, TensorRange], Layout]] = {
    "weight": Module.weight,
    "bias": Module.bias,
    "weight_scale_inv": Module.block_scale,
    "weight_scale": Module.scale,
    "weight_zero_point": Module.zero_point,
    "weight_packed": Module.packed,
    "weight_shape": Module.whole,
    "weight_g_idx": Module.group_index,
    "qweight": Module.qweight,
    "qzeros": Module.qzeros,
    "scales": Module.scales,
    "g_idx": Module.group_index,
    **dict.fromkeys(
        (
            "input_scale",
            "output_scale",
            "activation_scale",
            "weight_scale_2",
            "weight_global_scale",
            "input_global_scale",
        ),
        Module.one,
    ),
    **dict.fromkeys(KV_SCALES, Module.one),
}

COMPANIONS = frozenset(_LEAVES) - {"weight", "bias"}


def scaled(piece: Piece, per: int, length: int) -> Piece:
    """`piece` of a side of `length` elements, in entries of `per` elements. `Misfit` when it would divide an entry."""
    if per == 1:
        return piece
    for start, stop in piece.ranges:
        if start % per or (stop % per and stop != length):
            raise Misfit(f"[{start}, {stop}) of {length} does not fall on multiples of {per}")
    if piece.zeros and (piece.zeros % per or length % per):
        raise Misfit(f"{length} elements and {piece.zeros} zeros do not fall on multiples of {per}")
    return Piece(tuple((start // per, -(-stop // per)) for start, stop in piece.ranges), piece.zeros // per)
