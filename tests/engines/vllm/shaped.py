"""Stand-ins for the modules of vLLM 0.33.0 that the loader touches: names, signatures and order of calls are vLLM's.

`install` puts them into sys.modules. The model is of the forms that matter here: tied embeddings, absorbed weights that
are views (MLA), a router that is a plain object and captured a parameter, buffers that are written, a norm without
weight, a quantised layer whose hook sets plain attributes and deletes what it has consumed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engines.vllm.configs import Config, Groups, LoadConfig, ModelConfig, vllm_config

__all__ = ["Config", "Groups", "LoadConfig", "ModelConfig", "vllm_config"]
VERSION = "0.33.0"
LAYERS = "vllm.model_executor.layers"
HIDDEN, VOCAB, HEADS, RANK = 32, 48, 2, 8


class QuantizeMethodBase:
    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing by default."""


class Backend(Enum):
    GOOD = 1
    BAD = 2


class LinearMethod(QuantizeMethodBase):
    """Transposes its weight, pads it, and drops the scale that it has consumed."""

    supports_pre_processed_weights = True

    def process_weights_after_loading(self, layer: Any) -> None:
        if utils().is_weights_pre_processed():
            if not hasattr(layer, "input_scale"):
                layer.input_scale = None
            return
        utils().replace_parameter(layer, "weight", (layer.weight * layer.raw_scale).t())
        del layer.raw_scale
        layer.weights_padding_cols = 3
        layer._already_called_process_weights_after_loading = True
        layer.input_scale = None
        layer.g1_scale_c = torch.nn.Parameter(layer.weight.sum(dim=0), requires_grad=False)


class UnknownMethod(LinearMethod):
    supports_pre_processed_weights = False


class LoadedParameter(torch.nn.Parameter):
    """A parameter class of vLLM's, with a loader of its own."""

    def weight_loader(self, loaded: torch.Tensor) -> None:
        self.data.copy_(loaded)


class Router:
    """A plain object that captures a parameter when it is made, as GroupedTopKRouter does."""

    def __init__(self, bias: torch.Tensor, table: torch.Tensor) -> None:
        self.bias = bias
        self.tables = (table,)


