"""`safetensors.torch`, its files answered from the cache.

The library's own module, executed once more with this package's `safe_open` and `load_file` in the places of its own:
so everything else in it, `load_model` included, is the installed version's code.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from .files import Mode, safe_open

if TYPE_CHECKING:
    import os

    import torch
    from safetensors.torch import load, load_model, save, save_file, save_model

__all__ = ["load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model"]


def load_file(
    filename: str | os.PathLike[str], device: str | int = "cpu", *, mode: Mode | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """`safetensors.torch.load_file`; `mode` as for `weightcached.safetensors.safe_open`."""
    with safe_open(filename, framework="pt", device=device, mode=mode, **options) as file:
        return file.get_tensors()


def _load_library() -> dict[str, Any]:
    spec = importlib.util.find_spec("safetensors.torch")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.safe_open, module.load_file = safe_open, load_file
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


globals().update(_load_library())
