"""Fuzzes the two documents beside the weights, index and config, in a folder of real files.

An input is one byte and a text: an even byte makes the text the index of two shards, an odd one the config of one file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.checkpoint.files import INDEX, shard_bytes, write_sharded
from tests.fuzz.harness import fuzz, judge_config, judge_index

SHARDS = {"one.safetensors": ["a", "b"], "two.safetensors": ["b", "c"]}
MAP = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}


def make_folders(root: Path) -> tuple[Path, Path]:
    """A folder of two shards with an index, and one of a single file; above them a file to stray to."""
    (root / "outside.safetensors").write_bytes(shard_bytes(["a"]))
    single = root / "single"
    single.mkdir()
    (single / "model.safetensors").write_bytes(shard_bytes(["w"]))
    return write_sharded(root / "sharded", SHARDS, MAP), single


def seeds() -> Iterator[bytes]:
    """Good documents, and one of each kind that is refused."""
    for weight_map in (
        MAP,
        {**MAP, "d": "two.safetensors"},
        {**MAP, "a": "three.safetensors"},
        {**MAP, "a": "../outside.safetensors"},
        {**MAP, "a": "/dev/null"},
        {**MAP, "a": 1},
        {},
    ):
        yield b"\0" + json.dumps({"metadata": {"total_size": 12}, "weight_map": weight_map}).encode()
    yield b'\0{"weight_map":{"a":"one.safetensors","a":"two.safetensors"}}'
    yield b"\0version https://git-lfs.github.com/spec/v1\n"
    for config in (
        {"architectures": ["A", "B"], "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"architectures": "A"},
        {"architectures": [1]},
        {"quantization_config": []},
        {"architectures": ["\ud800"], "quantization_config": {"quant_method": "\ud800"}},
    ):
        yield b"\1" + json.dumps(config).encode()


def main() -> None:
    # Not removed at the end: libFuzzer ends the process where it is.
    sharded, single = make_folders(Path(tempfile.mkdtemp(prefix="wc-fuzz-")))

    def one_input(data: bytes) -> None:
        kind, text = data[0] if data else 0, data[1:]
        if kind % 2 == 0:
            (sharded / INDEX).write_bytes(text)
            judge_index(sharded)
        else:
            (single / "config.json").write_bytes(text)
            judge_config(single)

    fuzz(one_input, seeds(), mutated_from=1)


if __name__ == "__main__":
    main()
