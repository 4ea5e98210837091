"""Which quantised checkpoints can be published as transformers has processed them, and why the others cannot.

Fine-grained FP8: always; where no GPU has FP8, transformers itself loads the dequantised model. compressed-tensors:
where the config asks for ``dequantize`` or ``use_optimized_inference``, since transformers otherwise decompresses at
the first forward pass, into memory of the process's own. The rest is refused by name.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from ...client.target import Target
from ...errors import EngineError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FP8 = "fp8"
COMPRESSED = "compressed-tensors"
_REASONS = {
    "bitsandbytes": "its quantisation state is in Python objects beside the tensors, which no manifest carries",
    "gptq": "its kernels repack the weights after loading, at the first forward pass or before",
    "awq": "its kernels repack the weights after loading, at the first forward pass or before",
}
_OTHERWISE = f"not tried; {FP8} and {COMPRESSED} are supported"


def method_of(config: PretrainedConfig) -> str | None:
    """The quantisation's name, as in config.json ("fp8"); None for a checkpoint that is not quantised."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    if not isinstance(found, dict):
        method = getattr(found, "quant_method", None)
    elif found.get("load_in_8bit") or found.get("load_in_4bit"):
        method = "bitsandbytes"
    else:
        method = found.get("quant_method")
    return str(getattr(method, "value", method) or "unnamed")


def require_supported(config: PretrainedConfig) -> None:
    """`EngineError` for a quantisation that cannot go through the cache, with the reason and what would work."""
    method = method_of(config)
    if method is None or method == FP8:
        return
    if method != COMPRESSED:
        reason = next((why for name, why in _REASONS.items() if method.startswith(name)), _OTHERWISE)
        raise EngineError(
            problem=f"quantised with {method}, which the cache does not serve: {reason}; use from_pretrained"
        )
    asked = _settings(config.quantization_config)
    if not (asked.get("dequantize") or asked.get("use_optimized_inference") or asked.get("run_compressed") is False):
        raise EngineError(
            problem=f"quantised with {COMPRESSED}, which transformers decompresses at the first forward pass, into "
            "memory of this process: nothing would be shared; pass a config= whose quantization_config has "
            "dequantize=True (or use_optimized_inference=True, for FP8 on a GPU that has it), or use from_pretrained"
        )
    if not loads_compressed_dense():
        raise EngineError(
            problem=f"quantised with {COMPRESSED}, which this version of transformers changes after it has loaded: "
            "not supported; transformers 5.24 does so while it loads, and can be used, or use from_pretrained"
        )


def loads_compressed_dense() -> bool:
    """Whether transformers makes of compressed-tensors while loading what the model runs with; 5.17 does so later."""
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    return "_process_model_after_weight_loading" not in vars(CompressedTensorsHfQuantizer)


def quantizer_of(config: PretrainedConfig, target: Target) -> Any:
    """A fresh HfQuantizer of transformers for the device, None for a checkpoint that is not quantised.

    `EngineError` where transformers cannot load the checkpoint here: a package is missing, or FP8 is asked for in host
    memory beside a GPU, where transformers would not dequantise it.
    """
    if method_of(config) is None:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(config.quantization_config), pre_quantized=True)
        quantizer.validate_environment(device_map={"": target.torch_device}, weights_only=True)
    except (ImportError, RuntimeError, ValueError) as error:
        raise EngineError(problem=f"quantised with {method_of(config)}: {error}") from error
    dequantized = bool(getattr(quantizer.quantization_config, "dequantize", False))
    if target.ordinal is None and not dequantized:
        raise EngineError(
            problem=f"quantised with {method_of(config)}, whose kernels need a GPU, {target.name} is none; pass a "
            "config= whose quantization_config has dequantize=True"
        )
    return quantizer


def shaping(quantizer: Any, config: PretrainedConfig) -> dict[str, Any]:
    """What of the quantisation shapes the processed weights, for a digest."""
    from importlib.metadata import PackageNotFoundError, version

    packages: dict[str, str | None] = {}
    for package in ("compressed-tensors", "accelerate"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    resolved = quantizer.quantization_config
    # What `validate_environment` has decided for this device.
    decided = {"dequantize": bool(getattr(resolved, "dequantize", False))}
    decided["use_fp8_kernel"] = bool(getattr(quantizer, "use_fp8_kernel", False))
    asked = json.loads(json.dumps(_settings(config.quantization_config), default=str))
    return {"asked": asked, "decided": decided, "packages": packages}


def _settings(quantization_config: Any) -> dict[str, Any]:
    """As in config.json, with what its class leaves out of `to_dict`."""
    if isinstance(quantization_config, dict):
        return quantization_config
    return {**quantization_config.to_dict(), **vars(quantization_config)}
