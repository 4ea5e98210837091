"""`weightcachectl reload` and SIGHUP on a real service."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.checkpoint.files import write_sharded
from tests.client.handmade import Raw, make_shard, publish
from tests.conftest import MakeCheckpoint
from tests.llama import Tensor, slab_of, write_llama
from tests.running import RunningService, process_of_role, wait_for_end
from tests.service.conftest import HOST, HOSTS, StartService, attach, generation, held_by, model, slab_bytes
from weightcached.client.publish import checkpoint_files

Llama = tuple[Path, dict[str, Tensor]]


def test_loads_a_new_model_and_keeps_a_forgotten_one(start_service: StartService, checkpoint: Path) -> None:
    """A model added to the file is loaded; one taken out stays cached, is named, and can still be evicted."""
    service = start_service(HOST + model("old", checkpoint)).ready()
    service.config.write_text(HOST + model("new", checkpoint))
    answer = json.loads(service.ctl("reload", "--json"))
    assert (answer["loading"], answer["left"]) == (["new"], [{"model": "old", "device": "host-0"}])
    service.ctl("wait", "new", "--timeout", "30")
    assert {shard["model"] for shard in service.status()["devices"][0]["shards"]} == {"old", "new"}
    service.ctl("evict", "old")
    service.stop()


def test_another_cluster_is_for_a_restart(start_service: StartService, checkpoint: Path) -> None:
    """A changed [cluster] is refused as a whole, since the ranks of this node follow from it."""
    config = HOST + model("small", checkpoint)
    service = start_service(config + "[cluster]\nnodes = 1\nnode_rank = 0\n").ready()
    service.ctl("reload")
    service.config.write_text(config)
    assert "[cluster] has changed, which only a restart of the service applies" in service.ctl("reload", code=1)
    service.stop()


def test_a_bad_file_changes_nothing(start_service: StartService, checkpoint: Path) -> None:
    """An unknown key is refused with its nearest name; what is cached is still served, and SIGHUP only logs it."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    service.config.write_text(HOST + model("small", checkpoint, "preloads = true"))
    assert 'did you mean "preload"' in service.ctl("reload", code=1)
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("RELOADING=1")
    service.wait_for("reloaded")
    assert "reload refused" in service.log
    worker, fds = attach("small")
    fds.close()
    worker.close()
    service.stop()