class ExpertMapManager:
    """Which experts are of this rank; its constructor tells of them, and so reads what it has made."""

    def __init__(self, experts: int) -> None:
        self.expert_map = torch.full((experts,), -1, dtype=torch.int32)
        self.expert_map[: experts // 2] = torch.arange(experts // 2, dtype=torch.int32)
        self.told = torch.where(self.expert_map != -1)[0].tolist()


class Linear(torch.nn.Module):
    method: type[QuantizeMethodBase] = LinearMethod

    def __init__(self) -> None:
        super().__init__()
        self.weight = LoadedParameter(torch.empty(HIDDEN, HIDDEN), requires_grad=False)
        self.weight.output_dim = 0
        self.raw_scale = torch.nn.Parameter(torch.empty(1), requires_grad=False)
        self.quant_method = self.method()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weight + self.weights_padding_cols
        return out if self.input_scale is None else out * self.input_scale


class Norm(torch.nn.Module):
    """A norm without weight: a plain tensor of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.full((HIDDEN,), 2.0)


class Attention(torch.nn.Module):
    """Absorbs kv_b into views of it (MLA), also when it was absorbed before; fills its scales."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.kv_b = torch.nn.Parameter(torch.empty(HEADS * 8, RANK), requires_grad=False)
        self.register_buffer("_k_scale", torch.tensor(3.0))
        self.register_buffer("cos_sin_cache", torch.arange(512 * 1024, dtype=torch.float32), persistent=False)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        self._k_scale_float = 3.0
        self._k_scale_cpu = torch.tensor(3.0)
        self.kv_cache = torch.tensor([])
        context = config.compilation_config.static_forward_context
        if "attn" in context:
            raise ValueError("Duplicate layer name: attn")
        context["attn"] = self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        absorbed = self.kv_b.T.view(RANK, HEADS, 8).transpose(0, 1)
        utils().replace_parameter(self, "W_UV", absorbed)
        self._k_scale.fill_(1.0)
        self._k_scale_float = 1.0
        self._k_scale_cpu = torch.tensor(1.0)


class TinyForCausalLM(torch.nn.Module):
    """`extra` may add to the model when it is constructed."""

    tied = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.embed.weight.requires_grad_(False)
        self.lm_head = torch.nn.Embedding(VOCAB, HIDDEN)
        self.lm_head.weight = self.embed.weight
        self.linear, self.norm, self.attn = Linear(), Norm(), Attention(config)
        self.gate_bias = torch.nn.Parameter(torch.empty(4), requires_grad=False)
        self.register_buffer(
            "expert_table", torch.arange(4) * (3 if not self.gate_bias.is_meta else 1), persistent=False
        )
        self.router = Router(self.gate_bias, self.expert_table)
        manager = sys.modules[f"{LAYERS}.fused_moe.expert_map_manager"]
        self.experts = manager.ExpertMapManager(4)  # type: ignore[attr-defined]
        self.register_buffer("_expert_map", self.experts.expert_map, persistent=False)
        self.has_own_lm_head = False
        extra(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            getattr(own[name], "weight_loader", own[name].data.copy_)(tensor)
            loaded.add(name)
        self.has_own_lm_head = True
        return loaded

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.norm.weight + self.router.bias.sum() + self.router.tables[0].sum()
        x = self.linear(x) + self.attn.W_UV.sum() + self.attn._k_scale * self.attn.cos_sin_cache[7]
        self.attn.seen += 1  # written while the engine runs
        return x @ self.lm_head.weight.T


def extra(model: torch.nn.Module) -> None:
    """Replaced by tests."""


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Random weights; those of two seeds have equal headers."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (VOCAB, HIDDEN),
        "linear.weight": (HIDDEN, HIDDEN),
        "linear.raw_scale": (1,),
        "attn.kv_b": (HEADS * 8, RANK),
        "gate_bias": (4,),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    return folder


def utils() -> Any:
    return sys.modules["vllm.model_executor.utils"]


def _utils(module: Any) -> None:
    processed: ContextVar[bool] = ContextVar("weights_pre_processed", default=False)

    @contextmanager
    def weights_already_processed() -> Iterator[None]:
        token = processed.set(True)
        try:
            yield
        finally:
            processed.reset(token)

    def replace_parameter(layer: torch.nn.Module, param_name: str, new_tensor: torch.Tensor | None) -> None:
        """In place where shape, stride and dtype are equal, else `.data`; registered if there is none."""
        old = getattr(layer, param_name, None)
        if new_tensor is not None and isinstance(old, torch.nn.Parameter):
            same = old.shape == new_tensor.shape and old.stride() == new_tensor.stride()
            if same and not old.is_meta:
                old.data.copy_(new_tensor)
                writes.append(param_name)
                return
            old.data = new_tensor.data
            return
        setattr(layer, param_name, torch.nn.Parameter(new_tensor, requires_grad=False))

    writes: list[str] = []
    module.writes = writes
    module.weights_already_processed = weights_already_processed
    module.is_weights_pre_processed = processed.get
    replace_parameter.__module__ = module.__name__
    module.replace_parameter = replace_parameter


class BaseModelLoader:
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        return 0

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        return initialize_model(vllm_config, model_config=model_config, prefix=prefix)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        with _default_dtype(model_config.dtype):
            with torch.device(vllm_config.device_config.device):
                model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            self.load_weights(model, model_config)
            process_weights_after_loading(model, model_config, vllm_config.device_config.device)
        return model.eval()


class DefaultModelLoader(BaseModelLoader):
    loads = 0

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        if load_config.load_format != "auto" or load_config.model_loader_extra_config:
            raise ValueError(f"Unknown load_format: {load_config}")

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from load_file(Path(model_config.model) / "model.safetensors").items()

    def load_weights(self, model: Any, model_config: Any) -> None:
        DefaultModelLoader.loads += 1
        model.load_weights(self.get_all_weights(model_config, model))


def initialize_model(
    vllm_config: Any, *, prefix: str = "", model_class: Any = None, model_config: Any = None
) -> torch.nn.Module:
    model = (model_class or TinyForCausalLM)(vllm_config)
    for layer in model.modules():
        get_layerwise_info(layer).restore_device = torch.get_default_device()
    return model


def process_weights_after_loading(model: torch.nn.Module, model_config: Any, target_device: torch.device) -> None:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            if utils().is_weights_pre_processed() and not method.supports_pre_processed_weights:
                raise RuntimeError(f"layer {name}: does not support pre-processed weights")
            method.process_weights_after_loading(module)
    for module in model.modules():
        if isinstance(module, Attention):
            module.process_weights_after_loading(model_config.dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_infos: dict[torch.nn.Module, Any] = {}


def get_layerwise_info(layer: torch.nn.Module) -> Any:
    return _infos.setdefault(layer, SimpleNamespace(restore_device=None))


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> dict[str, Any]:
    """The modules by name."""
    loader = "vllm.model_executor.model_loader"
    names = [
        "vllm", "vllm.version", "vllm.envs", "vllm.config", "vllm.distributed", "vllm.utils", "vllm.utils.torch_utils",
        "vllm.model_executor", "vllm.model_executor.utils", LAYERS, f"{LAYERS}.fused_moe",
        f"{LAYERS}.fused_moe.expert_map_manager", f"{LAYERS}.quantization", f"{LAYERS}.quantization.base_config",
        "vllm.model_executor.models", "vllm.model_executor.models.interfaces", loader, f"{loader}.base_loader",
        f"{loader}.default_loader", f"{loader}.utils", f"{loader}.reload", f"{loader}.reload.layerwise",
        f"{loader}.reload.inplace", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.utils",
    ]  # fmt: skip
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
    made["vllm.version"].__version__ = version
    made["vllm.envs"].environment_variables = {"VLLM_USE_DEEP_GEMM": lambda: True, "VLLM_PORT": lambda: 1}
    made["vllm.config"].current = None
    made["vllm.config"].get_current_vllm_config = lambda: made["vllm.config"].current
    made["vllm.config"].get_current_vllm_config_or_none = lambda: made["vllm.config"].current
    groups = made["vllm.distributed"]
    groups.get_tensor_model_parallel_world_size = lambda: Groups.tensor[0]
    groups.get_tensor_model_parallel_rank = lambda: Groups.tensor[1]
    groups.get_pp_group, groups.get_dp_group = lambda: Groups.pipeline, lambda: Groups.data
    made["vllm.utils.torch_utils"].set_default_torch_dtype = _default_dtype
    _utils(made["vllm.model_executor.utils"])
    made[f"{LAYERS}.fused_moe.expert_map_manager"].ExpertMapManager = ExpertMapManager
    made[f"{LAYERS}.quantization.base_config"].QuantizeMethodBase = QuantizeMethodBase
    flags = {"has_own_lm_head": bool, "has_own_embed_tokens": bool}
    made["vllm.model_executor.models.interfaces"].SupportsEagleBase = type("E", (), {"__annotations__": flags})
    made[f"{loader}.base_loader"].BaseModelLoader = BaseModelLoader
    made[f"{loader}.default_loader"].DefaultModelLoader = DefaultModelLoader
    made[f"{loader}.utils"].initialize_model = initialize_model
    made[f"{loader}.utils"].process_weights_after_loading = process_weights_after_loading
    made[f"{loader}.reload.layerwise"].get_layerwise_info = get_layerwise_info
    _registry(made[loader])
    _reload(made, loader)
    _memory(made["vllm.v1.worker.utils"])
    return made


def _registry(module: Any) -> None:
    known: dict[str, Any] = {"auto": DefaultModelLoader}

    def register_model_loader(load_format: str) -> Any:
        def wrap(cls: Any) -> Any:
            assert issubclass(cls, BaseModelLoader)
            assert load_format not in known
            known[load_format] = cls
            return cls

        return wrap

    module._LOAD_FORMAT_TO_MODEL_LOADER = known
    module.register_model_loader = register_model_loader
    module.get_model_loader = lambda config: known[config.load_format](config)


def _reload(made: dict[str, Any], loader: str) -> None:
    def initialize_layerwise_reload(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.zero_()  # what a reload does at last: it writes in place

    def get_parameter_for_reload(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
        return model.get_parameter(name)

    for function in (initialize_layerwise_reload, get_parameter_for_reload):
        function.__module__ = "vllm.reload"
    made[f"{loader}.reload.layerwise"].initialize_layerwise_reload = initialize_layerwise_reload
    made[f"{loader}.reload.inplace"].initialize_layerwise_reload = initialize_layerwise_reload
    made[f"{loader}.reload.inplace"].get_parameter_for_reload = get_parameter_for_reload


def _memory(module: Any) -> None:
    def request_memory(init_snapshot: Any, cache_config: Any) -> int:
        wanted = int(init_snapshot.total_memory * cache_config.gpu_memory_utilization)
        if init_snapshot.free_memory < wanted:
            raise ValueError("Free memory on startup is less than desired GPU memory utilization.")
        return wanted

    request_memory.__module__ = module.__name__
    module.request_memory = request_memory


for _class in (Router, ExpertMapManager, Linear, Norm, Attention, TinyForCausalLM):
    _class.__module__ = "vllm.models.tiny"  # where the loader looks into plain objects
