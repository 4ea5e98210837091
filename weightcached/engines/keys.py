"""What the adapters' keys are made of: digests of an engine's settings, names, facts of a device and a checkpoint."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any


def digest_of(value: Any) -> str:
    """16 hexadecimal digits of anything, the same in every process; see `plain`."""
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: Any, within: tuple[int, ...] = ()) -> Any:
    """A value as JSON can have it, without addresses and orders that differ from process to process.

    An object whose text would be its address becomes its class and its public attributes. `within`: the ids of the
    objects around it, so that one that holds itself does not go on without end.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):  # 10000 and 10000.0 are one number to a model
        return int(value) if value.is_integer() else repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    name = type(value).__qualname__
    if id(value) in within:
        return name
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item, within) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item, within) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item, within) for item in value]
    if callable(getattr(value, "to_dict", None)):
        return plain(value.to_dict(), within)
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name, None), within) for item in fields(value)}
    if " at 0x" not in (text := str(value)):
        return text
    shown = {key: plain(item, within) for key, item in getattr(value, "__dict__", {}).items() if key[:1] != "_"}
    return {"class": name, **shown}


def without(value: Any, names: Collection[str]) -> Any:
    """What `plain` gives, without the entries of these names in any mapping of it."""
    if isinstance(value, dict):
        return {name: without(item, names) for name, item in value.items() if name not in names}
    return [without(item, names) for item in value] if isinstance(value, list) else value


def published_name(model: str, checkpoint: Path | None, layout: str) -> str:
    """A name for what an engine publishes: "MODEL-ENGINE-DIGEST", of the layout "ENGINE-VERSION/DIGEST".

    The digest keeps apart what would have the same name, and so take each other's place: checkpoints in folders that
    are called alike, and other layouts of one. The ranks of a model share it, so that the service counts them together.
    """
    own = re.sub(r"[^A-Za-z0-9._-]", "-", Path(model).name).lstrip(".-")[:80] or "model"
    return f"{own}-{layout.partition('-')[0]}-{digest_of([str(checkpoint), layout])[:8]}"


def compute_capability(device: Any = None) -> str:
    """Of `device`, a GPU as torch names it, or of the current one: such as "9.0"."""
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability(device))


def bytes_on_disk(folder: Path | None) -> int:
    """Of a checkpoint's safetensors files; 0 where there is no folder to look into."""
    return 0 if folder is None else sum(file.stat().st_size for file in folder.glob("*.safetensors"))
