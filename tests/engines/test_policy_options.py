"""engines/policy.py: the options that an engine's user sets, and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.engines.policy import Options
from weightcached.errors import EngineError, WeightCacheError


def test_defaults() -> None:
    """Nothing set: a miss is loaded from disk and published."""
    assert Options.parse({}) == Options("fallback", True, "zero_copy", 30.0, None, None)


def test_all() -> None:
    """Every option is taken as it is; seconds may be whole, and are bounded."""
    data = {"on_miss": "start", "publish": False, "mode": "copy", "timeout": 5, "model": "m", "instance": "big"}
    assert Options.parse(data) == Options("start", False, "copy", 5.0, "m", "big")
    assert [Options.parse({"timeout": long}).timeout for long in (1e300, 10**400)] == [1e6, 1e6]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"on_mis": "wait"}, "no option 'on_mis'; did you mean 'on_miss'?"),
        ({"zzz": 1}, "no option 'zzz'; there are on_miss, publish, mode, timeout, model, instance"),
        ({"on_miss": "disk"}, "on_miss is 'disk'; it must be one of wait, start, fallback, fail"),
        ({"on_miss": None}, "on_miss is None; it must be one of wait, start, fallback, fail"),
        ({"mode": "zero-copy"}, "mode is 'zero-copy'; it must be one of zero_copy, copy"),
        ({"publish": "false"}, "publish is 'false'; it must be true or false"),
        ({"publish": 1}, "publish is 1; it must be true or false"),
        ({"timeout": "30"}, "timeout is '30'; it must be seconds, 0 or more"),
        ({"timeout": True}, "timeout is True; it must be seconds, 0 or more"),
        ({"timeout": -1}, "timeout is -1; it must be seconds, 0 or more"),
        ({"timeout": float("nan")}, "timeout is nan; it must be seconds, 0 or more"),
        ({"model": 3}, "model is 3; it must be a name"),
        ({"model": ""}, "model is ''; it must be a name"),
        ({"model": "a/b"}, "model is 'a/b'; no cached model can have that name"),
        ({"instance": []}, "instance is []; it must be a name"),
        ([], "the options are []; they must be names with values"),
        (None, "the options are None; they must be names with values"),
    ],
)
def test_wrong_ones(data: Any, sentence: str) -> None:
    """The error names the option, what it is, and what it may be."""
    with pytest.raises(EngineError) as caught:
        Options.parse(data)
    assert str(caught.value) == sentence


def test_an_instance_is_no_path() -> None:
    """It becomes the name of a unit."""
    with pytest.raises(WeightCacheError, match=r"instance name '\.\./x'"):
        Options.parse({"instance": "../x"})
