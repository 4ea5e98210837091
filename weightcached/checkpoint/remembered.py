"""Digests remembered by stat tuple, so that a file is read once for its digest and not again until it changes.

    $XDG_CACHE_HOME/weightcached/              0700; ~/.cache without the variable
      digest-<definition>-<device>-<inode>-<size>-<mtime ns>-<ctime ns>
                                               "<digest> <checksum of name and digest>", one line

A remembered digest decides whose weights an engine gets, so it is used only where nobody else can have written it: a
folder or an entry that is a symlink, belongs to another user or is writable by others counts as not there, and so does
a damaged entry. Nothing here ever fails a caller: where nothing can be kept, nothing is remembered, and the log says
why at debug level.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ..fds import OwnedFd
from ..shard.manifest import SourceFile
from .digest import FILE_PREFIX, digest_checkpoint

if TYPE_CHECKING:
    from .fileset import Checkpoint

logger = logging.getLogger(__name__)

# File times come from a clock with ticks (10 ms at most on Linux, 1 or 2 s in some file systems): a write soon after
# the last one may leave them as they are. From this age on a later write gives the file another ctime, unless it goes
# through a shared mapping to a page that is dirty already (docs/decisions/002-content-digest.md).
SETTLED_NS = 2_000_000_000
MAX_ENTRIES = 4096  # some dozens of the largest checkpoints; the oldest go
_ENTRY = "digest-"
_MAX_ENTRY_BYTES = 256


def digest_once(checkpoint: Checkpoint, threads: int | None = None) -> tuple[str, list[str]]:
    """As `digest_checkpoint`, but reads only files whose digest is not remembered, and remembers it."""
    started = time.time_ns()
    sources = [file.source for file in checkpoint.files]
    known = recall(sources)
    content, digests = digest_checkpoint(checkpoint, threads, known)
    read = [
        replace(source, digest=digest)
        for source, digest, before in zip(sources, digests, known, strict=True)
        if before is None
    ]
    # By the time before the first byte was read: a write from then on is either seen by the digest's own check of the
    # times, or gives the file other times than those remembered here; for the exception see SETTLED_NS.
    remember([source for source in read if started - source.ctime_ns >= SETTLED_NS])
    return content, digests


def recall(sources: Sequence[SourceFile]) -> list[str | None]:
    """The remembered digest of each file, by its stat tuple alone; None for those of which there is none."""
    folder = _open_folder() if sources else None
    if folder is None:
        return [None] * len(sources)
    with folder:
        return [_read_entry(folder.fileno(), _entry_name(source)) for source in sources]


def remember(sources: Sequence[SourceFile]) -> None:
    """Keeps the digests of files that have one; several processes may do so at once."""
    folder = _open_folder(create=True) if sources else None
    if folder is None:
        return
    with folder:
        try:
            for source in sources:
                if source.digest is not None:
                    _write_entry(folder.fileno(), _entry_name(source), source.digest)
            _drop_oldest(folder.fileno())
        except OSError as error:
            logger.debug("a digest is not remembered: %s", error)


def _cache_home() -> Path | None:
    """Where this user's caches are. None for a user without a home."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if xdg.is_absolute():  # the XDG specification ignores relative ones
        return xdg
    try:
        home = Path.home()
    except RuntimeError:  # neither $HOME nor an entry in the user database
        return None
    # Not `home.is_dir()`, which raises for a home that cannot be looked at.
    return home / ".cache" if home.is_absolute() and os.path.isdir(home) else None


def _open_folder(create: bool = False) -> OwnedFd | None:
    """The folder, opened, if it can be trusted: everything else is done relative to it, whatever its path leads to."""
    base = _cache_home()
    if base is None:
        logger.debug("no remembered digests: XDG_CACHE_HOME is not set, and this user has no home")
        return None
    path = base / "weightcached"
    try:
        if create:
            base.mkdir(0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        folder = OwnedFd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as error:
        logger.debug("no remembered digests: %s", error)
        return None
    if problem := _distrust(os.fstat(folder.fileno())):
        folder.close()
        logger.debug("no remembered digests: %s %s", path, problem)
        return None
    return folder


def _distrust(found: os.stat_result) -> str | None:
    """Why somebody else may have written it."""
    if found.st_uid != os.geteuid():
        return f"belongs to uid {found.st_uid}, this process runs as uid {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _entry_name(source: SourceFile) -> str:
    """The definition is part of it, so versions with different ones do not meet."""
    return f"{_ENTRY}{FILE_PREFIX.rstrip(':')}-" + "-".join(map(str, source.stat))


def _entry(name: str, digest: str) -> bytes:
    # The checksum is against torn writes and a disk's errors; against people there is the owner's check.
    checksum = xxhash.xxh3_64_hexdigest(f"{name} {digest}".encode())
    return f"{digest} {checksum}\n".encode()


def _read_entry(folder: int, name: str) -> str | None:
    # A FIFO without a writer would hang a plain open.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        with OwnedFd(os.open(name, flags, dir_fd=folder)) as entry:
            found = os.fstat(entry.fileno())
            problem = _distrust(found) if stat.S_ISREG(found.st_mode) else "is not a regular file"
            raw = b"" if problem else os.read(entry.fileno(), _MAX_ENTRY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.debug("%s is ignored: %s", name, error.strerror)
        return None
    digest = raw.partition(b" ")[0].decode(errors="replace")
    if problem is None and not (digest.startswith(FILE_PREFIX) and raw == _entry(name, digest)):
        problem = "is damaged"
    if problem is not None:
        logger.debug("%s is ignored: it %s", name, problem)
        return None
    return digest


def _write_entry(folder: int, name: str, digest: str) -> None:
    """Under a temporary name first: whoever reads at the same time finds all of it or nothing."""
    temporary = f"{name}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_entry(name, digest))
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _drop_oldest(folder: int) -> None:
    """Keeps `MAX_ENTRIES`; what killed processes left under temporary names counts, and so goes too."""
    names = [name for name in os.listdir(folder) if name.startswith(_ENTRY)]
    if len(names) <= MAX_ENTRIES:
        return
    aged = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another process may do the same
            aged.append((os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name))
    for _, name in sorted(aged)[: len(aged) - MAX_ENTRIES]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
