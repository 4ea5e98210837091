"""The definition of the checksum "mix64-sum" in plain Python, apart from the code that computes it on a GPU."""

from __future__ import annotations

MASK = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN = 0x9E37_79B9_7F4A_7C15


def mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return z ^ (z >> 31)


def mix64_sum(data: bytes) -> str:
    """The checksum of a tensor with these bytes."""
    padded = data + b"\0" * (-len(data) % 8)
    words = memoryview(padded).cast("Q")
    total = sum(mix64((word + (index + 1) * GOLDEN) & MASK) for index, word in enumerate(words)) & MASK
    return f"{mix64(total ^ len(data)):016x}"


def sum_of(checksum: str, nbytes: int) -> int:
    """The sum behind a checksum: mix64 is one-to-one, so its steps are taken back, the last one first."""
    z = int(checksum, 16)
    z ^= z >> 31 ^ z >> 62
    z = z * pow(0x94D0_49BB_1331_11EB, -1, MASK + 1) & MASK
    z ^= z >> 27 ^ z >> 54
    z = z * pow(0xBF58_476D_1CE4_E5B9, -1, MASK + 1) & MASK
    return z ^ z >> 30 ^ z >> 60 ^ nbytes
