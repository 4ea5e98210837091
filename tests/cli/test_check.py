"""cli.check: what would be loaded where, told without loading, with an exit code that says whether it would work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.cli.check import slab_bytes
from weightcached.devices import host_memory
from weightcached.loader.plan import plan_load
from weightcached.shard.dtypes import tensor_bytes

Tensors = dict[str, tuple[str, list[int]]]
SMALL: Tensors = {"a.weight": ("F32", [10, 10]), "a.bias": ("F32", [3])}
SMALL_SLAB = 512 + 12  # 400 bytes, then the next multiple of 256, then 12 bytes


def write_file(path: Path, tensors: Tensors) -> None:
    """A safetensors file of zeros: 8 bytes of header length, JSON, data."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = tensor_bytes(dtype, shape)
        assert nbytes is not None
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with one good checkpoint, `small`: two files, a config.json, and a file that is not part of it."""
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for file, (name, entry) in zip(names, SMALL.items(), strict=True):
        write_file(folder / file, {name: entry})
    index = {"metadata": {}, "weight_map": dict(zip(SMALL, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    write_file(folder / "stray.safetensors", {"b": ("F16", [1])})
    return folder.parent


def check(tmp_path: Path, config: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `weightcached check` on a config with this text, which serves host-0 unless it says otherwise."""
    file = tmp_path / "model.toml"
    file.write_text(config if config.startswith("devices") else 'devices = ["host-0"]\n' + config)
    command = [sys.executable, "-m", "weightcached", "check", "--config", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "FORCE_COLOR": "1"})


def model(name: str, checkpoint: Path, more: str = "") -> str:
    return f'[[model]]\nname = "{name}"\ncheckpoint = "{checkpoint}"\n{more}\n'


def test_good_config(tmp_path: Path, models: Path) -> None:
    """Tables say what goes where, with size, dtype, counts and the ignored file; nothing on stderr, exit 0."""
    done = check(tmp_path, model("small", models / "small"))
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["small", "host-0", "yes", "524", "B", "float32", "2", "2", "stray.safetensors"] in rows
    device = next(row for row in rows if row and row[0] == "host-0")
    assert device[-3:] == ["524", "B", "yes"]
    assert "\x1b" not in done.stdout


