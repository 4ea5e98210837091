"""Every name of SGLang's that weightcached touches; scripts/check_engine_api looks for each in the released wheels.

Read by path, by a script that has none of weightcached's dependencies: nothing is imported here. `since` and `until`
are the first and last version that must have the name, None for no limit; `parameters` are those that are passed or
taken by name.
"""

from __future__ import annotations

from typing import Any

OLDEST = "0.5.19"  # the first with `preloaded_weights_bytes`, without which KV sizing is wrong
VERSIONS = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
FORMAT_CHECK = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_RUNNER_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
# SGLang's own check before it changes or frees weights, in both of its classes that do.
GUARDS = (
    f"{_RUNNER_UPDATER}.WeightUpdater._assert_weight_cache_inactive",
    f"{_SCHEDULER_UPDATER}.SchedulerWeightUpdaterManager._assert_weight_cache_inactive",
)
# Updates that report a failure as (False, reason): refused there, the engine goes on serving.
SOFT_GUARDS = tuple(
    f"{_RUNNER_UPDATER}.WeightUpdater.update_weights_from_{source}" for source in ("disk", "tensor", "ipc")
)
LATE_GUARD = f"{_RUNNER_UPDATER}.WeightUpdater.begin_weight_update"  # changes weights, and does not ask the check
LATE_GUARD_SINCE = "0.5.21"
# Ranks and sizes of `get_parallel()` that go into the key.
PARALLEL = (
    "tp_size", "tp_rank", "pp_size", "pp_rank", "moe_ep_size", "moe_ep_rank", "attn_dp_size", "attn_dp_rank",
    "attn_tp_size", "attn_tp_rank", "attn_cp_size", "attn_cp_rank", "moe_dp_size", "moe_dp_rank", "moe_tp_rank",
)  # fmt: skip
# Groups of settings, as `config_bag` knows them.
NAMESPACES = ("parallel", "exec", "model", "spec", "mm", "disagg")
# Settings with which nothing is cached: where SGLang declares them -> name -> the first version that has it.
SETTINGS: dict[tuple[str, str], dict[str, str | None]] = {
    ("exec_", "ExecMoe"): {
        "enable_eplb": None,
        "ep_num_redundant_experts": None,
        "init_expert_location": None,
        "elastic_ep_backend": None,
        "enable_elastic_expert_backup": None,
        "enable_paged_experts": "0.5.23",
        "kt_weight_path": None,
    },
    ("exec_", "ExecDeterministic"): {"rl_on_policy_target": None},
    ("exec_", "ExecOffload"): {
        "cpu_offload_gb": None,
        "offload_group_size": None,
        "ple_offload_embedding": "0.5.20",
    },
    ("model", "Model"): {
        "startup_weight_load_mode": None,
        "weight_cache_mode": None,
        "rl_quant_profile": None,
        "modelopt_quant": None,
        "delete_ckpt_after_loading": None,
        "remote_instance_weight_loader_start_seed_via_transfer_engine": None,
    },
}


def _used(
    module: str,
    name: str,
    why: str,
    *,
    parameters: tuple[str, ...] = (),
    since: str | None = None,
    until: str | None = None,
) -> dict[str, Any]:
    entry = {"module": f"sglang.srt.{module}", "name": name, "why": why}
    return {**entry, "parameters": list(parameters), "since": since, "until": until}


_REGISTRY = "plugins.hook_registry"
_LOADER = "model_loader.loader"
_CONFIG = "configs.model_config"
_DEFAULT = "DefaultModelLoader"

