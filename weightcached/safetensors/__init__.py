"""safetensors, answered from the cache: the same names, for a program that changes one import.

    from weightcached.safetensors import safe_open
    from weightcached.safetensors.torch import load_file

    files.py    safe_open: the library's own file, whose tensors come from the cache where they can
    shared.py   the shards that this process has mapped for it, each once
    find.py     which cached shard was loaded from exactly this file, and who is told when there is none
    hook.py     the same for programs that import safetensors itself; ``python -m weightcached.safetensors`` runs them

What is not cached on the wanted device is read from disk by the library, as ever.
"""

from __future__ import annotations

from safetensors import SafetensorError, TensorSpec, __version__, deserialize, serialize, serialize_file

from .files import safe_open

__all__ = [
    "SafetensorError",
    "TensorSpec",
    "__version__",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]
