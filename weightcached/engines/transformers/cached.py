"""`from_cache`: which way a checkpoint goes, see the package."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...client.attach import Mode, attach, require_one_of, require_seconds
from ...client.target import Target, resolve
from ...client.weights import Weights
from ...errors import EngineError, KeyMismatch, SliceError, WeightCacheError
from ..names import conversion
from ..policy import FALLS_BACK, Options, Wanted, find, obtain, refuse_beside, without_cache
from . import processed, quantised, ranks
from .filling import fill
from .skeleton import (
    buffer_dtype,
    build,
    class_of,
    configured_dtype,
    folder_of,
    import_transformers,
    read_config,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

WHOLE_CHECKPOINT = {"layout": "checkpoint", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
OnMiss = Literal["fail", "wait", "fallback"]


def from_cache(
    name_or_checkpoint: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    on_miss: OnMiss = "fail",
    model_class: type[PreTrainedModel] | None = None,
    config: PretrainedConfig | None = None,
    timeout: float = 30.0,
    mode: Mode = "zero_copy",
    publish: bool = True,
    tp_plan: Literal["auto"] | None = None,
    tensor_parallel: tuple[int, int] | None = None,
) -> PreTrainedModel:
    """A model in evaluation mode on `device`, its parameters in cached memory, without gradients.

    Args:
        name_or_checkpoint: a cached model's name, or a checkpoint folder (anything with a "/" or that is a folder).
        device, timeout, mode: as for `weightcached.attach`.
        on_miss: "fail" and "wait" as for `attach`; under "wait" a folder that the service's config has is loaded.
            "fallback" waits for what is on its way (a service that starts, a load, another publisher), not at all with
            ``timeout=0``, and then loads with `from_pretrained` instead, with one warning that says why; it needs a
            folder, and the device must have the room: `DeviceFull` says before the load if what is cached takes it. It
            does so for `FALLS_BACK`: no service, one of another protocol, and a model that is absent, loading, failed,
            or cached otherwise than asked for. Every other error is raised.
        model_class: the class to build; None takes the config's first architecture.
        config: the model's config; None reads it from the checkpoint folder, or from the folder that the cached model
            was loaded from.
        publish: what "fallback" has loaded is published where the service itself cannot load it, see below.
        tp_plan: "auto" gives this process's rank of a model that transformers cuts by its own plan; needs
            torch.distributed, initialised, see `ranks`.
        tensor_parallel: (rank, size) under `tp_plan`; None takes those of torch.distributed.

    Where a checkpoint's names are the model's own, parameters are the service's copy of the checkpoint. They keep the
    cached dtype, also where `from_pretrained` would cast: to the config's dtype, or to float32 for the modules that a
    class keeps in it. Buffers are private to this process.

    Where transformers renames, merges or dequantises while it loads, and for quantised checkpoints (`quantised` says
    which), the model must have been loaded by transformers once: the first call with on_miss="fallback" does so,
    publishes it, and runs from the shared memory; later calls attach to that. Nothing is waited for then but what is
    on its way: a service that starts, or another engine that publishes.

    The cached memory is in use until the last parameter is gone. No other model may be built in another thread of this
    process meanwhile.

    Raises what `attach` raises, and `EngineError` for a model that the cached tensors do not fill exactly, for a
    quantisation that cannot be shared, and for a model of the second kind that nobody has published.
    """
    require_one_of("on_miss", on_miss, ("fail", "wait", "fallback"))
    require_one_of("mode", mode, ("zero_copy", "copy"))
    timeout = require_seconds("timeout", timeout)
    transformers = import_transformers()
    folder = folder_of(name_or_checkpoint)
    if on_miss == "fallback" and folder is None:
        raise EngineError(
            problem=f"on_miss='fallback' needs a checkpoint folder, {str(name_or_checkpoint)!r} is a name"
        )
    options = Options(on_miss=on_miss, publish=publish, mode=mode, timeout=timeout)
    call = _Call(transformers, resolve(device), options, model_class, config)
    if tp_plan is not None:
        require_one_of("tp_plan", tp_plan, ("auto",))
        if folder is None:
            raise EngineError(problem="tp_plan needs the checkpoint's folder: its config and names say how it is cut")
        return call.rank_of(folder, tensor_parallel)
    if tensor_parallel is not None:
        raise EngineError(problem="tensor_parallel needs tp_plan='auto', by which transformers cuts the model")
    return call.by_name(str(name_or_checkpoint)) if folder is None else call.by_folder(folder)


@dataclass(frozen=True)
class _Call:
    """One call of `from_cache`, its arguments checked."""

    transformers: Any
    target: Target
    options: Options
    model_class: type[PreTrainedModel] | None
    config: PretrainedConfig | None

    def by_name(self, name: str) -> PreTrainedModel:
        with attach(
            name,
            device=self.target.name,
            mode=self.options.mode,
            on_miss="wait" if self.options.on_miss == "wait" else "fail",
            timeout=self.options.timeout,
            key={"pipeline_parallel_size": 1},
        ) as weights:
            layout = weights.key.layout
            if layout != "checkpoint" and not layout.startswith("transformers-"):
                raise KeyMismatch(model=name, differences={"layout": ["checkpoint", layout]})
            folder = _origin(weights)
            config = self._config_of(weights, folder)
            cls = self.model_class or class_of(self.transformers, config)
            if layout != "checkpoint":
                quantised.require_supported(config)
                dtype = configured_dtype(config) or buffer_dtype(weights.key.dtype)
                recipe = processed.Recipe(self.transformers, cls, config, dtype, self.target, "it is processed")
                return processed.install(recipe, weights, folder, recipe.skeleton())
            quantised.require_supported(config)
            model, reason = self._examine(cls, config, buffer_dtype(weights.key.dtype), weights)
            if model is not None and reason is None:
                return fill(self.transformers, model, weights, folder)
            cached_dtype = weights.key.dtype
        # The service's own copy does not serve. By its files, the one that transformers has made of them may be there.
        if folder is None or not folder.is_dir():
            raise EngineError(
                problem=f"{cls.__name__}: {reason}, so the copy of the checkpoint that is cached as {name} does not "
                "serve; pass the checkpoint's folder, with on_miss='fallback' to load and publish it"
            )
        return self._processed(cls, config, cached_dtype, folder, reason, model)

    def by_folder(self, folder: Path) -> PreTrainedModel:
        from ...checkpoint.fileset import open_checkpoint

        config = self.config if self.config is not None else read_config(self.transformers, folder)
        cls = self.model_class or class_of(self.transformers, config)
        with open_checkpoint(folder) as checkpoint:
            names, on_disk = [tensor.name for tensor in checkpoint.tensors()], checkpoint.dtype
        try:
            quantised.require_supported(config)
        except EngineError as error:
            wanted = self._wanted(cls, folder, 0)
            without_cache(wanted, self.options, error)
            return self._from_disk(cls, config, folder, wanted)
        model, reason = self._examine(cls, config, buffer_dtype(on_disk), names)
        if model is None or reason is not None:
            return self._processed(cls, config, on_disk, folder, reason, model)
        sizes = {id(tensor): tensor.numel() * tensor.itemsize for tensor in model.parameters()}
        wanted = self._wanted(cls, folder, sum(sizes.values()))
        weights = find(wanted, self._unpublished)
        if weights is None:
            return self._from_disk(cls, config, folder, wanted)
        with weights:
            return fill(self.transformers, model, weights, folder)

    def rank_of(self, folder: Path, tensor_parallel: tuple[int, int] | None) -> PreTrainedModel:
        config = self.config if self.config is not None else read_config(self.transformers, folder)
        cls = self.model_class or class_of(self.transformers, config)
        rank = ranks.Rank.of_this_process(self.transformers, self.target, tensor_parallel)
        failure: Exception | None = None
        found: tuple[ranks.Plan, Weights] | None = None
        try:
            plan = ranks.plan(rank, cls, config, folder)
            number, size = rank.place
            key = {**plan.key, "tensor_parallel_rank": number, "tensor_parallel_size": size}
            found = plan, obtain(replace(self._wanted(cls, folder, 0), key=key), self._unpublished)
        except (WeightCacheError, OSError, ValueError, RuntimeError) as error:  # first told to those who wait for it
            failure = error
        problem = rank.agree(None if failure is None else str(failure))
        if found is not None:
            with found[1] as weights:
                if problem is None:
                    return ranks.fill(found[0], weights, folder)
        if failure is not None and not isinstance(failure, (EngineError, SliceError, *FALLS_BACK)):
            raise failure
        if self.options.on_miss != "fallback":
            raise failure or EngineError(problem=f"another rank has not got its part: {problem}")
        logger.warning("rank %d of %s is loaded from disk: %s", rank.place[0], folder, problem)
        refuse_beside(self._wanted(cls, folder, ranks.bytes_on_disk(rank, folder)))
        return ranks.from_disk(rank, cls, config, folder)

    @property
    def _unpublished(self) -> Options:
        """The service loads such a checkpoint itself: nobody publishes it."""
        return replace(self.options, publish=False)

    def _examine(
        self, cls: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype, names: Iterable[str]
    ) -> tuple[PreTrainedModel | None, str | None]:
        """A skeleton of the model, and what transformers does to tensors of these names; None: it takes them as is."""
        if (method := quantised.method_of(config)) is not None:
            return None, f"transformers processes weights quantised with {method} while it loads them"
        model = build(cls, config, dtype)
        return model, conversion(model, names)

    def _processed(
        self,
        cls: type[PreTrainedModel],
        config: PretrainedConfig,
        on_disk: str | None,
        folder: Path,
        reason: str | None,
        skeleton: PreTrainedModel | None,
    ) -> PreTrainedModel:
        dtype = configured_dtype(config)
        if dtype is None and quantised.method_of(config) is not None:
            raise EngineError(problem=f"{folder}: the config of a quantised model must say its dtype; pass config=")
        dtype = dtype or buffer_dtype(on_disk)
        recipe = processed.Recipe(self.transformers, cls, config, dtype, self.target, reason or "")
        same = skeleton is not None and dtype == buffer_dtype(on_disk)
        return processed.from_processed(recipe, folder, self.options, skeleton if same else None)

    def _wanted(self, cls: type[PreTrainedModel], folder: Path, nbytes: int) -> Wanted:
        device = self.target.name if self.target.ordinal is None else self.target.torch_device
        engine = f"transformers {self.transformers.__version__}"
        return Wanted(engine, folder, dict(WHOLE_CHECKPOINT), device, nbytes, cls.__name__)

    def _from_disk(
        self, cls: type[PreTrainedModel], config: PretrainedConfig, folder: Path, wanted: Wanted
    ) -> PreTrainedModel:
        refuse_beside(wanted)
        # "auto" is what transformers 5 does unasked; 4 would load everything as float32.
        options: dict[str, Any] = {"config": config, "torch_dtype": "auto", "local_files_only": True}
        if quantised.method_of(config) is not None:  # such a model cannot be moved
            return cls.from_pretrained(folder, device_map={"": self.target.torch_device}, **options).eval()
        model = cls.from_pretrained(folder, **options)
        return model.requires_grad_(False).to(self.target.torch_device).eval()

    def _config_of(self, weights: Weights, folder: Path | None) -> PretrainedConfig:
        if self.config is not None:
            return self.config
        name = weights.manifest.model
        if folder is None:
            raise EngineError(problem=f"{name} does not say where its config is; pass config=")
        if not folder.is_dir():
            raise EngineError(problem=f"{name} was cached from {folder}, which is gone; pass config=")
        return read_config(self.transformers, folder)


def _origin(weights: Weights) -> Path | None:
    """The folder that a cached model was loaded from, as its manifest says."""
    cached_from = weights.manifest.attributes.get("checkpoint")
    if not cached_from:
        return None
    folder = Path(str(cached_from))
    return folder.parent if folder.suffix == ".safetensors" else folder
