"""Which files are a checkpoint, opened once and held open until every byte has been read.

    folder with model.safetensors.index.json   the files that the index names, and nothing else
    folder with one *.safetensors              that file
    folder with several and no index           refused: which of them belong together would be a guess
    folder with one part of several (-00001-of-00002) and no index     refused: the rest is missing
    one *.safetensors file                     that file, one part of several too: it was asked for

Other weights in the folder, of other formats or half downloaded, are never read; `Checkpoint.ignored` names them.

Names are judged before links are followed: in a Hugging Face cache ``snapshots/<revision>/model.safetensors`` points to
``blobs/<sha256>``, which has no suffix. That name is the digest of what huggingface_hub has put there (`blob_digests`).
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import CheckpointChanged, CheckpointError, ResourceError
from ..fds import OwnedFd
from ..shard.dtypes import DTYPES
from ..shard.manifest import SourceFile
from .documents import CONFIG, INDEX, SUFFIX, file_status, listing, open_regular, read_config, read_index
from .header import Header, TensorRange, read_header, short
from .resources import lacking, lacking_for_set, read_failure

logger = logging.getLogger(__name__)

_UNFINISHED = ".incomplete"  # huggingface_hub writes to blobs/<sha256>.incomplete, and renames it at the end
_UNFINISHED_PROBLEM = "still being downloaded: wait for it, or fetch it again"
_OTHER_WEIGHTS = (
    "pytorch_model*.bin",
    "model*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    f"*{_UNFINISHED}",
)
BLOB_PREFIX = "sha256:"
_BLOB = re.compile(r"[0-9a-f]{64}")  # of a large file; a small one has a git hash, of 40 digits
_PART = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")  # as transformers and huggingface_hub name the files of a set


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One open file: `source` is its state before the header was read, `tensors` are those to be loaded from it."""

    name: str
    fd: OwnedFd
    source: SourceFile
    header: Header
    tensors: tuple[TensorRange, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of one checkpoint in name order, each open until `close`; a context manager.

    `path` is what was asked for, made absolute; `folder` holds the files. `config` is the folder's config.json, {}
    without one. `ignored` names weight files in the folder that are not part of the set.
    """

    path: Path
    folder: Path
    files: tuple[CheckpointFile, ...]
    config: dict[str, Any]
    ignored: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files, headers included."""
        return sum(file.source.size for file in self.files)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors to be loaded."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def architecture(self) -> str | None:
        """The model class that config.json names first."""
        architectures: list[str] | None = self.config.get("architectures")
        return architectures[0] if architectures else None

    @property
    def quantization(self) -> dict[str, Any] | None:
        """quantization_config of config.json, as it stands there."""
        found: dict[str, Any] | None = self.config.get("quantization_config")
        return found

    @property
    def dtype(self) -> str | None:
        """`main_dtype` of the tensors to be loaded."""
        return main_dtype((tensor.dtype, tensor.nbytes) for tensor in self.tensors())

    def tensors(self) -> Iterator[TensorRange]:
        """Every tensor to be loaded: file by file, each in the order of its bytes."""
        return (tensor for file in self.files for tensor in file.tensors)

    @property
    def left_out(self) -> tuple[tuple[int, str], ...]:
        """Number of the file and name of each tensor that a file has and the index gives to another one."""
        found = []
        for number, file in enumerate(self.files):
            if len(file.tensors) < len(file.header.tensors):
                owned = {tensor.name for tensor in file.tensors}
                found += [(number, tensor.name) for tensor in file.header.tensors if tensor.name not in owned]
        return tuple(found)

    def blob_digests(self) -> list[str | None]:
        """ "sha256:<hex>" of each file that a link into a Hugging Face cache leads to, None for others.

        By the blob's name: nothing is read, so it is as true as that cache.
        """
        return [_blob_digest(self.folder / file.name, file.source) for file in self.files]

    def recheck(self) -> None:
        """`CheckpointChanged` unless every file, open and by its path, is what it was before its header was read.

        Called after the last byte was read. Device, inode, size, mtime and ctime are compared; ctime because a program
        can set mtime back, and no program sets ctime (inode(7)).
        """
        for file in self.files:
            path = str(self.folder / file.name)
            try:
                by_path = os.stat(path)
            except FileNotFoundError:
                raise CheckpointChanged(file=path, problem="vanished while it was read") from None
            except OSError as error:
                raise CheckpointChanged(
                    file=path, problem=f"cannot be reached any more while it is read: {error.strerror}"
                ) from error
            _require_unchanged(file.source, by_path, path)
            _require_unchanged(file.source, os.fstat(file.fd.fileno()), path)

    def close(self) -> None:
        for file in self.files:
            file.fd.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def main_dtype(tensors: Iterable[tuple[str, int]]) -> str | None:
    """Torch's name of the floating type that holds the most bytes, None without one or where torch lacks it.

    `tensors` are (dtype, bytes) pairs.
    """
    held: dict[str, int] = {}
    for dtype, nbytes in tensors:
        if DTYPES[dtype].floating:
            held[dtype] = held.get(dtype, 0) + nbytes
    # Between equals the name decides, so that the answer does not hang on the order of tensors.
    return DTYPES[max(held, key=lambda name: (held[name], name))].torch_name if held else None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens and validates a checkpoint; the caller closes it.

    `path` is a folder or one *.safetensors file. Each header is validated before the next file is opened. Raises
    `CheckpointError`, with nothing left open, for whatever is not a complete and readable set of weights, and
    `ResourceError` when this process lacks the descriptors, the memory or the address space to say so.
    """
    given = Path(path).absolute()  # a later chdir must not move it; not resolved, since its name counts
    try:
        return _open(given)
    except MemoryError as error:
        raise lacking(str(given), "cannot be checked", error) from error


def _open(given: Path) -> Checkpoint:
    if stat.S_ISDIR(file_status(given).st_mode):
        folder, chosen = given, _choose(given)
    else:
        folder, chosen = given.parent, _single(given)
    files = []
    with ExitStack() as undo:
        try:
            for name in chosen.names:
                fd = undo.enter_context(_open_weights(folder / name))
                files.append(_read_file(folder / name, fd, chosen))
            config = read_config(folder / CONFIG)
        except ResourceError as error:
            raise lacking_for_set(error, len(chosen.names)) from error
        undo.pop_all()  # from here on the checkpoint owns them
    checkpoint = Checkpoint(path=given, folder=folder, files=tuple(files), config=config, ignored=chosen.ignored)
    if chosen.stated_bytes not in (None, checkpoint.tensor_bytes):
        # Often stale: it counts a tied tensor twice, or dates from another dtype. Nothing hangs on it.
        logger.info(
            "%s: total_size states %d bytes, its tensors have %d",
            folder / INDEX,
            chosen.stated_bytes,
            checkpoint.tensor_bytes,
        )
    return checkpoint


@dataclass(frozen=True, slots=True)
class _Choice:
    """The set's files by name, in order. With an index: which tensors it gives to each file, all it lists, its size."""

    names: list[str]
    ignored: tuple[str, ...] = ()
    owned: dict[str, set[str]] | None = None
    listed: frozenset[str] = frozenset()
    stated_bytes: int | None = None


def _single(path: Path) -> _Choice:
    if path.name.endswith(_UNFINISHED):
        raise CheckpointError(file=str(path), problem=_UNFINISHED_PROBLEM)
    if path.name == INDEX:
        raise CheckpointError(file=str(path), problem="an index, not weights: give the folder that holds it")
    if not path.name.endswith(SUFFIX):
        raise CheckpointError(
            file=str(path), problem=f"only files named *{SUFFIX} and folders of them are read: convert other formats"
        )
    try:
        beside = os.listdir(path.parent)
    except OSError:  # a folder that may be entered and not listed: the file is there all the same
        beside = []
    found, others = _weights(beside)
    return _Choice([path.name], _without(found + others, [path.name]))


def _choose(folder: Path) -> _Choice:
    try:
        entries = os.listdir(folder)
    except OSError as error:
        raise read_failure(str(folder), f"cannot be listed by uid {os.geteuid()}", error) from error
    found, others = _weights(entries)
    if INDEX in entries:
        return _indexed(folder, found + others)
    # Names with a leading dot are other programs' business, such as the "._" companions that macOS leaves behind.
    candidates = [name for name in found if not name.startswith(".")]
    if len(candidates) > 1:
        raise CheckpointError(
            file=str(folder),
            problem=f"{len(candidates)} files and no {INDEX} that says which belong together: {listing(candidates)}; "
            "give the path of one of them, or fetch the index",
        )
    if not candidates and others:
        if unfinished := [name for name in others if name.endswith(_UNFINISHED)]:
            raise CheckpointError(file=str(folder), problem=f"{listing(unfinished)}: {_UNFINISHED_PROBLEM}")
        raise CheckpointError(
            file=str(folder), problem=f"only *{SUFFIX} files are read, found {listing(others)}: convert them"
        )
    if not candidates:
        raise CheckpointError(
            file=str(folder), problem=f"no *{SUFFIX} file in this folder: give the folder that holds the weights"
        )
    part = _PART.search(candidates[0])
    if part and int(part[2]) > 1:
        raise CheckpointError(
            file=str(folder),
            problem=f"{short(candidates[0])} is one of {int(part[2])} files by its name, and neither the others nor "
            f"{INDEX} are here: fetch them, or give the path of this file if it is all that you want",
        )
    return _Choice(candidates, _without(found + others, candidates))


def _weights(entries: list[str]) -> tuple[list[str], list[str]]:
    """The safetensors files among a folder's entries, sorted, and what else holds weights."""
    found = sorted(name for name in entries if name.endswith(SUFFIX))
    return found, [name for name in entries if any(fnmatch(name, pattern) for pattern in _OTHER_WEIGHTS)]


def _indexed(folder: Path, weights: list[str]) -> _Choice:
    """The files that the index names; they must all be there. The other `weights` in the folder are ignored."""
    mapping, stated_bytes = read_index(folder / INDEX)
    owned: dict[str, set[str]] = {}
    for tensor, name in mapping.items():
        owned.setdefault(name, set()).add(tensor)
    if missing := [name for name in owned if not _is_there(folder / name)]:
        raise CheckpointError(
            file=str(folder / INDEX),
            problem=f"{len(missing)} of its {len(owned)} files are missing: {listing(missing)}; "
            "fetch them, or the index that belongs to the files here",
        )
    return _Choice(sorted(owned), _without(weights, owned), owned, frozenset(mapping), stated_bytes)


def _open_weights(path: Path) -> OwnedFd:
    file_status(path)  # first, since realpath has no words for a name that cannot be
    # aria2 makes the file in its full size, keeps notes beside it, and removes them when every piece is there.
    if os.path.realpath(path).endswith(_UNFINISHED) or os.path.lexists(f"{path}.aria2"):
        raise CheckpointError(file=str(path), problem=_UNFINISHED_PROBLEM)
    return open_regular(path)


def _blob_digest(path: Path, source: SourceFile) -> str | None:
    target = Path(os.path.realpath(path))
    if target.parent.name != "blobs" or not _BLOB.fullmatch(target.name):
        return None
    try:
        found = os.stat(target)
    except OSError:
        return None
    # Not what another link, made since the file was opened, leads to.
    return BLOB_PREFIX + target.name if (found.st_dev, found.st_ino) == (source.device, source.inode) else None


def _read_file(path: Path, fd: OwnedFd, chosen: _Choice) -> CheckpointFile:
    """Validates one open file; `fd` stays with the caller until it returns."""
    status = os.fstat(fd.fileno())
    source = SourceFile(
        name=path.name,
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
    )
    header = read_header(fd.fileno(), status.st_size, str(path))
    tensors = header.tensors if chosen.owned is None else _owned_tensors(path, header, chosen.owned[path.name], chosen)
    return CheckpointFile(path.name, fd, source, header, tensors)


def _owned_tensors(path: Path, header: Header, owned: set[str], chosen: _Choice) -> tuple[TensorRange, ...]:
    """The tensors that the index gives to this file. Those it gives to another file are left to that file."""
    present = {tensor.name for tensor in header.tensors}
    if unlisted := present - chosen.listed:
        raise CheckpointError(
            file=str(path),
            problem=f"holds {len(unlisted)} tensors that {INDEX} does not list: {listing(unlisted)}; "
            "fetch the index that belongs to this file",
        )
    if missing := owned - present:
        raise CheckpointError(
            file=str(path),
            problem=f"lacks {len(missing)} tensors that {INDEX} expects in it: {listing(missing)}; "
            "fetch the file that belongs to the index",
        )
    return tuple(tensor for tensor in header.tensors if tensor.name in owned)


def _is_there(path: Path) -> bool:
    """False only when nothing has that name; what cannot be reached for another reason is for `open_regular` to say."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return True


def _without(names: Iterable[str], chosen: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names) - set(chosen)))


def _require_unchanged(source: SourceFile, now: os.stat_result, path: str) -> None:
    if (now.st_dev, now.st_ino) != (source.device, source.inode):
        raise CheckpointChanged(
            file=path, problem=f"was replaced while it was read: inode {source.inode} expected, {now.st_ino} found"
        )
    if now.st_size != source.size:
        change = "shrank" if now.st_size < source.size else "grew"
        raise CheckpointChanged(
            file=path, problem=f"{change} while it was read: {source.size} bytes expected, {now.st_size} found"
        )
    if (now.st_mtime_ns, now.st_ctime_ns) != (source.mtime_ns, source.ctime_ns):
        raise CheckpointChanged(
            file=path, problem="was written or altered while it was read: its time of modification or change moved"
        )
