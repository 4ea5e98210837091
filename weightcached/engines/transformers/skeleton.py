"""A transformers model without memory for its weights, and what it is built from: class, config, dtype.

The model is built by its own constructor with every parameter turned to meta the moment it is registered, so that no
weight memory is used, while buffers that no checkpoint holds (position ids, rotary frequencies) are computed by the
model's own code.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import EngineError, MissingDependency

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

building = threading.RLock()  # torch's registration hooks and default dtype are the whole process's


def import_transformers() -> Any:
    """The transformers module. `MissingDependency` says which extra brings it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependency(package="transformers", extra="transformers", what="from_cache") from None
    return transformers


def major_version(transformers: Any) -> int:
    return int(transformers.__version__.split(".")[0])


def folder_of(name_or_checkpoint: str | os.PathLike[str]) -> Path | None:
    """The checkpoint folder that is meant, or None for a name."""
    is_folder = not isinstance(name_or_checkpoint, str) or os.sep in name_or_checkpoint
    return Path(name_or_checkpoint) if is_folder or os.path.isdir(name_or_checkpoint) else None


def read_config(transformers: Any, folder: Path) -> PretrainedConfig:
    """The config of the checkpoint in `folder`; `EngineError` if there is none that can be read."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise EngineError(problem=f"no config can be read from {folder}: {error}") from error


def class_of(transformers: Any, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The first architecture that the config names; `EngineError` if transformers has no class for it."""
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


def buffer_dtype(name: str | None) -> torch.dtype:
    """The dtype under which the model's own floating-point buffers are made: that of most of its weights."""
    import torch

    dtype = getattr(torch, name or "float32", None)
    return dtype if dtype in (torch.float16, torch.bfloat16, torch.float64) else torch.float32


def configured_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """The dtype that the config names, by its name of today or by that of before transformers 4.56."""
    import torch

    found = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    found = getattr(torch, found, None) if isinstance(found, str) else found
    return found if isinstance(found, torch.dtype) else None


def build(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    quantizer: Any = None,
    tied: bool = True,
) -> PreTrainedModel:
    """A new model, its parameters on meta, with a config of its own that says `dtype`.

    `quantizer` (transformers' HfQuantizer) puts its modules in place of the model's. `tied` False leaves tied
    parameters apart, as transformers has them until a checkpoint is loaded.
    """
    config = copy.deepcopy(config)
    _set_dtype(config, dtype)
    with building, _parameters_on_meta(dtype):
        if tied:
            model = cls(config)
        else:
            from transformers import initialization

            with initialization.no_tie_weights():
                model = cls(config)
        if quantizer is not None:
            quantizer.preprocess_model(
                model=model, dtype=dtype, device_map=None, checkpoint_files=None, use_kernels=False
            )
    return model


def compute(model: PreTrainedModel, own: Iterable[str] = ()) -> None:
    """Has the model compute again what no checkpoint holds, as transformers 5 does: under torch's own default dtype.

    A bfloat16 model's sine tables, say, are so computed in float32 and rounded once. Parameters named in `own` get
    memory and are computed too; all others are flagged as done (see `_parameters_on_meta`) and left alone.
    """
    import torch

    replace(
        model,
        {name: model.get_parameter(name) for name in own},
        lambda old: torch.nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=False),
    )
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)  # set by the constructor's own pass
    with torch.device("cpu"):
        model.initialize_weights()


def finish(transformers: Any, model: PreTrainedModel, folder: Path | None) -> PreTrainedModel:
    """What `from_pretrained` does at its end: the checkpoint's generation config, and evaluation mode."""
    if folder is not None and model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.requires_grad_(False).eval()


def replace(
    model: PreTrainedModel, named: dict[str, torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Puts what `make` gives in place of each tensor; one tensor under two names stays one."""
    made: dict[int, torch.Tensor] = {}
    for name, old in named.items():
        if id(old) not in made:
            made[id(old)] = make(old)
        put(model, name, made[id(old)])


def put(model: PreTrainedModel, name: str, value: torch.Tensor) -> None:
    """Sets the parameter or buffer of that dotted name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)


def refuse_meta(model: PreTrainedModel) -> None:
    """`EngineError` that names what still has no memory: parameters, buffers, or tensors in plain attributes."""
    import torch

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


@contextmanager
def _parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Inside, each new parameter becomes meta when its module registers it; everything else is computed on the CPU.

    So memory for one parameter at most is in use, and initialisers, which run after registration, cost nothing. Buffers
    are computed on the CPU even for a GPU, as `from_pretrained` does: a GPU may round differently.
    """
    import torch

    builder = threading.get_ident()

    def to_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if threading.get_ident() != builder:
            return parameter  # the hook is the whole process's, the model this thread's
        if parameter.is_meta:  # a quantised module's
            parameter._is_hf_initialized = True
            return parameter
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


def _set_dtype(config: PretrainedConfig, dtype: torch.dtype) -> None:
    """What the config says must be what the model has, also in the configs of its parts, as after `from_pretrained`."""
    # Renamed in transformers 4.56; the old name still works but warns.
    attribute = "dtype" if hasattr(type(config), "dtype") or "dtype" in vars(config) else "torch_dtype"
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in (config, *parts):
        if part is not None:
            setattr(part, attribute, dtype)
