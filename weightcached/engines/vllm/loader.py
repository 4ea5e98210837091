"""The loader that vLLM makes for `--load-format weightcached`."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from ...errors import EngineError
from .. import parity, policy
from ..keys import digest_of
from ..policy import Options, Wanted
from . import gate, kernels, layout, memory, reload, state
from .api import LOAD_FORMAT
from .build import build, registries_kept
from .versions import counts_external_weights, require_supported, vllm_version

if TYPE_CHECKING:
    import torch

    from ...client.weights import Weights

_log = logging.getLogger(__name__)
# What was found when vLLM asked for its size, held until the model is loaded by another loader object: so it is still
# there then, and what was counted is what is used. None is a miss.
_decided: dict[str, Weights | None] = {}


@cache
def loader_class() -> type[Any]:
    """A subclass of vLLM's `BaseModelLoader`, made when first asked for: vLLM must not be imported before."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class WeightcachedModelLoader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
        """Weights from the cache if they are there, else by vLLM's own loader, and into the cache then."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            require_supported(vllm_version())
            extra = load_config.model_loader_extra_config or {}
            if not isinstance(extra, dict):
                raise EngineError(problem=f"--model-loader-extra-config is no JSON object: {extra!r}")
            self.options = Options.parse(extra)

        def download_model(self, model_config: Any) -> None:
            disk_loader(self.load_config).download_model(model_config)

        def get_external_weight_memory(self, vllm_config: Any) -> int:
            return external_memory(vllm_config, self.load_config, self.options)

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
            model = load(vllm_config, model_config, self.load_config, self.options, prefix)
            if not layout.is_draft(vllm_config, model_config):
                parity.write_if_asked(model)
            return model

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            reload_cached(model, model_config, self.load_config, self.options)

        def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
            """For vLLM's own reload, which reads a checkpoint into the model that runs."""
            reload.make_private(model)
            weights: Iterator[tuple[str, torch.Tensor]]
            weights = disk_loader(self.load_config).get_all_weights(model_config, model)
            return weights

    return WeightcachedModelLoader


def external_memory(vllm_config: Any, load_config: Any, options: Options) -> int:
    """Bytes of the shards that this rank will attach to; 0 on a miss and in copy mode: copies vLLM sees itself."""
    gate.refuse_settings(vllm_config, load_config, options)
    held = 0
    for model_config, config, chosen in _models(vllm_config, load_config, options):
        if gate.quantization_problem(model_config) is not None:
            continue
        wanted = layout.wanted_by(vllm_config, model_config, config, chosen)
        weights = policy.find(wanted, chosen)
        if weights is None:
            policy.refuse_beside(wanted)
        elif chosen.mode != "copy":
            held += weights.nbytes
        _decided[_identity(wanted)] = weights
    return held


def load(vllm_config: Any, model_config: Any, load_config: Any, options: Options, prefix: str) -> torch.nn.Module:
    """The model, from the cache or the disk, in evaluation mode. `EngineError` for what is refused."""
    gate.refuse_settings(vllm_config, load_config, options)
    options = _of_role(vllm_config, model_config, options)
    wanted = layout.wanted_by(vllm_config, model_config, load_config, options)
    if (problem := gate.quantization_problem(model_config)) is not None:
        policy.without_cache(wanted, options, problem)
        return _load_from_disk(vllm_config, model_config, load_config, wanted, None, prefix)
    identity = _identity(wanted)
    weights = _decided.pop(identity) if identity in _decided else policy.find(wanted, options)
    if weights is None:
        return _load_from_disk(vllm_config, model_config, load_config, wanted, options, prefix)
    try:
        model = build(weights, vllm_config, model_config, prefix)
    except EngineError as error:
        weights.close()
        problem = EngineError(problem=error.problem)  # without the frames of `error`, which hold the model
    else:
        _attached(vllm_config, model, weights, options)
        return model
    gc.collect()
    policy.without_cache(wanted, options, problem)
    return _load_from_disk(vllm_config, model_config, load_config, wanted, None, prefix)


def load_to_publish(vllm_config: Any, model_config: Any, load_config: Any, options: Options) -> torch.nn.Module:
    """The model, from the disk in any case, and published as a new generation. What stands in the way is raised."""
    gate.refuse_settings(vllm_config, load_config, options)
    if (problem := gate.quantization_problem(model_config)) is not None:
        raise problem
    wanted = layout.wanted_by(vllm_config, model_config, load_config, options)
    model = _load_from_disk(vllm_config, model_config, load_config, wanted, options, "", _publish_now)
    if getattr(model, reload.ATTRIBUTE, None) is None:
        raise EngineError(problem=f"{wanted.name} is not published; the reason is logged above")
    return model


