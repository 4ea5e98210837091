"""Where the sockets and locks are, and whether that place may be trusted.

    <runtime directory>/<device>.lock            held by the device's worker
    <runtime directory>/<device>.sock            its socket, or what $WEIGHTCACHED_SOCKET_TEMPLATE says
    <runtime directory>/<instance>.control.lock  held by the service
    <runtime directory>/<instance>.control.sock  the service's own socket

The runtime directory is $WEIGHTCACHED_RUNTIME_DIR, else $XDG_RUNTIME_DIR/weightcached, else
/run/user/$UID/weightcached. Whoever can write there can pose as the service, so a directory that is a symlink, belongs
to another user or is open to others is refused, wherever its path came from.
"""

from __future__ import annotations

import os
import re
import stat
import string
from pathlib import Path

from .devices import is_device_name
from .errors import DeviceError, RuntimeDirectoryError, ServiceNotRunning, WeightCacheError
from .fds import OwnedFd

MAX_SOCKET_PATH = 107  # bytes; sun_path of unix(7) is 108 with the closing zero
CONTROL_SUFFIX = ".control.sock"

_INSTANCE = re.compile(r"[A-Za-z0-9:_@-][A-Za-z0-9:_.@-]*")
_PLACEHOLDER = "device_uuid"
_KINDS = {stat.S_IFREG: "a file", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}


