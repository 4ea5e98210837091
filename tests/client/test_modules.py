"""client/modules.py: which tensors a module names, and which ones its plain objects hold."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from weightcached.client.modules import held_tensors, named_tensors
from weightcached.errors import EngineError


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor


class Slotted:
    __slots__ = ("__hidden", "never", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__hidden = tensor + 1


class Engine(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 3)
        self.twin = self.inner
        self.tied = self.inner.weight
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("temporary", torch.zeros(1), persistent=False)
        self.inner.extra = torch.ones(4)
        self.inner.plain = 3


def test_every_name_comes_tied_ones_too() -> None:
    """Parameters, then buffers, a module that is there twice under both names, then the attributes asked for."""
    engine = Engine()

    found = {item.name: item for item in named_tensors(engine, ["inner.extra"])}

    names = {"tied", "inner.weight", "inner.bias", "twin.weight", "twin.bias", "kept", "temporary", "inner.extra"}
    assert set(found) == names
    assert found["tied"].tensor is found["twin.weight"].tensor is engine.inner.weight
    assert [found[name].role for name in ("tied", "kept", "inner.extra")] == ["parameter", "buffer", "attribute"]
    assert [found[name].persistent for name in ("tied", "kept", "temporary", "inner.extra")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["inner.plain", "inner.missing", "missing.extra", "inner.weight"])
def test_an_attribute_that_is_no_tensor(name: str) -> None:
    """It is named in the error; a parameter is none either."""
    with pytest.raises(EngineError, match=name):
        named_tensors(Engine(), [name])


def test_held_tensors_are_found_in_objects_and_containers() -> None:
    """Of slots, frozen dataclasses, nested containers; each can be replaced but those in tuples and sets."""
    engine = Engine()
    engine.objects = {"slots": Slotted(torch.ones(1)), "list": [torch.ones(2), (torch.ones(3),)]}
    engine.frozen = Frozen(torch.ones(5))

    found = {item.path: item for item in held_tensors(engine)}

    sizes = {path: item.tensor.numel() for path, item in found.items()}
    assert sizes == {
        "inner.extra": 4,
        "objects.['slots'].tensor": 1,
        "objects.['slots']._Slotted__hidden": 1,
        "objects.['list'].[0]": 2,
        "objects.['list'].[1].[0]": 3,
        "frozen.tensor": 5,
    }
    for path, item in found.items():
        assert (item.replace is None) == (path == "objects.['list'].[1].[0]")
        if item.replace is not None:
            item.replace(item.tensor + 1)
    again = {item.path: item.tensor for item in held_tensors(engine)}
    assert all(torch.equal(again[path], item.tensor + (item.replace is not None)) for path, item in found.items())


def test_cycles_and_foreign_objects() -> None:
    """Objects that refer to each other end; those of other packages and classes themselves are not looked into."""
    engine = Engine()
    one: Any = Slotted(torch.ones(7))
    engine.loop = [one]
    engine.loop.append(engine.loop)
    engine.foreign = torch.optim.SGD(engine.parameters(), lr=0.1)
    engine.kind = Slotted

    assert {item.tensor.numel() for item in held_tensors(engine)} == {4, 7}


def test_large_tables_of_plain_values_cost_little() -> None:
    """A vocabulary, say: nothing is made for what can hold no tensor."""
    engine = Engine()
    engine.vocabulary = {f"word{number}": number for number in range(200_000)}
    engine.pieces = list(engine.vocabulary) * 5
    began = time.process_time()
    assert [item.path for item in held_tensors(engine)] == ["inner.extra"]
    assert time.process_time() - began < 2
