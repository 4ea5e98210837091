"""What SGLang's plug-in entry point runs, and what must not happen to weights that other engines share.

SGLang calls `register` in every process before it reads its command line, logs what goes wrong in it, and goes on. So
nothing here may be relied on to have worked:

- without `register` there is no load format weightcached: SGLang refuses its name;
- without the hook on `LoadConfig` SGLang refuses the name when it is about to load;
- the hooks that keep SGLang from writing into shared weights are mounted by the loader, in the process that has the
  weights, and each is called to see that it is there. `EngineError` if one is not: nothing is loaded then.
"""

from __future__ import annotations

import importlib.metadata
import logging
import pkgutil
import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import EngineError
from . import api

if TYPE_CHECKING:
    import torch

    from ...client.weights import Weights

FORMAT = "weightcached"
_log = logging.getLogger(__name__)
_PROBE = object()  # in place of an object of SGLang's: the hook that is called with it says so
# Models that run from shared memory, and what holds it.
_sharing: weakref.WeakKeyDictionary[torch.nn.Module, Weights] = weakref.WeakKeyDictionary()


class _Probed(Exception):
    """A hook has been reached by the probe."""


def register() -> None:
    """The entry point of the group ``sglang.srt.plugins``: makes ``--load-format weightcached`` known to SGLang.

    On a version that it is not made for, it logs an error that says so, and the format stays unknown.
    """
    version = importlib.metadata.version("sglang")
    if (problem := unsupported(version)) is not None:
        _log.error("%s", problem)
        return
    if _numbers(version) > _numbers(api.VERSIONS[-1]):
        _log.warning(
            "weightcached was compared with SGLang %s to %s, this is %s", api.OLDEST, api.VERSIONS[-1], version
        )
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import add_load_format_choices
    except ImportError as error:
        _log.error("SGLang %s lacks what --load-format weightcached needs: %s", version, error)
        return
    add_load_format_choices([FORMAT])
    HookRegistry.register(api.FORMAT_CHECK, _take_format, HookType.BEFORE)


def unsupported(version: str) -> str | None:
    """Why the plug-in is not for this version of SGLang, in one sentence; None if it is."""
    if _numbers(version) >= _numbers(api.OLDEST):
        return None
    return (
        f"--load-format weightcached needs SGLang {api.OLDEST} or later, this is {version}: without its "
        "preloaded_weights_bytes the KV cache would be sized as if the cached weights were not there"
    )


def share(model: torch.nn.Module, weights: Weights) -> None:
    """From now on `model` runs from `weights`, which are kept as long as it lives; nothing may write them."""
    _sharing[model] = weights


def shared() -> list[Weights]:
    """Weights that models of this process run from, and that other engines may use too."""
    return list(_sharing.values())


def mount_guards() -> None:
    """Hooks SGLang's ways to change or free weights, and makes sure that each hook is what SGLang will call.

    `EngineError` names one that is not, for example since another plug-in has replaced the same function before.
    Idempotent.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    hooks: dict[str, tuple[Callable[..., Any], Any]] = {}
    hooks.update(dict.fromkeys(api.GUARDS, (_refuse, HookType.BEFORE)))
    hooks.update(dict.fromkeys(api.SOFT_GUARDS, (_refuse_softly, HookType.AROUND)))
    if _numbers(importlib.metadata.version("sglang")) >= _numbers(api.LATE_GUARD_SINCE):
        hooks[api.LATE_GUARD] = (_refuse, HookType.BEFORE)
    missing = [target for target in hooks if not _is_hooked(target)]
    for target in missing:
        hook, kind = hooks[target]
        HookRegistry.register(target, hook, kind, source=HookSource(plugin_name=FORMAT, dist_name=FORMAT))
    if missing:
        HookRegistry.apply_hooks()
    for target in missing:
        if not _is_hooked(target):
            raise EngineError(
                problem=f"the hook on {target} is not in place, so SGLang could write into weights that other engines "
                "use; look for 'Failed to apply hooks' in its log and for other plug-ins (SGLANG_PLUGINS chooses them)"
            )


def _is_hooked(target: str) -> bool:
    """Whether a call of the function reaches this module's hook."""
    parent, _, name = target.rpartition(".")
    try:
        function = getattr(pkgutil.resolve_name(parent), name)
        function(_PROBE, "probe")
    except _Probed:
        return True
    # It is not there, or it is SGLang's own, which is given an object of no kind.
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        _log.debug("%s is not hooked: %s", target, error)
    return False


def _take_format(config: Any) -> None:
    """Before `LoadConfig` checks its format: a class in the name's place, which SGLang makes the loader from."""
    if isinstance(config.load_format, str) and config.load_format.lower() == FORMAT:
        from .loader import loader_class

        config.load_format = loader_class()


def _refuse(updater: Any, operation: str = "a weight update", *_: Any, **__: Any) -> None:
    """Before SGLang changes or frees weights: `EngineError` if other engines may use them."""
    if updater is _PROBE:
        raise _Probed
    if shared():
        raise EngineError(problem=_refusal(operation))


def _refuse_softly(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around an update that reports its failure: refused, the engine goes on with the weights that it has."""
    if updater is _PROBE:
        raise _Probed
    if shared():
        problem = _refusal(original.__name__)
        _log.error("%s", problem)
        return False, problem
    return original(updater, *args, **kwargs)


def _refusal(operation: str) -> str:
    """The sentence for what would change shared weights."""
    names = ", ".join(sorted({weights.manifest.model for weights in shared()}))
    return (
        f"{operation} is refused: the weights of this engine ({names}) are cached memory that other engines use; start "
        """with --load-format auto, or with '{"mode": "copy"}' in --model-loader-extra-config, to change them"""
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Of a release: 0.5.19 is older than 0.5.20, and 0.5.20.post1 is as 0.5.20."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()
