"""Regular files, and the two JSON documents that lie beside the weights: the index and the model's config."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..fds import OwnedFd
from .header import LFS_POINTER, LFS_PROBLEM, is_unicode, read_exactly, short
from .resources import read_failure

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SUFFIX = ".safetensors"
MAX_DOCUMENT_BYTES = 100_000_000  # the index of the largest public models has about 10 MB

# A FIFO without a writer would hang a plain open; a terminal must not become the controlling one.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def file_status(path: Path) -> os.stat_result:
    """stat(2) of the file, links followed; a `CheckpointError` with a next step when there is none to reach.

    `ResourceError` when the kernel lacks memory.
    """
    try:
        return os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            problem = f"a link to {os.readlink(path)}, which is not there: fetch the checkpoint again"
        else:
            problem = "no such file or folder: give a local path (nothing is downloaded)"
    except PermissionError:
        problem = f"not reachable for uid {os.geteuid()}: this user needs the x permission on every folder above it"
    except ValueError:
        problem = "no path: it holds a NUL or a character that no file name can have"
    except OSError as error:
        raise read_failure(str(path), "not reachable", error) from None
    raise CheckpointError(file=str(path), problem=problem) from None


def open_regular(path: Path) -> OwnedFd:
    """A regular file opened for reading, links followed; the caller owns it. `CheckpointError` for everything else.

    `ResourceError` when descriptors or memory are lacking.
    """
    # By stat first: merely opening a device can do something. By fstat again: the path may have changed in between.
    _require_regular(path, file_status(path))
    try:
        owned = OwnedFd(os.open(path, _OPEN_FLAGS))
    except PermissionError:
        raise CheckpointError(
            file=str(path), problem=f"not readable for uid {os.geteuid()}: give this user read permission"
        ) from None
    except OSError as error:
        raise read_failure(str(path), "cannot be opened", error) from error
    try:
        _require_regular(path, os.fstat(owned.fileno()))
    except CheckpointError:
        owned.close()
        raise
    return owned


def read_config(path: Path) -> dict[str, Any]:
    """The model's config.json, {} where there is none.

    Read as engines read it (Python's JSON: the last of equal keys counts, ``Infinity`` is a number), since it is theirs
    and real ones need it. The parts that go into a shard's key must have their type.
    """
    if not os.path.lexists(path):
        return {}
    config = _read_object(path)
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) and is_unicode(name) for name in architectures)
    ):
        raise CheckpointError(file=str(path), problem=f"architectures must be names, found {short(architectures)}")
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(
            file=str(path), problem=f"quantization_config must be an object, found {short(quantization)}"
        )
    method = (quantization or {}).get("quant_method")
    if isinstance(method, str) and not is_unicode(method):
        raise CheckpointError(file=str(path), problem=f"quant_method must be a name, found {short(method)}")
    return config


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """The index: tensor name -> bare file name, and the total size that it states, in bytes (None: it states none).

    A tensor listed twice is refused, and so is a file name that could lead out of the folder.
    """
    index = _read_object(path, strict=True)
    mapping = index.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(
            file=str(path),
            problem=f"no weight_map: an object of tensor names to file names expected, found {short(mapping)}",
        )
    checked: set[str] = set()
    for tensor, name in mapping.items():
        if not isinstance(name, str):
            raise CheckpointError(
                file=str(path), problem=f"weight_map of {short(tensor)}: a file name expected, found {short(name)}"
            )
        if name not in checked:
            _require_bare(path, tensor, name)
            checked.add(name)
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return mapping, total if type(total) is int else None


def listing(names: Iterable[str]) -> str:
    """Names for a sentence: sorted, twenty at most, then how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 20} more" if len(ordered) > 20 else ""
    return ", ".join(short(name) for name in ordered[:20]) + more


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise CheckpointError(file=str(path), problem=f"{kind}, a regular file expected")


def _require_bare(path: Path, tensor: str, name: str) -> None:
    """The name must be that of a safetensors file in the index's own folder, before any link is followed."""
    if "/" in name or "\\" in name or ".." in name:
        raise CheckpointError(
            file=str(path), problem=f"weight_map of {short(tensor)}: a bare file name expected, found {short(name)}"
        )
    if not name.endswith(SUFFIX):
        raise CheckpointError(
            file=str(path), problem=f"weight_map of {short(tensor)}: *{SUFFIX} expected, found {short(name)}"
        )


def _read_object(path: Path, strict: bool = False) -> dict[str, Any]:
    """The JSON object in a file; with `strict`, a key that occurs twice in any object of it is refused."""
    with open_regular(path) as owned:
        size = os.fstat(owned.fileno()).st_size
        if size > MAX_DOCUMENT_BYTES:
            raise CheckpointError(file=str(path), problem=f"{size} bytes, at most {MAX_DOCUMENT_BYTES} are read")
        raw = read_exactly(owned.fileno(), size, 0, str(path))
    if raw.startswith(LFS_POINTER):
        raise CheckpointError(file=str(path), problem=LFS_PROBLEM)
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if strict else None)
    except RecursionError:
        raise CheckpointError(file=str(path), problem="not valid: nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both of this kind
        raise CheckpointError(file=str(path), problem=f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(file=str(path), problem=f"a JSON object expected, found {short(found)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {short(key)} occurs twice, expected once")
        found[key] = value
    return found
