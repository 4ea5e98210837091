"""The slices compute what the whole model does: all ranks in one process against transformers' logits, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.families.checkpoints import in_bytes
from tests.parallel.families.forward import Sliced
from tests.parallel.families.joining import filled
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EVERY = [
    Parallel(),
    Parallel(tensor=2),
    Parallel(tensor=8),  # four ranks for each key/value head
    Parallel(tensor=4, pipeline=2),
    Parallel(tensor=2, pipeline=2, layers="transformers"),
]
WITH_EXPERTS = [
    Parallel(tensor=2, data=2),
    Parallel(tensor=4, expert=True),
    Parallel(tensor=4, expert=True, placement="round_robin"),
    Parallel(tensor=2, data=2, pipeline=3, expert=True),
]
MODELS = {"Llama": EVERY, "Qwen3": EVERY, "Mixtral": EVERY + WITH_EXPERTS, "Qwen3Moe": EVERY + WITH_EXPERTS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Each kind of model with random weights of a size that makes logits differ, and its folder."""
    found = {}
    for kind in MODELS:
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        found[kind] = model, folder
    return found


def sliced(model: Any, folder: Path, parallel: Parallel) -> Sliced:
    """The model that consists of the ranks' slices of the files in `folder`."""
    with open_checkpoint(folder) as checkpoint:
        ranges = [tensor for file in checkpoint.files for tensor in file.header.tensors]
    shards = plan_slices(ranges, model.config.to_dict(), parallel)
    raw = {name: tensor.view(torch.uint8) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert {tensor.name: in_bytes(tensor.dtype, tensor.shape) for tensor in ranges} == {
        name: tuple(tensor.shape) for name, tensor in raw.items()
    }
    ranks = [
        {piece.name: filled(raw[piece.name], piece).view(torch.float32) for piece in shard.slices} for shard in shards
    ]
    stages = [shards[stage * parallel.tensor].layers or (0, 3) for stage in range(parallel.pipeline)]
    return Sliced(model.config, parallel, ranks, stages)


@pytest.mark.parametrize(("kind", "parallel"), [(kind, sizes) for kind, many in MODELS.items() for sizes in many])
def test_the_slices_give_the_models_logits(kind: str, parallel: Parallel, models: dict[str, tuple[Any, Path]]) -> None:
    """Sums over ranks stand for all-reduces; each rank uses nothing but its own slices."""
    model, folder = models[kind]
    ids = torch.tensor([3, 99, 0, 42, 17, 64, 63, 5, 5, 88])

    with torch.no_grad():
        want = model(input_ids=ids[None]).logits[0]
        found = sliced(model, folder, parallel).logits(ids)

    assert want.std() > 0.5
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_one_wrong_slice_changes_them(models: dict[str, tuple[Any, Path]]) -> None:
    """Two ranks with each other's columns of one projection give other logits: the comparison sees such a thing."""
    model, folder = models["Llama"]
    ids = torch.arange(10)
    whole = sliced(model, folder, Parallel(tensor=2))
    name = "model.layers.1.self_attn.o_proj.weight"

    with torch.no_grad():
        want = whole.logits(ids)
        whole.ranks[0][name], whole.ranks[1][name] = whole.ranks[1][name], whole.ranks[0][name]

        assert (whole.logits(ids) - want).abs().max() > 0.1
