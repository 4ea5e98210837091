"""engines/parity.py: what a difference between two loads is, and what is none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.client.handmade import DEVICE, RunningWorker, read_file
from tests.engines.models import TINY, cache, save_random
from weightcached import EngineError
from weightcached.engines import parity
from weightcached.engines.parity import Description, Difference, compare, describe, main, write_if_asked


class Holder:
    """A plain object of an engine."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.tied = self.weight
        self.row = torch.nn.Parameter(self.weight.data[1])
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.holder = Holder(self.weight)
        self.padding = 3


def in_one_storage(model: Model) -> Model:
    """The model as an attach would make it: all tensors are views of one storage."""
    slab = torch.zeros(1024, dtype=torch.uint8)
    weight = slab[256:304].view(torch.float32).view(3, 4).copy_(model.weight.data)
    model.weight.data = weight
    model.row.data = weight[1]
    model.scale.data = slab[512:520].view(torch.float32).copy_(model.scale)
    return model


def test_an_attached_model_is_the_same() -> None:
    """Where the memory is makes no difference, as long as the same names share the same bytes."""
    disk = describe(Model())
    assert compare(disk, describe(in_one_storage(Model()))) == []
    assert disk.tensors["row"].memory == ("holder.tensor", 16)
    assert disk.tensors["scale"].memory == ("scale", 0)
    assert disk.tensors["holder.tensor"].role == "held"


def changed(change: str) -> Model:
    """A model with one difference."""
    model = Model()
    match change:
        case "digest":
            model.scale[1] = 2
        case "dtype":
            model.scale = model.scale.double()
        case "shape":
            model.scale = torch.ones(3)
        case "stride":
            model.weight.data = model.weight.data.t().contiguous().t()
        case "persistent":
            model.register_buffer("scale", torch.ones(2))
        case "role":
            del model.scale
            model.scale = torch.nn.Parameter(torch.ones(2))
        case "memory":
            model.row.data = model.row.data.clone()
        case "missing":
            del model.scale
        case "meta":
            model.holder.tensor = model.weight.to("meta")
        case "scalar":
            model.padding = 0
    return model


@pytest.mark.parametrize(
    "change", ["digest", "dtype", "shape", "stride", "persistent", "role", "memory", "missing", "meta", "scalar"]
)
def test_each_difference_is_found(change: str) -> None:
    """One kind of change gives a difference of its kind; leaving its names out gives none."""
    found = compare(describe(Model()), describe(changed(change)))
    assert change in {item.what for item in found}
    assert compare(describe(Model()), describe(changed(change)), ignore={item.name for item in found}) == []


def test_one_element_of_any_stride() -> None:
    """torch takes it for contiguous, and does not view it as bytes."""
    module = torch.nn.Module()
    module.register_buffer("scale", torch.tensor(2.0).expand(1))
    other = torch.nn.Module()
    other.register_buffer("scale", torch.tensor([2.0]))
    assert compare(describe(module), describe(other)) == []


def test_meta_on_both_sides_is_a_difference() -> None:
    """Two models without a value are not equal, they are both broken."""
    both = describe(changed("meta"))
    assert compare(both, both) == [Difference("holder.tensor", "meta", "meta", "meta")]


def test_a_description_is_written_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the file, "{pid}" in it the process; without it nothing is written."""
    monkeypatch.delenv(parity.VARIABLE, raising=False)
    assert write_if_asked(Model()) is None
    monkeypatch.setenv(parity.VARIABLE, str(tmp_path / "a-{pid}.json"))
    path = write_if_asked(Model())
    assert path is not None and list(tmp_path.iterdir()) == [path]
    assert Description.load(path) == describe(Model())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 for the same, 1 for a difference, which it names; --json says it for programs."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    describe(Model()).save(a)
    describe(changed("scalar")).save(b)
    run = subprocess.run(
        [sys.executable, "-m", "weightcached.engines.parity", str(a), str(a)], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "the same\n"), run.stderr
    assert main([str(a), str(b)]) == 1
    assert capsys.readouterr().out == "padding: scalar 3 / 0\n"
    assert main([str(a), str(b), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [{"name": "padding", "what": "scalar", "first": 3, "second": 0}]
    assert main([str(a), str(b), "--ignore", "pad*"]) == 0


def test_transformers_from_disk_and_from_the_cache(
    worker: RunningWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command loads both in one process: the same tensors and tokens; a changed checkpoint is told."""
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in TINY.items() if name != "pad_token_id"}
    folder = save_random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), tmp_path / "llama")
    raws = read_file(folder / "model.safetensors")
    cache(worker, folder, name="good")
    assert main(["--model", "good", "--device", DEVICE, "--tokens", "4"]) == 0, capsys.readouterr()

    wrong = [replace(raw, data=bytes(len(raw.data))) if "norm" in raw.name else raw for raw in raws]
    cache(worker, folder, name="wrong", raws=wrong)
    capsys.readouterr()
    assert main(["--model", "wrong", "--device", DEVICE, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert {"digest", "tokens"} == {item["what"] for item in found}
    assert all("norm" in item["name"] or item["name"] == "generation" for item in found)


def test_what_is_no_description_is_refused(tmp_path: Path) -> None:
    """Another schema, other JSON, no JSON and no file are one kind of error."""
    file = tmp_path / "x.json"
    for text in ('{"schema": 2}', "[]", "{"):
        file.write_text(text)
        with pytest.raises(EngineError):
            Description.load(file)
    with pytest.raises(EngineError, match="cannot be read"):
        Description.load(tmp_path / "none")


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.nn.UninitializedParameter()],
    ids=["sparse", "conjugate", "lazy"],
)
def test_what_is_more_than_its_memory_is_refused(tensor: torch.Tensor) -> None:
    """By its name, wherever it is held: its bytes alone would not tell what it is."""
    model = torch.nn.Linear(2, 2)
    model.extra = tensor
    with pytest.raises(EngineError, match="extra cannot be described"):
        describe(model)


def test_scalars_are_names_with_values() -> None:
    """As much of a description is looked at as the comparison needs."""
    with pytest.raises(EngineError, match="no description of a module"):
        Description.from_json({"schema": 1, "module": "m", "tensors": {}, "scalars": []})
