"""The key: the same for engines that can share weights, another one for each setting that shapes them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm import shaped
from tests.engines.vllm.conftest import Vllm
from weightcached.engines.policy import Options
from weightcached.engines.vllm import layout
from weightcached.text import MODEL_NAME


def key(folder: Path, model: dict[str, Any] | None = None, ranks: layout.Ranks | None = None, **config: Any) -> Any:
    model_config = shaped.ModelConfig(folder, **(model or {}))
    return layout.key_of(shaped.vllm_config(model_config, **config), model_config, ranks or layout.Ranks())


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"max_model_len": 128}},
        {"model": {"dtype": "other"}},
        {"model": {"quantization": "fp8"}},
        {"model": {"hf_config": shaped.Config(rope_theta=1.5)}},
        {"model": {"hf_config": shaped.Config(quantization_config={"bits": 8})}},
        {"cache_dtype": "fp8"},
        {"moe_backend": "triton"},
        {"linear_backend": "cutlass"},
        {"lora_config": object()},
        {"ranks": layout.Ranks(tensor=(2, 0))},
        {"ranks": layout.Ranks(expert=(2, 0))},
        {"attention_config": SimpleNamespace(backend="TRITON_ATTN")},
    ],
)
def test_what_shapes_weights_is_in_the_layout(vllm: Vllm, folder: Path, change: dict[str, Any]) -> None:
    """Each setting changes it."""
    assert key(folder, **change)["layout"] != key(folder)["layout"]


def test_versions_and_switches_are_in_the_layout(vllm: Vllm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another vLLM, torch or kernel switch is another layout; a port is not."""
    before = key(folder)["layout"]
    assert before.startswith("vllm-0.33.0/")
    environment = vllm.modules["vllm.envs"].environment_variables
    monkeypatch.setitem(environment, "VLLM_PORT", lambda: 2)
    assert key(folder)["layout"] == before
    monkeypatch.setitem(environment, "VLLM_USE_DEEP_GEMM", lambda: False)
    assert key(folder)["layout"] != before
    monkeypatch.undo()


def test_ranks_share_layout_and_name(vllm: Vllm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are fields of the key: the service counts the ranks of a name together."""
    found = []
    for rank in range(2):
        monkeypatch.setattr(shaped.Groups, "tensor", (2, rank))
        model_config = shaped.ModelConfig(folder)
        config = shaped.vllm_config(model_config)
        found.append(layout.wanted_by(config, model_config, shaped.LoadConfig(), Options()))
    assert found[0].name == found[1].name
    assert MODEL_NAME.fullmatch(found[0].name)
    assert [wanted.key.pop("tensor_parallel_rank") for wanted in found] == [0, 1]
    assert found[0].key == found[1].key
    assert found[0].nbytes == (folder / "model.safetensors").stat().st_size // 2


def test_expert_ranks_are_those_of_vllm(vllm: Vllm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FusedMoEParallelConfig.make: data parallel ranks outside, tensor parallel ones inside."""
    monkeypatch.setattr(shaped.Groups, "tensor", (2, 1))
    monkeypatch.setattr(shaped.Groups, "data", SimpleNamespace(world_size=3, rank_in_group=2))
    model_config = shaped.ModelConfig(folder)
    ranks = layout.ranks_of(shaped.vllm_config(model_config, enable_expert_parallel=True), model_config)
    assert ranks.expert == (6, 5)


def test_ranks_of_a_cpu_have_a_host_device_each(vllm: Vllm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share torch's one device: under one name there the second would take the first one's place."""
    found = []
    for data, pipeline, tensor in itertools.product(range(2), repeat=3):
        monkeypatch.setattr(shaped.Groups, "tensor", (2, tensor))
        monkeypatch.setattr(shaped.Groups, "pipeline", SimpleNamespace(world_size=2, rank_in_group=pipeline))
        monkeypatch.setattr(shaped.Groups, "data", SimpleNamespace(world_size=2, rank_in_group=data))
        model_config = shaped.ModelConfig(folder)
        config = shaped.vllm_config(model_config)
        found.append(layout.wanted_by(config, model_config, shaped.LoadConfig(), Options()).device)
    assert found == [f"host-{rank}" for rank in range(8)]


def test_key_is_taken_before_the_config_changes(vllm: Vllm, folder: Path) -> None:
    """Constructing a model changes its config; it is asked for once."""
    model_config = shaped.ModelConfig(folder)
    config = shaped.vllm_config(model_config)
    before = layout.wanted_by(config, model_config, shaped.LoadConfig(), Options())
    model_config.hf_config.rope_parameters = {"theta": 1}
    assert layout.wanted_by(config, model_config, shaped.LoadConfig(), Options()).key == before.key


def test_place_of_the_files_is_no_part_of_the_key(vllm: Vllm, folder: Path, tmp_path: Path) -> None:
    """The same bytes elsewhere are a hit; published they have another name."""
    other = shaped.write_checkpoint(tmp_path / "elsewhere" / "tiny")
    made = [layout.wanted_by(shaped.vllm_config(config), config, shaped.LoadConfig(), Options())
            for config in (shaped.ModelConfig(folder), shaped.ModelConfig(other))]  # fmt: skip
    assert made[0].key == made[1].key
    assert made[0].name != made[1].name


def test_ngram_drafter_is_no_draft(vllm: Vllm, folder: Path) -> None:
    """Its draft config is the target's."""
    config = shaped.ModelConfig(folder)
    speculative = SimpleNamespace(draft_model_config=config, target_model_config=config)
    assert not layout.is_draft(shaped.vllm_config(config, speculative_config=speculative), config)


def test_folder_without_safetensors(vllm: Vllm, tmp_path: Path) -> None:
    """Other formats have no identity here."""
    assert layout.checkpoint_folder(shaped.ModelConfig(tmp_path), shaped.LoadConfig()) is None
