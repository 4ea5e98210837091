"""engines/transformers/ranks.py: two processes, each over its own cached slices, are the whole model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import TINY, outputs, save_random
from tests.running import ROOT, RunningService, import_path
from tests.warm import Warm
from weightcached.engines.transformers import from_cache
from weightcached.errors import EngineError

transformers = pytest.importorskip("transformers")
utils = pytest.importorskip("transformers.distributed.utils")
if not hasattr(utils, "TransformersDeviceMesh"):
    pytest.skip("this version of transformers cuts models in another way", allow_module_level=True)
EVEN = {**TINY, "vocab_size": 128}  # the service pads a vocabulary to 64 for each rank, transformers does not


@pytest.fixture
def services(runtime_dir: Path) -> Iterator[list[RunningService]]:
    """Services that a test has started, ended."""
    started: list[RunningService] = []
    yield started
    for service in started:
        service.abandon()


def serve(services: list[RunningService], runtime_dir: Path, folder: Path, size: int = 2) -> RunningService:
    """The checkpoint cut for two ranks, one in each of two host devices."""
    config = 'devices = ["host-0", "host-1"]\n'
    config += f'[[model]]\nname = "m"\ncheckpoint = "{folder}"\ntensor_parallel = {size}\n'
    services.append(RunningService(runtime_dir, config))
    return services[-1].ready()


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """What forks the ranks: each would import torch and transformers for longer than it runs."""
    started = Warm("torch.distributed.tensor", "transformers.models.qwen3.modeling_qwen3", "transformers.distributed")
    yield started
    started.close()


def run_ranks(warm: Warm, folder: Path, tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    """What each of two ranks, processes that run together, has put into its file."""
    processes = []
    for rank in range(2):
        arguments = [str(rank), "2", str(tmp_path / "store"), str(folder), str(tmp_path / f"out-{rank}")]
        command = ["-m", "tests.engines.transformers.rank", *arguments, f"host-{rank}", json.dumps(options)]
        environ = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
        processes.append(warm.start(*command, cwd=ROOT, environ=environ))
    ended = [process.wait(55) for process in processes]
    texts = [(done.stdout + done.stderr)[-4000:] for done in ended]
    # Not by the exit status: torch's gloo threads may abort a process at its very end, after all has been written.
    assert all((tmp_path / f"out-{rank}").exists() for rank in range(2)), "\n".join(texts)
    return [torch.load(tmp_path / f"out-{rank}", weights_only=True) for rank in range(2)]


def qwen3(**changes: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**EVEN, "head_dim": 8, **changes}))


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_give_what_the_whole_model_gives(
    warm: Warm, services: list[RunningService], runtime_dir: Path, tmp_path: Path, tied: bool
) -> None:
    """Each rank's parameters are its own slab's memory, half of what is cut; the logits are the whole model's."""
    folder = save_random(qwen3(tie_word_embeddings=tied), tmp_path / "random")
    service = serve(services, runtime_dir, folder)

    found = run_ranks(warm, folder, tmp_path)

    want = outputs(transformers.Qwen3ForCausalLM.from_pretrained(folder).eval())
    for rank in found:
        assert "error" not in rank, rank["error"]
        assert rank["slabs"] == 1
        assert rank["local"]["model.layers.0.self_attn.q_proj.weight"] == [16, 32]
        assert rank["local"]["model.layers.0.mlp.down_proj.weight"] == [32, 24]
        assert rank["local"]["model.layers.0.input_layernorm.weight"] == [32]
        torch.testing.assert_close(rank["outputs"][0], want[0], rtol=1e-4, atol=1e-4)
    service.stop()


def test_another_cut_is_refused_by_every_rank(
    warm: Warm, services: list[RunningService], runtime_dir: Path, tmp_path: Path
) -> None:
    """A vocabulary that the service pads and transformers does not: the error names the parameter and both cuts."""
    folder = save_random(qwen3(vocab_size=99), tmp_path / "random")
    serve(services, runtime_dir, folder)

    for rank in run_ranks(warm, folder, tmp_path):
        assert rank["error"].startswith("EngineError: Qwen3ForCausalLM: the cache's slices are not")
        assert "model.embed_tokens.weight: is cut to [64, 32], of other places" in rank["error"]


def test_converted_experts_are_refused(
    warm: Warm, services: list[RunningService], runtime_dir: Path, tmp_path: Path
) -> None:
    """What transformers merges while loading is no slice of the checkpoint; from_pretrained is named instead."""
    sizes = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    moe = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EVEN, **sizes))
    folder = save_random(moe, tmp_path / "random")
    serve(services, runtime_dir, folder)

    for rank in run_ranks(warm, folder, tmp_path):
        assert "transformers rewrites weights while it loads them" in rank["error"]
        assert "not supported with tp_plan" in rank["error"]


def test_fallback_loads_every_rank_from_disk(warm: Warm, runtime_dir: Path, tmp_path: Path) -> None:
    """Without a service the ranks are what transformers itself loads, with the whole model's logits."""
    pytest.importorskip("accelerate", reason="transformers cuts models only with accelerate there")
    folder = save_random(qwen3(), tmp_path / "random")

    found = run_ranks(warm, folder, tmp_path, on_miss="fallback", timeout=0)

    want = outputs(transformers.Qwen3ForCausalLM.from_pretrained(folder).eval())
    for rank in found:
        assert "error" not in rank, rank["error"]
        torch.testing.assert_close(rank["outputs"][0], want[0], rtol=1e-4, atol=1e-4)


def test_without_ranks(tmp_path: Path, runtime_dir: Path) -> None:
    """No torch.distributed, a name instead of a folder, ranks without a plan: each says what is missing."""
    folder = save_random(qwen3(), tmp_path / "random")
    with pytest.raises(EngineError, match=r"call torch\.distributed\.init_process_group"):
        from_cache(folder, device="host-0", tp_plan="auto")
    with pytest.raises(EngineError, match="tp_plan needs the checkpoint's folder"):
        from_cache("m", device="host-0", tp_plan="auto")
    with pytest.raises(EngineError, match="tensor_parallel needs tp_plan='auto'"):
        from_cache(folder, device="host-0", tensor_parallel=(0, 2))
