"""The processes of `scripts/bench attach`: each is started fresh, does one thing, prints one JSON document.

    publish     fills slabs and hands them to the worker, as the loader does; then it ends
    engine      attaches, makes all views, says how long both took; checks content afterwards
    write-file  the same tensors as a safetensors file
    load-file   safetensors' load_file on it
    ipc-export  the same tensors in torch's own memory, exported for CUDA IPC; lives until its stdin ends
    ipc-open    opens what it exported

A role's argument is one JSON object.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightcached.fds import OwnedFd
    from weightcached.shard.manifest import TensorEntry

# weightcached is imported inside the functions: the engine's time for it is measured.

BLOCK = 4 << 20  # bytes of random data that every slab repeats, each from another place
PAGE = 4096
_PARTS = (
    "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm", "self_attn.k_norm",
    "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj", "self_attn.v_proj",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """`tensors` bfloat16 tensors of about equal size that fill `slabs` slabs of `slab_bytes` bytes."""

    slabs: int
    slab_bytes: int
    tensors: int

    @property
    def nbytes(self) -> int:
        return self.slabs * self.slab_bytes

    @property
    def smallest(self) -> int:
        """Bytes of the smallest tensor; below the manifest's alignment there are more tensors than fit."""
        return self.slab_bytes // -(-self.tensors // self.slabs)

    def entries(self) -> list[TensorEntry]:
        from weightcached.shard.manifest import ALIGNMENT, TensorEntry

        entries: list[TensorEntry] = []
        for slab in range(self.slabs):
            first, end = (-(-self.tensors * number // self.slabs) for number in (slab, slab + 1))
            size = self.slab_bytes // (end - first) // ALIGNMENT * ALIGNMENT
            for index in range(first, end):
                offset = (index - first) * size
                nbytes = size if index < end - 1 else self.slab_bytes - offset
                shape = (nbytes // ALIGNMENT, ALIGNMENT // 2)  # bfloat16: a row is what offsets are multiples of
                entries.append(TensorEntry(_name(index), slab, offset, nbytes, "BF16", shape))
        return entries


def _name(index: int) -> str:
    layer, part = divmod(index, len(_PARTS))
    return f"model.layers.{layer}.{_PARTS[part]}.weight"


def _is_host(device: str) -> bool:
    return device.startswith("host-")


@functools.cache
def _block() -> bytes:
    return random.Random(2).randbytes(BLOCK)


def pattern(slab: int, offset: int, nbytes: int) -> bytes:
    """What a slab holds at `offset`: differs from slab to slab, so that a mixed-up slab is noticed."""
    start = (slab * 1_000_003 + offset) % BLOCK
    repeats = -(-(start + nbytes) // BLOCK)
    return (_block() * repeats)[start : start + nbytes]


class Clock:
    """Seconds of each step, in `seconds` by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def publish(job: dict[str, Any]) -> dict[str, Any]:
    """Fills the slabs of a layout once and publishes them under each of `models`: name -> number of tensors."""
    from weightcached.fds import raise_descriptor_limit
    from weightcached.paths import socket_path
    from weightcached.shard.key import ShardKey
    from weightcached.shard.manifest import ManifestHead, SlabEntry, TensorTable, write_manifest
    from weightcached.wire.connection import Connection
    from weightcached.wire.messages import Publish, Reserve

    raise_descriptor_limit()
    device, slabs, slab_bytes = job["device"], job["slabs"], job["slab_bytes"]
    started = time.perf_counter()
    with ExitStack() as held:
        fds = [held.enter_context(_filled(device, slab, slab_bytes)) for slab in range(slabs)]
        for model, tensors in job["models"].items():
            table = TensorTable(tuple(Layout(slabs, slab_bytes, tensors).entries()))
            with Connection.open(socket_path(device), device=device, client="bench") as worker:
                reply, received = worker.request(Reserve(model=model, nbytes=slabs * slab_bytes))
                received.close()
                head = ManifestHead(
                    model=model,
                    generation=reply["generation"],
                    device=device,
                    key=ShardKey(content=f"bench-{model}", dtype="bfloat16"),
                    slabs=(SlabEntry(slab_bytes),) * slabs,
                    tensor_count=tensors,
                    created=datetime.now(UTC).isoformat(timespec="seconds"),
                )
                with write_manifest(head, table) as manifest:
                    message = [manifest.fileno(), *(fd.fileno() for fd in fds)]
                    _, received = worker.request(Publish(), message, timeout=60.0)
                    received.close()
    return {"seconds": time.perf_counter() - started}


def _filled(device: str, slab: int, nbytes: int) -> OwnedFd:
    """A sealed slab with the pattern; the caller owns it."""
    if _is_host(device):
        from weightcached.shard.host import HostSlab

        with closing(HostSlab(nbytes)) as host:
            for offset in range(0, nbytes, BLOCK):
                length = min(BLOCK, nbytes - offset)
                host.view[offset : offset + length] = pattern(slab, offset, length)
            return host.seal()
    from weightcached.shard.cuda import CudaSlab, check, driver, ordinal_of

    cuda = driver()
    with closing(CudaSlab.create(ordinal_of(device), nbytes)) as slab_memory:
        with slab_memory.context.current():
            filled = min(BLOCK, nbytes)
            check(cuda.cuMemcpyHtoD(slab_memory.address, pattern(slab, 0, filled), filled), "cuMemcpyHtoD")
            while filled < nbytes:  # doubles what is there: a multiple of the block each time
                length = min(filled, nbytes - filled)
                target = slab_memory.address + filled
                check(cuda.cuMemcpyDtoD(target, slab_memory.address, length), "cuMemcpyDtoD")
                filled += length
        slab_memory.context.synchronize()
        return slab_memory.seal()


def engine(job: dict[str, Any]) -> dict[str, float]:
    """Attaches to `model` on `device` (torch's name for a GPU) and makes every view."""
    clock, layout = Clock(), Layout(**job["layout"])
    device = job["device"]
    torch = _start_torch(clock, device)
    if not _is_host(device):
        with clock.step("import cuda.bindings.driver"):
            import cuda.bindings.driver  # noqa: F401
    with clock.step("import client"):
        from weightcached.client.attach import attach

        if not _is_host(device):
            from weightcached.shard.cuda import driver

            driver()
    with clock.step("attach"):
        weights = attach(job["model"], device=device)
    with clock.step("views"):
        tensors = dict(weights)
    if _is_host(device):
        with clock.step("touch"):
            _touch(torch, tensors)
    _check_content(torch, layout, tensors)
    return clock.seconds


def write_file(job: dict[str, Any]) -> dict[str, Any]:
    """The layout's tensors in one file of the safetensors format, written through to disk; it stays in page cache."""
    entries = Layout(**job["layout"]).entries()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        span = [position, position + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
        position += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(job["path"], "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            for offset in range(entry.offset, entry.offset + entry.nbytes, BLOCK):
                length = min(BLOCK, entry.offset + entry.nbytes - offset)
                file.write(pattern(entry.slab, offset, length))
        file.flush()
        os.fsync(file.fileno())  # writing back must not go on while others are measured
    return {"nbytes": position}


def load_file(job: dict[str, Any]) -> dict[str, float]:
    clock, layout = Clock(), Layout(**job["layout"])
    torch = _start_torch(clock, "host-0")
    from safetensors.torch import load_file as load

    with clock.step("load_file"):
        tensors = load(job["path"])
    with clock.step("touch"):
        _touch(torch, tensors)
    _check_content(torch, layout, tensors)
    return clock.seconds


def ipc_export(job: dict[str, Any]) -> dict[str, Any]:
    """Holds the layout's tensors in torch's memory until stdin ends; prints what `rebuild_cuda_tensor` needs of each.

    A tensor of more than 10 MiB is an allocation of its own in torch's allocator, smaller ones may share one.
    """
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    exported, kept = [], []
    for index, entry in enumerate(Layout(**job["layout"]).entries()):
        tensor = torch.full(entry.shape, index % 256, dtype=torch.bfloat16, device=job["device"])
        _, arguments = reduce_tensor(tensor)
        # Classes and the dtype, which are the same for all, are put back by the opening side.
        exported.append([_to_text(value) for place, value in enumerate(arguments) if place not in (0, 4, 5)])
        kept.append(tensor)
    torch.cuda.synchronize()
    print(json.dumps({"tensors": exported}), flush=True)
    sys.stdin.read()
    return {"kept": len(kept)}  # exported memory lives as long as its exporter keeps it


def _to_text(value: Any) -> Any:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_text(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["bytes"])
    return tuple(value) if isinstance(value, list) else value


def ipc_open(job: dict[str, Any]) -> dict[str, float]:
    """Opens the exported tensors, read from stdin, by torch's own function; counts the allocations behind them."""
    clock = Clock()
    torch = _start_torch(clock, job["device"])
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    rows = [[_from_text(value) for value in row] for row in json.loads(sys.stdin.read())["tensors"]]
    calls = [(torch.Tensor, *row[:3], torch.storage.TypedStorage, torch.bfloat16, *row[3:]) for row in rows]
    with clock.step("open"):
        tensors = [rebuild_cuda_tensor(*call) for call in calls]
    for index in {0, len(tensors) // 2, len(tensors) - 1}:
        if not bool((tensors[index] == index % 256).all()):
            raise SystemExit(f"tensor {index} does not hold what was exported")
    # Index 7 of the arguments is the handle of the whole allocation (torch 2.6 to 2.13).
    return {**clock.seconds, "allocations": float(len({call[7] for call in calls}))}


def _start_torch(clock: Clock, device: str) -> Any:
    """The torch module, with CUDA initialised and a context made if `device` is a GPU."""
    with clock.step("import torch"):
        import torch
    if not _is_host(device):
        with clock.step("CUDA initialisation"):
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
    return torch


def _touch(torch: Any, tensors: dict[str, Any]) -> None:
    """Reads a byte of every page: mapping and load_file alike leave the reading to the first use."""
    for tensor in tensors.values():
        tensor.flatten().view(torch.uint8)[::PAGE].sum()


def _check_content(torch: Any, layout: Layout, tensors: dict[str, Any]) -> None:
    """Ends the process with a sentence unless all names are there and some tensors hold what was written."""
    entries = layout.entries()
    if set(tensors) != {entry.name for entry in entries}:
        raise SystemExit(f"{len(tensors)} tensors came, {len(entries)} others were written")
    last = len(entries) - 1
    for index in sorted({0, last // 3, last // 2, 2 * last // 3, last}):
        entry = entries[index]
        tensor = tensors[entry.name]
        wanted = torch.frombuffer(bytearray(pattern(entry.slab, entry.offset, entry.nbytes)), dtype=torch.uint8)
        same = tensor.shape == entry.shape and tensor.dtype == torch.bfloat16
        if not same or not torch.equal(tensor.flatten().view(torch.uint8).cpu(), wanted):
            raise SystemExit(f"{entry.name} does not hold what was written")


ROLES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "publish": publish,
    "engine": engine,
    "write-file": write_file,
    "load-file": load_file,
    "ipc-export": ipc_export,
    "ipc-open": ipc_open,
}


if __name__ == "__main__":
    role, argument = sys.argv[1:]
    print(json.dumps(ROLES[role](json.loads(argument))))
