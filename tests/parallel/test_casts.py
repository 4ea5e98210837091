"""What a requested element type applies to."""

from __future__ import annotations

import pytest

from tests.parallel.tensors import tensor
from weightcached.parallel.casts import Casts


def cast(
    leaf: str, *module: tuple[str, str, tuple[int, ...]], to: str = "float16", uncast: tuple[str, ...] = ()
) -> str:
    """The type that the tensor `leaf` of a module of these tensors gets."""
    leaves = {name: tensor(f"m.{name}", shape, dtype) for name, dtype, shape in module}
    return Casts(to, uncast).dtype(leaf, leaves[leaf], leaves)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_plain_floats_are_cast(dtype: str) -> None:
    """Any plain float becomes any of the three targets; without a target everything stays."""
    leaves = {"weight": tensor("m.weight", (4, 4), dtype)}

    assert Casts("bfloat16").dtype("weight", leaves["weight"], leaves) == "BF16"
    assert Casts("float16").dtype("weight", leaves["weight"], leaves) == "F16"
    assert Casts("float32").dtype("weight", leaves["weight"], leaves) == "F32"
    assert Casts(None).dtype("weight", leaves["weight"], leaves) == dtype


@pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64"])
def test_everything_else_stays(dtype: str) -> None:
    """Integers, complex numbers and narrow floats are not numbers of another width."""
    assert cast("weight", ("weight", dtype, (4, 4))) == dtype


@pytest.mark.parametrize(
    ("weight", "leaf", "shape"),
    [
        (("weight", "F8_E4M3", (4, 4)), "weight_scale_inv", (1, 1)),
        (("weight", "F8_E4M3", (4, 4)), "anything_new", (4,)),
        (("qweight", "I32", (4, 4)), "scales", (1, 4)),
        (("weight", "U8", (8, 1)), "weight.absmax", (2,)),
        (("gate_up_proj_blocks", "U8", (2, 4, 1, 16)), "gate_up_proj_other", (2, 4)),
    ],
)
def test_what_belongs_to_a_quantized_weight_stays(
    weight: tuple[str, str, tuple[int, ...]], leaf: str, shape: tuple[int, ...]
) -> None:
    """A kernel reads scales in the type they were written in; a bias is an ordinary float and is cast."""
    assert cast(leaf, weight, (leaf, "BF16", shape)) == "BF16"
    assert cast("bias", weight, ("bias", "BF16", (4,))) == "F16"
    assert cast("gate_up_proj_bias", weight, ("gate_up_proj_bias", "BF16", (2, 4))) == "F16"


def test_scales_without_a_quantized_weight_stay() -> None:
    """Those of a quantized key/value cache lie beside plain weights; a model's own scale is a weight."""
    plain = ("weight", "BF16", (4, 4))

    assert cast("k_scale", plain, ("k_scale", "F32", ())) == "F32"
    assert cast("logit_scale", plain, ("logit_scale", "F32", ())) == "F16"


def test_masks_and_positions_do_not_make_a_module_quantized() -> None:
    """CLIP's position_ids lie beside its class embedding."""
    assert cast("embedding", ("embedding", "F32", (8,)), ("position_ids", "I64", (1, 50))) == "F16"
    assert cast("weight", ("weight", "F32", (8,)), ("num_batches_tracked", "I64", ())) == "F16"


def test_what_the_family_lists_stays() -> None:
    """By parameter or by module; what it does not list is cast."""
    bias = ("e_score_correction_bias", "F32", (8,))

    assert cast(bias[0], bias, uncast=("m.e_score_correction_bias",)) == "F32"
    assert cast(bias[0], bias, uncast=("m",)) == "F32"
    assert cast(bias[0], bias, uncast=("n",)) == "F16"


@pytest.mark.parametrize("dtype", ["int8", "BF16", "checkpoint", "torch.bfloat16", ""])
def test_other_targets_are_refused(dtype: str) -> None:
    """Only the three floats that weights are served in."""
    with pytest.raises(ValueError, match=f"dtype must be one of bfloat16, float16, float32, found '{dtype}'"):
        Casts(dtype)
