"""transformers models whose parameters are cached memory.

    model = from_cache("minilm", device="cuda:0")

For any model class whose checkpoint names are its parameter names. The model is built by its own constructor with every
parameter turned to meta the moment it is registered, so that no weight memory is used, while buffers that no checkpoint
holds (position ids, rotary frequencies) are computed by the model's own code. Parameters are then replaced by the
cached tensors. Nothing is half-done: a model with anything missing, left over or of another shape is an `EngineError`.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..client.attach import Mode, Weights, attach, require_one_of
from ..client.target import resolve
from ..errors import (
    ConnectionFailed,
    EngineError,
    KeyMismatch,
    MissingDependency,
    ModelFailed,
    ModelLoading,
    NoSuchModel,
    VersionMismatch,
)
from .names import Assignment, match_names

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

WHOLE_CHECKPOINT = {"layout": "checkpoint", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
# The cache cannot be reached, or lacks what was asked for and the disk has: a copy that is cut or cast is such a miss.
# Whatever else goes wrong is raised: wrong arguments and devices, refused peers, broken manifests.
FALLS_BACK = (ConnectionFailed, VersionMismatch, NoSuchModel, ModelLoading, ModelFailed, KeyMismatch)
_ANSWER_SECONDS = 10.0  # for a service that is there, when nothing is waited for
_building = threading.Lock()  # torch's registration hooks and default dtype are the whole process's


def from_cache(
    name_or_checkpoint: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    on_miss: Literal["fail", "wait", "fallback"] = "fail",
    model_class: type[PreTrainedModel] | None = None,
    config: PretrainedConfig | None = None,
    timeout: float = 30.0,
    mode: Mode = "zero_copy",
) -> PreTrainedModel:
    """A model in evaluation mode on `device`, its parameters in cached memory, without gradients.

    Args:
        name_or_checkpoint: a cached model's name, or a checkpoint folder (anything with a "/" or that is a folder).
        device, timeout, mode: as for `weightcached.attach`.
        on_miss: "fail" and "wait" as for `attach`. "fallback" waits like "wait", not at all with ``timeout=0``, and
            then loads with `from_pretrained` instead, with one warning that says why; it needs a folder, and the device
            must have the room. It does so for `FALLS_BACK`: no service, one of another protocol, and a model that is
            absent, loading, failed, or cached otherwise than asked for. Every other error is raised.
        model_class: the class to build; None takes the config's first architecture.
        config: the model's config; None reads it from the checkpoint folder, or from the folder that the cached model
            was loaded from.

    Parameters keep the cached dtype, also where `from_pretrained` would cast: to the config's dtype, or to float32 for
    the modules that a class keeps in it. Buffers are private to this process. The cached memory is in use until the
    last parameter is gone. No other model may be built in another thread of this process meanwhile.

    Raises what `attach` raises, and `EngineError` for a model that the cached tensors do not fill exactly: quantised
    checkpoints and those that transformers renames or rewrites while loading are such cases.
    """
    require_one_of("on_miss", on_miss, ("fail", "wait", "fallback"))
    transformers = _import_transformers()
    folder = _folder(name_or_checkpoint)
    if on_miss == "fallback" and folder is None:
        raise EngineError(
            problem=f"on_miss='fallback' needs a checkpoint folder, {str(name_or_checkpoint)!r} is a name"
        )
    at_once = on_miss == "fallback" and timeout == 0
    try:
        weights = attach(
            None if folder is not None else str(name_or_checkpoint),
            checkpoint=folder,
            device=device,
            mode=mode,
            on_miss="fail" if on_miss == "fail" or at_once else "wait",
            timeout=_ANSWER_SECONDS if at_once else timeout,
            key=WHOLE_CHECKPOINT,
        )
    except FALLS_BACK as error:
        if on_miss != "fallback" or folder is None:
            raise
        logger.warning("%s is loaded from disk: %s", folder, error)
        config = config if config is not None else _read_config(transformers, folder)
        return _from_disk(model_class or _model_class(transformers, config), config, folder, device)
    with weights:
        if folder is None and (cached_from := weights.manifest.attributes.get("checkpoint")):
            folder = Path(str(cached_from))
            folder = folder.parent if folder.suffix == ".safetensors" else folder
        if config is None:
            if folder is None:
                raise EngineError(problem=f"{weights.manifest.model} does not say where its config is; pass config=")
            if not folder.is_dir():
                problem = f"{weights.manifest.model} was cached from {folder}, which is gone; pass config="
                raise EngineError(problem=problem)
            config = _read_config(transformers, folder)
        return _build(transformers, weights, model_class or _model_class(transformers, config), config, folder)


def _build(
    transformers: Any, weights: Weights, cls: type[PreTrainedModel], config: PretrainedConfig, folder: Path | None
) -> PreTrainedModel:
    """The model of `cls` with the tensors of `weights`; the config is copied."""
    import torch

    if getattr(config, "quantization_config", None) is not None:
        raise EngineError(problem=f"{cls.__name__}: quantised checkpoints are not supported yet; use from_pretrained")
    config = copy.deepcopy(config)
    dtype = _default_dtype(torch, weights.key.dtype)
    _set_dtype(config, dtype)
    with _building:
        with _parameters_on_meta(torch, dtype):
            model = cls(config)
        assignment = match_names(model, weights)
        if int(transformers.__version__.split(".")[0]) >= 5:
            _compute(torch, model, assignment)
        _assign(torch, model, weights, assignment)
    _refuse_meta(torch, model)
    if folder is not None and model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.eval()
    return model


@contextmanager
def _parameters_on_meta(torch: Any, dtype: torch.dtype) -> Iterator[None]:
    """Inside, each new parameter becomes meta when its module registers it; everything else is computed on the CPU.

    So memory for one parameter at most is in use, and initialisers, which run after registration, cost nothing. Buffers
    are computed on the CPU even for a GPU, as `from_pretrained` does: a GPU may round differently.
    """

    builder = threading.get_ident()

    def to_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter.is_meta or threading.get_ident() != builder:
            return parameter  # the hook is the whole process's, the model this thread's
        # One parameter that is registered twice must stay one.
        twin = getattr(parameter, "_weightcached_meta", None)
        if twin is None:
            twin = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            twin.__dict__.update(parameter.__dict__)
            twin._is_hf_initialized = True  # the flag by which transformers 5 skips its initialisers
            parameter._weightcached_meta = twin
        return twin

    before = torch.get_default_dtype()
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(to_meta)
    try:
        torch.set_default_dtype(dtype)
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
        hook.remove()


def _compute(torch: Any, model: PreTrainedModel, assignment: Assignment) -> None:
    """Has the model compute again what no checkpoint holds, as transformers 5 does: under torch's own default dtype.

    A bfloat16 model's sine tables, say, are so computed in float32 and rounded once. Parameters that will be replaced
    are flagged as done (see `_parameters_on_meta`) and left alone.
    """
    _replace(
        model,
        {name: model.get_parameter(name) for name in assignment.own},
        lambda old: torch.nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=False),
    )
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)  # set by the constructor's own pass
    with torch.device("cpu"):
        model.initialize_weights()


def _assign(torch: Any, model: PreTrainedModel, weights: Weights, assignment: Assignment) -> None:
    """Puts the cached tensors in place of the model's own; moves the buffers that the model computed."""
    device = next((weights[source].device for source in assignment.parameters.values()), torch.device("cpu"))
    made: dict[str, torch.nn.Parameter] = {}
    for target, source in assignment.parameters.items():
        if source not in made:
            old = model.get_parameter(target)
            made[source] = torch.nn.Parameter(weights[source], requires_grad=False)
            made[source].__dict__.update(old.__dict__)
        _set(model, target, made[source])
    own = {name: model.get_parameter(name) for name in assignment.own}
    _replace(
        model,
        {name: old for name, old in own.items() if not old.is_meta},  # transformers 4 computes none of them
        lambda old: torch.nn.Parameter(old.to(device), requires_grad=False),
    )
    buffers = dict(model.named_buffers(remove_duplicate=False))
    computed = {name: buffer for name, buffer in buffers.items() if name not in assignment.buffers}
    _replace(model, computed, lambda old: old.to(device))
    for target, source in assignment.buffers.items():
        # A model may write its buffers, so they are never the cached memory itself.
        _set(model, target, weights[source].clone())


