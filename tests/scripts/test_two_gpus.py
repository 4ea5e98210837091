"""`scripts/gpu/two_gpus.sh`, as far as two host devices go: every step, with real services and ranks under torchrun.

Two engine processes compute a tensor parallel forward pass over gloo from the shards that they have attached.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.running import RunningService, import_path
from tests.scripts.test_bench import SCRIPTS, temporary
from tests.service.conftest import model
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.devices import gpu_devices
from weightcached.loader.keys import keys_of
from weightcached.loader.plan import plan_load
from weightcached.loader.readers import Readers
from weightcached.loader.slabs import Devices, fill_slabs
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices
from weightcached.paths import socket_path
from weightcached.shard.manifest import ManifestHead, SlabEntry, TensorTable, write_manifest
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Publish, Reserve

__all__ = ["temporary"]  # a fixture, found here by its name
torch = pytest.importorskip("torch")


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with the forward pass."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu"))
    return __import__("sliced_qwen3")


@pytest.mark.timeout(300)  # it starts some twenty Pythons with torch
def test_a_dry_run_on_host_devices(temporary: Path, tmp_path: Path) -> None:
    """Every step passes, and the table is in the file as well. Ranks are equal to the whole model, also while worker,
    loader and service are killed; what a rank may not have is refused; bytes are read once."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTCACHED_")}
    environ |= {"TWO_GPUS_PYTHON": sys.executable, "TMPDIR": str(temporary), "PYTHONPATH": import_path()}
    command = [str(SCRIPTS / "gpu" / "two_gpus.sh"), "--device", "host", "--kills", "2"]
    done = subprocess.run([*command, "--json", str(tmp_path / "out.json")], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    steps = [row["step"] for row in rows]
    assert list(dict.fromkeys(steps)) == [
        "", "load", "tensor parallel", "visibility", "data parallel", "isolation", "nodes",
    ]  # fmt: skip
    assert {row["ok"] for row in rows} == {"yes", "-"}
    equal = [row for row in rows if row["result"].startswith("logits differ by")]
    assert len(equal) == 7
    assert "two ranks and the whole model" in done.stdout
    ratios = [row["result"] for row in rows if row["what"].startswith("bytes read / checkpoint")]
    assert ratios == ["1.000"] * 3


def test_a_run_that_is_ended_leaves_nothing(temporary: Path) -> None:
    """By SIGTERM, too: the table of what was done is printed, services end, and the checkpoint is removed."""
    environ = {**os.environ, "TWO_GPUS_PYTHON": sys.executable, "PYTHONPATH": import_path()}
    command = [str(SCRIPTS / "gpu" / "two_gpus.sh"), "--device", "host", "--folder", str(temporary)]
    with subprocess.Popen(
        [*command, "--steps", "isolation"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        while "isolation" not in (line := run.stderr.readline()):
            assert line
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        service = children[0]  # the oldest
        assert b"serve" in Path(f"/proc/{service}/cmdline").read_bytes().split(b"\0")
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=50)
    assert run.returncode
    assert "GB written" in out
    assert not list(temporary.iterdir())
    assert not Path(f"/proc/{service}").exists()


@pytest.mark.parametrize("option", [("--kills", "0"), ("--gb", "nan"), ("--json", "/no/file"), ("--folder", "/no")])
def test_options_are_checked_first(option: tuple[str, str]) -> None:
    """Exit status 2, with the option's name, before anything is written."""
    command = [sys.executable, str(SCRIPTS / "gpu" / "two_gpus.py"), "--device", "host", *option]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": import_path()}, capture_output=True, text=True)
    assert (done.returncode, option[0] in done.stderr.splitlines()[-1]) == (2, True)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_two_ranks_on_one_device(sliced: ModuleType, runtime_dir: Path, tmp_path: Path, kind: str) -> None:
    """Both shards lie on it, each under a name of its own, since a service has one shard of a model on a device. Two
    processes attach one each, and are equal to the whole model, which a third one has."""
    service_module = __import__("two_gpus_service")
    device = "host-0" if kind == "host" else gpu_devices()[0].name
    shape = sliced.Shape.of_bytes(2_000_000)
    sliced.write(tmp_path / "model", shape)
    service = RunningService(runtime_dir, f'devices = ["{device}"]\n' + model("whole", tmp_path / "model")).ready()
    try:
        load_ranks(tmp_path / "model", device)
        job = {"model": "whole", "devices": [device] * 2, "shape": asdict(shape), "backend": "gloo"}
        job["reference"] = str(tmp_path / "reference.pt")
        environ = {**os.environ, "PYTHONPATH": import_path(), "WEIGHTCACHED_RUNTIME_DIR": str(runtime_dir)}
        where = SimpleNamespace(environ=environ)
        for size, names in ((1, ["whole"]), (2, ["rank-0", "rank-1"])):
            ranks = service_module.Ranks(tmp_path, {**job, "names": names}, where, size)
            try:
                assert [answer["device"] for answer in ranks.hello] == [device] * size
                assert ranks.forward()[0] < 0.03
                ranks.end()
            finally:
                ranks.close()
    finally:
        service.stop()


def load_ranks(folder: Path, device: str) -> None:
    """What a loader does, with both ranks of the checkpoint on one device, as "rank-0" and "rank-1"."""
    parallel = Parallel(tensor=2)
    with ExitStack() as stack:
        devices = stack.enter_context(Devices([device] * 2))
        checkpoint = stack.enter_context(open_checkpoint(folder))
        shards = plan_slices(list(checkpoint.tensors()), checkpoint.config, parallel)
        plan = plan_load(checkpoint, [shard.slices for shard in shards])
        filled, result = fill_slabs(plan, checkpoint, devices, 64 << 20, Readers(1))
        for rank, key in enumerate(keys_of(checkpoint, parallel, shards, result.content)):
            stack.enter_context(filled[rank].fd)
            worker = stack.enter_context(Connection.open(socket_path(device), device=device, client="test"))
            slab = plan.slabs[rank]
            reply, fds = worker.request(Reserve(model=f"rank-{rank}", nbytes=slab.nbytes), timeout=30)
            fds.close()
            head = ManifestHead(
                model=f"rank-{rank}",
                generation=reply["generation"],
                device=device,
                key=key,
                slabs=(SlabEntry(slab.nbytes),),
                tensor_count=len(slab.entries),
                created="now",
                files=result.files,
            )
            table = TensorTable(slab.entries, shards[rank].aliases)
            with write_manifest(head, table, filled[rank].checksums) as manifest:
                _, fds = worker.request(Publish(), [manifest.fileno(), filled[rank].fd.fileno()], timeout=30)
                fds.close()


def test_without_two_gpus(tmp_path: Path) -> None:
    """It says so, and how a dry run is made."""
    path = import_path() + os.pathsep + str(SCRIPTS / "gpu")
    start = "import sys, two_gpus; two_gpus.gpu_devices = lambda: []; sys.argv[1:] = []; sys.exit(two_gpus.main())"
    command, environ = [sys.executable, "-c", start], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "two GPUs are needed, 0 found; --device host is a dry run" in done.stderr


def test_the_forward_pass_is_that_of_transformers(sliced: ModuleType, tmp_path: Path) -> None:
    """From the same files: what the ranks are compared with is the model that transformers computes."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    shape = sliced.Shape.of_bytes(2_000_000)
    assert sliced.write(tmp_path, shape) == (tmp_path / "model.safetensors").stat().st_size
    weights = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    tokens = torch.randint(shape.vocab, (16,))
    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
        found = sliced.forward(weights, shape, tokens)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def test_the_model_is_as_large_as_asked_for(sliced: ModuleType) -> None:
    """Within a layer, for one GB and for the 30 GB of a run on GPUs."""
    for nbytes in (1_000_000_000, 30_000_000_000):
        shape = sliced.Shape.of_bytes(nbytes)
        assert 0.95 < shape.nbytes / nbytes <= 1
        assert all(number % 2 == 0 for number in (shape.heads, shape.kv_heads, shape.intermediate, shape.vocab))
