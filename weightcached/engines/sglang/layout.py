"""How SGLang's processed weights come to look as they do: the fields of the key, and what is refused.

The layout tag is "sglang-<version>/<digest>". The digest is of everything that may shape the weights between the
checkpoint and the first forward pass. It is taken before the load, which changes the quantisation config. What is in it
needlessly costs a miss; what is missing would give wrong weights. So all settings of back-ends are in it, and all of
SGLang's environment switches but those that name ports, folders and the like.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from typing import Any

from ..keys import digest_of, plain, without
from .api import NAMESPACES, PARALLEL

# Packages whose kernels SGLang picks and whose layouts it repacks for, by their names on an index.
_KERNELS = ("sglang-kernel", "sgl-kernel", "sgl-deep-gemm", "deep-gemm", "flashinfer-python", "triton", "sgl-flash-mla",
            "quack-kernels", "nvidia-cutlass-dsl")  # fmt: skip
_SWITCH = re.compile(r"(SGLANG|SGL)_[A-Z0-9_]+")
# Of one start or one process, or where to write and whom to call.
_NO_SWITCH = re.compile(
    r".*_(PORT|PORTS|HOST|IP|DIR|PATH|FILE|URL|TEMPLATE|TIMEOUT|LEVEL|LOG|LOGGING|INTERVAL|PID)"
    r"|SGLANG_(RUN_ID|DP_RANK|PLUGINS|LOG_.*|WEIGHT_CACHE_.*|CACHE_.*|PROFILE.*|TEST_.*)"
)
# Settings of a process group, of capturing and of reporting: they do not reach the weights.
_NO_SETTING = re.compile(
    r"parallel\.(nccl_port|dist_.*|gated_launch_port|nnodes|node_rank|dp_size|load_balance_method|pp_max_micro.*"
    r"|pp_async.*)|exec\.graph\..*|exec\.features\.(watermark.*|enable_watermark|return_.*|enable_return_.*)"
    r"|exec\.moe\.(expert_distribution_recorder.*|expert_balancedness.*)|exec\.offload\.offload_mode"
)
_MODEL_SETTINGS = ("is_embedding", "model_impl", "quantization", "quantize_and_serve", "modelopt_quant",
                   "kv_cache_dtype", "qsa_indexer_dtype")  # fmt: skip
# Setting -> values with which nothing is cached, and why. A setting that a version lacks is off.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("enable_eplb", (False,), "experts that move while the engine runs would move in shared memory"),
    ("ep_num_redundant_experts", (0,), "redundant experts are placed anew at each start"),
    ("init_expert_location", ("trivial",), "the placement of experts is read from a file that is not compared"),
    ("elastic_ep_backend", (None,), "elastic expert parallelism changes weights while the engine runs"),
    ("enable_elastic_expert_backup", (False,), "the expert backup reads the checkpoint by its own loader"),
    ("cpu_offload_gb", (0,), "offloaded weights move between host and device"),
    ("offload_group_size", (-1, 0), "offloaded layers move between host and device"),
    ("ple_offload_embedding", (False,), "offloaded embeddings are on no device"),
    ("enable_paged_experts", (False,), "paged experts move between host and device"),
    ("kt_weight_path", (None,), "part of the experts is not in the checkpoint"),
    ("startup_weight_load_mode", ("serial", None), "overlapped loading captures graphs before the weights are there"),
    ("weight_cache_mode", ("off",), "SGLang's own weight cache is on; one of the two is enough"),
    ("rl_quant_profile", (None,), "reinforcement learning changes weights while the engine runs"),
    ("rl_on_policy_target", (None,), "reinforcement learning changes weights, and its rotary tables need memory"),
    ("modelopt_quant", (None, ""), "ModelOpt quantises while it loads"),
    ("delete_ckpt_after_loading", (False,), "a checkpoint that is deleted cannot be compared with the cache"),
    ("remote_instance_weight_loader_start_seed_via_transfer_engine", (False,),
     "the transfer engine registers the weights' memory as its own"),
)  # fmt: skip
SUPPORTED = "unquantised weights; FP8 in blocks (weight_block_size), unless DeepGEMM repacks its scales to UE8M0"


def settings() -> dict[str, Any]:
    """Every published setting by its dotted name, such as "exec.moe.moe_runner_backend"; each as JSON takes it."""
    from sglang.srt import runtime_context

    found: dict[str, Any] = {}
    for name in NAMESPACES:
        _flatten(name, runtime_context.get_context().config_bag(name), found)
    return found


def parallel() -> dict[str, int]:
    """Ranks and sizes of this process, by SGLang's names."""
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel()
    return {name: int(getattr(ranks, name)) for name in PARALLEL}


_PLACE = frozenset({"_name_or_path"})  # by which transformers says where the checkpoint lies
# Fields of the key say these, or, with the sizes, they follow from them: so all ranks of a model have one layout, as
# they must to be one group to the service.
_RANKS_OF_THE_KEY = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "attn_dp_rank", "attn_tp_rank", "moe_tp_rank"})


