"""The table of element types against its two sources: the safetensors library and torch."""

from __future__ import annotations

import json
import re
import struct

import pytest
import safetensors
import torch

from weightcached.shard.dtypes import DTYPES, tensor_bytes


def one_tensor_file(dtype: str, shape: list[int], nbytes: int) -> bytes:
    header = json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(nbytes)


def test_the_names_are_those_of_the_format() -> None:
    """The safetensors library lists the names it knows when it meets an unknown one: the table has just these."""
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(one_tensor_file("NO_SUCH_TYPE", [1], 1))

    expected = str(caught.value).partition("expected one of")[2]
    assert set(re.findall(r"`(\w+)`", expected)) == set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_the_widths_are_those_of_the_format(dtype) -> None:  # type: ignore[no-untyped-def]
    """The safetensors library accepts a tensor of exactly the bytes that `tensor_bytes` says, and of no others."""
    nbytes = tensor_bytes(dtype.name, [3, 8])
    assert nbytes == 3 * dtype.bits

    safetensors.deserialize(one_tensor_file(dtype.name, [3, 8], nbytes))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(one_tensor_file(dtype.name, [3, 8], nbytes + 1))


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES.values() if dtype.torch_name], ids=lambda dtype: dtype.name
)
def test_torch_has_the_types_named(dtype) -> None:  # type: ignore[no-untyped-def]
    """Each torch name exists in torch, is as wide as `packed` elements, and is floating where the table says so."""
    found = getattr(torch, dtype.torch_name)

    assert isinstance(found, torch.dtype)
    assert found.itemsize * 8 == dtype.bits * dtype.packed
    assert found.is_floating_point == dtype.floating


def test_types_without_a_torch_name_are_missing_in_torch() -> None:
    """Only the 6-bit types have none; everything else is handed out as torch's own type."""
    assert {name for name, dtype in DTYPES.items() if dtype.torch_name is None} == {"F6_E2M3", "F6_E3M2"}
    assert not any("6_e2m3" in name or "6_e3m2" in name for name in dir(torch))


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("F32", [], 4),
        ("F32", [0, 7], 0),
        ("C64", (2, 3), 48),
        ("F4", [3, 2], 3),
        ("F4", [3], None),
        ("F6_E2M3", [4], 3),
        ("F6_E2M3", [3], None),
        ("U8", [1 << 40, 1 << 40], 1 << 80),
    ],
)
def test_bytes_of_a_tensor(dtype: str, shape: list[int], nbytes: int | None) -> None:
    """Scalars, empty tensors, packed types, and sizes beyond 64 bits, which must not wrap around."""
    assert tensor_bytes(dtype, shape) == nbytes
