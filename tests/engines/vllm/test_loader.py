"""A disk load is published, and the next engine is the same without reading anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.handmade import RunningWorker
from tests.engines.vllm import shaped
from tests.engines.vllm.conftest import Vllm, run
from weightcached.client.modules import named_tensors
from weightcached.engines import parity
from weightcached.engines.policy import Options
from weightcached.engines.vllm import loader
from weightcached.errors import EngineError, KeyMismatch, NoSuchModel


def test_second_start_is_a_hit_with_the_same_outputs(
    vllm: Vllm, worker: RunningWorker, folder: Path, warnings: Any
) -> None:
    """What is computed from the cache is what was computed from the disk, with nothing read and nothing configured."""
    first = vllm.start(folder)
    assert vllm.external == 0
    expected = run(first)
    second = vllm.start(folder)
    assert shaped.DefaultModelLoader.loads == 1
    assert run(second) == expected
    assert not second.training
    assert vllm.external == second._weightcached.nbytes > 2 << 20
    assert len(warnings()) == 1  # of the first start: loaded from disk
    assert "loaded from disk" in warnings()[0]


def test_every_tensor_is_equal_between_publisher_and_engine(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Names, bytes, shapes, strides, dtypes, roles and persistence are those of the disk load."""
    shape = lambda model: [  # noqa: E731 - one line, used twice
        (item.name, item.role, item.persistent, item.tensor.shape, item.tensor.stride(), item.tensor.tolist())
        for item in named_tensors(model)
    ]
    first = vllm.start(folder)
    second = vllm.start(folder)
    assert shape(second) == shape(first)


def test_vllm_59647_equal_headers_are_told_apart(vllm: Vllm, worker: RunningWorker, tmp_path: Path) -> None:
    """A fine-tune with the names, shapes and sizes of its base never gets the base's weights."""
    base = shaped.write_checkpoint(tmp_path / "base", seed=0)
    tuned = shaped.write_checkpoint(tmp_path / "tuned", seed=1)
    expected = run(vllm.start(base))
    assert run(vllm.start(tuned)) != expected
    assert shaped.DefaultModelLoader.loads == 2
    assert run(vllm.start(base)) == expected
    assert shaped.DefaultModelLoader.loads == 2


def test_other_settings_are_no_hit(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Tables depend on the longest sequence: another one is another layout."""
    vllm.start(folder)
    with pytest.raises((NoSuchModel, KeyMismatch)):
        vllm.start(folder, model={"max_model_len": 128}, options={"on_miss": "fail"})


def test_miss_is_loaded_from_disk_as_counted(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """What vLLM was told of memory is what is done, whatever is published between the question and the load."""
    config = shaped.vllm_config(shaped.ModelConfig(folder))
    assert vllm.loader().get_external_weight_memory(config) == 0
    decided = dict(loader._decided)
    vllm.start(folder)  # in another process
    loader._decided.update(decided)
    vllm.loader().load_model(vllm_config=config, model_config=config.model_config)
    assert shaped.DefaultModelLoader.loads == 2


def test_copy_mode_counts_nothing_and_shares_nothing(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """Copies are this engine's: vLLM sees them by itself, and no lease stays."""
    expected = run(vllm.start(folder))
    model = vllm.start(folder, options={"mode": "copy"})
    assert vllm.external == 0
    assert run(model) == expected


def test_without_a_service_it_starts_as_ever(vllm: Vllm, runtime_dir: Path, folder: Path, warnings: Any) -> None:
    """One warning, with the reason."""
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    run(vllm.start(folder))
    assert shaped.DefaultModelLoader.loads == 1
    assert len(warnings()) == 1


def test_description_is_written_if_asked(
    vllm: Vllm, worker: RunningWorker, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WEIGHTCACHED_PARITY names a file for each start; disk and cache are the same by it, scalars included."""
    for name in ("disk", "cache"):
        monkeypatch.setenv(parity.VARIABLE, str(tmp_path / name))
        vllm.start(folder)
    disk, cache = (parity.Description.load(tmp_path / name) for name in ("disk", "cache"))
    assert parity.compare(disk, cache, ignore=["*._already_called_process_weights_after_loading"]) == []
    assert parity.compare(disk, cache)[0].name == "linear._already_called_process_weights_after_loading"


def test_unknown_option(vllm: Vllm) -> None:
    """Options are checked when the loader is made."""
    with pytest.raises(EngineError, match="did you mean 'on_miss'"):
        vllm.loader(on_mis="fail")


def test_draft_has_a_role_of_its_own(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """A draft of the same files is another shard, and counted beside its target."""
    draft = shaped.ModelConfig(folder)
    speculative = type("S", (), {"draft_model_config": draft, "target_model_config": None, "method": "mtp"})()

    def engine() -> Any:
        target = shaped.ModelConfig(folder)
        config = shaped.vllm_config(target, speculative_config=speculative)
        held = vllm.loader(model="named").get_external_weight_memory(config)
        models = []
        for model_config in (target, draft):
            config.compilation_config.static_forward_context.clear()
            models.append(vllm.loader(model="named").load_model(vllm_config=config, model_config=model_config))
        return held, models

    engine()
    held, (target, drafted) = engine()
    assert shaped.DefaultModelLoader.loads == 2
    assert (target._weightcached.key.role, drafted._weightcached.key.role) == ("main", "draft")
    assert target._weightcached.manifest.model == "named" != drafted._weightcached.manifest.model
    assert held == target._weightcached.nbytes + drafted._weightcached.nbytes


def test_preload_publishes_in_any_case(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """The service wants a generation of its own, also where the same weights are cached; engines then find it."""
    for generation in (1, 2):
        model_config = shaped.ModelConfig(folder)
        config = shaped.vllm_config(model_config)
        options = Options(model="served")
        made = loader.load_to_publish(config, model_config, shaped.LoadConfig("weightcached"), options)
        assert made._weightcached.generation == generation
    assert vllm.start(folder)._weightcached.manifest.model == "served"
    assert shaped.DefaultModelLoader.loads == 2


def test_preload_raises_what_an_engine_is_only_warned_of(
    vllm: Vllm, worker: RunningWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that has not published has failed."""
    monkeypatch.setattr(shaped.Linear, "method", shaped.UnknownMethod)
    model_config = shaped.ModelConfig(folder)
    config = shaped.vllm_config(model_config)
    with pytest.raises(EngineError, match="is not published"):
        loader.load_to_publish(config, model_config, shaped.LoadConfig("weightcached"), Options())
    unsupported = shaped.ModelConfig(folder, quantization="awq")
    with pytest.raises(EngineError, match="what works"):
        loader.load_to_publish(config, unsupported, shaped.LoadConfig("weightcached"), Options())
