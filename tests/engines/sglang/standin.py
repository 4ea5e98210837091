"""Small modules in SGLang's place, which cannot run here: the names, signatures and order of calls of SGLang 0.5.23.

`Engine.load` does what `ModelRunner.load_model` does. The hook registry patches modules and classes as SGLang's does,
and as SGLang's it logs what fails and goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import logging
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

VERSION = "0.5.23"
_log = logging.getLogger("sglang")


class HookType(enum.Enum):
    BEFORE = "before"
    AROUND = "around"


class HookSource(tuple):  # type: ignore[type-arg]
    def __new__(cls, plugin_name: str, dist_name: str | None) -> HookSource:
        return super().__new__(cls, (plugin_name, dist_name))


class HookRegistry:
    hooks: dict[str, list[tuple[Callable[..., Any], HookType]]]
    patched: set[str]

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any = None, *, source: Any = None) -> None:
        cls.hooks.setdefault(target, []).append((hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls.hooks.items():
            if target in cls.patched:  # later hooks on it are lost, without a word
                continue
            try:
                parent, _, name = target.rpartition(".")
                owner = pkgutil.resolve_name(parent)
                function = getattr(owner, name)
                for hook, kind in hooks:
                    function = cls._wrap(function, hook, kind)
                setattr(owner, name, function)
                cls.patched.add(target)
            except Exception:  # noqa: BLE001 - as SGLang does
                _log.exception("Failed to apply hooks to %s", target)

    @staticmethod
    def _wrap(original: Callable[..., Any], hook: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kind is HookType.AROUND:
                return hook(original, *args, **kwargs)
            hook(*args, **kwargs)
            return original(*args, **kwargs)

        return wrapper


class LoadFormat(enum.StrEnum):
    AUTO = "auto"
    DUMMY = "dummy"


@dataclasses.dataclass
class LoadConfig:
    load_format: Any = LoadFormat.AUTO
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)
    draft_model_idx: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model_loader_extra_config, str):
            self.model_loader_extra_config = json.loads(self.model_loader_extra_config)
        self._verify_load_format()

    def _verify_load_format(self) -> None:
        if isinstance(self.load_format, str):
            self.load_format = LoadFormat(self.load_format.lower())


class Bag:
    """A namespace of settings: leaves and further namespaces are its attributes."""

    def __init__(self, **leaves: Any) -> None:
        self._fields = dict(leaves)
        vars(self).update(leaves)


class WeightUpdater:
    """Of the model runner."""

    def _assert_weight_cache_inactive(self, op: str) -> None:
        if sys.modules["sglang.srt.runtime_context"].get_model().weight_cache_mode != "off":
            raise RuntimeError(op)

    def update_weights_from_disk(self, model_path: str, load_format: str) -> tuple[bool, str]:
        self._assert_weight_cache_inactive("update_weights_from_disk")
        return True, "done"

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None) -> tuple[bool, str]:
        self._assert_weight_cache_inactive("update_weights_from_tensor")
        return True, "done"

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        self._assert_weight_cache_inactive("update_weights_from_ipc")
        return True, "done"

    def begin_weight_update(self) -> None:
        self.began = True


class SchedulerWeightUpdaterManager:
    def _assert_weight_cache_inactive(self, op: str) -> None:
        if sys.modules["sglang.srt.runtime_context"].get_model().weight_cache_mode != "off":
            raise RuntimeError(op)

    def release_memory_occupation(self) -> str:
        self._assert_weight_cache_inactive("release_memory_occupation")
        return "released"


class GroupCoordinator:
    """The pipeline ranks as the first of them sees them: what it sends, where that was, and to whom is in `sent`."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.sent: list[tuple[tuple[int, ...], torch.dtype, str, int | None]] = []

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        self.sent.append((tuple(tensor.shape), tensor.dtype, tensor.device.type, dst))


