"""engines/transformers/cached.py: a model over cached memory is what `from_pretrained` gives, or none at all."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.handmade import DEVICE, RunningWorker, read_file
from tests.engines.models import TINY, assert_same, cache, save_random
from weightcached.engines import policy
from weightcached.engines.transformers import from_cache
from weightcached.errors import (
    ConnectionLost,
    EngineError,
    KeyMismatch,
    ManifestError,
    MissingDependency,
    ModelFailed,
    ModelLoading,
    ModelNotLoaded,
    NoSuchModel,
    PeerRefused,
    RuntimeDirectoryError,
    TimedOut,
    VersionMismatch,
    WrongDevice,
)

transformers = pytest.importorskip("transformers")


def llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**TINY, "tie_word_embeddings": True, **changes})
    return transformers.LlamaForCausalLM(config)


def qwen3(**changes: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**TINY, "head_dim": 8, **changes}))


def gpt2() -> Any:
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def gptj() -> Any:
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    return transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, bos_token_id=1, eos_token_id=2))


def gpt_neo() -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    types = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(**sizes, attention_types=types, bos_token_id=1, eos_token_id=2)
    return transformers.GPTNeoForCausalLM(config)


def test_a_real_model_is_bit_identical(worker: RunningWorker, minilm: Path) -> None:
    """MiniLM from its package: same state, buffers and outputs as from disk, whose old position_ids are left aside."""
    assert "embeddings.position_ids" in {raw.name for raw in read_file(minilm / "model.safetensors")}
    cache(worker, minilm)

    model = from_cache("m", device=DEVICE)

    assert type(model) is transformers.BertModel
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert_same(model, transformers.BertModel.from_pretrained(minilm).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        llama,
        lambda: llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        lambda: qwen3(tie_word_embeddings=True),
        lambda: qwen3(tie_word_embeddings=False),
        gpt2,
        gpt_neo,
        gptj,
    ],
    ids=["tied llama", "dynamic rope", "tied qwen3", "untied qwen3", "gpt2", "gpt-neo", "gpt-j"],
)
def test_families(worker: RunningWorker, tmp_path: Path, make: Callable[[], Any], dtype: torch.dtype) -> None:
    """Tied embeddings, rotary tables, causal masks and sine tables that no checkpoint holds: as `from_pretrained`."""
    random = make().to(dtype)
    folder = save_random(random, tmp_path / "random")
    cache(worker, folder)

    model = from_cache("m", device=DEVICE)

    assert model.dtype == dtype
    assert_same(model, type(random).from_pretrained(folder, torch_dtype="auto").eval())


def test_copies_are_writable_and_hold_no_lease(worker: RunningWorker, tmp_path: Path) -> None:
    """With mode="copy" the model is its own, for training say, and nothing is in use."""
    cache(worker, save_random(llama(), tmp_path / "random"))
    held: list[Any] = []

    worker.wait_released(lambda: held.append(from_cache("m", device=DEVICE, mode="copy")))

    assert worker.leases() == []
    with torch.no_grad():
        held[0].lm_head.weight.fill_(1.0)
    assert held[0].model.embed_tokens.weight.unique().tolist() == [1.0]


def test_nothing_global_is_changed(worker: RunningWorker, tmp_path: Path) -> None:
    """Afterwards new modules are ordinary again, the default dtype and the caller's config are what they were."""
    folder = save_random(llama().to(torch.bfloat16), tmp_path / "random")
    cache(worker, folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    before = config.to_dict()

    from_cache("m", device=DEVICE, config=config)

    assert config.to_dict() == before
    layer = torch.nn.Linear(2, 2)
    assert (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32)
    assert not layer.weight.is_meta

    with pytest.raises(EngineError):
        from_cache("m", device=DEVICE, config=transformers.LlamaConfig(**{**TINY, "hidden_size": 64}))
    assert torch.get_default_dtype() == torch.float32
    assert not torch.nn.Linear(2, 2).weight.is_meta


def test_no_weight_memory_is_used_while_building(worker: RunningWorker, tmp_path: Path) -> None:
    """During construction every parameter is on meta when the model's own code goes on."""
    seen: list[bool] = []

    class Watching(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            seen.extend(parameter.is_meta for parameter in self.parameters())

    cache(worker, save_random(llama(), tmp_path / "random"))
    from_cache("m", device=DEVICE, model_class=Watching)

    assert seen and all(seen)


def test_a_checkpoint_folder_finds_its_model(worker: RunningWorker, tmp_path: Path) -> None:
    """A folder in place of a name: config and identity come from it, whatever the cached model is called."""
    folder = save_random(llama(), tmp_path / "random")
    cache(worker, folder, "some-name", attributes={})

    model = from_cache(folder, device=DEVICE)
    assert model.config.name_or_path == str(folder)
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(folder).eval())
    with pytest.raises(NoSuchModel):
        from_cache(save_random(llama(vocab_size=98), tmp_path / "other"), device=DEVICE)


def test_generation_config_is_read(worker: RunningWorker, tmp_path: Path) -> None:
    """What generation_config.json says holds, as after `from_pretrained`, and tokens come out the same."""
    folder = save_random(llama(), tmp_path / "random")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5, "eos_token_id": 2}))
    cache(worker, folder)

    model = from_cache("m", device=DEVICE)

    assert model.generation_config.max_new_tokens == 5
    want = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[1, 5, 7]])
    assert torch.equal(model.generate(ids, do_sample=False), want.generate(ids, do_sample=False))


