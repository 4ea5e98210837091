"""config_values: sizes and limits to the byte; the rest is tested through the config file, in test_config."""

from __future__ import annotations

import pytest

from weightcached.config import Config
from weightcached.config_values import MIN_STAGING, MemoryLimit

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "total", "expected"),
    [
        ("90%", 1000, 900),
        ("87.5%", 16, 14),
        ("100%", 143_771, 143_771),
        ("33.3%", 10**15, 333 * 10**12),
        ("60GiB", 80 * GIB, 60 * GIB),
        ("1.5 GiB", 80 * GIB, 3 * GIB // 2),
        ("500MB", GIB, 500_000_000),
        ("1TB", 1 << 50, 10**12),
        ("64KiB", GIB, 65536),
        ("100B", GIB, 100),
        (4096, GIB, 4096),
        ("60GiB", 24 * GIB, 24 * GIB),
    ],
)
def test_memory_limits(value: object, total: int, expected: int) -> None:
    """Shares and sizes are exact, in bytes, and never more than the device has."""
    assert MemoryLimit.parse(value).bytes_of(total) == expected


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [("8MiB", 8 << 20), (MIN_STAGING, 8 << 20), ("1GB", 10**9), ("1.5 GiB", 3 * GIB // 2), ("256MiB", 256 << 20)],
)
def test_staging_memory(value: object, nbytes: int) -> None:
    """A size or bytes, from the least that a load can work with on."""
    assert Config.model_validate({"staging_memory": value}).staging_memory == nbytes


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1000, 1000], "1000 is listed twice"),
        ([-1], "is no list of user ids such as"),
        ([2**32 - 1], "is no list of user ids such as"),
        ([True], "is no list of user ids such as"),
        (["ada"], r"\[\"ada\"\] is no list of user ids such as \[1001, 1002\]; `id -u NAME` prints one"),
        (1000, "is no list of user ids such as"),
        ("all", "is no list of user ids such as"),
    ],
)
def test_what_are_no_uids(value: object, problem: str) -> None:
    """Users are listed by number, each once; names and everybody are refused."""
    with pytest.raises(ValueError, match=problem):
        Config.model_validate({"allow_uids": value})


@pytest.mark.parametrize("value", ["90%", "256", "256mib", "", -1, 0, 256.0, None, [1], MIN_STAGING - 1, "7.99MiB"])
def test_what_is_no_staging_memory(value: object) -> None:
    """A share, a number without a unit in a string, or too little is refused."""
    with pytest.raises(ValueError, match=r"is no size|is too little"):
        Config.model_validate({"staging_memory": value})
