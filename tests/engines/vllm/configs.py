"""Stand-ins for vLLM's configs: the fields that the plug-in reads, under vLLM 0.33.0's names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Groups:
    """Ranks and sizes of this process."""

    tensor = (1, 0)
    pipeline = SimpleNamespace(world_size=1, rank_in_group=0)
    data = SimpleNamespace(world_size=1, rank_in_group=0)


class Config:
    """A Hugging Face config."""

    def __init__(self, **fields: Any) -> None:
        self.architectures = ["TinyForCausalLM"]
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "auto"
    download_dir: str | None = None
    device: str | None = None
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)


class ModelConfig:
    def __init__(self, folder: Path, **fields: Any) -> None:
        self.model, self.revision, self.dtype = str(folder), None, torch.float32
        self.quantization: str | None = None
        self.hf_config = self.hf_text_config = Config()
        self.max_model_len, self.enable_sleep_mode = 64, False
        self.__dict__.update(fields)


def vllm_config(model_config: ModelConfig, **fields: Any) -> Any:
    """A VllmConfig; `fields` go to the config that has them."""
    parallel = {"enable_eplb": False, "enable_expert_parallel": False, "expert_placement_strategy": "linear"}
    cache = {"cache_dtype": "auto", "kv_cache_dtype_skip_layers": [], "gpu_memory_utilization": 0.9}
    kernel = {"moe_backend": "auto", "linear_backend": "auto", "linear_backend_per_quant": None}
    parts = [parallel, cache, kernel]
    for part in parts:
        part.update({name: fields.pop(name) for name in list(fields) if name in part})
    made = {
        "model_config": model_config,
        "parallel_config": SimpleNamespace(**parallel),
        "cache_config": SimpleNamespace(**cache),
        "kernel_config": SimpleNamespace(**kernel),
        "offload_config": None,
        "lora_config": None,
        "speculative_config": None,
        "weight_transfer_config": None,
        "device_config": SimpleNamespace(device=torch.device("cpu")),
        "compilation_config": SimpleNamespace(static_forward_context={}, static_all_moe_layers=[]),
    }
    return SimpleNamespace(**{**made, **fields})
