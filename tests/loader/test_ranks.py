"""All ranks of one model from one pass over its files: each slab is what torch cuts, and every byte is read once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loader import llama
from tests.loader.loads import Loaded, MakeCheckpoint, load_cuda, load_host
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import Slice, plan_slices

torch = pytest.importorskip("torch")

SIZES = [1, 2, 4, 8]


def planned(folder: Path, size: int) -> list[tuple[Slice, ...]]:
    with open_checkpoint(folder) as checkpoint:
        shards = plan_slices(list(checkpoint.tensors()), checkpoint.config, Parallel(tensor=size))
    return [shard.slices for shard in shards]


def check(loaded: Loaded, size: int) -> None:
    """Each rank's slab holds exactly the tensors that torch cuts for it, and between them zeros."""
    assert len(loaded.slabs) == size
    for rank, (slab, data) in enumerate(zip(loaded.plan.slabs, loaded.slabs, strict=True)):
        held = llama.shard(torch, rank, size)
        assert [entry.name for entry in slab.entries] == list(held)
        position = 0
        for entry in slab.entries:
            wanted = held[entry.name].contiguous()
            assert (entry.dtype, entry.shape) == ("BF16", tuple(wanted.shape))
            assert not any(data[position : entry.offset])
            position = entry.offset + entry.nbytes
            assert data[entry.offset : position] == bytes(wanted.view(torch.uint8).numpy()), (rank, entry.name)
        assert position == len(data)


@pytest.mark.parametrize("size", SIZES)
def test_each_slab_is_what_torch_cuts(tmp_path: Path, make_checkpoint: MakeCheckpoint, size: int) -> None:
    """A Llama with key/value heads for 2, for 1, 2, 4 and 8 ranks: columns, rows, replicas, and tails of zeros."""
    folder = llama.write(tmp_path, make_checkpoint)
    loaded = load_host(folder, planned(folder, size))
    check(loaded, size)
    assert loaded.result.bytes_read == llama.file_bytes(folder)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("size", [1, 4])
def test_the_same_through_cuda_slabs(tmp_path: Path, make_checkpoint: MakeCheckpoint, size: int) -> None:
    """The slabs on devices, two ranks on each, hold the same bytes."""
    folder = llama.write(tmp_path, make_checkpoint)
    check(load_cuda(folder, planned(folder, size), ordinals=[rank * 2 // size for rank in range(size)]), size)


LOAD = """
import json, sys
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.loader.plan import plan_load
from weightcached.loader.readers import Readers
from weightcached.loader.slabs import Devices, fill_slabs
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices

def read():  # by this process and by its children that have been waited for, in bytes
    return int(dict(line.split(": ") for line in open("/proc/self/io"))["rchar"])

def load(path, size):
    before = read()
    with open_checkpoint(path) as checkpoint:
        shards = plan_slices(list(checkpoint.tensors()), checkpoint.config, Parallel(tensor=size))
        plan = plan_load(checkpoint, [shard.slices for shard in shards])
        with Devices([f"host-{rank}" for rank in range(size)]) as devices:
            filled, result = fill_slabs(plan, checkpoint, devices, 64 << 20, Readers(2))
    for part in filled:
        part.fd.close()
    return read() - before, result.bytes_read, sum(slab.nbytes for slab in plan.slabs)

load(sys.argv[1], 1)  # Python's own files are compiled now
print(json.dumps([load(sys.argv[1], 1), load(sys.argv[2], int(sys.argv[3]))]))
"""


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_read_once(tmp_path: Path, make_checkpoint: MakeCheckpoint, size: int) -> None:
    """By the kernel's own account a load reads the checkpoint once, however many ranks it is for.

    What its processes read to get going is that of a load of two tiny files, one for each of two readers.
    """
    folder = llama.write(tmp_path / "llama", make_checkpoint)
    tiny = tmp_path / "tiny"
    for name in ("a", "b"):
        make_checkpoint(tiny / f"{name}.safetensors", {name: ("U8", (1,), b"1")})
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tiny), str(folder), str(size)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (start, _, _), (read, counted, held) = json.loads(run.stdout)
    nbytes = llama.file_bytes(folder)
    assert counted == nbytes
    assert 1.0 <= (read - start + llama.file_bytes(tiny)) / nbytes < 1.01, "headers and config.json come on top"
    if size == 8:
        assert held > 1.05 * nbytes, "each rank reading for itself would have read more"
