"""Where the sockets and locks are, and whether that place may be trusted.

    <runtime directory>/<device>.lock            held by the device's worker
    <runtime directory>/<device>.sock            its socket, or what $WEIGHTCACHED_SOCKET_TEMPLATE says
    <runtime directory>/<instance>.control.lock  held by the service
    <runtime directory>/<instance>.control.sock  the service's own socket

The runtime directory is $WEIGHTCACHED_RUNTIME_DIR, else $XDG_RUNTIME_DIR/weightcached, else
/run/user/$UID/weightcached. Whoever can write there can pose as the service, so a directory that is a symlink, belongs
to another user or is open to others is refused, wherever its path came from. So is one below a directory where anybody
may rename it.

A system-wide service lets others enter its directory, never write to it: who they are is asked at its sockets. Its
clients name whose it is in $WEIGHTCACHED_SERVICE_USER, and trust that user beside their own.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import stat
import string
from pathlib import Path

from .devices import is_device_name
from .errors import DeviceError, RuntimeDirectoryError, ServiceNotRunning, WeightCacheError
from .fds import OwnedFd

MAX_SOCKET_PATH = 107  # bytes; sun_path of unix(7) is 108 with the closing zero
CONTROL_SUFFIX = ".control.sock"
SERVICE_USER = "WEIGHTCACHED_SERVICE_USER"

_INSTANCE = re.compile(r"[A-Za-z0-9:_@-][A-Za-z0-9:_.@-]*")
_PLACEHOLDER = "device_uuid"
_KINDS = {stat.S_IFREG: "a file", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}


def runtime_dir() -> Path:
    """The runtime directory's path, unchecked. An empty variable counts as unset."""
    if explicit := os.environ.get("WEIGHTCACHED_RUNTIME_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return Path(base) / "weightcached"


def trusted_uids() -> frozenset[int]:
    """Whose service a client of this process believes: its own user's, and that of $WEIGHTCACHED_SERVICE_USER.

    The variable holds a name or a number. `WeightCacheError` for a name that is no user's.
    """
    named = os.environ.get(SERVICE_USER)
    if not named:
        return frozenset({os.geteuid()})
    return frozenset({os.geteuid(), int(named) if named.isascii() and named.isdigit() else _uid_of(named)})


@functools.cache  # the user database may be a network away, and a client whose service comes back must not wait for it
def _uid_of(named: str) -> int:
    try:
        return pwd.getpwnam(named).pw_uid
    except KeyError:
        problem = f"{SERVICE_USER}={named}: there is no such user; write its name or uid"
        raise WeightCacheError(problem=problem) from None


def start_command() -> str:
    """The command that starts a service for this process: a user's own, or a system-wide one where that is named."""
    return f"systemctl {'' if _system_wide() else '--user '}start weightcached@INSTANCE"


def ensure_runtime_dir(*, shared: bool = False) -> Path:
    """The runtime directory, checked, and made with mode 0700 where it is missing. `RuntimeDirectoryError` if refused.

    Only the last component is made: a missing parent means that nobody is logged in or that the variable is wrong.
    `shared`: the service has `allow_uids`. The directory is made with mode 0755, and must be one that others can enter.
    """
    return _ensure_directory(runtime_dir(), shared)


def check_runtime_dir() -> Path:
    """The runtime directory, checked in the same way, but never made: `ServiceNotRunning` where it is missing."""
    return _check_directory(runtime_dir(), trusted_uids(), entered=_system_wide())


def socket_path(device: str, *, create: bool = False, shared: bool = False) -> Path:
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
    if create:
        _ensure_directory(path.parent, shared)
    else:
        _check_directory(path.parent, trusted_uids(), entered=_system_wide())
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
        names = sorted(os.listdir(directory))
    except (ServiceNotRunning, FileNotFoundError):
        return []
    except PermissionError:  # of a system-wide service, with a mode such as 0711
        problem = "may be entered but not listed; name the service with --instance"
        raise RuntimeDirectoryError(path=str(runtime_dir()), problem=problem) from None
    instances = (name.removesuffix(CONTROL_SUFFIX) for name in names if name.endswith(CONTROL_SUFFIX))
    return [directory / f"{instance}{CONTROL_SUFFIX}" for instance in instances if _INSTANCE.fullmatch(instance)]


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


def _system_wide() -> bool:
    """Whether the service is named to be one for others too."""
    return bool(os.environ.get(SERVICE_USER))


def _ensure_directory(path: Path, shared: bool) -> Path:
    _require_absolute(path)
    try:
        os.mkdir(path, 0o700)
        if shared:
            os.chmod(path, 0o755)  # whatever the umask is
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
        _check_directory(path, frozenset({os.geteuid()}), entered=shared or _system_wide())
    except ServiceNotRunning:
        raise RuntimeDirectoryError(path=str(path), problem="was removed while it was checked; try again") from None
    if shared:
        for directory in (path, *_above(path)):
            mode = stat.S_IMODE(os.stat(directory).st_mode)
            if not mode & 0o011:
                raise RuntimeDirectoryError(
                    path=str(path),
                    problem=f"allow_uids is in vain, {directory} is closed to other users (mode {mode:04o}); "
                    "set WEIGHTCACHED_RUNTIME_DIR to a directory of a system-wide service, such as /run/weightcached",
                )
    return path


def _check_directory(path: Path, owners: frozenset[int], *, entered: bool) -> Path:
    """The path, if nobody but its owner can write in it, or replace it. `ServiceNotRunning` where nothing is there.

    `entered`: others may look into it.
    """
    _require_absolute(path)
    try:
        # One open and one fstat, so that all facts are about the same file. O_PATH needs no permission on it, and with
        # O_NOFOLLOW it opens a symlink itself (open(2)), which tells a symlink from a file in the error.
        fd = OwnedFd(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
    except FileNotFoundError:
        raise ServiceNotRunning(path=str(path), start=start_command()) from None
    except OSError as error:
        raise RuntimeDirectoryError(
            path=str(path), problem=f"cannot be opened: {error.strerror}; set WEIGHTCACHED_RUNTIME_DIR to another place"
        ) from error
    with fd:
        found = os.fstat(fd.fileno())
    if problem := _problem_of(found, path, owners, entered) or _problem_above(path):
        raise RuntimeDirectoryError(path=str(path), problem=problem)
    return path


def _problem_above(path: Path) -> str | None:
    for directory in _above(path):
        mode = stat.S_IMODE(os.stat(directory).st_mode)
        if mode & 0o002 and not mode & stat.S_ISVTX:
            return (
                f"lies below {directory}, where anybody may rename it (mode {mode:04o}); "
                f"chmod +t {directory}, or set WEIGHTCACHED_RUNTIME_DIR to another place"
            )
    return None


def _above(path: Path) -> list[Path]:
    """The directories above, as the path names them and as they really lie."""
    return list(dict.fromkeys([*path.parents, *path.resolve().parents]))


def _problem_of(found: os.stat_result, path: Path, owners: frozenset[int], entered: bool) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link; remove it, or name the directory itself"
    if not stat.S_ISDIR(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        return f"is {kind}, not a directory; remove it, or set WEIGHTCACHED_RUNTIME_DIR to a directory"
    if found.st_uid not in owners:
        named = sorted(owners - {os.geteuid()})
        return (
            f"belongs to uid {found.st_uid}, this process runs as uid {os.geteuid()}"
            + (f" and trusts uid {named[0]}; " if named else "; ")
            + "set WEIGHTCACHED_RUNTIME_DIR to a directory of your own, "
            f"or name the user of a system-wide service in {SERVICE_USER}"
        )
    mode = stat.S_IMODE(found.st_mode)
    if entered and mode & 0o022:
        return f"may be written by other users (mode {mode:04o}); close it: chmod go-w {path}"
    if not entered and mode & 0o077:
        return (
            f"is open to other users (mode {mode:04o}); close it: chmod 700 {path}; "
            f"for a system-wide service, name its user in {SERVICE_USER}"
        )
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
