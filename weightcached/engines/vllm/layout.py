"""Which cached weights a rank of vLLM can use: the key, with all that shapes processed weights in its layout."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..keys import bytes_on_disk, compute_capability, digest_of, plain, published_name, without
from ..policy import Options, Wanted
from .versions import vllm_version

# Of `vllm.envs`: switches that choose kernels, and so the form in which weights are kept.
_SHAPING = re.compile(
    "DEEP_GEMM|FLASHINFER_MOE|FLASHINFER_FP|BLOCKSCALE|MARLIN|HUMMING|AITER|FP8|FP4|INT4|INT8|MXFP|QUANT|CUTLASS|"
    "KERNEL|BATCH_INVARIANT|PADDING|MOE|MLA|ROPE|GEMM|REPLICATE|SHARD|SHARED_EXPERT|LAYER_PARTITION|HW_AGNOSTIC|OINK|"
    "TRITON_AWQ|CONTIG_WEIGHT|HPC_OPS|TARGET_DEVICE"
)
_NOT_SHAPING = re.compile("WARMUP|QUICK_REDUCE|THRESHOLD|STREAM|SIMULATION")
_MODEL = (
    "dtype", "quantization", "quantization_config", "max_model_len", "convert_type", "runner_type", "model_impl",
    "override_attention_dtype", "disable_sliding_window", "model_class_overrides",
)  # fmt: skip
_MULTIMODAL = (
    "language_model_only", "limit_per_prompt", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
)  # fmt: skip
_PARALLEL = (
    "prefill_context_parallel_size", "decode_context_parallel_size", "dcp_q_replicate", "enable_hc_sp",
    "all2all_backend",
)  # fmt: skip
_CACHE = ("cache_dtype", "kv_cache_dtype_skip_layers", "calculate_kv_scales")
_KERNEL = ("moe_backend", "linear_backend", "linear_backend_per_quant", "monokernel")
_ATTENTION = (
    "backend", "backend_per_kind", "flash_attn_version", "use_trtllm_attention", "mla_prefill_backend",
    "indexer_kv_dtype", "use_prefill_query_quantization", "disable_flashinfer_q_quantization",
)  # fmt: skip
_DRAFT = (
    "method", "quantization", "moe_backend", "attention_backend", "draft_tensor_parallel_size",
    "draft_lm_head_quantization",
)  # fmt: skip
# Where a checkpoint lies and who wrote its config says nothing of its weights.
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "name_or_path"})


class Ranks(NamedTuple):
    """Sizes and ranks of the groups that cut weights."""

    tensor: tuple[int, int] = (1, 0)  # size, rank
    pipeline: tuple[int, int] = (1, 0)
    data: tuple[int, int] = (1, 0)
    expert: tuple[int, int] = (1, 0)


class _Taken(NamedTuple):
    model_config: weakref.ref[Any]
    key: dict[str, Any]


_taken: dict[int, _Taken] = {}  # by id of the ModelConfig


def is_draft(vllm_config: Any, model_config: Any) -> bool:
    """Whether this is the drafting model of speculative decoding; an n-gram drafter only has its target's config."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    return (
        draft is not None and model_config is draft and draft is not getattr(speculative, "target_model_config", None)
    )


def wanted_by(vllm_config: Any, model_config: Any, load_config: Any, options: Options) -> Wanted:
    """What this rank needs of a model. Distributed groups must be there.

    The key is taken once for a ModelConfig, when first asked for: constructing and processing a model changes the
    config that it follows from (vLLM#54921 takes its fingerprint before, for the same reason).
    """
    known = _taken.get(id(model_config))
    if known is None or known.model_config() is not model_config:
        known = _Taken(
            weakref.ref(model_config), key_of(vllm_config, model_config, ranks_of(vllm_config, model_config))
        )
        _taken[id(model_config)] = known
    key = dict(known.key)
    folder = checkpoint_folder(model_config, load_config)
    return Wanted(
        engine=f"vLLM {vllm_version()}",
        checkpoint=folder,
        key=key,
        device=device_of(vllm_config, key),
        nbytes=bytes_on_disk(folder) // (key["tensor_parallel_size"] * key["pipeline_parallel_size"]),
        name=options.model or published_name(model_config.model, folder, key["layout"]),
    )