def runtime_dir() -> Path:
    """The runtime directory's path, unchecked. An empty variable counts as unset."""
    if explicit := os.environ.get("WEIGHTCACHED_RUNTIME_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return Path(base) / "weightcached"


def ensure_runtime_dir() -> Path:
    """The runtime directory, checked, and made with mode 0700 where it is missing. `RuntimeDirectoryError` if refused.

    Only the last component is made: a missing parent means that nobody is logged in or that the variable is wrong.
    """
    return _ensure_directory(runtime_dir())


def check_runtime_dir() -> Path:
    """The runtime directory, checked in the same way, but never made: `ServiceNotRunning` where it is missing."""
    return _check_directory(runtime_dir())


def socket_path(device: str, *, create: bool = False) -> Path:
    """The socket of the worker of `device`, at most 107 bytes long; the file need not exist.

    The directory of a path from $WEIGHTCACHED_SOCKET_TEMPLATE is checked like the runtime directory: with `create` (a
    worker) it is made where it is missing, without (a client) that is `ServiceNotRunning`. The runtime directory itself
    is the caller's to check. `RuntimeDirectoryError` for a bad template, a refused directory or a long path.
    """
    name = check_device(device)
    template = os.environ.get("WEIGHTCACHED_SOCKET_TEMPLATE")
    if not template:
        return check_socket_length(runtime_dir() / f"{name}.sock")
    path = check_socket_length(_fill_template(template, name))
    _ensure_directory(path.parent) if create else _check_directory(path.parent)
    return path


def lock_path(device: str) -> Path:
    """The lock file of `device`, whatever the socket template says: one device has one lock."""
    return runtime_dir() / f"{check_device(device)}.lock"


def control_path(instance: str) -> Path:
    """The control socket of the service `instance`, at most 107 bytes long."""
    return check_socket_length(runtime_dir() / f"{check_instance(instance)}{CONTROL_SUFFIX}")


def control_paths() -> list[Path]:
    """The control sockets that exist, by name; none where the runtime directory is missing."""
    try:
        directory = check_runtime_dir()
    except ServiceNotRunning:
        return []
    return sorted(
        path
        for path in directory.glob(f"*{CONTROL_SUFFIX}")
        if _INSTANCE.fullmatch(path.name.removesuffix(CONTROL_SUFFIX))
    )


def check_socket_length(path: Path) -> Path:
    """The path itself. `RuntimeDirectoryError` with the length where the kernel would refuse to bind or connect it."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise RuntimeDirectoryError(
            path=str(path),
            problem=f"a socket path of {length} bytes, at most {MAX_SOCKET_PATH} are possible; "
            "set WEIGHTCACHED_RUNTIME_DIR to a shorter one",
        )
    return path


def check_device(device: str) -> str:
    """The device's name itself. `DeviceError` for what is no device name, and so perhaps no file name either."""
    if not is_device_name(device):
        raise DeviceError(device=repr(device), problem="not a device name: GPU-<uuid>, MIG-<uuid> or host-<n>")
    return device


def check_instance(instance: str) -> str:
    """The instance name itself. `WeightCacheError` for one that could leave the directory or hide in it."""
    if not _INSTANCE.fullmatch(instance):
        raise WeightCacheError(
            problem=f"instance name {instance!r}: use letters, digits and : _ . @ - only, and no dot in front"
        )
    return instance


def _ensure_directory(path: Path) -> Path:
    _require_absolute(path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise RuntimeDirectoryError(
            path=str(path),
            problem=f"cannot be made, {path.parent} does not exist; make that first, log in through a session "
            "(`loginctl enable-linger` starts one at boot) or set WEIGHTCACHED_RUNTIME_DIR",
        ) from None
    except OSError as error:
        raise RuntimeDirectoryError(
            path=str(path), problem=f"cannot be made: {error.strerror}; set WEIGHTCACHED_RUNTIME_DIR to another place"
        ) from error
    try:
        return _check_directory(path)
    except ServiceNotRunning:
        raise RuntimeDirectoryError(path=str(path), problem="was removed while it was checked; try again") from None


def _check_directory(path: Path) -> Path:
    """The path, if only this user can write in it. `ServiceNotRunning` where nothing is there."""
    _require_absolute(path)
    try:
        # One open and one fstat, so that all facts are about the same file. O_PATH needs no permission on it, and with
        # O_NOFOLLOW it opens a symlink itself (open(2)), which tells a symlink from a file in the error.
        fd = OwnedFd(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
    except FileNotFoundError:
        raise ServiceNotRunning(path=str(path)) from None
    except OSError as error:
        raise RuntimeDirectoryError(
            path=str(path), problem=f"cannot be opened: {error.strerror}; set WEIGHTCACHED_RUNTIME_DIR to another place"
        ) from error
    with fd:
        found = os.fstat(fd.fileno())
    if problem := _problem_of(found, path):
        raise RuntimeDirectoryError(path=str(path), problem=problem)
    return path


def _problem_of(found: os.stat_result, path: Path) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link; remove it, or name the directory itself"
    if not stat.S_ISDIR(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        return f"is {kind}, not a directory; remove it, or set WEIGHTCACHED_RUNTIME_DIR to a directory"
    if found.st_uid != os.geteuid():
        return (
            f"belongs to uid {found.st_uid}, this process runs as uid {os.geteuid()}; "
            "set WEIGHTCACHED_RUNTIME_DIR to a directory of your own"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        return f"is open to other users (mode {mode:04o}); close it: chmod 700 {path}"
    return None


def _require_absolute(path: Path) -> None:
    if not path.is_absolute():
        raise RuntimeDirectoryError(
            path=str(path),
            problem="is a relative path; set WEIGHTCACHED_RUNTIME_DIR (or XDG_RUNTIME_DIR) to an absolute one",
        )


def _fill_template(template: str, name: str) -> Path:
    def refuse(problem: str) -> RuntimeDirectoryError:
        return RuntimeDirectoryError(path=f"WEIGHTCACHED_SOCKET_TEMPLATE={template}", problem=problem)

    try:
        fields = [part[1:] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise refuse(f"is not a template: {error}") from None
    for field in fields:
        if field != (_PLACEHOLDER, "", None):
            raise refuse(f"has a placeholder other than {{{_PLACEHOLDER}}}")
    if not fields:
        raise refuse(f"has no {{{_PLACEHOLDER}}}, every device would share one socket")
    if not template.startswith("/"):
        raise refuse("is not an absolute path")
    return Path(template.format(device_uuid=name))
