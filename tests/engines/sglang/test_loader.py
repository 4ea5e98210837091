"""engines/sglang/loader.py: SGLang loads once, and every later engine runs from what it has processed."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.client.handmade import RunningWorker
from tests.engines.sglang import standin
from tests.engines.sglang.standin import Engine
from weightcached.engines import policy
from weightcached.engines.sglang import plugin
from weightcached.errors import EngineError, KeyMismatch, NoSuchModel, ServiceNotRunning

IDS = torch.arange(32)


def published(worker: RunningWorker) -> list[dict[str, Any]]:
    return [shard for shard in worker.status()["shards"] if shard["state"] == "cached"]


def test_a_miss_is_loaded_by_sglang_and_published_and_the_next_engine_maps_it(
    worker: RunningWorker, engine: Engine, checkpoint: Path
) -> None:
    """Disk, publishing and attached run give the same values bit for bit, and SGLang's loader has run once.

    What SGLang keeps outside parameters comes along: a tensor attribute with its strides, a scalar, a parameter that
    became None, a tied weight, a buffer that no checkpoint holds.
    """
    model = engine.load(checkpoint, publish=False)
    expected = model(IDS)
    del model
    first = engine.load(checkpoint)
    assert engine.disk_loads == 2
    assert len(published(worker)) == 1
    assert torch.equal(first(IDS), expected)

    second = engine.load(checkpoint)
    assert engine.disk_loads == 2
    assert torch.equal(second(IDS), expected)
    assert second.attention.w_kc.stride() == first.attention.w_kc.stride() == (1, 16)
    assert second.attention.kv_b_proj.scale_float == 0.25
    assert second.attention.kv_b_proj.input_scale is None
    assert second.lm_head.weight.data_ptr() == second.embed.weight.data_ptr()
    assert not second.training
    del first, second


def test_what_an_engine_writes_is_its_own(worker: RunningWorker, engine: Engine, checkpoint: Path) -> None:
    """Scratch tensors are copied at attach: two engines that write theirs do not see each other's."""
    engine.load(checkpoint)
    one, two = engine.load(checkpoint), engine.load(checkpoint)
    before = two.attention.scratch.clone()
    one(IDS)
    assert torch.equal(two.attention.scratch, before)
    assert not torch.equal(one.attention.scratch, before)
    del one, two


def test_the_kv_cache_is_sized_beside_what_was_resident(
    worker: RunningWorker, engine: Engine, checkpoint: Path
) -> None:
    """`preloaded_weights_bytes`: none after a load from disk or a copy, those of the shard after a hit."""
    engine.load(checkpoint)
    assert engine.last_loader.preloaded_weights_bytes == 0
    model = engine.load(checkpoint)
    assert engine.last_loader.preloaded_weights_bytes == published(worker)[0]["nbytes"]
    engine.load(checkpoint, mode="copy")
    assert engine.last_loader.preloaded_weights_bytes == 0
    del model


