"""engines/transformers/processed.py: what transformers converts is loaded once, published, and then attached."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.handmade import DEVICE, RunningWorker
from tests.engines.models import TINY, assert_same, cache, outputs, save_random
from tests.running import ROOT, import_path
from weightcached.engines.transformers import from_cache
from weightcached.errors import EngineError, KeyMismatch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.conversion_mapping", reason="transformers 4 converts nothing")
EXPERTS = {"num_experts_per_tok": 2}


def qwen3_moe(**changes: Any) -> Any:
    sizes = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, **EXPERTS}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**TINY, **sizes, **changes}))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, **EXPERTS, num_local_experts=4))


def shards(worker: RunningWorker) -> list[dict[str, Any]]:
    return list(worker.status()["shards"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What weightcached has warned of."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("weightcached")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [qwen3_moe, lambda: qwen3_moe(tie_word_embeddings=True), mixtral],
    ids=["qwen3-moe", "tied qwen3-moe", "mixtral"],
)
def test_disk_first_and_attached_are_the_same(
    worker: RunningWorker,
    tmp_path: Path,
    make: Callable[[], Any],
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first call warns once, loads and publishes; the next attaches. Bit for bit both are `from_pretrained`'s."""
    random = make().to(dtype)
    folder = save_random(random, tmp_path / "random")
    want = type(random).from_pretrained(folder).eval()

    with caplog.at_level(logging.WARNING, "weightcached"):
        first = from_cache(folder, device=DEVICE, on_miss="fallback")
    (warning,) = warnings(caplog)
    assert "is loaded from disk" in warning
    (shard,) = shards(worker)
    assert shard["key"]["layout"].startswith(f"transformers-{transformers.__version__}/")
    assert [lease["pid"] for lease in shard["leases"]] == [os.getpid()]
    assert_same(first, want)

    caplog.clear()
    with caplog.at_level(logging.WARNING, "weightcached"):
        attached = [from_cache(folder, device=DEVICE, on_miss=miss) for miss in ("fail", "wait", "fallback")]
    assert not warnings(caplog)
    assert len(shards(worker)) == 1
    for model in attached:
        assert type(model) is type(random) and not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert_same(model, want)
    assert_same(from_cache(shard["model"], device=DEVICE), want)  # by the name, under which status lists it


def test_another_process_attaches(worker: RunningWorker, tmp_path: Path) -> None:
    """The outputs of a process that has attached are those of the one that has published, which may be gone."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    held = [from_cache(folder, device=DEVICE, on_miss="fallback")]
    want = outputs(held[0])
    worker.wait_released(lambda: (held.clear(), gc.collect()))

    program = (
        "import sys, torch\nfrom tests.engines.models import outputs\n"
        "from weightcached.engines.transformers import from_cache\n"
        "torch.save(outputs(from_cache(sys.argv[1], device=sys.argv[2])), sys.argv[3])\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(folder), DEVICE, str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": import_path()},
        check=True,
        timeout=50,
    )

    for found, expected in zip(torch.load(tmp_path / "out", weights_only=True), want, strict=True):
        assert torch.equal(found, expected)


def test_the_memory_is_shared(worker: RunningWorker, tmp_path: Path) -> None:
    """Publisher and attached model read the same pages: their mappings are of one slab."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    models = [from_cache(folder, device=DEVICE, on_miss="fallback") for _ in range(2)]

    inodes = []
    lines = Path("/proc/self/maps").read_text().splitlines()
    for model in models:
        address = model.model.layers[0].mlp.experts.gate_up_proj.data_ptr()
        for line in lines:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                inodes.append(line.split()[4])
    assert len(inodes) == 2 and inodes[0] == inodes[1] != "0"


def test_nobody_has_published(worker: RunningWorker, tmp_path: Path) -> None:
    """ "fail" and "wait" say what would help, also where the service has the checkpoint itself, under a name."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    for miss in ("fail", "wait"):
        with pytest.raises(EngineError, match=r"transformers rewrites .*on_miss='fallback' would load and publish it"):
            from_cache(folder, device=DEVICE, on_miss=miss, timeout=0.1)
    cache(worker, folder)
    with pytest.raises(EngineError, match=r"transformers rewrites .*on_miss='fallback' would load and publish it"):
        from_cache("m", device=DEVICE)

    want = from_cache(folder, device=DEVICE, on_miss="fallback")
    assert_same(from_cache("m", device=DEVICE), want)  # by the files of that name


def test_not_published(worker: RunningWorker, runtime_dir: Path, tmp_path: Path) -> None:
    """With publish=False, and without a service, the model is loaded all the same, and is the process's own."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    want = transformers.Qwen3MoeForCausalLM.from_pretrained(folder).eval()

    assert_same(from_cache(folder, device=DEVICE, on_miss="fallback", publish=False), want)
    assert not shards(worker)
    worker.stop()
    assert_same(from_cache(folder, device=DEVICE, on_miss="fallback"), want)


def test_copies_are_writable(worker: RunningWorker, tmp_path: Path) -> None:
    """With mode="copy" publisher and attached model have memory of their own, and nothing is in use."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    want = transformers.Qwen3MoeForCausalLM.from_pretrained(folder).eval()

    models: list[Any] = []
    for _ in range(2):  # the publisher, then who attaches
        worker.wait_released(lambda: models.append(from_cache(folder, device=DEVICE, on_miss="fallback", mode="copy")))
        gc.collect()
    assert shards(worker) and not worker.leases()
    with torch.no_grad():
        models[0].lm_head.weight.fill_(1.0)
    assert_same(models[1], want)


def test_another_config_is_another_layout(worker: RunningWorker, tmp_path: Path) -> None:
    """What shapes the tensors makes a layout of its own; where attention or a path is named, it does not."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    from_cache(folder, device=DEVICE, on_miss="fallback")
    (shard,) = shards(worker)
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    config.name_or_path = "elsewhere"
    from_cache(folder, device=DEVICE, config=config)

    config.num_experts_per_tok = 1
    with pytest.raises(EngineError, match="would load and publish it"):
        from_cache(folder, device=DEVICE, config=config)
    with pytest.raises(KeyMismatch, match="layout"):
        from_cache(shard["model"], device=DEVICE, config=config)


def test_changed_files_are_not_the_published_ones(worker: RunningWorker, tmp_path: Path) -> None:
    """After the checkpoint has been written again, with other bytes, the published model is not attached."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    from_cache(folder, device=DEVICE, on_miss="fallback")

    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(folder)

    with pytest.raises(EngineError, match="would load and publish it"):
        from_cache(folder, device=DEVICE)
    assert_same(from_cache(folder, device=DEVICE, on_miss="fallback"), model.eval())


def test_a_dtype_that_the_config_asks_for(worker: RunningWorker, tmp_path: Path) -> None:
    """Files in float32 whose config says bfloat16: cast as `from_pretrained` does, and published so."""
    folder = save_random(qwen3_moe(), tmp_path / "random")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    want = transformers.Qwen3MoeForCausalLM.from_pretrained(folder).eval()
    assert want.dtype == torch.bfloat16

    assert_same(from_cache(folder, device=DEVICE, on_miss="fallback"), want)
    assert_same(from_cache(folder, device=DEVICE), want)
