"""`weightcachectl reload` and SIGHUP on a real service."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tests.conftest import MakeCheckpoint
from tests.running import process_of_role, wait_for_end
from tests.service.conftest import HOST, StartService, attach, generation, model, slab_bytes


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


def test_a_restart_stays_due(start_service: StartService, checkpoint: Path) -> None:
    """A setting that only a restart applies is named by every reload until then."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    service.config.write_text('memory_limit = "50%"\n' + HOST + model("small", checkpoint))
    for _ in range(2):
        assert json.loads(service.ctl("reload", "--json"))["restart"] == ["memory_limit"]
    service.stop()
