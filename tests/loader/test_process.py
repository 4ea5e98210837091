"""The loader process, started by hand over its channel, publishing to the workers of a real service."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeCheckpoint
from tests.llama import slab_of, write_llama
from tests.running import RunningService, children_of, wait_for_end
from weightcached.errors import ProtocolError, WeightCacheError, from_wire
from weightcached.loader.process import Job, Target
from weightcached.paths import socket_path
from weightcached.shard.checksum import checksum_host
from weightcached.shard.manifest import (
    ManifestHead,
    TensorTable,
    parse_head,
    parse_table,
    read_checksums,
    read_documents,
)
from weightcached.wire import framing
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach, Evict, Status

DEVICES = ("host-0", "host-1")


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    """A service with two host workers and no models of its own, in a runtime directory that all tests here share."""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTCACHED_RUNTIME_DIR", name)
        patch.delenv("WEIGHTCACHED_SOCKET_TEMPLATE", raising=False)
        running = RunningService(Path(name), 'devices = ["host-0", "host-1"]\n')
        try:
            running.ready()
            yield running
            running.stop()
        finally:
            running.abandon()


@pytest.fixture
def workers(service: RunningService) -> Iterator[None]:
    """Its workers, empty, and emptied again at the end."""
    yield
    for device in DEVICES:
        if status(device)["shards"]:
            with Connection.open(socket_path(device), device=device) as connection:
                _, fds = connection.request(Evict(model="m", force=True))
                fds.close()
        assert not status(device)["shards"]


class Loader:
    """One loader process with the test in the place of the service."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self.channel = channel

    def next(self) -> dict[str, Any] | None:
        """The next message, None when the loader has closed its end."""
        received = framing.receive(self.channel)
        if received is None:
            return None
        received[1].close()
        return framing.decode(received[0])

    def rest(self) -> list[dict[str, Any]]:
        """Every message until the end."""
        messages = []
        while (message := self.next()) is not None:
            messages.append(message)
        return messages

    def error(self) -> WeightCacheError:
        """The error that must be the last word, behind a plan at most, with exit status 1."""
        *before, message = self.rest()
        assert self.process.wait(30) == 1
        assert all("plan" in earlier for earlier in before)
        return from_wire(message["failed"]["error"])


def job_for(checkpoint: Path, devices: tuple[str, ...] = ("host-0",), **more: Any) -> dict[str, Any]:
    """A job as the service sends it."""
    targets = [{"device": device, "socket": str(socket_path(device))} for device in devices]
    return {
        "model": "m",
        "checkpoint": str(checkpoint),
        "targets": targets,
        "parallel": {"tensor": len(devices), "pipeline": 1, "data": 1, "expert": False, "placement": "linear"},
        "rules": [],
        "dtype": None,
        "staging": 16 << 20,
        **more,
    }


