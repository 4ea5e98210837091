"""The main job, end to end: a real service loads files, others attach, look, evict. On the host and on a GPU."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.conftest import MakeCheckpoint
from tests.leaks import NoDescriptorLeaks
from tests.running import RunningService
from weightcached import attach
from weightcached.devices import gpu_devices
from weightcached.errors import KeyMismatch, ModelFailed, NoSuchModel, TimedOut
from weightcached.shard.dtypes import DTYPES

ROOT = Path(__file__).parents[1]
ENGINE = """
import hashlib, json, sys, torch
source, folder, device = sys.argv[1:]
from transformers import AutoModel
from weightcached.engines.transformers import from_cache
place = "cpu" if device.startswith("host") else "cuda:0"
model = from_cache(folder, device=device) if source == "cache" else AutoModel.from_pretrained(folder).to(place)
ids = torch.tensor([[101, 1996, 15871, 2024, 2525, 2045, 1012, 102]], device=place)
with torch.no_grad():
    embedding = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)
data = embedding.float().cpu().numpy().tobytes()
print(json.dumps({"digest": hashlib.sha256(data).hexdigest(), "norm": embedding.norm().item()}), flush=True)
sys.stdin.read()
"""
WRITER = """
import sys, torch, weightcached
weights = weightcached.attach("m", device=sys.argv[1])
tensor = weights["f32"]
try:
    tensor.zero_()
    if tensor.is_cuda: torch.cuda.synchronize()
    print("written", tensor.count_nonzero().item())
except RuntimeError as error:
    print("refused", type(error).__name__)
"""
StartService = Callable[..., RunningService]


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The name of a device of each kind."""
    return "host-0" if request.param == "host" else gpu_devices()[0].name


@pytest.fixture
def serve(runtime_dir: Path, device: str) -> Iterator[StartService]:
    """``serve(name=checkpoint, ...)`` starts a service for the device with these models and waits until it is ready."""
    started: list[RunningService] = []

    def start(preload: bool = True, **models: Path) -> RunningService:
        config = f'devices = ["{device}"]\n'
        for name, path in models.items():
            config += f'[[model]]\nname = "{name}"\ncheckpoint = "{path}"\npreload = {str(preload).lower()}\n'
        started.append(RunningService(runtime_dir, config))
        return started[-1].ready()

    yield start
    for service in started:
        service.abandon()


def place(device: str) -> str:
    """torch's name of the device."""
    return "cpu" if device.startswith("host") else "cuda:0"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with every dtype that torch has, as matrices of odd sizes, 0-dim and empty."""
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "f32": torch.rand(33, 17)}
    for dtype in DTYPES.values():
        element = getattr(torch, dtype.torch_name or "", None)
        if element is None:
            continue
        highest = 2 if dtype.name == "BOOL" else 256
        data = torch.randint(0, highest, (5, 3, element.itemsize), dtype=torch.uint8)
        tensors[f"{dtype.name}.matrix"] = data.view(element).reshape(5, 3)
        tensors[f"{dtype.name}.empty"] = torch.empty(0, 2, dtype=torch.uint8).repeat(1, element.itemsize).view(element)
        if dtype.packed == 1:
            tensors[f"{dtype.name}.scalar"] = data[0, 0].clone().view(element).reshape(())
    path = tmp_path / "saved.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, whatever their dtype and device."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy()) if tensor.numel() else b""


@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
def test_what_load_file_gives(serve: StartService, device: str, saved: Path, mode: Any) -> None:
    """Names, dtypes, shapes and bytes of every tensor are those of `load_file`, on the right device."""
    service = serve(m=saved)
    expected = safetensors.torch.load_file(saved)

    with attach("m", device=device, mode=mode) as weights:
        assert set(weights) == set(expected)
        for name, want in expected.items():
            have = weights[name]
            assert have.device == torch.device(place(device)), name
            assert (have.dtype, have.shape) == (want.dtype, want.shape), name
            assert raw_bytes(have) == raw_bytes(want), name
        if mode == "copy":
            weights["f32"].zero_()
            assert weights["f32"].count_nonzero() == 0
    with attach("m", device=device) as again:
        assert raw_bytes(again["f32"]) == raw_bytes(expected["f32"])
    del weights, again, have
    gc.collect()
    service.stop()


def test_dtypes_that_torch_lacks(
    serve: StartService, device: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """F6 comes as its bytes, through the real loader."""
    data = os.urandom(12)
    path = make_checkpoint(tmp_path / "f6.safetensors", {"t": ("F6_E2M3", (4, 4), data)})
    service = serve(m=path)
    with attach("m", device=device) as weights:
        assert (weights["t"].dtype, weights["t"].shape) == (torch.uint8, (12,))
        assert raw_bytes(weights["t"]) == data
    service.stop()


def test_a_stray_write_reaches_nobody(serve: StartService, device: str, saved: Path) -> None:
    """On the host it stays in the writer; on a GPU it is an error in the writer. Everyone else reads what was there."""
    service = serve(m=saved)
    with attach("m", device=device) as weights:
        before = raw_bytes(weights["f32"])
        run = subprocess.run(
            [sys.executable, "-c", WRITER, device], cwd=ROOT, capture_output=True, text=True, timeout=50
        )
        expected = "written 0\n" if device == "host-0" else "refused AcceleratorError\n"
        assert run.stdout == expected, run.stderr
        assert raw_bytes(weights["f32"]) == before
    with attach("m", device=device) as again:
        assert raw_bytes(again["f32"]) == before
    service.stop()


def test_leases_follow_the_tensors(serve: StartService, device: str, saved: Path) -> None:
    """`status` shows this process as long as a tensor lives, and an eviction without force is refused so long."""
    service = serve(m=saved)

    def holders() -> list[int]:
        (found,) = service.status()["devices"]
        return [lease["pid"] for shard in found["shards"] for lease in shard["leases"]]

    weights = attach("m", device=device)
    kept = [weights["f32"].view(-1)[5:]]
    weights.close()
    assert holders() == [os.getpid()]
    assert "in use" in service.ctl("evict", "m", code=5)
    value = kept[0].sum().item()

    service.ctl("evict", "m", "--force")
    assert kept[0].sum().item() == value
    with pytest.raises(NoSuchModel):
        attach("m", device=device)
    kept.clear()
    gc.collect()
    assert holders() == []
    service.stop()


def test_a_service_that_dies_takes_nothing_along(serve: StartService, device: str, saved: Path) -> None:
    """After SIGKILL of the service an attached process goes on reading its tensors."""
    service = serve(m=saved)
    weights = attach("m", device=device)
    service.process.send_signal(signal.SIGKILL)
    service.process.wait(30)
    assert raw_bytes(weights["f32"]) == raw_bytes(safetensors.torch.load_file(saved)["f32"])
    weights.close()
    service.stop(code=None)


def test_waiting_loads_what_is_not_preloaded(serve: StartService, device: str, saved: Path) -> None:
    """A model with preload = false is loaded by the first attach that waits for it."""
    service = serve(preload=False, m=saved)
    with pytest.raises(NoSuchModel):
        attach("m", device=device)
    with attach("m", device=device, on_miss="wait", timeout=30) as weights:
        assert raw_bytes(weights["f32"]) == raw_bytes(safetensors.torch.load_file(saved)["f32"])
    service.stop()


def test_waiting_for_a_load_that_fails(serve: StartService, device: str, tmp_path: Path, saved: Path) -> None:
    """A checkpoint that turns out to be broken ends the wait with the loader's reason."""
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(saved.read_bytes()[:-1])
    service = serve(preload=False, m=broken)
    with pytest.raises(ModelFailed, match=r"broken\.safetensors"):
        attach("m", device=device, on_miss="wait", timeout=30)
    service.stop()


