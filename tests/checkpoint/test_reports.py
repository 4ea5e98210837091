"""What users of other readers reported, and that it goes right here. Each test names the public report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.files import shard_bytes, write_sharded
from tests.checkpoint.strict_cases import entry, file_of
from tests.leaks import NoDescriptorLeaks
from weightcached.checkpoint.digest import digest_checkpoint
from weightcached.checkpoint.fileset import Checkpoint, open_checkpoint
from weightcached.errors import CheckpointChanged, CheckpointError


def write(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def problem_of(path: Path) -> str:
    with NoDescriptorLeaks():
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        return str(caught.value)


def names_of(checkpoint: Checkpoint) -> dict[str, list[str]]:
    return {file.name: [tensor.name for tensor in file.tensors] for file in checkpoint.files}


def test_header_over_the_limit_says_both_numbers(tmp_path: Path) -> None:
    """safetensors #668: a header of 132,095,296 bytes is refused with its length and the limit."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((132_095_296).to_bytes(8, "little"))
        file.truncate(132_095_304)
    assert "header of 132095296 bytes, at most 100000000 are allowed" in problem_of(path)


def test_duplicate_key_is_named(tmp_path: Path) -> None:
    """safetensors #401, llama.cpp #1603: a name that occurs twice is named, and neither entry wins."""
    one, two = (f'"layer.w":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(2))
    write(tmp_path, file_of(f"{{{one},{two}}}".encode(), 2))
    assert "key 'layer.w' occurs twice" in problem_of(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_lfs_pointer_is_called_one(name: str, tmp_path: Path) -> None:
    """DeepSeek-V3 #557, OmniParser #34: a clone without its large files is told what to run, whichever file it is."""
    write(tmp_path, shard_bytes(["w"]))
    write(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4321\n", name)
    assert problem_of(tmp_path) == f"{tmp_path / name}: a Git LFS pointer, not weights: run `git lfs pull`"


def test_truncated_download_says_what_is_missing(tmp_path: Path) -> None:
    """InvokeAI #7009, airllm #137, ComfyUI #3225: a cut shard is named, with the bytes expected and found."""
    write_sharded(tmp_path, {"a.safetensors": ["x"], "b.safetensors": ["y", "z"]})
    os.truncate(tmp_path / "b.safetensors", (tmp_path / "b.safetensors").stat().st_size - 3)
    problem = problem_of(tmp_path)
    assert problem.startswith(
        f"{tmp_path / 'b.safetensors'}: truncated: 8 bytes of tensors expected after the header, 5"
    )
    (tmp_path / "b.safetensors").write_bytes(shard_bytes(["y", "z"])[:50])
    assert "truncated inside the header: at least " in problem_of(tmp_path)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    """ComfyUI #15602: bytes after the last tensor load in one reader and fail in another; here they always fail."""
    write(tmp_path, shard_bytes(["w"]) + b"1234567")
    assert "7 trailing bytes: 4 bytes of tensors expected after the header, 11 found" in problem_of(tmp_path)


def test_offsets_cannot_reach_past_the_file(tmp_path: Path) -> None:
    """mlx #3363, ComfyUI PR #15722: no accepted tensor reaches past the file, however the offsets are forged."""
    for begin, end in ((0, 1 << 40), ((1 << 64) - 4, 1 << 64), (4, 8), (-4, 0)):
        write(tmp_path, file_of({"w": entry("U8", [4], begin, end)}, 4))
        assert "tensor 'w'" in problem_of(tmp_path)
    write(tmp_path, file_of({"w": entry("U8", [1 << 40], 0, 1 << 40)}, 4))
    assert "truncated: 1099511627776 bytes of tensors expected" in problem_of(tmp_path)


def test_empty_metadata_is_fine(tmp_path: Path) -> None:
    """fastsafetensors #88: ``"__metadata__": {}`` is valid."""
    write(tmp_path, file_of({"__metadata__": {}, "w": entry("U8", [1], 0, 1)}, 1))
    with open_checkpoint(tmp_path) as checkpoint:
        assert (names_of(checkpoint), checkpoint.files[0].header.metadata) == ({"model.safetensors": ["w"]}, {})


def test_tensor_named_metadata_is_refused_by_name(tmp_path: Path) -> None:
    """safetensors #849: a tensor called ``__metadata__`` can be written and never be read; the refusal says so."""
    write(tmp_path, file_of({"__metadata__": entry("U8", [1], 0, 1)}, 1))
    assert "a tensor is named __metadata__; that name is reserved" in problem_of(tmp_path)


def test_small_float_types_are_read(tmp_path: Path) -> None:
    """safetensors #839 and #840, fastsafetensors #69 and #79: F8_E8M0 scales and F4 weights are ordinary tensors."""
    head = {"scale": entry("F8_E8M0", [2], 0, 2), "w": entry("F4", [2, 32], 2, 34), "x": entry("F6_E3M2", [4], 34, 37)}
    write(tmp_path, file_of(head, 37))
    with open_checkpoint(tmp_path) as checkpoint:
        found = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in checkpoint.tensors()]
        assert found == [("scale", "F8_E8M0", (2,), 2), ("w", "F4", (2, 32), 32), ("x", "F6_E3M2", (4,), 3)]
        assert checkpoint.dtype == "float4_e2m1fn_x2"


def test_scalars_are_normal(tmp_path: Path) -> None:
    """InstantTensor PR #6: a tensor of no dimensions, as scales are, is one element."""
    write(tmp_path, file_of({"scale": entry("F32", [], 0, 4), "w": entry("F8_E4M3", [4], 4, 8)}, 8))
    with open_checkpoint(tmp_path) as checkpoint:
        assert [(tensor.shape, tensor.nbytes) for tensor in checkpoint.tensors()] == [((), 4), ((4,), 4)]


def test_index_naming_a_missing_shard_fails(tmp_path: Path) -> None:
    """sglang PR #32279: weights of a shard that is not there are never dropped in silence."""
    write_sharded(tmp_path, {"a.safetensors": ["x"], "b.safetensors": ["y"]})
    (tmp_path / "b.safetensors").unlink()
    assert "1 of its 2 files are missing: 'b.safetensors'" in problem_of(tmp_path)


def test_stale_index_does_not_fall_back_to_what_is_there(tmp_path: Path) -> None:
    """CoSER #3, mlx-vlm #1827: an index of 30 shards beside 15 others is an error that lists what is missing."""
    there = {f"model-{i:05}-of-00015.safetensors": [f"w{i}"] for i in range(1, 16)}
    write_sharded(tmp_path, there, weight_map={f"w{i}": f"model-{i:05}-of-00030.safetensors" for i in range(1, 31)})
    problem = problem_of(tmp_path)
    assert "30 of its 30 files are missing: 'model-00001-of-00030.safetensors', " in problem
    assert problem.endswith("and 10 more; fetch them, or the index that belongs to the files here")


def test_stray_file_beside_shards_is_not_merged(tmp_path: Path) -> None:
    """mlx-vlm #1464: a 4-bit model.safetensors beside bf16 shards of the same names is ignored and named."""
    write_sharded(tmp_path, {"model-00001-of-00002.safetensors": ["x"], "model-00002-of-00002.safetensors": ["y"]})
    write(tmp_path, file_of({"x": entry("F4", [8], 0, 4), "x.scales": entry("U8", [1], 4, 5)}, 5))
    with open_checkpoint(tmp_path) as checkpoint:
        assert names_of(checkpoint) == {
            "model-00001-of-00002.safetensors": ["x"],
            "model-00002-of-00002.safetensors": ["y"],
        }
        assert checkpoint.ignored == ("model.safetensors",)


def test_one_set_is_loaded_and_counted(tmp_path: Path) -> None:
    """vllm #40765, gpustack #2257: consolidated files beside shards are neither loaded nor counted."""
    write_sharded(tmp_path, {"model-00001-of-00001.safetensors": ["x", "y"]})
    size = (tmp_path / "model-00001-of-00001.safetensors").stat().st_size
    write(tmp_path, shard_bytes(["layers.0.x", "layers.0.y"]), "consolidated-00001-of-00001.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.nbytes, checkpoint.tensor_bytes) == (size, 8)
        assert checkpoint.ignored == ("consolidated-00001-of-00001.safetensors",)


def test_index_decides_between_two_shards_with_one_name(tmp_path: Path) -> None:
    """spark-vllm-docker PR #134: of a name in two shards, the one in the shard that the index gives is loaded."""
    shards = {"model-00039.safetensors": ["x", "both"], "model-00040.safetensors": ["both", "y"]}
    weight_map = {"x": "model-00039.safetensors", "both": "model-00040.safetensors", "y": "model-00040.safetensors"}
    write_sharded(tmp_path, shards, weight_map)
    with open_checkpoint(tmp_path) as checkpoint:
        assert names_of(checkpoint) == {"model-00039.safetensors": ["x"], "model-00040.safetensors": ["both", "y"]}
        assert [tensor.name for tensor in checkpoint.files[0].header.tensors] == ["x", "both"]
        assert checkpoint.tensor_bytes == 12
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "2 files and no model.safetensors.index.json that says which belong together" in problem_of(tmp_path)


def test_a_head_of_its_own_is_read_though_the_config_ties_it(tmp_path: Path) -> None:
    """vllm #51063: what the file holds is read, whatever the config says of ties; nothing is dropped or made up."""
    for names in (["model.embed_tokens.weight", "lm_head.weight"], ["model.embed_tokens.weight"]):
        for tied in ("true", "false"):
            write(tmp_path, shard_bytes(names))
            (tmp_path / "config.json").write_text(f'{{"tie_word_embeddings": {tied}}}')
            with open_checkpoint(tmp_path) as checkpoint:
                assert names_of(checkpoint) == {"model.safetensors": names}


def test_truncation_under_the_reader_is_an_error_not_a_signal(tmp_path: Path) -> None:
    """TRT-LLM PR #17368, sglang #6083, safetensors #762: a file that shrinks while it is read ends in an exception."""
    head = {"w": entry("U8", [20 << 20], 0, 20 << 20)}
    write(tmp_path, file_of(head, 20 << 20))
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", 5 << 20)
        with pytest.raises(CheckpointChanged, match=r"shrank while it was read: \d+ bytes expected, 5242880 found"):
            digest_checkpoint(checkpoint)
        mapped = Path("/proc/self/maps").read_text()
        assert str(tmp_path) not in mapped


def test_hub_cache_links_keep_their_names(tmp_path: Path) -> None:
    """Minimax-H3-Turbo #12, omlx #3224: links into a blob store are judged by their own names, folder or file."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0f1e"
    write(blobs, shard_bytes(["w"]), "aa" * 32)
    write(blobs, b'{"architectures": ["A"]}', "bb" * 20)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{'aa' * 32}")
    (snapshot / "config.json").symlink_to(f"../../blobs/{'bb' * 20}")
    for path in (snapshot, snapshot / "model.safetensors"):
        with open_checkpoint(path) as checkpoint:
            assert names_of(checkpoint) == {"model.safetensors": ["w"]}
            assert checkpoint.architecture == "A"
            assert checkpoint.files[0].source.inode == (blobs / ("aa" * 32)).stat().st_ino
            checkpoint.recheck()
    assert "only files named *.safetensors" in problem_of(blobs / ("aa" * 32))


def test_unfinished_hub_download_never_counts(tmp_path: Path) -> None:
    """A link to a blob that is still being written is refused, complete as its bytes may look."""
    write(tmp_path / "blobs", shard_bytes(["w"]), "aa.incomplete")
    (tmp_path / "model.safetensors").symlink_to("blobs/aa.incomplete")
    assert "still being downloaded" in problem_of(tmp_path)