def test_json(tmp_path: Path, models: Path) -> None:
    """--json is one object with the same facts; bytes are integers."""
    done = check(tmp_path, 'memory_limit = "50%"\n' + model("small", models / "small"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    total = host_memory(0).total
    (device,) = answer.pop("devices")
    assert device.pop("free") > 0
    assert device == {
        "name": "host-0",
        "model": "host memory",
        "total": total,
        "limit": total // 2,
        "needed": SMALL_SLAB,
        "fits": True,
    }
    files = list((models / "small").glob("model-*"))
    assert answer == {
        "schema": 1,
        "config": str(tmp_path / "model.toml"),
        "models": [
            {
                "name": "small",
                "checkpoint": str(models / "small"),
                "device": "host-0",
                "preload": True,
                "bytes": SMALL_SLAB,
                "file_bytes": sum(path.stat().st_size for path in files),
                "tensors": 2,
                "files": 2,
                "dtype": "float32",
                "architecture": "BertModel",
                "ignored": ["stray.safetensors"],
                "problem": None,
            }
        ],
        "problems": [],
    }


def test_every_model_is_checked(tmp_path: Path, models: Path) -> None:
    """A refused model does not hide the next: all are shown, each problem is a line, exit 1."""
    (models / "lfs").mkdir()
    (models / "lfs" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    config = model("gone", models / "gone") + model("lfs", models / "lfs") + model("small", models / "small")
    done = check(tmp_path, config)
    assert done.returncode == 1
    gone, lfs = done.stderr.splitlines()
    assert gone.startswith("weightcached: gone: ")
    assert str(models / "gone") in gone
    assert lfs.startswith("weightcached: lfs: ")
    rows = [line.split()[:4] for line in done.stdout.splitlines()]
    for row in (
        ["gone", "host-0", "yes", "refused"],
        ["lfs", "host-0", "yes", "refused"],
        ["small", "host-0", "yes", "524"],
    ):
        assert row in rows


def test_problems_in_json(tmp_path: Path, models: Path) -> None:
    """In JSON a refused model has its problem and no numbers, and stdout stays one object."""
    done = check(tmp_path, model("gone", models / "gone") + model("small", models / "small"), "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["models"][0]["bytes"] is None
    assert str(models / "gone") in answer["models"][0]["problem"]
    assert answer["problems"] == [f"gone: {answer['models'][0]['problem']}"]
    assert answer["models"][1]["bytes"] == SMALL_SLAB


def test_preloads_that_do_not_fit_together(tmp_path: Path, models: Path) -> None:
    """Each fits alone, both do not: exit 1, with what is needed and the limit in bytes."""
    both = model("one", models / "small") + model("two", models / "small")
    assert check(tmp_path, f"memory_limit = {2 * SMALL_SLAB}\n" + both).returncode == 0
    done = check(tmp_path, f"memory_limit = {2 * SMALL_SLAB - 1}\n" + both)
    assert done.returncode == 1
    assert "host-0: the preloaded models need" in done.stderr
    assert "(1048 bytes)" in done.stderr
    assert "(1047 bytes)" in done.stderr
    assert done.stdout.splitlines()[-1].endswith("no")


def test_model_on_demand_counts_alone(tmp_path: Path, models: Path) -> None:
    """A model without preload need not fit beside the others, but must fit alone."""
    both = model("one", models / "small") + model("two", models / "small", "preload = false")
    assert check(tmp_path, f"memory_limit = {SMALL_SLAB}\n" + both).returncode == 0
    alone = check(tmp_path, f"memory_limit = {SMALL_SLAB - 1}\n" + model("two", models / "small", "preload = false"))
    assert alone.returncode == 1
    assert alone.stderr.startswith("weightcached: two: needs 524 B (524 bytes), the limit of host-0 is 523 B")


def test_more_than_the_device_has(tmp_path: Path, models: Path) -> None:
    """A model larger than the host's whole memory is found by its headers: the file is sparse and is not read."""
    total = host_memory(0).total
    (models / "huge").mkdir()
    write_file(models / "huge" / "model.safetensors", {"w": ("U8", [total + 1])})
    done = check(tmp_path, 'memory_limit = "100%"\n' + model("huge", models / "huge"))
    assert done.returncode == 1
    assert f"({total + 1} bytes)" in done.stderr
    assert f"({total} bytes)" in done.stderr


@pytest.mark.parametrize("sizes", [[], [0], [1], [256, 1], [255, 0, 257], [7, 300, 0, 0, 512, 1]])
def test_slab_is_as_large_as_the_loader_makes_it(tmp_path: Path, sizes: list[int]) -> None:
    """The bytes shown are those that the loader's plan reserves, gaps between tensors included."""
    write_file(tmp_path / "model.safetensors", {f"t{number}": ("U8", [size]) for number, size in enumerate(sizes)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert slab_bytes(checkpoint) == plan_load(checkpoint).nbytes


def test_unknown_device_is_4(tmp_path: Path, models: Path) -> None:
    """A device that is not here ends with 4 and names what is; nothing on stdout."""
    done = check(tmp_path, 'devices = ["host-0", "host-4711"]\n' + model("small", models / "small"))
    assert (done.returncode, done.stdout) == (4, "")
    assert "no device host-4711; devices here: " in done.stderr
    assert "host-0" in done.stderr


def test_model_on_a_device_that_is_not_served_is_78(tmp_path: Path, models: Path) -> None:
    """A contradiction inside the config is a config error."""
    done = check(tmp_path, 'devices = ["host-0"]\n' + model("small", models / "small", 'devices = ["host-1"]'))
    assert (done.returncode, done.stdout) == (78, "")
    assert "model small: device host-1 is not served here; devices: host-0" in done.stderr


def test_no_models(tmp_path: Path) -> None:
    """A config without models is good: the devices are shown."""
    done = check(tmp_path, "")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["DEVICE", "KIND"]
