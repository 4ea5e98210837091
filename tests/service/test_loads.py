"""Loads of a real service: queued, waited for, called off, killed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeCheckpoint
from tests.gpu import becomes_true
from tests.llama import LAYERS, Tensor, slab_of, write_llama
from tests.running import process_of_role, wait_for_end
from tests.service.conftest import HOST, HOSTS, StartService, attach, generation, held_by, model, slab_bytes
from tests.wire.serving import Client
from tests.worker.process import shard
from weightcached.config import ModelConfig, load_config
from weightcached.errors import (
    ConnectionLost,
    DeviceError,
    KeyMismatch,
    LoadFailed,
    ModelFailed,
    ModelLoading,
    NoSuchModel,
    RuntimeDirectoryError,
    WeightCacheError,
    to_wire,
)
from weightcached.loader.process import Job
from weightcached.parallel.ranks import Parallel
from weightcached.service import loads, workers
from weightcached.service.loads import Loads
from weightcached.service.models import Model
from weightcached.service.spec import spec_of

Llama = tuple[Path, dict[str, Tensor]]


def test_a_model_without_preload_loads_when_a_client_waits_for_it(
    start_service: StartService, checkpoint: Path
) -> None:
    """`preload = false`: absent at the start, refused to a client that does not wait, loaded for one that does."""
    service = start_service(HOST + model("lazy", checkpoint, "preload = false")).ready()
    assert service.model("lazy")["state"] == "absent"
    with pytest.raises(NoSuchModel):
        attach("lazy")
    worker, fds = attach("lazy", wait=20)
    with worker, fds:
        assert generation(fds) == 1
    service.stop()


def test_a_model_that_is_loading_says_so(start_service: StartService, checkpoint: Path) -> None:
    """While the loader is stopped, an attach is refused as loading and `wait` times out; the start goes on."""
    service = start_service('ready = "listening"\n' + HOST + model("small", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ready()
    with pytest.raises(ModelLoading):
        attach("small")
    assert "small (loading)" in service.ctl("wait", "--timeout", "0.2", code=1)
    os.kill(loader, signal.SIGCONT)
    service.ctl("wait", "small", "--timeout", "30")
    service.stop()


def test_stopping_during_a_load(start_service: StartService, checkpoint: Path) -> None:
    """SIGTERM while a model loads ends the loader, leaves nothing, and is a clean end."""
    service = start_service(HOST + model("small", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.stop()
    wait_for_end(loader)


def test_a_killed_loader_is_a_failed_model(start_service: StartService, checkpoint: Path) -> None:
    """SIGKILL of the loader: the model is failed with that reason, others are served, a client that does not wait is
    refused. The next one that waits has it loaded: the kernel may have been short of memory."""
    config = 'ready = "listening"\n' + HOST + model("first", checkpoint) + model("second", checkpoint)
    service = start_service(config)
    os.kill(process_of_role(service, "loader"), signal.SIGKILL)
    service.ready()
    service.ctl("wait", "second", "--timeout", "30")
    assert "SIGKILL" in service.ctl("wait", "first", code=1)
    with pytest.raises(ModelFailed, match="SIGKILL"):
        attach("first")
    worker, fds = attach("first", wait=30)
    with worker, fds:
        assert generation(fds) == 1
    assert service.status()["devices"][0]["reservations"] == []
    service.stop()


def test_who_waits_when_the_loader_is_killed_has_the_error(start_service: StartService, checkpoint: Path) -> None:
    """It is told at once; the load is not begun again for it, but for the next one."""
    service = start_service(HOST + model("lazy", checkpoint, "preload = false")).ready()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(attach, "lazy", 60)  # its request is what starts the load
        os.kill(process_of_role(service, "loader"), signal.SIGKILL)
        with pytest.raises(ModelFailed, match="SIGKILL"):
            waiting.result(20)
    assert service.model("lazy")["state"] == "failed"
    worker, fds = attach("lazy", wait=30)
    with worker, fds:
        assert generation(fds) == 1
    service.stop()


def test_an_eviction_calls_a_load_off(start_service: StartService, checkpoint: Path) -> None:
    """Evicting a model that is being loaded ends its loader, says so, and is not an error."""
    service = start_service('ready = "listening"\n' + HOST + model("small", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ready()
    assert "called off" in service.ctl("evict", "small")
    wait_for_end(loader)
    assert service.model("small")["state"] == "absent"
    service.ctl("load", "small")
    service.ctl("wait", "small", "--timeout", "30")
    service.stop()


def test_a_refused_eviction_leaves_the_load_alone(
    start_service: StartService, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """While a used model is loaded again, an eviction is refused and the load goes on."""
    path = make_checkpoint(tmp_path / "w.safetensors", {"a": ("U8", (4096,), b"1" * 4096)})
    service = start_service(HOST + model("w", path)).ready()
    holder, held = attach("w")
    make_checkpoint(path, {"a": ("U8", (4096,), b"2" * 4096)})
    service.ctl("reload")
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ctl("evict", "w", code=5)
    os.kill(loader, signal.SIGCONT)
    service.ctl("wait", "w", "--timeout", "30")
    assert service.model("w")["generations"] == [2]
    held.close()
    holder.close()
    service.stop()


async def both_fail(checkpoint: Path) -> tuple[list[Model], asyncio.Task[None]]:
    """Two models that were queued, once the second one has failed, and the queue's task, which still runs."""
    models = [Model(ModelConfig(name=name, checkpoint=str(checkpoint)), ("host-0",)) for name in ("a", "b")]
    ended = asyncio.Event()
    queue = loads.Loads(lambda model: ended.set() if models[1].state == "failed" else None, lambda: 8 << 20)
    task = asyncio.create_task(queue.run())
    for item in models:
        queue.add(item)
    await asyncio.wait_for(ended.wait(), 10)
    return models, task


