"""cli.check: what would be loaded where, told without loading, with an exit code that says whether it would work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.files import write_sharded
from tests.checkpoint.sets import CASES
from tests.conftest import MakeCheckpoint
from tests.llama import slab_of, write_llama
from weightcached.devices import host_memory
from weightcached.shard.dtypes import tensor_bytes

ROOT = Path(__file__).parents[2]
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
    assert ["small", "host-0", "-", "yes", "524", "B", "float32", "2", "2", "stray.safetensors"] in rows
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
                "preload": True,
                "pin": False,
                "ranks": [rank("host-0", bytes=SMALL_SLAB, tensors=2)],
                "bytes": SMALL_SLAB,
                "file_bytes": sum(path.stat().st_size for path in files),
                "tensors": 2,
                "files": 2,
                "dtype": "float32",
                "architecture": "BertModel",
                "ignored": ["stray.safetensors"],
                "publisher": [],
                "chosen": False,
                "problem": None,
            }
        ],
        "problems": [],
    }


def test_a_model_with_a_publisher(tmp_path: Path, models: Path) -> None:
    """Its files are checked, and its bytes on the device left open: only its command knows what it makes of them. A
    model that the built-in loader cannot cut is no problem, one that is not there is."""
    command = 'publisher = ["python", "-m", "engine"]\ntensor_parallel = 2'
    config = model("made", models / "small", command) + model("gone", models / "gone", command)
    config = 'devices = ["host-0", "host-1"]\n' + config
    done = check(tmp_path, config, "--json")
    assert done.returncode == 1
    made, gone = json.loads(done.stdout)["models"]
    assert (made["publisher"], made["problem"]) == (["python", "-m", "engine"], None)
    assert (made["files"], made["tensors"], made["bytes"], made["dtype"]) == (2, 2, None, None)
    assert [(rank["device"], rank["bytes"]) for rank in made["ranks"]] == [("host-0", None), ("host-1", None)]
    assert str(models / "gone") in gone["problem"]
    rows = [line.split() for line in check(tmp_path, config).stdout.splitlines()]
    (first,) = (row for row in rows if row[:2] == ["made", "host-0"])
    assert first[5:] == ["by", "publisher", "-", "-", "2", "stray.safetensors"], first
    (refused,) = (row for row in rows if row[:2] == ["gone", "host-0"])
    assert "refused" in refused


def test_every_layout_is_named_in_json(tmp_path: Path) -> None:
    """Of each layout of a folder: which files are ignored, how many are read, or why it is refused."""
    paths = [case.build(tmp_path / f"{number}") for number, case in enumerate(CASES)]
    config = "".join(model(f"m{number}", path) for number, path in enumerate(paths))
    done = check(tmp_path, config, "--json")
    assert done.returncode == 1
    for case, found in zip(CASES, json.loads(done.stdout)["models"], strict=True):
        if case.refusal is None:
            assert (found["problem"], found["ignored"]) == (None, list(case.ignored)), case.name
            assert (found["files"], found["tensors"]) == (len(case.files), sum(map(len, case.files.values()))), (
                case.name
            )
        else:
            assert case.refusal in found["problem"], case.name
            assert found["files"] is None


def test_every_layout_is_named_in_the_table(tmp_path: Path) -> None:
    """The table names every ignored file, and a refused layout is a row and a line on stderr."""
    paths = [case.build(tmp_path / f"{number}") for number, case in enumerate(CASES)]
    config = "".join(model(f"m{number}", path) for number, path in enumerate(paths))
    done = check(tmp_path, config)
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("m")}
    problems = {line.split(": ")[1]: line for line in done.stderr.splitlines()}
    assert len(rows) == len(CASES)
    for number, case in enumerate(CASES):
        if case.refusal is None:
            assert rows[f"m{number}"].endswith("  " + (", ".join(case.ignored) or "-")), case.name
            assert f"m{number}" not in problems
        else:
            assert "refused" in rows[f"m{number}"]
            assert case.refusal in problems[f"m{number}"], case.name


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
    rows = [line.split()[:5] for line in done.stdout.splitlines()]
    for row in (
        ["gone", "host-0", "-", "yes", "refused"],
        ["lfs", "host-0", "-", "yes", "refused"],
        ["small", "host-0", "-", "yes", "524"],
    ):
        assert row in rows


def test_problems_in_json(tmp_path: Path, models: Path) -> None:
    """In JSON a refused model has its problem and no numbers, and stdout stays one object."""
    done = check(tmp_path, model("gone", models / "gone") + model("small", models / "small"), "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["models"][0]["bytes"] is None
    assert answer["models"][0]["ranks"] == [rank("host-0")]
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


def test_model_on_demand_beside_pinned_ones(tmp_path: Path, models: Path) -> None:
    """What is preloaded and pinned never makes room, so a model on demand must fit beside it; to the byte."""
    both = model("one", models / "small", "pin = true") + model("two", models / "small", "preload = false")
    assert check(tmp_path, f"memory_limit = {2 * SMALL_SLAB}\n" + both).returncode == 0
    done = check(tmp_path, f"memory_limit = {2 * SMALL_SLAB - 1}\n" + both)
    assert done.returncode == 1
    assert "two: needs 524 B (524 bytes), the limit of host-0 is 1.0 KiB (1047 bytes)" in done.stderr
    assert "and pinned models leave 523 B (523 bytes) of it" in done.stderr


def test_more_than_the_device_has(tmp_path: Path, models: Path) -> None:
    """A model larger than the host's whole memory is found by its headers: the file is sparse and is not read."""
    total = host_memory(0).total
    (models / "huge").mkdir()
    write_file(models / "huge" / "model.safetensors", {"w": ("U8", [total + 1])})
    done = check(tmp_path, 'memory_limit = "100%"\n' + model("huge", models / "huge"))
    assert done.returncode == 1
    assert f"({total + 1} bytes)" in done.stderr
    assert f"({total} bytes)" in done.stderr


