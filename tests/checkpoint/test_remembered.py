"""Remembered digests: used for the same stat tuple and for nothing else, and only where nobody else can write them."""

from __future__ import annotations

import itertools
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import as_nobody, open_folder, wait_for_tick, write_sharded
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint import remembered
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.checkpoint.remembered import digest_once, recall, remember
from weightcached.shard.manifest import SourceFile

DIGEST = "xxh3-128-4m:" + "5" * 32
OTHER = "xxh3-128-4m:" + "6" * 32
FILE = SourceFile("model.safetensors", 2049, 77, 4096, 1_700_000_000_123_456_789, 1_700_000_001_123_456_789, DIGEST)
NAME = "digest-xxh3-128-4m-2049-77-4096-1700000000123456789-1700000001123456789"

# Digests the checkpoint in argv[1] when a line comes on stdin; prints the digest and the bytes that preadv has read.
CHILD = """
import os, sys
from weightcached.checkpoint import remembered
from weightcached.checkpoint.fileset import open_checkpoint
remembered.SETTLED_NS = 0
read, preadv = [], os.preadv
os.preadv = lambda *args: read.append(preadv(*args)) or read[-1]
with open_checkpoint(sys.argv[1]) as checkpoint:
    print("ready", flush=True)
    sys.stdin.readline()
    print(remembered.digest_once(checkpoint)[0], sum(read), flush=True)
"""


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's caches are in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def folder(cache_home: Path) -> Path:
    """The folder of remembered digests, with one entry."""
    remember([FILE])
    return cache_home / "weightcached"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once; a test that changes one waits for the clock's next tick itself."""
    monkeypatch.setattr(remembered, "SETTLED_NS", 0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each preadv, as they happen; only digests read with it."""
    counted: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counted.append(preadv(*args)) or counted[-1])
    return counted


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder of three files, whose times are over."""
    path = write_sharded(tmp_path / "model", {f"{name}.safetensors": [name] for name in "abc"})
    wait_for_tick(path / "c.safetensors")
    return path


def digest(path: Path) -> tuple[str, list[str]]:
    with open_checkpoint(path) as opened:
        return digest_once(opened)


@pytest.mark.usefixtures("settled")
class TestOfCheckpoints:
    """`digest_once` on real files."""

    def test_nothing_is_read_again(self, checkpoint: Path, reads: list[int]) -> None:
        """The first time every byte is read once, then none, in a moved folder too; the digests are the true ones."""
        with open_checkpoint(checkpoint) as opened:
            nbytes = opened.nbytes
            expected = digest_checkpoint(opened)
        reads.clear()

        assert digest(checkpoint) == expected
        assert sum(reads) == nbytes
        assert digest(checkpoint) == expected
        assert digest(checkpoint.rename(checkpoint.with_name("moved"))) == expected
        assert sum(reads) == nbytes

    def test_only_the_changed_file_is_read(self, checkpoint: Path, reads: list[int]) -> None:
        """One file overwritten in place, its mtime set back: only ctime tells, and only that file is read again."""
        before = digest(checkpoint)
        path = checkpoint / "b.safetensors"
        times = path.stat()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert path.stat().st_mtime_ns == times.st_mtime_ns
        reads.clear()

        content, digests = digest(checkpoint)

        assert sum(reads) == times.st_size
        assert content != before[0]
        assert [ours == theirs for ours, theirs in zip(digests, before[1], strict=True)] == [True, False, True]

    def test_a_remembered_digest_is_what_counts(self, checkpoint: Path, reads: list[int]) -> None:
        """What is remembered for exactly these files is the result: nothing else looks at their bytes."""
        with open_checkpoint(checkpoint) as opened:
            remember([replace(file.source, digest=DIGEST) for file in opened.files])
        assert digest(checkpoint)[1] == [DIGEST] * 3
        assert reads == []

    def test_a_file_that_changes_meanwhile_is_not_remembered(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cache_home: Path
    ) -> None:
        """A digest that ends in an error leaves no entry."""
        preadv = os.preadv

        def touch(*args: Any) -> int:
            os.utime(checkpoint / "a.safetensors")
            return preadv(*args)

        monkeypatch.setattr(os, "preadv", touch)
        with pytest.raises(Exception, match="was written or altered"):
            digest(checkpoint)
        assert not (cache_home / "weightcached").exists()

    def test_no_descriptor_leaks(self, checkpoint: Path) -> None:
        """Neither remembering nor recalling leaves a descriptor."""
        with NoDescriptorLeaks():
            digest(checkpoint)
            digest(checkpoint)

    def test_processes_at_once(self, checkpoint: Path, cache_home: Path) -> None:
        """Processes that digest and remember the same files at the same time get the same; then nobody reads."""
        nbytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(checkpoint)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        first, second, later = children
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for child in (first, second):
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        outputs = [child.communicate(timeout=50)[0] for child in (first, second)]
        outputs.append(later.communicate("\n", timeout=50)[0])

        content = digest(checkpoint)[0]
        assert all(child.returncode == 0 for child in children)
        assert {output.split()[0] for output in outputs} == {content}
        # A child that was late may find what the other one has written.
        assert outputs[0].split()[1] == str(nbytes) or outputs[1].split()[1] == str(nbytes)
        assert outputs[2].split()[1] == "0"
        assert len(list((cache_home / "weightcached").iterdir())) == 3


def test_a_file_that_was_just_written_is_not_remembered(
    checkpoint: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file younger than 2 s could change without a new time, so it is read again; from then on it is remembered."""
    path = checkpoint / "a.safetensors"
    status = path.stat()
    for age, expected in ((-5_000_000_000, 1), (1_999_999_999, 2), (2_000_000_000, 3), (2_000_000_000, 3)):
        monkeypatch.setattr(time, "time_ns", lambda age=age: status.st_ctime_ns + age)
        digest(path)
        assert sum(reads) == expected * status.st_size


def test_the_age_is_that_before_the_first_byte(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that becomes old enough while it is read was too young for what was read first."""
    newest = max(path.stat().st_ctime_ns for path in checkpoint.glob("*.safetensors"))
    clock = itertools.count(newest + 1_000_000_000, 10_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    digest(checkpoint)
    with open_checkpoint(checkpoint) as opened:
        assert recall([file.source for file in opened.files]) == [None] * 3


def test_an_entry_is_found_by_the_stat_tuple(folder: Path) -> None:
    """The name of the file and of its folder do not count, and files without a digest leave no entry."""
    assert recall([replace(FILE, name="moved.safetensors", digest=None)]) == [DIGEST]
    remember([replace(FILE, inode=78, digest=None)])
    remember([])
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert recall([]) == []


@pytest.mark.parametrize("field", ["device", "inode", "size", "mtime_ns", "ctime_ns"])
def test_every_field_counts(folder: Path, field: str) -> None:
    """An entry is not used when any field of the stat tuple is another."""
    for step in (-1, 1):
        assert recall([replace(FILE, **{field: getattr(FILE, field) + step}), FILE]) == [None, DIGEST]


def test_another_definition_never_matches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of another definition is another entry, and one under this definition's name is not used."""
    with monkeypatch.context() as patch:
        patch.setattr(remembered, "FILE_PREFIX", "xxh3-128-8m:")
        assert recall([FILE]) == [None]
        remember([replace(FILE, digest="xxh3-128-8m:" + "7" * 32)])
        assert recall([FILE]) == ["xxh3-128-8m:" + "7" * 32]
    assert recall([FILE]) == [DIGEST]
    remember([replace(FILE, digest="sha256:" + "7" * 64)])
    assert recall([FILE]) == [None]


def test_places(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$XDG_CACHE_HOME, which is made; empty and relative ones do not count; then .cache of a home that exists."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    remember([FILE])
    assert (cache_home / "weightcached" / NAME).stat().st_mode & 0o777 == 0o600
    assert (cache_home / "weightcached").stat().st_mode & 0o777 == 0o700
    for xdg in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        remember([FILE])
        assert (home / ".cache" / "weightcached" / NAME).exists()
        assert recall([FILE]) == [DIGEST]
        (home / ".cache" / "weightcached" / NAME).unlink()
        assert not (tmp_path / "relative").exists()


@pytest.mark.parametrize("home", ["/nonexistent", "relative", "/" + "x" * 300, None])
def test_no_home(home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home nothing is remembered, nothing is made and nothing fails."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.chdir(tmp_path)
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # in no user database
    else:
        monkeypatch.setenv("HOME", home)
    remember([FILE])
    assert recall([FILE]) == [None]
    assert not list(tmp_path.iterdir()) and not Path("/nonexistent").exists()


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def open_to_others(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("what", ["folder", "entry"])
@pytest.mark.parametrize("change", [link, open_to_others, give_away])
def test_what_others_may_have_written_is_not_used(
    folder: Path, change: Callable[[Path], None], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder or an entry that is a symlink, open to others or another user's: not used, not an error, in the log."""
    assert recall([FILE]) == [DIGEST]
    change(folder if what == "folder" else folder / NAME)
    with caplog.at_level(logging.DEBUG, "weightcached"), NoDescriptorLeaks():
        assert recall([FILE]) == [None]
    assert caplog.records and all(record.levelno == logging.DEBUG for record in caplog.records)
    if what == "folder":
        before = (folder / NAME).stat()
        remember([replace(FILE, digest=OTHER), replace(FILE, inode=78)])
        assert [path.name for path in folder.iterdir()] == [NAME]
        assert (folder / NAME).stat() == before
    else:
        remember([replace(FILE, digest=OTHER)])  # an entry is replaced, not written into
        assert recall([FILE]) == [OTHER]
        assert not (folder / NAME).is_symlink()


def damage(*cut: Callable[[bytes], bytes]) -> list[Any]:
    return [pytest.param(function, id=str(number)) for number, function in enumerate(cut)]


@pytest.mark.parametrize(
    "change",
    damage(
        lambda data: b"",
        lambda data: bytes(len(data)),
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
        lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
        lambda data: b"\xff" + data,
        lambda data: data * 1000,
        lambda data: data.split()[0],
    ),
)
def test_a_damaged_entry_is_not_used(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Empty, zeroed, cut, extended, or with one flipped bit: the file is digested again, and the entry replaced."""
    path = folder / NAME
    path.write_bytes(change(path.read_bytes()))
    assert recall([FILE]) == [None]
    remember([FILE])
    assert recall([FILE]) == [DIGEST]


def test_an_entry_under_another_name_is_not_used(folder: Path) -> None:
    """A copied entry does not speak for another file."""
    other = replace(FILE, inode=78)
    (folder / NAME.replace("-77-", "-78-")).write_bytes((folder / NAME).read_bytes())
    assert recall([other, FILE]) == [None, DIGEST]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_an_entry_that_is_no_file(folder: Path, make: Callable[[Path], None]) -> None:
    """A FIFO does not hang its reader; a folder and a dangling link are no entries either."""
    (folder / NAME).unlink()
    make(folder / NAME)
    assert recall([FILE]) == [None]
    remember([FILE])
    assert len(list(folder.iterdir())) == 1, "something was left behind"


@pytest.mark.parametrize("base", ["file", "missing and not to be made", "read-only"])
def test_where_nothing_can_be_kept(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache home that is a file, cannot be made or is read-only: nothing is remembered, and nothing fails."""
    with open_folder() as place:
        home = place / "caches"
        if base == "file":
            home.write_bytes(b"")
        elif base == "read-only":
            (home / "weightcached").mkdir(parents=True)
            for path in (home / "weightcached", home):
                if os.geteuid() == 0:
                    os.chown(path, 65534, 65534)
                path.chmod(0o500)
        place.chmod(0o555)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        with as_nobody(), NoDescriptorLeaks():
            remember([FILE])
            assert recall([FILE]) == [None]
        place.chmod(0o755)
        if base == "read-only":
            for path in (home, home / "weightcached"):
                path.chmod(0o700)
            assert not list((home / "weightcached").iterdir())


def test_a_full_disk(folder: Path) -> None:
    """An entry that cannot be written whole is not there, and nothing is left of it; the entry before stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # Python ignores SIGXFSZ, so a write fails with EFBIG
    try:
        remember([replace(FILE, digest=OTHER), replace(FILE, inode=78)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert recall([FILE]) == [DIGEST]


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of entries is bounded; the oldest go, leftovers of killed processes among them, nothing else does."""
    monkeypatch.setattr(remembered, "MAX_ENTRIES", 5)
    (folder / f"{NAME}.0123456789abcdef").write_bytes(b"left behind")
    (folder / "README").write_bytes(b"somebody's")
    for name, age in ((f"{NAME}.0123456789abcdef", 1), ("README", 0), (NAME, 2)):
        os.utime(folder / name, (age, age))
    files = [replace(FILE, inode=inode) for inode in range(100, 107)]
    for number, file in enumerate(files):
        remember([file])
        path = next(folder.glob(f"*-{file.inode}-4096-*"))
        os.utime(path, (10 + number, 10 + number))

    assert recall([FILE, *files]) == [None, None, None, *[DIGEST] * 5]
    assert len(list(folder.iterdir())) == 6
    assert (folder / "README").exists()
