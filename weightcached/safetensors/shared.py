"""The shards that this process has mapped for its safetensors files: each once, shared by the files of a checkpoint.

    safe_open ──┐
    tensor ─────┴─► Attachment ─► Weights ─► mapping, lease

A shard is let go of when no file of it is open and no tensor that shares its memory is left.

On the host a mapping is private and copy-on-write, like the library's own mapping of a file: tensors may be written,
and whoever opens the file again must not see it. So there an attachment serves each file once; the next opening of the
same file has a new one. On a GPU, mappings are read-only: nothing written can be seen, so one serves all.
"""

from __future__ import annotations

import collections
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..client.attach import attach
from ..shard.dtypes import DTYPES
from ..shard.manifest import TensorEntry
from .files import RealFile
from .find import ANSWER_SECONDS, Found, Stat, stat_of

if TYPE_CHECKING:
    import torch

_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()
_lock = threading.RLock()


class Attachment:
    """A mapped shard and its lease, which last as long as this object, or a tensor that shares the memory.

    `found` is what it was attached for, `files` are those that it was loaded from, `served` those that have been opened
    on it. `doubtful` are the names whose tensor may be another file's.
    """

    def __init__(self, found: Found, path: Any) -> None:
        """`path`: of the opened file. Raises what `weightcached.attach` raises, and what looking into the checkpoint's
        other files raises."""
        self.found = found
        self.served: set[Stat] = set()
        self._weights = attach(
            found.model, device=found.target.torch_device, timeout=ANSWER_SECONDS, key=found.key, on_miss="fail"
        )
        head, table = self._weights.manifest, self._weights.table
        self.files = {file.stat for file in head.files}
        self.generation = head.generation
        # Names that have the bytes of another one are not among them, and are read from disk: the library's tensors
        # share nothing, and what is written to one must not be seen in another.
        self._entries = {entry.name: entry for entry in table.tensors if entry.stride is None}
        self.doubtful = self._names_of_several(path)

    @property
    def lost(self) -> str | None:
        """Why the device has lost the memory; None while it is good."""
        return self._weights.lost

    @property
    def on_host(self) -> bool:
        return self.found.target.ordinal is None

    def entry(self, name: str, dtype: str, shape: list[int]) -> TensorEntry | None:
        """The tensor that the file calls `name`; None if what is cached under it may be something else."""
        entry = self._entries.get(name)
        if entry is None or name in self.doubtful or entry.dtype != dtype or list(entry.shape) != shape:
            return None
        return entry

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """The cached memory of a tensor, as a storage of its own that keeps this attachment alive; not copied.

        A storage of its own, since that is what the library gives: `torch.save` writes whole storages, and `save_model`
        refuses a tensor that is a part of one.
        """
        import torch

        cached = self._weights[entry.name]
        if not cached.numel():
            return torch.empty(cached.shape, dtype=cached.dtype, device=cached.device)
        if self.on_host:
            raw = torch.frombuffer(_owned(cached.data_ptr(), entry.nbytes, self), dtype=torch.uint8)
        else:
            raw = torch.as_tensor(_Part(cached.data_ptr(), entry.nbytes, self), device=cached.device)
            if raw.data_ptr() != cached.data_ptr():
                raise RuntimeError(f"torch copied {entry.name} instead of sharing it")
        return raw.view(cached.dtype).reshape(cached.shape)

    def _names_of_several(self, path: Any) -> frozenset[str] | _Every:
        """Names that more than one file of the checkpoint has: its index chose among them, and which is not recorded.

        All names, where the other files are gone or have changed, so that they cannot be looked at.
        """
        files = self._weights.manifest.files
        if len(files) == 1:
            return frozenset()
        for folder in _folders(self._weights.manifest.attributes.get("checkpoint"), path):
            paths = [folder / file.name for file in files]
            if all(stat_of(path) == file.stat for path, file in zip(paths, files, strict=True)):
                count = collections.Counter(name for path in paths for name in _names(path))
                return frozenset(name for name, times in count.items() if times > 1)
        return _Every()


class _Every:
    """A set of all names."""

    def __contains__(self, name: object) -> bool:
        return True


class _Part:
    """A tensor's device memory as torch takes it over; keeps the attachment while the storage lives."""

    def __init__(self, address: int, nbytes: int, owner: Attachment) -> None:
        self._owner = owner
        # numpy's array interface, version 3. Not marked as read-only, which torch would refuse; the mapping is.
        self.__cuda_array_interface__: dict[str, Any] = {
            "typestr": "|u1",
            "data": (address, False),
            "shape": (nbytes,),
            "version": 3,
        }


def acquire(found: Found, path: Any, stat: Stat) -> Attachment | None:
    """The attachment that serves this opening of the file: one that this process has, else a new one.

    None if the model has been replaced since, and is not this file's any more. Raises what `Attachment` raises.
    """
    with attaching():
        for known in _attached:
            if (
                (known.found.socket, known.found.model, known.generation)
                == (found.socket, found.model, found.generation)
                and stat in known.files
                and known.lost is None
                and not (known.on_host and stat in known.served)
            ):
                known.served.add(stat)
                return known
        made = Attachment(found, path)
        if stat not in made.files:
            return None
        made.served.add(stat)
        _attached.add(made)
        return made


def attaching() -> threading.RLock:
    """What is held while a file gets its attachment; one lock for all, so that a forked child can have a new one."""
    return _lock


def attachments() -> list[Attachment]:
    """Those of this process now."""
    return list(_attached)


def serves(dtype: str) -> bool:
    """Whether torch here has the dtype: where it lacks it, the library has its own error."""
    import torch

    name = DTYPES[dtype].torch_name if dtype in DTYPES else None
    return name is not None and hasattr(torch, name)


def _folders(checkpoint: object, path: Any) -> Iterator[Path]:
    """Where the other files of a checkpoint may be: beside the opened one, or where the loader found them.

    A file in a hub's cache is a link in the folder of its checkpoint; whoever resolves it first sees other names.
    """
    yield Path(os.fsdecode(path)).parent
    if isinstance(checkpoint, str):
        yield Path(checkpoint)
        yield Path(checkpoint).parent


def _names(path: Path) -> list[str]:
    """Names of the tensors in a file, as its header has them."""
    file = RealFile(path, "pt")
    try:
        names: list[str] = file.keys()
    finally:
        file.__exit__(None, None, None)
    return names


def _owned(address: int, nbytes: int, owner: Attachment) -> ctypes.Array[ctypes.c_ubyte]:
    """Bytes of a mapping as a buffer that keeps its owner: torch keeps the object, and with it the attachment."""
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return buffer


def _after_fork() -> None:
    """A lease belongs to one process, so a child attaches by itself. What it inherited stays mapped."""
    global _lock
    _lock = threading.RLock()
    _attached.clear()


os.register_at_fork(after_in_child=_after_fork)
