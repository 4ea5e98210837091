"""Every name of vLLM's that weightcached touches; scripts/check_engine_api looks for each in the released wheels.

Read by path, by a script that has none of weightcached's dependencies: nothing is imported here. `since` and `until`
are the first and last version that must have the name, None for no limit; `parameters` are those that are passed or
taken by name.
"""

from __future__ import annotations

from typing import Any

LOAD_FORMAT = "weightcached"
VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")


def _used(
    module: str, name: str, why: str, *parameters: str, since: str | None = None, until: str | None = None
) -> dict[str, Any]:
    return {
        "module": f"vllm.{module}",
        "name": name,
        "parameters": list(parameters),
        "since": since,
        "until": until,
        "why": why,
    }


_LOADER = "model_executor.model_loader"
_RELOAD = f"{_LOADER}.reload"
_QUANT = "model_executor.layers.quantization"
_MOE = "model_executor.layers.fused_moe"

USED: list[dict[str, Any]] = [
    # The plug-in.
    _used("plugins", "load_general_plugins", "runs the entry point in every process"),
    _used("version", "__version__", "which vLLM this is"),
    _used(_LOADER, "register_model_loader", "--load-format takes the name", "load_format"),
    _used(_LOADER, "_LOAD_FORMAT_TO_MODEL_LOADER", "whether the name is known already"),
    _used(f"{_LOADER}.base_loader", "BaseModelLoader", "the loader's base class", "load_config"),
    _used(f"{_LOADER}.base_loader", "BaseModelLoader.download_model", "overridden", "model_config"),
    _used(f"{_LOADER}.base_loader", "BaseModelLoader.load_weights", "overridden", "model", "model_config"),
    _used(
        f"{_LOADER}.base_loader",
        "BaseModelLoader.load_model",
        "overridden",
        *("vllm_config", "model_config", "prefix"),
    ),
    _used(
        f"{_LOADER}.base_loader",
        "BaseModelLoader.create_model",
        "what a constructor leaves is kept, before anything is loaded",
        *("vllm_config", "model_config", "prefix"),
    ),
    _used(
        f"{_LOADER}.base_loader",
        "BaseModelLoader.get_external_weight_memory",
        "overridden: attached weights are counted",
        "vllm_config",
        since="0.32.0",
    ),
    _used(f"{_LOADER}.default_loader", "DefaultModelLoader", "a miss is loaded by it", "load_config"),
    _used(f"{_LOADER}.default_loader", "DefaultModelLoader.get_all_weights", "vLLM's own reload reads by it"),
    # A model from cached weights.
    _used(
        f"{_LOADER}.utils",
        "initialize_model",
        "the model without memory",
        *("vllm_config", "prefix", "model_config"),
    ),
    _used(
        f"{_LOADER}.utils",
        "process_weights_after_loading",
        "kernels are built",
        *("model", "model_config", "target_device"),
    ),
    _used("utils.torch_utils", "set_default_torch_dtype", "buffers get the model's dtype", "dtype"),
    _used("model_executor.utils", "weights_already_processed", "pre-processed mode"),
    _used(
        "model_executor.utils",
        "replace_parameter",
        "kept from writing into cached memory",
        *("layer", "param_name"),
    ),
    _used(f"{_QUANT}.base_config", "QuantizeMethodBase.supports_pre_processed_weights", "which methods can"),
    _used(f"{_QUANT}.mxfp4", "Mxfp4MoEMethod", "its kernel decides, not its flag"),
    _used(f"{_QUANT}.modelopt", "ModelOptNvFp4FusedMoE", "its kernel decides, not its flag"),
    _used(f"{_MOE}.expert_map_manager", "ExpertMapManager", "made on the device, not without memory"),
    _used(f"{_MOE}.modular_kernel", "FusedMoEExperts.process_weights_after_loading", "which experts have one"),
    _used("config.compilation", "CompilationConfig.static_forward_context", "layers enter themselves"),
    _used("config.compilation", "CompilationConfig.static_all_moe_layers", "layers enter themselves"),
    _used("model_executor.layers.rotary_embedding", "_ROPE_DICT", "shared by the models of a process"),
    # The key.
    _used("envs", "environment_variables", "switches that shape weights"),
    _used("distributed", "get_tensor_model_parallel_rank", "rank"),
    _used("distributed", "get_tensor_model_parallel_world_size", "size"),
    _used("distributed", "get_pp_group", "rank and size"),
    _used("distributed", "get_dp_group", "rank and size"),
    _used("distributed", "get_pcp_group", "rank and size"),
    _used("config.model", "ModelConfig.quantization", "key and gate"),
    _used("config.model", "ModelConfig.hf_config", "key"),
    _used("config.model", "ModelConfig.max_model_len", "tables depend on it"),
    _used("config.model", "ModelConfig.enable_sleep_mode", "refused"),
    _used("config.cache", "CacheConfig.cache_dtype", "key"),
    _used("config.kernel", "KernelConfig.moe_backend", "key"),
    _used("config.kernel", "KernelConfig.linear_backend", "key"),
    _used("config.attention", "AttentionConfig.backend", "key"),
    _used("config.parallel", "ParallelConfig.enable_eplb", "refused"),
    _used("config.parallel", "ParallelConfig.worker_cls", "the platform's module is imported by preload"),
    _used("config.parallel", "ParallelConfig.expert_placement_strategy", "key"),
    _used("config.offload", "UVAOffloadConfig.cpu_offload_gb", "refused"),
    _used("config.offload", "PrefetchOffloadConfig.offload_group_size", "refused"),
    _used("config.speculative", "SpeculativeConfig.draft_model_config", "which model is a draft"),
    _used("config.speculative", "SpeculativeConfig.target_model_config", "which model is none"),
    _used("config.load", "LoadConfig.model_loader_extra_config", "options"),
    _used("config", "get_current_vllm_config", "a reload in place"),
    _used("config", "get_current_vllm_config_or_none", "whose memory is asked for", until="0.31.0"),
    # Reloads.
    _used(f"{_RELOAD}.layerwise", "get_layerwise_info", "where a reload makes tensors", "layer"),
    _used(f"{_RELOAD}.types", "LayerReloadingInfo.restore_device", "where a reload makes tensors"),
    _used(f"{_RELOAD}.layerwise", "initialize_layerwise_reload", "private copies first", "model"),
    _used(f"{_RELOAD}.inplace", "get_parameter_for_reload", "private copies first", "model", since="0.32.0"),
    # Memory.
    _used("v1.worker.utils", "request_memory", "advice added", "init_snapshot", "cache_config", until="0.31.0"),
    # preload.
    _used("engine.arg_utils", "EngineArgs.add_cli_args", "arguments as of vllm serve", "parser"),
    _used("engine.arg_utils", "EngineArgs.from_cli_args", "arguments as of vllm serve", "args"),
    _used("engine.arg_utils", "EngineArgs.create_engine_config", "an engine's config"),
    _used("utils.argparse_utils", "FlexibleArgumentParser", "arguments as of vllm serve"),
    _used("config", "set_current_vllm_config", "around a load", "vllm_config"),
    _used(
        "distributed",
        "init_distributed_environment",
        "groups of this rank",
        *("world_size", "rank", "distributed_init_method", "local_rank", "backend"),
    ),
    _used("distributed", "ensure_model_parallel_initialized", "groups of this rank"),
    _used("envs", "VLLM_ALLREDUCE_USE_SYMM_MEM", "a publisher sees one GPU"),
    _used("envs", "VLLM_ALLREDUCE_USE_FLASHINFER", "a publisher sees one GPU"),
    _used("envs", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "a publisher sees one GPU"),
    _used("distributed", "set_custom_all_reduce", "a publisher sees one GPU", "enable"),
    _used("distributed", "destroy_model_parallel", "before the process ends"),
    _used("distributed", "destroy_distributed_environment", "before the process ends"),
    _used("platforms.interface", "Platform.dist_backend", "NCCL or gloo"),
    _used("utils.network_utils", "get_distributed_init_method", "a rank alone meets itself", "ip", "port"),
    _used("utils.network_utils", "get_open_port", "a rank alone meets itself"),
    _used("v1.worker.workspace", "init_workspace_manager", "layers may take some", "device"),
]