def test_a_loader_that_cannot_be_started_is_a_failed_model(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, runtime_dir: Path
) -> None:
    """No process or descriptor to be had, or a socket directory not to be trusted: the model fails, nothing else."""
    failures: list[Exception] = [
        OSError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeDirectoryError(path="/x", problem="open to others"),
    ]

    async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        raise failures.pop(0)

    monkeypatch.setattr(loads, "spawn_role", spawn)

    async def main() -> None:
        models, task = await both_fail(checkpoint)
        assert not task.done()
        task.cancel()
        assert "cannot be started: Resource temporarily unavailable" in str(models[0].error)
        assert "open to others" in str(models[1].error)

    asyncio.run(main())


@pytest.mark.usefixtures("runtime_dir")
def test_a_loader_that_cannot_be_killed_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It hangs in the kernel, on its disk: after its time the model has failed, and the next one gets its turn."""
    for module, name in ((loads, "STALL_SECONDS"), (loads, "END_SECONDS"), (workers, "END_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    hanging: list[asyncio.subprocess.Process] = []

    async def spawn(arguments: list[str], fds: dict[str, int]) -> Any:
        if hanging:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        hanging.append(await asyncio.create_subprocess_exec("sleep", "1000", pass_fds=tuple(fds.values())))
        return hanging[0]

    monkeypatch.setattr(loads, "spawn_role", spawn)
    monkeypatch.setattr(loads, "kill", lambda process: None)  # in the kernel's state D it is pending, for ever

    async def main() -> None:
        models, task = await both_fail(checkpoint)
        assert hanging[0].returncode is None
        assert models[0].state == "failed"
        assert "no progress for 0 s" in str(models[0].error)
        task.cancel()
        hanging[0].kill()
        await hanging[0].wait()

    asyncio.run(main())
    assert f"loader pid={hanging[0].pid} does not end" in caplog.text


def test_an_eviction_in_mid_load_ends_the_waiting(start_service: StartService, checkpoint: Path) -> None:
    """Who waits for a load is told at once when an operator calls it off."""
    service = start_service(HOST + model("lazy", checkpoint, "preload = false")).ready()
    with ThreadPoolExecutor(1) as pool:
        attaching = pool.submit(attach, "lazy", 60)  # its request is what starts the load
        os.kill(process_of_role(service, "loader"), signal.SIGSTOP)
        service.ctl("evict", "lazy")
        with pytest.raises(ModelFailed, match="called off"):
            attaching.result(20)
    service.stop()


def test_wait_ends_when_nobody_loads_the_model(start_service: StartService, checkpoint: Path) -> None:
    """`weightcachectl wait` says so when the load is called off, before or while it waits, and exits with 4."""
    service = start_service('ready = "listening"\n' + HOST + model("small", checkpoint))
    os.kill(process_of_role(service, "loader"), signal.SIGSTOP)
    service.ready()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.ctl, "wait", "small", code=4)
        service.ctl("evict", "small")
        assert "weightcachectl load small" in waiting.result(20)
    assert "weightcachectl load small" in service.ctl("wait", "small", code=4)
    service.stop()


def test_an_eviction_during_the_start_does_not_hold_it_up(start_service: StartService, checkpoint: Path) -> None:
    """A model to preload that is evicted while it loads is not waited for: the service is ready with the others."""
    service = start_service(HOST + model("small", checkpoint) + model("other", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ctl("evict", "small")
    service.ready()
    assert (service.model("small")["state"], service.model("other")["state"]) == ("absent", "cached")
    service.stop()


def test_load_tries_again_after_a_failed_reload(start_service: StartService, checkpoint: Path) -> None:
    """A model whose last load failed is loaded again by `load`, although an older generation is served."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    good = checkpoint.read_bytes()
    checkpoint.write_bytes(good[:-1])
    service.ctl("reload")
    service.ctl("wait", "small", code=1)
    checkpoint.write_bytes(good)
    assert "follow it" in service.ctl("load", "small")
    service.ctl("wait", "small", "--timeout", "30")
    assert (service.model("small")["generations"], service.model("small")["error"]) == ([2], None)
    service.stop()


