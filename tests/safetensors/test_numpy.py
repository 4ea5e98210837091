"""safetensors/numpy.py: the library's own functions."""

from __future__ import annotations

import safetensors.numpy as library

from weightcached.safetensors import numpy as ours


def test_the_functions_are_the_librarys() -> None:
    """The same objects."""
    assert all(getattr(ours, name) is getattr(library, name) for name in ours.__all__)
