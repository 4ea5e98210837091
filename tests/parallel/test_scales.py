"""How a module's tensors follow its weight, for every format that is known, and refusals of those that are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.tensors import tensor
from weightcached.parallel.cuts import Misfit, Piece
from weightcached.parallel.scales import Axis, Module, Quantization, scaled

FP8 = {"quant_method": "fp8"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
MODELOPT = {"quant_method": "modelopt", "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}}}


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def module(quantization: dict[str, Any] | None, **leaves: tuple[str, tuple[int, ...]]) -> Module:
    tensors = {leaf: tensor(f"m.{leaf}", shape, dtype) for leaf, (dtype, shape) in leaves.items()}
    return Module(tensors, Quantization.of({"quantization_config": quantization} if quantization else {}))


def axes(quantization: dict[str, Any] | None, **leaves: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    """For each tensor, where it has the output side and where the input side."""
    found = module(quantization, **leaves)
    named = {leaf: tensor(f"m.{leaf}", shape, dtype) for leaf, (dtype, shape) in leaves.items()}
    return {leaf: (found.axis(leaf, one, "out"), found.axis(leaf, one, "in")) for leaf, one in named.items()}


def test_a_plain_linear_layer() -> None:
    """Rows are outputs, columns inputs; the bias has outputs only."""
    assert axes(None, weight=("BF16", (96, 64)), bias=("BF16", (96,))) == {
        "weight": (Axis(0), Axis(1)),
        "bias": (Axis(0), None),
    }


def test_block_scales_lie_on_both_sides() -> None:
    """128 x 128 unless config.json says otherwise; the last block of a side may be short."""
    weight, scale = ("F8_E4M3", (576, 7168)), ("F32", (5, 56))

    assert axes(FP8, weight=weight, weight_scale_inv=scale)["weight_scale_inv"] == (Axis(0, 128), Axis(1, 128))
    assert axes(None, weight=weight, weight_scale_inv=scale)["weight_scale_inv"] == (Axis(0, 128), Axis(1, 128))
    blocks = FP8 | {"weight_block_size": [64, 256]}
    assert axes(blocks, weight=weight, weight_scale_inv=("F32", (9, 28)))["weight_scale_inv"] == (
        Axis(0, 64),
        Axis(1, 256),
    )
    blocks = compressed(block_structure=[128, 128])
    assert axes(blocks, weight=weight, weight_scale=scale)["weight_scale"] == (Axis(0, 128), Axis(1, 128))


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "k_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_a_tensor_is_whole_everywhere(leaf: str, shape: tuple[int, ...]) -> None:
    """A number belongs to every piece of its weight."""
    assert axes(FP8, weight=("F8_E4M3", (96, 64)), **{leaf: ("F32", shape)})[leaf] == (None, None)


@pytest.mark.parametrize("shape", [(96,), (96, 1)])
def test_scales_of_outputs_follow_rows_only(shape: tuple[int, ...]) -> None:
    """Cut with the rows of the weight, whole where its columns are cut."""
    for quantization in (FP8, compressed(num_bits=8, group_size=None)):
        found = axes(quantization, weight=("F8_E4M3", (96, 64)), weight_scale=("BF16", shape))

        assert found["weight_scale"] == (Axis(0), None)


def test_packed_weights_of_compressed_tensors() -> None:
    """Eight values of 4 bits in a word: of inputs in the weight, of outputs in the zero points; groups of inputs."""
    found = axes(
        compressed(num_bits=4, group_size=128),
        weight_packed=("I32", (1024, 512)),
        weight_scale=("BF16", (1024, 32)),
        weight_zero_point=("I32", (128, 32)),
        weight_shape=("I64", (2,)),
    )

    assert found == {
        "weight_packed": (Axis(0), Axis(1, 8)),
        "weight_scale": (Axis(0), Axis(1, 128)),
        "weight_zero_point": (Axis(0, 8), Axis(1, 128)),
        "weight_shape": (None, None),
    }


def test_packed_weights_without_groups() -> None:
    """One scale and one zero point for each output have no input side."""
    found = axes(
        compressed(num_bits=4),
        weight_packed=("I32", (1024, 512)),
        weight_scale=("BF16", (1024, 1)),
        weight_zero_point=("I32", (128, 1)),
    )

    assert found["weight_scale"] == (Axis(0), None)
    assert found["weight_zero_point"] == (Axis(0, 8), None)


def test_two_values_in_a_byte() -> None:
    """NVFP4 as modelopt writes it: packed inputs, a scale for each 16 of them, one for the tensor."""
    found = axes(
        MODELOPT,
        weight=("U8", (64, 128)),
        weight_scale=("F8_E4M3", (64, 16)),
        weight_scale_2=("F32", ()),
        input_scale=("F32", ()),
    )

    assert found["weight"] == (Axis(0), Axis(1, 2))
    assert found["weight_scale"] == (Axis(0), Axis(1, 16))
    assert found["weight_scale_2"] == found["input_scale"] == (None, None)


def test_gptq_is_transposed_and_packs_inputs() -> None:
    """Rows are words of 8 inputs, columns are outputs; zero points pack outputs."""
    found = axes(
        GPTQ,
        qweight=("I32", (512, 1024)),
        qzeros=("I32", (32, 128)),
        scales=("F16", (32, 1024)),
        g_idx=("I32", (4096,)),
        bias=("F16", (1024,)),
    )

    assert found == {
        "qweight": (Axis(1), Axis(0, 8)),
        "qzeros": (Axis(1, 8), Axis(0, 128)),
        "scales": (Axis(1), Axis(0, 128)),
        "g_idx": (None, Axis(0)),
        "bias": (Axis(0), None),
    }


def test_awq_is_transposed_and_packs_outputs() -> None:
    """Rows are inputs, columns words of 8 outputs."""
    found = axes(AWQ, qweight=("I32", (4096, 128)), qzeros=("I32", (32, 128)), scales=("F16", (32, 1024)))

    assert found == {
        "qweight": (Axis(1, 8), Axis(0)),
        "qzeros": (Axis(1, 8), Axis(0, 128)),
        "scales": (Axis(1), Axis(0, 128)),
    }


def test_gptq_without_groups_has_one_row_of_scales() -> None:
    """group_size -1: the row is for all inputs, whole where they are cut."""
    found = axes(GPTQ | {"group_size": -1}, qweight=("I32", (16, 32)), scales=("F16", (1, 32)))

    assert found["scales"] == (Axis(1), None)


@pytest.mark.parametrize(
    "made",
    [
        module(GPTQ | {"desc_act": True}, qweight=("I32", (16, 32)), g_idx=("I32", (128,))),
        module(compressed(num_bits=4), weight_packed=("I32", (32, 16)), weight_g_idx=("I32", (128,))),
    ],
)
def test_act_order_is_cut_by_outputs_only(made: Module) -> None:
    """The inputs of a group are scattered: no tensor of the module can be cut by them."""
    index = tensor("m.g_idx", (128,), "I32")

    assert made.axis("g_idx", index, "out") is None
    with pytest.raises(Misfit, match="in act-order, which cannot be cut"):
        made.axis("g_idx", index, "in")


@pytest.mark.parametrize(
    ("quantization", "leaves", "sentence"),
    [
        ({"quant_method": "bitsandbytes"}, {"weight": ("U8", (4096, 1))}, "quantization 'bitsandbytes' is not known"),
        ({"quant_method": "hqq"}, {"weight": ("I8", (64, 64))}, "quantization 'hqq' is not known"),
        ({"quant_method": "auto-round"}, {"qweight": ("I32", (8, 64))}, "quantization 'auto-round' is not known"),
        (None, {"weight": ("U8", (64, 32))}, "a weight of U8 under quantization none is not known"),
        (FP8, {"weight": ("I64", (64, 32))}, "a weight of I64 under quantization 'fp8' is not known"),
        (GPTQ | {"bits": 3}, {"qweight": ("I32", (8, 64))}, "values of 3 bits packed in I32 are not known"),
        ({"quant_method": "gptq"}, {"qweight": ("I32", (8, 64))}, "values of None bits packed in I32"),
        (GPTQ, {"qweight": ("I32", (8,))}, r"2 axes expected, found shape \[8\]"),
        (None, {"weight": ("BF16", ())}, "its weight has no axis"),
        (None, {"bias": ("BF16", (4,)), "alpha": ("BF16", (4,))}, "its module has no weight, only alpha, bias"),
    ],
)
def test_weights_that_are_not_known(
    quantization: dict[str, Any] | None, leaves: dict[str, tuple[str, tuple[int, ...]]], sentence: str
) -> None:
    """The method and the type are named: where such a weight can be cut would be a guess."""
    with pytest.raises(Misfit, match=sentence):
        module(quantization, **leaves)


@pytest.mark.parametrize(
    ("quantization", "leaf", "dtype", "shape", "sentence"),
    [
        (FP8, "weight_scale_inv", "F32", (2, 2), r"shape \[2, 2\] does not fit 384 elements, 128 to an entry"),
        (FP8, "weight_scale_inv", "F32", (3,), r"one value expected, found shape \[3\]"),
        (FP8, "weight_scale_inv", "F32", (3, 1, 2), "2 axes expected"),
        (FP8, "weight_scale", "F32", (3,), "one value expected"),
        (FP8, "weight_scale", "F32", (384, 7), "7 groups do not divide 256"),
        (FP8, "weight_scale", "F32", (384, 0), "0 groups do not divide 256"),
        (FP8, "input_scale", "F32", (256,), "one value expected"),
        (FP8, "bias", "BF16", (383,), "does not fit 384 elements, 1 to an entry"),
        (FP8, "bias", "BF16", (1, 384), "1 axes expected"),
        (FP8, "SCB", "F32", (384,), r"no rule says how it follows its weight \(quantization: 'fp8'\)"),
        (FP8, "weight.absmax", "F32", (384,), "no rule says how it follows its weight"),
        (FP8, "qzeros", "I32", (2, 48), "quantization 'fp8' is not known"),
        (compressed(group_size=32), "weight_scale", "F32", (384, 1), "does not fit 256 elements, 32 to an entry"),
    ],
)
def test_companions_that_do_not_fit(
    quantization: dict[str, Any], leaf: str, dtype: str, shape: tuple[int, ...], sentence: str
) -> None:
    """A name or a shape that is not known beside a weight of 384 x 256 is refused, and never taken for something."""
    made = module(quantization, weight=("F8_E4M3", (384, 256)))

    with pytest.raises(Misfit, match=sentence):
        for side in ("out", "in"):
            made.axis(leaf, tensor(f"m.{leaf}", shape, dtype), side)  # type: ignore[arg-type]


def test_a_vector_has_no_input_side() -> None:
    """A norm's weight can be cut like rows, not like columns."""
    made = module(None, weight=("BF16", (64,)))

    assert made.length("out") == 64
    with pytest.raises(Misfit, match="its weight has no input axis"):
        made.length("in")


