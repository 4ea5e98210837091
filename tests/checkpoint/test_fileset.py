"""Which files make a checkpoint, what it says of itself, and that a change under it is seen."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.files import INDEX, as_nobody, open_folder, shard_bytes, wait_for_tick, write_sharded
from tests.checkpoint.sets import CASES, SetCase
from tests.checkpoint.strict_cases import entry, file_of
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint import fileset
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.errors import CheckpointChanged, CheckpointError

TWO = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}


def refusal(path: str | Path) -> CheckpointError:
    """The error of opening, which must leave no descriptor behind."""
    with NoDescriptorLeaks():
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_set(case: SetCase, tmp_path: Path) -> None:
    """Each layout gives the files and tensors of its table, names what it leaves out, or is refused in its words."""
    path = case.build(tmp_path / "models")
    if case.refusal is not None:
        assert case.refusal in str(refusal(path))
        return
    with NoDescriptorLeaks(), open_checkpoint(path) as checkpoint:
        assert {file.name: [tensor.name for tensor in file.tensors] for file in checkpoint.files} == {
            name: list(tensors) for name, tensors in case.files.items()
        }
        assert checkpoint.ignored == case.ignored
        checkpoint.recheck()


def test_one_file(tmp_path: Path) -> None:
    """A file by its path: opened read-only and close-on-exec, its state recorded, and closed with the checkpoint."""
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(shard_bytes(["a", "b"]))
    status = path.stat()
    with NoDescriptorLeaks():
        with open_checkpoint(str(path)) as checkpoint:
            [file] = checkpoint.files
            assert (checkpoint.path, checkpoint.folder, file.name) == (path, tmp_path, "adapter.safetensors")
            assert file.source.stat == (
                status.st_dev,
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
            assert file.source.digest is None
            assert os.path.samestat(os.fstat(file.fd.fileno()), status)
            assert not os.get_inheritable(file.fd.fileno())
            assert [tensor.name for tensor in file.tensors] == ["a", "b"]
            assert file.tensors == file.header.tensors
            assert (checkpoint.nbytes, checkpoint.tensor_bytes) == (status.st_size, 8)
            assert (checkpoint.config, checkpoint.ignored) == ({}, ())
        assert file.fd.closed
        checkpoint.close()  # a second time does nothing


def test_folder_with_one_file(tmp_path: Path) -> None:
    """A folder with exactly one safetensors file is that file, whatever its name, with the folder's config."""
    (tmp_path / "weights.safetensors").write_bytes(shard_bytes(["w"]))
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert [file.name for file in checkpoint.files] == ["weights.safetensors"]
        assert checkpoint.architecture == "BertModel"


def test_file_and_its_folder_say_the_same(tmp_path: Path) -> None:
    """The config beside a single file counts too, so that both ways to name a checkpoint give one key."""
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(["w"]))
    (tmp_path / "config.json").write_text('{"architectures": ["A", "B"], "quantization_config": {"bits": 4}}')
    with open_checkpoint(tmp_path) as folder, open_checkpoint(tmp_path / "model.safetensors") as file:
        assert file.config == folder.config
        assert (file.architecture, file.quantization) == ("A", {"bits": 4})
        assert [found.source for found in file.files] == [found.source for found in folder.files]