def _replace(
    model: PreTrainedModel, named: dict[str, torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Puts what `make` gives in place of each tensor; one tensor under two names stays one."""
    made: dict[int, torch.Tensor] = {}
    for name, old in named.items():
        if id(old) not in made:
            made[id(old)] = make(old)
        _set(model, name, made[id(old)])


def _set(model: PreTrainedModel, name: str, value: torch.Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)


def _refuse_meta(torch: Any, model: PreTrainedModel) -> None:
    """`EngineError` that names what still has no memory: parameters, buffers, or tensors in plain attributes."""
    left = [
        name
        for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in named
        if tensor.is_meta
    ]
    for path, module in model.named_modules():
        left += [
            f"{path}.{name}".removeprefix(".")
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.is_meta
        ]
    if left:
        raise EngineError(problem=f"{type(model).__name__} has tensors without a value: {', '.join(left)}")


def _from_disk(
    cls: type[PreTrainedModel], config: PretrainedConfig, folder: Path, device: str | torch.device | None
) -> PreTrainedModel:
    # "auto" is what transformers 5 does unasked; 4 would load everything as float32.
    model = cls.from_pretrained(folder, config=config, torch_dtype="auto", local_files_only=True)
    return model.requires_grad_(False).to(resolve(device).torch_device).eval()


def _folder(name_or_checkpoint: str | os.PathLike[str]) -> Path | None:
    """The checkpoint folder that is meant, or None for a name."""
    is_folder = not isinstance(name_or_checkpoint, str) or os.sep in name_or_checkpoint
    return Path(name_or_checkpoint) if is_folder or os.path.isdir(name_or_checkpoint) else None


def _read_config(transformers: Any, folder: Path) -> PretrainedConfig:
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EngineError(problem=f"no config can be read from {folder}: {error}") from error


def _model_class(transformers: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The first architecture that the config names."""
    names = getattr(config, "architectures", None) or []
    if getattr(config, "auto_map", None):
        raise EngineError(problem="the checkpoint brings its own model code; import its class and pass model_class=")
    found: type[PreTrainedModel] | None = getattr(transformers, names[0], None) if names else None
    if found is None:
        listed = ", ".join(names) or "none"
        raise EngineError(
            problem=f"transformers {transformers.__version__} has no class for {listed}; pass model_class="
        )
    return found


def _default_dtype(torch: Any, name: str | None) -> torch.dtype:
    """The dtype under which the model's own floating-point buffers are made: that of most of its weights."""
    dtype = getattr(torch, name or "float32", None)
    return dtype if dtype in (torch.float16, torch.bfloat16, torch.float64) else torch.float32


def _set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """What the config says must be what the model has, also in the configs of its parts, as after `from_pretrained`."""
    # Renamed in transformers 4.56; the old name still works but warns.
    attribute = "dtype" if hasattr(type(config), "dtype") or "dtype" in vars(config) else "torch_dtype"
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in (config, *parts):
        if part is not None:
            setattr(part, attribute, dtype)


def _import_transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependency(package="transformers", extra="transformers", what="from_cache") from None
    return transformers
