"""client/tensors.py: views over slabs, against what safetensors itself loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.client.handmade import HandMade, Raw, make_shard, read_file
from weightcached.client.leases import Lease
from weightcached.client.mapping import map_slabs
from weightcached.client.target import Target
from weightcached.client.tensors import SlabViews, contiguous_stride
from weightcached.shard.dtypes import DTYPES
from weightcached.shard.manifest import TensorEntry, check_table, parse_head, parse_table, read_documents


class Open:
    """Stands for the connection that a lease closes."""

    closed = False

    def close(self) -> None:
        self.closed = True


def views_of(shard: HandMade) -> dict[str, torch.Tensor]:
    """Every tensor of a shard, mapped; its descriptors are closed."""
    check_table(shard.head, shard.table)
    slabs = map_slabs(shard.head, shard.slabs, Lease(Open()), Target("host-0"))
    shard.close()
    views = SlabViews(slabs)
    return {entry.name: views.view(entry) for entry in shard.table.tensors}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as bytes, whatever its dtype."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


IN_TORCH = [dtype for dtype in DTYPES.values() if dtype.torch_name and hasattr(torch, dtype.torch_name)]


@pytest.mark.parametrize("dtype", [dtype.name for dtype in IN_TORCH])
def test_a_dtype_is_as_load_file_gives_it(dtype: str, tmp_path: Path) -> None:
    """Dtype, shape, stride and bytes equal those of `load_file`: matrix, odd length, 0-dim and empty, at odd places."""
    element = getattr(torch, str(DTYPES[dtype].torch_name))
    size = element.itemsize

    def tensor(*shape: int) -> torch.Tensor:
        data = torch.randint(0, 2 if dtype == "BOOL" else 256, (*shape, size), dtype=torch.uint8)
        return data.view(element).reshape(shape)

    # "a" holds one byte, so that a reader that trusts the file's alignment puts every later tensor at an odd address.
    tensors = {"a": torch.ones(1, dtype=torch.uint8), "m": tensor(3, 4), "odd": tensor(7), "none": tensor(0, 5)}
    if DTYPES[dtype].packed == 1:
        tensors["scalar"] = tensor()
    path = tmp_path / "t.safetensors"
    safetensors.torch.save_file(tensors, path)

    expected = safetensors.torch.load_file(path)
    found = views_of(make_shard(read_file(path)))

    assert found.keys() == expected.keys()
    for name, want in expected.items():
        have = found[name]
        assert (have.dtype, have.shape, have.stride()) == (want.dtype, want.shape, want.stride()), name
        assert raw_bytes(have) == raw_bytes(want), name


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_torch_lacks_comes_as_bytes(dtype: str) -> None:
    """Such a tensor is its bytes, 1-D uint8, with nothing added or left out."""
    data = bytes(range(12))

    found = views_of(make_shard([Raw("a", "U8", (1,), b"x"), Raw("t", dtype, (4, 4), data)]))

    assert found["t"].dtype == torch.uint8
    assert found["t"].shape == (12,)
    assert raw_bytes(found["t"]) == data


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no 4-bit float")
def test_packed_elements() -> None:
    """F4 [2, 8] is float4_e2m1fn_x2 [2, 4]; a last dimension that does not halve comes as bytes."""
    found = views_of(
        make_shard([Raw("even", "F4", (2, 8), bytes(range(8))), Raw("odd", "F4", (2, 3), bytes(range(3)))])
    )

    assert (found["even"].dtype, found["even"].shape) == (torch.float4_e2m1fn_x2, (2, 4))
    assert raw_bytes(found["even"]) == bytes(range(8))
    assert (found["odd"].dtype, found["odd"].shape) == (torch.uint8, (3,))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no 4-bit float")
def test_packed_elements_with_strides() -> None:
    """Strides count format elements: 8 are 4 of torch's; a strided last dimension comes as bytes."""
    rows = Raw("rows", "F4", (2, 4), bytes(range(8)), {"stride": (8, 1)})
    columns = Raw("columns", "F4", (4, 2), bytes(range(8)), {"stride": (1, 8)})

    found = views_of(make_shard([rows, columns]))

    assert (found["rows"].shape, found["rows"].stride()) == ((2, 2), (4, 1))
    assert raw_bytes(found["rows"]) == bytes([0, 1, 4, 5])
    assert (found["columns"].dtype, found["columns"].shape) == (torch.uint8, (8,))


def test_strides_are_kept() -> None:
    """A transposed entry is a view with the listed stride over the same bytes."""
    data = torch.arange(6, dtype=torch.float32)
    entry = Raw("t", "F32", (3, 2), bytes(data.numpy().tobytes()), {"stride": (1, 3)})

    found = views_of(make_shard([entry]))["t"]

    assert found.stride() == (1, 3)
    assert torch.equal(found, data.reshape(2, 3).t())


