"""Other slicings of a configured model, which the service loads when an engine with other parallel sizes waits for one.

Only for a model with ``on_mismatch = "reload"``. Each is a model of its own ("m.tp4"), cached beside the config's: its
load evicts what is idle if it has no room, the config's slicing among it unless that is pinned. It stays until it is
evicted, and over a restart, as everything that is cached does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..config import ModelConfig
from ..devices import is_host
from ..parallel.slicings import Sizes, parse_name
from .models import Model


def order_of(config: ModelConfig, served: Sequence[str]) -> tuple[str, ...]:
    """The devices that ranks of another slicing go to, in rank order; empty where there is to be none.

    Those that the model names, then the others that are served, of its kind. An engine of N ranks has the first N. None
    of a model whose ranks are on several nodes: those would have to agree first.
    """
    if config.on_mismatch != "reload" or not served or len(config.ranks_here) < config.parallel.world:
        return ()
    named = [name for name in config.devices or () if name in served]
    host = is_host((named or served)[0])
    return tuple(dict.fromkeys([*named, *(name for name in served if is_host(name) == host)]))


def slicing(name: str, models: Mapping[str, Model]) -> ModelConfig | None:
    """What `name` means, if it is a slicing of one of the models that the config lets the service make."""
    parsed = parse_name(name)
    model = models.get(parsed[0]) if parsed else None
    if parsed is None or model is None or name in models:
        return None
    sizes = parsed[1]
    if sizes.world > len(model.order) or sizes == sizes_of(model.config) or sizes.name(model.name) != name:
        return None
    layers = model.config.pipeline_layers
    return model.config.model_copy(
        update={
            "name": name,
            "preload": False,
            "pin": False,
            "on_mismatch": "refuse",
            "tensor_parallel": sizes.tensor,
            "pipeline_parallel": sizes.pipeline,
            "data_parallel": sizes.data,
            "pipeline_layers": layers if isinstance(layers, str) else "vllm",
            "devices": model.order[: sizes.world],
        }
    )


def kept(models: Mapping[str, Model], previous: Iterable[Model], cached: Iterable[str]) -> Iterator[ModelConfig]:
    """The slicings that go on when the config is read: of those before, what is on its way, and what is `cached`."""
    coming = [model.name for model in previous if model.state in ("queued", "loading")]
    for name in dict.fromkeys([*coming, *sorted(cached)]):
        if (config := slicing(name, models)) is not None:
            yield config


def slicings_of(names: Iterable[str], models: Mapping[str, Model]) -> list[str]:
    """Which of the models that are cached are slicings of those named."""
    wanted = set(names)
    return [name for name, model in models.items() if model.complete and (parse_name(name) or ("",))[0] in wanted]


def sizes_of(config: ModelConfig) -> Sizes:
    """The config's own slicing."""
    return Sizes(config.data_parallel, config.pipeline_parallel, config.tensor_parallel)
