"""The fake driver itself: it proves nothing unless it is called exactly as cuda-bindings is."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.fake_cuda import ENUMS, FakeDriver


def functions() -> list[str]:
    return sorted(name for name in vars(FakeDriver) if name.startswith("cu"))


@pytest.mark.parametrize("name", functions())
def test_the_fake_has_the_parameters_of_the_real_driver(name: str) -> None:
    """Each function of the fake takes the same parameters, by name and in order, as the one of cuda-bindings."""
    real = pytest.importorskip("cuda.bindings.driver")
    signature = re.match(r"\w+\((.*)\)", getattr(real, name).__doc__)
    assert signature, "the package documents a function's parameters in its first line"
    plain = re.sub(r"\[.*?\](?=,|$| \|)|:[^,]*", "", signature[1])  # without annotations
    wanted = [parameter.split()[-1].lstrip("*") for parameter in plain.split(",") if parameter.strip()]
    assert list(inspect.signature(getattr(FakeDriver(), name)).parameters) == wanted


def test_the_fake_has_the_values_of_the_real_driver() -> None:
    """Every constant of the fake has its number in cuda-bindings."""
    real = pytest.importorskip("cuda.bindings.driver")
    for enumeration, values in ENUMS.items():
        assert values == {name: int(getattr(getattr(real, enumeration), name)) for name in values}