def test_without_a_service_the_engine_starts_as_before(
    runtime_dir: Path, engine: Engine, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No service: the disk, with one warning that says so. With on_miss=fail: the error."""
    with caplog.at_level(logging.WARNING):
        engine.load(checkpoint)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is loaded from disk" in caplog.text
    with pytest.raises(ServiceNotRunning):
        engine.load(checkpoint, on_miss="fail")
    assert engine.disk_loads == 1


def test_other_settings_are_another_layout(worker: RunningWorker, engine: Engine, checkpoint: Path) -> None:
    """A back-end that shapes weights differently is a miss, published beside; the first one stays a hit."""
    engine.load(checkpoint)
    engine.set("exec.moe", moe_runner_backend="flashinfer_trtllm")
    with pytest.raises((KeyMismatch, NoSuchModel)):
        engine.load(checkpoint, on_miss="fail")
    engine.load(checkpoint)
    engine.set("exec.moe", moe_runner_backend="auto")
    engine.load(checkpoint, on_miss="fail")
    assert len(published(worker)) == 2


def test_a_quantisation_that_is_not_supported_is_refused_or_read_from_disk(
    worker: RunningWorker,
    engine: Engine,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By policy: an error with the reason and what would work, or one warning with the same and SGLang's own load, for
    which there must be room beside what is cached."""
    asked: list[policy.Wanted] = []
    monkeypatch.setattr(policy, "refuse_beside", asked.append)
    engine.model_config.quantization = "awq"
    with pytest.raises(EngineError, match=r"'awq' is not supported; what works: unquantised weights; FP8 in blocks"):
        engine.load(checkpoint, on_miss="wait")
    with caplog.at_level(logging.WARNING):
        engine.load(checkpoint, on_miss="fallback")
    assert len([record for record in caplog.records if "'awq' is not supported" in record.getMessage()]) == 1
    assert [wanted.checkpoint for wanted in asked] == [checkpoint]
    assert published(worker) == []
    assert engine.disk_loads == 1


class Reading(standin.Model):
    """As InternVL: the constructor reads values, after it has shared a rotary embedding with later models."""

    def __init__(self, config: Any, quant_config: Any = None) -> None:
        super().__init__(config, quant_config)
        shared = sys.modules["sglang.srt.layers.rotary_embedding.factory"]._ROPE_DICT
        shared.setdefault("rope", nn.Module()).register_buffer("cos_sin_cache", torch.ones(4))
        self.rates = [rate.item() for rate in torch.ones(3)]


def test_a_constructor_that_reads_values_is_an_error_or_a_load_from_disk(
    worker: RunningWorker, engine: Engine, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By policy: an error that names the reason, or one warning with it and SGLang's own load, which is not published.
    No rotary embedding without memory is left for the models after it."""
    engine.loader.model_class = Reading
    expected = engine.load(checkpoint)(IDS)
    shared = sys.modules["sglang.srt.layers.rotary_embedding.factory"]._ROPE_DICT
    shared.clear()
    with pytest.raises(EngineError, match=r"cannot be built from cached weights: .*meta"):
        engine.load(checkpoint, on_miss="wait")
    assert shared == {}
    with caplog.at_level(logging.WARNING):
        model = engine.load(checkpoint)
    assert len([item for item in caplog.records if "cannot be built from cached weights" in item.getMessage()]) == 1
    assert not shared["rope"].cos_sin_cache.is_meta
    assert engine.disk_loads == 2
    assert engine.last_loader.preloaded_weights_bytes == 0
    assert torch.equal(model(IDS), expected)


def test_a_constructor_sends_what_the_last_pipeline_rank_waits_for(
    worker: RunningWorker, engine: Engine, checkpoint: Path
) -> None:
    """As tied GLM-4 models: a hit sends as much as a load from disk does, and not a tensor without memory."""
    coordinator = sys.modules["sglang.srt.distributed.parallel_state"].GroupCoordinator
    group, before = coordinator(), coordinator.send

    class Sending(standin.Model):
        def __init__(self, config: Any, quant_config: Any = None) -> None:
            super().__init__(config, quant_config)
            group.send(self.embed.weight, dst=1)

    engine.loader.model_class = Sending
    models = [engine.load(checkpoint), engine.load(checkpoint)]
    assert engine.disk_loads == 1
    assert group.sent == [((32, 16), torch.float32, "cpu", 1)] * 2
    assert coordinator.send is before
    del models


class Marked(standin.Model):
    """As block FP8 on Blackwell: post-processing marks a parameter, and kernels read the mark."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.embed.weight.format_ue8m0 = True  # type: ignore[attr-defined]


class Split(standin.Model):
    """As mHC weight splits: a tuple of tensors that the load makes."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self._parts = (self.embed.weight + 1, self.embed.weight - 1)


class Swapped(standin.Model):
    """A load that puts another method on a layer."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.attention.kv_b_proj.quant_method = standin.QuantMethod()


class Elsewhere(standin.Model):
    """A model that reads files of another folder."""

    secondary_weights = ("adapter",)


@pytest.mark.parametrize(
    ("model_class", "said"),
    [
        (Marked, "embed.weight.format_ue8m0 is True"),
        (Split, "_parts"),
        (Swapped, "attention.kv_b_proj.quant_method is another QuantMethod"),
        (Elsewhere, "secondary_weights of the model is set"),
    ],
)
def test_what_cannot_be_carried_is_not_published(
    worker: RunningWorker,
    engine: Engine,
    checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
    model_class: type[nn.Module],
    said: str,
) -> None:
    """A load that does more to a model than the manifest can say: one warning with the place; the engine runs on."""
    engine.loader.model_class = model_class
    with caplog.at_level(logging.WARNING, logger="weightcached.engines.sglang"):
        model = engine.load(checkpoint)
    (record,) = [item for item in caplog.records if item.name.startswith("weightcached.engines.sglang")]
    assert "is not published" in record.getMessage()
    assert said in record.getMessage()
    assert published(worker) == []
    assert model(IDS).isfinite().all()


def test_two_checkpoints_with_equal_headers_are_not_confused(
    worker: RunningWorker, engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    """A fine-tune with the same names, shapes and folder name gets its own values (vllm#59647 has it otherwise), and
    does not take the other's place."""
    base = engine.load(checkpoint)(IDS)
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 0x01
    tuned = tmp_path / "other" / checkpoint.name
    tuned.mkdir(parents=True)
    (tuned / "model.safetensors").write_bytes(data)
    assert not torch.equal(engine.load(tuned)(IDS), base)
    assert engine.disk_loads == 2
    assert len(published(worker)) == 2
    assert torch.equal(engine.load(checkpoint, on_miss="fail")(IDS), base)


def test_a_draft_model_has_a_key_of_its_own(worker: RunningWorker, engine: Engine, checkpoint: Path) -> None:
    """The same files as target and as draft are two shards."""
    engine.load(checkpoint)
    engine.model_config.is_draft_model = True
    engine.load(checkpoint)
    assert sorted(shard["key"]["role"] for shard in published(worker)) == ["draft", "main"]


def test_options_are_checked_before_anything_is_loaded(engine: Engine, checkpoint: Path) -> None:
    """A wrong option is named, with the nearest right one."""
    with pytest.raises(EngineError, match="did you mean 'on_miss'"):
        engine.load(checkpoint, on_mis="wait")
    assert engine.disk_loads == 0


def test_an_engine_with_its_own_copy_may_be_updated(worker: RunningWorker, engine: Engine, checkpoint: Path) -> None:
    """mode=copy: nothing is shared, after a load from disk and after a hit; what it writes is not in the cache."""
    expected = engine.load(checkpoint, publish=False)(IDS)
    for _ in range(2):
        model = engine.load(checkpoint, mode="copy")
        assert plugin.shared() == []
        model.embed.weight.data.add_(1)
        del model
    gc.collect()
    assert torch.equal(engine.load(checkpoint, on_miss="fail")(IDS), expected)


def test_forms_that_only_auto_finds_out_are_refused(engine: Engine, checkpoint: Path) -> None:
    """SGLang looks for GGUF and Mistral's own files under --load-format auto alone; here the sentence says which."""
    file = checkpoint / "model.safetensors"
    with pytest.raises(EngineError, match="--load-format gguf"):
        engine.load(file)
    file.rename(checkpoint / "consolidated.safetensors")
    with pytest.raises(EngineError, match="--load-format mistral"):
        engine.load(checkpoint)
    assert engine.disk_loads == 0