def test_a_checkpoint_path_and_wanted_fields(serve: StartService, device: str, saved: Path, tmp_path: Path) -> None:
    """The file that was loaded is found by its path, another is not; a wrong dtype is refused with both values."""
    service = serve(m=saved)
    with attach(checkpoint=saved, device=device) as weights:
        assert weights.manifest.model == "m"
        dtype = weights.key.dtype
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(1)}, other)
    with pytest.raises(NoSuchModel):
        attach(checkpoint=other, device=device)
    with pytest.raises(TimedOut):
        attach(checkpoint=other, device=device, on_miss="wait", timeout=0.2)
    with pytest.raises(KeyMismatch) as caught:
        attach("m", device=device, dtype="float128")
    assert caught.value.differences == {"dtype": ["float128", dtype]}
    service.stop()


def test_many_threads_attach_at_once(serve: StartService, device: str, saved: Path) -> None:
    """Attaches from several threads of one process do not disturb each other, and leave no descriptor."""
    service = serve(m=saved)
    expected = raw_bytes(safetensors.torch.load_file(saved)["f32"])
    with attach("m", device=device) as weights:
        raw_bytes(weights["f32"])
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            with attach("m", device=device) as weights:
                if raw_bytes(weights["f32"]) != expected:
                    wrong.append(number)

    with NoDescriptorLeaks():
        threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while service.status()["devices"][0]["shards"][0]["leases"]:
            pass  # a thread of the client's closes them, soon after
    assert wrong == []
    service.stop()


@pytest.mark.timeout(240)
def test_engines_come_and_go(serve: StartService, device: str, minilm: Path) -> None:
    """A real model: an engine embeds a sentence, is killed, starts again; both times bit for bit as from disk."""
    service = serve(minilm=minilm)

    def engine(source: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        child = subprocess.Popen(
            [sys.executable, "-c", ENGINE, source, str(minilm), device],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        return child, json.loads(child.stdout.readline())

    results = []
    for source, end in (("cache", signal.SIGKILL), ("cache", signal.SIGTERM), ("disk", signal.SIGTERM)):
        child, result = engine(source)
        results.append(result)
        (found,) = service.status()["devices"]
        pids = [lease["pid"] for shard in found["shards"] for lease in shard["leases"]]
        assert pids == ([child.pid] if source == "cache" else [])
        with child:
            child.send_signal(end)
            assert child.wait(30) == -end
    assert results[0] == results[1] == results[2]
    assert results[0]["norm"] > 0
    service.ctl("evict", "minilm")
    service.stop()
