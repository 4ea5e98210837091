"""What of vLLM's settings and quantisations the cache can serve: first by config, then by the methods really chosen."""

from __future__ import annotations

from typing import Any

from ...errors import EngineError
from ..policy import Options

WORKS = (
    "unquantised weights, dense and MoE; FP8 checkpoints, per tensor or in blocks, dense and MoE; FP8 KV cache scales; "
    "ModelOpt NVFP4 and MXFP8 and MXFP4 MoE on the kernels for which vLLM says so"
)
# Quantisations of which some methods take processed weights in some version; which, the methods say when they are made.
PERHAPS = frozenset({
    "fp8", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8",
})  # fmt: skip
# Methods whose flag is wider than what they do (vLLM 0.33.0): class -> where the kernel is, and those that work.
_KERNELS = {
    "Mxfp4MoEMethod": ("mxfp4_backend", frozenset({"FLASHINFER_TRTLLM_MXFP4_MXFP8", "NONE"})),
    "ModelOptNvFp4FusedMoE": ("nvfp4_backend", frozenset({"FLASHINFER_TRTLLM"})),
}

# Experts whose own processing is repeated by nobody in pre-processed mode, and need not be: FlashInfer's does nothing
# to unquantised weights (vLLM 0.30 to 0.33). For the CPU's see `_repeated`.
_EXPERTS = frozenset({"FusedMoEExperts", "FlashInferExperts"})


def refuse_settings(vllm_config: Any, load_config: Any, options: Options) -> None:
    """`EngineError` for settings under which vLLM writes, moves or frees weights that it must only read."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    reason = None
    if getattr(parallel, "enable_eplb", False):
        reason = "expert load balancing (--enable-eplb) moves experts while it runs; start without it"
    elif getattr(parallel, "enable_elastic_ep", False):
        reason = "elastic expert parallelism moves experts while it runs; start without --enable-elastic-ep"
    elif getattr(model, "enable_sleep_mode", False):
        reason = "sleep mode frees weights of vLLM's own allocator, and these are not; start without it"
    elif offloads(vllm_config):
        reason = "offloaded weights are in host memory; start without --cpu-offload-gb and --offload-group-size"
    elif getattr(vllm_config, "weight_transfer_config", None) is not None and options.mode != "copy":
        reason = 'weight transfer writes weights; use {"mode": "copy"} in --model-loader-extra-config'
    elif (device := getattr(load_config, "device", None)) and str(device) != str(vllm_config.device_config.device):
        reason = f"weights are loaded to {device} while the engine runs on {vllm_config.device_config.device}"
    if reason is not None:
        raise EngineError(problem=f"--load-format weightcached: {reason}, or with another --load-format")


def offloads(vllm_config: Any) -> bool:
    """Whether some weights are kept in host memory."""
    offload = getattr(vllm_config, "offload_config", None)
    uva, prefetch = getattr(offload, "uva", None), getattr(offload, "prefetch", None)
    return bool(
        getattr(uva, "cpu_offload_gb", 0)
        or getattr(prefetch, "offload_group_size", 0)
        or getattr(getattr(vllm_config, "cache_config", None), "cpu_offload_gb", 0)
    )


def quantization_problem(model_config: Any) -> EngineError | None:
    """Why weights of this quantisation are not cached, as far as the config tells before anything is read."""
    name = model_config.quantization
    if name is None:
        return None
    if name not in PERHAPS:
        return _unsupported(f"quantisation {name!r} is not supported")
    if name == "fp8" and _checkpoint_quantization(model_config) is None:
        return _unsupported("FP8 quantisation of a checkpoint that is not FP8 is done anew at each load")
    return None


def method_problem(model: Any) -> EngineError | None:
    """Why the weights of this model are not cached, by the methods and kernels that vLLM has chosen for its layers."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    found: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and (why := _method(method)) is not None:
            found.setdefault(why, name or "the model")
    if found:
        return _unsupported("; ".join(f"{why} (of {layer})" for why, layer in found.items()))
    if list(getattr(model, "secondary_weights", ())):
        return EngineError(problem=f"{type(model).__name__} reads weights of further checkpoints beside its own")
    return None


def _method(method: Any) -> str | None:
    kind = type(method).__name__
    if not method.supports_pre_processed_weights:
        return f"{kind} does not take processed weights"
    for base in type(method).__mro__:
        if base.__name__ in _KERNELS:
            attribute, works = _KERNELS[base.__name__]
            kernel = getattr(method, attribute, None)
            name = getattr(kernel, "name", str(kernel))
            if name not in works:
                return f"{kind} takes no processed weights on the kernel {name}"
        if base.__name__ == "UnquantizedFusedMoEMethod" and not _repeated(experts := _processing(method)):
            return f"{kind} does not repeat what {experts} makes of the weights"
    return None


def _repeated(experts: str) -> bool:
    """Whether pre-processed mode has all that experts of this class make of the weights."""
    if experts == "CPUUnquantizedExperts":  # on AMD's Zen it packs weights for zentorch and tells only itself (0.32.0)
        from vllm.platforms import current_platform

        return not getattr(current_platform, "is_zen_cpu", bool)()
    return experts in _EXPERTS


def _processing(method: Any) -> str:
    """The class from which the experts of an unquantised MoE layer have what they do after loading."""
    experts = getattr(method, "experts_cls", None)
    for base in getattr(experts, "__mro__", ()):
        if "process_weights_after_loading" in vars(base):
            return str(base.__name__)
    return "FusedMoEExperts"


def emptied_problem(model: Any, filled: set[str]) -> EngineError | None:
    """Why weights are not cached that processing has taken away: kernel objects keep them, where torch sees none.

    So do vLLM's CPU kernels. `filled` are the parameters that had elements when the model was constructed.
    """
    gone = [
        name for name, tensor in model.named_parameters(remove_duplicate=False) if name in filled and not tensor.numel()
    ]
    if not gone:
        return None
    return _unsupported(f"{len(gone)} parameters are kept by kernels in a form of their own, such as {gone[0]}")


def _unsupported(why: str) -> EngineError:
    return EngineError(problem=f"{why}; what works: {WORKS}")


def _checkpoint_quantization(model_config: Any) -> Any:
    configs = (model_config.hf_config, getattr(model_config, "hf_text_config", None))
    return next((found for config in configs if (found := getattr(config, "quantization_config", None))), None)