@contextmanager
def loader(job: dict[str, Any]) -> Iterator[Loader]:
    """A loader with its job sent; killed at the end if it still runs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "weightcached", "loader", "host-0", "m", "--channel-fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).parents[2],
        )
        theirs.close()
        framing.Frame({"job": job}).send(ours)
        try:
            yield Loader(process, ours)
        finally:
            process.kill()
            process.wait()


def status(device: str = "host-0") -> dict[str, Any]:
    with Connection.open(socket_path(device), device=device) as connection:
        answer, fds = connection.request(Status())
        fds.close()
        return answer


def nothing_reserved() -> bool:
    return all(not status(device)["reservations"] and not status(device)["shards"] for device in DEVICES)


def attached(device: str) -> tuple[ManifestHead, TensorTable, bytes]:
    """What a client finds there, its checksums being those of its bytes."""
    with Connection.open(socket_path(device), device=device) as connection:
        _, fds = connection.request(Attach(model="m"))
        with fds:
            manifest, slab = fds
            head_json, table_json = read_documents(manifest.fileno())
            head, table = parse_head(head_json), parse_table(table_json)
            data = os.pread(slab.fileno(), head.nbytes, 0)
            assert read_checksums(manifest.fileno()) == checksum_host(memoryview(data), table.tensors)
    return head, table, data


@pytest.mark.usefixtures("workers")
def test_says_its_plan_and_its_result_and_publishes(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """The plan comes first, the result last, every byte of the file was read once; the manifest says what was read."""
    weights = os.urandom(9 << 20)
    path = make_checkpoint(tmp_path / "w.safetensors", {"w": ("BF16", (9 << 19,), weights), "x": ("U8", (), b"7")})
    with loader(job_for(path, spec="of the config")) as running:
        plan, *progress, done = running.rest()
        assert running.process.wait(30) == 0
    assert plan["plan"] == {"nbytes": [len(weights) + 1], "bytes_to_read": path.stat().st_size, "tensors": [2]}
    assert all(list(message) == ["progress"] for message in progress)
    assert done["done"]["bytes_read"] == path.stat().st_size
    assert done["done"]["seconds"] > 0
    head, table, data = attached("host-0")
    shard = {"device": "host-0", "generation": head.generation, "nbytes": len(weights) + 1}
    assert done["done"]["shards"] == [shard]
    assert data == weights + b"7"
    assert [entry.name for entry in table.tensors] == ["w", "x"]
    assert (head.key.dtype, head.key.layout, head.device) == ("bfloat16", "checkpoint", "host-0")
    assert head.files[0].stat[1:3] == (path.stat().st_ino, path.stat().st_size)
    assert head.attributes == {"checkpoint": str(path), "spec": "of the config"}


@pytest.mark.usefixtures("workers")
def test_two_ranks_from_one_pass(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Both ranks of a Llama are published, each to its worker under its own key, and each byte was read once."""
    tensors = write_llama(tmp_path, make_checkpoint)
    with loader(job_for(tmp_path, DEVICES)) as running:
        plan, *_, done = running.rest()
        assert running.process.wait(30) == 0
    slabs = [slab_of(tensors, rank, 2) for rank in range(2)]
    size = (tmp_path / "model.safetensors").stat().st_size
    sizes = [len(slab) for slab in slabs]
    assert plan["plan"] == {"nbytes": sizes, "bytes_to_read": size, "tensors": [len(tensors)] * 2}
    assert done["done"]["bytes_read"] == size
    heads = []
    for rank, device in enumerate(DEVICES):
        head, table, data = attached(device)
        assert data == slabs[rank]
        assert [entry.name for entry in table.tensors] == list(tensors)
        assert (head.key.tensor_parallel_size, head.key.tensor_parallel_rank) == (2, rank)
        assert (head.key.architecture, head.device) == ("LlamaForCausalLM", device)
        heads.append(head)
    assert done["done"]["shards"] == [
        {"device": head.device, "generation": head.generation, "nbytes": nbytes}
        for head, nbytes in zip(heads, sizes, strict=True)
    ]
    assert heads[0].key.content == heads[1].key.content
    assert heads[0].files == heads[1].files


