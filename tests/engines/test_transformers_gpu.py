"""engines/transformers/ on a real GPU, with a real service."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.models import TINY, assert_same, outputs, save_random, to_fp8
from tests.running import RunningService
from weightcached.devices import gpu_devices
from weightcached.engines.transformers import from_cache

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


@pytest.fixture
def service(runtime_dir: Path, tmp_path: Path) -> Iterator[RunningService]:
    """A service that caches a random tied Llama in bfloat16 and a GPT-J on the first GPU."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, tie_word_embeddings=True))
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    gptj = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2))
    config = f'devices = ["{gpu_devices()[0].name}"]\n'
    for name, model in (("llama", llama), ("gptj", gptj)):
        folder = save_random(model.to(torch.bfloat16), tmp_path / name)
        config += f'[[model]]\nname = "{name}"\ncheckpoint = "{folder}"\n'
    running = RunningService(runtime_dir, config)
    try:
        yield running.ready()
    finally:
        running.abandon()


@pytest.mark.parametrize("name", ["llama", "gptj"])
@pytest.mark.parametrize("mode", ["zero_copy", "copy"])
def test_a_model_on_the_gpu(service: RunningService, tmp_path: Path, name: str, mode: Any) -> None:
    """Every parameter and buffer is on the GPU; state, buffers and outputs are those of `from_pretrained`."""
    model = from_cache(name, device="cuda:0", mode=mode)

    want = type(model).from_pretrained(tmp_path / name, torch_dtype="auto").to("cuda:0").eval()
    assert {tensor.device for tensor in [*model.parameters(), *model.buffers()]} == {torch.device("cuda:0")}
    assert_same(model, want)
    (found,) = service.status()["devices"]
    leases = [lease for shard in found["shards"] for lease in shard["leases"]]
    assert len(leases) == (1 if mode == "zero_copy" else 0)
    del model
    gc.collect()
    service.stop()


def test_tokens_are_the_same(service: RunningService, tmp_path: Path) -> None:
    """Greedy generation over read-only memory gives the tokens of ordinary memory."""
    ids = torch.tensor([[1, 5, 7]], device="cuda:0")
    model = from_cache("llama", device="cuda:0")
    want = type(model).from_pretrained(tmp_path / "llama", torch_dtype="auto").to("cuda:0").eval()

    options = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
    assert torch.equal(model.generate(ids, **options), want.generate(ids, **options))
    del model
    gc.collect()
    service.stop()


LARGE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def dense() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LARGE))


def experts() -> Any:
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**LARGE, **sizes))


@pytest.fixture
def bare_service(runtime_dir: Path) -> Iterator[RunningService]:
    """A service for the first GPU without any model in its config."""
    running = RunningService(runtime_dir, f'devices = ["{gpu_devices()[0].name}"]\n')
    try:
        yield running.ready()
    finally:
        running.abandon()


def timed(what: str, load: Callable[[], Any]) -> Any:
    """What `load` gives, and how long it took, printed."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    model = load()
    torch.cuda.synchronize()
    print(f"{what}: {time.perf_counter() - started:.3f} s")
    return model


def on_disk(folder: Path) -> Any:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, torch_dtype="auto").requires_grad_(False).to("cuda:0").eval()


def test_dense_is_the_same_from_disk_and_cache(runtime_dir: Path, tmp_path: Path) -> None:
    """A Qwen3 of some 400 MB in bfloat16, which the service loads itself: outputs and state, bit for bit."""
    folder = save_random(dense().to(torch.bfloat16), tmp_path / "dense")
    config = f'devices = ["{gpu_devices()[0].name}"]\n[[model]]\nname = "dense"\ncheckpoint = "{folder}"\n'
    running = RunningService(runtime_dir, config)
    try:
        running.ready()
        want = timed("dense, disk", lambda: on_disk(folder))
        for _ in range(2):
            assert_same(timed("dense, attached", lambda: from_cache(folder, device="cuda:0", on_miss="wait")), want)
        gc.collect()
        running.stop()
    finally:
        running.abandon()


def test_experts_are_the_same_from_disk_first_and_attached(bare_service: RunningService, tmp_path: Path) -> None:
    """A Qwen3-MoE of some 600 MB, which transformers merges: the first call publishes, the others attach."""
    folder = save_random(experts().to(torch.bfloat16), tmp_path / "moe")
    want = timed("moe, disk", lambda: on_disk(folder))

    first = timed("moe, first (publishes)", lambda: from_cache(folder, device="cuda:0", on_miss="fallback"))
    assert_same(first, want)
    before = torch.cuda.mem_get_info()[0]
    for _ in range(2):
        attached = timed("moe, attached", lambda: from_cache(folder, device="cuda:0"))
        assert_same(attached, want)
    weights = sum(parameter.numel() * parameter.itemsize for parameter in want.parameters())
    assert before - torch.cuda.mem_get_info()[0] < weights / 4  # no copy of the weights for who attaches
    ids = torch.tensor([[1, 5, 7]], device="cuda:0")
    options = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
    assert torch.equal(attached.generate(ids, **options), want.generate(ids, **options))
    del first, attached
    gc.collect()
    (found,) = bare_service.status()["devices"]
    assert [shard["key"]["compute_capability"] for shard in found["shards"]] == [
        "{}.{}".format(*torch.cuda.get_device_capability(0))
    ]
    bare_service.stop()


def test_fp8_is_the_same_from_disk_first_and_attached(bare_service: RunningService, tmp_path: Path) -> None:
    """Block FP8 in the layers' projections, kept in FP8: every tensor is the same; outputs where kernels are there."""
    pytest.importorskip("accelerate", reason="transformers loads FP8 only with accelerate there")
    folder = save_random(dense().to(torch.bfloat16), tmp_path / "fp8")
    to_fp8(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    try:
        want = timed("fp8, disk", lambda: on_disk(folder))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        pytest.skip(f"transformers cannot load FP8 here: {error}")

    first = timed("fp8, first (publishes)", lambda: from_cache(folder, device="cuda:0", on_miss="fallback"))
    attached = timed("fp8, attached", lambda: from_cache(folder, device="cuda:0"))

    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in attached.state_dict().values())
    for model in (first, attached):
        found, expected = model.state_dict(), want.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype
            assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name
    try:
        expected_outputs = outputs(want)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"fp8: no forward pass here, from disk either: {error}")
    else:
        for model in (first, attached):
            for tensor, expected in zip(outputs(model), expected_outputs, strict=True):
                assert torch.equal(tensor, expected)
    del first, attached, model
    gc.collect()
    bare_service.stop()
