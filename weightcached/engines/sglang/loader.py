"""The loader behind ``--load-format weightcached``: cached weights are mapped, others loaded by SGLang and published.

    hit     the model is built on meta and filled with the cached tensors: SGLang's processed ones, so that neither
            `load_weights` nor post-processing runs
    miss    SGLang's own loader, as for ``--load-format auto``; then the processed weights are handed to the service,
            and this engine runs from the shared copy. That is before any CUDA graph is captured

Options come by ``--model-loader-extra-config '{"on_miss": "wait"}'``, see `policy.Options`. A draft model of
speculative decoding has a key of its own role; ``--speculative-draft-load-format weightcached`` turns it on.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.publish import checkpoint_files
from ...errors import EngineError
from .. import policy
from ..keys import bytes_on_disk, compute_capability, published_name
from . import layout, plugin
from .state import Changes, Snapshot

if TYPE_CHECKING:
    import torch

    from ...client.weights import Weights
    from ...shard.manifest import SourceFile

_log = logging.getLogger(__name__)
_ELSEWHERE = ("secondary_weights", "allow_patterns_overrides")  # of a model: it reads files beside the checkpoint's own
_SHOWN = 5
# What constructors raise that meet tensors without memory.
_BUILD_ERRORS = (
    RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, KeyError, AssertionError, IndexError,
)  # fmt: skip


class Loading:
    """The loader without its base class, which is SGLang's `BaseModelLoader`; see `loader_class`.

    `preloaded_weights_bytes` is what SGLang adds to the free memory that it measured before the load: bytes on the
    device that were the model's already. It sizes the KV cache by the sum.
    """

    preloaded_weights_bytes: int = 0
    load_config: Any

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)  # type: ignore[call-arg]
        self._options = policy.Options.parse(load_config.model_loader_extra_config or {})
        plugin.mount_guards()

    def download_model(self, model_config: Any) -> None:
        """Fetches the checkpoint as SGLang's own loader does."""
        self._own_loader(model_config).download_model(model_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """The model with its weights, in evaluation mode.

        Raises what `policy.find` raises, and `EngineError` for a model whose weights cannot be cached unless on_miss is
        "fallback": then SGLang loads it from disk, after one warning.
        """
        self.preloaded_weights_bytes = 0
        wanted = self._wanted(model_config, device_config)
        if (reason := layout.refusal(model_config, device_config.device_type)) is not None:
            policy.without_cache(wanted, self._options, EngineError(problem=reason))
            policy.refuse_beside(wanted)
            return self._own_loader(model_config).load_model(model_config=model_config, device_config=device_config)
        free = _free_bytes(device_config)
        weights = policy.find(wanted, self._options)
        if weights is None:
            policy.refuse_beside(wanted)
            return self._load_and_publish(wanted, model_config, device_config)
        arrived = max(free - _free_bytes(device_config), 0)  # while this process waited for it, not before
        try:
            model = self._filled(weights, model_config)
        except (EngineError, *_BUILD_ERRORS) as error:
            weights.close()
            what = error.problem if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            # Without the frames of `error`, which hold the model.
            problem = EngineError(problem=f"{model_config.model_path} cannot be built from cached weights: {what}")
        else:
            if self._options.mode == "zero_copy":
                plugin.share(model, weights)
                self.preloaded_weights_bytes = max(weights.nbytes - arrived, 0)
            return model
        gc.collect()
        policy.without_cache(wanted, self._options, problem)
        policy.refuse_beside(wanted)
        own: torch.nn.Module = self._own_loader(model_config).load_model(
            model_config=model_config, device_config=device_config
        )
        return own

    def _filled(self, weights: Weights, model_config: Any) -> torch.nn.Module:
        """The model on meta, then every tensor of it from the cache."""
        import torch
        from sglang.srt.model_loader import loader
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        start = time.monotonic()
        own = self._own_config()
        quantization = loader._get_quantization_config(model_config, own)
        with rotary_kept(), sent_with_memory():
            with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
                model: torch.nn.Module = loader._initialize_model(model_config, own, quantization)
            built = time.monotonic()
            weights.install(model)
        _log.info("%s of %s: %d tensors of %d bytes in %.3f s, after %.3f s to build the model",
                  weights.manifest.model, model_config.model_path, len(weights), weights.nbytes,
                  time.monotonic() - built, built - start)  # fmt: skip
        return model.eval()

    def _load_and_publish(self, wanted: policy.Wanted, model_config: Any, device_config: Any) -> torch.nn.Module:
        """The model as SGLang's own loader makes it, published unless the options or the load forbid it."""
        own = self._own_loader(model_config)
        files = None
        taken: list[Snapshot] = []
        if self._options.publish and wanted.checkpoint is not None:
            files = checkpoint_files(wanted.checkpoint)  # before the load: who publishes compares them again
            _watch(own, taken)
        model: torch.nn.Module = own.load_model(model_config=model_config, device_config=device_config)
        if files is None:
            return model
        if not taken:
            self._not_published(wanted, [f"{type(own).__name__} does not load as SGLang's DefaultModelLoader does"])
            return model
        changes = taken[0].changes(model)
        elsewhere = [f"{name} of the model is set" for name in _ELSEWHERE if getattr(model, name, None)]
        if problems := [*elsewhere, *changes.problems]:
            self._not_published(wanted, problems)
            return model
        self._publish(wanted, model, files, changes)
        return model

    def _publish(
        self,
        wanted: policy.Wanted,
        model: torch.nn.Module,
        files: tuple[SourceFile, ...],
        changes: Changes,
    ) -> None:
        weights = policy.publish_loaded(
            wanted,
            self._options,
            model,
            files,
            private=changes.private,
            tensor_attributes=changes.tensor_attributes,
            attributes=changes.attributes,
        )
        if weights is None:
            return
        if self._options.mode == "copy":  # its user wants weights that this engine may write
            weights.private_copy()
        else:
            plugin.share(model, weights)

    def _not_published(self, wanted: policy.Wanted, problems: list[str]) -> None:
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        _log.warning(
            "%s: %s is not published, so the next start loads from disk again: what its load did cannot be carried: %s",
            wanted.engine, wanted.checkpoint, "; ".join(problems[:_SHOWN]) + more,
        )  # fmt: skip

    def _wanted(self, model_config: Any, device_config: Any) -> policy.Wanted:
        versions = layout.versions()
        role = "draft" if model_config.is_draft_model else "main"
        if (index := getattr(self.load_config, "draft_model_idx", None)) is not None:
            role = f"{role}-{index}"
        key = layout.key(model_config, versions, _capability(device_config), role)
        checkpoint = self._checkpoint(model_config)
        ranks = key["tensor_parallel_size"] * key["pipeline_parallel_size"]
        return policy.Wanted(
            engine=f"SGLang {versions['sglang']}",
            checkpoint=checkpoint,
            key=key,
            device=_device(device_config),
            nbytes=bytes_on_disk(checkpoint) // ranks,
            name=published_name(str(model_config.model_path), checkpoint, key["layout"]),
        )

    def _checkpoint(self, model_config: Any) -> Path | None:
        """The folder on disk; a model of a hub is fetched first, as SGLang's own loader would.

        None where that loader does not say which folder it reads: then nothing is compared, nor published.
        """
        folder = Path(model_config.model_path)
        _refuse_form(folder)
        if folder.is_dir():
            return folder
        own = self._own_loader(model_config)
        if not hasattr(own, "_prepare_weights"):
            return None
        found = own._prepare_weights(model_config.model_path, model_config.revision, fall_back_to_pt=True)
        return Path(found[0])

    def _own_config(self) -> Any:
        """The load config that ``--load-format auto`` would have had."""
        from sglang.srt.configs.load_config import LoadFormat

        return dataclasses.replace(self.load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={})

    def _own_loader(self, model_config: Any) -> Any:
        from sglang.srt.model_loader.loader import get_model_loader

        return get_model_loader(load_config=self._own_config(), model_config=model_config)


def loader_class() -> type:
    """`Loading` as a `BaseModelLoader` of the SGLang that is installed; `LoadConfig.load_format` may be a class."""
    from sglang.srt.model_loader.loader import BaseModelLoader

    return _class_over(BaseModelLoader)


@cache
def _class_over(base: type) -> type:
    return type("WeightcachedModelLoader", (Loading, base), {"__doc__": Loading.__doc__, "__module__": __name__})


@contextmanager
def rotary_kept() -> Iterator[None]:
    """Takes back, after an error, the rotary embeddings that a constructor has entered for later models to share.

    They have no memory, with which SGLang's kernels do nothing and say nothing.
    """
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT

    before = dict(_ROPE_DICT)
    try:
        yield
    except BaseException:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(before)
        raise


@contextmanager
def sent_with_memory() -> Iterator[None]:
    """Inside, a tensor without memory is sent to another rank as one of any values, as it is in a load from disk.

    Constructors of tied models send the embedding to the last pipeline rank, before it is loaded. torch sends nothing
    of a tensor on meta and says nothing, and the other rank would wait.
    """
    import torch
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    original = GroupCoordinator.send

    def send(group: Any, tensor: torch.Tensor, dst: int | None = None) -> None:
        original(group, torch.zeros_like(tensor, device=group.device) if tensor.is_meta else tensor, dst)

    GroupCoordinator.send = send
    try:
        yield
    finally:
        GroupCoordinator.send = original


def _watch(own: Any, taken: list[Snapshot]) -> None:
    """Has the loader take a snapshot of the model between its construction and its load.

    Only of the class that is known to go through this method of its own, once, with the model that it returns.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if type(own) is not DefaultModelLoader:
        return
    load = own.load_weights_and_postprocess

    def watched(model: torch.nn.Module, weights: Any, target_device: Any) -> None:
        taken.append(Snapshot.of(model))
        load(model, weights, target_device)

    own.load_weights_and_postprocess = watched


def _refuse_form(path: Path) -> None:
    """`EngineError` for a form that SGLang looks for under ``--load-format auto`` alone, and not under this format."""
    if path.is_file():
        raise EngineError(problem=f"{path} is one file; start with --load-format gguf, or give a folder of safetensors")
    files = [file.name for file in path.glob("*.safetensors")] if path.is_dir() else []
    if files and all(name.startswith("consolidated") for name in files):
        raise EngineError(problem=f"{path} has Mistral's own files only ({files[0]}); start with --load-format mistral")


def _device(device_config: Any) -> str:
    """By torch's name, such as "cuda:1"; "cuda", the current one, where SGLang has not chosen."""
    if device_config.device_type != "cuda":
        return str(device_config.device_type)
    gpu = device_config.gpu_id
    return f"cuda:{gpu}" if gpu is not None and gpu >= 0 else "cuda"


def _capability(device_config: Any) -> str | None:
    """Compute capability of the GPU, such as "9.0"; None on the host."""
    import torch

    if device_config.device_type != "cuda" or not torch.cuda.is_available():
        return None
    return compute_capability(_device(device_config))


def _free_bytes(device_config: Any) -> int:
    """Free memory of a GPU, in bytes; 0 on the host, where nothing is sized by it."""
    import torch

    if device_config.device_type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(_device(device_config))
    return int(free)
