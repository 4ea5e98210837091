"""The element types of the safetensors format, by the format's own names.

Source of names and widths: safetensors 0.8 `Dtype`. F4 and F6 pack several elements into a byte.
Nothing here needs torch: `torch_name` is looked up by the client, which hands out raw bytes where torch lacks the type.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type: its name in the format, its width in bits, and torch's attribute for it (None: torch has none).

    `packed` elements share one torch element: torch's float4_e2m1fn_x2 holds two, so a last dimension of n becomes n/2.
    """

    name: str
    bits: int
    torch_name: str | None
    floating: bool = False
    packed: int = 1


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("BOOL", 8, "bool"),
        Dtype("F4", 4, "float4_e2m1fn_x2", floating=True, packed=2),
        Dtype("F6_E2M3", 6, None, floating=True),
        Dtype("F6_E3M2", 6, None, floating=True),
        Dtype("U8", 8, "uint8"),
        Dtype("I8", 8, "int8"),
        Dtype("F8_E5M2", 8, "float8_e5m2", floating=True),
        Dtype("F8_E4M3", 8, "float8_e4m3fn", floating=True),
        Dtype("F8_E8M0", 8, "float8_e8m0fnu", floating=True),
        Dtype("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", floating=True),
        Dtype("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", floating=True),
        Dtype("I16", 16, "int16"),
        Dtype("U16", 16, "uint16"),
        Dtype("F16", 16, "float16", floating=True),
        Dtype("BF16", 16, "bfloat16", floating=True),
        Dtype("I32", 32, "int32"),
        Dtype("U32", 32, "uint32"),
        Dtype("F32", 32, "float32", floating=True),
        Dtype("C64", 64, "complex64"),
        Dtype("F64", 64, "float64", floating=True),
        Dtype("I64", 64, "int64"),
        Dtype("U64", 64, "uint64"),
    )
}


def tensor_bytes(dtype: str, shape: tuple[int, ...] | list[int]) -> int | None:
    """Bytes of a contiguous tensor, or None when its elements do not fill whole bytes."""
    bits = DTYPES[dtype].bits
    for size in shape:
        bits *= size
    return bits // 8 if bits % 8 == 0 else None
