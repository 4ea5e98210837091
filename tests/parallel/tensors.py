"""Tensors as a checkpoint's header lists them, and what a slice makes of a tensor's bytes."""

from __future__ import annotations

from weightcached.checkpoint.header import TensorRange
from weightcached.parallel.cuts import Part
from weightcached.shard.dtypes import tensor_bytes


def tensor(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorRange:
    """A header's entry; where in its file the tensor lies does not matter to a plan."""
    nbytes = tensor_bytes(dtype, shape)
    assert nbytes is not None
    return TensorRange(name, dtype, shape, 0, nbytes)


def filled(parts: tuple[Part, ...], source: bytes, nbytes: int) -> bytes:
    """The rank's tensor of `nbytes`, copied run by run; no byte is written twice."""
    target = bytearray(nbytes)
    written = bytearray(nbytes)
    for part in parts:
        for row in range(part.rows):
            begin, place = part.start + row * part.pitch, part.target + row * part.target_pitch
            run = source[begin : begin + part.width]
            assert len(run) == part.width
            assert place + part.width <= nbytes
            assert not any(written[place : place + part.width])
            target[place : place + part.width] = run
            written[place : place + part.width] = b"\1" * part.width
    return bytes(target)