def test_one_load_feeds_all_ranks(start_service: StartService, llama: Llama) -> None:
    """Each device holds its rank, in the order of the config; every byte of the checkpoint was read once."""
    folder, tensors = llama
    service = start_service(
        HOSTS + model("cut", folder, "tensor_parallel = 2", 'devices = ["host-2", "host-0"]')
    ).ready()
    found = service.model("cut")
    assert (found["state"], found["devices"], found["generations"]) == ("cached", ["host-2", "host-0"], [1, 1])
    assert (found["ranks"], found["ranks_cached"]) == (2, 2)
    for rank, device in enumerate(found["devices"]):
        key = {"tensor_parallel_size": 2, "tensor_parallel_rank": rank}
        assert held_by("cut", device, **key) == slab_of(tensors, rank, 2)
    assert found["nbytes"] == sum(len(slab_of(tensors, rank, 2)) for rank in (0, 1))
    assert found["bytes_done"] == found["bytes_to_read"] == (folder / "model.safetensors").stat().st_size
    with pytest.raises(KeyMismatch) as caught:
        attach("cut", device="host-0", tensor_parallel_rank=0)
    assert caught.value.differences == {"tensor_parallel_rank": [0, 1]}
    assert str(caught.value).endswith(
        "host-0 has tensor parallel rank 1 of 2, asked for was tensor parallel rank 0 of 2, which is on host-2: "
        "attach it with device='host-2'"
    )
    with pytest.raises(NoSuchModel):
        attach("cut", device="host-1")
    service.stop()


def test_stages_and_replicas(start_service: StartService, llama: Llama) -> None:
    """Four ranks of two stages and two replicas: the stage's layers are in the key, replicas hold the same bytes."""
    sizes = ["pipeline_parallel = 2", f"pipeline_layers = [1, {LAYERS - 1}]", "data_parallel = 2"]
    service = start_service(HOSTS + model("grid", llama[0], *sizes)).ready()
    keys = [device["shards"][0]["key"] for device in service.status()["devices"]]
    assert [(key["data_parallel_rank"], key["pipeline_parallel_rank"]) for key in keys] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [key["layers"] for key in keys] == [[0, 1], [1, LAYERS]] * 2
    slabs = [held_by("grid", f"host-{number}") for number in range(4)]
    assert slabs[0] == slabs[2] != slabs[1] == slabs[3]
    service.stop()