def key(model_config: Any, versions: Mapping[str, str], capability: str | None, role: str) -> dict[str, Any]:
    """Fields of `ShardKey` for a model as this process would load it, "content" left to the checkpoint.

    `versions` are those of `versions()`, `capability` is the compute capability ("9.0"), None on the host.
    """
    now, ranks = settings(), parallel()
    shaping = {name: value for name, value in now.items() if _shapes(name)}
    architecture = next(iter(model_config.hf_config.architectures or []), None)
    quantization = quantization_config(model_config)
    facts = {
        "versions": dict(versions),
        "capability": capability,
        "config": without(plain(_as_dict(model_config.hf_config)), _PLACE),
        "dtype": str(model_config.dtype),
        "quantization": model_config.quantization,
        "quantization_config": quantization,
        "parallel": {name: number for name, number in ranks.items() if name not in _RANKS_OF_THE_KEY},
        "settings": shaping,
        "switches": {name: value for name, value in sorted(os.environ.items()) if _is_switch(name)},
        "role": role,
    }
    backends = ("attention_backend", "moe_runner_backend", "moe_a2a_backend", "fp8_gemm_runner_backend")
    return {
        "layout": f"sglang-{versions['sglang']}/{digest_of(facts)}",
        "architecture": architecture,
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "quantization": model_config.quantization,
        "quantization_digest": None if quantization is None else digest_of(quantization),
        "tensor_parallel_size": ranks["tp_size"],
        "tensor_parallel_rank": ranks["tp_rank"],
        "pipeline_parallel_size": ranks["pp_size"],
        "pipeline_parallel_rank": ranks["pp_rank"],
        "expert_parallel_size": ranks["moe_ep_size"],
        "expert_parallel_rank": ranks["moe_ep_rank"],
        "data_parallel_size": ranks["attn_dp_size"],
        "data_parallel_rank": ranks["attn_dp_rank"],
        "role": role,
        "compute_capability": capability,
        "backends": ",".join(f"{name}={by_leaf(now, name)}" for name in backends),
    }


def versions() -> dict[str, str]:
    """Of SGLang, torch and every kernel package that is installed."""
    import torch

    found = {"sglang": importlib.metadata.version("sglang"), "torch": str(torch.__version__)}
    for name in _KERNELS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def quantization_config(model_config: Any) -> Any:
    """As the checkpoint's config.json has it, None for an unquantised one."""
    return getattr(model_config.hf_config, "quantization_config", None)


def refusal(model_config: Any, device_type: str) -> str | None:
    """Why the weights of this model, set up like this, cannot be cached, in one sentence; None if they can be."""
    import torch

    if device_type not in ("cuda", "cpu") or torch.version.hip is not None:
        where = device_type if torch.version.hip is None else "ROCm"
        return f"weights on {where} are not shared; those on NVIDIA GPUs and in host memory are"
    now = settings()
    for name, off, why in _REFUSED:
        value = by_leaf(now, name)
        if value is not _ABSENT and value not in off:
            return f"{name} is {value!r}: {why}"
    if (problem := _quantization(model_config)) is not None:
        return f"{problem}; what works: {SUPPORTED}"
    return None


def _quantization(model_config: Any) -> str | None:
    """Why weights of this quantisation cannot be cached; None if they can be."""
    method = model_config.quantization
    if getattr(model_config, "is_fp4_experts", False):
        return "experts in MXFP4 are repacked in a form that is not carried"
    if method is None:
        return None
    if method != "fp8":
        return f"quantisation {method!r} is not supported"
    config = _as_dict(quantization_config(model_config) or {})
    if not config.get("weight_block_size"):
        return "FP8 without weight_block_size (per tensor, or quantised while loading) is not supported"
    from sglang.srt.layers.deep_gemm_wrapper import configurer

    if configurer.ENABLE_JIT_DEEPGEMM and configurer.DEEPGEMM_SCALE_UE8M0:
        return "DeepGEMM repacks the scales of FP8 to UE8M0 on this GPU (SGLANG_ENABLE_JIT_DEEPGEMM=0 turns it off)"
    return None


class _Absent:  # not None, which is a value of settings
    def __str__(self) -> str:
        return "absent"


_ABSENT: Any = _Absent()


def by_leaf(found: Mapping[str, Any], leaf: str) -> Any:
    """A setting wherever a version has it; an object that equals nothing where it has none."""
    return next((value for name, value in found.items() if name.rpartition(".")[2] == leaf), _ABSENT)


def _shapes(name: str) -> bool:
    """Whether a setting, by its dotted name, may shape the weights.

    Of `parallel` and `exec` all do that are not known not to. Of the other groups only those that are named here: most
    of them are paths, ports and what is told to clients.
    """
    group, _, leaf = name.partition(".")
    if group == "model":
        return leaf in _MODEL_SETTINGS
    if group == "spec":
        return leaf == "speculative_algorithm"
    if group == "mm":
        return leaf in ("enable_multimodal", "mm_enable_dp_encoder")
    if group == "disagg":
        return leaf in ("encoder_only", "language_only", "language_model_only")
    return _NO_SETTING.fullmatch(name) is None


def _is_switch(name: str) -> bool:
    """Whether an environment variable is one of SGLang's that may shape the weights."""
    return _SWITCH.fullmatch(name) is not None and _NO_SWITCH.fullmatch(name) is None


def _flatten(path: str, bag: Any, found: dict[str, Any]) -> None:
    """A namespace of settings holds leaves and further namespaces as its attributes."""
    for name, value in vars(bag).items():
        if name.startswith("_"):
            continue
        if type(value) is type(bag):
            _flatten(f"{path}.{name}", value, found)
        else:
            found[f"{path}.{name}"] = plain(value)


def _as_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return dict(vars(value)) if hasattr(value, "__dict__") else value
