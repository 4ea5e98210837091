"""The entry point: registered once, in every process, without touching the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.engines.vllm import shaped
from weightcached.engines.vllm import loader, plugin
from weightcached.errors import EngineError

_LOADER = "vllm.model_executor.model_loader"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    loader.loader_class.cache_clear()
    yield
    loader.loader_class.cache_clear()


def test_format_is_known_after_registering_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls plug-ins in each of its processes, and again."""
    modules = shaped.install(monkeypatch)
    plugin.register()
    plugin.register()
    made = modules[_LOADER].get_model_loader(shaped.LoadConfig("weightcached"))
    assert isinstance(made, shaped.BaseModelLoader)


def test_old_vllm_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format is known, and says why it cannot be used."""
    modules = shaped.install(monkeypatch, version="0.29.1")
    plugin.register()
    with pytest.raises(EngineError, match=r"vLLM 0\.29\.1 cannot take .* needs vLLM 0\.30 or newer"):
        modules[_LOADER].get_model_loader(shaped.LoadConfig("weightcached"))


def test_options_that_are_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """--model-loader-extra-config may be anything."""
    modules = shaped.install(monkeypatch)
    plugin.register()
    with pytest.raises(EngineError, match="no JSON object"):
        modules[_LOADER].get_model_loader(shaped.LoadConfig("weightcached", model_loader_extra_config=["x"]))


def test_lines_go_where_those_of_vllm_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process has no handler but vLLM's: without it nobody would see what is attached."""
    shaped.install(monkeypatch)
    theirs, ours, root = (logging.getLogger(name) for name in ("vllm", "weightcached", None))
    handler = logging.NullHandler()
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(root, "handlers", [])
    for name in ("propagate", "level"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    plugin.register()
    assert ours.handlers == [handler]
    assert not ours.propagate