def test_a_config_must_come_from_somewhere(worker: RunningWorker, tmp_path: Path) -> None:
    """A cached model that does not say where it came from needs config=; a folder that is gone is named."""
    model = llama()
    folder = save_random(model, tmp_path / "random")
    cache(worker, folder, "nowhere", attributes={})
    cache(worker, folder, "gone", attributes={"checkpoint": str(tmp_path / "gone")})
    cache(worker, folder, "file", attributes={"checkpoint": str(folder / "model.safetensors")})

    with pytest.raises(EngineError, match="pass config="):
        from_cache("nowhere", device=DEVICE)
    with pytest.raises(EngineError, match=r"was cached from .*gone, which is gone; pass config="):
        from_cache("gone", device=DEVICE)
    assert type(from_cache("nowhere", device=DEVICE, config=model.config)) is type(model)
    assert type(from_cache("file", device=DEVICE)) is type(model)


def test_refused_classes(worker: RunningWorker, tmp_path: Path) -> None:
    """No architecture, one that transformers lacks, code of the checkpoint's own, a quantised one: an error each."""
    folder = save_random(llama(), tmp_path / "random")
    cache(worker, folder)
    config = transformers.LlamaConfig(**TINY)

    for changes, message in (
        ({"architectures": None}, "no class for none; pass model_class="),
        ({"architectures": ["Llama9ForCausalLM"]}, "no class for Llama9ForCausalLM"),
        ({"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}}, "its own model code"),
        (
            {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq"}},
            "quantised with gptq",
        ),
    ):
        for name, value in changes.items():
            setattr(config, name, value)
        with pytest.raises(EngineError, match=message):
            from_cache("m", device=DEVICE, config=config)
        for name in changes:
            setattr(config, name, None)


class TestMisses:
    """What happens when the cache does not have the model."""

    def test_fail(self, worker: RunningWorker, tmp_path: Path) -> None:
        """The cache's own error comes out, at once."""
        worker.models(slow={"state": "loading", "progress": 0.5})
        with pytest.raises(NoSuchModel):
            from_cache("nothing", device=DEVICE)
        with pytest.raises(ModelLoading):
            from_cache("slow", device=DEVICE)

    def test_only_whole_checkpoints(self, worker: RunningWorker, tmp_path: Path) -> None:
        """A model in an engine's own layout, or one rank's part, is not what transformers can use."""
        folder = save_random(llama(), tmp_path / "random")
        cache(worker, folder, "engine", key={"layout": "vllm/1"})
        cache(worker, folder, "part", key={"tensor_parallel_size": 2})
        for name in ("engine", "part"):
            with pytest.raises(KeyMismatch):
                from_cache(name, device=DEVICE)

    @pytest.mark.parametrize("timeout", [0, 30.0])
    def test_fallback(
        self, runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, timeout: float
    ) -> None:
        """With on_miss="fallback" a folder is loaded the ordinary way, at once where there is no service, however long
        one would wait for what is on its way; and one warning says why."""
        folder = save_random(llama().to(torch.bfloat16), tmp_path / "random")

        started = time.monotonic()
        with caplog.at_level(logging.WARNING, "weightcached"):
            model = from_cache(folder, device=DEVICE, on_miss="fallback", timeout=timeout)
        assert time.monotonic() - started < 20

        (record,) = [record for record in caplog.records if record.name.startswith("weightcached")]
        engine = re.escape(f"transformers {transformers.__version__}: {folder}")
        assert re.match(f"{engine} is loaded from disk: no service answers at .*; start it: ", record.getMessage())
        assert not model.training and not model.lm_head.weight.requires_grad
        assert_same(model, transformers.LlamaForCausalLM.from_pretrained(folder, torch_dtype="auto").eval())

    def test_fallback_is_at_once_where_nobody_will_load_it(self, worker: RunningWorker, tmp_path: Path) -> None:
        """A service that has not got the model, nor is about to: the next start is no slower than without a service."""
        folder = save_random(llama(), tmp_path / "random")
        started = time.monotonic()
        from_cache(folder, device=DEVICE, on_miss="fallback", timeout=60)
        assert time.monotonic() - started < 30

    def test_fallback_needs_a_folder(self, worker: RunningWorker) -> None:
        """A name says nothing of where the files are, so this is refused before anything is tried."""
        with pytest.raises(EngineError, match="needs a checkpoint folder, 'm' is a name"):
            from_cache("m", device=DEVICE, on_miss="fallback")

    def test_fallback_is_not_used_on_a_hit(self, worker: RunningWorker, tmp_path: Path) -> None:
        """A cached model is taken from the cache, with and without a timeout."""
        folder = save_random(llama(), tmp_path / "random")
        cache(worker, folder)
        held = [from_cache(folder, device=DEVICE, on_miss="fallback", timeout=timeout) for timeout in (30, 0)]
        assert len(held) == 2
        assert worker.leases() == [os.getpid()] * 2

    @pytest.mark.parametrize(
        ("error", "falls_back"),
        [
            (TimedOut(path="x", seconds=1.0, waited_for="a connection"), True),
            (ConnectionLost(path="x", problem="closed"), True),
            (VersionMismatch(ours="1", theirs="2"), True),
            (ModelNotLoaded(model="m", device=DEVICE), True),
            (ModelLoading(model="m", device=DEVICE, progress=0.5), True),
            (ModelFailed(model="m", device=DEVICE, reason="no room"), True),
            (KeyMismatch(model="m", differences={"tensor_parallel_size": [1, 2]}), True),
            (PeerRefused(uid=1, allowed=[0]), False),
            (ManifestError(problem="nonsense"), False),
            (RuntimeDirectoryError(path="x", problem="open to others"), False),
            (WrongDevice(wanted="a", found="b"), False),
            (EngineError(problem="another shape"), False),
            (TypeError("wrong"), False),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
    )
    def test_what_falls_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, falls_back: bool
    ) -> None:
        """A cache that cannot be reached or lacks the model does; what is wrong with the caller, or with the cache, is
        not hidden."""

        def attach(*arguments: object, **options: object) -> None:
            raise error

        monkeypatch.setattr(policy, "attach", attach)
        folder = save_random(llama(), tmp_path / "random")
        if falls_back:
            assert type(from_cache(folder, device=DEVICE, on_miss="fallback")) is transformers.LlamaForCausalLM
        else:
            with pytest.raises(type(error)):
                from_cache(folder, device=DEVICE, on_miss="fallback")
        with pytest.raises(type(error)):
            from_cache(folder, device=DEVICE, on_miss="wait")

    @pytest.mark.parametrize("timeout", [-1.0, float("nan")])
    def test_a_wrong_argument_does_not_fall_back(self, tmp_path: Path, timeout: float) -> None:
        """A mistake of the caller is his to see."""
        folder = save_random(llama(), tmp_path / "random")
        with pytest.raises(ValueError, match="must be seconds"):
            from_cache(folder, device=DEVICE, on_miss="fallback", timeout=timeout)
        with pytest.raises(ValueError, match="it must be one of fail, wait, fallback"):
            from_cache(folder, device=DEVICE, on_miss="disk")  # type: ignore[arg-type]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependency, match=r"weightcached\[transformers\]"):
        from_cache("m", device=DEVICE)
