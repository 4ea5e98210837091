"""Checkpoints with random weights, as small as an architecture allows: for tests with a real engine.

    python -m tests.engines.vllm.checkpoints FOLDER NAME[:SEED] ...

Each goes to FOLDER/NAME or FOLDER/NAME-SEED. With another seed only the values differ: names, shapes, headers and sizes
are the same. Needs transformers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Name -> class of the config in transformers, and what differs from the base.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("Gemma3TextConfig", {"tie_word_embeddings": True, "sliding_window": 64, "query_pre_attn_scalar": 32}),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            "moe_intermediate_size": 128,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek-v2": ("DeepseekV2Config", {**_MLA, "topk_method": "greedy", "norm_topk_prob": False}),
    "deepseek-v3": ("DeepseekV3Config", {**_MLA, "q_lora_rank": 64, "topk_method": "noaux_tc", "norm_topk_prob": True}),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "intermediate_size": 128},
    ),
}
_LARGE: dict[str, Any] = {
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# For measurements: 0.95 and 6.6 GB.
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-1g": ("Qwen3Config", {**_LARGE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}),
    "qwen3-8g": ("Qwen3Config", {**_LARGE, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 18}),
}


def make(folder: Path, kind: str, seed: int = 0) -> Path:
    """Writes the checkpoint into `folder`, in bfloat16, and gives the folder."""
    import transformers

    name, changes = (KINDS | LARGE)[kind]
    device = "cuda" if kind in LARGE and torch.cuda.is_available() else "cpu"  # minutes on a CPU
    config = getattr(transformers, name)(**{**_BASE, **changes})
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for key, tensor in sorted(model.state_dict().items()):
            # Larger than a model has them: greedy tokens then differ from one set of weights to another.
            made = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device=device)
            if "norm" in key:
                made = 1 + 0.1 * made
            elif tensor.dim() > 1:
                made = made * (1.5 / tensor.shape[-1] ** 0.5)
            tensor.copy_(made)
    model.save_pretrained(folder, max_shard_size="2GB" if kind in LARGE else "1MB")
    return folder


def make_fp8(folder: Path, source: Path, block: tuple[int, int] | None = (128, 128)) -> Path:
    """The FP8 form of a checkpoint: e4m3 with a scale for each block, or for each matrix where `block` is None."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    made = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if not name.endswith("_proj.weight"):
                made[name] = tensor
                continue
            rows, columns = tensor.shape
            high, wide = block or (rows, columns)
            parts = tensor.float().reshape(rows // high, high, columns // wide, wide)
            scale = (parts.abs().amax(dim=(1, 3)) / 448).clamp(min=1e-12)
            low = (parts / scale[:, None, :, None]).clamp(-448, 448).reshape(rows, columns)
            made[name] = low.to(torch.float8_e4m3fn)
            suffix = "weight_scale_inv" if block else "weight_scale"
            made[name.removesuffix("weight") + suffix] = scale if block else scale.reshape(1)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [name.removesuffix(".weight") for name in made if name.endswith(".gate.weight")],
        **({"fmt": "e4m3", "weight_block_size": list(block)} if block else {}),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def main(arguments: list[str]) -> None:
    root = Path(arguments[0])
    for argument in arguments[1:]:
        name, _, seed = argument.partition(":")
        folder = root / (f"{name}-{seed}" if seed else name)
        if folder.exists():
            continue
        for end, block in (("-fp8-block", (128, 128)), ("-fp8-tensor", None)):
            if name.endswith(end):
                source = make(root / f"{folder.name}.bf16", name.removesuffix(end), int(seed or 0))
                make_fp8(folder, source, block)
                break
        else:
            make(folder, name, int(seed or 0))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(sys.argv[1:])
