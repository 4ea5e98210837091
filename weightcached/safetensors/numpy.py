"""`safetensors.numpy`, unchanged: numpy arrays are read from disk, since the cache hands out tensors."""

from __future__ import annotations

from safetensors import safe_open
from safetensors.numpy import load, load_file, save, save_file

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]