def test_a_cast_is_in_the_key(start_service: StartService, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """`dtype` reaches the loader: half the bytes, the content's digest is that of the file."""
    path = make_checkpoint(tmp_path / "f32.safetensors", {"a": ("F32", (2, 64), bytes(512))})
    service = start_service(HOST + model("as-is", path) + model("cast", path, 'dtype = "float16"')).ready()
    shards = {shard["model"]: shard for shard in service.status()["devices"][0]["shards"]}
    assert (shards["as-is"]["key"]["dtype"], shards["as-is"]["nbytes"]) == ("float32", 512)
    assert (shards["cast"]["key"]["dtype"], shards["cast"]["nbytes"]) == ("float16", 256)
    assert shards["cast"]["key"]["content"] == shards["as-is"]["key"]["content"]
    service.stop()


def test_a_client_of_any_rank_sets_the_load_off(start_service: StartService, llama: Llama) -> None:
    """A client that waits on the second rank's device gets its rank, and the first one is there as well."""
    service = start_service(HOSTS + model("lazy", llama[0], "tensor_parallel = 2", "preload = false")).ready()
    worker, fds = attach("lazy", wait=30, device="host-1", tensor_parallel_rank=1)
    fds.close()
    worker.close()
    service.ctl("wait", "lazy", "--timeout", "30")
    assert held_by("lazy", "host-0") == slab_of(llama[1], 0, 2)
    service.stop()


def test_clients_of_every_device_hear_of_the_load(start_service: StartService, llama: Llama) -> None:
    """While one loader works for two devices, both workers know: loading, then called off by an operator."""
    service = start_service(HOSTS + model("cut", llama[0], "tensor_parallel = 2", "preload = false")).ready()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(attach, "cut", 60, device="host-1")  # its request is what starts the load
        os.kill(process_of_role(service, "loader"), signal.SIGSTOP)
        for device in ("host-0", "host-1"):
            with pytest.raises(ModelLoading, match=f"still loading on {device}"):
                attach("cut", device=device)
        assert "called off" in service.ctl("evict", "cut")
        with pytest.raises(ModelFailed, match="called off"):
            waiting.result(20)
    assert service.model("cut")["state"] == "absent"
    service.stop()


def test_a_rank_without_room_fails_the_whole_load(start_service: StartService, llama: Llama) -> None:
    """Room is asked for on every device before anything is read: nothing is published on those that have it."""
    folder, tensors = llama
    whole = len(slab_of(tensors, 0, 1))
    config = f'ready = "listening"\nmemory_limit = {whole}\n' + HOSTS
    config += model("first", folder, 'devices = ["host-1"]') + model("cut", folder, "tensor_parallel = 2")
    service = start_service(config).ready()
    assert "rank 1 on host-1: host-1 has no room" in service.ctl("wait", "cut", code=1)
    found = service.model("cut")
    assert (found["state"], found["ranks_cached"], found["generations"]) == ("failed", 0, [None, None])
    assert service.model("first")["state"] == "cached"
    assert [device["held"] for device in service.status()["devices"]] == [0, whole, 0, 0]
    service.ctl("evict", "first")
    service.ctl("load", "cut")
    service.ctl("wait", "cut", "--timeout", "30")
    service.stop()


def test_ranks_of_two_loads_are_not_given_out_by_name(
    start_service: StartService, llama: Llama, runtime_dir: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """A load replaces one rank of two and is killed: no client of either device gets the model by its name, not from a
    restarted worker either, until a later load has replaced both."""
    folder, _ = llama
    service = start_service(HOSTS + model("cut", folder, "tensor_parallel = 2")).ready()
    old = {device: generation_at(device) for device in ("host-0", "host-1")}
    assert old == {"host-0": 1, "host-1": 1}
    content = service.status()["devices"][1]["shards"][0]["key"]["content"]
    tensors = write_llama(folder, make_checkpoint)
    service.ctl("reload")
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    assert {device: generation_at(device) for device in old} == old  # nothing is published yet
    publish_first_rank(runtime_dir)
    for device in old:
        with pytest.raises(ModelLoading):
            attach("cut", device=device)
    os.kill(loader, signal.SIGKILL)
    assert "1 of 2 ranks were published and are evicted again, rank 1 on host-1 was not" in service.ctl(
        "wait", "cut", code=1
    )
    found = service.model("cut")
    assert (found["state"], found["ranks_cached"], found["generations"]) == ("failed", 0, [None, 1])
    assert becomes_true(lambda: service.status()["devices"][0]["shards"] == [])  # nobody can use half of a load
    pid = service.status()["devices"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    for device in old:
        with pytest.raises(ModelFailed, match="1 of 2 ranks"):
            attach("cut", device=device)
    worker, fds = attach("cut", device="host-1", content=content)
    with worker, fds:
        assert generation(fds) == 1
    service.ctl("load", "cut")
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(attach, "cut", 60, device=device) for device in old]
        publish_first_rank(runtime_dir)
        os.kill(loader, signal.SIGCONT)
        for rank, one in enumerate(waiting):
            worker, fds = one.result(30)
            with worker, fds:
                assert slab_bytes(fds) == slab_of(tensors, rank, 2)
    service.stop()


def generation_at(device: str) -> int:
    """Which one a client gets that asks by the name."""
    worker, fds = attach("cut", device=device)
    with worker, fds:
        return generation(fds)


def publish_first_rank(runtime_dir: Path) -> None:
    """Does a stopped loader's work on the device of its first rank: the load in progress has published one rank."""
    with Client(runtime_dir / "host-0.sock") as publisher:
        number = publisher.ask({"op": "reserve", "model": "cut", "nbytes": 4})["generation"]
        with shard("cut", number, b"half") as fds:
            publisher.ask({"op": "publish"}, [fd.fileno() for fd in fds])


LOADER = """
import json, pathlib, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as channel:
    pathlib.Path(sys.argv[2]).write_bytes(channel.recv(65536))
    for message in json.loads(sys.argv[3]):
        channel.send(json.dumps(message).encode())
"""
PLAN = {"plan": {"nbytes": [100, 100], "bytes_to_read": 2, "tensors": [1, 1]}}
FIRST, SECOND = {"progress": {"bytes_done": 1}}, {"progress": {"bytes_done": 2}}  # that rank is published
DONE = {"done": {"shards": [], "bytes_read": 2, "seconds": 1.0}}
Script = list[dict[str, object]]


def failure(error: WeightCacheError) -> dict[str, object]:
    return {"failed": {"error": to_wire(error)}}


def run_scripted(monkeypatch: pytest.MonkeyPatch, job: Path, *scripts: Script, **options: object) -> Model:
    """A model of two ranks after a load whose loaders are scripts, one for each try; the last one's job is in `job`.

    For what the real loader cannot be made to do at will. What the workers would say is said by the test.
    """
    given = {"name": "m", "checkpoint": "/models/m", "tensor_parallel": 2, **options}
    model = Model(ModelConfig.model_validate(given), ("host-0", "host-1"))
    tries = 0
    published: set[tuple[int, int]] = set()

    async def spawn(arguments: list[str], fds: dict[str, int]) -> asyncio.subprocess.Process:
        nonlocal tries
        tries += 1
        assert arguments == ["loader", "host-0,host-1", "m"]
        (fd,) = fds.values()
        command = [sys.executable, "-c", LOADER, str(fd), str(job), json.dumps(scripts[tries - 1])]
        return await asyncio.create_subprocess_exec(*command, pass_fds=(fd,))

    async def main() -> None:
        ended = asyncio.Event()

        def changed(model: Model) -> None:
            rank = (tries, model.bytes_done)
            if model.bytes_done and rank not in published:
                published.add(rank)
                model.published(f"host-{model.bytes_done - 1}", tries, 100)
            if queue.idle and model.state in ("cached", "failed"):
                ended.set()

        queue = loads.Loads(changed, lambda: (9 + tries) << 20)
        task = asyncio.create_task(queue.run())
        queue.add(model)
        await asyncio.wait_for(ended.wait(), 20)
        task.cancel()

    monkeypatch.setattr(loads, "spawn_role", spawn)
    asyncio.run(main())
    assert tries == len(scripts)
    return model


def test_the_job_says_all_that_a_load_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime_dir: Path
) -> None:
    """Checkpoint, a target for each rank in order, sizes, rules, dtype, staging, and a digest of what it depends on."""
    model = run_scripted(
        monkeypatch, tmp_path / "job", [PLAN, FIRST, SECOND, DONE],
        rules=["model.layers.*.extra: col"], dtype="bfloat16", expert_parallel=True,
    )  # fmt: skip
    sent = json.loads((tmp_path / "job").read_text())
    spec = sent["job"]["spec"]
    assert spec_of({"spec": spec}) == model.spec.digest != spec
    assert sent == {
        "job": {
            "model": "m",
            "checkpoint": "/models/m",
            "targets": [{"device": f"host-{n}", "socket": str(runtime_dir / f"host-{n}.sock")} for n in (0, 1)],
            "parallel": {
                "tensor": 2, "pipeline": 1, "data": 1, "expert": True, "placement": "linear", "layers": "vllm",
            },
            "rules": ["model.layers.*.extra: col"],
            "dtype": "bfloat16",
            "staging": 9 << 20,
            "spec": spec,
            "first": 0,
        }
    }  # fmt: skip
    job = Job.from_message(sent)
    assert (job.parallel, job.dtype, len(job.targets)) == (Parallel(tensor=2, expert=True), "bfloat16", 2)


@pytest.mark.usefixtures("runtime_dir")
def test_a_failure_after_the_first_publish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second rank is not published: the model failed, what the first had does not count any more, and the sentence
    names the other."""
    error = DeviceError(device="host-1", problem="is on fire")
    model = run_scripted(monkeypatch, tmp_path / "job", [PLAN, FIRST, failure(error)])
    assert (model.state, model.ranks_cached, model.generation_on("host-0")) == ("failed", 0, None)
    assert isinstance(model.error, LoadFailed)
    assert "1 of 2 ranks were published and are evicted again, rank 1 on host-1 was not: host-1: is on fire" in str(
        model.error
    )


@pytest.mark.usefixtures("runtime_dir")
def test_a_worker_that_dies_between_two_publishes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The load is tried again, and publishes every rank anew; three times at most."""
    lost = failure(ConnectionLost(path="host-1.sock", problem="the other side closed it"))
    half: Script = [PLAN, FIRST, lost]
    model = run_scripted(monkeypatch, tmp_path / "job", half, [PLAN, FIRST, SECOND, DONE])
    assert (model.state, model.error) == ("cached", None)
    assert [model.generation_on(device) for device in model.devices] == [2, 2]
    assert json.loads((tmp_path / "job").read_text())["job"]["staging"] == 10 << 20  # as the config said by then
    model = run_scripted(monkeypatch, tmp_path / "job", half, half, half)
    assert (model.state, model.ranks_cached, model.generation_on("host-0")) == ("failed", 0, None)
    assert "rank 1 on host-1 was not: host-1.sock: the other side closed it" in str(model.error)


def test_models_of_several_nodes_go_in_the_order_of_their_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nodes that were asked for them in another order would wait for each other. Any other model keeps its place."""
    path = tmp_path / "node.toml"
    engine = 'tensor_parallel = 2\npublisher = ["engine"]'
    models = "".join(
        f'[[model]]\nname = "{name}"\ncheckpoint = "/{name}"\n{more}\n'
        for name, more in (("c", engine), ("own", "tensor_parallel = 2"), ("b", engine), ("a", engine))
    )
    cluster = '[cluster]\nnodes = 2\nnode_rank = 0\nmaster_addr = "h"\nmaster_port = 1\npublisher_port = 2\n'
    path.write_text(models + cluster)
    begun: list[str] = []

    async def load(self: Loads, model: Model) -> None:
        begun.append(model.name)

    monkeypatch.setattr(Loads, "_load", load)

    async def main() -> None:
        loads = Loads(lambda model: None, lambda: 0)
        for item in load_config(path).models:
            loads.add(Model(item, ("host-0",)))
        task = asyncio.create_task(loads.run())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    assert begun == ["a", "own", "b", "c"]
