"""The index and the config: what is read, what is refused, and that only regular files are opened."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.checkpoint.files import as_nobody, open_folder
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint import documents
from weightcached.checkpoint.documents import file_status, listing, open_regular, read_config, read_index
from weightcached.errors import CheckpointError


def test_regular_file_is_opened_for_reading_only(tmp_path: Path) -> None:
    """The descriptor reads, does not write and is not inherited; a link to the file is followed."""
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as owned:
        assert os.pread(owned.fileno(), 9, 0) == b"bytes"
        assert not os.get_inheritable(owned.fileno())
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(owned.fileno(), b"x")


def test_odd_files_are_refused_and_cannot_hang() -> None:
    """A directory, a FIFO without a writer, a device and a socket are each refused by what they are."""
    with open_folder() as folder, NoDescriptorLeaks():
        (folder / "dir").mkdir()
        os.mkfifo(folder / "fifo")
        (folder / "device").symlink_to("/dev/zero")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
        for name, words in (
            ("dir", "a directory"),
            ("fifo", "a FIFO"),
            ("device", "a device"),
            ("socket", "a socket"),
        ):
            with pytest.raises(CheckpointError, match=f"{words}, a regular file expected"):
                open_regular(folder / name)


def test_file_swapped_for_a_fifo_cannot_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO that takes a file's place between the look and the open is refused too, and its opening does not block."""
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    before = os.stat(tmp_path / "file")
    monkeypatch.setattr(documents, "file_status", lambda path: before)
    with NoDescriptorLeaks(), pytest.raises(CheckpointError, match="a FIFO, a regular file expected"):
        open_regular(tmp_path / "fifo")


def test_unreachable_paths_say_what_to_do(tmp_path: Path) -> None:
    """Nothing there, a dangling link, a loop of links, a file as a folder, an impossible name: each its own words."""
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_bytes(b"")
    for name, words in (
        ("none", "no such file or folder: give a local path"),
        ("dangling", "a link to gone, which is not there: fetch the checkpoint again"),
        ("loop", "not reachable: Too many levels of symbolic links"),
        ("file/inside", "not reachable: Not a directory"),
        ("a\0b", "it holds a NUL"),
        ("x" * 300, "not reachable: File name too long"),
    ):
        with pytest.raises(CheckpointError, match=words):
            file_status(tmp_path / name)


def test_no_permission_says_who_needs_it() -> None:
    """An unreadable file and a closed folder are different problems, and both name the user."""
    with open_folder() as folder:
        (folder / "file").write_bytes(b"")
        (folder / "file").chmod(0)
        (folder / "closed").mkdir(0o000)
        with as_nobody():
            with pytest.raises(CheckpointError, match=rf"not readable for uid {os.geteuid()}: give this user"):
                open_regular(folder / "file")
            with pytest.raises(CheckpointError, match=rf"not reachable for uid {os.geteuid()}: this user needs the x"):
                open_regular(folder / "closed" / "file")
        (folder / "closed").chmod(0o700)


def test_config_is_read_as_engines_read_it(tmp_path: Path) -> None:
    """Infinity and a key given twice are taken, as Python's JSON takes them; no file at all is {}."""
    path = tmp_path / "config.json"
    assert read_config(path) == {}
    path.write_text('{"time_step_limit": [0.0, Infinity], "x": 1, "x": 2, "architectures": null}')
    assert read_config(path) == {"time_step_limit": [0.0, float("inf")], "x": 2, "architectures": None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"architectures": ["A"]', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON: 'utf-8' codec"),
        (b"[1]", r"a JSON object expected, found \[1\]"),
        (b"[" * 100_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b'{"architectures": "A"}', "architectures must be names, found 'A'"),
        (b'{"architectures": [1]}', r"architectures must be names, found \[1\]"),
        (b'{"quantization_config": "fp8"}', "quantization_config must be an object, found 'fp8'"),
    ],
)
def test_broken_config_is_an_error(content: bytes, words: str, tmp_path: Path) -> None:
    """A config that is there and broken is never taken for none."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with NoDescriptorLeaks(), pytest.raises(CheckpointError, match=words) as caught:
        read_config(path)
    assert caught.value.file == str(path)


def test_dangling_config_is_an_error(tmp_path: Path) -> None:
    """A link to a config that is not there is an incomplete checkpoint, not one without a config."""
    (tmp_path / "config.json").symlink_to("gone")
    with pytest.raises(CheckpointError, match="a link to gone, which is not there"):
        read_config(tmp_path / "config.json")


def test_oversized_document_is_not_read(tmp_path: Path) -> None:
    """A document of over 100 MB is refused by its size."""
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(CheckpointError, match="100000001 bytes, at most 100000000 are read"):
        read_config(path)


def test_index_gives_map_and_size(tmp_path: Path) -> None:
    """Both parts of an index; its size only where it states a whole number."""
    path = tmp_path / "index.json"
    for metadata, total in (({"total_size": 7}, 7), ({"total_size": 7.5}, None), ({}, None), (None, None)):
        path.write_text(json.dumps({"metadata": metadata, "weight_map": {"w": "a.safetensors"}}))
        assert read_index(path) == ({"w": "a.safetensors"}, total)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "no weight_map: an object of tensor names to file names expected, found None"),
        ('{"weight_map": {}}', "no weight_map: .* found {}"),
        ('{"weight_map": ["a.safetensors"]}', r"no weight_map: .* found \['a.safetensors'\]"),
        ('{"weight_map": {"w": 1}}', "weight_map of 'w': a file name expected, found 1"),
        ('{"weight_map": {"w": "../a.safetensors"}}', r"a bare file name expected, found '\.\./a\.safetensors'"),
        ('{"weight_map": {"w": "/etc/a.safetensors"}}', "a bare file name expected, found '/etc/a.safetensors'"),
        ('{"weight_map": {"w": "sub/a.safetensors"}}', "a bare file name expected, found 'sub/a.safetensors'"),
        ('{"weight_map": {"w": "sub\\\\a.safetensors"}}', "a bare file name expected"),
        ('{"weight_map": {"w": ".."}}', r"a bare file name expected, found '\.\.'"),
        ('{"weight_map": {"w": ""}}', r"\*\.safetensors expected, found ''"),
        ('{"weight_map": {"w": "pytorch_model.bin"}}', r"\*\.safetensors expected, found 'pytorch_model.bin'"),
        ('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', "key 'w' occurs twice, expected once"),
        ('{"weight_map": {"w": "a.safetensors"}, "weight_map": {}}', "key 'weight_map' occurs twice"),
    ],
)
def test_bad_index_is_refused(content: str, words: str, tmp_path: Path) -> None:
    """No index leads out of its folder, to another format, or to two files for one tensor."""
    path = tmp_path / "index.json"
    path.write_text(content)
    with NoDescriptorLeaks(), pytest.raises(CheckpointError, match=words):
        read_index(path)


def test_listing_is_sorted_and_short() -> None:
    """Twenty names in order, then a count."""
    assert listing(["b", "a"]) == "'a', 'b'"
    assert listing([f"{i:02}" for i in range(25)]).endswith("'18', '19' and 5 more")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"architectures": ["\\ud800"]}', r"architectures must be names, found \['\\ud800'\]"),
        ('{"quantization_config": {"quant_method": "\\ud800"}}', r"quant_method must be a name, found '\\ud800'"),
    ],
)
def test_half_a_surrogate_in_what_the_key_holds_is_refused(content: str, words: str, tmp_path: Path) -> None:
    """JSON can spell it, UTF-8 cannot carry it: refused by the file's name instead of breaking the manifest."""
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_config(path)
