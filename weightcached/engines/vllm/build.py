"""A model of vLLM's from cached weights: constructed without memory, filled, and finished by vLLM's own hooks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...client.modules import HeldTensor, held_tensors
from ...errors import EngineError
from . import gate, kernels, state

if TYPE_CHECKING:
    import torch

    from ...client.weights import Weights

# What constructors and hooks raise that meet tensors without memory, or a layer that is not what it was. A module of a
# version that is newer than those known may be elsewhere.
_BUILD_ERRORS = (
    RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, KeyError, AssertionError, IndexError,
    ImportError,
)  # fmt: skip


def build(weights: Weights, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
    """The model in evaluation mode on the engine's device, its tensors those of `weights`, which stay the caller's.

    `EngineError` if the weights do not fill it. vLLM's registries of layers are then as before, so that another load
    may follow.
    """
    with registries_kept(vllm_config):
        try:
            return _build(weights, vllm_config, model_config, prefix)
        except _BUILD_ERRORS as error:
            problem = f"{model_config.model} cannot be built from cached weights: {type(error).__name__}: {error}"
            raise EngineError(problem=problem) from error


def _build(weights: Weights, vllm_config: Any, model_config: Any, prefix: str) -> torch.nn.Module:
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.model_executor.utils import weights_already_processed
    from vllm.utils.torch_utils import set_default_torch_dtype

    device = torch.device(vllm_config.device_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"), experts_mapped_on(device):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        if (problem := gate.method_problem(model)) is not None:
            raise problem
        if other := state.other_shapes(model, weights):
            raise EngineError(problem=f"{other[0]} (and {len(other) - 1} more); start with the settings of the first")
        # Hooks rebuild some of what is left without memory; `_refuse_meta` looks after they have run.
        weights.install(model, consumed=("*",))
        with weights_already_processed(), cached_kept(weights):
            process_weights_after_loading(model, model_config, device)
    _restore_warmup(model)
    _restore_reload_device(model, device)
    if lacking := kernels.restore(model):
        raise EngineError(problem=f"kernels are not those of the publisher: {', '.join(lacking[:8])}")
    held = list(held_tensors(model))
    _refuse_meta(model, device, held)
    if lacking := state.not_held(model, held):
        shown = ", ".join(lacking[:8])
        raise EngineError(problem=f"objects of vLLM lack tensors that they had after the load from disk: {shown}")
    return model.eval()


@contextmanager
def registries_kept(vllm_config: Any) -> Iterator[None]:
    """Takes back, after an error, what a model's constructor has entered in vLLM's registries.

    These are the layers of the compilation config, and rotary embeddings, which later models of the process share.
    """
    config = vllm_config.compilation_config
    registries: list[Any] = [config.static_forward_context, getattr(config, "static_all_moe_layers", None)]
    rotary = sys.modules.get("vllm.model_executor.layers.rotary_embedding")
    registries.append(getattr(rotary, "_ROPE_DICT", None))
    before = [(registry, copy.copy(registry)) for registry in registries if registry is not None]
    try:
        yield
    except BaseException:
        for registry, entries in before:
            registry.clear()
            registry.update(entries) if isinstance(registry, dict) else registry.extend(entries)
        raise


@contextmanager
def experts_mapped_on(device: torch.device) -> Iterator[None]:
    """Inside, an `ExpertMapManager` has its tensors on the device, as after a load from disk.

    They are computed, not loaded, and its constructor reads their values, one by one, for a line of the log: without
    memory it fails up to 0.32, and on a GPU each would be waited for. So it runs on the CPU.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    original = ExpertMapManager.__init__

    def moved(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(moved, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    def made_on_device(manager: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            original(manager, *args, **kwargs)
        vars(manager).update({name: moved(value) for name, value in vars(manager).items()})

    ExpertMapManager.__init__ = made_on_device
    try:
        yield
    finally:
        ExpertMapManager.__init__ = original


@contextmanager
def cached_kept(weights: Weights) -> Iterator[None]:
    """Inside, `replace_parameter` leaves a parameter alone that is in cached memory.

    MLA layers compute their absorbed weights also in pre-processed mode, and copy them over those that came with the
    cache (vLLM#57320): equal values, but written into memory that others use, which is mapped read-only besides.
    """
    import torch
    import vllm.model_executor.utils as utils

    original = utils.replace_parameter
    shared = shared_storages(weights)

    def keep_cached(layer: torch.nn.Module, param_name: str, new_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        old = getattr(layer, param_name, None)
        if new_tensor is None or not isinstance(old, torch.Tensor) or old.is_meta:
            return original(layer, param_name, new_tensor, *args, **kwargs)
        if old.untyped_storage().data_ptr() in shared:
            return None
        return original(layer, param_name, new_tensor, *args, **kwargs)

    with patched(original, keep_cached):
        yield


@contextmanager
def patched(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, every module of vLLM that has imported `original` has `replacement` under that name."""
    name = original.__name__
    found, modules = holders(original, name), len(sys.modules)
    for names in found:
        names[name] = replacement
    try:
        yield
    finally:
        if len(sys.modules) != modules:  # those imported since may have got the replacement
            found = holders(replacement, name)
        for names in found:
            names[name] = original


def holders(function: Callable[..., Any], name: str) -> list[dict[str, Any]]:
    """The globals of those modules of vLLM that have this function under this name."""
    found = [module for path, module in list(sys.modules.items()) if path.startswith("vllm.")]
    return [vars(module) for module in found if getattr(module, "__dict__", {}).get(name) is function]


def shared_storages(weights: Weights) -> set[int]:
    """Addresses of the storages that are the cache's memory, one a slab."""
    found: dict[int, int] = {}
    for entry in weights.table.tensors:
        if entry.slab not in found and not entry.private and not entry.on_host and entry.nbytes:
            found[entry.slab] = weights[entry.name].untyped_storage().data_ptr()
    return set(found.values())


def _restore_warmup(model: torch.nn.Module) -> None:
    """Names the kernels whose shapes DeepGEMM compiles before the first request: real processing does (0.33.0)."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "fp8_linear", None)
        if hasattr(kernel, "get_deep_gemm_warmup_weights") and not getattr(module, "is_bmm", False):
            module.deep_gemm_warmup_provider = kernel


def _restore_reload_device(model: torch.nn.Module, device: torch.device) -> None:
    """A reload would make its tensors where the model was constructed, without memory; they belong on the device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        get_layerwise_info(module).restore_device = device


def _refuse_meta(model: torch.nn.Module, device: torch.device, tensors: list[HeldTensor]) -> None:
    """`EngineError` that names what has no memory yet, of the model's own and of `tensors`, which plain objects hold.

    Empty ones of these have nothing to lack: they move to the device.
    """
    import torch

    left = [name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.is_meta]
    left += [name for name, tensor in model.named_buffers(remove_duplicate=False) if tensor.is_meta]
    for held in tensors:
        if held.tensor.is_meta and not held.tensor.numel() and held.replace is not None:
            held.replace(torch.empty_like(held.tensor, device=device))
        elif held.tensor.is_meta:
            left.append(held.path)
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise EngineError(problem=f"{type(model).__name__} has tensors that are not in the cache: {shown}")