def _publish_now(wanted: Wanted, options: Options, model: Any, files: Any, **arguments: Any) -> Weights:
    from ...client.publish import publish

    return publish(
        wanted.name,
        model,
        key=wanted.key,
        device=wanted.device,
        checkpoint=wanted.checkpoint,
        files=files,
        timeout=options.timeout,
        **arguments,
    )


def _attached(vllm_config: Any, model: torch.nn.Module, weights: Weights, options: Options) -> None:
    setattr(model, reload.ATTRIBUTE, weights)
    how = "copied" if options.mode == "copy" else "attached"
    _log.info("%s generation %d: %d bytes %s", weights.manifest.model, weights.generation, weights.nbytes, how)
    if options.mode == "copy":  # writable, and this engine's alone
        return
    reload.guard_reloads()
    if not counts_external_weights(vllm_version()) and not weights.device.startswith("host"):
        import torch

        _, total = torch.cuda.mem_get_info()
        memory.warn_uncounted(vllm_config.cache_config.gpu_memory_utilization, weights.nbytes, total)


def _load_from_disk(
    vllm_config: Any,
    model_config: Any,
    load_config: Any,
    wanted: Wanted,
    options: Options | None,
    prefix: str,
    publish: Callable[..., Weights | None] = policy.publish_loaded,
) -> torch.nn.Module:
    """By vLLM's own loader; published afterwards unless `options` is None."""
    from ...client.publish import checkpoint_files

    policy.refuse_beside(wanted)
    loader = disk_loader(load_config)
    files = None
    if options is not None and options.publish:
        if wanted.checkpoint is None:  # not in the Hugging Face cache yet
            loader.download_model(model_config)
            folder = layout.checkpoint_folder(model_config, load_config)
            wanted = dataclasses.replace(wanted, checkpoint=folder)
        files = None if wanted.checkpoint is None else checkpoint_files(wanted.checkpoint)
    with registries_kept(vllm_config):
        model: torch.nn.Module = loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    if options is None or not options.publish:
        return model
    if files is None:
        _log.warning("%s is not published: no *.safetensors of %s are on this host", wanted.name, model_config.model)
        return model
    problem = gate.method_problem(model) or gate.emptied_problem(model, loader.filled)
    if problem is not None:
        _log.warning("%s is not published: %s", wanted.name, problem)
        return model
    attributes = state.tensor_attributes(model, loader.constructed)
    weights = publish(
        wanted,
        options,
        model,
        files,
        private=state.private(model, attributes),
        tensor_attributes=tuple(attributes),
        attributes={
            **state.changed_scalars(model, loader.constructed),
            **state.held_scalar(model),
            **kernels.changed(model, loader.in_kernels),
        },
    )
    if weights is not None:
        reload.guard_reloads()
        setattr(model, reload.ATTRIBUTE, weights)
    memory.give_back(wanted.device)
    return model


def reload_cached(model: torch.nn.Module, model_config: Any, load_config: Any, options: Options) -> None:
    """Writes the cached weights of this rank, such as a newer generation, into a model that is loaded.

    `EngineError` if they are not cached, or of another form; the model is then as it was.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    options = _of_role(vllm_config, model_config, options)
    wanted = layout.wanted_by(vllm_config, model_config, load_config, options)
    weights = policy.find(wanted, dataclasses.replace(options, mode="zero_copy"))
    if weights is None:
        raise EngineError(problem=f"{wanted.name} is not cached, so there is nothing to reload from; restart vLLM")
    with weights:
        reload.copy_into(model, weights)


def disk_loader(load_config: Any) -> Any:
    """vLLM's own loader, which keeps in `constructed` what the model was before anything was loaded into it."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class DiskLoader(DefaultModelLoader):  # type: ignore[misc, unused-ignore]
        constructed: state.Snapshot
        in_kernels: kernels.Values
        filled: set[str]

        def create_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
            model: torch.nn.Module = super().create_model(*args, **kwargs)
            self.constructed = state.snapshot(model)
            self.in_kernels = kernels.values(model)
            self.filled = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.numel()}
            return model

    return DiskLoader(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={}))


def _models(vllm_config: Any, load_config: Any, options: Options) -> Iterator[tuple[Any, Any, Options]]:
    """The models that this rank will load by this loader, each with its load config and options."""
    yield vllm_config.model_config, load_config, options
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or not layout.is_draft(vllm_config, draft):
        return
    own = getattr(speculative, "draft_load_config", None) or load_config
    if own.load_format == LOAD_FORMAT:
        chosen = Options.parse(own.model_loader_extra_config or {})
        yield draft, own, _of_role(vllm_config, draft, chosen)


def _of_role(vllm_config: Any, model_config: Any, options: Options) -> Options:
    """A draft comes with the options of its target, whose name is not its own."""
    return dataclasses.replace(options, model=None) if layout.is_draft(vllm_config, model_config) else options


def _identity(wanted: Wanted) -> str:
    return digest_of([str(wanted.checkpoint), wanted.key, wanted.device])
