"""Models whose tensors transformers renames, merges or dequantises while it loads them: processed once, then shared.

    first call    from_pretrained -> weightcached.publish   layout "transformers-<version>/<digest>"
    later calls   skeleton -> Weights.install

The digest is of all that shapes the processed tensors: versions, class, dtype, config and quantisation. Whatever
differs is another layout, and so never attached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.modules import named_tensors
from ...client.publish import checkpoint_files
from ...client.target import Target
from ...client.weights import Weights
from ...errors import EngineError, KeyMismatch, NoSuchModel, TimedOut
from ..keys import compute_capability, digest_of, published_name
from ..policy import Options, Wanted, find, publish_loaded, refuse_beside
from . import quantised
from .skeleton import build, building, compute, finish, major_version

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

# Fields of a config that say where it comes from, or what is the dtype, which the digest has of its own.
_NOT_SHAPING = frozenset({"transformers_version", "_name_or_path", "name_or_path", "dtype", "torch_dtype"})


@dataclass(frozen=True)
class Recipe:
    """How transformers makes a model of a checkpoint: what `from_pretrained` is told, and what the layout follows from.

    `reason` says what transformers does to the checkpoint's tensors, for messages.
    """

    transformers: Any
    cls: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype
    target: Target
    reason: str

    def quantizer(self) -> Any:
        """A fresh one: it keeps what it learns of a model."""
        return quantised.quantizer_of(self.config, self.target)

    def key(self) -> dict[str, Any]:
        """The `ShardKey` fields of the processed model."""
        import torch

        capability = None
        if self.target.ordinal is not None:
            capability = compute_capability(self.target.ordinal)
        quantizer = self.quantizer()
        shaping = None if quantizer is None else quantised.shaping(quantizer, self.config)
        version = self.transformers.__version__
        config = {name: value for name, value in self.config.to_dict().items() if name not in _NOT_SHAPING}
        config.pop("quantization_config", None)  # in `shaping`, with what its own to_dict leaves out
        shapes = {
            "transformers": version,
            "torch": torch.__version__,
            "class": f"{self.cls.__module__}.{self.cls.__qualname__}",
            "dtype": str(self.dtype),
            "config": config,
            "quantization": shaping,
            "compute_capability": capability,
        }
        return {
            "layout": f"transformers-{version}/{digest_of(shapes)}",
            "architecture": self.cls.__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": quantised.method_of(self.config),
            "quantization_digest": None if shaping is None else digest_of(shaping),
            "compute_capability": capability,
        }

    def skeleton(self) -> PreTrainedModel:
        """The model on meta, with the modules of its quantisation."""
        return build(self.cls, self.config, self.dtype, quantizer=self.quantizer())

    def wanted(self, folder: Path, skeleton: PreTrainedModel) -> Wanted:
        """What to find, and under what name to publish it."""
        key = self.key()
        sizes = {id(item.tensor): item.tensor.numel() * item.tensor.itemsize for item in named_tensors(skeleton)}
        return Wanted(
            engine=f"transformers {self.transformers.__version__}",
            checkpoint=folder,
            key=key,
            device=self.target.torch_device if self.target.ordinal is not None else self.target.name,
            nbytes=sum(sizes.values()),
            name=published_name(str(folder.resolve()), folder.resolve(), key["layout"]),
        )

    def load(self, folder: Path) -> PreTrainedModel:
        """The model as transformers loads it, on the device."""
        model = self.cls.from_pretrained(folder, config=self.config, torch_dtype=self.dtype, local_files_only=True)
        return model.requires_grad_(False).to(self.target.torch_device).eval()


def from_processed(recipe: Recipe, folder: Path, options: Options, skeleton: PreTrainedModel | None) -> PreTrainedModel:
    """The model of the checkpoint in `folder`: attached if it is published, else loaded and, by `options`, published.

    `skeleton` is one that has been built already, of the recipe's class, config and dtype; it is used up.
    """
    if skeleton is None or quantised.method_of(recipe.config) is not None:
        skeleton = recipe.skeleton()
    wanted = recipe.wanted(folder, skeleton)
    with _hint(recipe, options):
        weights = find(wanted, options)
    if weights is not None:
        with weights:
            return install(recipe, weights, folder, skeleton)
    del skeleton
    # Not here: a log record may keep the error that `find` has caught, and so this frame and its variables.
    return _load(recipe, wanted, folder, options)


def _load(recipe: Recipe, wanted: Wanted, folder: Path, options: Options) -> PreTrainedModel:
    """Loads from disk, and publishes if that is wanted."""
    refuse_beside(wanted)
    files = checkpoint_files(folder) if options.publish else None
    model = recipe.load(folder)
    weights = publish_loaded(wanted, options, model, files)
    if weights is not None and options.mode == "copy":
        weights.private_copy()
    return model


def install(recipe: Recipe, weights: Weights, folder: Path | None, skeleton: PreTrainedModel) -> PreTrainedModel:
    """The skeleton with the tensors of a published model, which must have the recipe's layout."""
    layout = recipe.key()["layout"]
    if weights.key.layout != layout:
        raise KeyMismatch(model=weights.manifest.model, differences={"layout": [layout, weights.key.layout]})
    if major_version(recipe.transformers) >= 5:
        with building:
            compute(skeleton)
    weights.install(skeleton)
    quantizer = recipe.quantizer()
    if quantizer is not None:
        skeleton.hf_quantizer = quantizer
        quantizer.postprocess_model(skeleton)
    return finish(recipe.transformers, skeleton, folder)


@contextmanager
def _hint(recipe: Recipe, options: Options) -> Iterator[None]:
    """What the caller can do about a model that nobody has published."""
    try:
        yield
    except (NoSuchModel, KeyMismatch, TimedOut) as error:
        if options.on_miss == "fallback":
            raise
        raise EngineError(
            problem=f"{recipe.cls.__name__}: {recipe.reason}, so the cache has it only once it has been loaded and "
            f"published, and it has not ({error}); on_miss='fallback' would load and publish it"
        ) from error
