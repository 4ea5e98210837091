"""`weightcachectl reload` and SIGHUP on a real service."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.conftest import MakeCheckpoint
from tests.service.conftest import HOST, StartService, attach, generation, model, slab_bytes


def test_loads_a_new_model_and_keeps_a_forgotten_one(start_service: StartService, checkpoint: Path) -> None:
    """A model added to the file is loaded; one taken out stays cached, is named, and can still be evicted."""
    service = start_service(HOST + model("old", checkpoint)).ready()
    service.config.write_text(HOST + model("new", checkpoint))
    answer = json.loads(service.ctl("reload", "--json"))
    assert (answer["loading"], answer["forgotten"]) == (["new"], ["old"])
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