def key_of(vllm_config: Any, model_config: Any, ranks: Ranks) -> dict[str, Any]:
    """Fields of `ShardKey`, "content" left out."""
    import torch

    quantization_config = getattr(model_config.hf_config, "quantization_config", None)
    kernels = getattr(vllm_config, "kernel_config", None)
    capability = _capability(vllm_config)
    role = "draft" if is_draft(vllm_config, model_config) else "main"
    speculative = getattr(vllm_config, "speculative_config", None)
    parallel = vllm_config.parallel_config
    placement = getattr(parallel, "expert_placement_strategy", None) if ranks.expert[0] > 1 else None
    version = vllm_version()
    digest = digest_of({
        "vllm": version,
        "torch": [torch.__version__, getattr(torch.version, "cuda", None), getattr(torch.version, "hip", None)],
        "compute_capability": capability,
        "config": without(plain(model_config.hf_config), _NOT_OF_THE_MODEL),
        "model": _some(model_config, _MODEL),
        "multimodal": _some(getattr(model_config, "multimodal_config", None), _MULTIMODAL),
        "sizes": [size for size, _ in ranks],  # the ranks are fields of their own: all have one layout
        "parallel": _some(parallel, _PARALLEL),
        "placement": placement,
        "cache": _some(vllm_config.cache_config, _CACHE),
        "kernel": _some(kernels, _KERNEL),
        "attention": _some(getattr(vllm_config, "attention_config", None), _ATTENTION),
        "lora": getattr(vllm_config, "lora_config", None) is not None,  # pads vocabularies
        "role": [role, _some(speculative, _DRAFT) if role == "draft" else None],
        "switches": switches(),
    })  # fmt: skip
    architectures = getattr(model_config.hf_config, "architectures", None) or []
    groups = zip(("tensor", "pipeline", "data", "expert"), ranks, strict=True)
    return {
        "layout": f"vllm-{version}/{digest}",
        "architecture": ",".join(architectures) or None,
        "quantization": model_config.quantization,
        "quantization_digest": None if quantization_config is None else digest_of(quantization_config),
        **{
            f"{kind}_parallel_{part}": n
            for kind, pair in groups
            for part, n in zip(("size", "rank"), pair, strict=True)
        },
        "expert_placement": placement,
        "role": role,
        "compute_capability": capability,
        "backends": ",".join(f"{name}={getattr(kernels, name, 'auto')}" for name in ("moe_backend", "linear_backend")),
    }


def ranks_of(vllm_config: Any, model_config: Any) -> Ranks:
    """As vLLM's own groups have them: data parallel replicas of a dense model are groups of one."""
    from vllm.distributed import (
        get_dp_group,
        get_pp_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    tensor = (get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank())
    pipeline, data = ((group.world_size, group.rank_in_group) for group in (get_pp_group(), get_dp_group()))
    expert = (1, 0)
    if vllm_config.parallel_config.enable_expert_parallel and getattr(model_config, "is_moe", True):
        # FusedMoEParallelConfig.make of vLLM 0.33.0: data, prefill context and tensor ranks in one row.
        context_size, context_rank = 1, 0
        if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
            from vllm.distributed import get_pcp_group

            context_size, context_rank = get_pcp_group().world_size, get_pcp_group().rank_in_group
        size = data[0] * context_size * tensor[0]
        expert = (size, (data[1] * context_size + context_rank) * tensor[0] + tensor[1])
    return Ranks(tensor, pipeline, data, expert)


def checkpoint_folder(model_config: Any, load_config: Any) -> Path | None:
    """The folder with the model's ``*.safetensors``: a local one, or its snapshot in the Hugging Face cache.

    None if there is none (yet). Nothing is downloaded.
    """
    folder = Path(model_config.model)
    if not folder.is_dir():
        if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
            return None
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            found = huggingface_hub.snapshot_download(
                model_config.model,
                revision=model_config.revision,
                cache_dir=load_config.download_dir,
                local_files_only=True,
            )
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            return None
        folder = Path(found)
    return folder if any(folder.glob("*.safetensors")) else None


def device_of(vllm_config: Any, key: Mapping[str, Any]) -> str:
    """The device as weightcached knows it: "cuda:N" by this process's numbers, "host-N" for rank N of a CPU.

    A device has one shard of a name, so ranks on one device would take each other's place. All ranks of a CPU are on
    one; there they are spread as a service spreads a model's ranks: data slowest, then pipeline, tensor fastest.
    """
    import torch

    device = torch.device(vllm_config.device_config.device)
    if device.type == "cpu":
        rank = 0
        for kind in ("data", "pipeline", "tensor"):
            rank = rank * key[f"{kind}_parallel_size"] + key[f"{kind}_parallel_rank"]
        return f"host-{rank}"
    return f"{device.type}:{torch.cuda.current_device() if device.index is None else device.index}"


def switches() -> dict[str, Any]:
    """vLLM's environment switches that shape processed weights, with the values that they have now."""
    import vllm.envs

    found = {}
    for name, read in vllm.envs.environment_variables.items():
        if _SHAPING.search(name) and not _NOT_SHAPING.search(name):
            try:
                found[name] = plain(read())
            except (
                ValueError,
                TypeError,
                KeyError,
                OSError,
            ) as error:  # a value that vLLM itself will refuse when it is used
                found[name] = f"unreadable: {type(error).__name__}"
    return found


def _some(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: plain(getattr(config, name, None)) for name in names}


def _capability(vllm_config: Any) -> str | None:
    import torch

    device = torch.device(vllm_config.device_config.device)
    if device.type != "cuda":
        return None
    return compute_capability()