@pytest.mark.usefixtures("workers")
def test_ranks_on_other_nodes_are_planned_and_not_loaded(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Of four ranks the second and the third: their bytes, under the keys that they have among all four."""
    tensors = write_llama(tmp_path, make_checkpoint)
    with loader(job_for(tmp_path, DEVICES, parallel={"tensor": 2, "data": 2}, first=1)) as running:
        plan, *_, done = running.rest()
        assert running.process.wait(30) == 0
    assert len(plan["plan"]["nbytes"]) == 2
    assert done["done"]["bytes_read"] == (tmp_path / "model.safetensors").stat().st_size
    for device, data, tensor in zip(DEVICES, (0, 1), (1, 0), strict=True):
        head, _, slab = attached(device)
        assert (head.key.data_parallel_rank, head.key.tensor_parallel_rank) == (data, tensor)
        assert slab == slab_of(tensors, tensor, 2)


@pytest.mark.usefixtures("workers")
def test_the_first_target_is_the_first_rank(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """The order of the targets decides which device gets which rank, not the devices' numbers."""
    tensors = write_llama(tmp_path, make_checkpoint)
    with loader(job_for(tmp_path, ("host-1", "host-0"))) as running:
        running.rest()
        assert running.process.wait(30) == 0
    for rank, device in enumerate(("host-1", "host-0")):
        head, _, data = attached(device)
        assert (head.key.tensor_parallel_rank, data) == (rank, slab_of(tensors, rank, 2))


@pytest.mark.usefixtures("workers")
def test_pipeline_stages_and_a_cast(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Two stages with explicit layers, as float16: keys and tables say both, the content is that of the files."""
    pytest.importorskip("torch")
    write_llama(tmp_path, make_checkpoint)
    with loader(job_for(tmp_path)) as running:
        running.rest()
    content = attached("host-0")[0].key.content
    parallel = {"tensor": 1, "pipeline": 2, "data": 1, "layers": [1, 2]}
    with loader(job_for(tmp_path, DEVICES, parallel=parallel, dtype="float16")) as running:
        running.rest()
        assert running.process.wait(30) == 0
    for stage, device in enumerate(DEVICES):
        head, table, _ = attached(device)
        assert (head.key.pipeline_parallel_size, head.key.pipeline_parallel_rank) == (2, stage)
        assert head.key.layers == ((0, 1), (1, 3))[stage]
        assert (head.key.dtype, head.key.content) == ("float16", content)
        assert {entry.dtype for entry in table.tensors} == {"F16"}
        layers = {int(entry.name.split(".")[2]) for entry in table.tensors if ".layers." in entry.name}
        assert layers == ({0}, {1, 2})[stage]


@pytest.mark.usefixtures("workers")
def test_tied_names_are_in_the_table(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """A head that shares the embedding's bytes is an alias of it in the manifest."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true}')
    make_checkpoint(tmp_path / "model.safetensors", {"model.embed_tokens.weight": ("BF16", (4, 2), os.urandom(16))})
    with loader(job_for(tmp_path)) as running:
        running.rest()
        assert running.process.wait(30) == 0
    assert attached("host-0")[1].aliases == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.usefixtures("workers")
def test_a_quantised_checkpoint_carries_its_method(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """The key has the quantisation of config.json and a digest of its settings, and the first architecture."""
    make_checkpoint(tmp_path / "model.safetensors", {"w": ("F8_E4M3", (4,), b"1234")})
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "fp8", "bits": 8}}'
    )
    with loader(job_for(tmp_path)) as running:
        running.rest()
        assert running.process.wait(30) == 0
    key = status()["shards"][0]["key"]
    assert (key["architecture"], key["quantization"]) == ("Qwen3ForCausalLM", "fp8")
    assert len(key["quantization_digest"]) == 32


# Errors.


@pytest.mark.usefixtures("workers")
def test_an_error_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """A checkpoint that is not there: the typed error comes over the channel, exit status 1, no reservation stays."""
    with loader(job_for(tmp_path / "nowhere")) as running:
        error = running.error()
    assert error.code == "bad-checkpoint"
    assert str(tmp_path / "nowhere") in str(error)
    assert nothing_reserved()