class BaseModelLoader:
    preloaded_weights_bytes: int = 0

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class QuantMethod:
    """What SGLang hangs on a layer; it works on the layer after the load."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().flip(0), requires_grad=False)
        layer.scale_float = 0.25
        layer.input_scale = None


class Linear(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, size), requires_grad=False)
        self.input_scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.quant_method = QuantMethod()


class Attention(nn.Module):
    """As MLA: w_kc is made of kv_b_proj when the weights are loaded, and is a plain attribute."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.kv_b_proj = Linear(size)
        self.w_kc: torch.Tensor | None = None
        self.register_buffer("cos_sin_cache", torch.arange(size, dtype=torch.float32) / size, persistent=False)
        self.scratch = torch.zeros(size)


class Model(nn.Module):
    def __init__(self, config: Any, quant_config: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.size)
        self.attention = Attention(config.size)
        self.lm_head = nn.Linear(config.size, config.vocab, bias=False)
        self.lm_head.weight = self.embed.weight

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        self._cached_params_dict = parameters
        for name, value in weights:
            parameters[name].data.copy_(value)
        kept = self.attention.kv_b_proj.weight.detach()
        self.attention.w_kc = (kept * 2).transpose(0, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        attention = self.attention
        assert attention.kv_b_proj.input_scale is None
        attention.scratch.add_(1)  # an engine writes what is its own
        hidden = self.embed(ids) * attention.cos_sin_cache
        hidden = hidden @ attention.kv_b_proj.weight * attention.kv_b_proj.scale_float
        result: torch.Tensor = self.lm_head(hidden @ attention.w_kc)
        return result


class DefaultModelLoader(BaseModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        if load_config.model_loader_extra_config:
            raise ValueError(f"Unexpected extra config keys: {load_config.model_loader_extra_config}")

    def _prepare_weights(self, model_name_or_path: str, revision: Any, fall_back_to_pt: bool) -> Any:
        raise RuntimeError("Cannot find any model weights")

    def download_model(self, model_config: Any) -> None:
        pass

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        from safetensors.torch import load_file

        loader = sys.modules["sglang.srt.model_loader.loader"]
        loader.disk_loads += 1
        with set_default_torch_dtype(model_config.dtype), device_config.device:
            model: nn.Module = loader._initialize_model(model_config, self.load_config, None)
            files = sorted(Path(model_config.model_path).glob("*.safetensors"))
            weights = [item for file in files for item in load_file(file).items()]
            self.load_weights_and_postprocess(model, weights, device_config.device)
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: Any) -> None:
        model.load_weights(weights)
        for module in model.modules():
            if (method := getattr(module, "quant_method", None)) is not None:
                method.process_weights_after_loading(module)


@contextlib.contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclasses.dataclass
class HfConfig:
    architectures: list[str]
    vocab: int = 32
    size: int = 16
    quantization_config: Any = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass
class ModelConfig:
    model_path: str
    hf_config: HfConfig = dataclasses.field(default_factory=lambda: HfConfig(["TinyForCausalLM"]))
    revision: str | None = None
    dtype: torch.dtype = torch.float32
    quantization: str | None = None
    is_draft_model: bool = False
    is_fp4_experts: bool = False


class DeviceConfig:
    def __init__(self, device: str = "cpu", gpu_id: int = -1) -> None:
        self.device_type, self.gpu_id = device, gpu_id
        self.device = torch.device(device)


def settings() -> dict[str, Bag]:
    """What SGLang has published after reading its command line."""
    moe = Bag(enable_eplb=False, ep_num_redundant_experts=0, moe_runner_backend="auto", moe_a2a_backend="none")
    kernel = Bag(attention_backend="fa3", fp8_gemm_runner_backend="auto")
    return {
        "exec": Bag(moe=moe, kernel=kernel, graph=Bag(cuda_graph_bs_decode=[1, 2])),
        "model": Bag(weight_cache_mode="off", load_format="weightcached", kv_cache_dtype="auto"),
        "parallel": Bag(tp_size=1, nccl_port=12345, moe_dense_tp_size=None),
        "spec": Bag(speculative_algorithm=None),
        "mm": Bag(enable_multimodal=None),
        "disagg": Bag(language_only=False),
    }


def modules() -> dict[str, types.ModuleType]:
    """sglang and every module of it that the plug-in imports."""
    bags = settings()
    names = ("size", "rank")
    groups = ("tp", "pp", "moe_ep", "attn_dp", "attn_tp", "attn_cp", "moe_dp", "moe_tp")
    ranks = types.SimpleNamespace(**{f"{group}_{what}": int(what == "size") for group in groups for what in names})
    choices = ["auto", "dummy"]

    def get_model_loader(load_config: Any, model_config: Any = None) -> Any:
        if isinstance(load_config.load_format, type):
            return load_config.load_format(load_config)
        return loader.DefaultModelLoader(load_config)

    def _initialize_model(model_config: Any, load_config: Any, quant_config: Any = None) -> Any:
        return loader.model_class(config=model_config.hf_config, quant_config=quant_config)

    loader = types.SimpleNamespace(
        BaseModelLoader=BaseModelLoader,
        DefaultModelLoader=DefaultModelLoader,
        get_model_loader=get_model_loader,
        _initialize_model=_initialize_model,
        _get_quantization_config=lambda model_config, load_config: None,
        model_class=Model,
        disk_loads=0,
    )
    contents: dict[str, Any] = {
        "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType, "HookSource": HookSource},
        "server_args": {"add_load_format_choices": choices.extend, "LOAD_FORMAT_CHOICES": choices},
        "configs.load_config": {"LoadConfig": _fresh(LoadConfig), "LoadFormat": LoadFormat},
        "model_loader.utils": {"set_default_torch_dtype": set_default_torch_dtype},
        "model_executor.model_runner_components.weight_updater": {"WeightUpdater": _fresh(WeightUpdater)},
        "managers.scheduler_components.weight_updater": {
            "SchedulerWeightUpdaterManager": _fresh(SchedulerWeightUpdaterManager)
        },
        "distributed.parallel_state": {"GroupCoordinator": _fresh(GroupCoordinator)},
        "layers.rotary_embedding.factory": {"_ROPE_DICT": {}},
        "layers.deep_gemm_wrapper.configurer": {"ENABLE_JIT_DEEPGEMM": False, "DEEPGEMM_SCALE_UE8M0": False},
        "runtime_context": {
            "get_parallel": lambda: ranks,
            "get_context": lambda: types.SimpleNamespace(config_bag=bags.__getitem__),
            "get_model": lambda: bags["model"],
        },
    }
    made: dict[str, types.ModuleType] = {"sglang": types.ModuleType("sglang"), "sglang.srt": types.ModuleType("srt")}
    for name in contents:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(["sglang.srt", *parts[:end]])
            made.setdefault(full, types.ModuleType(full))
        vars(made[f"sglang.srt.{name}"]).update(contents[name])
    loader_module = types.ModuleType("sglang.srt.model_loader.loader")
    vars(loader_module).update(vars(loader))
    loader = loader_module  # type: ignore[assignment]  # what the functions above look up
    made["sglang.srt.model_loader.loader"] = loader_module
    for name, module in made.items():
        module.__path__ = []
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
    return made


def _fresh(cls: type) -> type:
    """A subclass that hooks may patch for one test."""
    return type(cls.__name__, (cls,), {name: value for name, value in vars(cls).items() if callable(value)})


class Engine:
    """A process of SGLang's, in this one: plug-ins first, then the load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modules = modules()
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        HookRegistry.hooks, HookRegistry.patched = {}, set()
        self.loader = self.modules["sglang.srt.model_loader.loader"]
        self.model_config = ModelConfig("")
        self.last_loader: Any = None

    def load_plugins(self, register: Callable[[], None]) -> None:
        register()
        HookRegistry.apply_hooks()

    def load(self, model_path: Path, **options: Any) -> Any:
        config = self.modules["sglang.srt.configs.load_config"].LoadConfig(
            load_format="weightcached", model_loader_extra_config=json.dumps(options)
        )
        model_config = dataclasses.replace(self.model_config, model_path=str(model_path))
        self.last_loader = self.loader.get_model_loader(load_config=config, model_config=model_config)
        return self.last_loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu"))

    @property
    def disk_loads(self) -> int:
        return int(self.loader.disk_loads)

    def set(self, group: str, **leaves: Any) -> None:
        """Changes settings, as the command line would have."""
        bag = self.modules["sglang.srt.runtime_context"].get_context().config_bag(group.partition(".")[0])
        for part in group.split(".")[1:]:
            bag = getattr(bag, part)
        vars(bag).update(leaves)