def test_changed_files_become_the_next_generation(
    start_service: StartService, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """Overwritten weights are loaded beside the old ones; a holder keeps its own, a new client gets the new."""
    path = make_checkpoint(tmp_path / "w.safetensors", {"a": ("U8", (4096,), b"1" * 4096)})
    service = start_service(HOST + model("w", path)).ready()
    holder, old = attach("w")
    make_checkpoint(path, {"a": ("U8", (4096,), b"2" * 4096)})
    assert json.loads(service.ctl("reload", "--json"))["loading"] == ["w"]
    service.ctl("wait", "w", "--timeout", "30")
    worker, new = attach("w")
    assert (slab_bytes(old)[:1], slab_bytes(new)[:1]) == (b"1", b"2")
    assert generation(new) == 2
    states = [(s["generation"], s["state"]) for s in service.status()["devices"][0]["shards"]]
    assert states == [(2, "cached"), (1, "draining")]
    for item in (old, new):
        item.close()
    holder.close()
    worker.close()
    assert json.loads(service.ctl("reload", "--json"))["loading"] == []
    service.stop()


def test_files_that_a_publisher_has_not_named_count_as_unchanged(start_service: StartService, checkpoint: Path) -> None:
    """An engine that publishes without its files: nothing tells that they are others now, so a reload leaves it."""
    lazy = HOST + model("made", checkpoint, "preload = false")
    service = start_service(lazy).ready()
    publish(make_shard([Raw("w", "U8", (4,), b"mine")], model="made", key={"layout": "test-1/0"}))
    assert service.model("made")["state"] == "cached"
    os.utime(checkpoint)
    assert json.loads(service.ctl("reload", "--json"))["loading"] == []
    assert held_by("made", "host-0", layout="test-1/0") == b"mine"
    service.stop()


def test_the_order_of_named_files_does_not_count(start_service: StartService, checkpoint: Path, tmp_path: Path) -> None:
    """Files are compared by name; one that has changed has the model loaded again."""
    folder = write_sharded(tmp_path / "sharded", {f"{name}.safetensors": [name] for name in "ab"})
    service = start_service(HOST + model("made", folder, "preload = false")).ready()
    files = checkpoint_files(folder)[::-1]
    publish(make_shard([Raw("w", "U8", (4,), b"mine")], model="made", key={"layout": "test-1/0"}, files=files))
    assert json.loads(service.ctl("reload", "--json"))["loading"] == []
    os.utime(folder / "b.safetensors")
    assert json.loads(service.ctl("reload", "--json"))["loading"] == ["made"]
    service.ctl("wait", "made", "--timeout", "30")
    service.stop()


def test_a_broken_replacement_keeps_what_is_cached(start_service: StartService, checkpoint: Path) -> None:
    """The checkpoint became unreadable: the reload fails, the old generation is still served, status says why."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    service.ctl("reload")
    assert checkpoint.name in service.ctl("wait", "small", code=1)
    worker, fds = attach("small")
    assert generation(fds) == 1
    fds.close()
    worker.close()
    assert service.model("small")["error"]["code"] == "bad-checkpoint"
    service.stop()


def test_a_reload_before_ready_is_not_ready(start_service: StartService, checkpoint: Path) -> None:
    """SIGHUP while the start still loads reads the file, and tells systemd neither RELOADING nor READY."""
    service = start_service(HOST + model("small", checkpoint))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.config.write_text(HOST + model("small", checkpoint) + model("more", checkpoint))
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("(0 of 2 models")
    assert not [message for message in service.messages if "READY=1" in message or "RELOADING=1" in message]
    os.kill(loader, signal.SIGCONT)
    service.ready()
    assert {service.model(name)["state"] for name in ("small", "more")} == {"cached"}
    service.stop()


def test_another_checkpoint_during_a_load_is_the_one_that_is_served(
    start_service: StartService, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """A reload that names another file ends the load of the old one; nobody gets the old bytes under the new config."""
    first = make_checkpoint(tmp_path / "first.safetensors", {"a": ("U8", (4096,), b"1" * 4096)})
    second = make_checkpoint(tmp_path / "second.safetensors", {"a": ("U8", (4096,), b"2" * 4096)})
    service = start_service('ready = "listening"\n' + HOST + model("w", first))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ready()
    service.config.write_text('ready = "listening"\n' + HOST + model("w", second))
    assert json.loads(service.ctl("reload", "--json"))["loading"] == ["w"]
    service.ctl("wait", "w", "--timeout", "30")
    wait_for_end(loader)
    worker, fds = attach("w")
    assert slab_bytes(fds)[:1] == b"2"
    fds.close()
    worker.close()
    assert service.status()["devices"][0]["shards"][0]["checkpoint"] == str(second)
    service.stop()


def test_a_forgotten_model_is_not_loaded(start_service: StartService, checkpoint: Path, llama: Llama) -> None:
    """A model that is taken out of the file while it loads, or waits for that, is neither loaded nor left behind."""
    listening = 'ready = "listening"\n' + HOST
    service = start_service(listening + model("first", checkpoint) + model("second", llama[0]))
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    service.ready()
    service.config.write_text(listening + model("other", checkpoint))
    answer = json.loads(service.ctl("reload", "--json"))
    assert (answer["loading"], answer["left"]) == (["other"], [])
    wait_for_end(loader)
    service.ctl("wait", "other", "--timeout", "30")
    assert [shard["model"] for shard in service.status()["devices"][0]["shards"]] == ["other"]
    service.stop()


def test_a_restart_stays_due(start_service: StartService, checkpoint: Path) -> None:
    """A setting that only a restart applies is named by every reload until then."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    service.config.write_text('memory_limit = "50%"\n' + HOST + model("small", checkpoint))
    for _ in range(2):
        assert json.loads(service.ctl("reload", "--json"))["restart"] == ["memory_limit"]
    service.stop()


def reload(service: RunningService, config: str, *, code: int = 0) -> dict[str, object]:
    """The answer to a reload of this config, once what it loads is there; `code`: of the wait for that."""
    service.config.write_text(config)
    answer: dict[str, object] = json.loads(service.ctl("reload", "--json"))
    if answer["loading"]:
        service.ctl("wait", "cut", "--timeout", "30", code=code)
    assert answer.pop("schema") == 1
    assert answer.pop("unreachable") == []
    return answer


def test_more_ranks_replace_the_whole_model(start_service: StartService, llama: Llama) -> None:
    """`tensor_parallel` from 1 to 2: loaded again for both devices; a holder of the whole model keeps it."""
    folder, tensors = llama
    service = start_service(HOSTS + model("cut", folder)).ready()
    holder, old = attach("cut")
    answer = reload(service, HOSTS + model("cut", folder, "tensor_parallel = 2"))
    assert answer == {"loading": ["cut"], "left": [], "restart": []}
    for rank in (0, 1):
        assert held_by("cut", f"host-{rank}", tensor_parallel_rank=rank) == slab_of(tensors, rank, 2)
    assert service.model("cut")["generations"] == [2, 1]
    assert slab_bytes(old) == slab_of(tensors, 0, 1)
    states = [(shard["generation"], shard["state"]) for shard in service.status()["devices"][0]["shards"]]
    assert states == [(2, "cached"), (1, "draining")]
    old.close()
    holder.close()
    assert reload(service, service.config.read_text()) == {"loading": [], "left": [], "restart": []}
    service.stop()


def test_devices_that_are_not_used_any_more_are_named(start_service: StartService, llama: Llama) -> None:
    """From two ranks to none, and from one pair of devices to another: the others' shards are `left`, and served."""
    folder, tensors = llama
    service = start_service(HOSTS + model("cut", folder, "tensor_parallel = 2")).ready()
    answer = reload(service, HOSTS + model("cut", folder, "tensor_parallel = 2", 'devices = ["host-2", "host-3"]'))
    assert answer["left"] == [{"model": "cut", "device": "host-0"}, {"model": "cut", "device": "host-1"}]
    for device in ("host-1", "host-3"):
        assert held_by("cut", device, tensor_parallel_rank=1) == slab_of(tensors, 1, 2)
    for device in ("host-0", "host-1"):
        service.ctl("evict", "cut", "--device", device)
    answer = reload(service, HOSTS + model("cut", folder, 'devices = ["host-2"]'))
    assert answer["left"] == [{"model": "cut", "device": "host-3"}]
    assert held_by("cut", "host-2", tensor_parallel_size=1) == slab_of(tensors, 0, 1)
    found = service.model("cut")
    assert (found["state"], found["devices"], found["ranks_cached"]) == ("cached", ["host-2"], 1)
    service.stop()


def test_what_was_loaded_on_demand_is_loaded_again(start_service: StartService, llama: Llama) -> None:
    """A cached model without preload counts as wanted when its cut changes; one that was never loaded does not."""
    folder, tensors = llama
    lazy = [model("cut", folder, "preload = false"), model("never", folder, "preload = false")]
    service = start_service(HOSTS + "".join(lazy)).ready()
    service.ctl("load", "cut")
    service.ctl("wait", "cut", "--timeout", "30")
    changed = ["tensor_parallel = 2", "preload = false", 'devices = ["host-2", "host-3"]']
    answer = reload(service, HOSTS + model("cut", folder, *changed) + model("never", folder, *changed))
    assert answer == {"loading": ["cut"], "left": [{"model": "cut", "device": "host-0"}], "restart": []}
    assert held_by("cut", "host-3", tensor_parallel_rank=1) == slab_of(tensors, 1, 2)
    assert service.model("never")["state"] == "absent"
    service.stop()


def test_swapped_devices_are_loaded_again(start_service: StartService, llama: Llama) -> None:
    """A rank that lies on the other rank's device is not taken for that rank's."""
    folder, tensors = llama
    service = start_service(HOSTS + model("cut", folder, "tensor_parallel = 2")).ready()
    answer = reload(service, HOSTS + model("cut", folder, "tensor_parallel = 2", 'devices = ["host-1", "host-0"]'))
    assert answer == {"loading": ["cut"], "left": [], "restart": []}
    for rank, device in enumerate(("host-1", "host-0")):
        assert held_by("cut", device, tensor_parallel_rank=rank) == slab_of(tensors, rank, 2)
    service.stop()


def test_every_key_that_shapes_a_shard_counts(start_service: StartService, llama: Llama) -> None:
    """Sizes, split, rules and dtype are each a reason to load again; preload and staging memory are not."""
    folder, _ = llama
    service = start_service(HOSTS + model("cut", folder, "tensor_parallel = 2")).ready()
    for number, keys in enumerate(
        (
            ["pipeline_parallel = 2"],
            ["pipeline_parallel = 2", "pipeline_layers = [1, 2]"],
            ["pipeline_parallel = 2", "pipeline_layers = [1, 2]", 'dtype = "float32"'],
            ["tensor_parallel = 2"],
            ["tensor_parallel = 2", 'rules = ["model.norm: replicate"]'],
        ),
        start=2,
    ):
        assert reload(service, HOSTS + model("cut", folder, *keys)) == {"loading": ["cut"], "left": [], "restart": []}
        assert service.model("cut")["generations"] == [number, number]
    config = HOSTS + 'staging_memory = "8MiB"\n' + model("cut", folder, *keys, "preload = false")
    assert reload(service, config) == {"loading": [], "left": [], "restart": []}
    service.stop()


def test_a_cut_that_does_not_fit_leaves_what_was_there(start_service: StartService, llama: Llama) -> None:
    """Three ranks cannot be: the model failed, its two old ranks are served to who asks for them by their key."""
    folder, tensors = llama
    service = start_service(HOSTS + model("cut", folder, "tensor_parallel = 2")).ready()
    answer = reload(service, HOSTS + model("cut", folder, "tensor_parallel = 3"), code=1)
    assert answer["loading"] == ["cut"]
    found = service.model("cut")
    assert (found["state"], found["ranks"], found["ranks_cached"]) == ("failed", 3, 0)
    assert found["error"]["code"] == "cannot-cut"
    assert held_by("cut", "host-1", tensor_parallel_size=2) == slab_of(tensors, 1, 2)
    reload(service, HOSTS + model("cut", folder, "tensor_parallel = 2"))
    assert (service.model("cut")["state"], service.model("cut")["ranks_cached"]) == ("cached", 2)
    service.stop()


def test_a_failed_reload_is_tried_again(start_service: StartService, llama: Llama) -> None:
    """For the same devices the old ranks stay cached, with the error; the next reload of the same file tries again."""
    folder, _ = llama
    service = start_service(HOSTS + model("cut", folder, "tensor_parallel = 2", "preload = false")).ready()
    service.ctl("load", "cut")
    service.ctl("wait", "cut", "--timeout", "30")
    broken = HOSTS + model("cut", folder, "pipeline_parallel = 2", "pipeline_layers = [1, 1]", "preload = false")
    for _ in range(2):
        assert reload(service, broken, code=1)["loading"] == ["cut"]
        found = service.model("cut")
        assert (found["state"], found["ranks_cached"], found["generations"]) == ("cached", 2, [1, 1])
        assert found["error"]["code"] == "cannot-slice"
    assert "generation 1 is still served" in service.ctl("wait", "cut", code=1)
    service.stop()


def test_a_mended_config_is_tried_on_demand(start_service: StartService, tmp_path: Path, llama: Llama) -> None:
    """A model that is loaded on demand failed; once its config names another checkpoint, a waiting client gets it."""
    folder, _ = llama
    service = start_service(HOST + model("late", tmp_path / "nowhere", "preload = false")).ready()
    service.ctl("load", "late")
    service.ctl("wait", "late", code=1)
    service.config.write_text(HOST + model("late", folder, "preload = false"))
    assert json.loads(service.ctl("reload", "--json"))["loading"] == []
    worker, fds = attach("late", wait=30)
    fds.close()
    worker.close()
    service.stop()


def test_changed_files_are_loaded_for_every_rank(
    start_service: StartService, llama: Llama, make_checkpoint: MakeCheckpoint
) -> None:
    """Overwritten weights are found by what any rank was loaded from, and all ranks get the new ones."""
    folder, _ = llama
    config = HOSTS + model("cut", folder, "tensor_parallel = 2")
    service = start_service(config).ready()
    tensors = write_llama(folder, make_checkpoint)
    assert reload(service, config)["loading"] == ["cut"]
    for rank in (0, 1):
        assert held_by("cut", f"host-{rank}") == slab_of(tensors, rank, 2)
    service.stop()


def test_other_ranks_during_a_load(start_service: StartService, llama: Llama) -> None:
    """A reload in mid load for other devices ends that load; what is served afterwards is what the file says."""
    folder, tensors = llama
    config = 'ready = "listening"\n' + HOSTS
    service = start_service(config + model("cut", folder, "tensor_parallel = 2", "preload = false")).ready()
    service.ctl("load", "cut")
    loader = process_of_role(service, "loader")
    os.kill(loader, signal.SIGSTOP)
    moved = ["tensor_parallel = 2", "preload = false", 'devices = ["host-3", "host-1"]']
    assert reload(service, config + model("cut", folder, *moved))["loading"] == ["cut"]
    wait_for_end(loader)
    for rank, device in enumerate(("host-3", "host-1")):
        assert held_by("cut", device, tensor_parallel_rank=rank) == slab_of(tensors, rank, 2)
    assert service.status()["devices"][0]["shards"] == []
    service.stop()