def test_a_slab_is_aligned_as_the_loader_aligns_it(tmp_path: Path) -> None:
    """Tensors lie at multiples of 256 bytes in the order of the file; nothing is added behind the last one."""
    cases = {
        "one": ([1], 1),
        "two": ([256, 1], 257),
        "empty": ([255, 0, 257], 513),
        "some": ([7, 300, 0, 0, 512, 1], 1281),
    }
    config = ""
    for name, (sizes, _) in cases.items():
        (tmp_path / name).mkdir()
        tensors: Tensors = {f"t{number}": ("U8", [size]) for number, size in enumerate(sizes)}
        write_file(tmp_path / name / "model.safetensors", tensors)
        config += model(name, tmp_path / name)
    answer = json.loads(check(tmp_path, config, "--json").stdout)
    assert {found["name"]: found["bytes"] for found in answer["models"]} == {
        name: nbytes for name, (_, nbytes) in cases.items()
    }


def rank(device: str, **known: object) -> dict[str, object]:
    """One rank in the JSON: whole and unknown, unless said otherwise."""
    sizes = {f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "expert", "data")}
    ranks = {f"{axis}_parallel_rank": 0 for axis in ("tensor", "pipeline", "expert", "data")}
    return {"device": device, **sizes, **ranks, "layers": None, "bytes": None, "tensors": None, **known}


FOUR = 'devices = ["host-0", "host-1", "host-2", "host-3"]\n'


