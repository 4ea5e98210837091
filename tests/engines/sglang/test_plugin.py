"""engines/sglang/plugin.py: what SGLang would only log is noticed, and shared weights are never written."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import RunningWorker
from tests.engines.sglang.standin import Engine, HookRegistry, HookType
from weightcached.engines.sglang import api, plugin
from weightcached.errors import EngineError

RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater"


def test_the_format_is_known_and_becomes_the_loader(engine: Engine) -> None:
    """After the plug-in the command line takes the name, and `LoadConfig` has a loader class in its place."""
    assert "weightcached" in sys.modules["sglang.srt.server_args"].LOAD_FORMAT_CHOICES
    config = sys.modules["sglang.srt.configs.load_config"].LoadConfig(load_format="Weightcached")
    loader = engine.loader.get_model_loader(load_config=config)
    assert isinstance(loader, engine.loader.BaseModelLoader)
    assert type(loader).__name__ == "WeightcachedModelLoader"


def test_other_formats_are_left_alone(engine: Engine) -> None:
    """The hook touches no format but its own, and a wrong one is still refused by SGLang."""
    load_config = sys.modules["sglang.srt.configs.load_config"].LoadConfig
    assert load_config(load_format="auto").load_format == "auto"
    with pytest.raises(ValueError, match="weightcache"):
        load_config(load_format="weightcache")


@pytest.mark.parametrize("version", ["0.5.10", "0.5.18", "0.5.18.post1", "0.4.9"])
def test_an_older_version_is_refused_with_a_sentence(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """An error that names both versions; the format stays unknown."""
    choices = sys.modules["sglang.srt.server_args"].LOAD_FORMAT_CHOICES
    choices.remove("weightcached")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    plugin.register()
    assert f"needs SGLang {api.OLDEST} or later, this is {version}" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "weightcached" not in choices


def test_a_later_version_is_taken_with_a_warning(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has compared it yet, which the log says; versions that were compared pass without a word."""
    for version in (*api.VERSIONS, f"{api.VERSIONS[-1]}.post2"):
        assert plugin.unsupported(version) is None
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.0")
    plugin.register()
    assert "this is 0.6.0" in caplog.text


def test_a_hook_that_is_not_in_place_stops_the_load(engine: Engine, checkpoint: Path) -> None:
    """Another plug-in has hooked the same function, so SGLang's registry leaves ours out: nothing is loaded."""
    target = f"{RUNNER}.WeightUpdater._assert_weight_cache_inactive"
    HookRegistry.register(target, lambda *_: None, HookType.BEFORE)
    HookRegistry.apply_hooks()
    with pytest.raises(EngineError, match=r"the hook on .*_assert_weight_cache_inactive is not in place"):
        engine.load(checkpoint)
    assert engine.disk_loads == 0


def test_a_function_that_is_gone_stops_the_load(engine: Engine, checkpoint: Path) -> None:
    """SGLang logs that a hook found no function; the loader refuses instead of going on without it."""
    del sys.modules[SCHEDULER].SchedulerWeightUpdaterManager
    with pytest.raises(EngineError, match=r"SchedulerWeightUpdaterManager\..* is not in place"):
        engine.load(checkpoint)
    assert engine.disk_loads == 0


def test_hooks_are_mounted_once(engine: Engine, checkpoint: Path) -> None:
    """A target and a draft model are loaded by two loaders in one process: each hook is there once."""
    plugin.mount_guards()
    plugin.mount_guards()
    assert {len(hooks) for hooks in HookRegistry.hooks.values()} == {1}
    assert HookRegistry.hooks.keys() == {api.FORMAT_CHECK, *api.GUARDS, *api.SOFT_GUARDS, api.LATE_GUARD}


def updates(updater: Any) -> list[tuple[bool, str]]:
    return [
        updater.update_weights_from_disk("/elsewhere", "auto"),
        updater.update_weights_from_tensor([]),
        updater.update_weights_from_ipc(None),
    ]


def test_weights_that_are_shared_are_not_written_or_freed(
    worker: RunningWorker, engine: Engine, checkpoint: Path
) -> None:
    """Every way of SGLang's to change weights is refused while an engine runs from the map, and works after it."""
    updater = sys.modules[RUNNER].WeightUpdater()
    manager = sys.modules[SCHEDULER].SchedulerWeightUpdaterManager()
    model = engine.load(checkpoint)  # the publishing engine runs from the shared copy, too
    for done, reason in updates(updater):
        assert not done
        assert "is refused: the weights of this engine (Tiny-1B-sglang-" in reason
        assert "mode" in reason
    with pytest.raises(EngineError, match="release_memory_occupation is refused"):
        manager.release_memory_occupation()
    with pytest.raises(EngineError, match="a weight update is refused"):
        updater.begin_weight_update()
    del model
    assert updates(updater) == [(True, "done")] * 3
    assert manager.release_memory_occupation() == "released"
    updater.begin_weight_update()
    assert updater.began