def test_config_without_the_parts_of_a_key(tmp_path: Path) -> None:
    """No architecture and no quantisation are None."""
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(["w"]))
    (tmp_path / "config.json").write_text('{"architectures": []}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.architecture, checkpoint.quantization) == (None, None)


def test_shards_in_name_order(tmp_path: Path) -> None:
    """With an index the files come in the order of their names, whatever the order in the index."""
    write_sharded(tmp_path, dict(reversed(TWO.items())))
    with open_checkpoint(tmp_path) as checkpoint:
        assert [file.name for file in checkpoint.files] == sorted(TWO)
        assert [tensor.name for tensor in checkpoint.tensors()] == ["a", "b", "c"]
        assert checkpoint.tensor_bytes == 12


def test_relative_path_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is made absolute when it is opened, so `recheck` looks at the same file afterwards."""
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(["w"]))
    monkeypatch.chdir(tmp_path)
    with open_checkpoint("model.safetensors") as checkpoint:
        monkeypatch.chdir("/")
        checkpoint.recheck()
        assert checkpoint.path == tmp_path / "model.safetensors"


def test_bytes_decide_the_dtype(tmp_path: Path) -> None:
    """The floating type with the most bytes, in torch's name: integers and the number of tensors do not count."""
    head = {
        "q": entry("I32", [100], 0, 400),
        "w": entry("BF16", [10], 400, 420),
        "s": entry("F32", [1], 420, 424),
        "t": entry("F32", [1], 424, 428),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(head, 428))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("head", "nbytes", "dtype"),
    [
        ({}, 0, None),
        ({"a": entry("I64", [1], 0, 8)}, 8, None),
        ({"a": entry("F6_E2M3", [4], 0, 3)}, 3, None),  # torch has no such type
        ({"a": entry("F16", [1], 0, 2), "b": entry("BF16", [1], 2, 4)}, 4, "float16"),
        ({"b": entry("BF16", [1], 0, 2), "a": entry("F16", [1], 2, 4)}, 4, "float16"),
    ],
)
def test_dtype_in_doubt(head: dict[str, object], nbytes: int, dtype: str | None, tmp_path: Path) -> None:
    """No floating tensor, or one that torch lacks, is None; between equals the answer does not hang on the order."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(head, nbytes))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.dtype == dtype


def test_stray_weights_are_named(tmp_path: Path) -> None:
    """Beside an index every other weight file is ignored and named; tokenizers and the like are not weights."""
    write_sharded(tmp_path, TWO)
    strays = [
        "consolidated.00.pth",
        "consolidated.safetensors",
        "model.safetensors",
        "pytorch_model-00001-of-00002.bin",
    ]
    for name in [*strays, "tokenizer.json", "training_args.bin", "README.md"]:
        (tmp_path / name).write_bytes(b"not even weights")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.ignored == tuple(strays)


def test_strays_beside_one_file(tmp_path: Path) -> None:
    """Without an index too: other formats and hidden companions beside the one file are ignored and named."""
    for name in ("model.safetensors", "._model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(shard_bytes(["w"]))
    with open_checkpoint(tmp_path) as checkpoint:
        assert [file.name for file in checkpoint.files] == ["model.safetensors"]
        assert checkpoint.ignored == ("._model.safetensors", "pytorch_model.bin")


def test_file_in_a_folder_that_cannot_be_listed() -> None:
    """A file given by its path needs no permission to list its folder; what lies beside it is then not known."""
    with open_folder() as folder:
        (folder / "unlisted").mkdir()
        for name in ("model.safetensors", "other.safetensors"):
            (folder / "unlisted" / name).write_bytes(shard_bytes(["w"]))
        (folder / "unlisted").chmod(0o311)
        with as_nobody(), open_checkpoint(folder / "unlisted" / "model.safetensors") as checkpoint:
            assert ([file.name for file in checkpoint.files], checkpoint.ignored) == (["model.safetensors"], ())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "no *.safetensors file in this folder: give the folder that holds the weights"),
        (("config.json", "README.md"), "no *.safetensors file in this folder"),
        (("pytorch_model.bin",), "only *.safetensors files are read, found 'pytorch_model.bin': convert them"),
        (("model.safetensors.incomplete",), "'model.safetensors.incomplete': still being downloaded: wait for it"),
        ((".model.safetensors",), "no *.safetensors file in this folder"),
    ],
)
def test_folder_without_weights(names: tuple[str, ...], words: str, tmp_path: Path) -> None:
    """An empty folder, one of other formats and an unfinished download each say what to do."""
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    assert words in refusal(tmp_path).problem


def test_path_to_something_else(tmp_path: Path) -> None:
    """Nothing, another format, and the index instead of its folder: each a refusal with the next step."""
    write_sharded(tmp_path, TWO)
    (tmp_path / "model.bin").write_bytes(b"")
    assert "no such file or folder" in refusal(tmp_path / "none").problem
    assert "only files named *.safetensors and folders of them" in refusal(tmp_path / "model.bin").problem
    assert "give the folder that holds it" in refusal(tmp_path / INDEX).problem
    assert "holds a NUL" in refusal("a\0b.safetensors").problem


def test_odd_files_in_place_of_weights(tmp_path: Path) -> None:
    """A FIFO, a device and a folder under a weight file's name are refused, and the FIFO does not hang."""
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")
    assert "a FIFO, a regular file expected" in refusal(tmp_path / "fifo.safetensors").problem
    assert "a device, a regular file expected" in refusal(tmp_path / "device.safetensors").problem
    folder = tmp_path / "folder"
    (folder / "model.safetensors").mkdir(parents=True)
    assert "a directory, a regular file expected" in refusal(folder).problem