@pytest.mark.usefixtures("workers")
def test_a_model_that_cannot_be_cut(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Sizes that the ranks do not divide are an error by their names, before any device is asked for anything."""
    write_llama(tmp_path, make_checkpoint)
    config = (tmp_path / "config.json").read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 3')
    (tmp_path / "config.json").write_text(config)
    with loader(job_for(tmp_path, DEVICES)) as running:
        error = running.error()
    assert error.code == "cannot-cut"
    assert "q_proj" in str(error)
    assert nothing_reserved()


@pytest.mark.usefixtures("workers")
def test_an_unknown_architecture(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Nothing is guessed for a model without rules: its name comes back, and nothing is reserved."""
    write_llama(tmp_path, make_checkpoint)
    config = (tmp_path / "config.json").read_text().replace("LlamaForCausalLM", "StrangeForCausalLM")
    (tmp_path / "config.json").write_text(config)
    with loader(job_for(tmp_path, DEVICES)) as running:
        error = running.error()
    assert error.code == "unknown-architecture"
    assert "StrangeForCausalLM" in str(error)
    assert nothing_reserved()


@pytest.mark.usefixtures("workers")
def test_a_rank_whose_worker_is_not_there(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """The other rank's reservation goes with the loader, and nobody publishes half a model."""
    write_llama(tmp_path, make_checkpoint)
    job = job_for(tmp_path, DEVICES)
    job["targets"][1]["socket"] = str(tmp_path / "nobody.sock")
    with loader(job) as running:
        error = running.error()
    assert error.code == "service-not-running"
    assert nothing_reserved()


@pytest.mark.parametrize("change", [{"targets": []}, {"first": 1}, {"colour": "blue"}], ids=str)
@pytest.mark.usefixtures("workers")
def test_a_job_that_is_not_understood_is_said(tmp_path: Path, change: dict[str, Any]) -> None:
    """A job of another version, or one that does not fit together, is a protocol error and reserves nothing."""
    with loader(job_for(tmp_path, **change)) as running:
        assert isinstance(running.error(), ProtocolError)
    assert nothing_reserved()


# Ends that nobody chose.


def large(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(tmp_path / "w.safetensors", {"w": ("U8", (64 << 20,), os.urandom(64 << 20))})


@pytest.mark.usefixtures("workers")
def test_a_loader_whose_service_is_gone_ends(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """When the channel closes, the load ends without publishing."""
    path = large(tmp_path, make_checkpoint)
    with loader(job_for(path)) as running:
        running.channel.close()
        assert running.process.wait(30) == 1
    assert status()["shards"] == []


@pytest.mark.usefixtures("workers")
def test_a_killed_loader_gives_its_room_back(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """SIGKILL while it holds a reservation and a half-filled slab: the worker's figures are as before, and its readers
    are gone."""
    path = large(tmp_path, make_checkpoint)
    with loader(job_for(path)) as running:
        assert "plan" in (running.next() or {})
        end = time.monotonic() + 30
        while not status()["reservations"]:
            assert time.monotonic() < end
            assert running.process.poll() is None
        running.process.send_signal(signal.SIGSTOP)
        readers = children_of(running.process.pid)
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        for pid in readers:
            wait_for_end(pid)
        while (now := status())["reservations"]:  # the worker sees the connection close in its own time
            assert time.monotonic() < end
    assert (now["shards"], now["held"]) == ([], 0)


# Jobs by themselves.


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"targets": []}, "a job of 1 ranks with 0 targets"),
        ({"parallel": {"tensor": 2}, "first": 2}, "a job of 2 ranks with 1 targets from rank 2 on"),
        ({"first": -1}, "a job of 1 ranks with 1 targets from rank -1 on"),
        ({"parallel": {"tensor": 0}}, "tensor parallel size must be"),
        ({"parallel": {"pipeline": 2, "layers": [3]}}, "pipeline layers are given for 1 stages"),
        ({"parallel": {"experts": 2}}, "unexpected keyword argument 'experts'"),
        ({"parallel": 3}, "not readable"),
        ({"colour": "blue"}, "unexpected keyword argument 'colour'"),
        ({"targets": [{"device": "host-0"}]}, "missing 1 required positional argument: 'socket'"),
        ({"targets": ["host-0"]}, "not readable"),
        ({"rules": 7}, "not readable"),
    ],
)
def test_what_a_job_must_be(service: RunningService, change: dict[str, Any], problem: str) -> None:
    """Fields that nobody knows, that are missing or of another form, and numbers that do not fit, are named."""
    with pytest.raises(ProtocolError, match=problem):
        Job.from_message({"job": job_for(service.runtime_dir, **change)})
    with pytest.raises(ProtocolError, match="not readable"):
        Job.from_message({"task": job_for(service.runtime_dir)})


def test_a_job_says_everything_or_what_is_usual(service: RunningService) -> None:
    """Only model, checkpoint and targets must be there: one rank, no rules, no cast."""
    targets = [{"device": "host-0", "socket": "s"}]
    job = Job.from_message({"job": {"model": "m", "checkpoint": "/c", "targets": targets}})
    assert job == Job("m", "/c", (Target("host-0", "s"),))
    assert (job.parallel.world, job.rules, job.dtype) == (1, (), None)
    full = Job.from_message({"job": job_for(service.runtime_dir, DEVICES, rules=["a.* = column"], dtype="float16")})
    assert (full.parallel.tensor, full.rules, full.dtype, full.staging) == (2, ("a.* = column",), "float16", 16 << 20)