USED: list[dict[str, Any]] = [
    # The plug-in.
    _used("plugins", "load_plugins", "runs the entry point in every process that builds a model"),
    _used("plugins", "GENERAL_PLUGINS_GROUP", "the entry point's group"),
    _used(_REGISTRY, "HookRegistry.register", "mounts the hooks", parameters=("target", "hook", "hook_type", "source")),
    _used(_REGISTRY, "HookRegistry.apply_hooks", "puts late hooks in place"),
    _used(_REGISTRY, "HookType.BEFORE", "kind of hook"),
    _used(_REGISTRY, "HookType.AROUND", "kind of hook"),
    _used(_REGISTRY, "HookSource", "who mounts them", parameters=("plugin_name", "dist_name")),
    _used("server_args", "add_load_format_choices", "--load-format takes the name"),
    _used(
        "configs.load_config",
        "LoadConfig",
        "made again for SGLang's own loader",
        parameters=("load_format", "model_loader_extra_config"),
    ),
    _used("configs.load_config", "LoadConfig._verify_load_format", "hooked: a loader class in place of the name"),
    _used("configs.load_config", "LoadFormat.AUTO", "what a miss is loaded as"),
    # What must not happen to shared weights.
    _used(
        _RUNNER_UPDATER.removeprefix("sglang.srt."),
        "WeightUpdater._assert_weight_cache_inactive",
        "hooked",
        parameters=("op",),
    ),
    *(
        _used(_RUNNER_UPDATER.removeprefix("sglang.srt."), target.removeprefix(f"{_RUNNER_UPDATER}."), "hooked")
        for target in SOFT_GUARDS
    ),
    _used(
        _RUNNER_UPDATER.removeprefix("sglang.srt."),
        "WeightUpdater.begin_weight_update",
        "hooked",
        since=LATE_GUARD_SINCE,
    ),
    _used(
        _SCHEDULER_UPDATER.removeprefix("sglang.srt."),
        "SchedulerWeightUpdaterManager._assert_weight_cache_inactive",
        "hooked",
        parameters=("op",),
    ),
    # The loader.
    _used(_LOADER, "BaseModelLoader", "base class of the loader", parameters=("load_config",)),
    _used(_LOADER, "BaseModelLoader.load_model", "overridden", parameters=("model_config", "device_config")),
    _used(_LOADER, "BaseModelLoader.download_model", "overridden", parameters=("model_config",)),
    _used(_LOADER, "BaseModelLoader.preloaded_weights_bytes", "KV sizing counts what is resident already"),
    _used(_LOADER, "get_model_loader", "SGLang's own loader of a miss", parameters=("load_config", "model_config")),
    _used(
        _LOADER,
        f"{_DEFAULT}.load_weights_and_postprocess",
        "watched: what a load does to the model",
        parameters=("model", "weights", "target_device"),
    ),
    _used(
        _LOADER,
        f"{_DEFAULT}._prepare_weights",
        "where a checkpoint that is no folder lies on disk",
        parameters=("model_name_or_path", "revision", "fall_back_to_pt"),
    ),
    _used(
        _LOADER, "_initialize_model", "the model on meta", parameters=("model_config", "load_config", "quant_config")
    ),
    _used(_LOADER, "_get_quantization_config", "of the model on meta", parameters=("model_config", "load_config")),
    _used("model_loader.utils", "set_default_torch_dtype", "of the model on meta", parameters=("dtype",)),
    _used(
        "distributed.parallel_state",
        "GroupCoordinator.send",
        "replaced while the model is built on meta",
        parameters=("tensor", "dst"),
    ),
    _used("distributed.parallel_state", "GroupCoordinator.device", "where what it sends has memory"),
    _used("layers.rotary_embedding.factory", "_ROPE_DICT", "what a constructor that failed on meta has entered"),
    _used("configs.device_config", "DeviceConfig.device_type", "where to load"),
    _used("configs.device_config", "DeviceConfig.gpu_id", "where to load"),
    # The key.
    _used("runtime_context", "get_parallel", "ranks and sizes"),
    _used("runtime_context", "get_context", "settings"),
    _used("runtime_context", "RuntimeContext.config_bag", "settings", parameters=("name",)),
    *(
        _used("runtime_context", f"ParallelContext.{name}", "key", until="0.5.20")
        for name in PARALLEL
        if name.endswith("_rank")
    ),
    *(_used("arg_groups.fields.parallel", f"Parallel.{name}", "key", since="0.5.21") for name in PARALLEL),
    *(
        _used("server_args", f"ServerArgs.{name}", "refused", until="0.5.19")
        for names in SETTINGS.values()
        for name, since in names.items()
        if since is None
    ),
    *(
        _used(f"arg_groups.fields.{group}", f"{cls}.{name}", "refused", since=since or "0.5.20")
        for (group, cls), names in SETTINGS.items()
        for name, since in names.items()
    ),
    _used(_CONFIG, "ModelConfig.model_path", "the checkpoint"),
    _used(_CONFIG, "ModelConfig.revision", "the checkpoint"),
    _used(_CONFIG, "ModelConfig.hf_config", "the architecture"),
    _used(_CONFIG, "ModelConfig.dtype", "element type"),
    _used(_CONFIG, "ModelConfig.quantization", "quantisation method"),
    _used(_CONFIG, "ModelConfig.is_draft_model", "role of the model"),
    _used(_CONFIG, "ModelConfig.is_fp4_experts", "refused"),
    _used("layers.deep_gemm_wrapper.configurer", "ENABLE_JIT_DEEPGEMM", "whether block FP8 scales are repacked"),
    _used("layers.deep_gemm_wrapper.configurer", "DEEPGEMM_SCALE_UE8M0", "whether block FP8 scales are repacked"),
]
