"""cli.main: which command does what, and with which exit code it ends. Real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightcached
from weightcached.cli import main as cli

MODULE = [sys.executable, "-m", "weightcached"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment without any config or runtime directory of the machine."""
    (tmp_path / "config").mkdir()
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTCACHED_", "XDG_"))},
        "HOME": str(tmp_path),
        "WEIGHTCACHED_CONFIG_DIR": str(tmp_path / "config"),
    }


@pytest.fixture
def runtime(env: dict[str, str]) -> Iterator[Path]:
    """A private runtime directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="wc-") as folder:
        env["WEIGHTCACHED_RUNTIME_DIR"] = folder
        yield Path(folder)


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MODULE, *arguments], env=env, capture_output=True, text=True)


def run_code(env: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_version(env: dict[str, str]) -> None:
    """--version prints name and version to stdout."""
    done = run(env, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"weightcached {weightcached.__version__}\n", "")


def test_help_lists_what_people_type(env: dict[str, str]) -> None:
    """--help names the three commands and the exit codes, and none of the service's own child processes."""
    text = run(env, "--help").stdout
    for word in ("serve", "check", "schema", "75", "78"):
        assert word in text
    assert "worker" not in text
    assert "loader" not in text
    assert "verifier" not in text
    assert "digest" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bogus"],
        ["serve"],
        ["check"],
        ["serve", "--instance", "../x"],
        ["serve", "--instance", ""],
        ["serve", "--config", "/etc/two words.toml"],
        ["check", "--instance", "x", "--no-such-option"],
        ["worker"],
        ["worker", "host-0", "--channel-fd", "three"],
        ["loader", "host-0"],
        ["verifier", "host-0", "m"],
        ["digest", "/models/m"],
        ["digest", "--channel-fd", "3"],
        ["digest", "/models/m", "--channel-fd", "three"],
    ],
    ids=" ".join,
)
def test_usage_errors(env: dict[str, str], arguments: list[str]) -> None:
    """Wrong usage ends with 2, a usage line and a sentence, and names no hidden command."""
    done = run(env, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: weightcached")
    assert ": error: " in done.stderr
    assert "'worker'" not in done.stderr


def test_schema_is_json(env: dict[str, str]) -> None:
    """`schema` prints the JSON schema and nothing else."""
    done = run(env, "schema")
    assert (done.returncode, done.stderr) == (0, "")
    keys = {"ready", "devices", "memory_limit", "staging_memory", "allow_uids", "model", "cluster"}
    assert set(json.loads(done.stdout)["properties"]) == keys


@pytest.mark.parametrize("command", ["serve", "check"])
def test_bad_config_is_78(env: dict[str, str], runtime: Path, tmp_path: Path, command: str) -> None:
    """A bad config ends both with 78 and one line that names file, key and the nearest valid key; no lock is left."""
    file = tmp_path / "config" / "model.toml"
    file.write_text("reddy = 1\n")
    for selection in (["--instance", "model"], ["--config", str(file)]):
        done = run(env, command, *selection)
        assert done.returncode == 78
        assert done.stderr == f'weightcached: error: {file}: reddy: unknown key; did you mean "ready"?\n'
    assert list(runtime.iterdir()) == []


def test_missing_config_is_78(env: dict[str, str], tmp_path: Path) -> None:
    """An instance without a file names the places looked in."""
    done = run(env, "check", "--instance", "test-of-main")
    assert done.returncode == 78
    assert f"not found in {tmp_path}/config, {tmp_path}/.config/weightcached, /etc/weightcached" in done.stderr


def test_debug_adds_the_traceback(env: dict[str, str]) -> None:
    """With --debug an error of ours shows where it was raised; sentence and exit code stay."""
    done = run(env, "check", "--config", "/nowhere.toml", "--debug")
    assert done.returncode == 78
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("weightcached: error: /nowhere.toml: No such file or directory\n")


def test_error_has_its_priority_in_the_journal(env: dict[str, str]) -> None:
    """When stderr goes to the journal, every line of an error is marked as one."""
    read, write = os.pipe()
    found = os.fstat(write)
    with os.fdopen(read) as reader:
        try:
            child = subprocess.Popen(
                [*MODULE, "check", "--config", "/nowhere.toml", "--debug"],
                env={**env, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"},
                stderr=write,
            )
        finally:
            os.close(write)
        lines = reader.read().splitlines()
    assert child.wait() == 78
    assert len(lines) > 2
    assert all(line.startswith("<3>") for line in lines)


def test_error_stays_one_line(env: dict[str, str]) -> None:
    """A path with a line break in it cannot make a second line."""
    done = run(env, "check", "--config", "/a\nb.toml")
    assert done.stderr == "weightcached: error: /a\\nb.toml: No such file or directory\n"


def test_interrupt_is_130_and_quiet(env: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C ends a command with 130 and without a traceback."""
    fifo = tmp_path / "config.toml"
    os.mkfifo(fifo)
    command = [*MODULE, "check", "--config", str(fifo)]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as child:
        try:
            with fifo.open("wb"):  # open returns when the child has opened the other end and reads
                child.send_signal(signal.SIGINT)
                _, stderr = child.communicate()
        finally:
            child.kill()
    assert (child.returncode, stderr) == (130, "")


def test_unexpected_errors_keep_their_traceback(env: dict[str, str]) -> None:
    """A defect is not dressed up as an error of ours: traceback, exit 1."""
    code = (
        "import sys, weightcached.cli.output as output\n"
        "def broken(obj): raise ZeroDivisionError('a defect')\n"
        "output.print_json = broken\n"
        "from weightcached.cli.main import main\n"
        "sys.exit(main(['schema']))\n"
    )
    done = run_code(env, code)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: a defect\n")
    assert "weightcached: error" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "conf/here.toml"], ("conf/here.toml", "here", False)),
        (["--config", "conf/here.toml", "--instance", "b", "--take-over"], ("conf/here.toml", "b", True)),
        (["--instance", "model"], ("config/model.toml", "model", False)),
    ],
)
def test_serve_gets_path_and_instance(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: tuple[str, str, bool],
) -> None:
    """The service gets an absolute path; its instance is the file's stem unless it is named."""
    from weightcached.service import main as service

    calls = []
    monkeypatch.setattr(service, "serve", lambda *call: calls.append(call) or 17)
    monkeypatch.setattr(cli.logs, "setup", lambda *_: None)  # this process's log is pytest's
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHTCACHED_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "model.toml").touch()
    assert cli.main(["serve", *arguments]) == 17
    path, instance, take_over = expected
    assert calls == [(tmp_path / path, instance, take_over)]


def test_worker_runs_until_its_service_is_gone(env: dict[str, str], runtime: Path) -> None:
    """`worker` takes its three descriptors by number and ends with 0 when the channel closes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime / "host-0.sock"))
        listener.listen()
        lock = os.open(runtime / "host-0.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fds = {"--channel-fd": theirs.fileno(), "--listener-fd": listener.fileno(), "--lock-fd": lock}
        options = [text for name, fd in fds.items() for text in (name, str(fd))]
        child = subprocess.Popen(
            [*MODULE, "worker", "host-0", "--instance", "test", "--limit", "1000000", *options],
            env=env,
            pass_fds=tuple(fds.values()),
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        os.close(lock)
        ours.close()
        _, stderr = child.communicate()
    assert (child.returncode, stderr) == (0, "")


def test_loader_without_a_job_fails(env: dict[str, str]) -> None:
    """`loader` takes its channel by number; a service that is gone before it sent a job ends it with 1."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child = subprocess.Popen(
            [*MODULE, "loader", "host-0", "minilm", "--channel-fd", str(theirs.fileno())],
            env=env,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        ours.shutdown(socket.SHUT_WR)
        assert child.wait() == 1


def test_light_commands_import_nothing_heavy(env: dict[str, str]) -> None:
    """The command's own module costs no pydantic, rich, asyncio or NVML; the branches import what they need."""
    done = run_code(env, "import sys, weightcached.cli.main; print(*sys.modules)")
    assert not {"pydantic", "rich", "asyncio", "pynvml", "torch"} & set(done.stdout.split())


def test_closed_standard_descriptors_are_opened(tmp_path: Path) -> None:
    """A service that is started without them must not get a lock as number 0, which its children replace."""
    result = tmp_path / "result"
    code = (
        "import os\nfor number in range(3): os.close(number)\n"
        "from weightcached.cli.main import open_standard_descriptors\n"
        "open_standard_descriptors()\n"
        f"open({str(result)!r}, 'w').write(' '.join(os.readlink(f'/proc/self/fd/{{n}}') for n in range(3)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=30)
    assert result.read_text() == "/dev/null /dev/null /dev/null"