def test_tensors_of_a_slab_share_one_storage() -> None:
    """One storage per slab: aliases and neighbours share it, tensors of another slab do not."""
    raws = [Raw(str(number), "I16", (2,), b"1234") for number in range(4)]

    found = views_of(make_shard(raws, slabs=2))

    assert found["0"].untyped_storage().data_ptr() == found["2"].untyped_storage().data_ptr()
    assert found["0"].untyped_storage().data_ptr() != found["1"].untyped_storage().data_ptr()


def test_a_private_entry_is_a_copy() -> None:
    """What the engine will write has memory of its own."""
    found = views_of(make_shard([Raw("p", "F32", (2,), bytes(8), {"private": True}), Raw("s", "F32", (2,), bytes(8))]))

    found["p"].fill_(1.0)

    assert found["p"].untyped_storage().nbytes() == 8
    assert found["s"].tolist() == [0.0, 0.0]


def test_only_empty_tensors() -> None:
    """A slab of 0 bytes gives empty tensors of the right dtype and shape."""
    found = views_of(make_shard([Raw("e", "BF16", (0, 3), b""), Raw("f", "I64", (2, 0), b"")]))

    assert (found["e"].dtype, found["e"].shape) == (torch.bfloat16, (0, 3))
    assert (found["f"].dtype, found["f"].shape) == (torch.int64, (2, 0))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (0,), (2, 0, 3), (3, 0)])
def test_contiguous_stride_is_torchs(shape: tuple[int, ...]) -> None:
    """The strides computed here are those torch gives a new tensor."""
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("count", [1_000, 20_000])
def test_how_fast_all_views_are_made(count: int, record_property: Callable[[str, object], None]) -> None:
    """Views of many tensors are made fast; printed, and held only to ten times the goal, since machines differ."""
    raws = [Raw(f"model.layers.{number}.weight", "BF16", (8, 16), bytes(256)) for number in range(count)]
    shard = make_shard(raws)
    head_json, table_json = read_documents(shard.manifest.fileno())
    slabs = map_slabs(shard.head, shard.slabs, Lease(Open()), Target("host-0"))
    shard.close()

    start = time.perf_counter()
    table = parse_table(table_json)
    check_table(parse_head(head_json), table)
    parsed = time.perf_counter()
    views = SlabViews(slabs)
    made: list[torch.Tensor] = [views.view(entry) for entry in table.tensors]
    end = time.perf_counter()

    goal = 0.020 if count == 1_000 else 0.250
    print(f"\n{count} tensors: table {(parsed - start) * 1e3:.1f} ms, views {(end - parsed) * 1e3:.1f} ms")
    record_property("views_ms", (end - parsed) * 1e3)
    assert len(made) == count
    assert end - parsed < 10 * goal


def test_a_view_never_leaves_its_slab() -> None:
    """Even without the manifest's check, torch refuses a view past the storage."""
    shard = make_shard([Raw("a", "U8", (4,), b"1234")])
    slabs = map_slabs(shard.head, shard.slabs, Lease(Open()), Target("host-0"))
    shard.close()

    with pytest.raises(RuntimeError, match="out of bounds"):
        SlabViews(slabs).view(TensorEntry("x", 0, 0, 4096, "U8", (4096,)))


def test_private_entries_that_share_bytes_share_a_copy() -> None:
    """What is written to one is read from the other, as in the engine that published them; strides stay."""
    slab = torch.arange(64, dtype=torch.float32).view(torch.uint8)
    entries = [
        TensorEntry("all", 0, 0, 64, "F32", (16,), private=True),
        TensorEntry("part", 0, 16, 16, "F32", (4,), (1,), private=True),
        TensorEntry("column", 0, 128, 36, "F32", (3, 2), (1, 6), private=True),
        TensorEntry("host", 0, 0, 64, "F32", (16,), on_host=True),
    ]
    views = SlabViews([slab])
    views.copy_together(entries)
    made = {entry.name: views.view(entry) for entry in entries}

    made["part"].fill_(-1)
    assert made["all"].tolist() == [0.0, 1.0, 2.0, 3.0, -1.0, -1.0, -1.0, -1.0, *map(float, range(8, 16))]
    assert made["column"].stride() == (1, 6) and made["column"].tolist() == [[32, 38], [33, 39], [34, 40]]
    assert made["host"].tolist() == list(map(float, range(16)))
    assert torch.equal(slab.view(torch.float32), torch.arange(64, dtype=torch.float32))
