"""paths: where things are, and which runtime directories are refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightcached import paths
from weightcached.errors import DeviceError, RuntimeDirectoryError, ServiceNotRunning, WeightCacheError

GPU = "GPU-2f1d0c5e-6a7b-4c3d-9e8f-001122334455"
OTHER_UID = 12345

Check = Callable[[], Path]


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder with a short path: pytest's own leave no room for a socket named by a GPU."""
    with tempfile.TemporaryDirectory(prefix="wc-") as folder:
        yield Path(folder)


@pytest.fixture
def directory(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory that is named but not made yet; no other variable decides."""
    path = short / "run"
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(path))
    for variable in ("WEIGHTCACHED_SOCKET_TEMPLATE", "WEIGHTCACHED_SERVICE_USER"):
        monkeypatch.delenv(variable, raising=False)
    return path


def test_explicit_variable_wins(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$WEIGHTCACHED_RUNTIME_DIR names the directory itself and is stronger than $XDG_RUNTIME_DIR."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/elsewhere")
    assert paths.runtime_dir() == directory


@pytest.mark.parametrize("explicit", ["", None])
def test_xdg_variable_is_second(explicit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the explicit variable, or with an empty one, it is a folder in $XDG_RUNTIME_DIR."""
    if explicit is None:
        monkeypatch.delenv("WEIGHTCACHED_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", explicit)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/elsewhere")
    assert paths.runtime_dir() == Path("/run/elsewhere/weightcached")


def test_run_user_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any variable it is where systemd makes the user's runtime directory."""
    monkeypatch.delenv("WEIGHTCACHED_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert paths.runtime_dir() == Path(f"/run/user/{os.geteuid()}/weightcached")


def test_made_with_0700_under_any_umask(directory: Path) -> None:
    """A missing directory is made for this user alone, even with umask 0; a second call finds it in order."""
    mask = os.umask(0)
    try:
        assert paths.ensure_runtime_dir() == directory
    finally:
        os.umask(mask)
    assert directory.stat().st_mode & 0o7777 == 0o700
    assert paths.ensure_runtime_dir() == directory
    assert paths.check_runtime_dir() == directory


def test_parent_is_never_made(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last component is made; a missing parent is named in the error."""
    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(short / "missing" / "run"))
    with pytest.raises(RuntimeDirectoryError, match=f"{short}/missing does not exist"):
        paths.ensure_runtime_dir()
    assert not (short / "missing").exists()


def test_missing_directory_is_no_service_for_a_client(directory: Path) -> None:
    """The client's check makes nothing and says that no service runs, with the exit code for it."""
    with pytest.raises(ServiceNotRunning) as caught:
        paths.check_runtime_dir()
    assert caught.value.exit_code == 3
    assert not directory.exists()


@pytest.mark.parametrize("check", [paths.ensure_runtime_dir, paths.check_runtime_dir])
class TestRefused:
    """Both ends refuse the same directories."""

    def test_symlink(self, check: Check, directory: Path, short: Path) -> None:
        """A symlink is refused even if it leads to a good directory, and with a trailing slash as well."""
        (short / "good").mkdir(mode=0o700)
        directory.symlink_to(short / "good")
        with pytest.raises(RuntimeDirectoryError, match="is a symbolic link"):
            check()
        os.environ["WEIGHTCACHED_RUNTIME_DIR"] += "/"  # the fixture's monkeypatch puts it back
        with pytest.raises(RuntimeDirectoryError, match="is a symbolic link"):
            check()

    def test_dangling_symlink(self, check: Check, directory: Path) -> None:
        """A dangling symlink is refused, not followed and not taken for a missing directory."""
        directory.symlink_to("/nowhere/at/all")
        with pytest.raises(RuntimeDirectoryError, match="is a symbolic link"):
            check()

    @pytest.mark.parametrize("mode", [0o701, 0o710, 0o740, 0o755, 0o777])
    def test_open_to_others(self, check: Check, directory: Path, mode: int) -> None:
        """Any permission of group or others is refused, with the mode and the command that closes it."""
        directory.mkdir()
        directory.chmod(mode)
        with pytest.raises(RuntimeDirectoryError, match=rf"mode {mode:04o}.*chmod 700 {directory}"):
            check()
        assert directory.stat().st_mode & 0o777 == mode, "it must not be changed behind its owner's back"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
    def test_other_owner(self, check: Check, directory: Path) -> None:
        """A directory of another user is refused, with both uids."""
        directory.mkdir(mode=0o700)
        os.chown(directory, OTHER_UID, OTHER_UID)
        with pytest.raises(RuntimeDirectoryError, match=f"belongs to uid {OTHER_UID}, this process runs as uid 0"):
            check()

    def test_file(self, check: Check, directory: Path) -> None:
        """A file in its place is refused and left as it is."""
        directory.write_text("mine")
        with pytest.raises(RuntimeDirectoryError, match="is a file, not a directory"):
            check()
        assert directory.read_text() == "mine"

    def test_file_as_parent(self, check: Check, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A parent that is no directory is an error of its own, not a missing service."""
        directory.write_text("")
        monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(directory / "below"))
        with pytest.raises(RuntimeDirectoryError, match="Not a directory"):
            check()

    @pytest.mark.parametrize("variable", ["WEIGHTCACHED_RUNTIME_DIR", "XDG_RUNTIME_DIR"])
    def test_relative(self, check: Check, variable: str, monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
        """A relative path would be another place for each process; nothing is made there."""
        monkeypatch.chdir(short)
        monkeypatch.delenv("WEIGHTCACHED_RUNTIME_DIR", raising=False)
        monkeypatch.setenv(variable, "run")
        with pytest.raises(RuntimeDirectoryError, match="is a relative path"):
            check()
        assert not list(short.iterdir())


class TestAbove:
    """What lies above the runtime directory."""

    @pytest.mark.parametrize("check", [paths.ensure_runtime_dir, paths.check_runtime_dir])
    def test_open_to_anybody(self, check: Check, directory: Path, short: Path) -> None:
        """Below a directory where anybody may rename it, a good directory is refused; the sticky bit makes it good."""
        directory.mkdir(mode=0o700)
        short.chmod(0o777)
        with pytest.raises(RuntimeDirectoryError, match=rf"lies below {short}, .* \(mode 0777\); chmod \+t {short}"):
            check()
        short.chmod(0o1777)
        assert check() == directory

    def test_further_up(self, directory: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Any directory on the way counts, not only the nearest."""
        below = short / "a" / "b" / "run"
        below.mkdir(mode=0o700, parents=True)
        (short / "a").chmod(0o777)
        monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(below))
        with pytest.raises(RuntimeDirectoryError, match=f"lies below {short}/a, "):
            paths.check_runtime_dir()

    def test_behind_a_link(self, directory: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A link on the way is followed: what lies above its target counts too."""
        (short / "open").mkdir()
        (short / "open" / "real").mkdir(mode=0o700)
        (short / "open").chmod(0o777)
        (short / "link").symlink_to(short / "open" / "real")
        monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", str(short / "link" / "run"))
        with pytest.raises(RuntimeDirectoryError, match=f"lies below {short}/open, "):
            paths.ensure_runtime_dir()


class TestShared:
    """A service that has allow_uids, and its clients."""

    @pytest.fixture(autouse=True)
    def _reachable(self, short: Path) -> None:
        short.chmod(0o755)  # mkdtemp makes it 0700

    def test_made_with_0755_under_any_umask(self, directory: Path) -> None:
        """A missing directory is made so that others can enter and list it, even with umask 077."""
        mask = os.umask(0o077)
        try:
            assert paths.ensure_runtime_dir(shared=True) == directory
        finally:
            os.umask(mask)
        assert directory.stat().st_mode & 0o7777 == 0o755

    @pytest.mark.parametrize("mode", [0o711, 0o750, 0o751, 0o755])
    def test_entered_by_others(self, directory: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A directory that others, or a group, may enter is taken as it is, by the service and by who names its user;
        without the name it is refused."""
        directory.mkdir()
        directory.chmod(mode)
        assert paths.ensure_runtime_dir(shared=True) == directory
        with pytest.raises(RuntimeDirectoryError, match="name its user in WEIGHTCACHED_SERVICE_USER"):
            paths.check_runtime_dir()
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", str(os.geteuid()))
        assert paths.check_runtime_dir() == paths.ensure_runtime_dir() == directory
        assert directory.stat().st_mode & 0o7777 == mode

    @pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
    def test_never_written_by_others(self, directory: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever may write there can pose as the service: refused by both ends, shared or not."""
        directory.mkdir()
        directory.chmod(mode)
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", str(os.geteuid()))
        for check in (lambda: paths.ensure_runtime_dir(shared=True), paths.check_runtime_dir):
            with pytest.raises(RuntimeDirectoryError, match=f"written by other users .*: chmod go-w {directory}"):
                check()

    @pytest.mark.parametrize("closed", ["run", "."])
    def test_closed_to_others(self, directory: Path, short: Path, closed: str) -> None:
        """Users that cannot reach the directory are listed in vain; the error says which directory is closed."""
        directory.mkdir(mode=0o755)
        (short / closed).chmod(0o700)
        problem = rf"allow_uids is in vain, {(short / closed).resolve()} is closed to other users \(mode 0700\)"
        with pytest.raises(RuntimeDirectoryError, match=problem):
            paths.ensure_runtime_dir(shared=True)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
    def test_of_the_named_user(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A client takes the directory of the user whom it names and of no third; the service takes only its own."""
        directory.mkdir(mode=0o755)
        os.chown(directory, OTHER_UID, OTHER_UID)
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", str(OTHER_UID))
        assert paths.check_runtime_dir() == directory
        with pytest.raises(RuntimeDirectoryError, match=f"belongs to uid {OTHER_UID}"):
            paths.ensure_runtime_dir(shared=True)
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", str(OTHER_UID + 1))
        with pytest.raises(RuntimeDirectoryError, match=f"runs as uid 0 and trusts uid {OTHER_UID + 1}"):
            paths.check_runtime_dir()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_not_listed(self, directory: Path) -> None:
        """Where others may enter but not list, the instance must be named; it is not said that no service runs."""
        directory.mkdir()
        directory.chmod(0o711)
        code = (
            "import os\n"
            "from weightcached import paths, errors\n"
            f"os.setgid({OTHER_UID}); os.setuid({OTHER_UID})\n"
            "try: paths.control_paths()\n"
            "except errors.RuntimeDirectoryError as error: print(error)\n"
        )
        environ = {**os.environ, "WEIGHTCACHED_SERVICE_USER": "root"}
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
        assert child.stdout == f"{directory}: may be entered but not listed; name the service with --instance\n"

    def test_template(self, directory: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The directory of a socket template follows the same rules."""
        monkeypatch.setenv("WEIGHTCACHED_SOCKET_TEMPLATE", f"{short}/new/{{device_uuid}}.sock")
        paths.socket_path("host-0", create=True, shared=True)
        assert (short / "new").stat().st_mode & 0o7777 == 0o755
        with pytest.raises(RuntimeDirectoryError, match="is open to other users"):
            paths.socket_path("host-0")
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", str(os.geteuid()))
        assert paths.socket_path("host-0") == short / "new" / "host-0.sock"


@pytest.mark.parametrize(
    ("named", "trusted"), [(None, set()), ("", set()), ("1234", {1234}), ("0", {0}), ("root", {0}), ("nobody", {65534})]
)
def test_trusted_uids(named: str | None, trusted: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A client trusts its own user, and beside it the one that the variable names, by name or number."""
    monkeypatch.delenv("WEIGHTCACHED_SERVICE_USER", raising=False)
    if named is not None:
        monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", named)
    assert paths.trusted_uids() == {os.geteuid()} | trusted


def test_a_user_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients whose service comes back do not wait for the user database again."""
    monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", "nobody")
    trusted = paths.trusted_uids()
    monkeypatch.setattr("pwd.getpwnam", lambda name: pytest.fail("looked up again"))
    assert paths.trusted_uids() == trusted


@pytest.mark.parametrize("named", ["no-such-user", "-1", "1.0", "²"])
def test_trusted_user_must_exist(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no user's is an error, not nobody."""
    monkeypatch.setenv("WEIGHTCACHED_SERVICE_USER", named)
    with pytest.raises(WeightCacheError, match=f"WEIGHTCACHED_SERVICE_USER={named}: there is no such user"):
        paths.trusted_uids()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_private_directory_of_another_user_is_named_as_such(directory: Path) -> None:
    """A process without any right on the directory still learns whose it is, instead of "permission denied"."""
    directory.mkdir(mode=0o700)
    directory.parent.chmod(0o755)
    code = (
        "import os\n"
        "from weightcached import paths, errors\n"  # found before the user changes
        f"os.setgid({OTHER_UID}); os.setuid({OTHER_UID})\n"
        "try: paths.check_runtime_dir()\n"
        "except errors.RuntimeDirectoryError as error: print(error)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"belongs to uid 0, this process runs as uid {OTHER_UID}" in child.stdout, child.stderr


def test_checks_leave_no_descriptor(directory: Path) -> None:
    """The descriptor behind a check is closed, refused or not."""
    before = len(os.listdir("/proc/self/fd"))
    paths.ensure_runtime_dir()
    directory.chmod(0o755)
    with pytest.raises(RuntimeDirectoryError):
        paths.check_runtime_dir()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("device", [GPU, GPU.replace("GPU", "MIG"), "host-0"])
def test_device_files(directory: Path, device: str) -> None:
    """Socket and lock are named by the device."""
    assert paths.socket_path(device) == directory / f"{device}.sock"
    assert paths.lock_path(device) == directory / f"{device}.lock"


@pytest.mark.parametrize(
    "device", ["", "0", "cuda:0", "GPU-../../x", "../host-0", "host-0\n", "GPU-a b", "host-", "MIG-GPU-a/1/0"]
)
def test_bad_device_names(directory: Path, device: str) -> None:
    """What is no device name never becomes a path."""
    for path_of in (paths.socket_path, paths.lock_path):
        with pytest.raises(DeviceError, match="not a device name"):
            path_of(device)


def test_control_files(directory: Path) -> None:
    """The service's own socket is named by the instance."""
    assert paths.control_path("a@b:1_2.c-d") == directory / "a@b:1_2.c-d.control.sock"


@pytest.mark.parametrize("instance", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "a\n", "ä"])
def test_bad_instance_names(directory: Path, instance: str) -> None:
    """What could leave the directory or hide in it is no instance name."""
    with pytest.raises(WeightCacheError, match="instance name"):
        paths.control_path(instance)


def test_control_paths_lists_all_services(directory: Path) -> None:
    """Every control socket is found, in order of name, and nothing else; a missing directory holds none."""
    assert paths.control_paths() == []
    paths.ensure_runtime_dir()
    for name in ("b.control.sock", "a.control.sock", "host-0.sock", "a.control.lock", ".x.control.sock"):
        (directory / name).touch()
    assert paths.control_paths() == [directory / "a.control.sock", directory / "b.control.sock"]


def test_control_paths_refuses_an_open_directory(directory: Path) -> None:
    """Sockets that others could have put there are not listed."""
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(RuntimeDirectoryError):
        paths.control_paths()


def test_socket_length_limit_is_the_kernels(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """107 bytes are accepted and bound by the kernel; 108 are refused here with the length, as the kernel would."""
    room = paths.MAX_SOCKET_PATH - len("/host-0.sock")
    base = str(directory) + "/"
    long_enough = base + "x" * (room - len(base))
    paths.ensure_runtime_dir()

    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", long_enough)
    path = paths.socket_path("host-0")
    assert len(os.fsencode(path)) == 107
    paths.ensure_runtime_dir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))

    monkeypatch.setenv("WEIGHTCACHED_RUNTIME_DIR", long_enough + "x")
    with pytest.raises(RuntimeDirectoryError, match="108 bytes, at most 107"):
        paths.socket_path("host-0")
    with pytest.raises(RuntimeDirectoryError, match="bytes, at most 107"):
        paths.control_path("model")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, pytest.raises(OSError, match="too long"):
        listener.bind(f"{long_enough}x/host-0.sock")


def test_socket_length_counts_bytes() -> None:
    """The limit is in bytes of the encoded path, not in characters."""
    with pytest.raises(RuntimeDirectoryError, match="109 bytes"):
        paths.check_socket_length(Path("/" + "ä" * 54))


class TestTemplate:
    """$WEIGHTCACHED_SOCKET_TEMPLATE."""

    @staticmethod
    def set(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
        monkeypatch.setenv("WEIGHTCACHED_SOCKET_TEMPLATE", template)

    def test_overrides_the_socket_only(self, directory: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The socket goes where the template says, doubled braces are braces; the lock stays."""
        (short / "sockets").mkdir(mode=0o700)
        self.set(monkeypatch, f"{short}/sockets/{{{{x}}}}-{{device_uuid}}.s")
        assert paths.socket_path("GPU-ab") == short / "sockets" / "{x}-GPU-ab.s"
        assert paths.lock_path("host-0") == directory / "host-0.lock"

    @pytest.mark.parametrize(
        ("template", "problem"),
        [
            ("/run/x/all.sock", "has no {device_uuid}"),
            ("/run/x/{{device_uuid}}.sock", "has no {device_uuid}"),
            ("/run/x/{device_uuid}-{pid}.sock", "placeholder other than {device_uuid}"),
            ("/run/x/{device_uuid!r}.sock", "placeholder other than {device_uuid}"),
            ("/run/x/{device_uuid:>50}.sock", "placeholder other than {device_uuid}"),
            ("/run/x/{device_uuid.__class__}.sock", "placeholder other than {device_uuid}"),
            ("/run/x/{}.sock", "placeholder other than {device_uuid}"),
            ("/run/x/{device_uuid.sock", "is not a template"),
            ("{device_uuid}.sock", "is not an absolute path"),
            ("run/{device_uuid}.sock", "is not an absolute path"),
        ],
    )
    def test_bad_templates(self, directory: Path, monkeypatch: pytest.MonkeyPatch, template: str, problem: str) -> None:
        """Each kind of bad template is refused by what is wrong with it, and named."""
        self.set(monkeypatch, template)
        with pytest.raises(RuntimeDirectoryError) as caught:
            paths.socket_path("host-0")
        assert problem in str(caught.value)
        assert template in str(caught.value)

    def test_directory_is_checked(self, directory: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its directory is held to the same rules as the runtime directory."""
        (short / "open").mkdir()
        (short / "open").chmod(0o755)
        self.set(monkeypatch, f"{short}/open/{{device_uuid}}.sock")
        for create in (False, True):
            with pytest.raises(RuntimeDirectoryError, match="mode 0755"):
                paths.socket_path("host-0", create=create)

    def test_directory_is_made_by_the_worker_only(
        self, directory: Path, short: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A missing directory is "no service" for a client, and made 0700 for a worker."""
        self.set(monkeypatch, f"{short}/new/{{device_uuid}}.sock")
        with pytest.raises(ServiceNotRunning):
            paths.socket_path("host-0")
        assert paths.socket_path("host-0", create=True) == short / "new" / "host-0.sock"
        assert (short / "new").stat().st_mode & 0o7777 == 0o700

    def test_length(self, directory: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A long template is refused by its filled-in length, before its directory is looked at."""
        self.set(monkeypatch, f"/{'x' * 100}/{{device_uuid}}.sock")
        with pytest.raises(RuntimeDirectoryError, match="113 bytes, at most 107"):
            paths.socket_path("host-0")


def test_import_is_light() -> None:
    """A client imports this module, so it must not pull in what is slow to import."""
    code = "import sys, weightcached.paths, weightcached.logs; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "rich", "asyncio", "pynvml", "torch"} & set(loaded)