class TestRanks:
    """A model cut for several ranks: a row for each, with what a load would put on its device."""

    def test_a_row_for_each(self, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
        """Each rank's device, place and size, which is that of its parts cut by hand; the devices' sums follow."""
        tensors = write_llama(tmp_path / "llama", make_checkpoint)
        config = FOUR + model("cut", tmp_path / "llama", 'tensor_parallel = 2\ndevices = ["host-2", "host-0"]')
        done = check(tmp_path, config, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        answer = json.loads(done.stdout)
        sizes = [len(slab_of(tensors, number, 2)) for number in (0, 1)]
        (found,) = answer["models"]
        assert found["ranks"] == [
            rank("host-2", tensor_parallel_size=2, bytes=sizes[0], tensors=len(tensors)),
            rank("host-0", tensor_parallel_size=2, tensor_parallel_rank=1, bytes=sizes[1], tensors=len(tensors)),
        ]
        assert (found["bytes"], found["tensors"]) == (sum(sizes), len(tensors))
        assert {device["name"]: device["needed"] for device in answer["devices"]} == {
            "host-0": sizes[1], "host-1": 0, "host-2": sizes[0], "host-3": 0,
        }  # fmt: skip
        rows = [line.split()[:6] for line in check(tmp_path, config).stdout.splitlines()]
        for number, device in enumerate(("host-2", "host-0")):
            assert ["cut", device, "tp", f"{number}/2", "yes", f"{sizes[number] / 1024:.1f}"] in rows

    def test_stages_and_tensor_ranks(self, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
        """A pipeline's ranks have the layers of their stage and the tensors of these layers only."""
        tensors = write_llama(tmp_path / "llama", make_checkpoint)
        sizes = "tensor_parallel = 2\npipeline_parallel = 2\npipeline_layers = [1, 2]"
        done = check(tmp_path, FOUR + model("grid", tmp_path / "llama", sizes), "--json")
        assert (done.returncode, done.stderr) == (0, "")
        ranks = json.loads(done.stdout)["models"][0]["ranks"]
        assert [found["device"] for found in ranks] == ["host-0", "host-1", "host-2", "host-3"]
        assert [found["layers"] for found in ranks] == [[0, 1], [0, 1], [1, 3], [1, 3]]
        assert [(found["pipeline_parallel_rank"], found["tensor_parallel_rank"]) for found in ranks] == [
            (0, 0), (0, 1), (1, 0), (1, 1),
        ]  # fmt: skip
        per_layer = (len(tensors) - 3) // 3
        assert [found["tensors"] for found in ranks] == [1 + per_layer] * 2 + [2 * per_layer + 2] * 2
        table = check(tmp_path, FOUR + model("grid", tmp_path / "llama", sizes)).stdout
        assert "pp 1/2 tp 0/2" in table

    @pytest.mark.parametrize(
        ("sizes", "problem"),
        [
            ("tensor_parallel = 3", "the next smaller tensor_parallel that fits the model: 2"),
            ("pipeline_parallel = 2\npipeline_layers = [1, 1]", "the model has 3 layers"),
        ],
        ids=["heads", "layers"],
    )
    def test_a_cut_that_does_not_fit(
        self, tmp_path: Path, make_checkpoint: MakeCheckpoint, sizes: str, problem: str
    ) -> None:
        """The load's own refusal is the problem; the rows say where the ranks would go."""
        write_llama(tmp_path / "llama", make_checkpoint)
        done = check(tmp_path, FOUR + model("cut", tmp_path / "llama", sizes))
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("weightcached: cut: ")
        assert problem in line
        assert "refused" in done.stdout

    def test_an_unknown_architecture(self, tmp_path: Path, models: Path) -> None:
        """Cut, a model without rules is refused by its architecture's name; whole it is fine."""
        assert check(tmp_path, FOUR + model("small", models / "small")).returncode == 0
        done = check(tmp_path, FOUR + model("small", models / "small", "tensor_parallel = 2"))
        assert done.returncode == 1
        assert done.stderr.startswith("weightcached: small: BertModel: ")
        assert "rules = [...]" in done.stderr

    def test_too_large_for_one_device(self, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
        """The limit counts for each device, and for what a rank takes there."""
        write_llama(tmp_path / "llama", make_checkpoint)
        both = model("cut", tmp_path / "llama", "tensor_parallel = 2")
        needed = json.loads(check(tmp_path, FOUR + both, "--json").stdout)["models"][0]["ranks"][1]["bytes"]
        assert check(tmp_path, f"{FOUR}memory_limit = {needed}\n{both}").returncode == 0
        done = check(tmp_path, f"{FOUR}memory_limit = {needed - 1}\n{both}")
        assert done.returncode == 1
        assert [line.split()[1] for line in done.stderr.splitlines()] == ["host-0:", "host-1:"]


def test_a_cast_changes_the_size(tmp_path: Path, models: Path) -> None:
    """Cast to half the width, the slab is half as large, and the dtype is that of what is loaded."""
    done = check(tmp_path, model("small", models / "small", 'dtype = "bfloat16"'), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)["models"]
    assert (found["dtype"], found["bytes"]) == ("bfloat16", 256 + 6)


def test_a_cast_needs_torch(tmp_path: Path, models: Path) -> None:
    """Where the loader could not import torch, a model that is cast is refused with what to install; others are not."""
    (tmp_path / "model.toml").write_text(
        'devices = ["host-0"]\n'
        + model("cast", models / "small", 'dtype = "bfloat16"')
        + model("as-is", models / "small")
    )
    program = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "from weightcached.cli.main import main\n"
        "sys.exit(main(['check', '--config', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.toml")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("weightcached: cast: ")
    assert "pip install 'weightcached[torch]'" in line


def test_unknown_device_is_4(tmp_path: Path, models: Path) -> None:
    """A device that is not here ends with 4 and names what is; nothing on stdout."""
    done = check(tmp_path, 'devices = ["host-0", "GPU-4711"]\n' + model("small", models / "small"))
    assert (done.returncode, done.stdout) == (4, "")
    assert "no device GPU-4711; devices here: " in done.stderr
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


@pytest.mark.parametrize("hard", [40, None])
def test_a_set_of_many_files(tmp_path: Path, hard: int | None) -> None:
    """The soft limit of open files is raised as `serve` does; over the hard one the report gives the number needed."""
    names = [f"m-{number:03}.safetensors" for number in range(60)]
    write_sharded(tmp_path / "many", {name: [f"t-{name}"] for name in names})
    (tmp_path / "model.toml").write_text('devices = ["host-0"]\n' + model("many", tmp_path / "many"))
    limit = ["prlimit", "--nofile=40:" + (str(hard) if hard else "")]
    command = [*limit, sys.executable, "-m", "weightcached", "check", "--config", str(tmp_path / "model.toml")]
    done = subprocess.run(command, capture_output=True, text=True)
    if hard is None:
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1
    assert "Too many open files, this process may have 40; raise its hard limit of open files" in done.stderr
    assert "to 376 at least: the set has 60 files, and a load opens each twice" in done.stderr


def test_devices_are_chosen_by_free_memory(tmp_path: Path, models: Path) -> None:
    """A model that names none and has more to choose from than it has ranks: the choice is printed with what is free
    there. Host devices share the host's memory, so that the first ones are taken."""
    hosts = 'devices = ["host-1", "host-0"]\n'
    done = check(
        tmp_path, hosts + model("free", models / "small") + model("named", models / "small", 'devices = ["host-0"]')
    )
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if "most memory" in line]
    assert re.fullmatch(
        r"free: of 2 devices the most memory is free on host-1 \([\d.]+ GiB free\); what is cached stays", line
    )
    told = json.loads(check(tmp_path, hosts + model("free", models / "small"), "--json").stdout)
    assert [(item["chosen"], item["ranks"][0]["device"]) for item in told["models"]] == [(True, "host-1")]
