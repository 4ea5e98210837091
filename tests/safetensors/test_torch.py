"""safetensors/torch.py: the library's module, reading through the cache."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch as library
import torch

from tests.safetensors.conftest import Cache
from weightcached.safetensors import torch as ours


def test_every_name_of_the_library_is_there() -> None:
    """Private ones too, which other libraries use."""
    assert {name for name in vars(library) if not name.startswith("__")} <= set(vars(ours))


def test_a_model_is_loaded_from_the_cache_and_saved(tmp_path: Path, cache: Cache) -> None:
    """`load_model` takes the cached bytes, of a parameter that is assigned too, and `save_model` writes them."""
    path = tmp_path / "m.safetensors"
    module = torch.nn.Linear(4, 2)
    ours.save_model(module, str(path))
    cache(path)
    expected = {name: (value.view(torch.uint8) ^ 1).view(value.dtype) for name, value in module.state_dict().items()}

    other = torch.nn.Linear(4, 2)
    assert ours.load_model(other, path) == (set(), [])
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())

    other.load_state_dict(ours.load_file(path), assign=True)
    ours.save_model(other, str(tmp_path / "again.safetensors"))
    again = library.load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in again.items())
