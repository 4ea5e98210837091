"""safetensors/files.py: a file from the cache behaves as the library's, but for where its bytes come from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from tests.client.handmade import RunningWorker
from tests.safetensors.conftest import Cache
from weightcached.safetensors import safe_open
from weightcached.safetensors.files import CachedSlice, RealFile

INDICES: list[Any] = [
    0, -1, 3, -4, slice(0, 2), slice(0, 9), slice(None, None, 2), slice(None, None, -1), slice(2, 1), (0, 0), (0, 0, 0),
    (0, slice(1, 3)), ..., (..., 0), None, True, [0, 1], (slice(None), [1, 2]), torch.tensor(0), (), "x",
]  # fmt: skip


def outcome(call: Any) -> Any:
    """What a call gives or raises, to compare."""
    try:
        found = call()
    except Exception as error:  # noqa: BLE001 - whichever it is, the other must raise the same
        return type(error), str(error)
    return found


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """As the fixture `cache` changes what it publishes."""
    if not tensor.numel():
        return tensor
    return (tensor.reshape(-1).view(torch.uint8) ^ 1).view(tensor.dtype).reshape(tensor.shape)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*raw)


def test_tensors_come_from_the_cache(file: Path, cache: Cache) -> None:
    """Every tensor has the cache's bytes, and the file's name, order, dtype and shape; so have those of get_tensors."""
    cache(file)
    real = RealFile(file, "pt")

    with safe_open(file, "pt") as ours:
        assert ours.keys() == real.keys()
        assert ours.offset_keys() == real.offset_keys()
        assert ours.metadata() == real.metadata()
        for name in real.keys():  # noqa: SIM118
            assert same(ours.get_tensor(name), flipped(real.get_tensor(name))), name
        assert list(ours.get_tensors()) == list(real.get_tensors())
        assert all(same(tensor, flipped(real.get_tensor(name))) for name, tensor in ours.get_tensors().items())


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_slices_are_the_librarys(file: Path, cache: Cache, index: Any) -> None:
    """Each way to index gives the cached part, or raises the library's error."""
    cache(file, flip=False)
    with safe_open(file, "pt") as ours:
        part, theirs = ours.get_slice("b.weight"), RealFile(file, "pt").get_slice("b.weight")
        assert isinstance(part, CachedSlice)
        assert (part.get_shape(), part.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
        found, expected = outcome(lambda: part[index]), outcome(lambda: theirs[index])

    if isinstance(expected, torch.Tensor):
        assert same(found, expected)
        assert found.stride() == expected.stride()
    else:
        assert found == expected


def test_errors_are_the_librarys(file: Path, cache: Cache) -> None:
    """Unknown names, wrong types, a closed file, and whatever cannot be opened."""
    cache(file)
    ours, real = safe_open(file, "pt"), RealFile(file, "pt")
    for call in ("get_tensor", "get_slice"):
        for name in ("zz", 1):
            assert outcome(lambda c=call, n=name: getattr(ours, c)(n)) == outcome(
                lambda c=call, n=name: getattr(real, c)(n)
            )
    for opened in (ours, real):
        opened.__exit__(None, None, None)
    for call, arguments in [("keys", ()), ("metadata", ()), ("get_tensors", ()), ("get_tensor", ("a",))]:
        assert outcome(lambda c=call, a=arguments: getattr(ours, c)(*a)) == outcome(
            lambda c=call, a=arguments: getattr(real, c)(*a)
        )
    wrong: list[tuple[Any, ...]] = [("/nope", "pt"), (file, "xx"), (file, "pt", "foo"), (file,), (None, "pt")]
    for given in wrong:
        expected = outcome(lambda g=given: RealFile(*g))
        assert outcome(lambda g=given: safe_open(*g)) == expected


def test_tensors_may_be_written(file: Path, cache: Cache) -> None:
    """What is written to a tensor is seen in this opening of the file only, and is not in the cache."""
    cache(file)
    first, second = safe_open(file, "pt"), safe_open(file, "pt")
    before = first.get_tensor("a").clone()

    first.get_tensor("a").fill_(77)

    assert first.get_tensor("a")[0] == 77  # as in the library: one mapping for each opening
    assert torch.equal(second.get_tensor("a"), before)
    assert torch.equal(safe_open(file, "pt").get_tensor("a"), before)


def test_each_tensor_has_a_storage_of_its_own(file: Path, cache: Cache) -> None:
    """As from the library, so that saving one tensor does not write the slab."""
    cache(file)
    tensor = safe_open(file, "pt").get_tensor("b.weight")

    assert tensor.untyped_storage().nbytes() == 48
    assert tensor.storage_offset() == 0


def test_the_shard_is_in_use_while_a_tensor_lives(file: Path, cache: Cache, worker: RunningWorker) -> None:
    """Opening takes no lease; one is held while tensors live, the file closed or not, and ends with them."""
    cache(file)
    with safe_open(file, "pt") as opened:
        assert not worker.leases()
        held = [opened.get_tensor("a")]
    del opened
    assert len(worker.leases()) == 1
    assert held[0].numel() == 6

    worker.wait_released(held.clear)

    assert not worker.leases()


def test_files_of_a_checkpoint_share_one_lease(tmp_path: Path, cache: Cache, worker: RunningWorker) -> None:
    """Two files of a checkpoint are one mapping, and each has its own names."""
    for number in (1, 2):
        save_file({f"t{number}": torch.full((4,), number)}, tmp_path / f"{number}.safetensors")
    cache(tmp_path / "1.safetensors", tmp_path / "2.safetensors")

    one, two = (safe_open(tmp_path / f"{n}.safetensors", "pt").get_tensor(f"t{n}") for n in (1, 2))

    assert len(worker.leases()) == 1
    assert same(one, flipped(torch.full((4,), 1)))
    assert same(two, flipped(torch.full((4,), 2)))


def test_a_name_in_two_files_is_read_from_disk(tmp_path: Path, cache: Cache) -> None:
    """The manifest does not say which one was taken, so none is guessed; other names are from the cache."""
    for number in (1, 2):
        tensors = {"both": torch.full((4,), number), f"own{number}": torch.full((4,), number)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    cache(tmp_path / "1.safetensors", tmp_path / "2.safetensors")

    with safe_open(tmp_path / "1.safetensors", "pt") as opened:
        assert same(opened.get_tensor("both"), torch.full((4,), 1))
        assert same(opened.get_tensor("own1"), flipped(torch.full((4,), 1)))


def test_nothing_is_guessed_when_other_files_are_gone(tmp_path: Path, cache: Cache) -> None:
    """They may have had the same names."""
    for number in (1, 2):
        save_file({f"t{number}": torch.full((4,), number)}, tmp_path / f"{number}.safetensors")
    cache(tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    (tmp_path / "2.safetensors").unlink()

    assert same(safe_open(tmp_path / "1.safetensors", "pt").get_tensor("t1"), torch.full((4,), 1))


def test_a_changed_file_is_read_from_disk(file: Path, cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    """Written again with the same content it is another file; INFO says so once."""
    cache(file)
    file.write_bytes(file.read_bytes())
    with caplog.at_level(logging.INFO, "weightcached"):
        opened = [safe_open(file, "pt") for _ in range(2)]

    assert all(type(found) is RealFile for found in opened)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no cached shard was loaded from this file" in caplog.text


def test_a_link_is_the_file_it_names(file: Path, cache: Cache, tmp_path: Path) -> None:
    """As in a hub's cache, whose snapshots are links."""
    cache(file)
    (tmp_path / "link.safetensors").symlink_to(file)

    assert type(safe_open(tmp_path / "link.safetensors", "pt")) is safe_open


@pytest.mark.parametrize("key", [{"cast": "float16"}, {"tensor_parallel_size": 2}, {"layout": "vllm"}, {"rules": "r"}])
def test_only_a_whole_copy_as_on_disk_is_used(file: Path, cache: Cache, key: dict[str, Any]) -> None:
    """A shard that was cast, cut or processed is passed over."""
    cache(file, key=key)

    assert type(safe_open(file, "pt")) is RealFile


def test_without_a_service_it_is_the_library(file: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The library's own object, its own tensors, and nothing above INFO."""
    with caplog.at_level(logging.DEBUG, "weightcached"):
        opened = safe_open(file, "pt")

    assert type(opened) is RealFile
    assert isinstance(opened, safe_open)
    assert all(record.levelno <= logging.INFO for record in caplog.records)


def test_other_frameworks_and_devices_are_the_librarys(file: Path, cache: Cache) -> None:
    """numpy arrays, and a device without a cache."""
    cache(file)

    assert type(safe_open(file, "np")) is RealFile
    assert type(safe_open(file, "pt", "mps")) is RealFile


def test_a_broken_cache_is_one_warning(
    file: Path, cache: Cache, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A runtime directory that anybody may write to is not trusted: the disk is read, and a warning says so once."""
    cache(file)
    runtime_dir.chmod(0o777)

    for _ in range(2):
        assert torch.equal(safe_open(file, "pt").get_tensor("a"), RealFile(file, "pt").get_tensor("a"))

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "files are read from disk" in caplog.text


def test_a_shard_that_goes_in_between_is_a_miss(file: Path, cache: Cache, worker: RunningWorker) -> None:
    """Found when the file was opened, gone when the first tensor is asked for: the disk is read."""
    cache(file)
    opened = safe_open(file, "pt")
    assert type(opened) is safe_open
    worker.stop()

    assert torch.equal(opened.get_tensor("a"), RealFile(file, "pt").get_tensor("a"))


def test_an_unknown_mode_is_refused(file: Path) -> None:
    """`mode` has two words."""
    with pytest.raises(ValueError, match="must be one of private, map"):
        safe_open(file, "pt", mode="copy")  # type: ignore[arg-type]


def test_the_library_is_not_changed_by_the_import() -> None:
    """Only the hook does that."""
    assert safetensors.safe_open is RealFile
