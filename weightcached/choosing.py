"""Which devices a model gets that names none: those with the most free memory. Pure, but for `checkpoint_bytes`.

Where memory is equal the config's order decides, so that a start, a reload and `weightcached check` decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .config import ModelConfig
from .devices import is_host, memory_pool


def choose(
    models: Iterable[ModelConfig],
    devices: Sequence[str],
    free: Mapping[str, int],
    kept: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> dict[str, tuple[str, ...]]:
    """The devices, in rank order, of each model that has more to choose from than it has ranks.

    `devices` are those of the service in the config's order; candidates are those of the first one's kind. `free`: the
    bytes of each. `kept`: where models are cached, which do not move. `sizes`: bytes of each model, so that models that
    are yet to be preloaded are not all put where there is most room now.
    """
    models = list(models)
    candidates = [name for name in devices if is_host(name) == is_host(devices[0])]
    left = {memory_pool(name): free.get(name, 0) for name in devices}

    def take(model: ModelConfig, where: Sequence[str]) -> None:
        if model.preload and model.name not in kept:
            for name in where:
                pool = memory_pool(name)
                left[pool] = left.get(pool, 0) - sizes.get(model.name, 0) // len(where)

    for model in models:
        take(model, model.devices or ())
    chosen = {}
    for model in models:
        ranks = len(model.ranks_here)
        if model.devices is not None or len(candidates) <= ranks:
            continue
        before = kept.get(model.name, ())
        if len(before) == ranks and set(before) <= set(candidates):
            chosen[model.name] = before
            continue
        freest = sorted(range(len(candidates)), key=lambda number: (-left[memory_pool(candidates[number])], number))
        chosen[model.name] = tuple(candidates[number] for number in sorted(freest[:ranks]))
        take(model, chosen[model.name])
    return chosen


def checkpoint_bytes(path: Path) -> int:
    """About what a checkpoint takes: the bytes of its files, 0 if it is not there. Blocks as long as its disk takes."""
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files)
    except OSError:  # its load says what is wrong
        return 0