def test_no_permission() -> None:
    """An unreadable file, and a folder that may be entered but not listed, name the user who needs permission."""
    with open_folder() as folder:
        path = folder / "model.safetensors"
        path.write_bytes(shard_bytes(["w"]))
        path.chmod(0)
        (folder / "unlisted").mkdir(0o311)
        with as_nobody():
            uid = os.geteuid()
            assert f"not readable for uid {uid}" in refusal(path).problem
            assert f"not readable for uid {uid}" in refusal(folder).problem
            assert f"cannot be listed by uid {uid}: Permission denied" in refusal(folder / "unlisted").problem


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors"])
def test_impossible_names_in_the_index(name: str, tmp_path: Path) -> None:
    """A name that no file can have is refused as such."""
    write_sharded(tmp_path, {}, weight_map={"w": name})
    assert "a character that no file name can have" in refusal(tmp_path).problem


def test_all_missing_shards_are_listed(tmp_path: Path) -> None:
    """Every missing shard is named at once, a dangling link included."""
    write_sharded(tmp_path, TWO)
    document = json.loads((tmp_path / INDEX).read_text())
    document["weight_map"] |= {"d": "third.safetensors", "e": "fourth.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps(document))
    (tmp_path / "third.safetensors").symlink_to("gone")
    error = refusal(tmp_path)
    assert error.file == str(tmp_path / INDEX)
    assert "2 of its 4 files are missing: 'fourth.safetensors', 'third.safetensors'; fetch them" in error.problem


def test_tensor_missing_from_its_shard(tmp_path: Path) -> None:
    """A tensor that the index gives to a file which lacks it is an error that names both."""
    first, second = sorted(TWO)
    write_sharded(tmp_path, TWO, weight_map={"a": first, "b": second, "c": second})
    error = refusal(tmp_path)
    assert error.file.endswith("model-00002-of-00002.safetensors")
    assert "lacks 1 tensors that model.safetensors.index.json expects in it: 'b'" in error.problem


def test_tensor_missing_from_the_index(tmp_path: Path) -> None:
    """A tensor that a listed file holds and the index does not know is an error, not left out in silence."""
    write_sharded(tmp_path, TWO, weight_map={"a": "model-00001-of-00002.safetensors"})
    error = refusal(tmp_path)
    assert error.file.endswith("model-00001-of-00002.safetensors")
    assert "holds 1 tensors that model.safetensors.index.json does not list: 'b'" in error.problem


def test_headers_are_validated_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad first file is refused before the second is opened; a bad second one closes the first."""
    write_sharded(tmp_path, TWO)
    opened = []
    open_regular = fileset.open_regular
    monkeypatch.setattr(fileset, "open_regular", lambda path: opened.append(path.name) or open_regular(path))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"garbage")
    assert refusal(tmp_path).file.endswith("model-00002-of-00002.safetensors")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"garbage")
    opened.clear()
    assert refusal(tmp_path).file.endswith("model-00001-of-00002.safetensors")
    assert opened == ["model-00001-of-00002.safetensors"]


def test_broken_config_refuses_the_checkpoint(tmp_path: Path) -> None:
    """A config that cannot be read is an error, and the weights opened before it are closed."""
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(["w"]))
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path).file == str(tmp_path / "config.json")


def test_stale_total_size_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A total_size that does not fit is reported and refuses nothing; one that fits is not mentioned."""
    with caplog.at_level(logging.INFO, logger=fileset.__name__):
        open_checkpoint(write_sharded(tmp_path / "true", TWO, metadata={"total_size": 12})).close()
        open_checkpoint(write_sharded(tmp_path / "none", TWO)).close()
        assert caplog.records == []
        open_checkpoint(write_sharded(tmp_path / "stale", TWO, metadata={"total_size": 24})).close()
    assert "total_size states 24 bytes, its tensors have 12" in caplog.text


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def rewrite(path: Path) -> None:
    """One byte in place, and the old mtime put back, as a careless sync program does."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def swap_folder(path: Path) -> None:
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replace, "was replaced while it was read: inode"),
        (truncate, "shrank while it was read: "),
        (extend, "grew while it was read: "),
        (os.utime, "was written or altered while it was read"),
        (rewrite, "was written or altered while it was read"),
        (os.unlink, "vanished while it was read"),
        (swap_folder, "cannot be reached any more while it is read: Not a directory"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_change_under_an_open_checkpoint(change: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    """Every change between open and recheck is seen and has its own words; without one, recheck is silent."""
    path = tmp_path / "folder" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(shard_bytes(["w"]))
    wait_for_tick(path)
    with open_checkpoint(path) as checkpoint:
        checkpoint.recheck()
        change(path)
        with pytest.raises(CheckpointChanged, match=words) as caught:
            checkpoint.recheck()
        assert caught.value.file == str(path)


def test_change_behind_a_link(tmp_path: Path) -> None:
    """A link that is turned to another file of equal content is a replaced file."""
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(shard_bytes(["w"]))
    link = tmp_path / "model.safetensors"
    link.symlink_to("one")
    with open_checkpoint(link) as checkpoint:
        link.unlink()
        link.symlink_to("two")
        with pytest.raises(CheckpointChanged, match="was replaced"):
            checkpoint.recheck()


def test_change_that_the_path_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The open file is looked at too: a path may still answer with the old state (layered and network file systems)."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard_bytes(["w"]))
    with open_checkpoint(path) as checkpoint:
        before = os.stat(path)
        truncate(path)
        monkeypatch.setattr(os, "stat", lambda path, **_: before)
        with pytest.raises(CheckpointChanged, match="shrank"):
            checkpoint.recheck()
        monkeypatch.undo()


def test_change_to_any_shard(tmp_path: Path) -> None:
    """All files are looked at again, not the first alone."""
    write_sharded(tmp_path, TWO)
    with open_checkpoint(tmp_path) as checkpoint:
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointChanged, match="vanished"):
            checkpoint.recheck()


BLOB = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("target", "digest"),
    [
        (f"blobs/{BLOB}", f"sha256:{BLOB}"),
        (f"blobs/{BLOB[:40]}", None),
        (f"blobs/{BLOB.upper()}", None),
        (f"blobs/{BLOB}0", None),
        (f"other/{BLOB}", None),
        (f"blobs/sub/{BLOB}", None),
    ],
)
def test_a_blobs_name_is_its_digest(target: str, digest: str | None, tmp_path: Path) -> None:
    """A link to blobs/<64 lower-case hexadecimal digits> gives the digest; nothing else that a link leads to does."""
    blob = tmp_path / target
    blob.parent.mkdir(parents=True)
    blob.write_bytes(shard_bytes(["w"]))
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "model.safetensors").symlink_to(blob)
    (tmp_path / "again").symlink_to("snapshots")
    for path in (tmp_path / "snapshots", tmp_path / "again", tmp_path / "again" / "model.safetensors"):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.blob_digests() == [digest]


def test_a_link_that_leads_elsewhere_by_now_has_no_digest(tmp_path: Path) -> None:
    """The name is that of the open file, or there is none: the link was set to another blob, or the blob is gone."""
    link = tmp_path / "model.safetensors"
    (tmp_path / "blobs").mkdir()
    for name in (BLOB, BLOB[::-1]):
        (tmp_path / "blobs" / name).write_bytes(shard_bytes(["w"]))
    link.symlink_to(tmp_path / "blobs" / BLOB)
    with open_checkpoint(link) as checkpoint:
        link.unlink()
        link.symlink_to(tmp_path / "blobs" / BLOB[::-1])
        assert checkpoint.blob_digests() == [None]
        (tmp_path / "blobs" / BLOB[::-1]).unlink()
        assert checkpoint.blob_digests() == [None]
        link.unlink()
        assert checkpoint.blob_digests() == [None]


def test_real_model(minilm: Path) -> None:
    """A real model as it is published: every tensor, its type and its class."""
    with NoDescriptorLeaks(), open_checkpoint(minilm) as checkpoint:
        assert [file.name for file in checkpoint.files] == ["model.safetensors"]
        names = {tensor.name: tensor for tensor in checkpoint.tensors()}
        assert len(names) == 104
        assert names["embeddings.word_embeddings.weight"].shape == (30522, 384)
        assert (checkpoint.dtype, checkpoint.architecture, checkpoint.quantization) == ("float32", "BertModel", None)
        assert checkpoint.tensor_bytes + checkpoint.files[0].header.data_start == checkpoint.nbytes == 90_868_376
        checkpoint.recheck()
