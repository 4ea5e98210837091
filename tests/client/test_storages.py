"""client/storages.py: which tensors share bytes, and where they go in slabs. Nothing is moved here."""

from __future__ import annotations

import time

import pytest
import torch

from weightcached.client import storages
from weightcached.client.modules import NamedTensor
from weightcached.client.storages import Plan, overlapping, plan_storages
from weightcached.client.target import Target
from weightcached.errors import EngineError
from weightcached.shard.manifest import ALIGNMENT, TensorTable, check_overlaps

HOST = Target("host-0")


def plan(tensors: dict[str, torch.Tensor], held: tuple[torch.Tensor, ...] = (), private: str = "") -> Plan:
    named = [NamedTensor(name, tensor) for name, tensor in tensors.items()]
    made = plan_storages(named, held, HOST, lambda item: bool(private) and item.name == private)
    check_overlaps(TensorTable(tuple(made.entries)))
    return made


def offsets(made: Plan) -> dict[str, tuple[int, int]]:
    return {entry.name: (entry.slab, entry.offset) for entry in made.entries}


def test_parts_keep_their_places() -> None:
    """Overlapping tensors are one block, in which their distances stay, whichever begins first."""
    whole = torch.zeros(64)
    made = plan({"late": whole[32:48], "whole": whole.detach(), "early": whole[8:40]})

    found = offsets(made)
    assert len(made.blocks) == 1
    assert found["late"][1] - found["whole"][1] == 128 and found["early"][1] - found["whole"][1] == 32
    assert [entry.stride for entry in made.entries] == [(1,), None, (1,)]


def test_disjoint_tensors_of_one_storage_are_laid_out_anew() -> None:
    """Each begins at a multiple of the alignment, whatever lies between them."""
    flat = torch.zeros(4096)
    made = plan({name: torch.nn.Parameter(flat[at : at + 5]) for name, at in (("a", 4), ("b", 1000), ("c", 4001))})

    assert sorted(offset for _, offset in offsets(made).values()) == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert made.nbytes == 2 * ALIGNMENT + 20


def test_private_spreads_over_shared_bytes_and_no_further() -> None:
    """What shares a byte with a private tensor is private; what only shares the storage is not."""
    flat = torch.zeros(4096)
    cut = {"scale": flat[:16], "over": flat[8:32], "apart": flat[64:128]}
    made = plan({name: torch.nn.Parameter(part) for name, part in cut.items()}, private="scale")

    assert {entry.name: entry.private for entry in made.entries} == {"scale": True, "over": True, "apart": False}
    assert {entry.name: entry.slab for entry in made.entries} == {"scale": 1, "over": 1, "apart": 0}
    assert [block.alone for block in made.blocks if not block.moves] == [True]


def test_slabs_are_filled_in_the_order_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slab is larger than the limit, unless one tensor is; very many bytes make larger slabs, not too many."""
    monkeypatch.setattr(storages, "SLAB_BYTES", 1024)
    tensors = {str(number): torch.zeros(100) for number in range(20)} | {"large": torch.zeros(1000)}
    made = plan(tensors)

    assert all(size <= 1024 or size == 4000 for size in made.sizes)
    moved = [(block.slab, block.begin) for block in made.blocks]
    assert moved == sorted(moved) and [begin for _, begin in moved] == sorted(begin for _, begin in moved)

    monkeypatch.setattr(storages, "SLAB_BYTES", 256)
    assert len(plan({str(number): torch.zeros(64) for number in range(600)}).sizes) <= 252


def test_one_object_under_two_names_is_an_alias_and_two_objects_are_not() -> None:
    """Two tensors over the same bytes are two entries at one place."""
    one = torch.zeros(4)
    made = plan({"a": one, "b": one, "c": one.detach()})

    assert made.aliases == {"b": "a"}
    assert offsets(made) == {"a": (0, 0), "c": (0, 0)} or len(set(offsets(made).values())) == 1


def test_packed_types_and_empty_tensors() -> None:
    """float4 counts its elements as the format does; without a byte there is one empty slab."""
    packed = plan({"f4": torch.zeros(4, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}).entries[0]
    assert (packed.dtype, packed.shape, packed.nbytes, packed.stride) == ("F4", (4, 16), 32, None)
    assert plan({"empty": torch.zeros(0, 3)}).sizes == [0]


def test_what_is_nothing_to_publish() -> None:
    """No tensors, and a tensor whose storage was taken away."""
    with pytest.raises(EngineError, match="no tensors"):
        plan({})
    freed = torch.zeros(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(EngineError, match="w "):
        plan({"w ": freed})


def test_writable_tensors_that_share_bytes_keep_sharing_them_or_are_refused() -> None:
    """An engine writes one and reads the other: where no offset can say so, nothing is published."""
    flat = torch.zeros(16)
    made = plan({"all": flat, "part": flat[4:8]}, private="all")
    assert offsets(made)["part"][1] - offsets(made)["all"][1] == 16
    assert all(entry.private for entry in made.entries)

    with pytest.raises(EngineError, match=r"part cannot be published: .* 8 bytes into it: no multiple of 16"):
        plan({"all": flat, "part": flat[2:4]}, private="all")
    plan({"all": flat, "part": flat[2:4]})  # nobody writes to a shared one


def test_a_name_must_be_text() -> None:
    """Half of a surrogate pair is refused before anything is moved."""
    with pytest.raises(EngineError, match=r"'\\ud800' cannot be published"):
        plan({"\ud800": torch.ones(1)})


def test_many_parts_of_one_storage_are_planned_in_time() -> None:
    """Linear in their number: a flat buffer of an engine may have tens of thousands."""
    flat = torch.zeros(20_000, 4)
    began = time.process_time()
    made = plan({str(number): row for number, row in enumerate(flat)})
    assert len(made.entries) == 20_000
    assert time.process_time() - began < 20  # quadratic: minutes


def test_which_tensors_overlap() -> None:
    """By bytes, not by storage; empty ones overlap nothing, and a gap between two others is free."""
    flat = torch.zeros(32)
    others = {"wide": flat[:16], "inner": flat[2:4], "late": flat[24:]}
    tensors = {"after inner": flat[8:9], "gap": flat[16:24], "edge": flat[23:25], "none": flat[:0], "all": flat}
    found = dict(overlapping(tensors, others))
    assert found.keys() == {"after inner", "edge", "all"}
    assert (found["after inner"], found["edge"]) == ("wide", "late")
    assert not list(overlapping(tensors, {})) and not list(overlapping({}, others))