def test_pieces_in_entries() -> None:
    """A range in whole blocks, a short last block, and zeros; dividing a block is refused with both numbers."""
    assert scaled(Piece(((128, 384), (512, 576))), 128, 576) == Piece(((1, 3), (4, 5)))
    assert scaled(Piece(((0, 8),), 8), 8, 8) == Piece(((0, 1),), 1)
    assert scaled(Piece(((3, 5),)), 1, 8) == Piece(((3, 5),))
    with pytest.raises(Misfit, match=r"\[96, 192\) of 768 does not fall on multiples of 128"):
        scaled(Piece(((96, 192),)), 128, 768)
    with pytest.raises(Misfit, match=r"\[0, 100\) of 768 does not fall"):
        scaled(Piece(((0, 100),)), 128, 768)
    with pytest.raises(Misfit, match="9 elements and 7 zeros do not fall"):
        scaled(Piece(((0, 9),), 7), 8, 9)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Quantization()),
        ({"quantization_config": "fp8"}, Quantization()),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": "large"}}, Quantization("fp8")),
        ({"quantization_config": GPTQ | {"bits": "4"}}, Quantization("gptq", group=128)),
        ({"text_config": {"quantization_config": AWQ}}, Quantization("awq", bits=4, group=128)),
        (
            {"quantization_config": compressed(num_bits=4, group_size=32)},
            Quantization("compressed-tensors", (128, 128), 4, 32),
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
                }
            },
            Quantization("compressed-tensors"),
        ),
    ],
)
def test_what_config_json_says_of_quantization(config: dict[str, Any], expected: Quantization) -> None:
    """A value of another type, or one that groups of modules do not agree on, counts as not said."""
    assert Quantization.of(config) == expected
